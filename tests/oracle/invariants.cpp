// SPDX-License-Identifier: Apache-2.0
#include "invariants.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

namespace oracle {
namespace {

constexpr double kTolerance = 1e-5;

template <class... Parts>
void say(Violations& out, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  out.push_back(text.str());
}

void append(Violations& out, const Violations& more) { out.insert(out.end(), more.begin(), more.end()); }

bool is_strict(const Options& options) { return options.variant != "official"; }

bool contains(const std::vector<int>& slots, int slot) {
  return std::find(slots.begin(), slots.end(), slot) != slots.end();
}

double sum_of(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

}  // namespace

Violations check_slots(const Options& options, int T, const std::vector<int>& slots) {
  Violations out;
  const int wanted = std::min(T, options.budget);
  if (static_cast<int>(slots.size()) != wanted) say(out, "keeps ", slots.size(), " slots instead of ", wanted);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0 || slots[i] >= T) say(out, "slot ", slots[i], " is outside [0, ", T, ")");
    if (i > 0 && slots[i] <= slots[i - 1]) say(out, "slot ", slots[i], " follows slot ", slots[i - 1]);
  }
  if (T <= options.budget) return out;
  Options rule = options;
  if (options.policy == "streaming") rule.variant = "strict";  // sinks never shrink there
  const MustKeep must = must_keep(rule, T);
  for (int t = 0; t < T; ++t) {
    if (must.holds(t, T) && !contains(slots, t)) say(out, "must-keep slot ", t, " of ", T, " is dropped");
  }
  const bool keeps_newest = newest(options) >= 1 && options.budget > options.sink;
  if (keeps_newest && !contains(slots, T - 1)) say(out, "the newest slot ", T - 1, " is dropped");
  return out;
}

Violations check_segments(const Options& options, int T, const std::vector<int>& ends) {
  Violations out;
  if (ends.empty() || ends.back() != T) say(out, "the segments do not end at ", T);
  const bool bounded = is_strict(options) && options.segments == "mass";
  const int shortest = std::min(options.min_segment, (options.max_segment + 1) / 2);
  int start = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    const int length = ends[i] - start;
    if (length <= 0) say(out, "segment ", i, " ends at ", ends[i], " and starts at ", start);
    if (bounded && length > options.max_segment)
      say(out, "segment ", i, " has ", length, " slots, more than ", options.max_segment);
    if (bounded && length < shortest && ends.size() > 1)
      say(out, "segment ", i, " has ", length, " slots, fewer than ", shortest);
    start = ends[i];
  }
  return out;
}

Violations check_quotas(const Options& options, const std::vector<int>& ends, const std::vector<int>& quotas,
                        const std::vector<int>& slots) {
  Violations out;
  if (quotas.size() != ends.size()) {
    say(out, quotas.size(), " quotas for ", ends.size(), " segments");
    return out;
  }
  const int T = ends.back();
  const MustKeep must = must_keep(options, T);
  int budget = options.coverage_auto ? 0 : segment_budget(options, must);
  const bool more_than_quotas = options.coverage_auto || options.coverage < 1;

  std::vector<int> floors;
  int start = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    int held = 0;
    for (int t = start; t < ends[i]; ++t) held += must.holds(t, T);
    const int length = ends[i] - start;
    const int kept =
        static_cast<int>(std::count_if(slots.begin(), slots.end(), [&](int t) { return t >= start && t < ends[i]; }));
    if (quotas[i] < 0 || quotas[i] > length)
      say(out, "quota ", quotas[i], " of segment ", i, " is outside [0, ", length, "]");
    if (is_strict(options) && quotas[i] < held)
      say(out, "quota ", quotas[i], " of segment ", i, " is below its ", held, " must-keep slots");
    if (is_strict(options) && (more_than_quotas ? kept < quotas[i] : kept != quotas[i])) {
      say(out, "segment ", i, " keeps ", kept, " for a quota of ", quotas[i]);
    }
    floors.push_back(std::max(held, std::min(options.min_quota, length)));
    start = ends[i];
  }
  const int sum = std::accumulate(quotas.begin(), quotas.end(), 0);
  if (options.coverage_auto) budget = std::min(options.budget, std::accumulate(floors.begin(), floors.end(), 0));
  if (sum != budget) say(out, "quotas add up to ", sum, " instead of ", budget);
  if (!is_strict(options) || std::accumulate(floors.begin(), floors.end(), 0) > budget) return out;
  for (size_t i = 0; i < floors.size(); ++i) {
    if (quotas[i] < floors[i]) say(out, "quota ", quotas[i], " of segment ", i, " is below its floor of ", floors[i]);
  }
  return out;
}

Violations check_ranking(const Options& options, const std::vector<double>& scores, const std::vector<int>& ends,
                         const std::vector<int>& slots) {
  Violations out;
  const int T = static_cast<int>(scores.size());
  MustKeep must = must_keep(options, T);
  if (must.recents == 0 && options.policy.find("tova") != std::string::npos)
    must.recents = 1;  // TOVA's own query ranks first in any case
  int start = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    int lowest_kept = -1;
    int highest_dropped = -1;
    for (int t = start; t < ends[i]; ++t) {
      if (must.holds(t, T)) continue;
      int& edge = contains(slots, t) ? lowest_kept : highest_dropped;
      const bool kept = &edge == &lowest_kept;
      if (edge < 0 || ranks_before(scores, edge, t) == kept) edge = t;
    }
    if (lowest_kept >= 0 && highest_dropped >= 0 && !ranks_before(scores, lowest_kept, highest_dropped)) {
      say(out, "segment ", i, " keeps slot ", lowest_kept, " (", scores[lowest_kept], ") and drops slot ",
          highest_dropped, " (", scores[highest_dropped], ")");
    }
    start = ends[i];
  }
  return out;
}

Violations check_mass(const std::string& name, const std::vector<double>& mass) {
  Violations out;
  for (size_t t = 0; t < mass.size(); ++t) {
    if (!(mass[t] >= 0)) say(out, name, " of slot ", t, " is ", mass[t]);
  }
  if (!(std::abs(sum_of(mass) - 1) <= kTolerance)) say(out, name, " sums to ", sum_of(mass));
  return out;
}

Violations check_credit(const Options& options, const std::vector<double>& given, const Row& row) {
  Violations out;
  const bool raw = options.quotas == "raw_mass";  // its credit follows usage, which has no bound
  for (size_t t = 0; t < row.credit.size(); ++t) {
    if (!(row.credit[t] >= 0)) say(out, "credit of slot ", t, " is ", row.credit[t]);
  }
  if (!raw && !(sum_of(row.credit) <= 1 + kTolerance)) say(out, "credit sums to ", sum_of(row.credit));
  for (size_t t = 0; !raw && t < row.credit.size() && t < row.mass.size(); ++t) {
    const double before = t < given.size() && given.size() <= row.mass.size() ? given[t] : 0.0;
    const double want = options.credit_decay * before + (1 - options.credit_decay) * row.mass[t];
    if (!(std::abs(row.credit[t] - want) <= 1e-6 * (1e-3 + want)))
      say(out, "credit of slot ", t, " is ", row.credit[t], ", not ", want);
  }
  if (row.credit_kept.size() != row.slots.size()) {
    say(out, row.credit_kept.size(), " credits were kept for ", row.slots.size(), " slots");
    return out;
  }
  for (size_t j = 0; j < row.slots.size(); ++j) {
    if (row.credit_kept[j] != row.credit[row.slots[j]])
      say(out, "credit ", j, " was not moved with slot ", row.slots[j]);
  }
  return out;
}

Violations check_positions(const Options& options, const std::vector<int>& positions, const std::vector<int>& slots) {
  Violations out;
  for (size_t j = 1; j < slots.size(); ++j) {
    if (positions[slots[j]] <= positions[slots[j - 1]])
      say(out, "position ", positions[slots[j]], " follows ", positions[slots[j - 1]]);
  }
  if (!is_strict(options) && options.policy != "streaming")
    return out;  // the published must-keep may give up sinks for recents
  for (int p = 0; p < options.sink && p < static_cast<int>(positions.size()); ++p) {
    if (positions[p] == p && !contains(slots, p)) say(out, "sink position ", p, " is gone");
  }
  return out;
}

Violations violations(const Options& options, const Sequence& sequence, int head, const Row& row) {
  const int T = sequence.T;
  Violations out = check_slots(options, T, row.slots);
  if (!out.empty()) return out;  // the rest would index with bad slots
  const auto first = sequence.positions.begin() + static_cast<size_t>(head) * T;
  append(out, check_positions(options, {first, first + T}, row.slots));
  if (T <= options.budget) return out;
  const std::vector<int> whole = {T};
  if (!row.segment_ends.empty()) append(out, check_segments(options, T, row.segment_ends));
  if (!out.empty()) return out;
  if (!row.quotas.empty()) append(out, check_quotas(options, row.segment_ends, row.quotas, row.slots));
  if (!row.scores.empty())
    append(out, check_ranking(options, row.scores, row.segment_ends.empty() ? whole : row.segment_ends, row.slots));
  if (!row.mass.empty()) append(out, check_mass("mass", row.mass));
  if (!row.mass_used.empty()) append(out, check_mass("mass_used", row.mass_used));
  if (!row.credit.empty())
    append(out, check_credit(options, sequence.credit.empty() ? std::vector<double>() : sequence.credit[head], row));
  return out;
}

}  // namespace oracle
