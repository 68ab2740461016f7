#pragma once
// Bodies of pins.h: compiled by src/parts, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep::parts {

KVKEEP_INLINE PositionSpan Pins::span_of(const char* operation, SequenceId sequence, std::int64_t begin,
                                         std::int64_t end) const {
  static_cast<void>(sequences().at(sequence));
  KVKEEP_REQUIRE(begin >= 0 && begin < end && end <= kMostPositions, operation, ": positions ", begin, " to ", end,
                 " of sequence ", sequence, "; allowed a begin below the end, from 0 to ", kMostPositions);
  return {static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end)};
}

/// Only events drop slots: every row holds the tokens that came since the last one.
KVKEEP_INLINE void Pins::require_held(SequenceId sequence, const SequenceState& s, PositionSpan span) const {
  span.end = std::min(span.end, s.event_position);
  if (span.begin >= span.end) return;
  for (const std::int32_t layer : sequences().full_layers())
    for (std::int32_t head = 0; head < spec().kv_heads; ++head) {
      const auto row = s.columns.positions(sequences().row_of(layer, head));
      auto next = std::ranges::lower_bound(row, span.begin);
      for (std::int32_t position = span.begin; position < span.end; ++position, ++next)
        KVKEEP_REQUIRE_AS(StateError, next != row.end() && *next == position, "pin: position ", position,
                          " of sequence ", sequence, " is no longer in layer ", layer, ", head ", head,
                          "; allowed positions that every row holds, or that are still to come");
    }
}

KVKEEP_INLINE void Pins::pin(SequenceId sequence, std::int64_t begin, std::int64_t end) {
  const PositionSpan span = span_of("pin", sequence, begin, end);
  const SequenceState& s = sequences().ready("pin", sequence);
  PositionSpans wanted;
  if (const PositionSpans* had = spans_.find(sequence)) wanted = *had;
  wanted.add(span);
  policy().check_pins(wanted.spans());
  require_held(sequence, s, span);
  spans_[sequence] = std::move(wanted);
  sequences().changed();
}

KVKEEP_INLINE void Pins::unpin(SequenceId sequence, std::int64_t begin, std::int64_t end) {
  const PositionSpan span = span_of("unpin", sequence, begin, end);
  if (PositionSpans* spans = spans_.find(sequence)) spans->remove(span);
  sequences().changed();
}

KVKEEP_INLINE std::span<const PositionSpan> Pins::pinned(SequenceId sequence) const {
  static_cast<void>(sequences().at(sequence));
  const PositionSpans* spans = spans_.find(sequence);
  return spans == nullptr ? std::span<const PositionSpan>() : spans->spans();
}

}  // namespace kvkeep::parts
