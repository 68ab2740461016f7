// SPDX-License-Identifier: Apache-2.0
#include "event_oracle.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

namespace oracle {
namespace {

using Rows = std::vector<std::vector<double>>;

bool is_tova(const Options& options) { return options.policy == "tova" || options.policy == "ams-tova"; }

bool is_official(const Options& options) { return options.variant == "official"; }

double logit(const Sequence& s, int query_head, int query, int slot) {
  const int kv_head = query_head / (s.Hq / s.Hkv);
  double sum = 0;
  for (int d = 0; d < s.D; ++d) {
    const double q = s.queries[(static_cast<size_t>(query_head) * s.queries_seen() + query) * s.D + d];
    const double k = s.keys[(static_cast<size_t>(kv_head) * s.T + slot) * s.D + d];
    sum += q * k;
  }
  return s.cap > 0 ? s.cap * std::tanh(s.scale * sum / s.cap) : s.scale * sum;
}

int position(const Sequence& s, int kv_head, int slot) {
  return s.positions[static_cast<size_t>(kv_head) * s.T + slot];
}

/// Softmax over every slot the query can see (position at or before its own); all zeros where it sees none.
std::vector<double> attention(const Sequence& s, int query_head, int query) {
  const int kv_head = query_head / (s.Hq / s.Hkv);
  std::vector<double> row(s.T, 0.0);
  int seen = 0;  // positions ascend, so a query sees the first slots
  while (seen < s.T && position(s, kv_head, seen) <= s.query_positions[query]) ++seen;
  for (int t = 0; t < seen; ++t) row[t] = logit(s, query_head, query, t);
  const double largest = seen > 0 ? *std::max_element(row.begin(), row.begin() + seen) : 0;
  double sum = 0;
  for (int t = 0; t < seen; ++t) sum += row[t] = std::exp(row[t] - largest);
  if (!s.sinks.empty()) sum += std::exp(s.sinks[query_head] - largest);
  for (int t = 0; t < seen; ++t) row[t] /= sum;
  return row;
}

/// Average pooling with zero padding; the divisor is always the kernel, so the edges are damped.
std::vector<double> pooled(const std::vector<double>& values, int kernel) {
  if (kernel <= 1) return values;
  const int n = static_cast<int>(values.size());
  std::vector<double> out(n, 0.0);
  for (int t = 0; t < n; ++t) {
    for (int j = t - kernel / 2; j <= t + kernel / 2; ++j) {
      if (j >= 0 && j < n) out[t] += values[j];
    }
    out[t] /= kernel;
  }
  return out;
}

/// Queries in the window. The published code takes one fewer than there are, but at least one.
int window_size(const Options& options, const Sequence& s) {
  const int seen = s.queries_seen();
  if (seen == 0) return 0;
  if (is_official(options)) return std::max(1, std::min({options.window, seen - 1, s.T - 1, options.budget}));
  return std::min({options.window, seen, s.T - 1, options.budget});
}

/// Slots before the suffix. Strict: the suffix is every slot at or after the oldest window query. Official: the last W
/// slots.
int history_size(const Options& options, const Sequence& s, int kv_head, int window) {
  if (is_official(options)) return s.T - window;
  const int oldest = s.query_positions[s.queries_seen() - window];
  int n = 0;
  while (n < s.T && position(s, kv_head, n) < oldest) ++n;
  return n;
}

/// Mean attention to the history (pooled, then averaged over the group), and for each suffix slot the mean over the
/// window queries that come strictly after it; -1 where there is none.
std::vector<double> head_usage(const Options& options, const Sequence& s, int kv_head, int window, int history) {
  const int group = s.Hq / s.Hkv;
  const int first_query = s.queries_seen() - window;
  std::vector<double> out(s.T, 0.0);
  std::vector<bool> seen_later(s.T, false);
  for (int g = 0; g < group; ++g) {
    std::vector<double> mean(history, 0.0);
    std::vector<double> later(s.T, 0.0);
    std::vector<int> later_queries(s.T, 0);
    for (int i = first_query; i < s.queries_seen(); ++i) {
      const std::vector<double> row = attention(s, kv_head * group + g, i);
      for (int t = 0; t < history; ++t) mean[t] += row[t] / window;
      for (int t = history; t < s.T; ++t) {
        if (s.query_positions[i] <= position(s, kv_head, t)) continue;
        later[t] += row[t];
        ++later_queries[t];
      }
    }
    const std::vector<double> smooth = pooled(mean, options.pool);
    for (int t = 0; t < history; ++t) out[t] += smooth[t] / group;
    for (int t = history; t < s.T; ++t) {
      seen_later[t] = later_queries[t] > 0;
      if (seen_later[t]) out[t] += later[t] / later_queries[t] / group;
    }
  }
  for (int t = history; t < s.T; ++t) {
    if (!seen_later[t]) out[t] = -1;
  }
  return out;
}

double largest_of_first(const std::vector<double>& values, int n) {
  double largest = 0;
  for (int t = 0; t < n; ++t) largest = std::max(largest, values[t]);
  return largest;
}

void fill_suffix(const Options& options, std::vector<double>& usage, int history, double largest) {
  for (size_t t = history; t < usage.size(); ++t) {
    if (options.suffix_fill == "exclude") {
      usage[t] = 0;
    } else if (options.suffix_fill != "causal_mean" || usage[t] < 0) {
      usage[t] = largest;
    }
  }
}

/// How much larger than their sum the terms of a dot product may be: rounding in a logit grows with it, and so does the
/// relative error of every probability.
double logit_size(const Sequence& s, int queries_used) {
  double largest = 1;
  const int seen = s.queries_seen();
  for (int h = 0; h < s.Hq; ++h) {
    for (int i = std::max(0, seen - queries_used); i < seen; ++i) {
      for (int t = 0; t < s.T; ++t) {
        double sum = 0;
        for (int d = 0; d < s.D; ++d) {
          sum += std::abs(static_cast<double>(s.queries[(static_cast<size_t>(h) * seen + i) * s.D + d]) *
                          s.keys[(static_cast<size_t>(h / (s.Hq / s.Hkv)) * s.T + t) * s.D + d]);
        }
        largest = std::max(largest, s.scale * sum);
      }
    }
  }
  return largest;
}

std::vector<int> every_slot(int n) {
  std::vector<int> slots(n);
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

Row row_that_keeps_all(const Sequence& s, int kv_head) {
  Row row;
  row.slots = every_slot(s.T);
  if (!s.credit.empty()) row.credit = row.credit_kept = s.credit[kv_head];
  return row;
}

/// The slots of a head at pinned positions.
std::vector<bool> pinned_slots(const Sequence& s, int kv_head) {
  std::vector<bool> pinned;
  for (int t = 0; t < s.T && !s.pinned.empty(); ++t)
    pinned.push_back(std::find(s.pinned.begin(), s.pinned.end(), position(s, kv_head, t)) != s.pinned.end());
  return pinned;
}

/// Sinks, what is pinned, and then the newest, whatever `recent` says.
Row streaming_row(const Options& options, const Sequence& s, int kv_head) {
  Row row;
  Options without = options;
  without.recent = 0;
  without.variant = "strict";
  const MustKeep must = must_keep(without, s.T, pinned_slots(s, kv_head));
  int left = options.budget - must.count();
  for (int t = s.T - 1; t >= 0; --t)
    if (must.holds(t, s.T) || left-- > 0) row.slots.push_back(t);
  std::reverse(row.slots.begin(), row.slots.end());
  return row;
}

/// The published TOVA pads the slot of its own query with the largest score; that this ties with one other slot is
/// undone by the tie rule.
std::vector<double> with_own_query_first(const Options& options, std::vector<double> scores) {
  if (is_official(options) && is_tova(options)) scores.back() = std::numeric_limits<double>::infinity();
  return scores;
}

Row plain_row(const Options& options, const std::vector<double>& scores, const std::vector<bool>& pinned) {
  const int T = static_cast<int>(scores.size());
  Row row;
  row.scores = scores;
  Margin margin;
  Options whole = options;
  whole.variant = "strict";  // within one segment both variants choose the same slots
  row.slots = select(whole, with_own_query_first(options, scores), {T}, {options.budget}, must_keep(options, T, pinned),
                     &margin);
  row.margin = margin.smallest;
  return row;
}

Row ams_row(const Options& options, const std::vector<double>& scores, const Masses& masses,
            const std::vector<bool>& pinned) {
  const int T = static_cast<int>(scores.size());
  const MustKeep must = must_keep(options, T, pinned);
  Margin margin;
  Row row;
  row.scores = scores;
  row.mass = masses.mass;
  row.mass_used = masses.used;
  row.credit = masses.credit;
  const std::vector<double> mass = competing(options, masses.used, must);
  row.segment_ends = segment_ends(options, mass, &margin);
  row.quotas = quotas(options, mass, row.segment_ends, segment_budget(options, must), must, &margin);
  row.slots = select(options, with_own_query_first(options, scores), row.segment_ends, row.quotas, must, &margin);
  if (!row.credit.empty()) {
    for (int slot : row.slots) row.credit_kept.push_back(row.credit[slot]);
  }
  row.margin = margin.smallest;
  return row;
}

}  // namespace

std::vector<double> competing(const Options& options, std::vector<double> used, const MustKeep& must) {
  if (options.protected_mass) return used;
  const int T = static_cast<int>(used.size());
  for (int t = 0; t < T; ++t)
    if (must.holds(t, T)) used[static_cast<size_t>(t)] = 0;
  const double left = std::accumulate(used.begin(), used.end(), 0.0);
  for (double& mass : used) mass = left > 0 ? mass / left : 0;
  return used;
}

void Margin::note(double gap) { smallest = std::min(smallest, gap); }

std::vector<double> normalised(const std::vector<double>& values) {
  std::vector<double> out(values.size());
  double sum = 0;
  for (size_t t = 0; t < values.size(); ++t) {
    out[t] = std::max(values[t], 0.0) + kUsageFloor;
    sum += out[t];
  }
  for (double& x : out) x /= sum;
  return out;
}

Rows tova_scores(const Options& options, const Sequence& s) {
  Rows scores(s.Hkv, std::vector<double>(s.T, 0.0));
  const int group = s.Hq / s.Hkv;
  for (int h = 0; h < s.Hkv; ++h) {
    if (s.queries_seen() == 0) {
      for (int t = 0; t < s.T; ++t) scores[h][t] = t;
      continue;
    }
    const int first = options.tova_heads_all ? 0 : h * group;
    const int last = options.tova_heads_all ? s.Hq : first + group;
    for (int head = first; head < last; ++head) {
      const std::vector<double> row = attention(s, head, s.queries_seen() - 1);
      for (int t = 0; t < s.T; ++t) scores[h][t] += row[t] / (last - first);
    }
  }
  return scores;
}

Rows usage(const Options& options, const Sequence& s) {
  const int window = window_size(options, s);
  Rows out(s.Hkv, std::vector<double>(s.T, 0.0));
  if (window == 0) return out;
  std::vector<int> history(s.Hkv);
  double largest_of_all = 0;
  for (int h = 0; h < s.Hkv; ++h) {
    history[h] = history_size(options, s, h, window);
    out[h] = head_usage(options, s, h, window, history[h]);
    largest_of_all = std::max(largest_of_all, largest_of_first(out[h], history[h]));
  }
  for (int h = 0; h < s.Hkv; ++h) {
    const double own = largest_of_first(out[h], history[h]);
    fill_suffix(options, out[h], history[h], options.suffix_fill == "max_global" ? largest_of_all : own);
  }
  return out;
}

Masses masses(const Options& options, const std::vector<double>& usage, const std::vector<double>& given_credit) {
  const size_t T = usage.size();
  Masses out;
  out.mass = normalised(usage);
  const bool raw = options.quotas == "raw_mass";
  std::vector<double> fed = out.mass;  // what the EMA is fed with: raw_mass skips the normalisation and nothing else
  if (raw) {
    for (size_t t = 0; t < T; ++t) fed[t] = std::max(usage[t], 0.0) + kUsageFloor;
  }
  if (!options.credit) {
    out.used = out.mass;
    return out;
  }
  out.credit.assign(T, 0.0);
  if (given_credit.size() <= T)
    std::copy(given_credit.begin(), given_credit.end(), out.credit.begin());  // longer: another sequence's
  for (size_t t = 0; t < T; ++t)
    out.credit[t] = options.credit_decay * out.credit[t] + (1 - options.credit_decay) * fed[t];
  const std::vector<double> share = raw ? out.credit : normalised(out.credit);
  std::vector<double> mix(T);
  for (size_t t = 0; t < T; ++t) mix[t] = options.credit_mix * fed[t] + (1 - options.credit_mix) * share[t];
  out.used = normalised(mix);
  return out;
}

std::vector<Row> event_with_scores(const Options& options, const Sequence& s, const Rows& scores) {
  std::vector<Row> rows;
  const bool keeps_all = s.T <= options.budget;
  const bool ams = options.policy.rfind("ams-", 0) == 0;
  const Rows used = ams && !keeps_all ? usage(options, s) : Rows(s.Hkv);
  const double size = keeps_all ? 1 : logit_size(s, ams ? std::max(1, window_size(options, s)) : 1);
  for (int h = 0; h < s.Hkv; ++h) {
    if (keeps_all) {
      rows.push_back(row_that_keeps_all(s, h));
    } else if (options.policy == "streaming") {
      rows.push_back(streaming_row(options, s, h));
    } else if (ams) {
      rows.push_back(ams_row(options, scores[h],
                             masses(options, used[h], s.credit.empty() ? std::vector<double>() : s.credit[h]),
                             pinned_slots(s, h)));
    } else {
      rows.push_back(plain_row(options, scores[h], pinned_slots(s, h)));
    }
    rows.back().margin /= size;
  }
  return rows;
}

std::vector<Row> event(const Options& options, const Sequence& s) {
  if (s.T <= options.budget || options.policy == "streaming") return event_with_scores(options, s, {});
  if (!is_tova(options)) throw std::invalid_argument("oracle: no scores for policy " + options.policy);
  return event_with_scores(options, s, tova_scores(options, s));
}

bool near_tie(const std::vector<Row>& rows, double tolerance) {
  return std::any_of(rows.begin(), rows.end(), [&](const Row& row) { return row.margin < tolerance; });
}

}  // namespace oracle
