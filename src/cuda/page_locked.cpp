// SPDX-License-Identifier: Apache-2.0
#include "page_locked.h"

#include <algorithm>
#include <numeric>

#include "kvkeep/core/error.h"
#include "memory.h"

namespace kvkeep::cuda {
namespace {

constexpr std::int64_t kAlignment = 64, kSlabBytes = std::int64_t{32} << 20;

}  // namespace

PageLocked::~PageLocked() { free_empty(); }

std::unique_ptr<PageLocked::Room> PageLocked::room(std::int64_t bytes) {
  const std::int64_t wanted = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const auto found = [&]() -> std::unique_ptr<Room> {
    for (Slab& slab : slabs_) {
      if (slab.bytes - slab.used < wanted) continue;
      std::int64_t end = 0;  // of the room before
      for (const auto& [offset, size] : slab.rooms) {
        if (offset - end >= wanted) break;
        end = offset + size;
      }
      if (slab.bytes - end < wanted) continue;
      return std::make_unique<Room>(slab, end, wanted);
    }
    return nullptr;
  };
  if (auto room = found()) return room;
  grow(wanted);
  return found();
}

void PageLocked::grow(std::int64_t bytes) {
  free_empty();
  const std::int64_t taken = std::accumulate(slabs_.begin(), slabs_.end(), std::int64_t{0},
                                             [](std::int64_t sum, const Slab& slab) { return sum + slab.bytes; }),
                     left = (most_ - taken) / kAlignment * kAlignment;
  KVKEEP_REQUIRE_AS(StateError, bytes <= left, "folded spans: no room for ", bytes,
                    " bytes of factors in page-locked memory; ", taken, " of ", most_,
                    " are taken; allowed more host_bytes, or fewer sequences");
  const std::int64_t size = std::min(std::max(bytes, kSlabBytes), left);
  Slabs one;
  one.push_back({.at = nullptr, .bytes = size});
  one.back().at = take_page_locked(size);
  slabs_.splice(slabs_.end(), one);
}

void PageLocked::free_empty() noexcept {
  std::erase_if(slabs_, [](const Slab& slab) {
    if (slab.used > 0) return false;
    free_page_locked(slab.at);
    return true;
  });
}

std::int64_t PageLocked::bytes() const {
  return std::accumulate(slabs_.begin(), slabs_.end(), std::int64_t{0},
                         [](std::int64_t sum, const Slab& slab) { return sum + slab.used; });
}

PageLocked::Room::Room(Slab& slab, std::int64_t offset, std::int64_t bytes) : slab_(slab), offset_(offset) {
  slab.rooms.emplace(offset, bytes);
  slab.used += bytes;
}

PageLocked::Room::~Room() {
  slab_.used -= size();
  slab_.rooms.erase(offset_);
}

}  // namespace kvkeep::cuda
