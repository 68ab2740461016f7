#pragma once
// Bodies of page_pool.h: compiled by src/keep, or where they are included under KVKEEP_HEADER_ONLY.

#include <numeric>

#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/keep/page_pool.h"

namespace kvkeep {
KVKEEP_INLINE PagePool::PagePool(std::int32_t pages, std::int32_t page_size) : page_size_(page_size) {
  KVKEEP_REQUIRE(pages >= 0, "page pool: ", pages, " pages; allowed 0 or more");
  KVKEEP_REQUIRE(is_page_size(page_size), "page pool: pages of ", page_size, " slots; allowed a power of two up to ",
                 kLargestPage);
  holders_.assign(static_cast<std::size_t>(pages), 0);
  free_.resize(holders_.size());
  std::iota(free_.rbegin(), free_.rend(), 0);
}

KVKEEP_INLINE std::int32_t PagePool::references(std::int32_t page) const {
  KVKEEP_REQUIRE(page >= 0 && page < capacity(), "page pool: no page ", page, "; allowed 0 to ", capacity() - 1);
  return holders_[static_cast<std::size_t>(page)];
}

KVKEEP_INLINE std::int32_t& PagePool::holders_of(std::int32_t page, const char* operation) {
  KVKEEP_REQUIRE_AS(StateError, references(page) > 0, operation, ": nobody holds page ", page,
                    "; allowed between take() and the last give_back()");
  return holders_[static_cast<std::size_t>(page)];
}

KVKEEP_INLINE std::int32_t PagePool::take() {
  if (free_.empty()) return -1;
  const std::int32_t page = free_.back();
  free_.pop_back();
  holders_[static_cast<std::size_t>(page)] = 1;
  return page;
}

KVKEEP_INLINE void PagePool::give_back(std::int32_t page) {
  std::int32_t& holders = holders_of(page, "give back");
  if (--holders == 0) free_.push_back(page);
}

KVKEEP_INLINE void PagePool::retain(std::int32_t page) { ++holders_of(page, "retain"); }

}  // namespace kvkeep
