// SPDX-License-Identifier: Apache-2.0
#include "window_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace oracle {
namespace {

double dot(const Sequence& s, int query_head, int query, int slot) {
  const float* q = s.queries.data() + (static_cast<size_t>(query_head) * s.queries_seen() + query) * s.D;
  const float* k = s.keys.data() + (static_cast<size_t>(query_head / (s.Hq / s.Hkv)) * s.T + slot) * s.D;
  double sum = 0;
  for (int d = 0; d < s.D; ++d) sum += static_cast<double>(q[d]) * k[d];
  return s.cap > 0 ? s.cap * std::tanh(s.scale * sum / s.cap) : s.scale * sum;
}

double sink(const Sequence& s, int query_head) {
  return s.sinks.empty() ? -std::numeric_limits<double>::infinity() : s.sinks[static_cast<size_t>(query_head)];
}

/// In place, over what is there and a sink.
void softmax(std::vector<double>& x, double sink) {
  if (x.empty()) return;
  const double largest = std::max(sink, *std::max_element(x.begin(), x.end()));
  double sum = std::exp(sink - largest);
  for (double& v : x) sum += v = std::exp(v - largest);
  for (double& v : x) v /= sum;
}

/// A KV head with its query heads, as a sequence of its own.
Sequence alone(const ScorerInput& in, int h) {
  const ScorerHead& head = in.heads[static_cast<size_t>(h)];
  Sequence s;
  s.T = head.T;
  s.Hq = in.group();
  s.D = in.D;
  s.scale = in.scale;
  s.cap = in.cap;
  if (!in.sinks.empty()) s.sinks.assign(in.sinks.begin() + h * in.group(), in.sinks.begin() + (h + 1) * in.group());
  s.keys = head.keys;
  s.positions = head.positions;
  s.query_positions = in.query_positions;
  for (int q = h * in.group(); q < (h + 1) * in.group(); ++q)
    for (int i = 0; i < in.N(); ++i) s.queries.insert(s.queries.end(), in.query(q, i), in.query(q, i) + in.D);
  return s;
}

int clamped_window(const ScorerInput& in, const ScorerHead& head, int window) {
  return std::min({window, in.N(), head.T - 1, head.budget});
}

std::vector<double> by_age(int T) {
  std::vector<double> g;
  for (int t = 0; t < T; ++t) g.push_back(t);
  return g;
}

/// values[first, end) replaced by their pooled form, 0 elsewhere.
template <class Pool>
std::vector<double> pooled_between(const std::vector<double>& values, int first, int end, Pool&& pool) {
  std::vector<double> out(values.size(), 0.0);
  const std::vector<double> inside = pool(std::vector<double>(values.begin() + first, values.begin() + end));
  std::copy(inside.begin(), inside.end(), out.begin() + first);
  return out;
}

}  // namespace

ScorerOutput snapkv(const ScorerInput& in, const SnapKVQuestion& question) {
  ScorerOutput out;
  for (int h = 0; h < in.Hkv; ++h) {
    const ScorerHead& head = in.heads[static_cast<size_t>(h)];
    const int W = clamped_window(in, head, question.window);
    if (W < 1) {
      out.push_back(by_age(head.T));
      continue;
    }
    const Sequence s = alone(in, h);
    const int history = history_of(s, 0, W);
    std::vector<double> mean;
    if (question.rkv) {
      mean = history_attention(s, 0, {W, 0, history, true, 1});
    } else {
      mean = attention_sum(s, 0, W);
      for (double& x : mean) x /= W;
    }
    out.push_back(pooled_between(mean, 0, history, [&](const std::vector<double>& x) {
      return question.rkv ? max_pooled(x, question.pool) : average_pooled(x, question.pool);
    }));
  }
  return out;
}

ScorerOutput defensive(const ScorerInput& in, int window, int pool) {
  ScorerOutput out;
  for (int h = 0; h < in.Hkv; ++h) {
    const ScorerHead& head = in.heads[static_cast<size_t>(h)];
    const int W = clamped_window(in, head, window);
    if (W < 1) {
      out.push_back(by_age(head.T));
      continue;
    }
    const Sequence s = alone(in, h);
    const int history = history_of(s, 0, W);
    std::vector<double>& worst = out.emplace_back(static_cast<size_t>(head.T), 0.0);
    for (int q = 0; q < s.Hq; ++q)
      for (int i = s.queries_seen() - W; i < s.queries_seen(); ++i) {
        std::vector<double> share;
        for (int t = 0; t < s.T && s.positions[static_cast<size_t>(t)] <= s.query_positions[static_cast<size_t>(i)];
             ++t)
          share.push_back(dot(s, q, i, t));
        softmax(share, sink(s, q));
        share.resize(static_cast<size_t>(history));
        double before = 0, after = 0;
        for (const double x : share) before += x;
        share = average_pooled(share, pool);
        for (const double x : share) after += x;
        for (size_t t = 0; t < share.size() && after > 0; ++t) worst[t] = std::max(worst[t], share[t] * before / after);
      }
    double mean = 0;
    for (int t = 0; t < history; ++t) mean += worst[static_cast<size_t>(t)] / history;
    for (int t = 0; t < history; ++t) worst[static_cast<size_t>(t)] = std::max(worst[static_cast<size_t>(t)], mean);
  }
  return out;
}

ScorerOutput rpc(const ScorerInput& in, const RpcQuestion& question) {
  ScorerOutput out;
  for (int h = 0; h < in.Hkv; ++h) {
    const ScorerHead& head = in.heads[static_cast<size_t>(h)];
    const int W = clamped_window(in, head, question.window);
    if (W < 1) {
      out.push_back(by_age(head.T));
      continue;
    }
    const Sequence s = alone(in, h);
    const int history = history_of(s, 0, W), first = question.official ? std::min(head.sinks, history) : 0;
    std::vector<double> sum(static_cast<size_t>(head.T), 0.0);
    for (int i = 0; i < W;
         ++i) {  // i queries before the newest; the published selectors end one query earlier and begin with the newest
      const int back = question.official && i > 0 ? i - 1 : i;
      Sequence until = s;  // the window's only query is the one `back` before the newest
      until.query_positions.resize(s.query_positions.size() - static_cast<size_t>(back));
      until.queries.clear();
      for (int q = 0; q < s.Hq; ++q)
        until.queries.insert(
            until.queries.end(), s.queries.begin() + static_cast<long>(q) * s.queries_seen() * s.D,
            s.queries.begin() + (static_cast<long>(q) * s.queries_seen() + until.queries_seen()) * s.D);
      const std::vector<double> one = history_attention(until, 0, {1, first, history, false, 1});
      for (size_t t = 0; t < one.size(); ++t) sum[t] += one[t];
    }
    out.push_back(pooled_between(sum, first, history,
                                 [&](const std::vector<double>& x) { return average_pooled(x, question.pool); }));
  }
  if (!question.all_heads || clamped_window(in, in.heads[0], question.window) < 1) return out;
  std::vector<double> mean(out[0].size(), 0.0);
  for (const auto& g : out)
    for (size_t t = 0; t < g.size(); ++t) mean[t] += g[t] / static_cast<double>(out.size());
  return ScorerOutput(out.size(), mean);
}

ScorerOutput h2o(const ScorerInput& in, int window) {
  ScorerOutput out;
  for (int h = 0; h < in.Hkv; ++h) {
    const ScorerHead& head = in.heads[static_cast<size_t>(h)];
    const int known = std::min(static_cast<int>(head.tally.size()), head.T);
    const int since = known == head.T ? in.P + 1 : known == 0 ? 0 : head.positions[static_cast<size_t>(known)];
    int fresh = 0;
    for (const int p : in.query_positions) fresh += p >= since ? 1 : 0;
    std::vector<double> g = attention_sum(alone(in, h), 0, std::min(fresh, window));
    for (int t = 0; t < known; ++t) g[static_cast<size_t>(t)] += head.tally[static_cast<size_t>(t)];
    out.push_back(g);
  }
  return out;
}

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
    std::vector<double> sinks;
    for (int g = 0; g < group; ++g) {
      std::vector<double> x;
      for (int t = question.first; t < question.history; ++t) x.push_back(dot(s, kv_head * group + g, i, t));
      sinks.push_back(sink(s, kv_head * group + g));
      if (question.max_logit && !heads.empty()) {
        sinks[0] = std::max(sinks[0], sinks.back());
        for (size_t t = 0; t < x.size(); ++t) heads[0][t] = std::max(heads[0][t], x[t]);
      } else {
        heads.push_back(x);
      }
    }
    for (size_t g = 0; g < heads.size(); ++g) {
      std::vector<double>& x = heads[g];
      softmax(x, sinks[g]);
      for (size_t t = 0; t < x.size(); ++t)
        out[static_cast<size_t>(question.first) + t] += counts * x[t] / static_cast<double>(heads.size());
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
      for (int t = 0;
           t < s.T && s.positions[static_cast<size_t>(kv_head) * s.T + t] <= s.query_positions[static_cast<size_t>(i)];
           ++t)
        x.push_back(dot(s, kv_head * group + g, i, t));
      softmax(x, sink(s, kv_head * group + g));
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
