// SPDX-License-Identifier: Apache-2.0
#pragma once
// The diagnostics once more, by sets and counting, position by position. Shares nothing with the library.

#include <cstdint>
#include <set>
#include <vector>

namespace oracle {

struct KeptRow {
  int layer = 0, head = 0, P = 0;
  std::set<int> before, kept;
};
using KeptEvent = std::vector<KeptRow>;  // the rows of one sequence

struct RegionRates {
  double wiped = 0, nearly = 0, live = 0, lost = 0, whole = 0;
};

struct DiagnosticsNumbers {
  double iou_sum = 0, survival_sum = 0, pairs = 0;
  double third_iou[3] = {0, 0, 0}, third_pairs[3] = {0, 0, 0};
  double longest_sum = 0, longest_max = 0, rows = 0;
  double held[20] = {}, kept[20] = {}, bins[20] = {};
  double middle_kept = 0, middle_held = 0, middle_all = 0;
  double newest = 0, all_kept = 0;
};

DiagnosticsNumbers diagnose(const std::vector<KeptEvent>& events, int layers, int window);
RegionRates wipe_out(const std::vector<KeptEvent>& events, int region, int window, int sink);
double repetition(const std::vector<std::int32_t>& tokens, int n);

struct Loss {
  double held = 0, past = 0, past_held = 0, error = 0, output = 0;
};
// keys [T][D], values [T][Dv]
Loss attention_loss(const std::vector<std::vector<double>>& keys, const std::vector<std::vector<double>>& values,
                    const std::vector<double>& query, const std::set<int>& kept, int P, double scale);

}  // namespace oracle
