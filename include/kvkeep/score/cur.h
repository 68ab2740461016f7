// SPDX-License-Identifier: Apache-2.0
#pragma once
/// CUR: slots whose key and value are both large among their neighbours. Source: "CurDKV: Value-Guided KV Compression
/// for LLMs via Approximated CUR Decomposition" (arXiv 2509.15038), in the form of kvpress's CURPress: products of
/// leverage scores, each approximated by its share of a window. Differs: the row's scores are not divided by their sum,
/// which changes no rank; sinks are a protected set; fp32.

#include "kvkeep/score/row_scorer.h"

namespace kvkeep {

struct CurOptions {
  std::int32_t window = 16;  ///< neighbouring slots that a slot is compared with; 0: the whole row

  void describe(Fields& f) {
    f.integer("window", window, 0, INT32_MAX, "neighbouring slots that a slot is compared with; 0: all of the row");
  }

  /// g[t] = |k_t|^2 |v_t|^2 / (K V), K and V the sums of |k|^2 and |v|^2 over the slot's window: slots [0, window),
  /// [window, 2 * window) and so on. 0 where a window has no keys or no values but zeros.
  template <class Row, class Team>
  KVKEEP_HD void score(const Row& row, float* g, Team team) const {
    const std::int32_t length = row.length(), size = window == 0 ? length : window;
    for (std::int64_t begin = std::int64_t{team.thread()} * size; begin < length;
         begin += std::int64_t{team.size()} * size) {
      const auto first = static_cast<std::int32_t>(begin), end = length - first < size ? length : first + size;
      float keys = 0, values = 0;
      for (std::int32_t t = first; t < end; ++t) {
        const float key = sum_of_squares(row.key(t), row.key_dim()),
                    value = sum_of_squares(row.value(t), row.value_dim());
        keys += key;
        values += value;
        g[t] = key * value;
      }
      for (std::int32_t t = first; t < end; ++t) g[t] = g[t] == 0 ? 0 : g[t] / keys / values;
    }
  }
};

class Cur final : public RowScorer<Cur, CurOptions> {
 public:
  static constexpr ScorerTraits traits{.name = "cur",
                                       .what = "keys and values that are large among their neighbours",
                                       .source = "CurDKV (arXiv 2509.15038), as in kvpress"};
  using RowScorer::RowScorer;

  /// Cost: one pass over keys and values.
  [[nodiscard]] Needs needs() const override { return {.queries = 0, .keys = true, .values = true}; }
};

}  // namespace kvkeep
