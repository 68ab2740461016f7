#include "kvkeep/keep/compact.h"

#include <ATen/Parallel.h>

#include <cstring>

#include "kvkeep/core/dispatch.h"
#include "stream_lanes.h"

namespace kvkeep {
namespace {

/// Events that move more than this write past the caches: what they overwrite need not be read first, and nobody reads it soon.
constexpr std::int64_t kCachedBytes = std::int64_t{16} << 20;

/// Slots that already stand where they belong.
std::size_t unmoved(std::span<const std::int32_t> kept) {
  std::size_t j = 0;
  while (j < kept.size() && kept[j] == static_cast<std::int32_t>(j)) ++j;
  return j;
}

/// Calls move(to, from, bytes) for every run of neighbouring kept slots that does not already stand where it belongs, ascending.
template <class Move>
void move_runs(const SlotAddress& side, std::span<const std::int32_t> kept, const Move& move) {
  const bool packed = side.stride == side.width;
  for (std::size_t j = unmoved(kept); j < kept.size();) {
    std::size_t run = 1;
    if (packed)
      while (j + run < kept.size() && kept[j + run] == kept[j] + static_cast<std::int32_t>(run)) ++run;
    move(side.at(static_cast<std::int64_t>(j)), side.at(kept[j]), side.width * static_cast<std::int64_t>(run));
    j += run;
  }
}

void check(const RowTable& table, const KeepSet& keep) {
  require(keep.indptr.size() == table.rows.size() + 1, "compact: the keep set covers ", static_cast<std::int64_t>(keep.indptr.size()) - 1, " rows; given ",
          table.rows.size(), " rows");
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    std::int32_t last = -1;
    for (const std::int32_t slot : keep.row(r)) {
      require(slot > last && slot < table.rows[r].length, "compact: row ", r, " keeps slot ", slot, " after ", last, "; allowed ascending slots below ",
              table.rows[r].length);
      last = slot;
    }
  }
}

}  // namespace

void compact_slots(const SlotAddress& side, std::span<const std::int32_t> kept) {
  move_runs(side, kept, [](std::byte* to, const std::byte* from, std::int64_t bytes) { std::memmove(to, from, static_cast<std::size_t>(bytes)); });
}

std::int64_t bytes_to_move(const RowTable& table, const KeepSet& keep) {
  std::int64_t bytes = 0;
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const auto kept = keep.row(r);
    bytes += static_cast<std::int64_t>(kept.size() - unmoved(kept)) * (table.rows[r].keys.width + table.rows[r].values.width);
  }
  return bytes;
}

void compact(const RowTable& table, const KeepSet& keep) {
  dispatch("compact", table.device, [&] {
    check(table, keep);
    const bool stream = bytes_to_move(table, keep) > kCachedBytes;
    at::parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
        for (const SlotAddress& side : {table.rows[r].keys, table.rows[r].values})
          if (stream) move_runs(side, keep.row(r), cpu::stream_forward);
          else compact_slots(side, keep.row(r));
      }
      if (stream) cpu::flush_streams();
    });
  });
}

}  // namespace kvkeep
