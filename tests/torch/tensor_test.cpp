// SPDX-License-Identifier: Apache-2.0
// Tensors and threads of LibTorch: kvkeep/torch.h.

#include "kvkeep/torch.h"

#include <ATen/dlpack.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "kvkeep/c.h"
#include "kvkeep/core/parallel.h"
#include "loop_threads.h"
#include "message_of.h"

namespace kvkeep::torch_tensor_test {
namespace {

using testing::message_of;

// C's tensors lie in memory as DLPack's do.
static_assert(sizeof(kvkeep_tensor) == sizeof(DLTensor) && offsetof(kvkeep_tensor, shape) == offsetof(DLTensor, shape));
static_assert(offsetof(kvkeep_tensor, ndim) == offsetof(DLTensor, ndim));
static_assert(offsetof(kvkeep_tensor, dtype) == offsetof(DLTensor, dtype));
static_assert(offsetof(kvkeep_tensor, byte_offset) == offsetof(DLTensor, byte_offset));
static_assert(offsetof(kvkeep_tensor, device) == offsetof(DLTensor, device) && KVKEEP_CPU == int{kDLCPU});
static_assert(KVKEEP_CUDA == int{kDLCUDA} && KVKEEP_CUDA_HOST == int{kDLCUDAHost} && KVKEEP_INT == int{kDLInt});
static_assert(KVKEEP_UINT == int{kDLUInt} && KVKEEP_FLOAT == int{kDLFloat} && KVKEEP_BFLOAT == int{kDLBfloat});
static_assert(KVKEEP_BOOL == int{kDLBool} && KVKEEP_FLOAT8_E4M3 == int{kDLFloat8_e4m3fn});
static_assert(KVKEEP_FLOAT8_E5M2 == int{kDLFloat8_e5m2});

TEST(Tensor, SharesMemoryWithLibTorchsBothWays) {
  at::Tensor theirs = at::arange(24, at::kFloat).view({2, 3, 4});
  const Tensor ours = theirs.transpose(1, 2);
  EXPECT_EQ(ours.sizes(), Shape({2, 4, 3}));
  EXPECT_EQ(ours.strides(), Shape({12, 1, 4}));
  EXPECT_EQ(ours.dtype(), Dtype::f32);
  EXPECT_FALSE(ours.is_contiguous());
  ours.data<float>()[1] = -7;
  EXPECT_EQ(theirs[0][0][1].item<float>(), -7);
  const at::Tensor back = ours.select(0, 1).narrow(0, 1, 2);
  EXPECT_TRUE(at::equal(back, theirs[1].transpose(0, 1).narrow(0, 1, 2)));
  EXPECT_EQ(back.data_ptr<float>(), theirs.data_ptr<float>() + 13);
  EXPECT_NE(message_of([&] { static_cast<void>(Tensor(at::zeros({1}, at::kComplexDouble))); }).find("ComplexDouble"),
            std::string::npos);
  EXPECT_NE(detail::device_copy.load(), nullptr) << "copies off the CPU are LibTorch's";
}

TEST(Tensor, RefusesViewsWhoseNumbersHaveTheOtherSign) {
  const at::Tensor t = at::ones({2, 3});
  EXPECT_NE(message_of<InvalidArgument>([&] { static_cast<void>(Tensor(at::_neg_view(t))); }).find("resolve_neg()"),
            std::string::npos);
  const at::Tensor c = at::ones({2}, at::kComplexFloat);
  EXPECT_NE(message_of<InvalidArgument>([&] { static_cast<void>(Tensor(c.conj())); }).find("resolve_conj()"),
            std::string::npos);
  EXPECT_EQ(Tensor(at::_neg_view(t).resolve_neg()).data<float>()[0], -1);
}

TEST(Tensor, KeepsWhatLibTorchLetsGo) {
  Tensor kept;
  {
    const at::Tensor theirs = at::arange(5, at::kLong);
    kept = theirs;
  }
  EXPECT_EQ(kept.data<std::int64_t>()[4], 4);
  at::Tensor again = kept;
  kept = {};
  EXPECT_EQ(again[3].item<std::int64_t>(), 3);
}

TEST(Tensor, RoundsHalvesAsLibTorchDoes) {
  std::vector<float> numbers{
      0,      -0.0F,   1,       65504,  65519,   65520,    1e9F,
      6e-8F,  2.9e-8F, 3.1e-8F, 1e-30F, 6.1e-5F, -6.1e-5F, std::numeric_limits<float>::infinity(),
      3.4e38F};
  for (std::uint32_t bits = 0x37000000U; bits < 0x48000000U; bits += 0x3fff1U)
    numbers.push_back(std::bit_cast<float>(bits));
  const at::Tensor wide = at::from_blob(numbers.data(), {static_cast<std::int64_t>(numbers.size())}, at::kFloat);
  EXPECT_TRUE(at::equal(as<Half>(wide), wide.to(at::kHalf)));
  EXPECT_TRUE(at::equal(as<BFloat16>(wide), wide.to(at::kBFloat16)));
  std::vector<std::int16_t> all(65536);
  std::iota(all.begin(), all.end(), std::int16_t{-32768});
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16}) {
    const at::Tensor narrow = at::from_blob(all.data(), {65536}, type);
    EXPECT_TRUE(at::allclose(torch_tensor(as<float>(narrow)), narrow.to(at::kFloat), 0, 0, /*equal_nan=*/true));
  }
  EXPECT_EQ(largest_of(Dtype::f16), static_cast<float>(std::numeric_limits<c10::Half>::max()));
  EXPECT_EQ(largest_of(Dtype::bf16), static_cast<float>(std::numeric_limits<c10::BFloat16>::max()));
  EXPECT_EQ(largest_of(Dtype::f32), std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isnan(static_cast<float>(Half(std::nanf("")))));
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(std::nanf("")))));
}

TEST(TorchThreads, RunEveryPartOnce) { testing::expect_every_part_once(); }

}  // namespace
}  // namespace kvkeep::torch_tensor_test
