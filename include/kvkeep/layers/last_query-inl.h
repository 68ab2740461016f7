#pragma once
// Bodies of last_query.h: compiled by src/layers, or where they are included under KVKEEP_HEADER_ONLY.

#include "kvkeep/core/each_row.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/pool.h"
#include "kvkeep/layers/last_query.h"
#include "kvkeep/layers/layer_selector.h"
#include "kvkeep/score/window_queries.h"
#include "kvkeep/simd/key_lanes.h"

namespace kvkeep {
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

}  // namespace kvkeep
