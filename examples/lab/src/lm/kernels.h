// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The arithmetic of the decoder, vectorised for the machine it runs on. Plain pointers; one thread each; the caller
/// splits the work.
///
/// Law of the order: every output is one sum whose order depends only on the length of the sum, never on how many rows
/// or vectors share a call. So a caller may split and join calls freely and gets the same bits.

#include <cstdint>

#include "kvkeep/io/model_config.h"
#include "kvlab/tensor.h"

namespace kvkeep::lm::detail {

/// Rows of f32, f16 or bf16 numbers; each row contiguous.
struct Rows {
  const void* data = nullptr;
  at::ScalarType dtype = at::kFloat;
  std::int64_t stride = 0;  ///< elements from one row to the next

  [[nodiscard]] Rows from(std::int64_t row) const { return columns(row * stride); }
  [[nodiscard]] Rows columns(std::int64_t first) const {  ///< the same rows without their first numbers
    return {static_cast<const char*>(data) + first * static_cast<std::int64_t>(c10::elementSize(dtype)), dtype, stride};
  }
};

/// out[i * out_stride + r] = rows[r] . x[i] for `n_rows` rows and `n_x` vectors of `length`.
void dots(const Rows& rows, std::int64_t n_rows, std::int64_t length, const float* x, std::int64_t x_stride,
          std::int64_t n_x, float* out, std::int64_t out_stride);

/// out[i][0..length) += sum over t ascending of weights[i * weights_stride + t] * rows[t].
void add_weighted_rows(const Rows& rows, std::int64_t n_rows, std::int64_t length, const float* weights,
                       std::int64_t weights_stride, std::int64_t n_weights, float* out, std::int64_t out_stride);

/// x[t] = exp(scale * (x[t] - max)), and returns their sum. -inf gives 0 and leaves the sum as it is, so a row may be
/// padded with it. `most`: if not null, receives max.
float exponentials(float* x, std::int64_t n, float scale, float* most = nullptr);

/// gate = activation(gate) * up.
void activate_times(io::Activation activation, float* gate, const float* up, std::int64_t n);

/// out = weight * x / sqrt(mean(x^2) + eps). `out` may be `x`.
void rms_norm(const float* x, const float* weight, float eps, std::int64_t n, float* out);

/// Most f32 numbers in a vector register: sums over slots stay the same if they start at a multiple of it.
inline constexpr std::int64_t kWidestVector = 16;

}  // namespace kvkeep::lm::detail
