#pragma once
/// How much one row may keep at an event. No LibTorch in here.

#include <cstdint>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/protect.h"

namespace kvkeep {

struct RowLimit {
  std::int32_t budget = 0;  ///< slots that may stay; if the rows of a layer share one budget, their mean
  bool due =
      false;  ///< some slots of this row may go; a row that is not due keeps every slot, and its scores are ignored
  Protected guarded;  ///< slots that stay whatever they score, at most `budget` of them; pinned ranges are in
                      ///< Limits::pins, and nobody reads them if the row is not due
};

/// Slots that rank before all others in their segment, whatever they score. Published scorers do this by overwriting
/// their scores with a maximum (variant official).
struct Padding {
  std::int32_t oldest = 0;
  std::int32_t newest = 0;
  [[nodiscard]] KVKEEP_HD bool holds(std::int32_t slot, std::int32_t length) const {
    return slot < oldest || slot >= length - newest;
  }
};

/// What stays of a flat row of `length` whose highest ranks stay: the protected slots, and those that padding ranks
/// first.
KVKEEP_HD inline Protected with_padding(const RowLimit& limit, Padding padding, std::int32_t length) {
  const auto most = [](std::int32_t a, std::int32_t b) { return a > b ? a : b; };
  return protect(length, limit.budget, most(limit.guarded.sinks, padding.oldest),
                 most(limit.guarded.recents, padding.newest), Variant::official);
}

/// What is protected for `heads` rows of `length` that keep the same slots: what any of them protects, as far as the
/// budget of the first allows.
KVKEEP_HD inline Protected protected_by_any(const RowLimit* limits, std::int32_t heads, std::int32_t length,
                                            Variant variant) {
  if (limits->guarded.ranges > 0) return limits->guarded;  // pinned spans; such rows hold the same tokens
  Protected all;
  for (std::int32_t h = 0; h < heads; ++h) {
    const Protected& own = limits[h].guarded;
    all = {own.sinks > all.sinks ? own.sinks : all.sinks, own.recents > all.recents ? own.recents : all.recents};
  }
  return protect(length, limits->budget, all.sinks, all.recents, variant);
}

}  // namespace kvkeep
