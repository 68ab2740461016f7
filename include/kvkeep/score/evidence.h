// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What a policy sees when it decides, and what the engine must supply for that.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/row.h"

namespace kvkeep {

/// When a decision is made.
enum class Moment : std::uint8_t {
  prefill_layer,  ///< during prefill, after one layer's attention
  prefill_end,    ///< the prompt is in the cache
  step_end,       ///< every layer of a decode step has run
};

/// What a policy reads. An engine that cannot supply it is told so before anything runs.
struct Needs {
  std::int32_t queries = 0;  ///< newest queries to keep per (layer, sequence), up to kMostQueries; 0: none
  bool keys = false;
  bool values = false;
  bool calibration = false;        ///< a file that the policy names
  bool output_projection = false;  ///< W_o of every full layer
  bool surprisal = false;
  bool rope = false;          ///< ModelSpec::rope, to turn queries and keys back
  bool given_scores = false;  ///< a score of every token and KV head (parts::Given::give)
};

/// All the inputs of an event's decision. Plain data over rows, from a running engine or from a trace.
struct Evidence {
  const ModelSpec& spec;
  const RowTable& table;
  QueryBasis basis = QueryBasis::pre_rope;
  Moment moment = Moment::step_end;
  bool explain = false;  ///< also keep data that only reports read: the mass before credit is mixed in
  std::span<const Tensor> output_projections = {};  ///< [num_layers] f32, f16 or bf16 [hidden, Hq * Dv] W_o,
                                                    ///< contiguous, on the device of the rows; empty if not needed
};

}  // namespace kvkeep
