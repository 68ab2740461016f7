// SPDX-License-Identifier: Apache-2.0
#pragma once
/// R-KV: attention of the newest queries, minus redundancy with other keys. Source: "R-KV: Redundancy-aware KV Cache
/// Compression for Reasoning Models" (Cai et al.). Differs: each query at its own logical position; each sequence of a
/// batch by its own keys; the window is a protected set; fp32; a key that resembles no other takes nothing off slot 0
/// unless asked to. "Retain direction" is always last, the published default.

#include "kvkeep/core/hd.h"
#include "kvkeep/score/scorer.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {

struct RkvOptions {
  enum class Redundancy : std::uint8_t {
    all,      ///< among all slots (published)
    history,  ///< among the slots older than the window (AMS's code)
  };
  enum class NoSimilar : std::uint8_t {
    nothing,  ///< a key that resembles no other spares no slot
    first,    ///< it spares slot 0 (a side effect of the published code)
  };
  std::int32_t window = 8;                     ///< newest queries
  std::int32_t pool = 7;                       ///< slots to take the maximum over, odd; 1: no pooling
  double lambda = 0.07;                        ///< weight of attention against redundancy
  double similarity = 0.5;                     ///< cosine above which keys resemble each other, in [0, 1]
  GroupReduce group = GroupReduce::max_logit;  ///< max_logit as published, mean_prob as in AMS's code
  Redundancy redundancy = Redundancy::all;
  NoSimilar no_similar = NoSimilar::nothing;

  void describe(Fields& f) {
    f.integer("window", window, 1, kMostQueries, "newest queries whose attention counts; their slots stay",
              {"window_size"});
    f.pool(pool, "slots over which the largest attention is taken, odd; 1: none", {"kernel_size"});
    f.real("lambda", lambda, {0, 1}, "weight of attention against redundancy", {"mix_lambda"});
    f.real("similarity", similarity, {0, 1}, "cosine above which two keys resemble each other");
    f.choice("group", group, {{"max_logit", GroupReduce::max_logit}, {"mean_prob", GroupReduce::mean_prob}},
             "query heads of a KV head: the largest logit, then one softmax; or the mean of their softmaxes");
    f.choice("redundancy", redundancy, {{"all", Redundancy::all}, {"history", Redundancy::history}},
             "among all slots, or among those older than the window");
    f.choice("no_similar", no_similar, {{"nothing", NoSimilar::nothing}, {"first", NoSimilar::first}},
             "a key that resembles no other spares none, or slot 0 (a side effect of the published code)");
  }
};

class Rkv final : public Scorer {
 public:
  using Options = RkvOptions;
  static constexpr ScorerTraits traits{
      .name = "rkv",
      .what = "slots that the newest queries attend to, less those that repeat other keys",
      .source = "Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models"};

  explicit Rkv(RkvOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = options_.window, .keys = true}; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  [[nodiscard]] std::int32_t keeps_newest() const override { return options_.window; }
  [[nodiscard]] Padding padding() const override { return {4, options_.window}; }

  /// g[t] = lambda * a[t] - (1 - lambda) * r[t] for slots older than the newest min(window, seen, length - 1, budget)
  /// queries, 0 for the rest; g[t] = t if no query was seen. a: history_attention, then the maximum over
  /// neighbours. r: softmax, over the slots that `redundancy` covers, of the column means of S, the cosines k_i.k_j /
  /// ((|k_i| + 1e-8) (|k_j| + 1e-8)) with S_ii = 0 and S_ij = 0 at the largest j != i where S_ij > similarity: among
  /// keys that resemble each other, the newest is spared. Keys that are not finite make their row NaN, which ranks by
  /// age. Cost: history_attention; three passes over the keys; a descending search for the newest similar key: about
  /// one more pass if most keys have one among the newest, length^2 / 2 products of D per row if none has. Nothing of
  /// size T * T exists. Workspace: 4 bytes per slot of the event, and per thread the larger of
  /// history_attention_workspace() and workspace_bytes().
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;

  static constexpr float kFloor = 1e-8F;  ///< added to every norm
  /// g of a slot of the history, from its pooled attention and its redundancy.
  [[nodiscard]] KVKEEP_HD static float mix(float lambda, float attention, float redundancy) {
    return product(lambda, attention) - product(1.0F - lambda, redundancy);
  }

  /// Bytes per thread for rows of `length` slots: (33 + dim) * length + (8 + 4 * 7 + 5 * w) * dim, dim a multiple of 4,
  /// each part rounded up to whole cache lines; w = two machine vectors (8 floats with SSE4, 16 with AVX2, 32 with
  /// AVX-512).
  [[nodiscard]] static std::int64_t workspace_bytes(std::int64_t length, std::int64_t dim);

  [[nodiscard]] const RkvOptions& options() const { return options_; }

 private:
  RkvOptions options_;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/score/rkv-inl.h"
#endif
