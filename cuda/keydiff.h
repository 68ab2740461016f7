// SPDX-License-Identifier: Apache-2.0
#pragma once
/// KeyDiff on a GPU. Same contract as `kvkeep::KeyDiff`.

#include "evidence.h"
#include "stream.h"

namespace kvkeep::cuda {

struct KeyDiffArguments {
  EvidenceArguments evidence;
  float* scores = nullptr;    ///< f32 [slots] at Row::first; holds the norms in between
  void* workspace = nullptr;  ///< keydiff_workspace_bytes(), aligned to 32
};

/// 8 D bytes for every (row, chunk of 1024 slots of the longest row), and 4 (D + 1) for every row.
[[nodiscard]] std::int64_t keydiff_workspace_bytes(const EvidenceArguments& evidence);

/// The mean direction is added up in fp32 over 32 keys, in f64 over a chunk and over the chunks in ascending order: its
/// bits depend only on the row. Cost: two passes over the keys. Throws InvalidArgument for a head size outside 1
/// to 256.
void launch_keydiff(const KeyDiffArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
