#include "kvkeep/keep/compact.h"

#include <ATen/Parallel.h>

#include <cstring>

#include "kvkeep/core/dispatch.h"

namespace kvkeep {
namespace {

/// Slots that already stand where they belong.
std::size_t unmoved(std::span<const std::int32_t> kept) {
  std::size_t j = 0;
  while (j < kept.size() && kept[j] == static_cast<std::int32_t>(j)) ++j;
  return j;
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
  const bool packed = side.stride == side.width;
  for (std::size_t j = unmoved(kept); j < kept.size();) {
    std::size_t run = 1;
    if (packed)
      while (j + run < kept.size() && kept[j + run] == kept[j] + static_cast<std::int32_t>(run)) ++run;
    std::memmove(side.at(static_cast<std::int64_t>(j)), side.at(kept[j]), static_cast<std::size_t>(side.width) * run);
    j += run;
  }
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
    at::parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
        compact_slots(table.rows[r].keys, keep.row(r));
        compact_slots(table.rows[r].values, keep.row(r));
      }
    });
  });
}

}  // namespace kvkeep
