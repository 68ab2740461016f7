#pragma once
/// TOVA: the newest query's attention. Source: "Transformers are Multi-State RNNs" (Oren et al.), the TOVA policy.
/// Differs: events every `interval` tokens instead of every step; the newest slot is protected instead of competing
/// with its own weight; fp32.

#include <algorithm>
#include <numeric>

#include "kvkeep/core/require_host.h"
#include "kvkeep/score/head_mean.h"
#include "kvkeep/score/scorer.h"

namespace kvkeep {

struct TovaOptions {
  enum class Heads : std::uint8_t {
    all,    ///< mean over every query head of the layer: all KV heads rank alike (published)
    group,  ///< mean over the query heads of the KV head
  };
  Heads heads = Heads::all;

  void describe(Fields& f) {
    if (f.uneven_heads) heads = Heads::group;
    f.choice("heads", heads, {{"all", Heads::all}, {"group", Heads::group}},
             "query heads that are averaged: of the layer, or of the KV head");
    if (f.uneven_heads && heads == Heads::all)
      f.bad("heads", "all", "group: heads that differ in length cannot be averaged slot by slot");
  }
};

class Tova final : public Scorer {
 public:
  using Options = TovaOptions;
  static constexpr ScorerTraits traits{.name = "tova",
                                       .what = "attention of the newest query",
                                       .source = "Oren et al., Transformers are Multi-State RNNs (TOVA)",
                                       .probability = true};

  explicit Tova(TovaOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = 1, .keys = true}; }
  [[nodiscard]] WindowNeeds shares() const override { return {.newest = true}; }
  [[nodiscard]] std::int32_t keeps_newest() const override { return 1; }
  [[nodiscard]] bool averages_heads() const override { return options_.heads == TovaOptions::Heads::all; }

  /// g[t] = mean over heads of softmax over all slots of scale * q.k, for the newest query; g[t] = t if no query was
  /// seen. `Heads::all` needs rows of one length and averages by slot, even if the heads hold different tokens, as
  /// published. Cost: O(slots) beyond the shared window attention. Workspace: none.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;

  [[nodiscard]] const TovaOptions& options() const { return options_; }

 private:
  TovaOptions options_;
};

inline Scores Tova::score(const Evidence& evidence, const Limits&, const WindowAttention& seen) const {
  require_host("tova", evidence.table.device);
  Scores scores{clone(seen.newest)};
  float* g = scores.data.data<float>();
  const std::vector<Row>& rows = evidence.table.rows;
  for (std::size_t r = 0; r < rows.size(); ++r)  // a row that is not due has no window
    if (seen.windows[r].queries == 0) std::iota(g + rows[r].first, g + rows[r].first + rows[r].length, 0.0F);
  if (averages_heads()) cpu::mean_over_heads(traits.name, evidence, seen.windows, g);
  return scores;
}

}  // namespace kvkeep
