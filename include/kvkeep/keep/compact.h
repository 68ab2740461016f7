#pragma once
/// Compaction: kept slots move to the front of their row, in order. The only writer of K and V.

#include <cstdint>
#include <span>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/row.h"
#include "kvkeep/keep/pages.h"

namespace kvkeep {

/// Moves slot `kept[j]` to slot j for every j, ascending, in place: since kept[j] >= j no unread slot is overwritten.
/// Bytes are opaque, so any dtype works. Requires: `kept` ascending, unique, inside the row. Cost: kept.size() * width
/// bytes read and written, less the slots that are already in place.
void compact_slots(const SlotAddress& side, std::span<const std::int32_t> kept);

/// Bytes of K, V and scales that `compact` will read; it will write as many. An upper bound if the slots are on a
/// device.
[[nodiscard]] std::int64_t bytes_to_move(const RowTable& table, const KeepSet& keep,
                                         std::span<const PageMove> moves = {});
/// The same of one row that keeps its pages.
[[nodiscard]] std::int64_t bytes_to_move(const RowTable& table, const KeepSet& keep, std::size_t row);

/// Compacts K, V and their scales of every row in one parallel pass. Rows in pages move to the pages that `moves` names
/// for their sequence; a sequence without a move keeps its pages in their order. Throws InvalidArgument, before the
/// first byte moves, if `keep` does not fit the rows: wrong row count, slots out of range or not ascending.
void compact(const RowTable& table, const KeepSet& keep, std::span<const PageMove> moves = {});

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/keep/compact-inl.h"
#endif
