// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Tensors whose memory comes as it is written to: a cache takes what its text has filled, whatever its capacity.

#include <string_view>

#include "kvkeep/core/tensor.h"

namespace kvkeep::lm::detail {

/// Zeros in host memory. Throws: InvalidArgument if the machine does not have so much address space.
[[nodiscard]] kvkeep::Tensor lazy_zeros(const Shape& sizes, Dtype dtype);

/// Throws InvalidArgument if `bytes` more, with all that lives already, would be above the memory that the machine had
/// before the first of them: "what takes ...".
void require_room(std::string_view operation, std::string_view what, double bytes);

}  // namespace kvkeep::lm::detail
