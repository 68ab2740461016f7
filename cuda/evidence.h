// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What the scoring kernels read: rows, limits and queries of an event, all on the device. No LibTorch in here.

#include <cstdint>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/query_view.h"
#include "kvkeep/core/slot.h"

namespace kvkeep::cuda {

/// How a component of a key, value or query is stored. Keys and values of 8 bits have one f32 scale per slot, in
/// Row::key_scales and value_scales: a component is the stored number times the scale. i8 is symmetric, -128 to 127.
inline constexpr std::int32_t kMostDim = 256;  ///< numbers of a head that kernels read

enum class Element : std::uint8_t { f32, f16, bf16, f8_e4m3, f8_e5m2, i8 };

[[nodiscard]] KVKEEP_HD constexpr bool is_8bit(Element element) { return element >= Element::f8_e4m3; }

[[nodiscard]] constexpr const char* name_of(Element element) {
  constexpr const char* kNames[] = {"f32", "f16", "bf16", "f8_e4m3", "f8_e5m2", "i8"};
  return kNames[static_cast<int>(element)];
}

/// Rows of all layers and sequences of an event. Pointers are to the device; the host knows the rest without asking it.
struct EvidenceArguments {
  const Row* rows = nullptr;           ///< [count], the rows of a (layer, sequence) next to each other
  const RowLimit* limits = nullptr;    ///< [count]; null: every row is due. Nothing is written for a row that is not
  const QueryView* queries = nullptr;  ///< [count / kv_heads]; `query` is their dtype
  const RopeView* ropes = nullptr;     ///< [count / kv_heads] of their layers; null: nothing turns
  std::int32_t count = 0;
  std::int32_t longest = 0;  ///< slots of the longest row, or more
  std::int32_t kv_heads = 1;
  std::int32_t first_head = 0;  ///< KV heads of the model before these
  std::int32_t group = 1;       ///< query heads per KV head
  std::int32_t dim = 0;         ///< of keys and queries, 1 to 256
  Element keys = Element::f32;
  Element query = Element::f32;  ///< f32, f16 or bf16
  float scale = 1;               ///< of the softmax
  float logit_cap = 0;           ///< ModelSpec::logit_cap
  const float* sinks = nullptr;  ///< f32 [layers, Hq] sink logits, minus infinity where there is none; null: none

  [[nodiscard]] KVKEEP_HD bool due(std::int64_t row) const { return limits == nullptr || limits[row].due; }
  [[nodiscard]] KVKEEP_HD std::int32_t query_heads() const { return kv_heads * group; }
  /// Sink logits of the query heads of a row, [group]; null: none.
  [[nodiscard]] KVKEEP_HD const float* sinks_of(const Row& row) const {
    return sinks == nullptr ? nullptr : sinks + std::int64_t{row.layer} * query_heads() + row.head * group;
  }
};

}  // namespace kvkeep::cuda
