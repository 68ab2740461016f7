// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Tensors of whole numbers in what `record` and a replayed decoder write.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "kvlab/tensor.h"

namespace kvkeep::lm {

/// i32 `shape`, a copy of `values`.
inline Tensor i32_tensor(std::span<const std::int32_t> values, at::IntArrayRef shape) {
  Tensor t = at::empty(shape, at::TensorOptions(at::kInt));
  std::copy(values.begin(), values.end(), t.mutable_data_ptr<std::int32_t>());
  return t;
}

}  // namespace kvkeep::lm
