// SPDX-License-Identifier: Apache-2.0
// Bodies of stream_lanes.h, once per instruction set.

#if defined(KVKEEP_STREAM_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVKEEP_STREAM_LANES_INL_H
#undef KVKEEP_STREAM_LANES_INL_H
#else
#define KVKEEP_STREAM_LANES_INL_H
#endif

#include <hwy/cache_control.h>
#include <cstring>

#include "kvkeep/simd/highway.h"
#include "kvkeep/simd/stream_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE::stream_lanes {

namespace hn = hwy::HWY_NAMESPACE;

KVKEEP_INLINE void StreamForward(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (bytes % lanes != 0 || reinterpret_cast<std::uintptr_t>(to) % static_cast<std::uintptr_t>(lanes) != 0) {
    std::memmove(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  for (std::int64_t i = 0; i < bytes; i += lanes) hn::Stream(hn::LoadU(d, from + i), d, to + i);
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE::stream_lanes

namespace kvkeep::cpu::HWY_NAMESPACE {
using stream_lanes::StreamForward;
}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

#ifndef KVKEEP_HEADER_ONLY
HWY_EXPORT(StreamForward);
#endif

KVKEEP_INLINE void stream_forward(std::byte* to, const std::byte* from, std::int64_t bytes) {
  KVKEEP_DISPATCH(StreamForward)(reinterpret_cast<std::uint8_t*>(to), reinterpret_cast<const std::uint8_t*>(from),
                                 bytes);
}

KVKEEP_INLINE void flush_streams() { hwy::FlushStream(); }

}  // namespace kvkeep::cpu
#endif

#endif
