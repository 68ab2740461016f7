// SPDX-License-Identifier: Apache-2.0
// Numbers of a cache in 8 bits and in blocks: as ggml and LibTorch have them.
#include "kvkeep/simd/stored_side.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <vector>

namespace kvkeep::stored_side_test {
namespace {

std::string hex(const std::vector<std::byte>& bytes) {
  std::string out;
  for (const std::byte byte : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    out += kDigits[std::to_integer<std::size_t>(byte >> 4)];
    out += kDigits[std::to_integer<std::size_t>(byte & std::byte{15})];
  }
  return out;
}

/// 64 numbers from -3.1 to 3.1, and as many a hundredth of that.
std::vector<float> numbers() {
  std::vector<float> x;
  for (int i = 0; i < 64; ++i) {
    const float number = static_cast<float>((i * 37) % 101 - 50) / 16;
    x.push_back(i < 32 ? number : number * 0.01F);
  }
  return x;
}

std::vector<std::byte> stored(Dtype dtype, const std::vector<float>& x) {
  std::vector<std::byte> bytes(x.size() / kBlockNumbers * static_cast<std::size_t>(element_size(dtype)));
  cpu::store_slot({.slots = {.base = bytes.data(), .width = std::ssize(bytes)}, .dtype = dtype, .dim = std::ssize(x)},
                  0, x.data());
  return bytes;
}

// The bytes are those of the Python package gguf 0.19, `gguf.quants.quantize`.
TEST(StoredSide, BlocksHaveTheBytesOfGgml) {
  EXPECT_EQ(
      hex(stored(Dtype::q8_0, numbers())),
      "4d2681df3d9af856b41270cd2b89e745a2005ebb1977d53390ee4caa0866c3217fdce70b3c96f656b0106fca2984e3439efd5db71777"
      "d1318beb4ba50565bf1f7fd93993");
  EXPECT_EQ(hex(stored(Dtype::q4_0, numbers())),
            "4036e046acf258bd1379df358be046acf268d79b740fb953fd9731eb852fca640ea842fd");
  const std::vector<float> nothing(32);
  EXPECT_EQ(hex(stored(Dtype::q4_0, nothing)), "008088888888888888888888888888888888");
  EXPECT_EQ(hex(stored(Dtype::q8_0, nothing)), std::string(68, '0'));
}

TEST(StoredSide, WhatIsStoredComesBackWithinHalfAStep) {
  const std::vector<float> x = numbers();
  for (const Dtype dtype : {Dtype::i8, Dtype::q8_0, Dtype::q4_0}) {
    SCOPED_TRACE(name_of(dtype));
    std::vector<std::byte> bytes(x.size() / static_cast<std::size_t>(numbers_of(dtype)) *
                                 static_cast<std::size_t>(element_size(dtype)));
    float scale = 0;
    const cpu::StoredSide side{.slots = {.base = bytes.data(), .width = std::ssize(bytes)},
                               .scales = dtype == Dtype::i8
                                             ? SlotAddress{.base = reinterpret_cast<std::byte*>(&scale), .width = 4}
                                             : SlotAddress{},
                               .dtype = dtype,
                               .dim = std::ssize(x)};
    cpu::store_slot(side, 0, x.data());
    std::vector<float> back(x.size());
    cpu::widen_slot(side, 0, back.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      // Of its block, or of the slot. q4_0 reaches 7 steps to one side and 8 to the other.
      const float most = i < 32 || dtype == Dtype::i8 ? 3.125F : 0.03125F,
                  step = dtype == Dtype::q4_0 ? most / 8 : most / 127;
      EXPECT_LE(std::abs(back[i] - x[i]), step * (dtype == Dtype::q4_0 ? 1.01F : 0.51F)) << i;
    }
  }
}

// Hand example: the transform of (1, 2, 3, 4) in runs of 2 and of 4.
TEST(StoredSide, RotatesByTheWalshHadamardTransformAndBack) {
  const float root = std::sqrt(0.5F);
  std::vector<float> x{1, 2, 3, 4};
  cpu::rotate(x.data(), 4, 2);
  EXPECT_EQ(x, (std::vector<float>{3 * root, -1 * root, 7 * root, -1 * root}));
  x = {1, 2, 3, 4};
  cpu::rotate(x.data(), 4, 4);
  EXPECT_EQ(x, (std::vector<float>{5, -1, -2, 0}));
  cpu::rotate(x.data(), 4, 4);
  EXPECT_EQ(x, (std::vector<float>{1, 2, 3, 4}));

  // One large number among small ones: in four bits they vanish, unless it is spread first.
  std::vector<float> outlier(64, 0.05F);
  outlier[5] = 8;
  const auto error_of = [&](std::int32_t rotated) {
    std::vector<std::byte> bytes(2 * 18);
    const cpu::StoredSide side{
        .slots = {.base = bytes.data(), .width = 36}, .dtype = Dtype::q4_0, .dim = 64, .rotated = rotated};
    cpu::store_slot(side, 0, outlier.data());
    std::vector<float> back(64);
    cpu::widen_slot(side, 0, back.data());
    double sum = 0;
    for (std::size_t i = 6; i < 32; ++i) sum += std::abs(back[i] - outlier[i]);
    return sum / 26;
  };
  EXPECT_NEAR(error_of(0), 0.05, 1e-6);
  EXPECT_LT(error_of(64), 0.04);
}

TEST(StoredSide, WhatIsNotFiniteStaysSo) {
  for (const Dtype dtype : {Dtype::i8, Dtype::q8_0, Dtype::q4_0})
    for (const float bad : {std::nanf(""), HUGE_VALF}) {
      std::vector<float> x(32, 1.0F);
      x[3] = bad;
      std::vector<std::byte> bytes(64);
      float scale = 0;
      const cpu::StoredSide side{.slots = {.base = bytes.data(), .width = 34},
                                 .scales = {.base = reinterpret_cast<std::byte*>(&scale), .width = 4},
                                 .dtype = dtype,
                                 .dim = 32};
      cpu::store_slot(side, 0, x.data());
      cpu::widen_slot(side, 0, x.data());
      EXPECT_TRUE(std::isnan(x[3])) << name_of(dtype);
    }
}

// LibTorch's float8 types, number by number.
TEST(StoredSide, ReadsBothFormatsOfEightBitFloats) {
  const std::array<std::uint8_t, 8> e4m3{1, 7, 8, 0x38, 0x7e, 0x81, 0xb8, 0x7f},
      e5m2{1, 3, 4, 0x3c, 0x7b, 0xbc, 0x7c, 0x7d};
  std::array<float, 8> got{};
  const auto read = [&](const std::array<std::uint8_t, 8>& bytes, Dtype dtype, float scale) {
    auto copy = bytes;
    cpu::widen_slot({.slots = {.base = reinterpret_cast<std::byte*>(copy.data()), .width = 8},
                     .scales = {.base = reinterpret_cast<std::byte*>(&scale), .width = 4},
                     .dtype = dtype,
                     .dim = 8},
                    0, got.data());
  };
  read(e4m3, Dtype::f8_e4m3, 1);
  EXPECT_EQ((std::vector<float>{got.begin(), got.begin() + 7}),
            (std::vector<float>{0.001953125F, 0.013671875F, 0.015625F, 1.0F, 448.0F, -0.001953125F, -1.0F}));
  EXPECT_TRUE(std::isnan(got[7]));
  read(e5m2, Dtype::f8_e5m2, 0.5F);
  EXPECT_EQ((std::vector<float>{got.begin(), got.begin() + 6}),
            (std::vector<float>{7.62939453125e-06F, 2.288818359375e-05F, 3.0517578125e-05F, 0.5F, 28672.0F, -0.5F}));
  EXPECT_TRUE(std::isinf(got[6]) && std::isnan(got[7]));
}

}  // namespace
}  // namespace kvkeep::stored_side_test
