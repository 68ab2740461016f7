// SPDX-License-Identifier: Apache-2.0
#include "gram.h"

#include "kvkeep/core/error.h"
#include "launch.cuh"
#include "memory.h"

#if KVKEEP_CUBLAS
#include <cublas_v2.h>
#if !defined(KVKEEP_CUDA_MODEL)
#include <dlfcn.h>
#endif
#endif

namespace kvkeep::cuda {

#if KVKEEP_CUBLAS
namespace {

using Multiply = cublasStatus_t(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*,
                                const void*, cudaDataType, int, long long, const void*, cudaDataType, int, long long,
                                const void*, void*, cudaDataType, int, long long, int, cublasComputeType_t,
                                cublasGemmAlgo_t);

/// What is called of cuBLAS. It is not linked: what needs no covariance must run where there is none, and its half a
/// gigabyte is loaded only where it is used.
struct Library {
  std::string why_not;
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace = nullptr;
  decltype(&cublasSetMathMode) set_math_mode = nullptr;
  decltype(&cublasSetAtomicsMode) set_atomics_mode = nullptr;
  decltype(&cublasSetPointerMode_v2) set_pointer_mode = nullptr;
  Multiply* multiply = nullptr;
  decltype(&cublasGetStatusString) what = nullptr;

  Library() {
#if defined(KVKEEP_CUDA_MODEL)
    create = cublasCreate_v2;
    destroy = cublasDestroy_v2;
    set_stream = cublasSetStream_v2;
    set_workspace = cublasSetWorkspace_v2;
    set_math_mode = cublasSetMathMode;
    set_atomics_mode = cublasSetAtomicsMode;
    set_pointer_mode = cublasSetPointerMode_v2;
    multiply = cublasGemmStridedBatchedEx;
    what = cublasGetStatusString;
#else
    const std::string name = text("libcublas.so.", CUBLAS_VER_MAJOR);
    void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // as long as the program runs
    if (library == nullptr) {
      const char* const said = dlerror();
      why_not = text("cuBLAS: ", said == nullptr ? name : said);
      return;
    }
    find(library, create, "cublasCreate_v2");
    find(library, destroy, "cublasDestroy_v2");
    find(library, set_stream, "cublasSetStream_v2");
    find(library, set_workspace, "cublasSetWorkspace_v2");
    find(library, set_math_mode, "cublasSetMathMode");
    find(library, set_atomics_mode, "cublasSetAtomicsMode");
    find(library, set_pointer_mode, "cublasSetPointerMode_v2");
    find(library, multiply, "cublasGemmStridedBatchedEx");
    find(library, what, "cublasGetStatusString");
#endif
  }

 private:
#if !defined(KVKEEP_CUDA_MODEL)
  template <class Function>
  void find(void* library, Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (function == nullptr) why_not = text("cuBLAS: it has no ", name);
  }
#endif
};

const Library& library() {
  static const Library only;
  return only;
}

void expect(const char* what, cublasStatus_t status) {
  KVKEEP_REQUIRE_AS(DeviceError, status == CUBLAS_STATUS_SUCCESS, "gram: ", what, ": ", library().what(status));
}

}  // namespace

const std::string& Blas::why_not() { return library().why_not; }

Blas::~Blas() {
  if (handle_ == nullptr) return;
  try {
    const DeviceScope scope(device_);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // beside a capture of whoever
    cudaThreadExchangeStreamCaptureMode(&mode);
    static_cast<void>(library().destroy(static_cast<cublasHandle_t>(handle_)));
    cudaThreadExchangeStreamCaptureMode(&mode);
  } catch (const std::exception&) {  // the device is gone, and the handle with it
  }
}

void Blas::open(void* workspace) {
  KVKEEP_REQUIRE_AS(Unsupported, why_not().empty(), "gram: ", why_not(), "; allowed with cuBLAS");
  KVKEEP_REQUIRE(workspace != nullptr && reinterpret_cast<std::uintptr_t>(workspace) % 256 == 0,
                 "gram: workspace: not aligned; allowed an address that is a multiple of 256 bytes");
  cublasHandle_t handle = nullptr;
  const cudaError_t status = cudaGetDevice(&device_);
  KVKEEP_REQUIRE_AS(DeviceError, status == cudaSuccess, "gram: current device: ", cudaGetErrorString(status));
  expect("a handle", library().create(&handle));
  handle_ = handle;
  workspace_ = workspace;
  expect("math mode", library().set_math_mode(handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
  expect("atomics", library().set_atomics_mode(handle, CUBLAS_ATOMICS_NOT_ALLOWED));
  expect("pointer mode", library().set_pointer_mode(handle, CUBLAS_POINTER_MODE_HOST));
}

void launch_gram(const GramArguments& a, Stream stream) {
  KVKEEP_REQUIRE(a.element == Element::f16 || a.element == Element::bf16, "gram: rows are ", name_of(a.element),
                 "; allowed f16, bf16");
  KVKEEP_REQUIRE(a.count >= 0 && a.tokens >= 1 && a.dim >= 1 && a.dim <= a.width && a.width % 8 == 0, "gram: ", a.count,
                 " matrices of ", a.tokens, " rows of ", a.width, " components, ", a.dim,
                 " of them multiplied; allowed from 0, from 1, multiples of 8, and 1 up to those");
  KVKEEP_REQUIRE_AS(StateError, a.blas != nullptr && a.blas->is_open(), "gram: no handle; allowed after open()");
  if (a.count == 0) return;
  auto* const handle = static_cast<cublasHandle_t>(a.blas->handle_);
  // In this order: with another stream cuBLAS goes back to memory of its own.
  expect("stream", library().set_stream(handle, stream));
  expect("workspace", library().set_workspace(handle, a.blas->workspace_, static_cast<std::size_t>(Blas::kWorkspace)));
  const float one = 1, zero = 0;
  const cudaDataType type = a.element == Element::f16 ? CUDA_R_16F : CUDA_R_16BF;
  const auto matrix = static_cast<long long>(a.tokens) * a.width, product = static_cast<long long>(a.dim) * a.width;
  // Rows one after another are the columns of a matrix as cuBLAS sees it, [width, tokens].
#if defined(KVKEEP_CUDA_MODEL)
  model::name_launch("gram");
#endif
  expect("products", library().multiply(handle, CUBLAS_OP_N, CUBLAS_OP_T, a.width, a.dim, a.tokens, &one, a.rows, type,
                                        a.width, matrix, a.rows, type, a.width, matrix, &zero, a.products, CUDA_R_32F,
                                        a.width, product, a.count, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

#else

const std::string& Blas::why_not() {
  static const std::string why("cuBLAS: this kvkeep was built without (KVKEEP_CUBLAS)");
  return why;
}

Blas::~Blas() = default;

void Blas::open(void*) { refuse<Unsupported>("gram: ", why_not(), "; allowed with cuBLAS"); }

void launch_gram(const GramArguments&, Stream) {
  refuse<Unsupported>("gram: ", Blas::why_not(), "; allowed with cuBLAS");
}

#endif

}  // namespace kvkeep::cuda
