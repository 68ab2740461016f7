#pragma once
/// Pinned positions as slots of a row: where they are, and what room they leave. The same on a device.

#include <cstdint>

#include "kvkeep/core/pins.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/slot.h"
#include "kvkeep/core/strict_math.h"

namespace kvkeep {

/// The slots of a row, from `first` on, that hold positions of `span`. Reads Row::positions.
KVKEEP_HD inline SlotRange slots_at(const Row& row, PositionSpan span, std::int32_t first = 0) {
  const auto slot = [&](std::int32_t position) {
    std::int32_t low = first < row.length ? first : row.length, high = row.length;
    while (low < high) {
      const std::int32_t middle = low + (high - low) / 2;
      if (row.positions[middle] < position)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  };
  return {slot(span.begin), slot(span.end)};
}

/// How many slots from `first` on are pinned, by `count` spans.
KVKEEP_HD inline std::int32_t pinned_slots(const Row& row, const PositionSpan* spans, std::int32_t count,
                                           std::int32_t first) {
  std::int32_t slots = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const SlotRange range = slots_at(row, spans[i], first);
    slots += range.to - range.from;
  }
  return slots;
}

/// Adds the pinned slots of a row to its protected ones. Recents are as many of the wanted ones as fit into `room`
/// slots beside sinks and pins. `ranges`: room for `count`. Requires: sinks and pinned slots fit.
KVKEEP_HD inline void protect_pinned(const Row& row, const PositionSpan* spans, std::int32_t count, std::int32_t room,
                                     Protected& guarded, SlotRange* ranges) {
  guarded.pins = ranges;
  for (std::int32_t i = 0; i < count; ++i) {
    const SlotRange slots = slots_at(row, spans[i], guarded.sinks);
    if (slots.from < slots.to) ranges[guarded.ranges++] = slots;
  }
  const std::int32_t wanted = guarded.recents;
  const auto older = [&] { return guarded.pinned_in({guarded.sinks, row.length - guarded.recents}); };
  std::int32_t fit = guarded.recents = 0;
  do {  // pins among the recents leave room for more of them
    guarded.recents = fit;
    const std::int32_t left = room - guarded.sinks - older();
    fit = wanted < left ? wanted : left;
  } while (fit > guarded.recents);
  const std::int32_t end = row.length - guarded.recents;
  while (guarded.ranges > 0 && ranges[guarded.ranges - 1].from >= end) --guarded.ranges;
  if (guarded.ranges > 0 && ranges[guarded.ranges - 1].to > end) ranges[guarded.ranges - 1].to = end;
  guarded.pinned = older();
}

}  // namespace kvkeep
