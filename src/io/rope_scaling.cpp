// SPDX-License-Identifier: Apache-2.0
/// Frequencies of scaled RoPE. Source: transformers `modeling_rope_utils.py` (5.x); computed in double.
/// Differs for YaRN from transformers 4.45 to 4.57, which replace a `factor` that differs from max_position_embeddings
/// / original_max_position_embeddings by that quotient; here, as in 5.x, the written factor counts.

#include <algorithm>
#include <cmath>

#include "kvkeep/core/error.h"
#include "kvkeep/io/model_config.h"

namespace kvkeep::io {
namespace {

constexpr double kPi = 3.14159265358979323846;

// Long waves are stretched by `factor`, short ones kept, those between blended.
void stretch_llama3(std::vector<double>& inv_freq, const RopeConfig& rope) {
  const auto original = static_cast<double>(rope.original_max);
  for (double& frequency : inv_freq) {
    const double turns = original * frequency / (2 * kPi);  // over the original context
    if (turns > rope.high_freq_factor) continue;
    if (turns < rope.low_freq_factor) {
      frequency /= rope.factor;
      continue;
    }
    const double keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
    frequency = (1 - keep) * frequency / rope.factor + keep * frequency;
  }
}

// The pair (not rounded) that makes `turns` turns over the original context.
double yarn_pair(double turns, double dim, const RopeConfig& rope, double original) {
  return dim * std::log(original / (turns * 2 * kPi)) / (2 * std::log(rope.theta));
}

void stretch_yarn(std::vector<double>& inv_freq, const RopeConfig& rope, std::int32_t head_dim, double original) {
  double low = yarn_pair(rope.beta_fast, head_dim, rope, original),
         high = yarn_pair(rope.beta_slow, head_dim, rope, original);
  if (rope.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, head_dim - 1.0);
  if (low == high) high += 0.001;
  for (std::size_t f = 0; f < inv_freq.size(); ++f) {
    const double stretch = std::clamp((static_cast<double>(f) - low) / (high - low), 0.0, 1.0);
    inv_freq[f] = inv_freq[f] / rope.factor * stretch + inv_freq[f] * (1 - stretch);
  }
}

double yarn_mscale(double factor, double mscale) { return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

double yarn_attention_scaling(const RopeConfig& rope) {
  if (rope.attention_factor) return *rope.attention_factor;
  if (rope.mscale && rope.mscale_all_dim)
    return yarn_mscale(rope.factor, *rope.mscale) / yarn_mscale(rope.factor, *rope.mscale_all_dim);
  return yarn_mscale(rope.factor, 1.0);
}

void check(const RopeConfig& rope) {
  using Type = RopeConfig::Type;
  KVKEEP_REQUIRE(std::isfinite(rope.theta) && rope.theta > 0, "RoPE: rope_theta must be finite and positive; given ",
                 rope.theta);
  KVKEEP_REQUIRE(rope.type == Type::standard || (std::isfinite(rope.factor) && rope.factor > 0),
                 "RoPE: factor must be finite and positive; given ", rope.factor);
  KVKEEP_REQUIRE(rope.original_max >= 0, "RoPE: original_max_position_embeddings must not be negative; given ",
                 rope.original_max);
  if (rope.type == Type::llama3) {
    KVKEEP_REQUIRE(rope.original_max > 0, "RoPE: llama3 needs original_max_position_embeddings; given ",
                   rope.original_max);
    KVKEEP_REQUIRE(rope.low_freq_factor > 0 && rope.high_freq_factor > rope.low_freq_factor,
                   "RoPE: llama3 needs 0 < low_freq_factor < high_freq_factor; given ", rope.low_freq_factor, " and ",
                   rope.high_freq_factor);
  }
  if (rope.type == Type::yarn) {
    KVKEEP_REQUIRE(rope.theta != 1.0, "RoPE: yarn needs a rope_theta other than 1");
    KVKEEP_REQUIRE(rope.beta_slow > 0 && rope.beta_fast >= rope.beta_slow,
                   "RoPE: yarn needs 0 < beta_slow <= beta_fast; given ", rope.beta_slow, " and ", rope.beta_fast);
    KVKEEP_REQUIRE(!rope.attention_factor || (std::isfinite(*rope.attention_factor) && *rope.attention_factor > 0),
                   "RoPE: attention_factor must be finite and positive");
  }
  for (const double divisor : rope.divisors)
    KVKEEP_REQUIRE(std::isfinite(divisor) && divisor > 0,
                   "RoPE: divisors of frequencies must be finite and positive; given ", divisor);
}

}  // namespace

RopeSpec make_rope(const RopeConfig& rope, std::int32_t head_dim, std::int64_t max_positions) {
  KVKEEP_REQUIRE(head_dim >= 2 && head_dim % 2 == 0, "RoPE: head_dim must be even; given ", head_dim);
  check(rope);
  KVKEEP_REQUIRE(rope.divisors.empty() || rope.divisors.size() == static_cast<std::size_t>(head_dim / 2),
                 "RoPE: there are ", rope.divisors.size(), " divisors of frequencies; allowed ", head_dim / 2,
                 ", half of head_dim");
  RopeSpec spec;
  for (std::int32_t f = 0; f < head_dim / 2; ++f) spec.inv_freq.push_back(std::pow(rope.theta, -2.0 * f / head_dim));
  switch (rope.type) {
    case RopeConfig::Type::standard:
      break;
    case RopeConfig::Type::linear:
      for (double& frequency : spec.inv_freq) frequency /= rope.factor;
      break;
    case RopeConfig::Type::llama3:
      stretch_llama3(spec.inv_freq, rope);
      break;
    case RopeConfig::Type::yarn:
      stretch_yarn(spec.inv_freq, rope, head_dim,
                   static_cast<double>(rope.original_max > 0 ? rope.original_max : max_positions));
      spec.attention_scaling = yarn_attention_scaling(rope);
      break;
  }
  for (std::size_t f = 0; f < rope.divisors.size(); ++f) spec.inv_freq[f] /= rope.divisors[f];
  for (const double frequency : spec.inv_freq)
    KVKEEP_REQUIRE(std::isfinite(frequency), "RoPE: rope_theta, factor and divisors give a frequency of ", frequency,
                   "; given rope_theta ", rope.theta, ", factor ", rope.factor, "; allowed finite frequencies");
  return spec;
}

}  // namespace kvkeep::io
