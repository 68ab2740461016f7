#pragma once
/// Pages for an engine without its own block manager: a fixed number of them, and the holders of each.

#include <cstdint>
#include <numeric>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/page_allocator.h"

namespace kvkeep {

/// A fixed number of pages and a count of holders for each. It owns no K or V: page p is entry p of every layer's
/// tensors (PagedKv). Pages are taken in the order 0, 1, 2, ...; a freed page is taken next, before all that were freed
/// earlier. So the same calls give the same pages. Not thread safe.
class PagePool final : public PageAllocator {
 public:
  /// `pages` free pages of `page_size` slots. Throws InvalidArgument for fewer than 0 pages, and for a size that is not
  /// a power of two up to 1024.
  PagePool(std::int32_t pages, std::int32_t page_size);

  /// Number of holders of a page; 0: it is free. Throws InvalidArgument for a page outside the pool.
  [[nodiscard]] std::int32_t references(std::int32_t page) const override;

  /// Returns a free page, now held once; -1 if there is none. Cost: O(1).
  [[nodiscard]] std::int32_t take() override;

  /// Removes one holder. Throws StateError for a page without holders, InvalidArgument for one outside the pool. Cost:
  /// O(1).
  void give_back(std::int32_t page) override;

  /// Adds one holder: a prefix is shared. Throws as give_back does. Cost: O(1).
  void retain(std::int32_t page);

  [[nodiscard]] std::int32_t free_pages() const { return static_cast<std::int32_t>(free_.size()); }
  [[nodiscard]] std::int32_t capacity() const { return static_cast<std::int32_t>(holders_.size()); }
  /// Slots per page.
  [[nodiscard]] std::int32_t page_size() const { return page_size_; }

 private:
  [[nodiscard]] std::int32_t& holders_of(std::int32_t page, const char* operation);

  std::int32_t page_size_;
  std::vector<std::int32_t> holders_;  ///< [pages]
  std::vector<std::int32_t> free_;     ///< the next page to be taken is last
};

inline PagePool::PagePool(std::int32_t pages, std::int32_t page_size) : page_size_(page_size) {
  KVKEEP_REQUIRE(pages >= 0, "page pool: ", pages, " pages; allowed 0 or more");
  KVKEEP_REQUIRE(is_page_size(page_size), "page pool: pages of ", page_size, " slots; allowed a power of two up to ",
                 kLargestPage);
  holders_.assign(static_cast<std::size_t>(pages), 0);
  free_.resize(holders_.size());
  std::iota(free_.rbegin(), free_.rend(), 0);
}

inline std::int32_t PagePool::references(std::int32_t page) const {
  KVKEEP_REQUIRE(page >= 0 && page < capacity(), "page pool: no page ", page, "; allowed 0 to ", capacity() - 1);
  return holders_[static_cast<std::size_t>(page)];
}

inline std::int32_t& PagePool::holders_of(std::int32_t page, const char* operation) {
  KVKEEP_REQUIRE_AS(StateError, references(page) > 0, operation, ": nobody holds page ", page,
                    "; allowed between take() and the last give_back()");
  return holders_[static_cast<std::size_t>(page)];
}

inline std::int32_t PagePool::take() {
  if (free_.empty()) return -1;
  const std::int32_t page = free_.back();
  free_.pop_back();
  holders_[static_cast<std::size_t>(page)] = 1;
  return page;
}

inline void PagePool::give_back(std::int32_t page) {
  std::int32_t& holders = holders_of(page, "give back");
  if (--holders == 0) free_.push_back(page);
}

inline void PagePool::retain(std::int32_t page) { ++holders_of(page, "retain"); }

}  // namespace kvkeep
