#pragma once
/// Re-rotation: rotates cached keys from one position to another. Opt-in: kept keys keep their rotation by default.
/// Source: StreamingLLM counts positions inside the cache; the KeyRerotation wrapper of kvpress does the same after
/// compression. Differs: starts from the stored position of each slot, so it is right at every event, not only at the
/// first.

#include <cstdint>
#include <span>

#include "kvkeep/core/rope.h"
#include "kvkeep/core/row.h"

namespace kvkeep {

/// Rotates the key of slot s from position `from[s]` to `to[s]`, in place, in fp32, for f32, f16 or bf16 keys of `dim`
/// components. A slot whose positions are equal keeps its bytes, so a second call with the same target changes nothing.
/// The attention scaling that a YaRN key already has is unchanged. Throws InvalidArgument, before the first key
/// changes, for a dtype that cannot be read, spans of unequal length, or more rotary pairs than dim / 2. Cost: one
/// sine-cosine pair in double per rotary pair of each slot that is rotated.
void rerotate(const SlotAddress& keys, Dtype dtype, std::int64_t dim, const RopeSpec& rope,
              std::span<const std::int32_t> from, std::span<const std::int32_t> to);

}  // namespace kvkeep
