// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The newest queries of one sequence, per layer: all that scorers need from the past. Queries, not hidden states, so
/// that no projection runs twice.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/machine_memory.h"
#include "kvkeep/core/row.h"
#include "kvkeep/core/tensor.h"

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
  /// The same queries in memory of their own. On a device it only launches a copy.
  QueryRing(const QueryRing& other);
  QueryRing(QueryRing&&) noexcept = default;
  QueryRing& operator=(QueryRing&&) noexcept = default;

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

  /// True if the newest `tokens` can be taken back and the window before them is still held, or nobody will read it.
  [[nodiscard]] bool can_forget(std::int64_t tokens) const;
  /// The most for which that is so, and for every number below.
  [[nodiscard]] std::int64_t most_forgettable() const;
  void forget(std::int64_t tokens);

  /// Requires: if queries are kept, every layer has seen the same tokens. On a device: waits. Cost: one copy.
  [[nodiscard]] Held held() const;
  /// Throws InvalidArgument, leaving the ring unchanged, for contents that no ring of these sizes can hold.
  void take(const Held& held);

 private:
  [[nodiscard]] std::int64_t forgettable(const Layer& layer) const;
  void allocate(Dtype dtype);
  /// Bytes of all that allocate() takes.
  [[nodiscard]] std::int64_t all_bytes() const {
    const std::int64_t normalisers = !memory_->is_host() ? std::ssize(layers_) * capacity_ * heads_ : 0;
    return data_bytes() + (capacity_ + normalisers) * 4;
  }
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

inline QueryRing::QueryRing(std::int32_t layers, std::int32_t wanted, std::int32_t query_heads, std::int32_t key_dim,
                            MachineMemory& memory)
    : wanted_(wanted),
      capacity_(capacity_of(wanted)),
      heads_(query_heads),
      dim_(key_dim),
      memory_(&memory),
      layers_(static_cast<std::size_t>(layers)) {}

inline void QueryRing::allocate(Dtype dtype) {
  dtype_ = dtype;
  held_ = memory_->allocate(all_bytes());
}

inline QueryRing::QueryRing(const QueryRing& other)
    : wanted_(other.wanted_),
      capacity_(other.capacity_),
      heads_(other.heads_),
      dim_(other.dim_),
      memory_(other.memory_),
      dtype_(other.dtype_),
      layers_(other.layers_) {
  if (other.held_ == nullptr) return;
  allocate(dtype_);
  memory_->copy_rows(held_.get(), all_bytes(), other.held_.get(), all_bytes(), all_bytes(), 1);
}

inline void QueryRing::place(std::int32_t layer, std::int32_t first, std::span<const std::int32_t> positions,
                             std::vector<QueryArrival>& arrivals) const {
  if (capacity_ == 0) return;
  const std::int64_t seen = this->seen(layer);
  const auto tokens = static_cast<std::int32_t>(positions.size());
  const std::size_t earlier = arrivals.size();  // of other layers and sequences
  for (std::int32_t i = std::max(0, tokens - capacity_); i < tokens; ++i) {
    const std::int32_t position = positions[static_cast<std::size_t>(i)];
    QueryArrival* last = arrivals.size() == earlier ? nullptr : &arrivals.back();
    if (last != nullptr && last->position + last->tokens == position)
      ++last->tokens;
    else
      arrivals.push_back(
          {.first = first + i,
           .ring = data() + layer * capacity_ * token_bytes(),
           .positions = this->positions(),
           .capacity = capacity_,
           .at = static_cast<std::int32_t>((seen + i) % capacity_),
           .tokens = 1,
           .position = position,
           .normalisers = normalisers() == nullptr ? nullptr : normalisers() + layer * capacity_ * heads_});
  }
}

inline void QueryRing::push(std::int32_t layer, const std::byte* data, Dtype dtype, std::int64_t token_stride,
                            std::int64_t head_stride, std::span<const std::int32_t> positions) {
  reserve(dtype);
  std::vector<QueryArrival> arrivals;
  place(layer, 0, positions, arrivals);
  memory_->push_queries(arrivals, {.from = data,
                                   .heads = heads_,
                                   .head_bytes = element_size(dtype) * dim_,
                                   .token_stride = token_stride,
                                   .head_stride = head_stride});
  advance(layer, static_cast<std::int64_t>(positions.size()));
}

inline QueryView QueryRing::view(std::int32_t layer) const {
  const Layer& state = layers_[static_cast<std::size_t>(layer)];
  if (held_ == nullptr) return {};
  const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(wanted_, state.seen - state.oldest));
  return {.data = data() + layer * capacity_ * token_bytes(),
          .dtype = dtype_,
          .token_stride = token_bytes(),
          .head_stride = token_bytes() / heads_,
          .positions = positions(),
          .ring = capacity_,
          .begin = static_cast<std::int32_t>((state.seen - count) % capacity_),
          .count = count,
          .normalisers = normalisers() == nullptr ? nullptr : normalisers() + layer * capacity_ * heads_,
          .normalised = normalisers() == nullptr ? 0
                                                 : static_cast<std::int32_t>(std::min<std::int64_t>(
                                                       count, state.seen - state.normalised_from))};
}

inline std::optional<std::int32_t> QueryRing::not_finite(std::int32_t layer) const {
  if (!memory_->is_host()) return {};
  const QueryView window = view(layer);
  for (std::int32_t i = window.count - 1; i >= 0; --i)
    if (!all_finite(window.at(i, 0), dtype_, std::int64_t{heads_} * dim_)) return window.position(i);
  return {};
}

inline bool QueryRing::can_forget(std::int64_t tokens) const {
  return std::ranges::all_of(
      layers_, [&](const Layer& l) { return tokens <= forgettable(l) || (l.unread && l.seen - tokens < l.first); });
}

inline std::int64_t QueryRing::most_forgettable() const {
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (const Layer& l : layers_) most = std::min(most, forgettable(l));
  return most;
}

/// Of one layer. While it holds all that it has seen, any window is as it was. Then `wanted` must be left.
inline std::int64_t QueryRing::forgettable(const Layer& l) const {
  if (l.oldest == l.first) return l.unread ? l.seen : l.seen - l.first;
  return std::max<std::int64_t>(0, l.seen - l.oldest - wanted_);
}

inline void QueryRing::forget(std::int64_t tokens) {
  for (Layer& l : layers_) {
    l.seen -= tokens;
    l.first = std::min(l.first, l.seen);
    l.oldest = std::min(l.oldest, l.seen);
    l.normalised_from = std::min(l.normalised_from, l.seen);
  }
}

inline QueryRing::Held QueryRing::held() const {
  Held held{.dtype = dtype_, .layers = layers_};
  if (held_ == nullptr) return held;
  std::vector<std::byte> image(static_cast<std::size_t>(held_bytes()));
  memory_->read(image.data(), held_.get(), held_bytes());
  std::vector<std::int32_t> places(static_cast<std::size_t>(capacity_));
  std::memcpy(places.data(), image.data() + data_bytes(), places.size() * 4);
  std::int64_t count = 0;
  for (const Layer& l : layers_) count = std::max(count, l.seen - l.oldest);
  const std::int64_t seen = layers_.front().seen, bytes = token_bytes();
  for (std::int64_t token = seen - count; token < seen; ++token)
    held.positions.push_back(places[static_cast<std::size_t>(token % capacity_)]);
  held.data.resize(layers_.size() * static_cast<std::size_t>(count * bytes));
  for (std::size_t l = 0; l < layers_.size(); ++l)
    for (std::int64_t token = layers_[l].oldest; token < seen; ++token)
      std::memcpy(held.data.data() + (static_cast<std::int64_t>(l) * count + token - (seen - count)) * bytes,
                  image.data() + (static_cast<std::int64_t>(l) * capacity_ + token % capacity_) * bytes,
                  static_cast<std::size_t>(bytes));
  return held;
}

inline void QueryRing::take(const Held& held) {
  const auto count = static_cast<std::int64_t>(held.positions.size()), bytes = element_size(held.dtype) * dim_ * heads_;
  KVKEEP_REQUIRE(
      held.layers.size() == layers_.size() && count <= capacity_ &&
          static_cast<std::int64_t>(held.data.size()) == static_cast<std::int64_t>(layers_.size()) * count * bytes,
      "query ring: ", held.layers.size(), " layers with ", held.data.size(), " bytes of ", count, " queries; allowed ",
      layers_.size(), " layers, each with at most ", capacity_, " queries of ", bytes, " bytes");
  const std::int64_t seen = held.layers.front().seen;
  for (const Layer& l : held.layers)
    KVKEEP_REQUIRE(capacity_ == 0 || (l.seen == seen && 0 <= l.first && l.first <= l.oldest && l.oldest <= seen &&
                                      seen - l.oldest <= count && count <= seen),
                   "query ring: a layer has seen ", l.seen, " tokens, all from ", l.first, " on, and holds those from ",
                   l.oldest, " on; allowed ", seen, " tokens, and at most the ", count, " newest of them");
  layers_ = held.layers;
  for (Layer& l : layers_) l.normalised_from = l.seen;
  if (count == 0) return;
  allocate(held.dtype);
  std::vector<std::byte> image(static_cast<std::size_t>(held_bytes()));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t place = (seen - count + i) % capacity_;
    std::memcpy(image.data() + data_bytes() + place * 4, &held.positions[static_cast<std::size_t>(i)], 4);
    for (std::int64_t l = 0; l < static_cast<std::int64_t>(layers_.size()); ++l)
      std::memcpy(image.data() + (l * capacity_ + place) * bytes, held.data.data() + (l * count + i) * bytes,
                  static_cast<std::size_t>(bytes));
  }
  memory_->write(held_.get(), image.data(), held_bytes());
}

}  // namespace kvkeep
