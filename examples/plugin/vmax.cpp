// SPDX-License-Identifier: Apache-2.0
// A scorer of one's own, in a plug-in: values that hold a large number stay.

#include <kvkeep/policy/plugin.h>
#include <kvkeep/score/row_scorer.h>

namespace {

struct VmaxOptions {
  enum class Of : std::uint8_t { largest, sum };
  Of of = Of::largest;
  std::int32_t skip = 0;  ///< numbers at the head's beginning
  double floor = 0;
  bool negative = true;

  void describe(kvkeep::Fields& f) {
    f.choice("of", of, {{"largest", Of::largest}, {"max", Of::largest}, {"sum", Of::sum}}, "numbers that count");
    f.integer("skip", skip, 0, 1024, "numbers at the head's beginning that do not count", {"skip_first"});
    f.real("floor", floor, kvkeep::Range::below(0, 1e6), "what scores less scores this, so that newer slots stay");
    f.flag("negative", negative, "negative numbers count by their size, not as 0");
    if (of == Of::sum && !negative) f.bad("negative", negative, "true, with of=sum");
  }

  /// g[t] = the largest number of v_t, or their sum, fp32.
  template <class Row, class Team>
  KVKEEP_HD void score(const Row& row, float* g, Team team) const {
    for (std::int32_t t = team.thread(); t < row.length(); t += team.size()) {
      float score = 0;
      for (std::int32_t d = skip; d < row.value_dim(); ++d) {
        const float x = static_cast<float>(row.value(t)[d]), size = x >= 0 ? x : negative ? -x : 0;
        score = of == Of::sum ? score + size : size > score ? size : score;
      }
      g[t] = score > static_cast<float>(floor) ? score : static_cast<float>(floor);
    }
  }
};

class Vmax final : public kvkeep::RowScorer<Vmax, VmaxOptions> {
 public:
  static constexpr kvkeep::ScorerTraits traits{.name = "vmax", .what = "values of large numbers", .source = "none"};
  using RowScorer::RowScorer;

  /// Cost: one pass over the values.
  [[nodiscard]] kvkeep::Needs needs() const override { return {.queries = 0, .values = true}; }
};

}  // namespace

KVKEEP_PLUGIN() { kvkeep::register_scorer<Vmax>(); }
