// Bodies of projection_lanes.h, once per instruction set.

#if defined(KVKEEP_PROJECTION_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVKEEP_PROJECTION_LANES_INL_H
#undef KVKEEP_PROJECTION_LANES_INL_H
#else
#define KVKEEP_PROJECTION_LANES_INL_H
#endif

#include "kvkeep/simd/highway.h"
#include "kvkeep/simd/projection_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE::projection_lanes {

namespace hn = hwy::HWY_NAMESPACE;

KVKEEP_INLINE void PanelSizes(const float* HWY_RESTRICT x, std::int64_t slots, float* HWY_RESTRICT sums) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t t = 0; t < slots; ++t, x += 2 * lanes, sums += lanes)
    hn::StoreU(hn::Add(hn::LoadU(d, sums), hn::Add(hn::Abs(hn::LoadU(d, x)), hn::Abs(hn::LoadU(d, x + lanes)))), d,
               sums);
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE::projection_lanes

namespace kvkeep::cpu::HWY_NAMESPACE {
using projection_lanes::PanelSizes;
}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

#ifndef KVKEEP_HEADER_ONLY
HWY_EXPORT(PanelSizes);
#endif

KVKEEP_INLINE void panel_sizes(const float* x, std::int64_t slots, float* sums) {
  KVKEEP_DISPATCH(PanelSizes)(x, slots, sums);
}

}  // namespace kvkeep::cpu
#endif

#endif
