// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Copies that bypass the caches.

#include <cstddef>
#include <cstdint>

namespace kvkeep::cpu {

/// Copies `bytes` forward with stores that do not fetch what they overwrite; `to` may overlap `from` if it is before
/// it. Falls back to memmove if `to` or `bytes` is not a multiple of the machine's vector.
void stream_forward(std::byte* to, const std::byte* from, std::int64_t bytes);

/// Makes streamed bytes visible to other threads.
void flush_streams();

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/simd/stream_lanes-inl.h"
#endif
