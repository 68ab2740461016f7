#include "matrix_unit.h"

#include <ATen/cpu/Utils.h>
#include <ATen/native/CPUBlas.h>

namespace kvkeep::cpu {

#if defined(CPUBLAS_BRGEMM_BF16BF16F32)

bool has_matrix_unit() {
  static const bool has = at::cpu::init_amx() && at::native::cpublas::could_pack(c10::ScalarType::BFloat16);
  return has;
}

void multiply_pairs(std::int64_t rows, std::int64_t columns, std::int64_t depth, const std::uint16_t* a,
                    std::int64_t a_stride, const std::uint16_t* b, std::int64_t b_stride, bool add, float* c) {
  at::native::cpublas::brgemm(rows, columns, depth, a_stride, b_stride, columns, add,
                              reinterpret_cast<const at::BFloat16*>(a), reinterpret_cast<const at::BFloat16*>(b), c);
}

void release_matrix_unit() { at::native::cpublas::brgemm_release(); }

#else  // LibTorch before it had them

bool has_matrix_unit() { return false; }
void multiply_pairs(std::int64_t, std::int64_t, std::int64_t, const std::uint16_t*, std::int64_t, const std::uint16_t*,
                    std::int64_t, bool, float*) {}
void release_matrix_unit() {}

#endif

}  // namespace kvkeep::cpu
