// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Scorers rank the slots of a row. A scorer is a header, a line in a table, and a test
/// (CONTRIBUTING.md, "Adding a scorer").

#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/score/evidence.h"
#include "kvkeep/score/window.h"

namespace kvkeep {

/// How policies name a scorer, and what lists say of it. The texts must live as long as the program.
struct ScorerTraits {
  std::string_view name;       ///< as a policy, and after "ams-" and the like: lower-case letters, digits and hyphens
  std::string_view what;       ///< one line
  std::string_view source;     ///< paper; "none" if there is none
  bool probability = false;    ///< scores are shares of attention: not negative, and comparable between heads, as AdaKV
                               ///< and CriticalKV need
  bool comparable = false;     ///< comparable between heads in any case, negative ones too, which is enough for AdaKV
  bool composes = true;        ///< goes with allocators
  double ams_coverage = 0.75;  ///< default of AMS's `coverage` over this scorer, measured (docs/method/ams.md)
};

/// A pure function of the evidence. A class that policies name has `static constexpr ScorerTraits traits`. Its options,
/// if it has any, are the struct `Options` with `describe(Fields&)`, which its constructor takes; a class that is made
/// in another way has `static std::unique_ptr<Class> make(Fields&)`.
class Scorer {
 public:
  virtual ~Scorer() = default;

  [[nodiscard]] virtual std::string_view name() const = 0;

  /// What it reads.
  [[nodiscard]] virtual Needs needs() const { return {}; }

  /// Why it cannot run on this model, one sentence each ("calibration: ...; given ...; allowed ..."); empty: it can.
  [[nodiscard]] virtual std::vector<std::string> problems(const ModelSpec&) const { return {}; }

  /// Reductions it takes from the window attention that the policy computes anyway, so that the keys are read once.
  [[nodiscard]] virtual WindowNeeds shares() const { return {}; }

  /// Number of newest slots that the method itself never drops (TOVA: 1; SnapKV, R-KV: their window).
  [[nodiscard]] virtual std::int32_t keeps_newest() const { return 0; }

  /// Variant official: slots that the published code ranks above all others by its own padding.
  [[nodiscard]] virtual Padding padding() const { return {0, keeps_newest()}; }

  /// What a row's scores follow from besides that row. A RowScorer and a WindowScorer see one row; others say `nothing`
  /// if that is all they read, and are refused where ranks hold a part of the heads if it is not. It has no default: an
  /// answer that is missing would be wrong in silence.
  [[nodiscard]] virtual AcrossHeads across_heads() const = 0;

  /// Rows whose scores the policy joins (Event::share) before those of its own `share`: Sharing::layer, by the mean
  /// over the heads of a layer, or none.
  [[nodiscard]] virtual Sharing sharing() const { return Sharing::per_layer_per_head; }

  /// True if the scores add up over events: they come back as Row::tally. score() then writes those of every row.
  [[nodiscard]] virtual bool accumulates() const { return false; }

  /// Scores of every slot of every due row, of every row if accumulates(); the rest is undefined. `seen` holds at least
  /// the reductions of `shares()`. Slots that are guarded in `limits` need no meaningful score. Rows run in parallel; a
  /// row reads its own layer and sequence only.
  [[nodiscard]] virtual Scores score(const Evidence& evidence, const Limits& limits,
                                     const WindowAttention& seen) const = 0;
};

}  // namespace kvkeep
