#pragma once
/// Not part of the interface. Scores that all KV heads of a layer share.

#include <algorithm>

#include "kvkeep/core/error.h"
#include "kvkeep/core/evidence.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep::cpu {

/// Replaces the scores `g` of every row of `group` by their mean, slot by slot. `asked`: rows of the group that were
/// scored. Throws Unsupported, naming the scorer, if rows were left out or differ in length.
inline void mean_over_heads(const char* scorer, const Evidence& evidence, const RowGroup& group, std::int32_t asked,
                            float* g) {
  const std::int32_t heads = evidence.spec.kv_heads;
  const auto rows = evidence.table.rows_of(group, heads);
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

}  // namespace kvkeep::cpu
