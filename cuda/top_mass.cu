// SPDX-License-Identifier: Apache-2.0
#include "top_mass.h"

#include "launch.cuh"
#include "select.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {
namespace {

/// What is found of a row digit by digit.
struct MassDigits {
  unsigned long long units[kDigits];  ///< of the slots whose key has the digit
  std::int32_t slots[kDigits];
};

/// How many of the best slots of a row are enough; all if no number of them is.
__device__ std::int32_t slots_that_hold(const BlockTeam& team, MassDigits& digits, const TopMassOptions& options,
                                        const float* sums, std::int32_t length) {
  std::uint64_t all = 0;
  for (std::int32_t t = team.thread(); t < length; t += team.size()) all += mass_units(sums[t]);
  if (!options.holds(team.sum(all))) return length;
  const WarpTeam warp;
  std::uint64_t found = 0, mask = 0, held = 0;  // held: by slots above `found`
  std::int32_t above = 0;                       // those slots
  for (int shift = 56;; shift -= 8) {
    for (std::int32_t i = team.thread(); i < kDigits; i += team.size()) digits.units[i] = digits.slots[i] = 0;
    team.sync();
    for (std::int32_t t = team.thread(); t < length; t += team.size()) {
      const std::uint64_t key = rank_key(sums[t], t);
      if ((key & mask) != found) continue;
      const auto digit = static_cast<std::uint32_t>(key >> shift) & 255U;
      atomicAdd(&digits.units[digit], static_cast<unsigned long long>(mass_units(sums[t])));
      atomicAdd(&digits.slots[digit], 1);
    }
    team.sync();
    // Every warp reads them for itself: lane l those of digits 255 - 8 l downwards. One digit brings what is held from
    // too little to enough.
    std::uint64_t own = 0;
    std::int32_t own_slots = 0, digit = 255 - 8 * warp.thread();
    for (int i = 0; i < 8; ++i) own += digits.units[digit - i], own_slots += digits.slots[digit - i];
    std::uint64_t before = held + warp.sum_before(own);
    std::int32_t slots = above + warp.sum_before(own_slots);
    const bool here = !options.holds(before) && options.holds(before + own);
    while (here && !options.holds(before + digits.units[digit])) {
      before += digits.units[digit];
      slots += digits.slots[digit--];
    }
    const std::int32_t of_digit = here ? digits.slots[digit] : 0;
    const unsigned there = __ballot_sync(kWholeWarp, here ? 1 : 0);
    if (there == 0) return length;  // sums that are no attention, beyond what integers add up
    const int lane = __ffs(static_cast<int>(there)) - 1;
    digit = __shfl_sync(kWholeWarp, digit, lane);
    held = __shfl_sync(kWholeWarp, static_cast<unsigned long long>(before), lane);
    above = __shfl_sync(kWholeWarp, slots, lane);
    const std::int32_t equal = __shfl_sync(kWholeWarp, of_digit, lane);
    team.sync();
    if (equal == 1) return above + 1;
    found |= static_cast<std::uint64_t>(digit) << shift;
    mask |= std::uint64_t{255} << shift;
  }
}

__global__ void __launch_bounds__(tuning::kMostThreads) top_mass_kernel(TopMassArguments a) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(MassDigits, digits, 1);
  KVKEEP_SHARED(std::int32_t, histogram, kDigits);
  const BlockTeam team(scratch);
  for (std::int64_t r = blockIdx.x; r < a.rows.count; r += gridDim.x) {
    const Row& row = a.rows.rows[r];
    const float* sums = a.rows.scores + row.first;
    std::int32_t* slots = a.rows.slots + a.rows.indptr[r];
    const std::int32_t length = row.length;
    const std::int32_t best = a.rows.limits[r].due
                                  ? a.options.rounded(slots_that_hold(team, digits[0], a.options, sums, length), length)
                                  : length;
    const auto key_of = [&](std::int32_t t) { return rank_key(sums[t], t); };
    std::uint64_t least = best == length ? 0 : ~std::uint64_t{0};
    if (best > 0 && best < length) least = least_kept(team, histogram, 0, length, best, key_of);
    const std::int32_t kept = write_kept(
        team, length, [&](std::int32_t t) { return t == 0 || t >= length - a.options.window || key_of(t) >= least; },
        slots);
    if (team.thread() == 0) a.counts[r] = kept;
  }
}

}  // namespace

void launch_top_mass(const TopMassArguments& a, Stream stream) {
  KVKEEP_REQUIRE(a.options.mass > 0 && a.options.mass <= 1, "top mass: mass; given ", a.options.mass,
                 "; allowed above 0, up to 1");
  KVKEEP_REQUIRE(a.options.window >= 1, "top mass: window; given ", a.options.window, "; allowed 1 or more");
  launch("top_mass", top_mass_kernel,
         {.blocks = blocks_for(a.rows.count), .threads = tuning::threads_for(a.rows.longest)}, stream, a);
}

}  // namespace kvkeep::cuda
