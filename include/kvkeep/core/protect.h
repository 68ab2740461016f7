#pragma once
/// Slots that stay whatever they score. A set, never a magic score.

#include <cstdint>

#include "kvkeep/core/hd.h"

namespace kvkeep {

/// `strict`: our corrected form, which keeps every guarantee. `official`: the published code, slot for slot, wherever
/// it terminates.
enum class Variant : std::uint8_t { strict, official };

/// Slots [from, to).
struct SlotRange {
  std::int32_t from;
  std::int32_t to;
};

/// Slots [0, sinks), [length - recents, length), and pinned ranges between them.
struct Protected {
  std::int32_t sinks = 0;
  std::int32_t recents = 0;
  std::int32_t ranges = 0;
  std::int32_t pinned = 0;          ///< slots in all ranges
  const SlotRange* pins = nullptr;  ///< [ranges] ascending, disjoint, within [sinks, length - recents)

  [[nodiscard]] KVKEEP_HD std::int32_t count() const { return sinks + recents + pinned; }
  [[nodiscard]] KVKEEP_HD bool holds(std::int32_t slot, std::int32_t length) const {
    return slot < sinks || slot >= length - recents || pins_slot(slot);
  }
  [[nodiscard]] KVKEEP_HD bool pins_slot(std::int32_t slot) const {
    std::int32_t low = 0, high = ranges;  // of the first range that ends after the slot
    while (low < high) {
      const std::int32_t middle = low + (high - low) / 2;
      if (pins[middle].to <= slot)
        low = middle + 1;
      else
        high = middle;
    }
    return low < ranges && slot >= pins[low].from;
  }
  /// Pinned slots in [from, to).
  [[nodiscard]] KVKEEP_HD std::int32_t pinned_in(SlotRange slots) const {
    std::int32_t count = 0;
    for (std::int32_t i = 0; i < ranges; ++i) {
      const std::int32_t from = pins[i].from > slots.from ? pins[i].from : slots.from,
                         to = pins[i].to < slots.to ? pins[i].to : slots.to;
      if (from < to) count += to - from;
    }
    return count;
  }
};

/// The part of the requested sinks and recents that fits into `budget` slots of a row of `length`. Strict: recents
/// shrink first. Official: sinks shrink first.
KVKEEP_HD inline Protected protect(std::int32_t length, std::int32_t budget, std::int32_t sink, std::int32_t recent,
                                   Variant variant) {
  const auto least = [](std::int32_t a, std::int32_t b) { return a < b ? a : b; };
  const std::int32_t room = least(budget, length);
  if (variant == Variant::official) {
    const std::int32_t recents = least(recent, room);
    return {least(sink, room - recents), recents};
  }
  const std::int32_t sinks = least(sink, room);
  return {sinks, least(recent, room - sinks)};
}

}  // namespace kvkeep
