#pragma once
/// A share of a budget in whole slots. Does not use LibTorch.

#include <cmath>
#include <cstdint>

#include "kvkeep/core/strict_math.h"

namespace kvkeep {

/// floor(share * budget), the share rounded to millionths, so that 0.3 of 10 is 3 on every machine.
KVKEEP_HD inline std::int32_t share_of(double share, std::int32_t budget) {
  constexpr std::int64_t kParts = 1'000'000;
  return static_cast<std::int32_t>(static_cast<std::int64_t>(llround(share * static_cast<double>(kParts))) * budget /
                                   kParts);
}

}  // namespace kvkeep
