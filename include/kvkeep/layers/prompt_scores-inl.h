// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of prompt_scores.h: compiled by src/layers, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "kvkeep/core/error.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/rank_key.h"
#include "kvkeep/layers/layer_selector.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/score/pool.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/simd/key_lanes.h"

namespace kvkeep {
namespace top_mass_detail {

/// Slots of one row that stay, ascending. A NaN sum ranks last and holds nothing.
inline std::vector<std::int32_t> slots_of(const float* sums, std::int32_t length, const TopMassOptions& options) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(length));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, std::ranges::greater(), [sums](std::int32_t t) { return rank_key(sums[t], t); });
  std::int32_t count = length;
  std::uint64_t held = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    held += mass_units(sums[order[i]]);
    if (!options.holds(held)) continue;
    count = static_cast<std::int32_t>(i) + 1;
    break;
  }
  order.resize(static_cast<std::size_t>(options.rounded(count, length)));
  if (length > 0) order.push_back(0);
  for (std::int32_t t = std::max(0, length - options.window); t < length; ++t) order.push_back(t);
  std::ranges::sort(order);
  order.erase(std::unique(order.begin(), order.end()), order.end());
  return order;
}

inline void check(const TopMassOptions& options) {
  KVKEEP_REQUIRE(options.mass > 0 && options.mass <= 1, "top mass: mass; given ", options.mass,
                 "; allowed above 0, up to 1");
  KVKEEP_REQUIRE(options.window >= 1, "top mass: window; given ", options.window, "; allowed 1 or more");
}

}  // namespace top_mass_detail

KVKEEP_INLINE KeepSet keep_top_mass(const RowTable& table, const Tensor& sums, TopMassOptions options,
                                    const Limits* limits) {
  top_mass_detail::check(options);
  KVKEEP_REQUIRE(sums.defined() && sums.dtype() == Dtype::f32 && sums.numel() == table.slots,
                 "top mass: sums; allowed f32 [", table.slots, "], one per slot");
  const float* of_window = sums.data<float>();
  std::vector<std::vector<std::int32_t>> kept(table.rows.size());
  each_row(table, [&](std::size_t r, const Row& row) {
    if (limits == nullptr || limits->rows[r].due) {
      kept[r] = top_mass_detail::slots_of(of_window + row.first, row.length, options);
    } else {
      kept[r].resize(static_cast<std::size_t>(row.length));
      std::iota(kept[r].begin(), kept[r].end(), 0);
    }
  });
  KeepSet keep;
  keep.indptr.push_back(0);
  for (const auto& row : kept) keep.indptr.push_back(keep.indptr.back() + static_cast<std::int64_t>(row.size()));
  keep.slots = empty({keep.indptr.back()}, Dtype::i32);
  std::int32_t* slots = keep.slots.data<std::int32_t>();
  for (const auto& row : kept) slots = std::copy(row.begin(), row.end(), slots);
  return keep;
}

KVKEEP_INLINE KeepSet keep_top_mass(const Evidence& evidence, TopMassOptions options) {
  top_mass_detail::check(options);
  const RowTable& table = evidence.table;
  std::vector<RowWindow> windows;
  for (const RowGroup& group : table.groups) {
    KVKEEP_REQUIRE(group.queries.count >= options.window, "top mass: layer ", group.layer, " has ", group.queries.count,
                   " queries; allowed ", options.window, " or more, the window");
    for (const Row& row : table.rows_of(group, evidence.spec.kv_heads))
      windows.push_back({row.length == 0 ? 0 : options.window, row.length});
  }
  return keep_top_mass(table, attention_sum(evidence, windows), options);
}

namespace last_query_detail {

inline void check(const Evidence& evidence) {
  KVKEEP_REQUIRE(is_scorable(evidence.table.key_dtype), "last query: keys are ", evidence.table.key_dtype,
                 "; allowed f32, f16, bf16");
  for (const RowGroup& group : evidence.table.groups) {
    KVKEEP_REQUIRE(group.queries.count >= 1, "last query: layer ", group.layer, " has no queries; allowed 1 or more");
    for (const Row& row : evidence.table.rows_of(group, evidence.spec.kv_heads))
      KVKEEP_REQUIRE(row.length == evidence.table.rows[static_cast<std::size_t>(group.first_row)].length,
                     "last query: rows of layer ", row.layer, " differ in length; allowed one length");
  }
}

}  // namespace last_query_detail

KVKEEP_INLINE Tensor last_query_scores(const Evidence& evidence, std::int32_t pool) {
  KVKEEP_REQUIRE(pool >= 1 && pool % 2 == 1, "last query: pool; given ", pool, "; allowed odd numbers from 1 on");
  return pooled_over_heads(evidence, last_query_products(evidence), pool);
}

KVKEEP_INLINE Tensor last_query_products(const Evidence& evidence) {
  last_query_detail::check(evidence);
  const ModelSpec& spec = evidence.spec;
  const RowTable& table = evidence.table;
  const std::vector<RowWindow> windows(table.rows.size(), RowWindow{1, 0});
  const cpu::WindowTurns turns(evidence, windows);
  // The sum over a group's heads of q . k is (sum of q) . k: one product per key.
  Tensor products = empty({table.slots}, Dtype::f32);
  const auto make = [&] { return std::vector<float>(static_cast<std::size_t>(spec.group() * spec.key_dim)); };
  each_row(table, make, [&](std::size_t r, const Row& row, std::vector<float>& queries) {
    const std::size_t g = r / static_cast<std::size_t>(spec.kv_heads);
    cpu::gather_queries(evidence, table.groups[g].queries, row.head, 1, turns.of(g), queries.data());
    for (std::int32_t h = 1; h < spec.group(); ++h)
      for (std::int32_t d = 0; d < spec.key_dim; ++d)
        queries[static_cast<std::size_t>(d)] += queries[static_cast<std::size_t>(h * spec.key_dim + d)];
    const auto unscaled = static_cast<float>(1.0 / spec.scale());  // gather_queries scales for softmaxes
    for (std::int32_t d = 0; d < spec.key_dim; ++d) queries[static_cast<std::size_t>(d)] *= unscaled;
    cpu::key_dots({row.keys, table.key_dtype, spec.key_dim}, 0, row.length, queries.data(),
                  products.data<float>() + row.first);
  });
  return products;
}

KVKEEP_INLINE Tensor pooled_over_heads(const Evidence& evidence, Tensor products, std::int32_t pool) {
  const RowTable& table = evidence.table;
  std::int64_t tokens = 0;
  for (const RowGroup& group : table.groups) tokens += table.rows[static_cast<std::size_t>(group.first_row)].length;
  Tensor scores = empty({tokens}, Dtype::f32);
  float* out = scores.data<float>();
  for (const RowGroup& group : table.groups) {
    const auto rows = table.rows_of(group, evidence.spec.kv_heads);
    float* sum = products.data<float>() + rows.front().first;
    for (const Row& row : rows.subspan(1)) cpu::add_scaled(sum, products.data<float>() + row.first, 1.0F, row.length);
    pool_average(sum, rows.front().length, pool, out);
    out += rows.front().length;
  }
  return scores;
}

KVKEEP_INLINE std::vector<std::int32_t> best_tokens(std::span<const float> scores, std::int64_t count) {
  const std::vector<std::int32_t> ranks = ranks_of(scores);
  std::vector<std::int32_t> best;
  for (std::size_t t = 0; t < ranks.size(); ++t)
    if (ranks[t] <= count) best.push_back(static_cast<std::int32_t>(t));
  return best;
}

namespace prompt_scores_detail {

using Options = PromptScoreOptions;

inline void check(const Evidence& evidence, const Options& options) {
  KVKEEP_REQUIRE(options.window >= 1, "prompt scores: window; given ", options.window, "; allowed 1 or more");
  KVKEEP_REQUIRE(options.pool >= 1 && options.pool % 2 == 1, "prompt scores: pool; given ", options.pool,
                 "; allowed odd numbers from 1 on");
  const RowTable& table = evidence.table;
  for (const RowGroup& group : table.groups) {
    for (const Row& row : table.rows_of(group, evidence.spec.kv_heads)) {
      KVKEEP_REQUIRE(row.length > options.window, "prompt scores: a row of layer ", row.layer, " holds ", row.length,
                     " slots; allowed more than the window of ", options.window);
      KVKEEP_REQUIRE(row.length == table.rows[static_cast<std::size_t>(group.first_row)].length,
                     "prompt scores: rows of layer ", row.layer, " differ in length; allowed one length");
    }
  }
}

/// Every query head as a KV head of its own: the same keys, once per query head.
struct ByQueryHead {
  explicit ByQueryHead(const Evidence& evidence) : spec(evidence.spec), table(evidence.table) {
    const std::int32_t group_size = spec.group(), kv_heads = spec.kv_heads;
    spec.kv_heads = spec.query_heads;
    table.rows.clear();
    table.slots = 0;
    for (RowGroup& group : table.groups) {
      const auto rows = evidence.table.rows_of(group, kv_heads);
      group.first_row = static_cast<std::int64_t>(table.rows.size());
      for (std::int32_t h = 0; h < spec.query_heads; ++h) {
        Row row = rows[static_cast<std::size_t>(h / group_size)];
        row.head = h;
        row.first = table.slots;
        table.slots += row.length;
        table.rows.push_back(row);
      }
    }
  }
  ModelSpec spec;
  RowTable table;
};

/// Mean over the heads of each group.
inline Tensor over_groups(const RowTable& table, std::int32_t group, const float* by_head) {
  Tensor sums = zeros({table.slots}, Dtype::f32);
  for (const Row& row : table.rows) {
    float* out = sums.data<float>() + row.first;
    for (std::int32_t part = 0; part < group; ++part) {
      const float* u = by_head + row.first * group + std::int64_t{part} * row.length;
      for (std::int32_t t = 0; t < row.length; ++t) out[t] += u[t];
    }
    for (std::int32_t t = 0; t < row.length; ++t) out[t] /= static_cast<float>(group);
  }
  return sums;
}

/// `weight` times the sum over the KV heads of each group, for the slots before the window; infinity for the oldest
/// `sinks`.
inline Tensor before_windows(const Evidence& evidence, const Tensor& heads, std::int32_t window, float weight,
                             std::int32_t sinks = 0) {
  const RowTable& table = evidence.table;
  const auto before = [&](const RowGroup& group) {
    return table.rows[static_cast<std::size_t>(group.first_row)].length - window;
  };
  std::int64_t all = 0;
  for (const RowGroup& group : table.groups) all += before(group);
  Tensor tokens = zeros({all}, Dtype::f32);
  float* out = tokens.data<float>();
  for (const RowGroup& group : table.groups) {
    for (const Row& row : table.rows_of(group, evidence.spec.kv_heads)) {
      const float* head = heads.data<float>() + row.first;
      for (std::int32_t t = 0; t < before(group); ++t) out[t] += product(weight, head[t]);
    }
    std::fill_n(out, std::min(sinks, before(group)), HUGE_VALF);
    out += before(group);
  }
  return tokens;
}

}  // namespace prompt_scores_detail

KVKEEP_INLINE PromptScores prompt_scores(const Evidence& evidence, PromptScoreOptions options) {
  using By = PromptScoreOptions::By;
  if (options.by == By::last_query) return {.tokens = last_query_scores(evidence, options.pool)};
  if (options.by == By::weighted)
    return {.tokens = sum_over_heads(evidence, window_sums(evidence, options.window, options.weights), options.window,
                                     options.sinks)};
  prompt_scores_detail::check(evidence, options);
  const ModelSpec& spec = evidence.spec;
  const RowTable& table = evidence.table;
  const bool average = options.kind == prompt_scores_detail::Options::Pool::average || options.pool == 1;
  // The average of a sum is the sum of averages: one sum per KV head is enough. A maximum is not.
  const std::int32_t parts = average ? 1 : spec.group();
  Tensor sum;
  if (average) {
    sum = window_sums(evidence, options.window);
  } else {
    const prompt_scores_detail::ByQueryHead split(evidence);
    sum = window_sums({.spec = split.spec, .table = split.table, .basis = evidence.basis, .moment = evidence.moment},
                      options.window);
  }
  const float* of_window = sum.data<float>();
  const float weight = average ? static_cast<float>(spec.group()) : 1.0F;

  PromptScores scores{
      zeros({table.slots}, Dtype::f32), {}, average ? sum : prompt_scores_detail::over_groups(table, parts, of_window)};
  const auto make = [] { return std::vector<float>(); };
  each_row(table, make, [&](std::size_t, const Row& row, std::vector<float>& pooled) {
    const std::int32_t before = row.length - options.window;
    pooled.resize(static_cast<std::size_t>(before));
    float* head = scores.heads.data<float>() + row.first;
    for (std::int32_t part = 0; part < parts; ++part) {
      const float* u = of_window + row.first * parts + std::int64_t{part} * row.length;
      if (average)
        pool_average(u, before, options.pool, pooled.data());
      else
        pool_max(u, before, options.pool, pooled.data());
      for (std::int32_t t = 0; t < before; ++t) head[t] += product(weight, pooled[static_cast<std::size_t>(t)]);
    }
  });
  scores.tokens = sum_over_heads(evidence, scores.heads, options.window);
  return scores;
}

KVKEEP_INLINE Tensor window_sums(const Evidence& evidence, std::int32_t window, std::span<const float> weights) {
  for (const RowGroup& group : evidence.table.groups)
    KVKEEP_REQUIRE(group.queries.count >= window, "prompt scores: layer ", group.layer, " has ", group.queries.count,
                   " queries; allowed ", window, " or more, the window");
  std::vector<RowWindow> windows;
  for (const Row& row : evidence.table.rows) windows.push_back({window, row.length - window});
  return attention_sum(evidence, windows, weights);
}

KVKEEP_INLINE Tensor sum_over_heads(const Evidence& evidence, const Tensor& heads, std::int32_t window,
                                    std::int32_t sinks) {
  return prompt_scores_detail::before_windows(evidence, heads, window, 1.0F, sinks);
}

KVKEEP_INLINE Tensor token_mass(const Evidence& evidence, const Tensor& sums, std::int32_t window) {
  return prompt_scores_detail::before_windows(evidence, sums, window,
                                              1.0F / static_cast<float>(std::int64_t{evidence.spec.kv_heads} * window));
}

}  // namespace kvkeep
