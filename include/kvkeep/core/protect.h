// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What of a row stays whatever it scores: sinks, recents, padding, pinned positions. Sets, never a magic score.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/slot.h"

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

// Pinned spans: positions that an engine protects, such as a system prompt or a tool result.

/// Logical positions [begin, end).
struct PositionSpan {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  [[nodiscard]] bool operator==(const PositionSpan&) const = default;
};

/// A set of positions, as ascending spans that neither overlap nor touch.
class PositionSpans {
 public:
  void add(PositionSpan span) {
    if (spans_.empty() || spans_.back().end < span.begin) {
      spans_.push_back(span);
      return;
    }
    std::vector<PositionSpan> all;
    for (const PositionSpan& one : spans_) {
      if (one.end < span.begin || one.begin > span.end) {
        all.push_back(one);
      } else {
        span = {std::min(span.begin, one.begin), std::max(span.end, one.end)};
      }
    }
    all.insert(std::ranges::upper_bound(all, span.begin, {}, &PositionSpan::begin), span);
    spans_ = std::move(all);
  }

  void remove(PositionSpan span) {
    std::vector<PositionSpan> left;
    for (const PositionSpan& one : spans_) {
      if (one.begin < span.begin) left.push_back({one.begin, std::min(one.end, span.begin)});
      if (one.end > span.end) left.push_back({std::max(one.begin, span.end), one.end});
    }
    spans_ = std::move(left);
  }

  /// Removes the positions from `end` on.
  void truncate(std::int32_t end) noexcept {
    while (!spans_.empty() && spans_.back().begin >= end) spans_.pop_back();
    if (!spans_.empty()) spans_.back().end = std::min(spans_.back().end, end);
  }

  [[nodiscard]] std::span<const PositionSpan> spans() const { return spans_; }
  [[nodiscard]] bool empty() const { return spans_.empty(); }

 private:
  std::vector<PositionSpan> spans_;
};

/// Whether ascending spans hold a position.
[[nodiscard]] inline bool holds(std::span<const PositionSpan> spans, std::int32_t position) {
  const auto after = std::ranges::upper_bound(spans, position, {}, &PositionSpan::begin);
  return after != spans.begin() && position < std::prev(after)->end;
}

/// How many positions of the spans are at or after `first`.
[[nodiscard]] inline std::int64_t positions_from(std::int32_t first, std::span<const PositionSpan> spans) {
  std::int64_t count = 0;
  for (const PositionSpan& span : spans) count += std::max(0, span.end - std::max(span.begin, first));
  return count;
}

// Pinned positions as slots of a row: where they are, and what room they leave. The same on a device.

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
