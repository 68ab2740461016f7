// Vectorised for the machine it runs on: compiled once per instruction set, chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "projection_lanes.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include "projection_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void PanelSizes(const float* HWY_RESTRICT x, std::int64_t slots, float* HWY_RESTRICT sums) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t t = 0; t < slots; ++t, x += 2 * lanes, sums += lanes)
    hn::StoreU(hn::Add(hn::LoadU(d, sums), hn::Add(hn::Abs(hn::LoadU(d, x)), hn::Abs(hn::LoadU(d, x + lanes)))), d,
               sums);
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

HWY_EXPORT(PanelSizes);

void panel_sizes(const float* x, std::int64_t slots, float* sums) { HWY_DYNAMIC_DISPATCH(PanelSizes)(x, slots, sums); }

}  // namespace kvkeep::cpu
#endif
