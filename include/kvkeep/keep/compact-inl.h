#pragma once
// Bodies of compact.h: compiled by src/keep, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cstring>
#include <vector>

#include "kvkeep/core/device.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/keep/compact.h"
#include "kvkeep/simd/stream_lanes.h"

namespace kvkeep {
namespace compact_detail {

/// Events that move more than this write past the caches: the overwritten bytes need not be read first, and nobody
/// reads the new ones soon.
inline constexpr std::int64_t kCachedBytes = std::int64_t{16} << 20;

/// Calls move(to, from, bytes) for every run of neighbouring kept slots that is not in place yet, ascending. `to`: the
/// side as it will be.
template <class Move>
void move_runs(const SlotAddress& side, const SlotAddress& to, std::span<const std::int32_t> kept, const Move& move) {
  const bool packed = side.stride == side.width;
  for (std::size_t j = 0; j < kept.size();) {
    const auto slot = static_cast<std::int64_t>(j);
    std::size_t run = 1;
    if (packed) {
      const auto most = static_cast<std::size_t>(
          std::min<std::int64_t>({side.run(kept[j]), to.run(slot), static_cast<std::int64_t>(kept.size() - j)}));
      while (run < most && kept[j + run] == kept[j] + static_cast<std::int32_t>(run)) ++run;
    }
    std::byte *destination = to.at(slot), *source = side.at(kept[j]);
    if (destination != source) move(destination, source, side.width * static_cast<std::int64_t>(run));
    j += run;
  }
}

/// Where the rows of every sequence go: null for the sequence's own pages.
class Destinations {
 public:
  explicit Destinations(std::span<const PageMove> moves) {
    for (const PageMove& move : moves) {
      if (pages_.size() <= static_cast<std::size_t>(move.sequence))
        pages_.resize(static_cast<std::size_t>(move.sequence) + 1);
      pages_[static_cast<std::size_t>(move.sequence)] = move.after.data();
    }
  }
  [[nodiscard]] SlotAddress of(const Row& row, SlotAddress side) const {
    const auto s = static_cast<std::size_t>(row.sequence);
    if (side.pages != nullptr && s < pages_.size() && pages_[s] != nullptr) side.pages = pages_[s];
    return side;
  }

 private:
  std::vector<const std::int32_t*> pages_;
};

template <class Body>
void each_side(const Row& row, const Body& body) {
  for (int s = 0; s < Row::kSides; ++s)
    if (const SlotAddress* const side = row.side(s)) body(*side);
}

inline std::int64_t bytes_of(const Row& row, const KeepSet& keep, std::size_t r, const Destinations& destinations) {
  if (!keep.firm.empty()) return (keep.count(r) - keep.firm[r]) * row.slot_bytes();
  const SlotAddress from = row.keys, to = destinations.of(row, from);
  const auto kept = keep.row(r);
  std::int64_t slots = 0;
  for (std::size_t j = 0; j < kept.size(); ++j)
    slots += from.at(kept[j]) != to.at(static_cast<std::int64_t>(j)) ? 1 : 0;
  return slots * row.slot_bytes();
}

inline void check(const RowTable& table, const KeepSet& keep) {
  KVKEEP_REQUIRE(keep.indptr.size() == table.rows.size() + 1, "compact: the keep set covers ",
                 static_cast<std::int64_t>(keep.indptr.size()) - 1, " rows; given ", table.rows.size(), " rows");
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    std::int32_t last = -1;
    for (const std::int32_t slot : keep.row(r)) {
      KVKEEP_REQUIRE(slot > last && slot < table.rows[r].length, "compact: row ", r, " keeps slot ", slot, " after ",
                     last, "; allowed ascending slots below ", table.rows[r].length);
      last = slot;
    }
  }
}

}  // namespace compact_detail

KVKEEP_INLINE void compact_slots(const SlotAddress& side, std::span<const std::int32_t> kept) {
  compact_detail::move_runs(side, side, kept, [](std::byte* to, const std::byte* from, std::int64_t bytes) {
    std::memmove(to, from, static_cast<std::size_t>(bytes));
  });
}

KVKEEP_INLINE std::int64_t bytes_to_move(const RowTable& table, const KeepSet& keep, std::span<const PageMove> moves) {
  const compact_detail::Destinations destinations(moves);
  std::int64_t bytes = 0;
  for (std::size_t r = 0; r < table.rows.size(); ++r)
    bytes += compact_detail::bytes_of(table.rows[r], keep, r, destinations);
  return bytes;
}

KVKEEP_INLINE std::int64_t bytes_to_move(const RowTable& table, const KeepSet& keep, std::size_t row) {
  return compact_detail::bytes_of(table.rows[row], keep, row, compact_detail::Destinations({}));
}

KVKEEP_INLINE void compact(const RowTable& table, const KeepSet& keep, std::span<const PageMove> moves) {
  require_host("compact", table.device);
  compact_detail::check(table, keep);
  const compact_detail::Destinations destinations(moves);
  const bool stream = bytes_to_move(table, keep, moves) > compact_detail::kCachedBytes;
  parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r)
      compact_detail::each_side(table.rows[r], [&](const SlotAddress& side) {
        const SlotAddress to = destinations.of(table.rows[r], side);
        if (stream)
          compact_detail::move_runs(side, to, keep.row(r), cpu::stream_forward);
        else
          compact_detail::move_runs(side, to, keep.row(r),
                                    [](std::byte* at, const std::byte* from, std::int64_t bytes) {
                                      std::memmove(at, from, static_cast<std::size_t>(bytes));
                                    });
      });
    if (stream) cpu::flush_streams();
  });
}

}  // namespace kvkeep
