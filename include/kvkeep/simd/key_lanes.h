// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Vectorised passes over the keys of a row. Every key is treated alike wherever it is, so
/// equal keys give equal bits.

#include <cstdint>

#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep::cpu {

/// Keys that the passes take at a time if a second look at them should find them in the nearest cache.
inline constexpr std::int64_t kKeyBlock = 32;

/// norms[t - from] = |k_t|, for t in [from, to). fp32. Cost: one read of the keys.
void key_norms(const Keys& keys, std::int64_t from, std::int64_t to, float* norms);

/// dots[t - from] = k_t . vector, for t in [from, to). vector: f32 [dim]. fp32. Cost: one read of the keys.
void key_dots(const Keys& keys, std::int64_t from, std::int64_t to, const float* vector, float* dots);

/// sum[d] += sum over t in [from, to) of weights[t - from] * k_t[d]. Added in fp32 in ascending order of t (opposite
/// vectors cancel exactly), then to the f64 sum: call it for blocks of at most a few dozen keys. Cost: one read of the
/// keys.
void add_weighted_keys(const Keys& keys, std::int64_t from, std::int64_t to, const float* weights, double* sum);

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/simd/key_lanes-inl.h"
#endif
