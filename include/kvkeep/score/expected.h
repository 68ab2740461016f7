// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Expected Attention: the attention that future queries would pay to each slot if they were drawn from a Gaussian with
/// the mean and covariance of the queries seen. Source: "Expected Attention" (Devoto et al.), and its press in kvpress.
/// Differs: future positions start at the next logical position, not at the number of buffered rows; the statistics
/// leave out the rows at logical positions below `sink`, not the oldest buffered ones; fp32 throughout.

#include "kvkeep/score/scorer.h"

namespace kvkeep {

struct ExpectedOptions {
  std::int32_t future = 512;  ///< future positions to average over
  std::int32_t sink =
      4;  ///< queries at positions below it do not enter the statistics, slots below it do not enter the softmax
  bool covariance = true;  ///< use the Gaussian's covariance; false: only the mean query
  bool value_norm = true;  ///< weigh by the norm of the value
  double epsilon =
      0.01;  ///< added to the expected attention before it is weighed by the value; not used without `value_norm`
  std::int32_t queries = 256;  ///< newest queries that are read
  bool matrix_unit = true;  ///< multiply bf16 keys on the machine's matrix unit if it has one; false: never. For tests
                            ///< and comparisons.

  void describe(Fields& f) {
    f.integer("n_future", future, 1, 1 << 20, "future positions whose rotations are averaged");
    f.integer("sink", sink, 0, INT32_MAX,
              "queries at positions below it are left out of the statistics, and that many oldest slots out of the "
              "softmax");
    f.flag("covariance", covariance, "use the covariance of the queries as well as their mean");
    if (f.values_weighed) value_norm = false;  // the allocator does it, after W_o
    f.flag("value_norm", value_norm, "weigh by the length of the value");
    if (f.values_weighed && value_norm) f.bad("value_norm", true, "false: the allocator weighs values itself");
    f.real("epsilon", epsilon, {0, 1},
           "added to the expected attention before it is weighed by the value (value_norm)");
    f.integer("queries", queries, 1, kMostQueries, "newest queries whose mean and covariance are taken");
  }
};

class Expected final : public Scorer {
 public:
  using Options = ExpectedOptions;
  static constexpr ScorerTraits traits{
      .name = "expected",
      .what = "attention that future queries will pay, by the mean and covariance of past ones",
      .source = "Devoto et al., Expected Attention",
      .probability = true};

  explicit Expected(ExpectedOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override;
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  /// The mean of exp(c tanh(x / c)) over queries has no closed form.
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const override {
    if (spec.logit_cap == 0) return {};
    return {text("logit_cap: ", name(), " expects attention of logits that are not capped; given ", spec.logit_cap,
                 "; allowed 0, or scorers that read a window, as tova and snapkv do")};
  }
  [[nodiscard]] Padding padding() const override { return {.oldest = options_.sink, .newest = 0}; }

  /// g[t] = (mean over the group's query heads of softmax over t >= sink of x + epsilon) * |V[t]|, without `value_norm`
  /// that mean alone. x = scale * m.k + scale^2 / 2 * k^T C k, where m and C are the mean and population covariance of
  /// the queries before RoPE, turned by the mean of the rotations at `future` positions from the next one on. Slots
  /// below `sink` get the largest score of the others, as published. A sink logit (LayerSpec::sinks) joins the softmax
  /// of its query head. g[t] = t if no query was seen; a single query has
  /// no covariance. keys, values: f32, f16, bf16. x is clamped to +-FLT_MAX; a NaN in a key or value makes only that
  /// slot's score NaN. Throws Unsupported for what problems() names.
  ///
  /// k^T C k = |L^T k|^2 with C = L L^T: half the products, never negative. L is the centred queries themselves if a
  /// window holds at most D of them. Keys are widened once for all heads of the group. On a machine with a matrix unit,
  /// bf16 keys are instead multiplied as they are with C itself (or those queries) as the sum of two bf16 parts, then
  /// with the keys again in fp32: x then differs from the plain result by at most 2^-15 scale^2 |C| |k|^2, where |C| is
  /// the root of the sum of squares. Only dtype, head size and machine decide which way is taken, so equal keys get
  /// bit-identical scores. Cost in flop per row and query head: T * D * (D + 1) + N * D * (D + 1) + D^3 / 3, and one
  /// exponential per slot; on the matrix unit up to T * 2 D^2 + N * 4.5 D^2 in bf16. Workspace: workspace_bytes() per
  /// thread, of which 4 * T * G grows with the row.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;

  /// Bytes per thread for a row of `length` slots and `queries` query rows.
  [[nodiscard]] static std::int64_t workspace_bytes(const ModelSpec& spec, std::int64_t length, std::int64_t queries);

  [[nodiscard]] const ExpectedOptions& options() const { return options_; }

 private:
  ExpectedOptions options_;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/score/expected-inl.h"
#endif
