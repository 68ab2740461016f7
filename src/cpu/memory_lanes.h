#pragma once
/// Vectorised inner loops of attention over a span memory, and of log-sum-exps. One thread each; the order of every sum depends on its length alone.

#include <cstddef>
#include <cstdint>

#include "kvkeep/core/tensor.h"

namespace kvkeep::cpu {

/// out[i] = rows[i] . x for `count` rows of `dim` floats, `dim` apart.
void row_dots(const float* rows, std::int64_t count, std::int64_t dim, const float* x, float* out);

/// out += sum over i, ascending, of weights[i] * rows[i].
void add_rows(const float* rows, std::int64_t count, std::int64_t dim, const float* weights, float* out);

/// Numbers that sketch_products() reads of a query of `dim`: for every four of them, the sums under all 16 patterns of signs.
[[nodiscard]] std::int64_t sketch_table_size(std::int64_t dim);
void sketch_table(const float* query, std::int64_t dim, float* table);

/// out[t] = sum over d of +-query[d], signs as the sketch of token t has them (KeySketch: blocks of 16 tokens, `words` of 32 signs each); up to 15 numbers behind the last token are written.
void sketch_products(const std::uint32_t* signs, std::int64_t tokens, std::int64_t words, const float* table, float* out);

/// Largest of n floats; -inf where n is 0. NaN is passed over.
float largest(const float* x, std::int64_t n);

/// x = exp(x - top), and returns their sum. `top` is finite and no smaller than any x; -inf gives 0.
float exponentials(float* x, std::int64_t n, float top);

/// to = from in f32, f16 or bf16, rounded to the nearest.
void narrow(const float* from, std::int64_t n, ScalarType dtype, std::byte* to);

/// True where one of n floats is NaN.
bool any_nan(const float* x, std::int64_t n);

}  // namespace kvkeep::cpu
