#pragma once
/// Pages for an engine without its own block manager: a fixed number of them, and the holders of each.

#include <cstdint>
#include <vector>

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

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/keep/page_pool-inl.h"
#endif
