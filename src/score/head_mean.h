#pragma once
/// Scores that all KV heads of a layer share.

#include "kvkeep/core/evidence.h"

namespace kvkeep::cpu {

/// Replaces the scores `g` of every row of `group` by their mean, slot by slot. `asked`: rows of the group that were
/// scored. Throws Unsupported, naming the scorer, if rows were left out or differ in length.
void mean_over_heads(const char* scorer, const Evidence& evidence, const RowGroup& group, std::int32_t asked, float* g);

}  // namespace kvkeep::cpu
