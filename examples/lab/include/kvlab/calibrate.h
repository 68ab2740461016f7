// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Query statistics of a model: what TriAttention reads instead of queries.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvkeep/score/calibration.h"
#include "kvlab/decoder.h"

namespace kvkeep::lm {

struct CalibrationRun {
  std::int32_t skip = 4;     ///< oldest tokens of every sequence that do not count: they are attention sinks
  std::int32_t chunk = 512;  ///< tokens per step of the prefill
  Dtype cache_dtype = Dtype::f32;
  std::string model_name = {};
  std::function<void(std::int64_t)> progress = {};  ///< called with the tokens run so far
};

/// Runs every sequence once from position 0 and averages the queries of every layer and head before RoPE, after bias
/// and query norm, in double. All layers are in the result, including those that no policy cuts. All tokens weigh the
/// same, whatever their sequence, and the chunks change nothing. Throws: InvalidArgument for a model without full RoPE,
/// an id outside the vocabulary, and if no token is left after `skip`. Cost: one prefill, and a square root per token,
/// query head and pair. Memory: the cache of the longest sequence; 12 D Hq bytes per layer.
[[nodiscard]] Calibration calibrate(Decoder& decoder, const std::vector<std::vector<std::int32_t>>& sequences,
                                    const CalibrationRun& run = {});

}  // namespace kvkeep::lm
