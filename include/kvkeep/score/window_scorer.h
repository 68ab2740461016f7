#pragma once
/// Scorers that finish one reduction of the attention of a row's newest queries: one body for the CPU and a GPU.

#include <string>
#include <string_view>

#include "kvkeep/score/row_scorer.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {

/// One row of a window scorer. Without a query slots rank by age: the oldest leave first.
template <class Body, class Row, class Team>
KVKEEP_HD void finish_row(const Body& body, bool sum, const Row& row, RowWindow window, float* attention, float* g,
                          Team team) {
  if (window.queries == 0 && !sum)
    row.each_slot(team, [&](std::int32_t t) { g[t] = static_cast<float>(t); });
  else if constexpr (!BodyTraits<Body>::kAsRead)
    body.finish(row, window, attention, g, team);
}

/// `Self` derives from this and has `traits`. `Body` is its options, trivially copyable, with
///
///     WindowReading reading() const;
///     template <class Row, class Team>
///     KVKEEP_HD void finish(const Row& row, RowWindow window, const float* attention, float* g, Team team) const;
///
/// finish() writes g[t] for every slot of a ScoredRow, split over the team, from what reading() names: `attention` of
/// the row's slots. It is called for rows that have queries; slots of others score by age. Under
/// WindowReading::Kind::sum it is called for all. It may take `float* attention` and overwrite it, unless that is
/// usage.
///
/// The CPU runs it with one thread per row, CUDA with one block per row if cuda/row_bodies.cu names the body; with
/// `static constexpr bool kEachSlot = true` as a RowScorer. `kInPlace = true` says more: it reads no slot of
/// `attention` but its own, and g holds that already. `kAsRead = true` says that this is the score, and there is no
/// finish().
template <class Self, class Body>
class WindowScorer : public Scorer {
 public:
  using Options = Body;
  explicit WindowScorer(Body body = {}) : body_(body) {}

  [[nodiscard]] std::string_view name() const override { return Self::traits.name; }
  [[nodiscard]] const Body& options() const { return body_; }
  [[nodiscard]] Needs needs() const override { return {.queries = body_.reading().window, .keys = true}; }
  [[nodiscard]] WindowNeeds shares() const final {
    return {.newest = body_.reading().kind == WindowReading::Kind::newest};
  }
  [[nodiscard]] AcrossHeads across_heads() const final { return AcrossHeads::nothing; }  ///< its body sees one row

  /// Throws as read_window(), and InvalidArgument for values that the body reads and that are not f32, f16 or bf16.
  /// Cost and workspace: those of read_window(), and 4 bytes per slot; of finish() beyond.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override {
    require_host(std::string(name()).c_str(), evidence.table.device);
    const WindowReading reading = body_.reading();
    const bool sum = reading.kind == WindowReading::Kind::sum;
    const ReadWindow read = read_window(evidence, limits, seen, reading);
    Scores scores{BodyTraits<Body>::kInPlace ? read.attention : empty({evidence.table.slots}, Dtype::f32)};
    float *const attention = read.attention.template data<float>(), *const out = scores.data.template data<float>();
    each_scored_row<Body>(*this, evidence, limits, sum, [&](std::size_t r, const auto& row, const Row& at) {
      finish_row(body_, sum, row, read.windows[r], attention + at.first, out + at.first, OneThread{});
    });
    return scores;
  }

 private:
  Body body_;
};

}  // namespace kvkeep
