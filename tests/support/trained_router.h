// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Routers and gates of random numbers, as if they were trained.

#include <filesystem>
#include <string>

#include "folded_prompt.h"
#include "kvkeep/memory/router.h"

namespace kvkeep::testing {

struct RouterShape {
  std::int64_t layers = 1, heads = 1, inner = 3, dim = 16;
  std::int64_t max_rank = 0, width = 7;  ///< of gates; 0: there are none
};

/// Thresholds are around 0.9: a span of ten tokens is as relevant if a query does not know it.
inline TrainedParameters trained_router(std::uint64_t seed, const RouterShape& shape) {
  oracle::Random random(seed);
  TrainedParameters p;
  p.projections = normals(random, {shape.layers, shape.heads, shape.inner, shape.dim});
  p.thresholds = normals(random, {shape.layers, shape.heads}, 0.04);
  for (std::int64_t i = 0; i < p.thresholds.numel(); ++i) p.thresholds.data<float>()[i] += 0.9F;
  if (shape.max_rank == 0) return p;
  const std::int64_t widths[] = {shape.max_rank + shape.dim, shape.width, shape.width + 1, shape.max_rank};
  for (std::size_t i = 0; i < 3; ++i) {
    p.gate_weights[i] = normals(random, {widths[i + 1], widths[i]});
    p.gate_biases[i] = normals(random, {widths[i + 1]});
  }
  return p;
}

/// The option of a policy that routes by such numbers, which are written to `folder`.
inline std::string routed_by(const std::filesystem::path& folder, std::uint64_t seed, const RouterShape& shape) {
  const std::filesystem::path file = folder / "small.router.safetensors";
  write_routing(file, trained_router(seed, shape));
  return ",memory.router=" + file.string();
}

}  // namespace kvkeep::testing
