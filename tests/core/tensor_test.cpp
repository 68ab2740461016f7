// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/core/tensor.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "arrays.h"
#include "kvkeep/core/parallel.h"
#include "loop_threads.h"
#include "message_of.h"

namespace kvkeep::tensor_test {
namespace {

using testing::Array;
using testing::message_of;
using testing::normals;

const testing::LoopThreads kTwo(2);  // of this whole program, as those of an engine

TEST(Tensor, CopiesViewsOfAnyStrides) {
  const Array from = normals(1, {3, 4, 5}), to = Array::zeros({5, 3, 4});
  copy(from.select(0, 1), to.permute({1, 2, 0}).select(0, 1));
  const auto number = [](const Array& t, std::int64_t i, std::int64_t j, std::int64_t k) {
    return t.data<float>()[(i * t.size(1) + j) * t.size(2) + k];
  };
  for (std::int64_t i = 0; i < 5; ++i)
    for (std::int64_t j = 0; j < 3; ++j)
      for (std::int64_t k = 0; k < 4; ++k)
        EXPECT_EQ(number(to, i, j, k), j == 1 ? number(from, 1, k, i) : 0.0F) << i << j << k;
  const Array three = gather(from, 1, std::vector<std::int32_t>{3, 0, 0});
  EXPECT_TRUE(three.select(1, 0).equal(from.select(1, 3)) && three.select(1, 2).equal(from.select(1, 0)));
}

TEST(Tensor, IsCopiedByABackendWhereItIsOffTheCpu) {
  static int copies = 0;
  const DeviceCopy before = use_device_copy([](const Tensor& from, const Tensor& to) {
    ++copies;
    std::memcpy(to.bytes(), from.bytes(), static_cast<std::size_t>(from.nbytes()));
  });
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
    const Array t = normals(2, {3, 4}).to(dtype);
    EXPECT_TRUE(all_finite(t)) << dtype;
    t[1][2].fill_(std::numeric_limits<float>::infinity());
    EXPECT_FALSE(all_finite(t)) << dtype;
  }
}

TEST(Threads, RunEveryPartOnce) { testing::expect_every_part_once(); }

}  // namespace
}  // namespace kvkeep::tensor_test
