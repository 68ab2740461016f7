#pragma once
/// Pages for an engine that has no block manager of its own: a fixed number of them, and who holds each.

#include <cstdint>
#include <vector>

#include "kvkeep/core/page_allocator.h"

namespace kvkeep {

/// A fixed number of pages with their holders. It owns no K and V: page p is row p of every layer's tensors (PagedKv).
/// Pages are taken in the order 0, 1, 2, ...; one that became free is the next to be taken, before all that became free
/// earlier. So the same calls give the same pages. Not thread safe.
class PagePool final : public PageAllocator {
 public:
  /// `pages` pages, all free, of `page_size` slots. Throws InvalidArgument for fewer than 0 pages, and a size that is
  /// not a power of two up to 1024.
  PagePool(std::int32_t pages, std::int32_t page_size);

  /// Holders of a page; 0: it is free. Throws InvalidArgument for a page outside the pool.
  [[nodiscard]] std::int32_t references(std::int32_t page) const override;

  /// A free page, from now on held once; -1: there is none. Cost: O(1).
  [[nodiscard]] std::int32_t take() override;

  /// One holder less. Throws StateError for a page that nobody holds, InvalidArgument for one outside the pool. Cost:
  /// O(1).
  void give_back(std::int32_t page) override;

  /// One holder more: a prefix is shared. Throws as give_back does. Cost: O(1).
  void retain(std::int32_t page);

  [[nodiscard]] std::int32_t free_pages() const { return static_cast<std::int32_t>(free_.size()); }
  [[nodiscard]] std::int32_t capacity() const { return static_cast<std::int32_t>(holders_.size()); }
  /// Slots of a page.
  [[nodiscard]] std::int32_t page_size() const { return page_size_; }

 private:
  [[nodiscard]] std::int32_t& holders_of(std::int32_t page, const char* operation);

  std::int32_t page_size_;
  std::vector<std::int32_t> holders_;  ///< [pages]
  std::vector<std::int32_t> free_;     ///< the next to be taken last
};

}  // namespace kvkeep
