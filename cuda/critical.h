// SPDX-License-Identifier: Apache-2.0
#pragma once
/// CriticalKV on a GPU. Same contract as `kvkeep::Critical`, with values of 8 bits too.
///
/// If the output weights are f16 or bf16 and the values have the same dtype or 8 bits, products are exact and summed in
/// f32 on matrix units; else they run in f32, one chain of multiply-adds over the head dimension. v[t] differs from the
/// CPU's as an f32 sum over hidden * G terms in another order does, by about 1e-6 of itself: two slots that the second
/// stage ranks closer than that may change places. Equal values of a row get equal bits wherever they are.

#include "evidence.h"
#include "stream.h"

namespace kvkeep::cuda {

struct CriticalArguments {
  EvidenceArguments
      evidence;  ///< reads rows with their values, limits, count, longest, kv_heads and group; limits are required
  Element values = Element::f32;
  std::int32_t value_dim = 0;                ///< Dv, 1 to 256
  const void* const* projections = nullptr;  ///< [layers] W_o, contiguous [hidden, Hq * Dv]; Row::layer counts them.
                                             ///< Layers that are not cut may have anything
  Element projection = Element::f32;         ///< f32, f16 or bf16
  std::int32_t hidden = 0;
  double first_stage = 0.5;       ///< CriticalOptions::first_stage, [0, 1]
  bool matrix_unit = true;        ///< false: f32 whatever the dtypes
  std::int64_t slots_in_all = 0;  ///< sum of the rows' lengths
  const float* scores = nullptr;  ///< f32 flat, not negative
  const std::int64_t* indptr =
      nullptr;  ///< i64 [count + 1] where each row's kept slots go: min(budget, length) for a due row, all for others
  const std::int32_t* counts = nullptr;  ///< i32 [count] how many they are, if indptr has room for more (adaptive
                                         ///< heads: those of launch_adaptive_heads()); null: as many as indptr says
  std::int32_t* slots = nullptr;         ///< i32 [indptr[count]] out, ascending in each row
  void* workspace = nullptr;  ///< critical_workspace_bytes(), aligned to 32; afterwards holds f32 v[t] of the rows that
                              ///< were cut, flat
};

/// 4 bytes per slot.
[[nodiscard]] std::int64_t critical_workspace_bytes(const CriticalArguments& arguments);

/// Two launches: value sizes, one block per 128 slots (in f32 64) of a row; selection, one block per row. A value is
/// read once, the weights of a row's heads once per block. Cost: flop as on the CPU. Throws InvalidArgument for
/// head sizes outside 1 to 256, 8-bit weights, and a first stage outside [0, 1].
void launch_critical(const CriticalArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
