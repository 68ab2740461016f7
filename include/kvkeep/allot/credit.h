#pragma once
/// EMA credit: the mass that a slot drew at earlier events. Source: AMS, section "credit".

#include <cstdint>

#include "kvkeep/allot/mass.h"
#include "kvkeep/core/strict_math.h"

namespace kvkeep {

struct CreditOptions {
  double decay = 0.8;  ///< lambda in [0, 1): weight of the old credit
  double mix = 0.7;    ///< beta in [0, 1]: weight of this event's mass in the mixture
};

/// `credit` holds the old credit of the oldest `known` slots and is overwritten with decay * old + (1 - decay) * mass
/// for all `length` slots (slots past `known` enter with 0). `used` gets mix * mass + (1 - mix) * credit / sum(credit),
/// normalised. With `raw` (the published "no mass" ablation) `mass` is usage that was not normalised, and credit enters
/// the mixture without division by its sum. A `known` larger than `length` means that the credit belongs to another
/// sequence: it is ignored. fp32 storage, arithmetic in double.
template <class Team = OneThread>
KVKEEP_HD void update_credit(const float* mass, std::int32_t length, std::int32_t known, CreditOptions options,
                             double epsilon, bool raw, float* credit, float* used, Team team = {}) {
  if (known > length) known = 0;
  for (std::int32_t t = team.thread(); t < length; t += team.size()) {
    const double old = t < known ? static_cast<double>(credit[t]) : 0.0;
    credit[t] =
        static_cast<float>(product(options.decay, old) + product(1.0 - options.decay, static_cast<double>(mass[t])));
  }
  team.sync();
  const double sum = total(credit, length, team) + product<double>(length, epsilon);
  for (std::int32_t t = team.thread(); t < length; t += team.size()) {
    const double share =
        raw ? static_cast<double>(credit[t]) : (static_cast<double>(usable(credit[t])) + epsilon) / sum;
    used[t] =
        static_cast<float>(product(options.mix, static_cast<double>(mass[t])) + product(1.0 - options.mix, share));
  }
  team.sync();
  normalise_mass(used, length, epsilon, team);
}

}  // namespace kvkeep
