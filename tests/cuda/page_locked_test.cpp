// SPDX-License-Identifier: Apache-2.0
// Page-locked rooms: apart, under an exact cap, and used again.

#include "page_locked.h"

#include <cstring>
#include <map>

#include "device.h"
#include "kvkeep/core/error.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda::page_locked_test {
namespace {

using Rooms = OnDevice;

TEST_F(Rooms, KeepTheirBytesWhileOthersComeAndGo) {
  oracle::Random random(7);
  PageLocked memory(std::int64_t{1} << 16);
  std::map<int, std::unique_ptr<PageLocked::Room>> rooms;
  int refused = 0;
  for (int i = 0; i < 4000; ++i) {
    if (const auto left = rooms.find(random.between(0, 40)); left != rooms.end()) {
      for (std::int64_t b = 0; b < left->second->size(); ++b)
        ASSERT_EQ(left->second->bytes()[b], static_cast<std::byte>(left->first));
      rooms.erase(left);
    }
    const int mine = random.between(0, 40);
    if (rooms.contains(mine)) continue;
    try {
      auto room = memory.room(random.between(1, 5000));
      EXPECT_EQ(room->size() % 64, 0);
      std::memset(room->bytes(), mine, static_cast<std::size_t>(room->size()));
      rooms.emplace(mine, std::move(room));
    } catch (const StateError&) {
      ++refused;
    }
    std::int64_t held = 0;
    for (const auto& [id, room] : rooms) held += room->size();
    ASSERT_EQ(memory.bytes(), held);
    ASSERT_LE(held, 1 << 16);
  }
  EXPECT_GT(refused, 10);
  rooms.clear();
  EXPECT_EQ(memory.room(1 << 16)->size(), 1 << 16) << "all of it is one piece again";
}

TEST_F(Rooms, AreRefusedAboveTheCapWithNumbers) {
  PageLocked memory(1000);
  const auto room = memory.room(900);
  EXPECT_EQ(room->size(), 960);
  try {
    static_cast<void>(memory.room(1));
    ADD_FAILURE();
  } catch (const StateError& full) {
    EXPECT_NE(std::string_view(full.what()).find("no room for 64 bytes"), std::string_view::npos) << full.what();
  }
  EXPECT_EQ(memory.bytes(), 960);
}

/// A slab is taken for many rooms, and given back before the next is taken.
TEST_F(Rooms, ShareSlabsAndGiveEmptyOnesBack) {
  constexpr std::int64_t kSlab = std::int64_t{32} << 20;
  PageLocked memory(2 * kSlab);
  auto first = memory.room(kSlab), second = memory.room(64), third = memory.room(64);
  EXPECT_EQ(third->bytes() - second->bytes(), 64);
  EXPECT_THROW(static_cast<void>(memory.room(kSlab)), StateError);
  first.reset();
  EXPECT_NO_THROW(static_cast<void>(memory.room(kSlab)));
  second.reset(), third.reset();
  EXPECT_NO_THROW(static_cast<void>(memory.room(2 * kSlab)));
}

}  // namespace
}  // namespace kvkeep::cuda::page_locked_test
