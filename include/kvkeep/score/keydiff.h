// SPDX-License-Identifier: Apache-2.0
#pragma once
/// KeyDiff: keys that point away from the mean direction stay. Source: "KeyDiff: Key Similarity-Based KV Cache Eviction
/// for Long-Context LLM Inference in Resource-Constrained Environments" (Park et al.). Differs: the whole row at each
/// event instead of block by block; protects nothing by itself.

#include <algorithm>
#include <cmath>

#include "kvkeep/core/limits.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/score/scorer.h"
#include "kvkeep/simd/key_lanes.h"

namespace kvkeep {

class KeyDiff final : public Scorer {
 public:
  static constexpr ScorerTraits traits{.name = "keydiff",
                                       .what = "keys that point away from the mean direction",
                                       .source = "Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction"};

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.queries = 0, .keys = true}; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }

  /// g[t] = -cos(k_t, a), where a is the mean over all slots of k / max(|k|, 1e-12) and norms are at least 1e-8: 0 for
  /// a key of zeros, and for every slot if a is 0. Dot products in fp32, the mean in f64 over fp32 blocks. A key that
  /// is not finite makes its whole row NaN, which ranks by age. Throws InvalidArgument for keys that are not f32, f16
  /// or bf16. Cost: two passes over the keys of a row, the second backwards, so that it starts with the keys that are
  /// still in the CPU's caches. Workspace: workspace_bytes() per thread.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;

  /// Lower bounds of norms: where a key becomes a direction, and in a cosine.
  static constexpr float kLeastForDirection = 1e-12F, kLeastForCosine = 1e-8F;
  /// 1 / |k|, which makes a key a direction.
  [[nodiscard]] KVKEEP_HD static float direction_weight(float norm) {
    return 1.0F / (norm < kLeastForDirection ? kLeastForDirection : norm);
  }
  /// |a|, from the sum of its squares.
  [[nodiscard]] KVKEEP_HD static float anchor_norm(double squares) {
    const auto norm = static_cast<float>(std::sqrt(squares));
    return kLeastForCosine < norm ? norm : kLeastForCosine;
  }
  /// g of a key, from k.a, |k| and anchor_norm().
  [[nodiscard]] KVKEEP_HD static float score_of(float dot, float norm, float anchor_norm) {
    return 0.0F - dot / ((norm < kLeastForCosine ? kLeastForCosine : norm) * anchor_norm);
  }

  /// Bytes for the mean, its fp32 copy and the weights of one block of keys.
  [[nodiscard]] static std::int64_t workspace_bytes(std::int64_t dim);
};

namespace keydiff_detail {

/// Buffers of one thread.
struct Scratch {
  explicit Scratch(std::int64_t dim)
      : sum(static_cast<std::size_t>(dim)),
        anchor(static_cast<std::size_t>(dim)),
        block(static_cast<std::size_t>(cpu::kKeyBlock)) {}
  std::vector<double> sum;
  std::vector<float> anchor;
  std::vector<float> block;  ///< weights, then dots
};

/// Writes norms of all keys to `norms`, and the mean of their directions to scratch.anchor.
inline void find_anchor(const cpu::Keys& keys, std::int64_t length, float* norms, Scratch& scratch) {
  std::fill(scratch.sum.begin(), scratch.sum.end(), 0.0);
  for (std::int64_t t = 0; t < length; t += cpu::kKeyBlock) {
    const std::int64_t end = std::min(t + cpu::kKeyBlock, length);
    cpu::key_norms(keys, t, end, norms + t);
    std::transform(norms + t, norms + end, scratch.block.begin(), KeyDiff::direction_weight);
    cpu::add_weighted_keys(keys, t, end, scratch.block.data(), scratch.sum.data());
  }
  std::transform(scratch.sum.begin(), scratch.sum.end(), scratch.anchor.begin(),
                 [&](double x) { return static_cast<float>(x / static_cast<double>(length)); });
}

}  // namespace keydiff_detail

inline std::int64_t KeyDiff::workspace_bytes(std::int64_t dim) {
  return dim * static_cast<std::int64_t>(sizeof(double) + sizeof(float)) +
         cpu::kKeyBlock * static_cast<std::int64_t>(sizeof(float));
}

inline Scores KeyDiff::score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const {
  require_host("keydiff", evidence.table.device);
  const RowTable& table = evidence.table;
  with_dtype("keydiff", table.key_dtype, [](auto) {});
  Scores scores{empty({table.slots}, Dtype::f32)};
  float* out = scores.data.data<float>();
  const auto make = [&] { return keydiff_detail::Scratch(evidence.spec.key_dim); };
  each_due_row(table, limits, make, [&](std::size_t, const Row& row, keydiff_detail::Scratch& scratch) {
    const cpu::Keys keys{row.keys, table.key_dtype, evidence.spec.key_dim};
    float* g = out + row.first;
    keydiff_detail::find_anchor(keys, row.length, g, scratch);
    double square = 0;
    for (const float x : scratch.anchor) square += product(static_cast<double>(x), static_cast<double>(x));
    const float norm = anchor_norm(square);
    const std::int64_t last = (row.length - 1) / cpu::kKeyBlock * cpu::kKeyBlock;
    for (std::int64_t t = last; t >= 0; t -= cpu::kKeyBlock) {
      const std::int64_t n = std::min(cpu::kKeyBlock, row.length - t);
      cpu::key_dots(keys, t, t + n, scratch.anchor.data(), scratch.block.data());
      for (std::int64_t i = 0; i < n; ++i)
        g[t + i] = score_of(scratch.block[static_cast<std::size_t>(i)], g[t + i], norm);
    }
  });
  return scores;
}

}  // namespace kvkeep
