// SPDX-License-Identifier: Apache-2.0
#pragma once
// The arithmetic that CPU, CUDA and a consumer's own translation units share.

#include <cstdint>
#include <vector>

namespace contraction {

struct Row {
  std::vector<float> mass;    ///< [length]
  std::vector<float> credit;  ///< [known] old credit
  double decay = 0.8, mix = 0.7, segment_mass = 0.02, coverage = 1;
  std::int32_t min_segment = 1, max_segment = 1024, min_quota = 0, budget = 1;
  bool official = false;
};

struct Divided {
  std::vector<float> credit, used;
  std::vector<std::int32_t> ends, quotas;
  bool operator==(const Divided&) const = default;
};

/// What is made of numbers x: their turns by RoPE, mixtures, shares.
struct Mixed {
  std::vector<float> single;
  std::vector<double> wide;
  bool operator==(const Mixed&) const = default;
};

}  // namespace contraction
