#pragma once
/// Not part of the interface. The machine's unit for products of bf16 matrices (AMX). A backend supplies it:
/// use_torch() takes LibTorch's.

#include <atomic>
#include <cstdint>

namespace kvkeep::cpu {

struct MatrixUnit {
  /// c = a b, plus the old c with `add`. a: bf16 [rows, depth], `a_stride` apart; b: bf16 pairs [depth / 2, columns,
  /// 2], 2 * b_stride apart; c: f32 [rows, columns]. depth a multiple of 32, columns of 16. Pass the same `rows` in
  /// every call: a row's result then depends on that row alone.
  void (*multiply_pairs)(std::int64_t rows, std::int64_t columns, std::int64_t depth, const std::uint16_t* a,
                         std::int64_t a_stride, const std::uint16_t* b, std::int64_t b_stride, bool add, float* c);
  /// Each thread that multiplied calls this once it is done.
  void (*release)();
};

namespace detail {
// One in the whole process, whatever a consumer hides.
[[gnu::visibility("default")]] inline std::atomic<const MatrixUnit*> used_matrix_unit{nullptr};
}  // namespace detail

/// Null if this machine has none, this process may not use it, or no backend supplied it.
[[nodiscard]] inline const MatrixUnit* matrix_unit() {
  return detail::used_matrix_unit.load(std::memory_order_acquire);
}
inline void use_matrix_unit(const MatrixUnit* unit) { detail::used_matrix_unit.store(unit, std::memory_order_release); }

}  // namespace kvkeep::cpu
