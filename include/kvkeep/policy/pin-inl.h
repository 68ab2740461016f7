#pragma once
/// Keeper's part of pinned spans.

#include <algorithm>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/policy/keeper.h"

namespace kvkeep {

KVKEEP_INLINE PositionSpan Keeper::span_of(const char* operation, SequenceId sequence, std::int64_t begin,
                                           std::int64_t end) const {
  static_cast<void>(at(sequence));
  KVKEEP_REQUIRE(begin >= 0 && begin < end && end <= kMostPositions, operation, ": positions ", begin, " to ", end,
                 " of sequence ", sequence, "; allowed a begin below the end, from 0 to ", kMostPositions);
  return {static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end)};
}

/// Only events drop slots: every row holds the tokens that came since the last one.
KVKEEP_INLINE void Keeper::require_held(SequenceId sequence, const Sequence& s, PositionSpan span) const {
  span.end = std::min(span.end, s.event_position);
  if (span.begin >= span.end) return;
  for (const std::int32_t layer : full_layers_)
    for (std::int32_t head = 0; head < spec_.kv_heads; ++head) {
      const auto row = s.columns->positions(row_of(layer, head));
      auto next = std::ranges::lower_bound(row, span.begin);
      for (std::int32_t position = span.begin; position < span.end; ++position, ++next)
        KVKEEP_REQUIRE_AS(StateError, next != row.end() && *next == position, "pin: position ", position,
                          " of sequence ", sequence, " is no longer in layer ", layer, ", head ", head,
                          "; allowed positions that every row holds, or that are still to come");
    }
}

KVKEEP_INLINE void Keeper::pin(SequenceId sequence, std::int64_t begin, std::int64_t end) {
  const PositionSpan span = span_of("pin", sequence, begin, end);
  static_cast<void>(ready("pin", sequence));
  Sequence& s = sequences_.at(sequence);
  Pins wanted = s.pins;
  wanted.add(span);
  policy_->check_pins(wanted.spans());
  require_held(sequence, s, span);
  s.pins = std::move(wanted);
  ++version_;
}

KVKEEP_INLINE void Keeper::unpin(SequenceId sequence, std::int64_t begin, std::int64_t end) {
  const PositionSpan span = span_of("unpin", sequence, begin, end);
  sequences_.at(sequence).pins.remove(span);
  ++version_;
}

}  // namespace kvkeep
