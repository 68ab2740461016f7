#pragma once
/// Scores that the engine gives every token and KV head. They are a column of the rows, so they move with their slots.

#include "kvkeep/core/given_arrival.h"
#include "kvkeep/observe/given_scores.h"
#include "kvkeep/parts/part.h"

namespace kvkeep::parts {

/// Of keepers whose policy reads given scores: keeper.part<parts::Given>(), or keeper.give().
class Given final : public Part {
 public:
  using Part::Part;

  /// As Keeper::give().
  void give(const GivenScores& scores);

  /// Throws StateError if a slot of the layer has none yet.
  void require_all(const char* operation, SequenceId sequence, const SequenceState& s, std::int32_t layer) const;
  void check_step(SequenceId sequence, const SequenceState& s) const override {
    for (const std::int32_t layer : sequences().full_layers()) require_all("step", sequence, s, layer);
  }

 private:
  [[nodiscard]] std::int32_t missing(const SequenceState& s, std::int32_t layer) const;
  void check(const GivenScores& scores) const;
  void check_numbers(const GivenScores& scores) const;
  std::vector<GivenArrival> arrivals_;  ///< scratch
};

}  // namespace kvkeep::parts

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/parts/given-inl.h"
#endif
