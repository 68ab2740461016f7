// SPDX-License-Identifier: Apache-2.0
// The checksum of a saved sequence.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <random>
#include <set>
#include <vector>

#include "kvkeep/state/state_file.h"

namespace kvkeep::state_checksum_test {
namespace {

using Data = std::vector<std::byte>;

Data random_bytes(std::uint32_t seed, std::size_t size) {
  std::mt19937 random(seed);
  Data bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST(Checksum, SeesEveryBitThatFlips) {
  for (std::size_t size = 1; size <= 200; ++size) {
    Data bytes = random_bytes(static_cast<std::uint32_t>(size), size);
    const std::uint64_t whole = checksum(bytes);
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] ^= std::byte{1} << bit % 8;
      EXPECT_NE(checksum(bytes), whole) << size << " bytes, bit " << bit;
      bytes[bit / 8] ^= std::byte{1} << bit % 8;
    }
    EXPECT_EQ(checksum(bytes), whole);
  }
}

TEST(Checksum, SeesWhatMovedWasLostOrAdded) {
  std::set<std::uint64_t> sums;
  for (std::size_t size = 0; size <= 300; ++size) sums.insert(checksum(Data(size)));
  EXPECT_EQ(sums.size(), 301U) << "zeros of any length";
  Data bytes = random_bytes(1, 1024);
  for (const std::size_t a : {0, 8, 64, 512})
    for (const std::size_t b : {16, 72, 128, 960}) {
      Data swapped = bytes;
      std::swap_ranges(swapped.begin() + static_cast<std::ptrdiff_t>(a),
                       swapped.begin() + static_cast<std::ptrdiff_t>(a) + 8,
                       swapped.begin() + static_cast<std::ptrdiff_t>(b));
      EXPECT_TRUE(sums.insert(checksum(swapped)).second) << a << " and " << b;
    }
  Data shifted = bytes;
  std::rotate(shifted.begin(), shifted.begin() + 64, shifted.end());
  EXPECT_TRUE(sums.insert(checksum(shifted)).second) << "blocks in another order";
}

TEST(Checksum, SeesABitThatFlipsInTwoWords) {
  Data bytes = random_bytes(1, 512);
  const std::uint64_t whole = checksum(bytes);
  for (std::size_t bit = 0; bit < 64; ++bit)
    for (std::size_t apart = 8; apart <= 384; apart += 8) {
      const auto flip = [&](std::size_t word) { bytes[word + bit / 8] ^= std::byte{1} << bit % 8; };
      flip(64), flip(64 + apart);
      EXPECT_NE(checksum(bytes), whole) << "bit " << bit << " of words " << apart << " bytes apart";
      flip(64), flip(64 + apart);
    }
}

TEST(Checksum, SpreadsOverAllItsBits) {
  std::vector<int> ones(64);
  constexpr int kCases = 4000;
  for (int i = 0; i < kCases; ++i) {
    Data bytes(256);
    const std::uint64_t a = checksum(bytes);
    bytes[static_cast<std::size_t>(i) % 256] = static_cast<std::byte>(1 + i / 256);
    for (int bit = 0; bit < 64; ++bit) ones[static_cast<std::size_t>(bit)] += (a ^ checksum(bytes)) >> bit & 1;
  }
  for (const int count : ones) EXPECT_NEAR(count, kCases / 2, kCases / 8);
}

}  // namespace
}  // namespace kvkeep::state_checksum_test
