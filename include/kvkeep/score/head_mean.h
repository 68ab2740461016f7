#pragma once
/// Not part of the interface. Scores that all KV heads of a layer share.

#include <algorithm>
#include <span>
#include <string_view>

#include "kvkeep/core/error.h"
#include "kvkeep/core/evidence.h"
#include "kvkeep/core/row_window.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep::cpu {

/// Replaces the scores `g` of every row by the mean over the KV heads of its layer, slot by slot. Does nothing where
/// the evidence has a part of the model's heads: whoever gathers the others averages. `windows`: [rows]; a row without
/// queries was not scored. Throws Unsupported, naming the scorer, if some heads of a layer were not scored or differ in
/// length.
inline void mean_over_heads(std::string_view scorer, const Evidence& evidence, std::span<const RowWindow> windows,
                            float* g) {
  const std::int32_t heads = evidence.spec.kv_heads;
  if (evidence.spec.whole_heads() != heads) return;
  for (const RowGroup& group : evidence.table.groups) {
    const auto rows = evidence.table.rows_of(group, heads);
    const auto asked = std::ranges::count_if(windows.subspan(static_cast<std::size_t>(group.first_row), rows.size()),
                                             [](const RowWindow& window) { return window.queries > 0; });
    if (asked == 0) continue;  // scores are places, alike in all heads
    const Row& first = rows.front();
    KVKEEP_REQUIRE_AS(Unsupported, asked == heads, scorer,
                      ": heads \"all\" averages over heads that are cut together; given ", asked, " of ", heads,
                      " due in layer ", first.layer, "; use heads \"group\"");
    for (const Row& row : rows.subspan(1)) {
      KVKEEP_REQUIRE_AS(Unsupported, row.length == first.length, scorer,
                        ": heads \"all\" averages over heads of one length; given rows of ", first.length, " and ",
                        row.length, " slots in layer ", row.layer, "; use heads \"group\"");
      add_scaled(g + first.first, g + row.first, 1.0F, first.length);
    }
    const auto share = 1.0F / static_cast<float>(heads);
    std::transform(g + first.first, g + first.first + first.length, g + first.first,
                   [share](float x) { return x * share; });
    for (const Row& row : rows.subspan(1)) std::copy_n(g + first.first, first.length, g + row.first);
  }
}

}  // namespace kvkeep::cpu
