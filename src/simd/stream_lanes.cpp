// Vectorised for the machine it runs on: compiled once per instruction set, chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "stream_lanes.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include <cstring>

#include "stream_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void StreamForward(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (bytes % lanes != 0 || reinterpret_cast<std::uintptr_t>(to) % static_cast<std::uintptr_t>(lanes) != 0) {
    std::memmove(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  for (std::int64_t i = 0; i < bytes; i += lanes) hn::Stream(hn::LoadU(d, from + i), d, to + i);
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

HWY_EXPORT(StreamForward);

void stream_forward(std::byte* to, const std::byte* from, std::int64_t bytes) {
  HWY_DYNAMIC_DISPATCH(StreamForward)(reinterpret_cast<std::uint8_t*>(to), reinterpret_cast<const std::uint8_t*>(from),
                                      bytes);
}

void flush_streams() { hwy::FlushStream(); }

}  // namespace kvkeep::cpu
#endif
