// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Scorers that read keys, or keys and values, a second time: plain loops in double.

#include "scorer_input.h"

namespace oracle {

ScorerOutput knorm(const ScorerInput& in);
ScorerOutput keydiff(const ScorerInput& in);
/// `window` 0: the whole row.
ScorerOutput cur(const ScorerInput& in, int window);

}  // namespace oracle
