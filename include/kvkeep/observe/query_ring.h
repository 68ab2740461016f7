#pragma once
/// The newest queries of one sequence, per layer: all that scorers need from the past. Queries, not hidden states, so
/// that no projection runs twice.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvkeep/core/machine_memory.h"
#include "kvkeep/core/row.h"

namespace kvkeep {

/// The last `wanted` queries of every full layer. Kept across events: because positions are stored, the causal test
/// stays correct.
class QueryRing {
 public:
  /// Tokens that can be taken back (speculative decoding) while the window stays complete.
  static constexpr std::int32_t kRollback = 32;

  /// Progress of one layer.
  struct Layer {
    std::int64_t seen = 0;
    std::int64_t first = 0;            ///< the layer has seen every token from this one on
    std::int64_t oldest = 0;           ///< oldest token whose query is still held
    bool unread = false;               ///< nobody reads the queries before `first`, which were not given
    std::int64_t normalised_from = 0;  ///< every token from this one on has its log-sum-exp
  };

  /// Contents of a ring, oldest first: for storing elsewhere and restoring into a ring of the same sizes. Log-sum-exps
  /// are not among them: events do without.
  struct Held {
    Dtype dtype = Dtype::f32;
    std::vector<Layer> layers = {};
    std::vector<std::int32_t> positions = {};  ///< [n] of the newest tokens that any layer holds
    std::vector<std::byte> data = {};  ///< dtype [layers, n, Hq, D]; 0 for tokens whose query a layer does not hold
  };

  /// `layers`: full layers of the model. With `wanted` 0 the ring keeps nothing. The queries are in `memory`, which
  /// must outlive the ring.
  QueryRing(std::int32_t layers, std::int32_t wanted, std::int32_t query_heads, std::int32_t key_dim,
            MachineMemory& memory = host_memory());

  /// Adds the queries of new tokens of one layer. data: [tokens, Hq, D] with strides in bytes, the D elements of a head
  /// contiguous. Requires: takes(dtype). Cost: copies at most wanted + kRollback tokens of Hq * D elements.
  void push(std::int32_t layer, const std::byte* data, Dtype dtype, std::int64_t token_stride, std::int64_t head_stride,
            std::span<const std::int32_t> positions);
  /// push() in two parts. Where the queries of new tokens of one layer go, the `first` of a step and those after it:
  /// appended to `arrivals` for MachineMemory::push_queries(), so that one call serves all sequences. Requires:
  /// reserve().
  void place(std::int32_t layer, std::int32_t first, std::span<const std::int32_t> positions,
             std::vector<QueryArrival>& arrivals) const;
  /// From then on view() shows them. `normalised`: with their log-sum-exps.
  void advance(std::int32_t layer, std::int64_t tokens, bool normalised = false) {
    Layer& state = layers_[static_cast<std::size_t>(layer)];
    state.seen += tokens;
    state.oldest = std::max(state.oldest, state.seen - capacity_);
    if (!normalised) state.normalised_from = state.seen;
  }
  /// Slots are dropped: queries that are held no longer see what their log-sum-exps are over.
  void forget_normalisers() {
    for (Layer& layer : layers_) layer.normalised_from = layer.seen;
  }

  /// Ensures that push() of queries of this dtype cannot fail, and place() only where `arrivals` has no room for
  /// capacity() more. Changes nothing visible.
  void reserve(Dtype dtype) {
    if (capacity_ > 0 && held_ == nullptr) allocate(dtype);
  }

  /// If no queries are kept: sets the number of tokens that every layer has seen.
  void catch_up(std::int64_t seen) {
    for (Layer& layer : layers_) layer = {.seen = seen, .first = seen, .oldest = seen, .normalised_from = seen};
  }

  /// Skips tokens that one layer will not see, because they did not continue to it. Forgets what it saw before them:
  /// the window holds queries without a gap.
  void skip(std::int32_t layer, std::int64_t tokens) {
    Layer& state = layers_[static_cast<std::size_t>(layer)];
    state.first = state.oldest = state.normalised_from = state.seen += tokens;
  }

  /// Skips tokens whose queries nobody will read. They can be taken back like others.
  void skip_unread(std::int32_t layer, std::int64_t tokens) {
    skip(layer, tokens);
    layers_[static_cast<std::size_t>(layer)].unread = true;
  }

  /// Tokens in the window of one layer, the newest `wanted`, that were skipped as unread.
  [[nodiscard]] std::int64_t unread(std::int32_t layer) const {
    const Layer& state = layers_[static_cast<std::size_t>(layer)];
    return state.unread ? std::max<std::int64_t>(0, state.first - std::max<std::int64_t>(0, state.seen - wanted_)) : 0;
  }

  /// True if queries of this dtype can be pushed: any at first, then the same one.
  [[nodiscard]] bool takes(Dtype dtype) const { return held_ == nullptr || dtype == dtype_; }
  [[nodiscard]] Dtype dtype() const { return dtype_; }

  /// The last `wanted` queries of one layer (fewer if it has seen fewer).
  [[nodiscard]] QueryView view(std::int32_t layer) const;

  /// On the host: position of the newest query in view() with a number that is not finite. Empty: all are finite. Cost:
  /// one pass over the queries in view().
  [[nodiscard]] std::optional<std::int32_t> not_finite(std::int32_t layer) const;

  /// The most tokens that one call of push() copies.
  [[nodiscard]] std::int32_t capacity() const { return capacity_; }

  /// The same for any ring of `wanted` queries.
  [[nodiscard]] static std::int32_t capacity_of(std::int32_t wanted) { return wanted == 0 ? 0 : wanted + kRollback; }

  /// From the first layer of any ring of these sizes to its n-th.
  [[nodiscard]] static LayerOffset offset_of(std::int32_t n, std::int32_t wanted, std::int64_t token_bytes,
                                             std::int32_t heads) {
    const std::int64_t tokens = std::int64_t{n} * capacity_of(wanted);
    return {tokens * token_bytes, tokens * heads};
  }

  /// Tokens a layer has seen.
  [[nodiscard]] std::int64_t seen(std::int32_t layer) const { return layers_[static_cast<std::size_t>(layer)].seen; }

  /// True if the newest `tokens` can be taken back and the window before them is still held.
  [[nodiscard]] bool can_forget(std::int64_t tokens) const;
  void forget(std::int64_t tokens);

  /// Requires: if queries are kept, every layer has seen the same tokens. On a device: waits. Cost: one copy.
  [[nodiscard]] Held held() const;
  /// Throws InvalidArgument, leaving the ring unchanged, for contents that no ring of these sizes can hold.
  void take(const Held& held);

 private:
  void allocate(Dtype dtype);
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(held_.get()); }
  [[nodiscard]] std::int32_t* positions() const {
    return static_cast<std::int32_t*>(static_cast<void*>(data() + data_bytes()));
  }
  [[nodiscard]] std::int64_t token_bytes() const { return element_size(dtype_) * dim_ * heads_; }
  /// [layers, capacity, Hq] if the machine reads them; else null.
  [[nodiscard]] float* normalisers() const {
    return !memory_->is_host() ? static_cast<float*>(static_cast<void*>(positions() + capacity_)) : nullptr;
  }
  /// Bytes that hold queries and positions.
  [[nodiscard]] std::int64_t held_bytes() const { return data_bytes() + capacity_ * std::int64_t{4}; }
  /// Bytes before the positions.
  [[nodiscard]] std::int64_t data_bytes() const {
    return (static_cast<std::int64_t>(layers_.size()) * capacity_ * token_bytes() + 63) / 64 * 64;
  }

  std::int32_t wanted_, capacity_, heads_, dim_;
  MachineMemory* memory_;
  Dtype dtype_ = Dtype::f32;
  std::vector<Layer> layers_;
  DeviceMemory
      held_;  ///< [layers, capacity, Hq, D] queries, then i32 [capacity] positions, the same in every layer;
              ///< and f32 [layers, capacity, Hq] log-sum-exps if the machine reads them; allocated at the first push
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/observe/query_ring-inl.h"
#endif
