#pragma once
/// Pinned spans: positions of a sequence that an engine protects through every event, such as a system prompt.

#include "kvkeep/core/pins.h"
#include "kvkeep/parts/part.h"

namespace kvkeep::parts {

/// Every keeper has it: keeper.part<parts::Pins>(), or keeper.pin().
class Pins final : public Part {
 public:
  using Part::Part;

  /// As Keeper::pin(), unpin() and pinned().
  void pin(SequenceId sequence, std::int64_t begin, std::int64_t end);
  void unpin(SequenceId sequence, std::int64_t begin, std::int64_t end);
  [[nodiscard]] std::span<const PositionSpan> pinned(SequenceId sequence) const;

  void leave(SequenceId sequence) noexcept override { spans_.remove(sequence); }
  void describe(SequenceId sequence, RowGroup& group) const override {
    if (const PositionSpans* spans = spans_.find(sequence)) group.pinned = spans->spans();
  }
  void truncate(SequenceId sequence, const SequenceState& s) noexcept override {
    if (PositionSpans* spans = spans_.find(sequence)) spans->truncate(s.next_position);
  }
#ifndef KVKEEP_HEADER_ONLY
  void save(SequenceId sequence, StateTensors& to) const override;
  void restore(SequenceId sequence, const SequenceState& s, const StateFile& state) override;
#endif

 private:
  [[nodiscard]] PositionSpan span_of(const char* operation, SequenceId sequence, std::int64_t begin,
                                     std::int64_t end) const;
  void require_held(SequenceId sequence, const SequenceState& s, PositionSpan span) const;
  PerSequence<PositionSpans> spans_;
};

}  // namespace kvkeep::parts

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/parts/pins-inl.h"
#endif
