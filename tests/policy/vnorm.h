#pragma once
/// Vnorm: values of large norm stay.

#include "kvkeep/score/scorer.h"

namespace kvkeep {

struct VnormOptions {
  bool squared = false;  ///< the square of the norm

  void describe(Fields& f) {
    f.flag("squared", squared, "rank by the square of the norm, which counts where rows share scores");
  }
};

class Vnorm final : public Scorer {
 public:
  using Options = VnormOptions;
  static constexpr ScorerTraits traits{.name = "vnorm", .what = "values of large norm", .source = "none"};

  explicit Vnorm(VnormOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = 0, .values = true}; }

  /// g[t] = |v_t|, fp32. Throws InvalidArgument for values that are not f32, f16 or bf16. Cost: one pass over the
  /// values.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits, WindowAttention& seen) const override;

 private:
  VnormOptions options_;
};

}  // namespace kvkeep
