#pragma once
/// Prompts for tests of span memories, and attention over them as one plain softmax.

#include <cmath>
#include <cstdint>
#include <vector>

#include "arrays.h"
#include "kvkeep/memory/router.h"
#include "oracle/random_case.h"

namespace kvkeep::testing {

struct FoldedPrompt {
  FoldedPrompt(std::uint64_t seed, int tokens, int kv_heads, int query_heads, int dim, int asked) {
    oracle::Random random(seed);
    keys = normals(random, {kv_heads, tokens, dim});
    values = normals(random, {kv_heads, tokens, dim});
    queries = normals(random, {asked, query_heads, dim});
    for (int t = 0; t < tokens; ++t) surprisal.push_back(static_cast<float>(t == 0 ? 0 : -std::log(1 - random.unit())));
    // Rows of a span resemble each other, as those of text do: what is factorised falls off.
    for (Array* side : {&keys, &values})
      for (int h = 0; h < kv_heads; ++h)
        for (int t = 1; t < tokens; ++t)
          for (int d = 0; d < dim; ++d) {
            float* row = side->data<float>() + (std::int64_t{h} * tokens + t) * dim;
            row[d] = 0.8F * row[d - dim] + 0.6F * row[d];
          }
  }

  [[nodiscard]] SpanMemory fold(const FactorOptions& factors = {}, const RankGates* gates = nullptr) const {
    return fold_prompt(keys, values, surprisal, segment(surprisal, segmenter), factors, gates);
  }

  Array keys, values, queries;
  std::vector<float> surprisal;
  SegmenterOptions segmenter{.alpha = 1.5, .sink = 2, .recent = 9, .min_span = 3, .max_span = 24};
};

/// One softmax in fp64 over dense rows, coarse entries and rows of zoomed spans: the answer of query `query`, head
/// `head`.
inline std::vector<double> plain_answer(const SpanMemory& memory, const Array& queries, const Array& zoomed,
                                        double scale, std::int64_t query, std::int64_t head) {
  const SpanStore& spans = memory.spans;
  const std::int64_t heads = queries.size(1), kv = head / (heads / spans.kv_heads()), dim = spans.dim();
  const float* q = queries.data<float>() + (query * heads + head) * dim;
  std::vector<double> logits;
  std::vector<const float*> values;
  const auto add = [&](const float* key, const float* value, double bias) {
    double dot = 0;
    for (std::int64_t d = 0; d < dim; ++d) dot += static_cast<double>(q[d]) * key[d];
    logits.push_back(scale * dot + bias);
    values.push_back(value);
  };
  const Array dense_keys = Array(memory.dense_keys).to(Dtype::f32),
              dense_values = Array(memory.dense_values).to(Dtype::f32);
  const Array coarse_keys = spans.coarse(KvSide::keys), coarse_values = spans.coarse(KvSide::values);
  for (std::int64_t t = 0; t < dense_keys.size(1); ++t) {
    const std::int64_t at = (kv * dense_keys.size(1) + t) * dim;
    add(dense_keys.data<float>() + at, dense_values.data<float>() + at, 0);
  }
  std::vector<Array> rows;
  for (std::int64_t s = 0; s < spans.size(); ++s) {
    const std::int64_t length = spans.spans()[static_cast<std::size_t>(s)].length();
    if (zoomed.data<std::uint8_t>()[(query * heads + head) * spans.size() + s] == 0) {
      const std::int64_t at = (kv * spans.size() + s) * dim;
      add(coarse_keys.data<float>() + at, coarse_values.data<float>() + at, std::log(static_cast<double>(length)));
      continue;
    }
    const Array keys = spans.rows(s, KvSide::keys), shown = spans.rows(s, KvSide::values);
    rows.push_back(shown);
    for (std::int64_t t = 0; t < length; ++t)
      add(keys.data<float>() + (kv * length + t) * dim, shown.data<float>() + (kv * length + t) * dim, 0);
  }
  double top = -HUGE_VAL, sum = 0;
  for (const double x : logits) top = std::max(top, x);
  std::vector<double> out(static_cast<std::size_t>(dim));
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] - top);
    sum += p;
    for (std::int64_t d = 0; d < dim; ++d) out[static_cast<std::size_t>(d)] += p * values[i][d];
  }
  for (double& x : out) x /= sum;
  return out;
}

/// The memory's answers with these spans zoomed: f32 [n, Hq, D].
inline Array answers(const SpanMemory& memory, const Array& queries, const Array& zoomed, double scale) {
  OpenAttention open = attend_rows(memory.dense_keys, memory.dense_values, queries, scale);
  merge_spans(open, memory.spans, queries, scale, coarse_logits(memory.spans, queries, scale), zoomed);
  return open.close();
}

}  // namespace kvkeep::testing
