#pragma once
/// When a sequence is due for an event.

#include <cstdint>
#include <limits>

namespace kvkeep {

/// A sequence is due when it holds at least budget + interval slots: it then falls to `budget`, so the cache swings between budget and
/// budget + interval. Slots are counted, not calls. Source: TriAttention's slack trigger; in steady state the schedule of the published AMS runs.
struct Trigger {
  std::int32_t budget = 0;
  std::int32_t interval = 0;
  bool never = false;

  [[nodiscard]] std::int64_t due_length() const {
    return never ? std::numeric_limits<std::int64_t>::max() : static_cast<std::int64_t>(budget) + interval;
  }
  [[nodiscard]] bool due(std::int64_t length) const { return length >= due_length(); }
};

}  // namespace kvkeep
