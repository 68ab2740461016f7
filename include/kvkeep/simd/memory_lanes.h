// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Vectorised inner loops of attention over a span memory, and of log-sum-exps. One thread
/// each; the order of every sum depends only on its length.

#include <cstddef>
#include <cstdint>

#include "kvkeep/core/tensor.h"

namespace kvkeep::cpu {

/// out[i] = rows[i] . x for `count` rows of `dim` floats, `dim` apart.
void row_dots(const float* rows, std::int64_t count, std::int64_t dim, const float* x, float* out);

/// out += sum over i, ascending, of weights[i] * rows[i].
void add_rows(const float* rows, std::int64_t count, std::int64_t dim, const float* weights, float* out);

/// For every four signs, the sums of a query of `dim` numbers under all 16 patterns, rounded to multiples of the return
/// value, as this machine's sketch_sums() reads them. The query is held to 15 bits of the sum of its absolute values: a
/// sum over all signs is off by at most about 2^-16 of that for every four of them. NaN for a query that is not finite.
/// table: 64-byte aligned, sketch_table_size() floats.
[[nodiscard]] std::int64_t sketch_table_size(std::int64_t dim);
[[nodiscard]] float sketch_table(const float* query, std::int64_t dim, float* table);

inline constexpr std::int64_t kSketchBlock = 16;  ///< KeySketch::kBlock

/// A sketch of keys (KeySketch) as it is stored: `sizes` are the bits of bf16 numbers; span s has the tokens first[s]
/// to first[s + 1] - 1.
struct SketchedSpans {
  const std::uint32_t* signs;
  const std::uint16_t* sizes;
  const std::int64_t* first;
  std::int64_t words, spans;
};

/// Scratch of sketch_sums() per head, in floats: a little more than the longest span.
[[nodiscard]] std::int64_t sketch_window(const SketchedSpans& spans);

/// The attention each span draws, estimated from its sketch: out [heads, spans] = sum over a span's tokens of
/// exp(base[span] + scale * size * (signs . query) - top), for `heads` queries at once, and top [heads] the largest
/// exponent before it is subtracted. Spans far below e^-30 of it may be 0. tables: [heads, sketch_table_size]; factors
/// [heads] = scale * what sketch_table() returned; base: [heads, spans], scratch afterwards; x: scratch of heads *
/// sketch_window() floats.
void sketch_sums(const SketchedSpans& spans, const float* tables, const float* factors, float* base, std::int64_t heads,
                 float* x, float* top, float* out);

/// Largest of n floats; -inf if n is 0. NaN is ignored.
float largest(const float* x, std::int64_t n);

/// x = exp(x - top); returns the sum. `top` is finite and no smaller than any x; -inf gives 0.
float exponentials(float* x, std::int64_t n, float top);

/// to = from in f32, f16 or bf16, rounded to the nearest.
void round_to(const float* from, std::int64_t n, Dtype dtype, std::byte* to);

/// True if one of n floats is NaN.
bool any_nan(const float* x, std::int64_t n);

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/simd/memory_lanes-inl.h"
#endif
