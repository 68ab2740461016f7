// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A CUDA stream by name only, so that callers of launchers need no CUDA header.

struct CUstream_st;

namespace kvkeep::cuda {

using Stream = CUstream_st*;

}  // namespace kvkeep::cuda
