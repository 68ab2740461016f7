#pragma once
/// The values that ChunkKV ranks, bit-identical on the CPU and on a GPU. Does not use LibTorch.

#include <cstdint>

#include "kvkeep/core/protect.h"
#include "kvkeep/core/rank_key.h"
#include "kvkeep/core/strict_math.h"

namespace kvkeep {

class Fields;

struct ChunksOptions {
  std::int32_t chunk = 20;  ///< slots per chunk; the last may be shorter
  enum class Heads : std::uint8_t {
    shared,  ///< chunks rank by the sum over the KV heads of the layer, and every head keeps the same slots (published)
    own,     ///< each KV head ranks its own
  };
  Heads heads = Heads::shared;

  void describe(Fields& f);  ///< in chunks.h
};

/// Chunks of a row of `length` slots.
KVKEEP_HD inline std::int32_t chunks_in(std::int32_t length, std::int32_t chunk) {
  return static_cast<std::int32_t>((std::int64_t{length} + chunk - 1) / chunk);
}

/// Slots of chunk `c` between sinks and recents.
KVKEEP_HD inline SlotRange free_slots(std::int32_t c, std::int32_t chunk, std::int32_t length, Protected guarded) {
  const auto least = [](std::int64_t a, std::int64_t b) { return static_cast<std::int32_t>(a < b ? a : b); };
  const auto most = [](std::int32_t a, std::int32_t b) { return a > b ? a : b; };
  const std::int32_t at = least(std::int64_t{c} * chunk, length), end = least(std::int64_t{at} + chunk, length);
  const std::int32_t from = least(most(guarded.sinks, at), end);
  return {from, least(most(length - guarded.recents, from), end)};
}

/// How many of them are not protected.
KVKEEP_HD inline std::int32_t free_count(SlotRange slots, const Protected& guarded) {
  return slots.to - slots.from - guarded.pinned_in(slots);
}

/// Mean of `sums` over the slots of a range that are not pinned, summed in slot order; at least one is not.
KVKEEP_HD inline double chunk_mean(const double* sums, SlotRange slots, const Protected& guarded) {
  double mean = 0;
  for (std::int32_t t = slots.from; t < slots.to; ++t)
    if (!guarded.pins_slot(t)) mean += sums[t];
  return mean / free_count(slots, guarded);
}

}  // namespace kvkeep
