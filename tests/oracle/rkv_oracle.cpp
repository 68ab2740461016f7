// SPDX-License-Identifier: Apache-2.0
#include "rkv_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace oracle {
namespace {

double dot(const float* a, const float* b, int D) {
  double sum = 0;
  for (int d = 0; d < D; ++d) sum += static_cast<double>(a[d]) * static_cast<double>(b[d]);
  return sum;
}

/// Over x and a sink, whose share belongs to nobody.
std::vector<double> softmax_of(const std::vector<double>& x, double sink = -std::numeric_limits<double>::infinity()) {
  const double top = std::max(sink, *std::max_element(x.begin(), x.end()));
  std::vector<double> e;
  for (const double v : x) e.push_back(std::exp(v - top));
  const double sum = std::accumulate(e.begin(), e.end(), std::exp(sink - top));
  for (double& v : e) v /= sum;
  return e;
}

/// Attention of the newest `window` queries over the slots [0, n), group and window reduced.
std::vector<double> attention(const ScorerInput& in, int h, int window, int n, bool max_logit) {
  const ScorerHead& head = in.heads[static_cast<std::size_t>(h)];
  std::vector<double> mean(static_cast<std::size_t>(n), 0.0);
  for (int i = in.N() - window; i < in.N(); ++i) {
    std::vector<double> largest(static_cast<std::size_t>(n), -std::numeric_limits<double>::infinity());
    double sink = -std::numeric_limits<double>::infinity();
    for (int q = h * in.group(); q < (h + 1) * in.group(); ++q) {
      std::vector<double> logits;
      for (int t = 0; t < n; ++t) {
        double sum = 0;
        for (int d = 0; d < in.D; ++d) sum += in.query(q, i)[d] * static_cast<double>(head.key(t, in.D)[d]);
        logits.push_back(in.logit(sum));
      }
      sink = std::max(sink, in.sink(q));
      for (std::size_t t = 0; t < logits.size(); ++t) largest[t] = std::max(largest[t], logits[t]);
      if (max_logit) continue;
      const std::vector<double> p = softmax_of(logits, in.sink(q));
      for (std::size_t t = 0; t < p.size(); ++t) mean[t] += p[t] / in.group() / window;
    }
    if (!max_logit) continue;
    const std::vector<double> p = softmax_of(largest, sink);
    for (std::size_t t = 0; t < p.size(); ++t) mean[t] += p[t] / window;
  }
  return mean;
}

}  // namespace

std::vector<double> redundancy(const ScorerHead& head, int D, int n, double similarity, bool first) {
  const auto size = static_cast<std::size_t>(n);
  std::vector<std::vector<double>> Z(size, std::vector<double>(size, 0.0));
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j)
      if (i != j) {
        const float *a = head.key(i, D), *b = head.key(j, D);
        Z[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)] =
            dot(a, b, D) / ((std::sqrt(dot(a, a, D)) + 1e-8) * (std::sqrt(dot(b, b, D)) + 1e-8));
      }
  for (auto& row : Z) {
    int spared = first ? 0 : -1;
    for (int j = 0; j < n; ++j)
      if (row[static_cast<std::size_t>(j)] > similarity) spared = j;
    if (spared >= 0) row[static_cast<std::size_t>(spared)] = 0;
  }
  std::vector<double> means(size, 0.0);
  for (const auto& row : Z)
    for (std::size_t j = 0; j < size; ++j) means[j] += row[j] / n;
  return means;
}

ScorerOutput rkv(const ScorerInput& in, const RkvQuestion& question) {
  ScorerOutput out;
  for (int h = 0; h < in.Hkv; ++h) {
    const ScorerHead& head = in.heads[static_cast<std::size_t>(h)];
    std::vector<double>& g = out.emplace_back(static_cast<std::size_t>(head.T), 0.0);
    const int window = std::min({question.window, in.N(), head.T - 1, head.budget});
    if (window < 1) {
      std::iota(g.begin(), g.end(), 0.0);
      continue;
    }
    const int oldest = in.query_positions[static_cast<std::size_t>(in.N() - window)];
    int history = 0;
    while (history < head.T && head.positions[static_cast<std::size_t>(history)] < oldest) ++history;
    if (history == 0) continue;
    const std::vector<double> a = attention(in, h, window, history, question.max_logit);
    const std::vector<double> r =
        softmax_of(redundancy(head, in.D, question.all ? head.T : history, question.similarity, question.first));
    for (int t = 0; t < history; ++t) {
      double pooled = 0;
      for (int i = std::max(0, t - question.pool / 2); i <= std::min(history - 1, t + question.pool / 2); ++i)
        pooled = std::max(pooled, a[static_cast<std::size_t>(i)]);
      g[static_cast<std::size_t>(t)] =
          question.lambda * pooled - (1 - question.lambda) * r[static_cast<std::size_t>(t)];
    }
  }
  return out;
}

}  // namespace oracle
