// SPDX-License-Identifier: Apache-2.0
// cuBLAS for the execution model, as far as kvkeep calls it: products as loops of the host, in the order of the stream,
// which a capture records and a replay runs again. It refuses what cuBLAS refuses, and what would be slow, wait, or
// take memory of its own there: vectors that are not aligned, a handle that is made while a stream is captured, a
// stream without the workspace that has to follow it.

#if KVKEEP_CUBLAS

#include <cublas_v2.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "cuda_model.h"

struct cublasContext {
  void* own = nullptr;  ///< what a handle takes of the device
  int device = 0;
  cudaStream_t stream = nullptr;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasAtomicsMode_t atomics = CUBLAS_ATOMICS_ALLOWED;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_DEVICE;  // so that whoever needs another says so
};

namespace kvkeep::cuda::model {
namespace {

/// A matrix of 16 bits as cuBLAS sees it: columns one after another.
struct Columns {
  const void* data;
  cudaDataType type;
  int leading;
  long long stride;  ///< elements from one matrix to the next
  bool transposed;

  /// All of rows x tokens, once for each row, in f32.
  [[nodiscard]] std::vector<float> rows(int matrix, int count, int tokens) const {
    std::vector<float> out(static_cast<std::size_t>(count) * static_cast<std::size_t>(tokens));
    for (int t = 0; t < tokens; ++t)
      for (int r = 0; r < count; ++r) {
        const long long at = matrix * stride + (transposed ? t + static_cast<long long>(r) * leading
                                                           : r + static_cast<long long>(t) * leading);
        out[static_cast<std::size_t>(r) * static_cast<std::size_t>(tokens) + static_cast<std::size_t>(t)] =
            type == CUDA_R_16F ? static_cast<float>(static_cast<const __half*>(data)[at])
                               : static_cast<float>(static_cast<const __nv_bfloat16*>(data)[at]);
      }
    return out;
  }
};

/// Sum of x[t] * y[t], 16 at a time as a matrix unit has them, from where the seed says.
float product_of(const float* x, const float* y, int tokens) {
  const int steps = (tokens + 15) / 16;
  float sum = 0;
  for (int s = 0; s < steps; ++s) {
    const int first = (s + static_cast<int>(settings().seed % static_cast<std::uint64_t>(steps))) % steps * 16;
    std::array<float, 16> products{};
    for (int k = 0; k < std::min(16, tokens - first); ++k)
      products[static_cast<std::size_t>(k)] = x[first + k] * y[first + k];
    sum = matrix_sum(sum, products);
  }
  return sum;
}

void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("cuBLAS: ") + what);
}

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

}  // namespace
}  // namespace kvkeep::cuda::model

using namespace kvkeep::cuda::model;  // NOLINT(google-build-using-namespace)

extern "C" {

const char* cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "success";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "an unsupported value or parameter was passed to the function";
    default:
      return "the functionality requested is not supported";
  }
}

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  void* own = nullptr;
  if (cudaDeviceSynchronize() != cudaSuccess || cudaMalloc(&own, 256) != cudaSuccess) return CUBLAS_STATUS_ALLOC_FAILED;
  *handle = new cublasContext;
  (*handle)->own = own;
  return cudaGetDevice(&(*handle)->device) == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  static_cast<void>(cudaFree(handle->own));
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  handle->workspace = nullptr;  // back to memory of its own
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void* workspace, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
  handle->workspace = workspace;
  handle->workspace_bytes = bytes;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  handle->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t mode) {
  handle->atomics = mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  handle->pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t of_a, cublasOperation_t of_b, int m,
                                          int n, int k, const void* alpha, const void* a, cudaDataType a_type,
                                          int a_leading, long long a_stride, const void* b, cudaDataType b_type,
                                          int b_leading, long long b_stride, const void* beta, void* c,
                                          cudaDataType c_type, int c_leading, long long c_stride, int count,
                                          cublasComputeType_t compute, cublasGemmAlgo_t) {
  const bool a_turned = of_a == CUBLAS_OP_T, b_turned = of_b == CUBLAS_OP_T;
  if (m < 0 || n < 0 || k < 0 || count < 0 || a_leading < std::max(1, a_turned ? k : m) ||
      b_leading < std::max(1, b_turned ? n : k) || c_leading < std::max(1, m) || alpha == nullptr || beta == nullptr)
    return CUBLAS_STATUS_INVALID_VALUE;
  if ((a_type != CUDA_R_16F && a_type != CUDA_R_16BF) || b_type != a_type || c_type != CUDA_R_32F ||
      compute != CUBLAS_COMPUTE_32F || of_a == CUBLAS_OP_C || of_b == CUBLAS_OP_C)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  require(handle->workspace != nullptr && handle->workspace_bytes >= std::size_t{32} << 20,
          "no workspace of 32 MiB since the stream was set: it would take memory of its own");
  require(handle->math == CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, "sums may be reduced in 16 bits");
  require(handle->atomics == CUBLAS_ATOMICS_NOT_ALLOWED, "atomics are allowed");
  require(handle->pointers == CUBLAS_POINTER_MODE_HOST, "alpha and beta are read on the device");
  require(is_aligned(a) && is_aligned(b) && is_aligned(c) && (a_leading | b_leading) % 8 == 0 && c_leading % 4 == 0 &&
              (a_stride | b_stride) % 8 == 0 && c_stride % 4 == 0,
          "vectors are not aligned to 16 bytes, which is slow");
  require(count < 2 || c_stride >= static_cast<long long>(c_leading) * n, "results lie in each other");
  int device = 0;
  require(cudaGetDevice(&device) == cudaSuccess && device == handle->device, "the handle is another device's");
  if (m == 0 || n == 0 || count == 0) return CUBLAS_STATUS_SUCCESS;
  const Columns left{a, a_type, a_leading, a_stride, a_turned}, right{b, b_type, b_leading, b_stride, !b_turned};
  const auto multiply = [=, times = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta)] {
    if (here().thread.x != 0) return;
    const auto matrix = static_cast<int>(here().block.x);
    const std::vector<float> x = left.rows(matrix, m, k), y = right.rows(matrix, n, k);
    float* const out = static_cast<float*>(c) + matrix * c_stride;
    const auto is_zero = [](float number) { return number == 0; };
    const bool nothing = std::ranges::all_of(x, is_zero) && std::ranges::all_of(y, is_zero);  // in less time
    for (int j = 0; j < n; ++j)
      for (int i = 0; i < m; ++i) {
        float& to = out[static_cast<long long>(j) * c_leading + i];
        const float sum = nothing ? 0.0F
                                  : times * product_of(x.data() + static_cast<long long>(i) * k,
                                                       y.data() + static_cast<long long>(j) * k, k);
        to = keep == 0 ? sum : sum + keep * to;
      }
  };
  const cudaLaunchConfig_t config{dim3(static_cast<unsigned>(count)), dim3(32), 0, handle->stream, nullptr, 0};
  static const char kernel = 0;
  return kvkeep::cuda::model::launch(config, &kernel, multiply) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                                               : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // extern "C"

#endif
