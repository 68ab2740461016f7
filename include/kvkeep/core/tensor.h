#pragma once
/// The only names that kvkeep takes from LibTorch.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace kvkeep {

using Tensor = at::Tensor;
using ScalarType = c10::ScalarType;
using Device = c10::Device;

inline constexpr ScalarType kFloat32 = c10::ScalarType::Float;
inline constexpr ScalarType kFloat16 = c10::ScalarType::Half;
inline constexpr ScalarType kBFloat16 = c10::ScalarType::BFloat16;
inline constexpr ScalarType kInt32 = c10::ScalarType::Int;

/// True for the dtypes that scores can be read from: f32, f16, bf16.
inline bool is_scorable(ScalarType dtype) { return dtype == kFloat32 || dtype == kFloat16 || dtype == kBFloat16; }

}  // namespace kvkeep
