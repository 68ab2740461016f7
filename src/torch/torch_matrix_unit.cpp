// SPDX-License-Identifier: Apache-2.0
#include "torch_matrix_unit.h"

#include <ATen/cpu/Utils.h>
#include <ATen/native/CPUBlas.h>

namespace kvkeep {

#if defined(CPUBLAS_BRGEMM_BF16BF16F32)

const cpu::MatrixUnit* torch_matrix_unit() {
  static const bool has = at::cpu::init_amx() && at::native::cpublas::could_pack(c10::ScalarType::BFloat16);
  static constexpr cpu::MatrixUnit kUnit{
      [](std::int64_t rows, std::int64_t columns, std::int64_t depth, const std::uint16_t* a, std::int64_t a_stride,
         const std::uint16_t* b, std::int64_t b_stride, bool add, float* c) {
        at::native::cpublas::brgemm(rows, columns, depth, a_stride, b_stride, columns, add,
                                    reinterpret_cast<const at::BFloat16*>(a), reinterpret_cast<const at::BFloat16*>(b),
                                    c);
      },
      [] { at::native::cpublas::brgemm_release(); }};
  return has ? &kUnit : nullptr;
}

#else

const cpu::MatrixUnit* torch_matrix_unit() { return nullptr; }

#endif

}  // namespace kvkeep
