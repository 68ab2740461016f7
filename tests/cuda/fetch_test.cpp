// SPDX-License-Identifier: Apache-2.0
// Pieces of bytes brought to the device, as lists on the device name them.

#include "fetch.h"

#include "device.h"
#include "kvkeep/core/error.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda::fetch_test {
namespace {

using Fetch = OnDevice;

/// Pieces of all sizes and alignments; every byte beside them stays what it was.
TEST_F(Fetch, CopiesEveryPieceOfEveryListAndNothingElse) {
  oracle::Random random(60);
  constexpr std::int32_t kStride = 5;
  for (const std::int64_t offset : {0, 8, 4, 2, 1}) {
    std::vector<std::byte> source(60000), before(source.size(), std::byte{0xEE}), want = before;
    for (std::byte& b : source) b = static_cast<std::byte>(random.between(0, 255));
    in_every_order([&] {
      const DeviceArray<std::byte> from(source), to(before);
      std::vector<FarPiece> pieces(3 * kStride);
      const std::vector<std::int32_t> counts{kStride, 0, 2};
      std::int64_t at = 0;
      want = before;
      for (std::size_t list = 0; list < counts.size(); ++list)
        for (std::int32_t i = 0; i < counts[list]; ++i) {
          const std::int64_t bytes = random.one_of({0, 1, 2, 15, 16, 17, 64, 4096, 8193}), place = at + offset;
          pieces[list * kStride + static_cast<std::size_t>(i)] = {from.data() + place, to.data() + place, bytes};
          std::copy_n(source.begin() + place, bytes, want.begin() + place);
          at = (place + bytes + 31) / 32 * 32;
        }
      const DeviceArray<FarPiece> there(pieces);
      const DeviceArray<std::int32_t> told(counts);
      launch_fetch({.pieces = there.data(), .counts = told.data(), .lists = 3, .stride = kStride}, nullptr);
      ASSERT_EQ(to.download(), want) << "offset " << offset;
    });
  }
}

TEST_F(Fetch, TakesMorePiecesThanAListHasBlocks) {
  constexpr std::int32_t kPieces = 67;
  std::vector<std::byte> source(kPieces * 16);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i % 253);
  in_every_order([&] {
    const DeviceArray<std::byte> from(source), to(source.size());
    std::vector<FarPiece> pieces;
    for (std::int64_t p = 0; p < kPieces; ++p)
      pieces.push_back({from.data() + p * 16, to.data() + (kPieces - 1 - p) * 16, 16});
    const DeviceArray<FarPiece> there(pieces);
    const DeviceArray<std::int32_t> told(std::vector<std::int32_t>{kPieces});
    launch_fetch({.pieces = there.data(), .counts = told.data(), .lists = 1, .stride = kPieces}, nullptr);
    const std::vector<std::byte> got = to.download();
    for (std::size_t p = 0; p < kPieces; ++p)
      ASSERT_TRUE(std::equal(got.begin() + static_cast<std::ptrdiff_t>(16 * p),
                             got.begin() + static_cast<std::ptrdiff_t>(16 * p + 16),
                             source.begin() + static_cast<std::ptrdiff_t>(16 * (kPieces - 1 - p))))
          << p;
  });
}

TEST_F(Fetch, HasNothingToDoWithoutPiecesAndRefusesSizesBelowZero) {
  EXPECT_NO_THROW(launch_fetch({.lists = 0, .stride = 4}, nullptr));
  EXPECT_NO_THROW(launch_fetch({.lists = 4, .stride = 0}, nullptr));
  EXPECT_THROW(launch_fetch({.lists = -1, .stride = 4}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_fetch({.lists = 1, .stride = -4}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_fetch({.lists = 65536, .stride = 4}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::fetch_test
