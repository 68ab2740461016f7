#pragma once
/// The newest queries of one sequence, per layer: what scorers need of the past. Queries, not hidden states: no
/// projection is run twice.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvkeep/core/accelerator.h"
#include "kvkeep/core/row.h"

namespace kvkeep {

/// The last `wanted` queries of every full layer. Kept across events: with stored positions the causal test stays
/// right.
class QueryRing {
 public:
  /// Tokens that can be taken back (speculative decoding) with the window still whole.
  static constexpr std::int32_t kRollback = 32;

  /// How far one layer has come.
  struct Layer {
    std::int64_t seen = 0;
    std::int64_t first = 0;   ///< token from which on the layer saw all of them
    std::int64_t oldest = 0;  ///< oldest token whose query is still here
  };

  /// What a ring holds, oldest first: to be kept elsewhere and given to a ring of the same sizes again.
  struct Held {
    ScalarType dtype = kFloat32;
    std::vector<Layer> layers = {};
    std::vector<std::int32_t> positions = {};  ///< [n] of the newest tokens that any layer holds
    std::vector<std::byte> data = {};          ///< dtype [layers, n, Hq, D]; 0 where a layer holds no query of a token
  };

  /// layers: full layers of the model. `wanted` 0 keeps nothing. With an accelerator the queries lie on its device.
  QueryRing(std::int32_t layers, std::int32_t wanted, std::int32_t query_heads, std::int32_t key_dim,
            Accelerator* accelerator = nullptr);

  /// Adds the queries of new tokens of one layer. data: [tokens, Hq, D] with strides in bytes, the D elements of a head
  /// contiguous. Requires: takes(dtype). Cost: copies at most wanted + kRollback tokens of Hq * D elements. On a device
  /// nothing is copied yet: what is to be copied is added to `arrivals`, which must be given, so that one launch serves
  /// all sequences of a step.
  void push(std::int32_t layer, const std::byte* data, ScalarType dtype, std::int64_t token_stride,
            std::int64_t head_stride, std::span<const std::int32_t> positions,
            std::vector<QueryArrival>* arrivals = nullptr);

  /// Makes sure that push() of queries of this dtype does not fail, on the host. Changes nothing that can be seen.
  void reserve(ScalarType dtype) {
    if (capacity_ > 0 && memory() == nullptr) allocate(dtype);
  }

  /// Where no queries are kept: every layer has seen as many tokens.
  void catch_up(std::int64_t seen) {
    for (Layer& layer : layers_) layer = {.seen = seen, .first = seen, .oldest = seen};
  }

  /// Tokens that one layer will not see, because they did not go on to it. What it saw before them is forgotten: the
  /// window holds queries without a gap.
  void skip(std::int32_t layer, std::int64_t tokens) {
    Layer& state = layers_[static_cast<std::size_t>(layer)];
    state.first = state.oldest = state.seen += tokens;
  }

  /// True when queries of this dtype can be pushed: any at first, then the same.
  [[nodiscard]] bool takes(ScalarType dtype) const { return memory() == nullptr || dtype == dtype_; }
  [[nodiscard]] ScalarType dtype() const { return dtype_; }

  /// The last `wanted` queries of one layer (fewer where fewer were seen).
  [[nodiscard]] QueryView view(std::int32_t layer) const;

  /// On the host: position of the newest query in view() that holds a number which is not finite. None: all are finite.
  [[nodiscard]] std::optional<std::int32_t> not_finite(std::int32_t layer) const;

  /// Tokens that one call of push() copies at most.
  [[nodiscard]] std::int32_t capacity() const { return capacity_; }

  /// Tokens a layer has seen.
  [[nodiscard]] std::int64_t seen(std::int32_t layer) const { return layers_[static_cast<std::size_t>(layer)].seen; }

  /// True when the newest `tokens` can be taken back and the window before them is still there.
  [[nodiscard]] bool can_forget(std::int64_t tokens) const;
  void forget(std::int64_t tokens);

  /// Requires: in the host's memory, and every layer has seen the same tokens where queries are kept. Cost: one copy.
  [[nodiscard]] Held held() const;
  /// Throws InvalidArgument for what no ring of these sizes holds; as it was then. Requires: in the host's memory.
  void take(const Held& held);

 private:
  void allocate(ScalarType dtype);
  [[nodiscard]] const std::byte* memory() const {
    return there_.get() != nullptr ? static_cast<const std::byte*>(there_.get())
           : data_.empty()         ? nullptr
                                   : data_.data();
  }
  [[nodiscard]] std::int64_t token_bytes() const {
    return static_cast<std::int64_t>(c10::elementSize(dtype_)) * dim_ * heads_;
  }
  /// Bytes before the positions, on a device.
  [[nodiscard]] std::int64_t data_bytes() const {
    return (static_cast<std::int64_t>(layers_.size()) * capacity_ * token_bytes() + 63) / 64 * 64;
  }

  std::int32_t wanted_, capacity_, heads_, dim_;
  Accelerator* accelerator_;
  ScalarType dtype_ = kFloat32;
  std::vector<Layer> layers_;
  std::vector<std::int32_t> positions_;  ///< [capacity], the same in every layer
  std::vector<std::byte> data_;          ///< [layers, capacity, Hq, D]; allocated at the first push
  std::vector<std::uint8_t> finite_;     ///< [layers, capacity] 1: all numbers of the query are; on the host
  DeviceMemory there_;                   ///< the same on a device, and the positions behind it
};

}  // namespace kvkeep
