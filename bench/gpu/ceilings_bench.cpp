// SPDX-License-Identifier: Apache-2.0
// What this machine can do with other programs, in the same run: its own copy, LibTorch's sum over f32, cuBLAS on bf16.
// The other rows are compared with these.

#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>

#include "timing.h"
#include "torch_machine.h"

namespace kvkeep::cuda {
namespace {

double best_milliseconds(const std::function<void()>& work, Stream on) {
  work();
  synchronize(on);
  std::vector<double> ms;
  for (int i = 0; i < (options().toy ? 3 : 11); ++i) ms.push_back(milliseconds_there(work, on));
  return median(ms);
}

std::int64_t bytes_of_arrays() { return options().toy ? std::int64_t{1} << 20 : std::int64_t{1} << 31; }

void copying(Result& result) {
  const TorchStream on;
  const auto bytes = at::TensorOptions().dtype(c10::kByte).device(on.device());
  const at::Tensor from = at::ones({bytes_of_arrays() / 2}, bytes), to = at::empty({bytes_of_arrays() / 2}, bytes);
  const double ms = best_milliseconds([&] { to.copy_(from); }, on.native());
  result.set("us", ms * 1e3);
  result.set("GBps", static_cast<double>(bytes_of_arrays()) / ms / 1e6);
  if (!to.equal(from)) result.fail("a copy differs from what was copied");
}

void reading(Result& result) {
  const TorchStream on;
  const at::Tensor from = at::ones({bytes_of_arrays() / 4}, at::TensorOptions().dtype(at::kFloat).device(on.device()));
  at::Tensor sum;
  const double ms = best_milliseconds([&] { sum = at::sum(from); }, on.native());
  result.set("us", ms * 1e3);
  result.set("GBps", static_cast<double>(bytes_of_arrays()) / ms / 1e6);
  if (std::abs(sum.item<double>() / static_cast<double>(from.numel()) - 1) > 1e-3)
    result.fail("a sum of ones is not their count");
}

void multiplying(Result& result) {
  const std::int64_t n = options().toy ? 64 : 8192;
  const TorchStream on;
  const at::Tensor a = at::ones({n, n}, at::TensorOptions().dtype(at::kBFloat16).device(on.device())), b = a.clone();
  at::Tensor product = at::empty({n, n}, a.options());
  const double ms = best_milliseconds([&] { at::matmul_out(product, a, b); }, on.native());
  result.set("us", ms * 1e3);
  result.set("TFLOPS", 2.0 * static_cast<double>(n * n * n) / ms / 1e9);
  if (product[0][n - 1].item<double>() != static_cast<double>(n)) result.fail("a product of ones is not their count");
}

}  // namespace

void add_ceilings() {
  add("Ceiling/copy", copying);
  add("Ceiling/read", reading);
  add("Ceiling/products", multiplying);
}

}  // namespace kvkeep::cuda
