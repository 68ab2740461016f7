#include "window_oracle.h"

#include <algorithm>
#include <cmath>

namespace oracle {
namespace {

double dot(const Sequence& s, int query_head, int query, int slot) {
  const float* q = s.queries.data() + (static_cast<size_t>(query_head) * s.queries_seen() + query) * s.D;
  const float* k = s.keys.data() + (static_cast<size_t>(query_head / (s.Hq / s.Hkv)) * s.T + slot) * s.D;
  double sum = 0;
  for (int d = 0; d < s.D; ++d) sum += static_cast<double>(q[d]) * k[d];
  return s.scale * sum;
}

/// In place, over what is there.
void softmax(std::vector<double>& x) {
  if (x.empty()) return;
  const double largest = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double& v : x) sum += v = std::exp(v - largest);
  for (double& v : x) v /= sum;
}

}  // namespace

int history_of(const Sequence& s, int kv_head, int window) {
  const int oldest = s.query_positions[static_cast<size_t>(s.queries_seen() - window)];
  int n = 0;
  while (n < s.T && s.positions[static_cast<size_t>(kv_head) * s.T + n] < oldest) ++n;
  return n;
}

std::vector<double> history_attention(const Sequence& s, int kv_head, const HistoryQuestion& question) {
  const int group = s.Hq / s.Hkv;
  std::vector<double> out(s.T, 0.0);
  double counted = 0;
  for (int i = s.queries_seen() - question.window; i < s.queries_seen(); ++i) {
    const double counts = i + 1 == s.queries_seen() ? question.newest_counts : 1;
    counted += counts;
    std::vector<std::vector<double>> heads;
    for (int g = 0; g < group; ++g) {
      std::vector<double> x;
      for (int t = question.first; t < question.history; ++t) x.push_back(dot(s, kv_head * group + g, i, t));
      if (question.max_logit && !heads.empty()) {
        for (size_t t = 0; t < x.size(); ++t) heads[0][t] = std::max(heads[0][t], x[t]);
      } else {
        heads.push_back(x);
      }
    }
    for (auto& x : heads) {
      softmax(x);
      for (size_t t = 0; t < x.size(); ++t) out[static_cast<size_t>(question.first) + t] += counts * x[t] / static_cast<double>(heads.size());
    }
  }
  for (double& x : out) x /= counted;
  return out;
}

std::vector<double> attention_sum(const Sequence& s, int kv_head, int window) {
  const int group = s.Hq / s.Hkv;
  std::vector<double> out(s.T, 0.0);
  for (int i = s.queries_seen() - window; i < s.queries_seen(); ++i)
    for (int g = 0; g < group; ++g) {
      std::vector<double> x;
      for (int t = 0; t < s.T && s.positions[static_cast<size_t>(kv_head) * s.T + t] <= s.query_positions[static_cast<size_t>(i)]; ++t)
        x.push_back(dot(s, kv_head * group + g, i, t));
      softmax(x);
      for (size_t t = 0; t < x.size(); ++t) out[t] += x[t] / group;
    }
  return out;
}

std::vector<double> average_pooled(const std::vector<double>& values, int kernel) {
  const int n = static_cast<int>(values.size());
  std::vector<double> out(values.size(), 0.0);
  for (int t = 0; t < n; ++t) {
    for (int j = 0; j < kernel; ++j) {
      const int at = t + j - (kernel - 1) / 2;
      if (at >= 0 && at < n) out[static_cast<size_t>(t)] += values[static_cast<size_t>(at)];
    }
    out[static_cast<size_t>(t)] /= kernel;
  }
  return out;
}

std::vector<double> max_pooled(const std::vector<double>& values, int kernel) {
  const int n = static_cast<int>(values.size());
  std::vector<double> out = values;
  for (int t = 0; t < n; ++t)
    for (int j = std::max(0, t - (kernel - 1) / 2); j <= std::min(n - 1, t + (kernel - 1) / 2); ++j)
      out[static_cast<size_t>(t)] = std::max(out[static_cast<size_t>(t)], values[static_cast<size_t>(j)]);
  return out;
}

}  // namespace oracle
