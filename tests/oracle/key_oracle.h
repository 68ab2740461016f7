#pragma once
/// Scorers that read keys alone, a second time: plain loops in double.

#include "scorer_input.h"

namespace oracle {

ScorerOutput knorm(const ScorerInput& in);
ScorerOutput keydiff(const ScorerInput& in);

}  // namespace oracle
