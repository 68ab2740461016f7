#pragma once
// Bodies of prompt_scores.h: compiled by src/layers, or where they are included under KVKEEP_HEADER_ONLY.

#include "kvkeep/core/each_row.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/pool.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {
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

inline std::int64_t slots_before_windows(const RowTable& table, std::int32_t window) {
  std::int64_t before = 0;
  for (const RowGroup& group : table.groups)
    before += table.rows[static_cast<std::size_t>(group.first_row)].length - window;
  return before;
}

}  // namespace prompt_scores_detail

KVKEEP_INLINE PromptScores prompt_scores(const Evidence& evidence, PromptScoreOptions options) {
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

KVKEEP_INLINE Tensor sum_over_heads(const Evidence& evidence, const Tensor& heads, std::int32_t window) {
  const RowTable& table = evidence.table;
  Tensor tokens = zeros({prompt_scores_detail::slots_before_windows(table, window)}, Dtype::f32);
  float* out = tokens.data<float>();
  for (const RowGroup& group : table.groups) {
    const std::int32_t before = table.rows[static_cast<std::size_t>(group.first_row)].length - window;
    for (const Row& row : table.rows_of(group, evidence.spec.kv_heads)) {
      const float* head = heads.data<float>() + row.first;
      for (std::int32_t t = 0; t < before; ++t) out[t] += head[t];
    }
    out += before;
  }
  return tokens;
}

KVKEEP_INLINE Tensor token_mass(const Evidence& evidence, const Tensor& sums, std::int32_t window) {
  const RowTable& table = evidence.table;
  Tensor mass = zeros({prompt_scores_detail::slots_before_windows(table, window)}, Dtype::f32);
  float* out = mass.data<float>();
  const float each = 1.0F / static_cast<float>(std::int64_t{evidence.spec.kv_heads} * window);
  for (const RowGroup& group : table.groups) {
    const std::int32_t before = table.rows[static_cast<std::size_t>(group.first_row)].length - window;
    for (const Row& row : table.rows_of(group, evidence.spec.kv_heads)) {
      const float* u = sums.data<float>() + row.first;
      for (std::int32_t t = 0; t < before; ++t) out[t] += product(each, u[t]);
    }
    out += before;
  }
  return mass;
}

}  // namespace kvkeep
