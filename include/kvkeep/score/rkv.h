#pragma once
/// R-KV: attention of the newest queries, minus redundancy with other keys. Source: "R-KV: Redundancy-aware KV Cache
/// Compression for Reasoning Models" (Cai et al.). Differs: each query at its own logical position; each sequence of a
/// batch by its own keys; the window is a protected set; fp32; a key that resembles no other takes nothing off slot 0
/// unless asked to. "Retain direction" is always last, the published default.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/score/pool.h"
#include "kvkeep/score/scorer.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/simd/key_lanes.h"
#include "kvkeep/simd/similar_lanes.h"

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

namespace rkv_detail {

/// The buffers of one thread, parts of one allocation.
class Scratch {
 public:
  /// A null base only finds the size.
  Scratch(std::byte* base, std::int64_t length, std::int64_t dim) : base_(base) {
    sum = take<double>(dim);
    similar.spared = take<double>(length);
    inverse = take<float>(length);
    similar.open = take<std::int32_t>(length);
    similar.late = take<std::int32_t>(length);
    similar.late_below = take<std::int32_t>(length);
    similar.matched = take<std::uint8_t>(length);
    direction = take<float>(dim);
    similar.panel = take<float>(dim * cpu::similar_width());
    similar.widened = take<float>(6 * dim);
    similar.step = take<float>(length);
    similar.reach = take<float>(length);
    similar.coarse = take<std::uint8_t>(length * cpu::coarse_dim(dim));
    similar.coarse_panel = take<std::uint32_t>(cpu::coarse_dim(dim) / 4 * cpu::similar_width());
  }

  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

  double* sum;       ///< [dim]
  float* inverse;    ///< [length] 1 / (norm + floor)
  float* direction;  ///< [dim]
  cpu::SimilarWork similar;

 private:
  template <class T>
  T* take(std::int64_t count) {
    constexpr std::int64_t kLine = 64;
    T* part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (count * static_cast<std::int64_t>(sizeof(T)) + kLine - 1) / kLine * kLine;
    return part;
  }
  std::byte* base_;
  std::int64_t bytes_ = 0;
};

/// Writes the redundancy of the keys [0, n) of a row, before its softmax, to out[0, n).
inline void column_means(const cpu::Keys& keys, std::int64_t n, const RkvOptions& options, const Scratch& scratch,
                         float* out) {
  float* inverse = scratch.inverse;
  std::fill_n(scratch.sum, keys.dim, 0.0);
  for (std::int64_t t = 0; t < n; t += cpu::kKeyBlock) {
    const std::int64_t end = std::min(t + cpu::kKeyBlock, n);
    cpu::key_norms(keys, t, end, inverse + t);
    for (std::int64_t i = t; i < end; ++i) {
      const float norm = inverse[i];
      inverse[i] = 1.0F / (norm + Rkv::kFloor);
      const float own = norm * inverse[i];
      out[i] = own * own;
    }
    cpu::add_weighted_keys(keys, t, end, inverse + t, scratch.sum);
  }
  std::transform(scratch.sum, scratch.sum + keys.dim, scratch.direction,
                 [](double x) { return static_cast<float>(x); });
  float dots[cpu::kKeyBlock];
  for (std::int64_t t = 0; t < n; t += cpu::kKeyBlock) {
    const std::int64_t end = std::min(t + cpu::kKeyBlock, n);
    cpu::key_dots(keys, t, end, scratch.direction, dots);
    for (std::int64_t i = t; i < end; ++i) out[i] = product(dots[i - t], inverse[i]) - out[i];
  }

  cpu::find_similar(keys, n, inverse, static_cast<float>(options.similarity), scratch.similar);
  double* spared = scratch.similar.spared;
  if (options.no_similar == RkvOptions::NoSimilar::first) {
    cpu::widen(keys.slots.at(0), keys.dtype, keys.dim, scratch.direction);
    for (std::int64_t i = 1; i < n; ++i) {
      if (scratch.similar.matched[i] != 0) continue;
      cpu::key_dots(keys, i, i + 1, scratch.direction, dots);
      spared[0] += static_cast<double>(dots[0] * (inverse[i] * inverse[0]));
    }
  }
  for (std::int64_t i = 0; i < n; ++i)
    out[i] = static_cast<float>((static_cast<double>(out[i]) - spared[i]) / static_cast<double>(n));
}

/// In place. Any NaN makes all NaN.
inline void softmax(float* x, std::int64_t n) {
  const float top = *std::max_element(x, x + n);
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i] = std::exp(x[i] - top));
  const auto share = static_cast<float>(1 / sum);
  std::transform(x, x + n, x, [share](float e) { return e * share; });
}

}  // namespace rkv_detail

inline std::int64_t Rkv::workspace_bytes(std::int64_t length, std::int64_t dim) {
  return rkv_detail::Scratch(nullptr, length, dim).bytes();
}

inline Scores Rkv::score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const {
  require_host("rkv", evidence.table.device);
  const RowTable& table = evidence.table;
  const std::int64_t dim = evidence.spec.key_dim;
  with_dtype("rkv", table.key_dtype, [](auto) {});
  const std::vector<RowWindow> windows = row_windows(evidence, limits, options_.window, false);
  const Tensor attention = history_attention(evidence, windows, {.group = options_.group});
  Scores scores{empty({table.slots}, Dtype::f32)};
  const float* attended = attention.data<float>();
  float* out = scores.data.data<float>();
  const auto lambda = static_cast<float>(options_.lambda);
  parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t longest = 0;
    for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r)
      if (windows[r].queries > 0) longest = std::max<std::int64_t>(longest, table.rows[r].length);
    const Tensor room = empty({workspace_bytes(longest, dim)}, Dtype::u8);
    const rkv_detail::Scratch scratch(reinterpret_cast<std::byte*>(room.bytes()), longest, dim);
    for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
      const Row& row = table.rows[r];
      float* g = out + row.first;
      if (windows[r].queries == 0) {
        std::iota(g, g + row.length, 0.0F);
        continue;
      }
      const std::int32_t history = windows[r].history,
                         domain = options_.redundancy == RkvOptions::Redundancy::all ? row.length : history;
      rkv_detail::column_means({row.keys, table.key_dtype, dim}, domain, options_, scratch, g);
      rkv_detail::softmax(g, domain);
      float* pooled = scratch.inverse;  // no longer read
      pool_max(attended + row.first, history, options_.pool, pooled);
      for (std::int32_t t = 0; t < history; ++t) g[t] = mix(lambda, pooled[t], g[t]);
      std::fill(g + history, g + row.length, 0.0F);
    }
  });
  return scores;
}

}  // namespace kvkeep
