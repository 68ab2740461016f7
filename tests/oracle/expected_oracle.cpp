// SPDX-License-Identifier: Apache-2.0
#include "expected_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace oracle {
namespace {

using Matrix = std::vector<std::vector<double>>;

/// The mean of the rotation matrices at `count` positions from `first` on, summed one by one.
Matrix mean_rotation(const ScorerInput& in, int first, int count) {
  Matrix r(static_cast<std::size_t>(in.D), std::vector<double>(static_cast<std::size_t>(in.D), 0.0));
  const int F = static_cast<int>(in.inv_freq.size());
  for (int d = 2 * F; d < in.D; ++d) r[static_cast<std::size_t>(d)][static_cast<std::size_t>(d)] = 1;
  for (int f = 0; f < F; ++f) {
    const auto i = static_cast<std::size_t>(in.interleaved ? 2 * f : f),
               j = static_cast<std::size_t>(in.interleaved ? 2 * f + 1 : f + F);
    double c = 0, s = 0;
    for (int p = first; p < first + count; ++p) {
      c += std::cos(p * in.inv_freq[static_cast<std::size_t>(f)]);
      s += std::sin(p * in.inv_freq[static_cast<std::size_t>(f)]);
    }
    r[i][i] = r[j][j] = c / count * in.attention_scaling;
    r[j][i] = s / count * in.attention_scaling;
    r[i][j] = -r[j][i];
  }
  return r;
}

std::vector<int> rows_that_count(const ScorerInput& in, const ExpectedSettings& o) {
  std::vector<int> rows;
  for (int i = std::max(0, in.N() - o.queries); i < in.N(); ++i)
    if (in.query_positions[static_cast<std::size_t>(i)] >= o.sink) rows.push_back(i);
  return rows;
}

}  // namespace

std::vector<std::vector<double>> expected_logits(const ScorerInput& in, const ExpectedSettings& o, int kv_head) {
  const std::vector<int> rows = rows_that_count(in, o);
  std::vector<std::vector<double>> all;
  if (rows.empty()) return all;
  const auto D = static_cast<std::size_t>(in.D);
  const Matrix r = mean_rotation(in, in.P, o.future);
  const ScorerHead& head = in.heads[static_cast<std::size_t>(kv_head)];
  const auto n = static_cast<double>(rows.size());
  for (int g = 0; g < in.group(); ++g) {
    const int h = kv_head * in.group() + g;
    std::vector<double> mean(D, 0.0), mean_bar(D, 0.0);
    Matrix c(D, std::vector<double>(D, 0.0)), rc = c, c_bar = c;
    for (const int row : rows)
      for (std::size_t d = 0; d < D; ++d) mean[d] += in.query_pre(h, row)[d] / n;
    for (const int row : rows)
      for (std::size_t i = 0; i < D; ++i)
        for (std::size_t j = 0; j < D; ++j)
          c[i][j] += (in.query_pre(h, row)[i] - mean[i]) * (in.query_pre(h, row)[j] - mean[j]) / n;
    for (std::size_t i = 0; i < D; ++i)
      for (std::size_t j = 0; j < D; ++j) {
        mean_bar[i] += r[i][j] * mean[j];
        for (std::size_t k = 0; k < D; ++k)
          if (r[i][k] != 0) rc[i][j] += r[i][k] * c[k][j];
      }
    for (std::size_t i = 0; i < D; ++i)
      for (std::size_t j = 0; j < D; ++j)
        for (std::size_t k = 0; k < D; ++k)
          if (r[j][k] != 0) c_bar[i][j] += rc[i][k] * r[j][k];
    std::vector<double>& x = all.emplace_back();
    for (int t = std::min(o.sink, head.T); t < head.T; ++t) {
      const float* key = head.key(t, in.D);
      double line = 0, square = 0;
      for (std::size_t i = 0; i < D; ++i) {
        line += mean_bar[i] * static_cast<double>(key[i]);
        for (std::size_t j = 0; j < D; ++j)
          square += static_cast<double>(key[i]) * c_bar[i][j] * static_cast<double>(key[j]);
      }
      x.push_back(in.scale * line + (o.covariance && rows.size() > 1 ? in.scale * in.scale / 2 * square : 0.0));
    }
  }
  return all;
}

ScorerOutput expected(const ScorerInput& in, const ExpectedSettings& o) {
  ScorerOutput out;
  for (int h = 0; h < in.Hkv; ++h) {
    const ScorerHead& head = in.heads[static_cast<std::size_t>(h)];
    std::vector<double>& g = out.emplace_back(static_cast<std::size_t>(head.T), 0.0);
    const auto x = expected_logits(in, o, h);
    const int first = std::min(o.sink, head.T);
    if (x.empty() || first == head.T) {
      for (int t = 0; t < head.T; ++t) g[static_cast<std::size_t>(t)] = t;
      continue;
    }
    int q = h * in.group();
    for (const std::vector<double>& logits : x) {
      const double top = *std::max_element(logits.begin(), logits.end());
      double sum = std::exp(in.sink(q++) - top);
      for (const double l : logits) sum += std::exp(l - top);
      for (std::size_t t = 0; t < logits.size(); ++t)
        g[static_cast<std::size_t>(first) + t] += std::exp(logits[t] - top) / sum / in.group();
    }
    double most = -std::numeric_limits<double>::infinity();
    for (int t = first; t < head.T; ++t) {
      double length = 0;
      for (int d = 0; d < in.Dv; ++d)
        length += static_cast<double>(head.value(t, in.Dv)[d]) * static_cast<double>(head.value(t, in.Dv)[d]);
      double& score = g[static_cast<std::size_t>(t)];
      if (o.value_norm) score = (score + o.epsilon) * std::sqrt(length);
      most = std::max(most, score);
    }
    std::fill(g.begin(), g.begin() + first, most);
  }
  return out;
}

}  // namespace oracle
