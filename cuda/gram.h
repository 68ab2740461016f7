// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Products of rows with each other, summed over the rows, by cuBLAS: many matrices at once. cuBLAS is optional, when
/// this is built (KVKEEP_CUBLAS) and where it runs: whoever launches has a kernel of its own. No LibTorch in here.

#include <cstddef>
#include <cstdint>
#include <string>

#include "evidence.h"
#include "stream.h"

namespace kvkeep::cuda {

struct GramArguments;

/// cuBLAS on one device, for whoever launches on one stream at a time. Nothing is loaded, and no memory taken, before
/// open().
class Blas {
 public:
  static constexpr std::int64_t kWorkspace = std::int64_t{32} << 20;  ///< bytes, what cuBLAS asks for on Hopper

  /// Why it cannot be used; empty: it can. The first call of a program looks for the library: the one that the program
  /// has loaded already, as LibTorch does, else where the loader finds it.
  [[nodiscard]] static const std::string& why_not();

  Blas() = default;
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;

  [[nodiscard]] bool is_open() const { return handle_ != nullptr; }
  /// Makes the handle, for the current device. It waits for the device and takes memory, so no stream may be captured.
  /// `workspace`: kWorkspace bytes on the device, aligned to 256, that outlive every launch and every graph of one.
  /// Throws Unsupported with why_not(), DeviceError with what cuBLAS says.
  void open(void* workspace);

 private:
  friend void launch_gram(const GramArguments& arguments, Stream stream);

  void* handle_ = nullptr;
  void* workspace_ = nullptr;
  int device_ = 0;
};

struct GramArguments {
  Blas* blas = nullptr;            ///< open
  const void* rows = nullptr;      ///< [count, tokens, width], aligned to 16
  Element element = Element::f16;  ///< or bf16
  std::int32_t count = 0;          ///< matrices
  std::int32_t tokens = 0;         ///< rows of each
  std::int32_t width = 0;          ///< components of a row, a multiple of 8
  std::int32_t dim = 0;            ///< first components, up to `width`, which all of them are multiplied with
  float* products = nullptr;       ///< f32 [count, dim, width], aligned to 16
};

/// products[n][j][i] = sum over t of rows[n][t][j] * rows[n][t][i]. The products are exact in f32, and so are their
/// sums but for rounding; without atomics, and reduced in no less than f32. The same shape gives the same bits on the
/// same chip; of another count cuBLAS may choose another kernel, so whoever wants bits that do not depend on
/// neighbours keeps `count` and `tokens` fixed. One launch of cuBLAS, which a graph can hold. Cost: 2 width dim tokens
/// flop a matrix on matrix units. Throws InvalidArgument for other elements, sizes below 1 and a width that is no
/// multiple of 8, StateError if `blas` is not open, DeviceError with what cuBLAS says.
void launch_gram(const GramArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
