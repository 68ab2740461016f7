// SPDX-License-Identifier: Apache-2.0
// Models whose full layers differ in heads and sizes: a keeper for each shape.

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "arrays.h"
#include "kvkeep/kvkeep.h"
#include "oracle/random_case.h"

namespace kvkeep::unlike_layers_test {
namespace {

using testing::Array;

constexpr std::int32_t kPrompt = 70, kMore = 40, kTokens = kPrompt + kMore;
constexpr SequenceId kId = 5;

struct Shape {
  std::int32_t query_heads, kv_heads, key_dim, value_dim;
};
constexpr Shape kShapes[] = {{4, 2, 8, 6}, {9, 3, 16, 10}};

ModelSpec spec_of(const Shape& shape, const std::vector<LayerKind>& kinds) {
  ModelSpec spec{.query_heads = shape.query_heads,
                 .kv_heads = shape.kv_heads,
                 .key_dim = shape.key_dim,
                 .value_dim = shape.value_dim,
                 .softmax_scale = 0,
                 .rope = {.inv_freq = {1.0, 0.3, 0.1, 0.01}},
                 .layers = {}};
  for (const LayerKind kind : kinds) spec.layers.push_back({.kind = kind});
  return spec;
}

/// [tokens, heads, dim] of a layer.
struct Numbers {
  Array keys, values, queries;
};
Numbers numbers_of(const Shape& shape, unsigned seed) {
  oracle::Random random(seed);
  return {testing::normals(random, {kTokens, shape.kv_heads, shape.key_dim}),
          testing::normals(random, {kTokens, shape.kv_heads, shape.value_dim}),
          testing::normals(random, {kTokens, shape.query_heads, shape.key_dim})};
}

/// What is held at the end, [full layers][heads], of a prompt and `more` single tokens behind it. `numbers`: of each
/// layer that is full.
std::vector<std::vector<std::int32_t>> held(const ModelSpec& spec, const std::string& policy,
                                            const std::vector<Numbers>& numbers, std::int32_t more = kMore) {
  Keeper keeper(spec, make_policy(policy));
  std::vector<LayerKv> layers(spec.layers.size());
  const std::vector<std::int32_t> full = spec.full_layers();
  std::vector<Array> keys, values;
  for (const std::int32_t l : full) {
    keys.push_back(Array::zeros({1, spec.kv_heads, kTokens, spec.key_dim}, Dtype::f32));
    values.push_back(Array::zeros({1, spec.kv_heads, kTokens, spec.value_dim}, Dtype::f32));
    layers[static_cast<std::size_t>(l)] = DenseKv{keys.back(), values.back()};
  }
  keeper.bind(std::move(layers));
  keeper.join(kId);
  std::vector<std::int32_t> lengths(spec.layers.size() * static_cast<std::size_t>(spec.kv_heads));
  std::int64_t events = 0;
  for (std::int32_t from = 0, to = kPrompt; from < kPrompt + more; from = to++) {
    const std::int32_t indptr[] = {0, to - from};
    for (std::size_t i = 0; i < full.size(); ++i) {
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        std::int32_t& length = lengths[static_cast<std::size_t>(full[i] * spec.kv_heads + h)];
        for (std::int32_t t = from; t < to; ++t, ++length) {
          keys[i][0][h][length].copy_(numbers[i].keys[t][h]);
          values[i][0][h][length].copy_(numbers[i].values[t][h]);
        }
      }
      keeper.observe({.layer = full[i],
                      .sequences = {&kId, 1},
                      .indptr = indptr,
                      .queries = numbers[i].queries.narrow(0, from, to - from)});
    }
    const Report report =
        keeper.step({.sequences = {&kId, 1}, .lengths = {lengths, static_cast<std::int32_t>(lengths.size())}});
    events += std::ssize(report.cuts);
  }
  EXPECT_GE(events, more > 0 ? 3 : 1) << policy;
  std::vector<std::vector<std::int32_t>> all;
  for (const std::int32_t l : full)
    for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
      const auto row = keeper.positions(kId, l, h);
      all.emplace_back(row.begin(), row.end());
    }
  return all;
}

/// Layers 0 and 2 have one shape, 1 and 3 another. To each keeper the others are `remote`: so many layers there are,
/// and it cuts its own.
TEST(UnlikeLayers, AreCutByAKeeperForEachShapeAsAloneInAModel) {
  for (const std::string policy :
       {"tova,budget=32,interval=8", "snapkv,budget=32,interval=8,window=4", "h2o,budget=32,interval=8",
        "expected,budget=32,interval=8", "rkv,budget=32,interval=8,window=4", "keydiff,budget=32,interval=8",
        "ams-tova,budget=32,interval=8,recent=4,window=4", "adakv-snapkv,budget=32,interval=8,window=4",
        "chunkkv-snapkv,budget=32,interval=8,window=4"})
    for (std::int32_t s = 0; s < 2; ++s) {
      const LayerKind own = LayerKind::full, other = LayerKind::remote;
      const std::vector<Numbers> numbers{numbers_of(kShapes[s], 1), numbers_of(kShapes[s], 2)};
      const auto among =
          held(spec_of(kShapes[s], s == 0 ? std::vector{own, other, own, other} : std::vector{other, own, other, own}),
               policy + ",prefill=cut", numbers);
      EXPECT_EQ(among, held(spec_of(kShapes[s], {own, own}), policy + ",prefill=cut", numbers)) << policy;
    }
}

/// Where the prompt is cut, PyramidKV's budgets fall from the first layer of the model to its last, whoever holds them.
TEST(UnlikeLayers, HaveTheBudgetsOfTheirPlacesInTheModel) {
  const LayerKind own = LayerKind::full, other = LayerKind::remote;
  const std::string policy = "pyramidkv-snapkv,budget=32,interval=8,window=4,prefill=cut";
  std::vector<Numbers> all;
  for (unsigned l = 0; l < 4; ++l) all.push_back(numbers_of(kShapes[0], l));
  const auto whole = held(spec_of(kShapes[0], {own, own, own, own}), policy, all, 0),
             even = held(spec_of(kShapes[0], {own, other, own, other}), policy, {all[0], all[2]}, 0),
             odd = held(spec_of(kShapes[1], {other, own, other, own}), policy,
                        {numbers_of(kShapes[1], 1), numbers_of(kShapes[1], 3)}, 0);
  const auto size = [](const std::vector<std::vector<std::int32_t>>& rows, std::size_t r) { return rows[r].size(); };
  EXPECT_GT(size(whole, 0), size(whole, 6)) << "a pyramid";
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(size(even, 2 * i), size(whole, 4 * i)) << "layer " << 2 * i;
    EXPECT_EQ(size(odd, 3 * i), size(whole, 4 * i + 2)) << "layer " << 2 * i + 1;
  }
}

}  // namespace
}  // namespace kvkeep::unlike_layers_test
