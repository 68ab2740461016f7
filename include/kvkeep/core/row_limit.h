#pragma once
/// How much one row may keep at an event. No LibTorch in here.

#include <cstdint>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/protect.h"

namespace kvkeep {

struct RowLimit {
  std::int32_t budget = 0;  ///< slots that may stay; if the rows of a layer share one budget, their mean
  bool due =
      false;  ///< some slots of this row may go; a row that is not due keeps every slot, and its scores are ignored
  Protected guarded;  ///< slots that stay whatever they score, at most `budget` of them
};

/// Slots that rank before all others in their segment, whatever they score. Published scorers do this by overwriting
/// their scores with a maximum (variant official).
struct Padding {
  std::int32_t oldest = 0;
  std::int32_t newest = 0;
  [[nodiscard]] KVKEEP_HD bool holds(std::int32_t slot, std::int32_t length) const {
    return slot < oldest || slot >= length - newest;
  }
};

}  // namespace kvkeep
