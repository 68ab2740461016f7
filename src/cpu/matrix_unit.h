#pragma once
/// The machine's unit for products of bf16 matrices (AMX), through LibTorch.

#include <cstdint>

namespace kvkeep::cpu {

/// Whether this machine has one and this process may use it.
bool has_matrix_unit();

/// c = a b, on top of what it holds with `add`. a: bf16 [rows, depth], `a_stride` apart; b: bf16 pairs [depth / 2,
/// columns, 2], 2 * b_stride apart; c: f32 [rows, columns]. depth a multiple of 32, columns of 16. The same `rows` in
/// every call: a row's result then depends on that row alone.
void multiply_pairs(std::int64_t rows, std::int64_t columns, std::int64_t depth, const std::uint16_t* a,
                    std::int64_t a_stride, const std::uint16_t* b, std::int64_t b_stride, bool add, float* c);

/// To be called by each thread that multiplied, once it is done.
void release_matrix_unit();

}  // namespace kvkeep::cpu
