#pragma once
/// Usage mass: what share of the recent window's attention every slot draws.
/// Source: AMS, section "mass"; our spec of it is docs/ams.md.

#include <cstdint>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/pool.h"

namespace kvkeep {

/// What the suffix (slots that some window query cannot see) draws, since its own attention is cut off by the window.
enum class SuffixFill : std::uint8_t {
  max_head,     ///< the largest usage of the row's history (default)
  max_global,   ///< the largest usage over all heads of the (layer, sequence), as the published code does
  causal_mean,  ///< mean over the strictly later window queries; the newest slot takes the row's maximum
  exclude,      ///< nothing: segments and quotas follow the history alone
};

/// Largest of x[0, n), at least 0; NaN counts as 0.
KVKEEP_HD inline float largest(const float* x, std::int32_t n) {
  float best = 0;
  for (std::int32_t t = 0; t < n; ++t) best = x[t] > best ? x[t] : best;
  return best;
}

/// Turns usage into mass in place: m = (max(u, 0) + eps) / sum. NaN counts as 0. The sum runs in double, ascending.
KVKEEP_HD inline void normalise_mass(float* u, std::int32_t length, double epsilon) {
  double sum = 0;
  for (std::int32_t t = 0; t < length; ++t) {
    const double v = (u[t] > 0 ? static_cast<double>(u[t]) : 0.0) + epsilon;
    sum += v;
  }
  for (std::int32_t t = 0; t < length; ++t) u[t] = static_cast<float>(((u[t] > 0 ? static_cast<double>(u[t]) : 0.0) + epsilon) / sum);
}

}  // namespace kvkeep
