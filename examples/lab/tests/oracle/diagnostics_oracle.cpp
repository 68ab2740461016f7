// SPDX-License-Identifier: Apache-2.0
#include "oracle/diagnostics_oracle.h"

#include <cmath>

namespace oracle {

DiagnosticsNumbers diagnose(const std::vector<KeptEvent>& events, int layers, int window) {
  DiagnosticsNumbers n;
  for (std::size_t e = 0; e < events.size(); ++e)
    for (std::size_t r = 0; r < events[e].size(); ++r) {
      const KeptRow& row = events[e][r];
      n.rows += 1;
      if (e > 0) {
        const std::set<int>& old = events[e - 1][r].kept;
        std::set<int> all = old;
        double both = 0;
        for (const int p : row.kept) {
          all.insert(p);
          both += static_cast<double>(old.count(p));
        }
        const double iou = all.empty() ? 1 : both / static_cast<double>(all.size());
        int third = 0;
        while (row.layer * 3 >= (third + 1) * layers) ++third;
        n.iou_sum += iou;
        n.survival_sum += both / static_cast<double>(old.size());
        n.pairs += 1;
        n.third_iou[third] += iou;
        n.third_pairs[third] += 1;
      }
      double longest = 0, run = 0;
      for (int p = 0; p < row.P; ++p) {
        const bool was = row.before.count(p) != 0, is = row.kept.count(p) != 0;
        int bin = 0;
        while ((bin + 1) * row.P <= 20 * p) ++bin;
        n.bins[bin] += 1;
        n.held[bin] += was;
        n.kept[bin] += is;
        if (row.P <= 3 * p && 3 * p < 2 * row.P) {
          n.middle_all += 1;
          n.middle_held += was;
          n.middle_kept += is;
        }
        n.all_kept += is;
        n.newest += is && p >= row.P - window;
        if (was) run = is ? 0 : run + 1;
        longest = std::fmax(longest, run);
      }
      n.longest_sum += longest;
      n.longest_max = std::fmax(n.longest_max, longest);
    }
  return n;
}

RegionRates wipe_out(const std::vector<KeptEvent>& events, int region, int window, int sink) {
  RegionRates rates;
  for (const KeptEvent& event : events)
    for (const KeptRow& row : event)
      for (int begin = 0; begin + region <= row.P; begin += region) {
        double was = 0, is = 0;
        bool sinks = false, newest = false;
        for (int p = begin; p < begin + region; ++p) {
          was += static_cast<double>(row.before.count(p));
          is += static_cast<double>(row.kept.count(p));
          sinks = sinks || p < sink;
          newest = newest || p >= row.P - window;
        }
        rates.whole += 1;
        rates.lost += is == 0;
        if (sinks || newest || 2 * was < region) continue;
        rates.live += 1;
        rates.wiped += is == 0;
        rates.nearly += is * 20 < was;
      }
  return rates;
}

double repetition(const std::vector<std::int32_t>& tokens, int n) {
  std::set<std::vector<std::int32_t>> distinct;
  double all = 0;
  for (std::size_t i = 0; i + static_cast<std::size_t>(n) <= tokens.size(); ++i) {
    distinct.insert(
        {tokens.begin() + static_cast<std::ptrdiff_t>(i), tokens.begin() + static_cast<std::ptrdiff_t>(i) + n});
    all += 1;
  }
  return all == 0 ? 0 : 1 - static_cast<double>(distinct.size()) / all;
}

Loss attention_loss(const std::vector<std::vector<double>>& keys, const std::vector<std::vector<double>>& values,
                    const std::vector<double>& query, const std::set<int>& kept, int P, double scale) {
  std::vector<double> weight;
  double sum = 0, held_sum = 0;
  for (const auto& key : keys) {
    double logit = 0;
    for (std::size_t d = 0; d < query.size(); ++d) logit += key[d] * query[d];
    weight.push_back(std::exp(scale * logit));
    sum += weight.back();
  }
  const auto stays = [&](std::size_t t) { return static_cast<int>(t) >= P || kept.count(static_cast<int>(t)) != 0; };
  Loss loss;
  for (std::size_t t = 0; t < keys.size(); ++t) {
    if (stays(t)) held_sum += weight[t];
    if (stays(t)) loss.held += weight[t] / sum;
    if (static_cast<int>(t) < P) loss.past += weight[t] / sum;
    if (static_cast<int>(t) < P && stays(t)) loss.past_held += weight[t] / sum;
  }
  for (std::size_t d = 0; d < values[0].size(); ++d) {
    double full = 0, held = 0;
    for (std::size_t t = 0; t < keys.size(); ++t) {
      full += weight[t] / sum * values[t][d];
      if (stays(t)) held += weight[t] / held_sum * values[t][d];
    }
    loss.error += (full - held) * (full - held);
    loss.output += full * full;
  }
  return loss;
}

}  // namespace oracle
