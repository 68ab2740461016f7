// SPDX-License-Identifier: Apache-2.0
// What cuSOLVER's batched eigensolver takes for the Gram matrices that `FactoriseSpans` decomposes beside other work:
// a reference for that row, where cuSOLVER 12 is. kvkeep itself does not use it.

#include "rows.h"

#if !defined(KVKEEP_CUDA_MODEL) && __has_include(<cusolverDn.h>)
#include <cusolverDn.h>
#include <dlfcn.h>

#include "timing.h"

namespace kvkeep::cuda {
namespace {

/// The library, if the loader finds it.
void* cusolver() {
  static void* const library = dlopen(text("libcusolver.so.", CUSOLVER_VER_MAJOR).c_str(), RTLD_NOW | RTLD_LOCAL);
  return library;
}

/// Calls a function of it. Throws where it says no.
template <class Function, class... Arguments>
void call(Function*, const char* name, Arguments... arguments) {
  auto* const function = reinterpret_cast<Function*>(dlsym(cusolver(), name));
  if (function == nullptr) throw std::runtime_error(text("cuSOLVER has no ", name));
  const cusolverStatus_t status = function(arguments...);
  if (status != CUSOLVER_STATUS_SUCCESS) throw std::runtime_error(text(name, " returned ", static_cast<int>(status)));
}

/// Grams of keys of `length` tokens in spans of `budget`, all layers and heads, already formed: m = min(budget, D)
/// rows, f32, all eigenvectors. Each run begins with a copy of them, since the vectors take their place. `bytes`: the
/// matrices once.
void eigenvectors(Result& result, Shape shape, Size size) {
  const auto [batch, length, budget, page] = size;
  const std::int64_t m = std::min(budget, shape.dim),
                     count = std::int64_t{shape.layers} * batch * shape.kv_heads * (length / budget), each = m * m;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(m * shape.dim)), gram(static_cast<std::size_t>(each));
  for (float& x : rows) x = normal(random);
  double trace = 0;
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < m; ++j) {
      const float* const x = rows.data() + i * shape.dim;
      const float sum = std::inner_product(x, x + shape.dim, rows.data() + j * shape.dim, 0.0F);
      gram[static_cast<std::size_t>(i * m + j)] = sum;
      trace += i == j ? static_cast<double>(sum) : 0;
    }
  const DeviceArray<float> given(static_cast<std::size_t>(count * each)), matrices(given.size()),
      values(static_cast<std::size_t>(count * m));
  const DeviceArray<int> info(static_cast<std::size_t>(count));
  fill_with(reinterpret_cast<std::byte*>(given.data()), given.size() * sizeof(float), gram.data(),
            gram.size() * sizeof(float));
  cusolverDnHandle_t handle = nullptr;
  cusolverDnParams_t parameters = nullptr;
  call<decltype(cusolverDnCreate)>(nullptr, "cusolverDnCreate", &handle);
  call<decltype(cusolverDnCreateParams)>(nullptr, "cusolverDnCreateParams", &parameters);
  call<decltype(cusolverDnSetStream)>(nullptr, "cusolverDnSetStream", handle, stream());
  std::size_t there = 0, here = 0;
  call<decltype(cusolverDnXsyevBatched_bufferSize)>(nullptr, "cusolverDnXsyevBatched_bufferSize", handle, parameters,
                                                    CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, m, CUDA_R_32F,
                                                    matrices.data(), m, CUDA_R_32F, values.data(), CUDA_R_32F, &there,
                                                    &here, count);
  const DeviceArray<std::byte> device(there);
  std::vector<std::byte> host(here);
  const auto run = [&] {
    copy_inside(matrices.data(), given.data(), given.size() * sizeof(float));
    call<decltype(cusolverDnXsyevBatched)>(nullptr, "cusolverDnXsyevBatched", handle, parameters,
                                           CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, m, CUDA_R_32F,
                                           matrices.data(), m, CUDA_R_32F, values.data(), CUDA_R_32F, device.data(),
                                           there, host.data(), here, info.data(), count);
  };
  run();
  synchronize(stream());
  const std::vector<float> last =
      values.download(static_cast<std::size_t>((count - 1) * m), static_cast<std::size_t>(m));
  if (!(std::abs(std::accumulate(last.begin(), last.end(), 0.0) / trace - 1) < 1e-3))
    result.fail("the eigenvalues do not add up to the trace");
  result.set("bytes", static_cast<double>(given.size()) * 4);
  result.set("matrices", static_cast<double>(count));
  if (!options().once) {
    std::vector<double> ms;
    for (int n = 0; n < 5; ++n) ms.push_back(milliseconds_there(run, stream()));
    result.set("us", median(ms) * 1e3);
  }
  call<decltype(cusolverDnDestroyParams)>(nullptr, "cusolverDnDestroyParams", parameters);
  call<decltype(cusolverDnDestroy)>(nullptr, "cusolverDnDestroy", handle);
}

}  // namespace

void add_eigensolver() {
  if (cusolver() != nullptr)
    add("SyevBatched", eigenvectors, {{1, 2048, 32}, {1, 2048, 64}, {1, 2048, 128}}, {{1, 64, 32}});
}

}  // namespace kvkeep::cuda

#else

namespace kvkeep::cuda {

void add_eigensolver() {}  // there is no cuSOLVER

}  // namespace kvkeep::cuda

#endif
