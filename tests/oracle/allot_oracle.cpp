// SPDX-License-Identifier: Apache-2.0
// Segments, quotas and the selection inside them.

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <set>
#include <stdexcept>

#include "event_oracle.h"

namespace oracle {
namespace {

bool allots_officially(const Options& options) { return options.variant == "official"; }

// Segments

/// Thresholds segment_mass, 2 * segment_mass, ... strictly below 1, counted as in real arithmetic.
int threshold_count(double segment_mass) {
  return static_cast<int>(std::ceil((1 - segment_mass) / segment_mass - 1e-9));
}

std::vector<double> prefix_sums(const std::vector<double>& mass) {
  std::vector<double> sums(mass.size());
  double sum = 0;
  for (size_t t = 0; t < mass.size(); ++t) sums[t] = sum += mass[t];
  return sums;
}

/// The first slot whose prefix sum reaches the threshold.
int crossing(const std::vector<double>& sums, double threshold) {
  int t = 0;
  while (t + 1 < static_cast<int>(sums.size()) && sums[t] < threshold) ++t;
  return t;
}

std::vector<int> lengths_to_ends(const std::vector<int>& lengths) {
  std::vector<int> ends;
  int end = 0;
  for (int length : lengths) ends.push_back(end += length);
  return ends;
}

std::vector<int> ends_to_lengths(const std::vector<int>& ends) {
  std::vector<int> lengths;
  int start = 0;
  for (int end : ends) {
    lengths.push_back(end - start);
    start = end;
  }
  return lengths;
}

/// Published: the crossing slot begins the next segment; split into pieces of max_segment, then merge forward.
std::vector<int> official_ends(const Options& options, const std::vector<int>& crossings, int T) {
  std::set<int> cuts;
  for (int t : crossings) cuts.insert(std::clamp(t, 1, T - 1));
  cuts.insert(T);

  std::vector<int> pieces;
  int start = 0;
  for (int cut : cuts) {
    int length = cut - start;
    while (length > options.max_segment) {
      pieces.push_back(options.max_segment);
      length -= options.max_segment;
    }
    pieces.push_back(length);
    start = cut;
  }

  std::vector<int> merged;
  for (size_t i = 0; i < pieces.size();) {
    int length = pieces[i++];
    while (length < options.min_segment && i < pieces.size()) length += pieces[i++];
    merged.push_back(length);
  }
  return lengths_to_ends(merged);
}

/// Ours: the crossing slot ends its segment; merge first, then split into near-equal pieces.
std::vector<int> strict_ends(const Options& options, const std::vector<int>& crossings, int T) {
  std::set<int> cuts;
  for (int t : crossings) {
    if (t + 1 < T) cuts.insert(t + 1);
  }
  cuts.insert(T);

  std::vector<int> merged;
  int building = 0;
  int start = 0;
  for (int cut : cuts) {
    building += cut - start;
    start = cut;
    if (building < options.min_segment) continue;
    merged.push_back(building);
    building = 0;
  }
  if (building > 0 && merged.empty()) merged.push_back(0);
  merged.back() += building;

  std::vector<int> ends;
  start = 0;
  for (int length : merged) {
    const int pieces = (length + options.max_segment - 1) / options.max_segment;
    for (int j = 1; j <= pieces; ++j)
      ends.push_back(start + static_cast<int>(static_cast<long long>(length) * j / pieces));
    start += length;
  }
  return ends;
}

std::vector<int> ends_from(const Options& options, const std::vector<int>& crossings, int T) {
  return allots_officially(options) ? official_ends(options, crossings, T) : strict_ends(options, crossings, T);
}

/// A threshold close to a prefix sum matters only where moving its cut past that sum changes the segments.
void note_threshold(const Options& options, const std::vector<double>& sums, const std::vector<int>& crossings,
                    const std::vector<int>& ends, size_t k, Margin& margin) {
  const double kStep = 1e-7;  // prefix sums closer than this to each other move together
  const double threshold = (k + 1) * options.segment_mass;
  const int at = crossings[k];
  const auto matters = [&](int other) {
    std::vector<int> moved = crossings;
    moved[k] = other;
    return ends_from(options, moved, static_cast<int>(sums.size())) != ends;
  };
  if (matters(crossing(sums, sums[at] + kStep))) margin.note(std::abs(sums[at] - threshold));
  if (at > 0 && matters(crossing(sums, sums[at - 1] - kStep))) margin.note(std::abs(threshold - sums[at - 1]));
}

std::vector<int> mass_ends(const Options& options, const std::vector<double>& mass, Margin* margin) {
  const int T = static_cast<int>(mass.size());
  const std::vector<double> sums = prefix_sums(allots_officially(options) ? normalised(mass) : mass);
  std::vector<int> crossings;
  for (int k = 1; k <= threshold_count(options.segment_mass); ++k)
    crossings.push_back(crossing(sums, k * options.segment_mass));
  const std::vector<int> ends = ends_from(options, crossings, T);
  for (size_t k = 0; margin && k < crossings.size(); ++k) note_threshold(options, sums, crossings, ends, k, *margin);
  return ends;
}

// Quotas

/// What quotas are proportional to: mass of the segment, 1, or its length.
struct Weights {
  std::vector<double> value;
  std::vector<int> twins;  ///< segments with the same number here weigh the same in any arithmetic; -1: like no other
  bool exact = false;      ///< whole numbers
  double grid = 0;         ///< what each may be off by, since the library weighs in whole numbers
};

/// The library's masses are whole numbers: 2^-52 of the row's largest, more in a row that would sum to 2^63.
double grid_of(const std::vector<double>& mass) {
  const int bits = std::min(52, 62 - static_cast<int>(std::bit_width(mass.size())));
  return std::ldexp(static_cast<double>(mass.size()) * *std::max_element(mass.begin(), mass.end()), -bits);
}

/// Where the row's last value begins: from there on every slot has it, bit for bit, for the suffix is filled with one
/// number.
int constant_tail(const std::vector<double>& mass) {
  int start = static_cast<int>(mass.size()) - 1;
  while (start > 0 && mass[start - 1] == mass.back()) --start;
  return start;
}

Weights weights(const Options& options, const std::vector<double>& mass, const std::vector<int>& ends) {
  Weights out;
  out.exact = options.quotas == "equal" || options.quotas == "length";
  if (!out.exact) out.grid = grid_of(mass);
  const int tail = constant_tail(mass);
  int start = 0;
  for (int end : ends) {
    double sum = 0;
    if (options.quotas == "equal") {
      sum = 1;
    } else if (options.quotas == "length") {
      sum = end - start;
    } else {
      for (int t = start; t < end; ++t) sum += mass[t];
    }
    out.value.push_back(sum);
    out.twins.push_back(start >= tail ? end - start : -1);
    start = end;
  }
  return out;
}

int sum_of(const std::vector<int>& values) { return std::accumulate(values.begin(), values.end(), 0); }

double round_half_even(double x) {
  const double below = std::floor(x);
  const double rest = x - below;
  if (rest != 0.5) return rest < 0.5 ? below : below + 1;
  return std::fmod(below, 2) == 0 ? below : below + 1;
}

/// Published step 5. The caller makes sure that it ends: floors that do not fit need a budget of at least one slot per
/// segment.
std::vector<int> official_quotas(const Options& options, const std::vector<double>& weight,
                                 const std::vector<int>& length, int budget, Margin* margin) {
  const size_t n = length.size();
  std::vector<int> floors(n);
  for (size_t i = 0; i < n; ++i) floors[i] = std::min(options.min_quota, length[i]);
  std::vector<int> q = floors;

  if (sum_of(q) >= budget) {
    while (sum_of(q) > budget) {
      for (size_t i = 0; i < n && sum_of(q) > budget; ++i) q[i] -= q[i] > 1;
    }
    return q;
  }

  const int rest = budget - sum_of(q);
  const double total = std::accumulate(weight.begin(), weight.end(), 0.0) + kUsageFloor;
  for (size_t i = 0; i < n; ++i) {
    const double share = rest * weight[i] / total;
    if (margin) margin->note(std::abs(share - std::floor(share) - 0.5) / rest);
    q[i] = std::min(length[i], q[i] + static_cast<int>(round_half_even(share)));
  }
  while (sum_of(q) > budget) {
    for (size_t i = 0; i < n && sum_of(q) > budget; ++i) q[i] -= q[i] > floors[i];
  }
  while (sum_of(q) < budget) {
    for (size_t i = 0; i < n && sum_of(q) < budget; ++i) q[i] += q[i] < length[i];
  }
  return q;
}

/// Indices by descending value after rounding to float, ties: the lower index.
std::vector<int> descending(const std::vector<double>& values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return static_cast<float>(values[a]) > static_cast<float>(values[b]); });
  return order;
}

/// Notes how close the segments that were served came to those that were not. Equal by construction is not close: whole
/// numbers, and equal pieces of the suffix. `unit` 0 takes gaps relative to the values. Values that the grid of the
/// weights moves by `grid` are no further apart than it.
void note_order(const Weights& weights, const std::vector<double>& values, const std::vector<int>& served,
                const std::vector<int>& left_out, double unit, double grid, Margin* margin) {
  if (!margin) return;
  for (int i : served) {
    for (int j : left_out) {
      const double gap = std::abs(values[i] - values[j]) / (unit > 0 ? unit : std::max({values[i], values[j], 1e-30}));
      const bool tied = static_cast<float>(values[i]) == static_cast<float>(values[j]);
      const bool twins = weights.twins[i] >= 0 && weights.twins[i] == weights.twins[j];
      if (tied && (twins || (weights.exact && gap < 1e-11))) continue;
      margin->note(std::abs(values[i] - values[j]) <= 2 * grid ? 0 : gap);
    }
  }
}

/// 2.4 step 5.ii: one slot at a time to every segment below its floor, heaviest first.
void give_floors(const Weights& weights, const std::vector<int>& floors, std::vector<int>& q, int& left,
                 Margin* margin) {
  const std::vector<int> order = descending(weights.value);
  bool given = true;
  while (left > 0 && given) {
    std::vector<int> served;
    std::vector<int> left_out;
    for (int i : order) {
      if (q[i] >= floors[i]) continue;
      if (left == 0) {
        left_out.push_back(i);
        continue;
      }
      ++q[i];
      --left;
      served.push_back(i);
    }
    given = !served.empty();
    note_order(weights, weights.value, served, left_out, 0, weights.grid, margin);
  }
}

/// 2.4 step 5.iii: what is left, proportional to weight, capped by length, largest remainder last.
void fill_by_weight(const Weights& weights, const std::vector<int>& length, std::vector<int>& q, int left,
                    Margin* margin) {
  while (left > 0) {
    std::vector<int> active;
    double total = 0;
    for (size_t i = 0; i < q.size(); ++i) {
      if (q[i] >= length[i]) continue;
      active.push_back(static_cast<int>(i));
      total += weights.value[i];
    }
    std::vector<double> share;
    for (int i : active)
      share.push_back(total > 0 ? left * weights.value[i] / total : static_cast<double>(left) / active.size());

    const int left_before = left;
    for (size_t j = 0; j < active.size(); ++j) {
      const int i = active[j];
      if (q[i] + share[j] < length[i]) continue;
      left -= length[i] - q[i];
      q[i] = length[i];
    }
    if (left < left_before) continue;

    std::vector<double> fraction(q.size(), -1.0);  // -1: full
    for (size_t j = 0; j < active.size(); ++j) {
      const int whole = static_cast<int>(std::floor(share[j]));
      q[active[j]] += whole;
      left -= whole;
      fraction[active[j]] = share[j] - whole;
    }
    std::vector<int> order = descending(fraction);
    order.resize(active.size());
    for (int j = 0; j < left; ++j) ++q[order[j]];
    // Across a whole number nothing hangs on rounding: a share of almost 3 comes to 3 either way.
    note_order(weights, fraction, {order.begin(), order.begin() + left}, {order.begin() + left, order.end()},
               left_before, total > 0 ? left_before * weights.grid / total : 0, margin);
    left = 0;
  }
}

std::vector<int> strict_quotas(const Options& options, const Weights& weights, const std::vector<int>& ends, int budget,
                               const MustKeep& must, Margin* margin) {
  const std::vector<int> length = ends_to_lengths(ends);
  const int T = ends.back();
  std::vector<int> q;
  std::vector<int> floors;
  int start = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    int held = 0;
    for (int t = start; t < ends[i]; ++t) held += must.holds(t, T);
    q.push_back(held);
    floors.push_back(std::max(held, std::min(options.min_quota, length[i])));
    start = ends[i];
  }
  int left = budget - sum_of(q);
  give_floors(weights, floors, q, left, margin);
  fill_by_weight(weights, length, q, left, margin);
  return q;
}

// Selection

/// The first `count` of the slots in rank order; notes how close the next one came.
std::vector<int> best(const std::vector<double>& scores, std::vector<int> slots, int count, Margin* margin) {
  std::sort(slots.begin(), slots.end(), [&](int a, int b) { return ranks_before(scores, a, b); });
  if (margin && count > 0 && count < static_cast<int>(slots.size())) {
    // Below 1e-30 a probability may have lost its digits, or itself, in float.
    const auto note = [&](double in, double out) {
      if (in != out && std::isfinite(in) && std::isfinite(out))
        margin->note((in - out) / std::max({std::abs(in), std::abs(out), 1e-30}));
    };
    // Not only the two at the border: where these are equal, one that is almost equal may come between them.
    for (int j = 0; j < count; ++j) note(scores[slots[j]], scores[slots[count]]);
    for (size_t j = count; j < slots.size(); ++j) note(scores[slots[count - 1]], scores[slots[j]]);
  }
  slots.resize(std::min<size_t>(slots.size(), count));
  return slots;
}

std::vector<int> strict_select(const std::vector<double>& scores, const std::vector<int>& ends,
                               const std::vector<int>& quotas, const MustKeep& must, Margin* margin) {
  const int T = static_cast<int>(scores.size());
  std::vector<int> chosen;
  int start = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    std::vector<int> free;
    int held = 0;
    for (int t = start; t < ends[i]; ++t) {
      if (must.holds(t, T)) {
        chosen.push_back(t);
        ++held;
      } else {
        free.push_back(t);
      }
    }
    for (int t : best(scores, free, quotas[i] - held, margin)) chosen.push_back(t);
    start = ends[i];
  }
  return chosen;
}

/// Published steps 6 and 7: the best of every segment compete again, all together, for what the must-keep set leaves.
std::vector<int> official_select(const Options& options, const std::vector<double>& scores,
                                 const std::vector<int>& ends, const std::vector<int>& quotas, const MustKeep& must,
                                 Margin* margin) {
  const int T = static_cast<int>(scores.size());
  std::vector<int> chosen;
  for (int t = 0; t < T; ++t) {
    if (must.holds(t, T)) chosen.push_back(t);
  }
  std::vector<int> candidates;
  int start = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    std::vector<int> slots(ends[i] - start);
    std::iota(slots.begin(), slots.end(), start);
    for (int t : best(scores, slots, quotas[i], margin)) {
      if (!must.holds(t, T)) candidates.push_back(t);
    }
    start = ends[i];
  }
  const int need = options.budget - static_cast<int>(chosen.size());
  if (static_cast<int>(candidates.size()) < need) throw std::logic_error("oracle: too few candidates");
  for (int t : best(scores, candidates, need, margin)) chosen.push_back(t);
  return chosen;
}

std::vector<int> floor_quotas(const Options& options, const Weights& weights, const std::vector<int>& ends,
                              const MustKeep& must, Margin* margin) {
  std::vector<int> q;
  std::vector<int> floors;
  int start = 0;
  for (int end : ends) {
    int held = 0;
    for (int t = start; t < end; ++t) held += must.holds(t, ends.back());
    q.push_back(held);
    floors.push_back(std::max(held, std::min(options.min_quota, end - start)));
    start = end;
  }
  int left = options.budget - sum_of(q);
  give_floors(weights, floors, q, left, margin);
  return q;
}

/// Coverage "auto": the best of the row; then segments below their quota take their best others, each in exchange for
/// the worst slot of the segments above theirs.
std::vector<int> exchanged(const Options& options, const std::vector<double>& scores, const std::vector<int>& ends,
                           const std::vector<int>& quotas, const MustKeep& must, Margin* margin) {
  const int T = static_cast<int>(scores.size());
  const auto segment_of = [&](int t) {
    return static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), t) - ends.begin());
  };
  std::vector<int> chosen = strict_select(scores, {T}, {options.budget}, must, margin);
  for (;;) {
    std::vector<int> count(ends.size());
    for (int t : chosen) ++count[segment_of(t)];
    size_t wanting = 0;
    while (wanting < ends.size() && count[wanting] >= quotas[wanting]) ++wanting;
    if (wanting == ends.size()) return chosen;
    std::vector<int> takes;
    std::vector<int> gives;
    for (int t = 0; t < T; ++t) {
      const bool in = std::find(chosen.begin(), chosen.end(), t) != chosen.end();
      if (!in && segment_of(t) == wanting) takes.push_back(t);
      if (in && !must.holds(t, T) && count[segment_of(t)] > quotas[segment_of(t)]) gives.push_back(t);
    }
    const std::vector<int> stay = best(scores, gives, static_cast<int>(gives.size()) - 1, margin);
    for (int t : gives) {
      if (std::find(stay.begin(), stay.end(), t) == stay.end())
        chosen.erase(std::find(chosen.begin(), chosen.end(), t));
    }
    chosen.push_back(best(scores, takes, 1, margin).front());
  }
}

/// With coverage below 1: the best slots of the row that no segment chose.
void add_best_of_the_rest(const std::vector<double>& scores, int count, std::vector<int>& chosen, Margin* margin) {
  std::vector<int> rest;
  for (int t = 0; t < static_cast<int>(scores.size()); ++t) {
    if (std::find(chosen.begin(), chosen.end(), t) == chosen.end()) rest.push_back(t);
  }
  for (int t : best(scores, rest, count, margin)) chosen.push_back(t);
}

}  // namespace

bool ranks_before(const std::vector<double>& scores, int a, int b) {
  const double lowest = -std::numeric_limits<double>::infinity();
  const double x = std::isnan(scores[a]) ? lowest : scores[a];
  const double y = std::isnan(scores[b]) ? lowest : scores[b];
  return x != y ? x > y : a > b;
}

MustKeep must_keep(const Options& options, int T, const std::vector<bool>& pinned) {
  const bool tova = options.policy == "tova" || options.policy == "ams-tova";
  MustKeep must;
  if (allots_officially(options)) {  // sinks shrink first
    must.recents = std::min({newest(options), options.budget, T});
    must.sinks = std::min({options.sink, options.budget - must.recents, T - must.recents});
    return must;
  }
  // TOVA's own query scores itself: its slot is protected even where no recent slot is asked for.
  const int recent = tova ? std::max(newest(options), 1) : newest(options);
  must.sinks = std::min({options.sink, options.budget, T});
  must.recents = std::min({recent, options.budget - must.sinks, T - must.sinks});
  must.pinned = pinned;
  while (must.count() > options.budget) --must.recents;
  return must;
}

std::vector<int> segment_ends(const Options& options, const std::vector<double>& mass_used, Margin* margin) {
  const int T = static_cast<int>(mass_used.size());
  if (options.segments == "none") return {T};
  if (options.segments.rfind("fixed:", 0) == 0) {
    const int length = std::stoi(options.segments.substr(6));
    std::vector<int> ends;
    for (int end = length; end < T; end += length) ends.push_back(end);
    ends.push_back(T);
    return ends;
  }
  return mass_ends(options, mass_used, margin);
}

int segment_budget(const Options& options, const MustKeep& must) {
  const int held = must.count();
  return held + static_cast<int>(std::floor(options.coverage * (options.budget - held) + 0.5));
}

std::vector<int> quotas(const Options& options, const std::vector<double>& mass_used, const std::vector<int>& ends,
                        int budget, const MustKeep& must, Margin* margin) {
  const Weights weight = weights(options, mass_used, ends);
  if (options.coverage_auto) return floor_quotas(options, weight, ends, must, margin);
  // The published loop never ends when the floors, at least one per segment, outnumber the budget. Without floors it
  // does end.
  const bool would_hang = static_cast<int>(ends.size()) > budget && options.min_quota > 0;
  if (allots_officially(options) && !would_hang)
    return official_quotas(options, weight.value, ends_to_lengths(ends), budget, margin);
  return strict_quotas(options, weight, ends, budget, must, margin);
}

std::vector<int> select(const Options& options, const std::vector<double>& scores, const std::vector<int>& ends,
                        const std::vector<int>& quotas, const MustKeep& must, Margin* margin) {
  if (options.coverage_auto && !allots_officially(options) && ends.size() > 1) {
    std::vector<int> kept = exchanged(options, scores, ends, quotas, must, margin);
    std::sort(kept.begin(), kept.end());
    return kept;
  }
  std::vector<int> chosen = allots_officially(options) ? official_select(options, scores, ends, quotas, must, margin)
                                                       : strict_select(scores, ends, quotas, must, margin);
  add_best_of_the_rest(scores, options.budget - static_cast<int>(chosen.size()), chosen, margin);
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

}  // namespace oracle
