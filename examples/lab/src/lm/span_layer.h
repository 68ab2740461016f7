// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Content of span traces of both kinds, read and checked.

#include <span>
#include <string>

#include "kvkeep/io/safetensors.h"
#include "kvkeep/memory/router.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/policy/sekv.h"

namespace kvkeep::trace {

/// One layer's prompt and the queries after it, with shapes known and checked.
struct Layer {
  Tensor keys, values;  ///< [Hkv, T, D]
  Tensor queries;       ///< [n, Hq, D]
  Tensor surprisal;     ///< f32 [T]
  double scale = 0;

  [[nodiscard]] std::int64_t group() const { return queries.size(1) / keys.size(0); }
  [[nodiscard]] std::int64_t dim() const { return keys.size(2); }
  [[nodiscard]] std::span<const float> nats() const {
    return {surprisal.data<float>(), static_cast<std::size_t>(surprisal.numel())};
  }
};

/// f32, f16 or bf16 without NaN or infinity, contiguous. `shape`: in words, for the error.
Tensor finite_floats(const io::SafetensorsFile& file, const std::string& name, std::int64_t dims,
                     const std::string& shape);

/// Router and gates as they are stored, with shapes checked; those not wanted stay undefined.
TrainedParameters read_parameters(const io::SafetensorsFile& file, const Layer& layer, bool router, bool gates,
                                  std::int64_t max_rank);

/// Without router and gates.
Layer read_layer(const io::SafetensorsFile& file);

/// i32 [spans, 2] begin and end of each.
Tensor table_of(std::span<const Span> spans);

const Sekv& sekv_of(const io::SafetensorsFile& file, const KVPolicy& policy);

}  // namespace kvkeep::trace
