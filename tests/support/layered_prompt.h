// SPDX-License-Identifier: Apache-2.0
#pragma once
/// One prompt in all layers of a toy model, for tests of what happens while it runs, and plain loops in double over it.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "arrays.h"
#include "kvkeep/score/evidence.h"
#include "oracle/random_case.h"

namespace kvkeep::testing {

using Ints = std::vector<std::int32_t>;
using Doubles = std::vector<double>;

struct PromptShape {
  std::int32_t layers = 9;
  std::int32_t group = 2;
  std::int32_t kv_heads = 2;
  std::int32_t dim = 8;
  std::int32_t tokens = 60;
  Dtype dtype = Dtype::f32;
};

/// Queries and keys after RoPE. What tokens mean changes from layer to layer, and ever less: rankings settle.
class LayeredPrompt {
 public:
  LayeredPrompt(PromptShape with, std::uint64_t seed) : shape(with) {
    spec = {.query_heads = shape.group * shape.kv_heads,
            .kv_heads = shape.kv_heads,
            .key_dim = shape.dim,
            .value_dim = 1,
            .softmax_scale = 0,
            .rope = {},
            .layers = std::vector<LayerSpec>(static_cast<std::size_t>(shape.layers))};
    oracle::Random random(seed);
    const auto around = [&](const Array& middle, std::int64_t heads, double noise) {
      Array t = Array::empty({heads, shape.tokens, shape.dim}, Dtype::f32);
      for (std::int64_t i = 0; i < t.numel(); ++i)
        t.data<float>()[i] =
            static_cast<float>((middle.defined() ? middle.data<float>()[i] : 0) + noise * random.normal());
      return t;
    };
    const Array key = around({}, spec.kv_heads, 1), query = around({}, spec.query_heads, 1);
    const double settled_from = random.between(1, shape.layers);
    for (std::int32_t l = 0; l < shape.layers; ++l) {
      const double noise = l < settled_from ? 1.0 : 0.6 / (1 + (l - settled_from) * (l - settled_from));
      keys.push_back(around(key, spec.kv_heads, noise).to(shape.dtype).contiguous());
      queries.push_back(around(query, spec.query_heads, noise).to(shape.dtype).contiguous());
    }
  }

  [[nodiscard]] Ints all() const {
    Ints places(static_cast<std::size_t>(shape.tokens));
    std::iota(places.begin(), places.end(), 0);
    return places;
  }

  /// Numbers as doubles, [heads, tokens, dim].
  [[nodiscard]] static Doubles doubles(const Array& t) {
    const Array wide = t.to(Dtype::f64).contiguous();
    return {wide.data<double>(), wide.data<double>() + wide.numel()};
  }

  /// Softmax of the newest `window` queries of one query head over the tokens present: [window][present].
  [[nodiscard]] std::vector<Doubles> attention(std::int32_t layer, const Ints& present, std::int32_t query_head,
                                               std::int32_t window) const {
    const Doubles k = doubles(keys[static_cast<std::size_t>(layer)][query_head / shape.group]),
                  q = doubles(queries[static_cast<std::size_t>(layer)][query_head]);
    const auto n = static_cast<std::int32_t>(present.size());
    std::vector<Doubles> rows;
    for (std::int32_t i = n - window; i < n; ++i) {
      Doubles p(static_cast<std::size_t>(n));
      double top = -1e300, sum = 0;
      for (std::int32_t j = 0; j <= i; ++j)
        top =
            std::max(top, p[static_cast<std::size_t>(j)] = spec.scale() * dot(q, present[static_cast<std::size_t>(i)],
                                                                              k, present[static_cast<std::size_t>(j)]));
      for (std::int32_t j = 0; j <= i; ++j)
        sum += p[static_cast<std::size_t>(j)] = std::exp(p[static_cast<std::size_t>(j)] - top);
      for (std::int32_t j = 0; j <= i; ++j) p[static_cast<std::size_t>(j)] /= sum;
      rows.push_back(p);
    }
    return rows;
  }

  /// Sum over the window, each query times its weight (none: 1).
  [[nodiscard]] Doubles sums(std::int32_t layer, const Ints& present, std::int32_t query_head, std::int32_t window,
                             const Doubles& weights = {}) const {
    Doubles u(present.size());
    const std::vector<Doubles> rows = attention(layer, present, query_head, window);
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (std::size_t j = 0; j < u.size(); ++j) u[j] += rows[i][j] * (weights.empty() ? 1.0 : weights[i]);
    return u;
  }

  /// The same, mean over the query heads of one KV head.
  [[nodiscard]] Doubles group_sums(std::int32_t layer, const Ints& present, std::int32_t head, std::int32_t window,
                                   const Doubles& weights = {}) const {
    Doubles mean(present.size());
    for (std::int32_t h = head * shape.group; h < (head + 1) * shape.group; ++h) {
      const Doubles u = sums(layer, present, h, window, weights);
      for (std::size_t j = 0; j < u.size(); ++j) mean[j] += u[j] / shape.group;
    }
    return mean;
  }

  /// Of one KV head and every token before the window: sum over its query heads of the pooled sums.
  [[nodiscard]] Doubles head_scores(std::int32_t layer, const Ints& present, std::int32_t head, std::int32_t window,
                                    std::int32_t pool, bool maximum) const {
    const auto n = static_cast<std::int32_t>(present.size()) - window;
    Doubles scores(static_cast<std::size_t>(n));
    for (std::int32_t h = head * shape.group; h < (head + 1) * shape.group; ++h) {
      const Doubles u = sums(layer, present, h, window);
      for (std::int32_t j = 0; j < n; ++j) {
        double sum = 0, most = 0;
        for (std::int32_t m = std::max(0, j - pool / 2); m <= std::min(n - 1, j + pool / 2); ++m) {
          sum += u[static_cast<std::size_t>(m)];
          most = std::max(most, u[static_cast<std::size_t>(m)]);
        }
        scores[static_cast<std::size_t>(j)] += maximum ? most : sum / pool;
      }
    }
    return scores;
  }

  /// The same, sum over the KV heads.
  [[nodiscard]] Doubles token_scores(std::int32_t layer, const Ints& present, std::int32_t window, std::int32_t pool,
                                     bool maximum) const {
    Doubles scores(present.size() - static_cast<std::size_t>(window));
    for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
      const Doubles one = head_scores(layer, present, h, window, pool, maximum);
      for (std::size_t j = 0; j < scores.size(); ++j) scores[j] += one[j];
    }
    return scores;
  }

  /// Share of the window's attention that each token before it drew.
  [[nodiscard]] Doubles masses(std::int32_t layer, const Ints& present, std::int32_t window) const {
    Doubles mass(present.size() - static_cast<std::size_t>(window));
    for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
      const Doubles one = group_sums(layer, present, h, window);
      for (std::size_t j = 0; j < mass.size(); ++j) mass[j] += one[j] / (window * shape.kv_heads);
    }
    return mass;
  }

  /// Products of the last query with every key, sum over the heads, averaged over `pool` neighbours and zeros outside.
  [[nodiscard]] Doubles last_query(std::int32_t layer, const Ints& present, std::int32_t pool) const {
    const auto n = static_cast<std::int32_t>(present.size());
    Doubles products(present.size()), pooled(present.size());
    for (std::int32_t h = 0; h < spec.query_heads; ++h) {
      const Doubles k = doubles(keys[static_cast<std::size_t>(layer)][h / shape.group]),
                    q = doubles(queries[static_cast<std::size_t>(layer)][h]);
      for (std::size_t j = 0; j < present.size(); ++j) products[j] += dot(q, present.back(), k, present[j]);
    }
    for (std::int32_t j = 0; j < n; ++j)
      for (std::int32_t m = std::max(0, j - pool / 2); m <= std::min(n - 1, j + pool / 2); ++m)
        pooled[static_cast<std::size_t>(j)] += products[static_cast<std::size_t>(m)] / pool;
    return pooled;
  }

  PromptShape shape;
  ModelSpec spec;
  std::vector<Array> keys, queries;  ///< [layers] [Hkv, T, D] and [Hq, T, D]

 private:
  [[nodiscard]] double dot(const Doubles& q, std::int32_t i, const Doubles& k, std::int32_t j) const {
    double x = 0;
    for (std::int32_t d = 0; d < shape.dim; ++d)
      x += q[static_cast<std::size_t>(i * shape.dim + d)] * k[static_cast<std::size_t>(j * shape.dim + d)];
    return x;
  }
};

/// One layer of it on the tokens present: rows, and the newest `queries` queries. Holds what its table points at.
class PromptLayer {
 public:
  PromptLayer(const LayeredPrompt& prompt, std::int32_t layer, Ints present, std::int32_t queries)
      : spec_(prompt.spec), positions_(std::move(present)) {
    const auto n = static_cast<std::int32_t>(positions_.size()), dim = prompt.shape.dim;
    const auto gathered = [&](const Array& from, std::int32_t first) {
      Array rows = Array::empty({from.size(0), n - first, dim}, from.dtype());
      for (std::int32_t i = first; i < n; ++i)
        rows.select(1, i - first).copy_(from.select(1, positions_[static_cast<std::size_t>(i)]));
      return rows;
    };
    keys_ = gathered(prompt.keys[static_cast<std::size_t>(layer)], 0);
    queries_ = gathered(prompt.queries[static_cast<std::size_t>(layer)], n - queries);
    const auto width = static_cast<std::int64_t>(keys_.element_size()) * dim;
    table.key_dtype = table.value_dtype = prompt.shape.dtype;
    RowGroup group;
    group.layer = layer;
    group.queries = {.data = static_cast<const std::byte*>(queries_.bytes()),
                     .dtype = prompt.shape.dtype,
                     .token_stride = width,
                     .head_stride = width * queries,
                     .positions = positions_.data() + n - queries,
                     .ring = queries,
                     .begin = 0,
                     .count = queries};
    group.next_position = group.prompt_end = prompt.shape.tokens;
    group.seen = group.prompt = {prompt.shape.tokens};
    table.groups.push_back(group);
    for (std::int32_t h = 0; h < prompt.shape.kv_heads; ++h) {
      Row row;
      row.layer = layer, row.head = h, row.length = n, row.first = table.slots;
      row.keys = {static_cast<std::byte*>(keys_.bytes()) + h * n * width, width, width};
      row.positions = positions_.data();
      table.slots += n;
      table.rows.push_back(row);
    }
  }
  PromptLayer(const PromptLayer&) = delete;
  PromptLayer& operator=(const PromptLayer&) = delete;

  [[nodiscard]] Evidence evidence() const {
    return {.spec = spec_, .table = table, .basis = QueryBasis::post_rope, .moment = Moment::prefill_layer};
  }

  RowTable table;

 private:
  const ModelSpec& spec_;
  Ints positions_;
  Array keys_, queries_;
};

/// Places of the `count` best, ascending; equal ones: the lower index first.
inline Ints best_of(const Doubles& scores, std::int64_t count) {
  Ints order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  order.resize(std::min(order.size(), static_cast<std::size_t>(count)));
  std::sort(order.begin(), order.end());
  return order;
}

/// Ranks from 1, the highest first; equal ones: the lower index first.
inline Ints ranks_in(const Doubles& scores) {
  Ints order(scores.size()), ranks(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  for (std::size_t i = 0; i < order.size(); ++i)
    ranks[static_cast<std::size_t>(order[i])] = static_cast<std::int32_t>(i) + 1;
  return ranks;
}

/// True where no score that was left out is above one that was chosen: by more than what single precision makes of
/// them.
inline bool none_better(const Doubles& scores, const Ints& chosen, double by) {
  double least = 1e300, most = -1e300;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const bool in = std::binary_search(chosen.begin(), chosen.end(), static_cast<std::int32_t>(j));
    if (in)
      least = std::min(least, scores[j]);
    else
      most = std::max(most, scores[j]);
  }
  return least >= most - by;
}

}  // namespace kvkeep::testing
