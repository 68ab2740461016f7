#include "kvkeep/core/tensor.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kvkeep/core/finite.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/torch.h"
#include "message_of.h"

namespace kvkeep::tensor_test {
namespace {

using testing::message_of;

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

TEST(Tensor, CopiesViewsOfAnyStrides) {
  const at::Tensor from = at::randn({3, 4, 5}), to = at::zeros({5, 3, 4});
  copy(Tensor(from).select(0, 1), torch_tensor(Tensor(to)).permute({1, 2, 0}).select(0, 1));
  EXPECT_TRUE(at::equal(to.permute({1, 2, 0})[1], from[1]));
  EXPECT_EQ(to.select(1, 0).abs().sum().item<float>(), 0);
  const at::Tensor three = gather(from, 1, std::vector<std::int32_t>{3, 0, 0});
  EXPECT_TRUE(at::equal(three.select(1, 0), from.select(1, 3)) && at::equal(three.select(1, 2), from.select(1, 0)));
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

TEST(Tensor, IsCopiedByABackendWhereItIsOffTheCpu) {
  static int copies = 0;
  const DeviceCopy before = use_device_copy([](const Tensor& from, const Tensor& to) {
    ++copies;
    std::memcpy(to.bytes(), from.bytes(), static_cast<std::size_t>(from.nbytes()));
  });
  EXPECT_NE(before, nullptr) << "kvkeep/torch.h brings LibTorch's";
  std::array<float, 2> there{3, 4};  // host memory under the name of a device
  const Tensor device(there.data(), Dtype::f32, {2}, Device{Device::Kind::cuda, 0});
  const Tensor here = clone(device);
  EXPECT_TRUE(here.device().is_cpu());
  EXPECT_EQ(here.data<float>()[1], 4);
  copy(full<float>({2}, 7), device);
  EXPECT_EQ(there[0], 7);
  copy(here, zeros({2}, Dtype::f32));
  EXPECT_EQ(copies, 2) << "on the CPU nobody is asked";
  use_device_copy(nullptr);
  EXPECT_NE(
      message_of([&] { copy(here, device); }).find("cuda:0; allowed one shape and dtype, on the CPU or with a backend"),
      std::string::npos);
  use_device_copy(before);
}

TEST(Tensor, RefusesWithASentence) {
  const Tensor t = zeros({2, 3}, Dtype::f32);
  EXPECT_NE(message_of([&] { static_cast<void>(t.data<std::int32_t>()); }).find("read as i32; it holds f32"),
            std::string::npos);
  EXPECT_NE(message_of([&] { static_cast<void>(t.narrow(1, 2, 2)); }).find("2 to 4 of dimension 1; allowed up to 3"),
            std::string::npos);
  EXPECT_NE(message_of([&] { static_cast<void>(t.size(2)); }).find("dimension 2; it has 2"), std::string::npos);
  EXPECT_NE(message_of([&] { copy(t, zeros({3, 2}, Dtype::f32)); }).find("[2, 3] f32"), std::string::npos);
  EXPECT_NE(message_of([&] { static_cast<void>(Tensor(at::zeros({1}, at::kComplexDouble))); }).find("ComplexDouble"),
            std::string::npos);
  EXPECT_NE(message_of([&] { static_cast<void>(empty({2, -1}, Dtype::u8)); }).find("[2, -1]"), std::string::npos);
  EXPECT_NE(message_of([&] {
              static_cast<void>(empty({std::int64_t{1} << 61, 4}, Dtype::f32));
            }).find("fewer than 2^63 bytes"),
            std::string::npos);
  constexpr std::int64_t kLarge = std::int64_t{1} << 40;
  EXPECT_EQ(empty({kLarge >> 18, kLarge, 0}, Dtype::f32).numel(), 0) << "no bytes, and strides below 2^63";
  EXPECT_NE(message_of([&] { static_cast<void>(empty({kLarge, kLarge, 0}, Dtype::f32)); }).find("2^63"),
            std::string::npos);
  EXPECT_NE(
      message_of([&] { static_cast<void>(zeros(std::vector<std::int64_t>(9, 1), Dtype::u8)); }).find("9 dimensions"),
      std::string::npos);
}

TEST(Tensor, KnowsWhetherItsNumbersAreFinite) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f64}) {
    at::Tensor t = at::randn({3, 4}).to(torch_dtype(dtype));
    EXPECT_TRUE(all_finite(Tensor(t))) << dtype;
    t[1][2] = std::numeric_limits<float>::infinity();
    EXPECT_FALSE(all_finite(Tensor(t))) << dtype;
  }
}

TEST(Threads, RunEveryPartOnce) {
  std::vector<int> seen(1000);
  parallel_for(0, 1000, 7, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
  });
  EXPECT_EQ(seen, std::vector<int>(1000, 1));
  parallel_for(5, 5, 1, [](std::int64_t, std::int64_t) { FAIL() << "there is nothing to do"; });
  EXPECT_THROW(parallel_for(0, 100, 1, [](std::int64_t, std::int64_t) { throw InvalidArgument("as thrown"); }),
               InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::tensor_test
