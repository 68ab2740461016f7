#include "kvkeep/layers/prompt_scores.h"

#include <ATen/ops/zeros.h>

#include "kvkeep/core/pool.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {
namespace {

using Options = PromptScoreOptions;

void check(const Evidence& evidence, const Options& options) {
  require(options.window >= 1, "prompt scores: window; given ", options.window, "; allowed 1 or more");
  require(options.pool >= 1 && options.pool % 2 == 1, "prompt scores: pool; given ", options.pool, "; allowed odd numbers from 1 on");
  const RowTable& table = evidence.table;
  for (const RowGroup& group : table.groups) {
    require(group.queries.count >= options.window, "prompt scores: layer ", group.layer, " has ", group.queries.count, " queries; allowed ", options.window, " or more, the window");
    for (const Row& row : table.rows_of(group, evidence.spec.kv_heads)) {
      require(row.length > options.window, "prompt scores: a row of layer ", row.layer, " holds ", row.length, " slots; allowed more than the window of ", options.window);
      require(row.length == table.rows[static_cast<std::size_t>(group.first_row)].length, "prompt scores: rows of layer ", row.layer, " differ in length; allowed one length");
    }
  }
}

/// Every query head as a KV head of its own: the same keys, once for each.
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

Tensor sums(const Evidence& evidence, std::int32_t window) {
  std::vector<RowWindow> windows;
  for (const Row& row : evidence.table.rows) windows.push_back({window, row.length - window});
  return attention_sum(evidence, windows);
}

}  // namespace

PromptScores prompt_scores(const Evidence& evidence, PromptScoreOptions options) {
  check(evidence, options);
  const ModelSpec& spec = evidence.spec;
  const RowTable& table = evidence.table;
  const bool average = options.kind == Options::Pool::average || options.pool == 1;
  // The average of a sum is the sum of averages: one sum a KV head is enough. A maximum is not.
  const std::int32_t parts = average ? 1 : spec.group();
  const ByQueryHead split(evidence);
  const Tensor sum = average ? sums(evidence, options.window)
                             : sums({.spec = split.spec, .table = split.table, .basis = evidence.basis, .moment = evidence.moment}, options.window);
  const float* of_window = sum.const_data_ptr<float>();
  const float weight = average ? static_cast<float>(spec.group()) : 1.0F;

  std::int64_t ranked = 0;
  for (const RowGroup& group : table.groups) ranked += table.rows[static_cast<std::size_t>(group.first_row)].length - options.window;
  PromptScores scores{at::zeros({table.slots}, at::TensorOptions().dtype(kFloat32)), at::zeros({ranked}, at::TensorOptions().dtype(kFloat32))};
  float* tokens = scores.tokens.data_ptr<float>();
  std::vector<float> pooled;
  for (const RowGroup& group : table.groups) {
    const std::int32_t before = table.rows[static_cast<std::size_t>(group.first_row)].length - options.window;
    pooled.resize(static_cast<std::size_t>(before));
    for (const Row& row : table.rows_of(group, spec.kv_heads)) {
      float* head = scores.heads.data_ptr<float>() + row.first;
      for (std::int32_t part = 0; part < parts; ++part) {
        const float* u = of_window + row.first * parts + std::int64_t{part} * row.length;
        if (average) pool_average(u, before, options.pool, pooled.data());
        else pool_max(u, before, options.pool, pooled.data());
        for (std::int32_t t = 0; t < before; ++t) head[t] += weight * pooled[static_cast<std::size_t>(t)];
      }
      for (std::int32_t t = 0; t < before; ++t) tokens[t] += head[t];
    }
    tokens += before;
  }
  return scores;
}

}  // namespace kvkeep
