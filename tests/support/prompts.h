// SPDX-License-Identifier: Apache-2.0
#pragma once
/// One layer of prompts for tests of what happens inside prefill, and plain loops in double over it.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kvkeep/layers/prompt_scores.h"
#include "oracle/random_case.h"

namespace kvkeep::testing {

using Options = PromptScoreOptions;

/// One layer of prompts, queries after RoPE, each with all of its own: positions 0 to length - 1.
class Prompts {
 public:
  Prompts(std::int32_t group, std::int32_t kv_heads, std::int32_t dim, std::vector<std::int32_t> lengths,
          std::int32_t window, std::uint64_t seed, double softmax_scale = 0)
      : lengths_(std::move(lengths)), window_(window) {
    spec = {.query_heads = group * kv_heads,
            .kv_heads = kv_heads,
            .key_dim = dim,
            .value_dim = 1,
            .softmax_scale = softmax_scale,
            .rope = {},
            .layers = std::vector<LayerSpec>(1)};
    oracle::Random random(seed);
    std::int32_t longest = 0;
    for (const std::int32_t length : lengths_) longest = std::max(longest, length);
    positions_.resize(static_cast<std::size_t>(longest));
    std::iota(positions_.begin(), positions_.end(), 0);
    for (std::size_t s = 0; s < lengths_.size(); ++s) {
      keys.emplace_back(), queries.emplace_back();
      for (std::int32_t i = 0; i < kv_heads * lengths_[s] * dim; ++i)
        keys.back().push_back(static_cast<float>(random.normal()));
      for (std::int32_t i = 0; i < window * spec.query_heads * dim; ++i)
        queries.back().push_back(static_cast<float>(random.normal()));
    }
  }

  [[nodiscard]] RowTable table() const {
    RowTable table;
    for (std::size_t s = 0; s < lengths_.size(); ++s) {
      const std::int32_t length = lengths_[s];
      RowGroup group;
      group.sequence = static_cast<std::int32_t>(s);
      group.first_row = static_cast<std::int64_t>(table.rows.size());
      group.queries = {.data = reinterpret_cast<const std::byte*>(queries[s].data()),
                       .dtype = Dtype::f32,
                       .token_stride = spec.query_heads * spec.key_dim * 4,
                       .head_stride = spec.key_dim * 4,
                       .positions = positions_.data() + length - window_,
                       .ring = window_,
                       .begin = 0,
                       .count = window_};
      group.next_position = length;
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        Row row;
        row.sequence = group.sequence, row.head = h, row.length = length, row.first = table.slots;
        const std::int64_t width = spec.key_dim * 4;
        row.keys = {reinterpret_cast<std::byte*>(const_cast<float*>(keys[s].data())) + h * length * width, width,
                    width};
        row.positions = positions_.data();
        table.slots += length;
        table.rows.push_back(row);
      }
      table.groups.push_back(group);
    }
    return table;
  }
  [[nodiscard]] Evidence evidence(const RowTable& rows) const {
    return {.spec = spec, .table = rows, .basis = QueryBasis::post_rope, .moment = Moment::prefill_layer};
  }
  [[nodiscard]] PromptScores scores(const Options& options) const {
    const RowTable rows = table();
    return prompt_scores(evidence(rows), options);
  }

  /// Sum over the window of a query head's softmax, for every slot.
  [[nodiscard]] std::vector<double> sums(std::size_t s, std::int32_t query_head) const {
    const std::int32_t length = lengths_[s], dim = spec.key_dim, before = length - window_;
    std::vector<double> u(static_cast<std::size_t>(length));
    for (std::int32_t i = 0; i < window_; ++i) {
      std::vector<double> p;
      double top = -1e300, sum = 0;
      for (std::int32_t j = 0; j <= before + i; ++j) {
        double x = 0;
        for (std::int32_t d = 0; d < dim; ++d)
          x +=
              static_cast<double>(queries[s][static_cast<std::size_t>((i * spec.query_heads + query_head) * dim + d)]) *
              static_cast<double>(
                  keys[s][static_cast<std::size_t>((query_head / spec.group() * length + j) * dim + d)]);
        p.push_back(x * spec.scale());
        top = std::max(top, p.back());
      }
      for (double& x : p) sum += x = std::exp(x - top);
      for (std::int32_t j = 0; j <= before + i; ++j)
        u[static_cast<std::size_t>(j)] += p[static_cast<std::size_t>(j)] / sum;
    }
    return u;
  }
  [[nodiscard]] std::vector<double> head_scores(std::size_t s, std::int32_t head, const Options& options) const {
    std::vector<double> all(static_cast<std::size_t>(lengths_[s] - window_));
    const auto n = static_cast<std::int32_t>(all.size()), reach = options.pool / 2;
    for (std::int32_t h = head * spec.group(); h < (head + 1) * spec.group(); ++h) {
      const std::vector<double> u = sums(s, h);
      for (std::int32_t j = 0; j < n; ++j) {
        double sum = 0, most = 0;
        for (std::int32_t m = std::max(0, j - reach); m <= std::min(n - 1, j + reach); ++m) {
          sum += u[static_cast<std::size_t>(m)];
          most = std::max(most, u[static_cast<std::size_t>(m)]);
        }
        all[static_cast<std::size_t>(j)] += options.kind == Options::Pool::average ? sum / options.pool : most;
      }
    }
    return all;
  }

  ModelSpec spec;
  std::vector<std::vector<float>> keys, queries;  ///< [prompts] [Hkv, T, D] and [W, Hq, D]

 private:
  std::vector<std::int32_t> lengths_, positions_;
  std::int32_t window_;
};

}  // namespace kvkeep::testing
