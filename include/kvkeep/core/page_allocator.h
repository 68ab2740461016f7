#pragma once
/// What an event needs from the owner of the pages of a paged cache. An engine implements it over its own block
/// manager, or uses `PagePool`.

#include <bit>
#include <cstdint>

namespace kvkeep {

inline constexpr std::int32_t kLargestPage = 1024;

/// Whether a page may hold this many slots: a power of two up to kLargestPage.
[[nodiscard]] constexpr bool is_page_size(std::int64_t slots) {
  return slots >= 1 && slots <= kLargestPage && std::has_single_bit(static_cast<std::uint64_t>(slots));
}

/// An event calls take() before it changes anything and give_back() after it has settled everything. Their exceptions
/// pass through it. If take() throws, nothing has changed. If give_back() throws, the event is complete and every other
/// page has been given back.
class PageAllocator {
 public:
  virtual ~PageAllocator() = default;

  /// Number of holders of a page: 1 for a page of one sequence, more for a shared prefix. An event never writes a page
  /// with more than 1.
  [[nodiscard]] virtual std::int32_t references(std::int32_t page) const = 0;

  /// Returns a free page, now held once; -1 if there is none.
  [[nodiscard]] virtual std::int32_t take() = 0;

  /// Removes one holder. A page without holders is free. On a GPU the event may still be reading it at that time: the
  /// next owner of the page must write it on the same stream, or wait for that stream.
  virtual void give_back(std::int32_t page) = 0;
};

}  // namespace kvkeep
