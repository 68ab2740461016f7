#pragma once
/// What an event asks of whoever hands out the pages of a paged cache. An engine implements it over its own block
/// manager, or takes `PagePool`.

#include <bit>
#include <cstdint>

namespace kvkeep {

inline constexpr std::int32_t kLargestPage = 1024;

/// What a page may hold: a power of two up to kLargestPage slots.
[[nodiscard]] constexpr bool is_page_size(std::int64_t slots) {
  return slots >= 1 && slots <= kLargestPage && std::has_single_bit(static_cast<std::uint64_t>(slots));
}

/// An event calls take() before it changes anything and give_back() after it has settled everything. What they throw
/// passes through it: after take() all is as before, after give_back() the event has happened, whole, and every other
/// page was given back.
class PageAllocator {
 public:
  virtual ~PageAllocator() = default;

  /// Holders of a page: 1 for a page of one sequence, more for a shared prefix. An event never writes a page of which
  /// it is more than 1.
  [[nodiscard]] virtual std::int32_t references(std::int32_t page) const = 0;

  /// A free page, from now on held once; -1: there is none.
  [[nodiscard]] virtual std::int32_t take() = 0;

  /// One holder less. A page that nobody holds is free. On a GPU the event's last reading of it may still be under way
  /// then: whoever gets the page next must write it on the same stream, or wait for it.
  virtual void give_back(std::int32_t page) = 0;
};

}  // namespace kvkeep
