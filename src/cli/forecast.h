// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a policy will hold of a sequence, from its trigger and limits alone: no weights, no cache.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kvkeep/core/dtype.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep::cli {

// One sequence as it grows, and how it is stored.
struct SequencePlan {
  std::int32_t prompt = 0, length = 1;  // tokens; `length` counts the prompt
  Dtype dtype = Dtype::bf16;            // of K and V
  std::int32_t page_size = 16;          // slots; 1: no pages
  std::vector<std::int32_t> held = {};  // [layers] slots of every row once the prompt has ended; empty: all of it
  std::int32_t piece = 0;               // tokens of each step of the prompt; 0: it comes in one

  // Tokens of the step that follows the first `seen`.
  [[nodiscard]] std::int32_t step_after(std::int32_t seen) const {
    if (seen >= prompt) return 1;
    return piece > 0 ? std::min(piece, prompt - seen) : prompt - seen;
  }

  // Of `dim` numbers; whole blocks, if they are stored in blocks.
  [[nodiscard]] std::int64_t row_bytes(std::int32_t dim) const { return dim / numbers_of(dtype) * element_size(dtype); }
  // K and V of one slot of one row.
  [[nodiscard]] std::int64_t slot_bytes(const ModelSpec& spec) const {
    return row_bytes(spec.key_dim) + row_bytes(spec.value_dim);
  }
};

// Slots of the rows of one layer, and K and V bytes of all of them with pages rounded up. A layer's heads share its
// pages, so the longest row counts.
struct LayerSlots {
  std::int32_t least = 0, most = 0;
  std::int64_t bytes = 0;
  bool operator==(const LayerSlots&) const = default;
};

struct LayerForecast {
  LayerSlots full;  // nothing dropped
  LayerSlots peak;  // just before the event that finds most
  LayerSlots kept;  // right after the last event; at the end if there is none
  bool operator==(const LayerForecast&) const = default;
};

struct Forecast {
  std::vector<LayerForecast> layers;
  std::int64_t full_bytes = 0, peak_bytes = 0, kept_bytes = 0;
  std::int64_t peak_slots = 0;  // at once, over all rows that a policy cuts
  std::int64_t events = 0;
  std::int64_t kept_slots = 0, chosen_slots = 0;   // of the last event, over those rows; by the scorer
  std::int32_t first_event = -1, last_event = -1;  // tokens seen
  std::int64_t slot_bytes = 0;                     // K and V of one token in every full layer
};

enum class ForecastMoment : std::uint8_t { before_event, after_event, end };
// `lengths`: [full layers * Hkv] slots of the rows after `seen` tokens.
using Watch = std::function<void(ForecastMoment moment, std::int32_t seen, std::span<const std::int32_t> lengths)>;

// Throws InvalidArgument with every reason why the policy cannot run on the model.
void require_fits(const ModelSpec& spec, const KVPolicy& policy);

// Throws InvalidArgument with every reason why the policy cannot run on the model; Unsupported for a policy that cuts
// without being an eviction. Rows of a policy that spreads its budget by the data (Trigger::ragged) count with what
// they may keep on average.
// `watch`, if set, is called at every event and at the end.
Forecast forecast(const ModelSpec& spec, const KVPolicy& policy, const SequencePlan& plan, const Watch& watch = {});

// What kvkeep itself holds for one sequence, in bytes.
struct OwnBytes {
  std::int64_t positions = 0, credit = 0, tally = 0, given = 0;  // columns, at the peak
  std::int64_t surprisal = 0;                                    // of every token
  std::int64_t queries = 0;                                      // the ring
  std::int64_t event = 0;                                        // scores, and for AMS mass and credit, during an event
  [[nodiscard]] std::int64_t sum() const { return positions + credit + tally + given + surprisal + queries + event; }
};
// `peak_slots`: most at once, over all rows that the policy cuts; `length`: tokens of the sequence.
OwnBytes own_bytes(const ModelSpec& spec, const KVPolicy& policy, std::int64_t peak_slots, std::int32_t length,
                   std::int32_t query_bytes);

}  // namespace kvkeep::cli
