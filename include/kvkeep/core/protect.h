#pragma once
/// Slots that stay whatever they score. A set, never a magic score.

#include <cstdint>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/variant.h"

namespace kvkeep {

/// Slots [0, sinks) and [length - recents, length).
struct Protected {
  std::int32_t sinks = 0;
  std::int32_t recents = 0;

  [[nodiscard]] KVKEEP_HD std::int32_t count() const { return sinks + recents; }
  [[nodiscard]] KVKEEP_HD bool holds(std::int32_t slot, std::int32_t length) const {
    return slot < sinks || slot >= length - recents;
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
