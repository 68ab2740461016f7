// SPDX-License-Identifier: Apache-2.0
#pragma once
/// R-KV on a GPU. Same contract as `kvkeep::Rkv`.

#include "evidence.h"
#include "kvkeep/score/rkv.h"
#include "kvkeep/score/window.h"
#include "stream.h"

namespace kvkeep::cuda {

struct RkvArguments {
  EvidenceArguments evidence;
  const RowWindow* windows = nullptr;  ///< [count], of launch_prepare with `options.window`, strict
  const float* queries = nullptr;      ///< f32 [groups, Hq, options.window, D] from launch_prepare
  RkvOptions options = {};
  std::int64_t slots = 0;     ///< sum of all lengths
  float* scores = nullptr;    ///< f32 [slots] at Row::first; holds the means in between
  void* workspace = nullptr;  ///< rkv_workspace_bytes(), aligned to 32
};

/// window_attention_workspace_bytes(), 16 bytes per slot, and 8 D for every (row, chunk of 1024 slots of the longest
/// row). Nothing of size T * T exists.
[[nodiscard]] std::int64_t rkv_workspace_bytes(const RkvArguments& arguments);

/// f32 keys are multiplied in f32, one chain of multiply-adds over the head dimension as on the CPU; others on matrix
/// units, where every product of two 16-bit numbers is exact and their sum is f32, which may be cut off instead of
/// rounded: if a cosine is nearer to `similarity` than about 1e-6, CPU and GPU may decide differently. Cosines are
/// added as integers of 2^-32, so the order of additions does not matter: a row's bits depend only on the row.
///
/// Cost: launch_history_attention; two passes over the keys; the search for the newest resembling keys. A block
/// searches for 512 keys at a time, from the newest key down, and compares those that have no partner yet with 128 keys
/// at a time: about one more pass if most keys have one among the newest, length^2 products of D per row if none has.
/// Launches: 5. Throws InvalidArgument for a head size outside 1 to 256, a pool that is not odd or less than 1, and a
/// similarity outside [0, 1].
void launch_rkv(const RkvArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
