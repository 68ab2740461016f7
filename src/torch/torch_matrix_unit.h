// SPDX-License-Identifier: Apache-2.0
#pragma once
/// LibTorch's products of bf16 matrices on AMX.

#include "kvkeep/simd/expected_lanes.h"

namespace kvkeep {

/// Null if the machine has none, or this LibTorch is too old to have one.
[[nodiscard]] const cpu::MatrixUnit* torch_matrix_unit();

}  // namespace kvkeep
