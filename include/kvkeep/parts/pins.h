// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Pinned spans: positions of a sequence that an engine protects through every event, such as a system prompt.

#include <algorithm>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/parts/part.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep::parts {

/// Every keeper has it: keeper.part<parts::Pins>().
class Pins final : public Part {
 public:
  using Part::Part;

  /// Pins logical positions [begin, end): whatever their slots score, they stay in every row, and do not fold, until
  /// they are unpinned or truncated away. Tokens may still be to come. Pinned slots count within the budget. Throws,
  /// and changes nothing: StateError for an unknown sequence and for positions that an event has dropped from some row;
  /// InvalidArgument for a span that is empty or not within [0, kMostPositions), and if sinks, pinned positions and the
  /// slots that the policy's scorer never drops exceed the budget; Unsupported under policies that
  /// narrow prompts, of variant official, or without protected slots. Budgets that depend on length (ratio, bytes,
  /// protect_prompt) are checked by plan(), which throws InvalidArgument before anything is written. Cost: O(spans),
  /// plus a look-up in every row; a span more in every row of an event.
  void pin(SequenceId sequence, std::int64_t begin, std::int64_t end);
  /// Positions [begin, end) compete again from the next event on. Those that are not pinned may be among them. Throws
  /// as pin() does for an unknown sequence and for a wrong span.
  void unpin(SequenceId sequence, std::int64_t begin, std::int64_t end);
  /// Ascending, neither overlapping nor touching. Valid until the next call.
  [[nodiscard]] std::span<const PositionSpan> pinned(SequenceId sequence) const;

  void fork(SequenceId child, SequenceId parent) override { spans_.copy(child, parent); }
  void leave(SequenceId sequence) noexcept override { spans_.remove(sequence); }
  void describe(SequenceId sequence, RowGroup& group) const override {
    if (const PositionSpans* spans = spans_.find(sequence)) group.pinned = spans->spans();
  }
  void truncate(SequenceId sequence, const SequenceState& s) noexcept override {
    if (PositionSpans* spans = spans_.find(sequence)) spans->truncate(s.next_position);
  }
#if KVKEEP_FILES
  void save(SequenceId sequence, StateTensors& to) const override;
  void restore(SequenceId sequence, const SequenceState& s, const StateFile& state) override;
#endif

 private:
  [[nodiscard]] PositionSpan span_of(const char* operation, SequenceId sequence, std::int64_t begin,
                                     std::int64_t end) const;
  void require_held(SequenceId sequence, const SequenceState& s, PositionSpan span) const;
  PerSequence<PositionSpans> spans_;
};

inline PositionSpan Pins::span_of(const char* operation, SequenceId sequence, std::int64_t begin,
                                  std::int64_t end) const {
  static_cast<void>(sequences().at(sequence, operation));
  KVKEEP_REQUIRE(begin >= 0 && begin < end && end <= kMostPositions, operation, ": positions ", begin, " to ", end,
                 " of sequence ", sequence, "; allowed a begin below the end, from 0 to ", kMostPositions);
  return {static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end)};
}

/// Only events drop slots: every row holds the tokens that came since the last one.
inline void Pins::require_held(SequenceId sequence, const SequenceState& s, PositionSpan span) const {
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

inline void Pins::pin(SequenceId sequence, std::int64_t begin, std::int64_t end) {
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

inline void Pins::unpin(SequenceId sequence, std::int64_t begin, std::int64_t end) {
  const PositionSpan span = span_of("unpin", sequence, begin, end);
  if (PositionSpans* spans = spans_.find(sequence)) spans->remove(span);
  sequences().changed();
}

inline std::span<const PositionSpan> Pins::pinned(SequenceId sequence) const {
  static_cast<void>(sequences().at(sequence, "pinned"));
  const PositionSpans* spans = spans_.find(sequence);
  return spans == nullptr ? std::span<const PositionSpan>() : spans->spans();
}

}  // namespace kvkeep::parts
