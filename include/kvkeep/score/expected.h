#pragma once
/// Expected Attention: the attention that coming queries will pay to each slot, were they drawn from a Gaussian with
/// the mean and covariance of those seen. Source: "Expected Attention" (Devoto et al.), and its press in kvpress.
/// Differs: the coming positions start at the next logical position, not at the number of buffered rows; the rows that
/// are left out of the statistics are those at logical positions below `sink`, not the oldest buffered ones; fp32
/// throughout.

#include "kvkeep/score/scorer.h"

namespace kvkeep {

struct ExpectedOptions {
  enum class Statistics : std::uint8_t {
    window,  ///< of the newest `queries` queries (published)
    stream,  ///< of every query since the sequence began, kept up to date as they come
  };
  std::int32_t future = 512;  ///< coming positions that are averaged over
  std::int32_t sink =
      4;  ///< queries at positions below it are no part of the statistics, slots below it no part of the softmax
  bool covariance = true;  ///< the Gaussian's second moment; without it, only the mean query
  bool value_norm = true;  ///< weigh by the length of the value
  double epsilon =
      0.01;  ///< added to the expected attention before it is weighed by the value; not used without `value_norm`
  std::int32_t queries = 256;  ///< newest queries that are read
  Statistics statistics = Statistics::window;
  bool matrix_unit = true;  ///< bf16 keys go through the machine's matrix unit where it has one; false: never. A switch
                            ///< for tests and comparisons.
};

class Expected final : public Scorer {
 public:
  explicit Expected(ExpectedOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return "expected"; }
  [[nodiscard]] Needs needs() const override;
  [[nodiscard]] Padding padding() const override { return {.oldest = options_.sink, .newest = 0}; }

  /// g[t] = (mean over the group's query heads of softmax over t >= sink of x + epsilon) * |V[t]|, without `value_norm`
  /// that mean alone, with x = scale * m.k + scale^2 / 2 * k^T C k: m and C the mean and population covariance of the
  /// queries before RoPE, turned by the mean of the rotations at `future` positions from the next one on. Slots below
  /// `sink` get the largest score of the others, as published. g[t] = t where no query was seen; no covariance where
  /// there is but one. keys, values: f32, f16, bf16. x is held inside +-FLT_MAX; a NaN in a key or value makes that
  /// slot's score NaN and no other's.
  ///
  /// k^T C k = |L^T k|^2, C = L L^T: half the products, never negative; L is the centred queries themselves where a
  /// window holds no more than D of them. Keys are widened once for all heads of the group. Or, bf16 keys in a machine
  /// with a matrix unit, multiplied as they are with C itself (or those queries) as the sum of two bf16 parts, and
  /// again with the keys in fp32: x then differs from that of the plain way by up to 2^-15 scale^2 |C| |k|^2, |C| the
  /// root of the sum of squares. Which of the two ways is taken follows from dtype, head size and machine alone, so
  /// equal keys score equal bits. Cost, flop: a row and query head T * D * (D + 1) + N * D * (D + 1) + D^3 / 3 and one
  /// exponential a slot; the matrix unit up to T * 2 D^2 + N * 4.5 D^2 of bf16. Workspace: workspace_bytes() a thread,
  /// 4 * T * G of it growing with the row.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits, WindowAttention& seen) const override;

  /// Bytes of one thread for a row of `length` slots and `queries` query rows.
  [[nodiscard]] static std::int64_t workspace_bytes(const ModelSpec& spec, std::int64_t length, std::int64_t queries);

  [[nodiscard]] const ExpectedOptions& options() const { return options_; }

 private:
  ExpectedOptions options_;
};

}  // namespace kvkeep
