#pragma once
/// Scores that the engine gives every token and KV head. They are a column of the rows, so they move with their slots.

#include "kvkeep/core/query_view.h"
#include "kvkeep/observe/observation.h"
#include "kvkeep/parts/part.h"

namespace kvkeep::parts {

/// Of keepers whose policy reads given scores: keeper.part<parts::Given>().
class Given final : public Part {
 public:
  using Part::Part;

  /// Scores of the engine's own, such as those that a gate learned (policies over `given`). Call it in every full
  /// layer, at any time between observe() of the tokens and step(): for each sequence, scores of its oldest slots in
  /// that layer that have none yet, cached tokens included. Before step(), every slot needs its score. A score belongs
  /// to its slot: it moves with it, goes with truncate(), and is saved with the sequence. Layers
  /// that are not full are ignored. Throws: StateError for a sequence that never joined; InvalidArgument for a wrong
  /// layer, indptr, shape, dtype or device, a duplicate sequence, missing scores, more tokens than have none, and NaN
  /// (on a device NaN is not looked for: it ranks last). If it throws, nothing is recorded for any sequence. Cost:
  /// reads and writes the scores once.
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
