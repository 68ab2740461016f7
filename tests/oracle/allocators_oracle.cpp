// SPDX-License-Identifier: Apache-2.0
#include "allocators_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace oracle {
namespace {

const double kLowest = -std::numeric_limits<double>::infinity();

double ranked(double score) { return std::isnan(score) ? kLowest : score; }

/// Whole parts, then one each to the largest fractions, lower index first. Fractions that differ by rounding only are
/// equal.
std::vector<int> apportioned(const std::vector<long double>& shares, int total) {
  std::vector<int> out;
  std::vector<long double> fraction;
  for (const long double share : shares) {
    const auto whole = static_cast<int>(std::floor(share + 1e-12L));
    out.push_back(whole);
    fraction.push_back(share - whole);
  }
  std::vector<bool> served(shares.size(), false);
  for (int left = total - std::accumulate(out.begin(), out.end(), 0); left > 0; --left) {
    int best = -1;
    for (int i = 0; i < static_cast<int>(shares.size()); ++i) {
      if (!served[i] && (best < 0 || fraction[i] > fraction[best] + 1e-12L)) best = i;
    }
    served[best] = true;
    ++out[best];
  }
  return out;
}

/// floor of a decimal share of a budget: 0.3 of 10 is 3.
int part_of(double share, int budget) { return static_cast<int>(std::floor(share * budget + 1e-9)); }

Slots slots_of(const std::vector<bool>& kept) {
  Slots slots;
  for (int t = 0; t < static_cast<int>(kept.size()); ++t) {
    if (kept[t]) slots.push_back(t);
  }
  return slots;
}

std::vector<bool> guarded_slots(const AllotHead& head) {
  std::vector<bool> kept(head.T);
  for (int t = 0; t < head.T; ++t) kept[t] = head.guarded(t);
  return kept;
}

/// Slots that are not kept, best first: by value, then the newer.
Slots best_first(const std::vector<double>& values, const std::vector<bool>& kept) {
  Slots order;
  for (int t = static_cast<int>(kept.size()) - 1; t >= 0; --t) {
    if (!kept[t]) order.push_back(t);
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return ranked(values[a]) > ranked(values[b]); });
  return order;
}

}  // namespace

std::vector<int> pyramid(int layers, int budget, double beta, int least) {
  if (layers == 1) return {budget};
  const long double smallest = budget / static_cast<long double>(beta), largest = 2.0L * budget - smallest;
  std::vector<long double> profile;
  for (int l = 0; l < layers; ++l) profile.push_back(largest - l * (largest - smallest) / (layers - 1));
  std::vector<int> slots = apportioned(profile, layers * budget);
  for (;;) {
    int added = 0;
    long double excess = 0;
    for (int& s : slots) {
      added += std::max(0, least - s);
      s = std::max(s, least);
      excess += s - least;
    }
    if (added == 0) return slots;
    std::vector<long double> take;
    for (const int s : slots) take.push_back(added * (s - least) / excess);
    const std::vector<int> taken = apportioned(take, added);
    for (int l = 0; l < layers; ++l) slots[l] -= taken[l];
  }
}

std::vector<Slots> adaptive(const std::vector<AllotHead>& heads, int budget, double safeguard) {
  const int total = static_cast<int>(heads.size()) * budget;
  int held = 0, spent = 0;
  for (const AllotHead& head : heads) held += head.T;
  std::vector<std::vector<bool>> kept;
  for (const AllotHead& head : heads) {
    std::vector<bool>& own = kept.emplace_back(held <= total ? std::vector<bool>(head.T, true) : guarded_slots(head));
    int count = static_cast<int>(std::count(own.begin(), own.end(), true));
    for (const int t : best_first(head.scores, own)) {
      if (count >= part_of(safeguard, budget)) break;
      own[t] = true;
      ++count;
    }
    spent += count;
  }
  struct Candidate {
    double score;
    int head, slot;
  };
  std::vector<Candidate> rest;
  for (int h = 0; h < static_cast<int>(heads.size()); ++h) {
    for (int t = 0; t < heads[h].T; ++t) {
      if (!kept[h][t]) rest.push_back({ranked(heads[h].scores[t]), h, t});
    }
  }
  std::sort(rest.begin(), rest.end(), [](const Candidate& a, const Candidate& b) {
    if (a.score != b.score) return a.score > b.score;
    return a.head != b.head ? a.head < b.head : a.slot > b.slot;
  });
  for (int i = 0; i < total - spent && i < static_cast<int>(rest.size()); ++i) kept[rest[i].head][rest[i].slot] = true;
  std::vector<Slots> out;
  for (const auto& own : kept) out.push_back(slots_of(own));
  return out;
}

std::vector<Slots> chunks(const std::vector<AllotHead>& heads, int budget, int chunk, bool shared) {
  std::vector<Slots> out;
  for (const AllotHead& head : heads) {
    if (head.T <= budget) {
      out.push_back(slots_of(std::vector<bool>(head.T, true)));
      continue;
    }
    std::vector<double> scores(head.T, 0.0);
    for (const AllotHead& other : heads) {
      for (int t = 0; t < head.T && (shared || &other == &head); ++t) scores[t] += other.scores[t];
    }
    struct Chunk {
      double mean = 0;
      Slots slots;
    };
    std::vector<Chunk> all;
    for (int start = 0; start < head.T; start += std::min(chunk, head.T)) {
      Chunk c;
      for (int t = start; t < std::min<long long>(head.T, static_cast<long long>(start) + chunk); ++t) {
        if (!head.guarded(t)) c.slots.push_back(t);
      }
      for (const int t : c.slots) c.mean += scores[t];
      if (!c.slots.empty()) all.push_back({ranked(c.mean / static_cast<double>(c.slots.size())), c.slots});
    }
    std::reverse(all.begin(), all.end());  // of equal chunks the newer first
    std::stable_sort(all.begin(), all.end(), [](const Chunk& a, const Chunk& b) { return a.mean > b.mean; });
    std::vector<bool> kept = guarded_slots(head);
    int left = budget - static_cast<int>(std::count(kept.begin(), kept.end(), true));
    for (const Chunk& c : all) {
      std::vector<bool> outside(head.T, true);
      for (const int t : c.slots) outside[t] = false;
      for (const int t : best_first(scores, outside)) {
        if (left > 0) {
          kept[t] = true;
          --left;
        }
      }
    }
    out.push_back(slots_of(kept));
  }
  return out;
}

CriticalRow critical(const AllotHead& head, int budget, double first_stage) {
  CriticalRow row;
  if (head.T <= budget) {
    row.slots = slots_of(std::vector<bool>(head.T, true));
    return row;
  }
  std::vector<bool> kept = guarded_slots(head);
  int count = static_cast<int>(std::count(kept.begin(), kept.end(), true));
  for (const int t : best_first(head.scores, kept)) {
    if (count >= part_of(first_stage, budget)) break;
    kept[t] = true;
    ++count;
  }
  std::vector<double> ranks(head.T);
  for (int t = 0; t < head.T; ++t) {
    const double finite = std::isfinite(head.weights[t]) ? head.weights[t] : std::numeric_limits<double>::quiet_NaN();
    ranks[t] = (head.scores[t] + 1e-4) * finite;
  }
  const Slots order = best_first(ranks, kept);
  const int wanted = budget - count;
  for (int i = 0; i < wanted; ++i) kept[order[i]] = true;
  if (wanted > 0 && wanted < static_cast<int>(order.size())) {
    const double in = ranked(ranks[order[wanted - 1]]), out = ranked(ranks[order[wanted]]);
    if (std::isfinite(in) && std::isfinite(out) && in != out)
      row.margin = (in - out) / std::max({std::abs(in), std::abs(out), 1e-30});
  }
  row.slots = slots_of(kept);
  return row;
}

Slots threshold(const AllotHead& head, int budget, double least) {
  std::vector<bool> kept = guarded_slots(head);
  int left = budget - static_cast<int>(std::count(kept.begin(), kept.end(), true));
  for (const int slot : best_first(head.scores, kept)) {
    if (left-- <= 0 || !(head.scores[slot] >= least)) break;
    kept[slot] = true;
  }
  return slots_of(kept);
}

double value_weight(const std::vector<float>& projection, int hidden, int Hq, int Hkv, int Dv, int kv_head,
                    const float* value) {
  const int group = Hq / Hkv;
  double sum = 0;
  for (int hq = kv_head * group; hq < (kv_head + 1) * group; ++hq) {
    for (int i = 0; i < hidden; ++i) {
      double out = 0;
      for (int d = 0; d < Dv; ++d)
        out += static_cast<double>(projection[(static_cast<size_t>(i) * Hq + hq) * Dv + d]) * value[d];
      sum += std::abs(out) / group;
    }
  }
  return sum;
}

}  // namespace oracle
