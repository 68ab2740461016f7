#pragma once
/// What the scoring kernels read: rows, limits and queries of an event, all on the device. No LibTorch in here.

#include <cstddef>
#include <cstdint>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/row_limit.h"
#include "kvkeep/core/slot.h"

namespace kvkeep::cuda {

/// How a component of a key or query is stored. fp8 keys are e4m3 with one f32 scale per slot, in Row::key_scales.
enum class Element : std::uint8_t { f32, f16, bf16, fp8_e4m3 };

/// The newest queries of one (layer, sequence), oldest first, in a ring of `ring` tokens that starts at token `begin`:
/// kvkeep::QueryView without its dtype.
struct QueryWindow {
  const std::byte* data = nullptr;
  std::int64_t token_stride = 0;            ///< bytes
  std::int64_t head_stride = 0;             ///< bytes
  const std::int32_t* positions = nullptr;  ///< i32 [ring] logical, ascending from `begin` on
  std::int32_t ring = 0;                    ///< tokens the ring can hold
  std::int32_t begin = 0;                   ///< ring index of the oldest token
  std::int32_t count = 0;                   ///< tokens held

  /// Ring index of the i-th oldest token.
  [[nodiscard]] KVKEEP_HD std::int32_t index(std::int32_t i) const { return ring == 0 ? 0 : (begin + i) % ring; }
  [[nodiscard]] KVKEEP_HD const std::byte* at(std::int32_t i, std::int32_t head) const {
    return data + index(i) * token_stride + head * head_stride;
  }
  [[nodiscard]] KVKEEP_HD std::int32_t position(std::int32_t i) const { return positions[index(i)]; }
};

/// Rows of all layers and sequences of an event. Pointers are to the device; the host knows the rest without asking it.
struct EvidenceArguments {
  const Row* rows = nullptr;             ///< [count], the rows of a (layer, sequence) next to each other
  const RowLimit* limits = nullptr;      ///< [count]; null: every row is due. Nothing is written for a row that is not
  const QueryWindow* queries = nullptr;  ///< [count / kv_heads]
  std::int32_t count = 0;
  std::int32_t longest = 0;  ///< slots of the longest row, or more
  std::int32_t kv_heads = 1;
  std::int32_t group = 1;  ///< query heads per KV head
  std::int32_t dim = 0;    ///< of keys and queries, 1 to 256
  Element keys = Element::f32;
  Element query = Element::f32;  ///< f32, f16 or bf16
  float scale = 1;               ///< of the softmax

  [[nodiscard]] KVKEEP_HD bool due(std::int64_t row) const { return limits == nullptr || limits[row].due; }
  [[nodiscard]] KVKEEP_HD std::int32_t query_heads() const { return kv_heads * group; }
};

}  // namespace kvkeep::cuda
