#pragma once
/// Re-rotation: rotates cached keys from one position to another. Opt-in: kept keys keep their rotation by default.
/// Source: StreamingLLM counts positions inside the cache; the KeyRerotation wrapper of kvpress does the same after
/// compression. Differs: starts from the stored position of each slot, so it is right at every event, not only at the
/// first.

#include <cstdint>
#include <span>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/rope.h"
#include "kvkeep/core/row.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Rotates the key of slot s from position `from[s]` to `to[s]`, in place, in fp32, for f32, f16 or bf16 keys of `dim`
/// components. A slot whose positions are equal keeps its bytes, so a second call with the same target changes nothing.
/// The attention scaling that a YaRN key already has is unchanged. Throws InvalidArgument, before the first key
/// changes, for a dtype that cannot be read, spans of unequal length, or more rotary pairs than dim / 2. Cost: one
/// sine-cosine pair in double per rotary pair of each slot that is rotated.
inline void rerotate(const SlotAddress& keys, Dtype dtype, std::int64_t dim, const RopeSpec& rope,
                     std::span<const std::int32_t> from, std::span<const std::int32_t> to) {
  KVKEEP_REQUIRE(from.size() == to.size(), "rerotate: ", from.size(), " old and ", to.size(),
                 " new positions; allowed one of each for every slot");
  KVKEEP_REQUIRE(rope.rotary_dim() <= dim, "rerotate: ", rope.inv_freq.size(), " rotary pairs for keys of ", dim,
                 " components; allowed at most ", dim / 2);
  with_dtype("rerotate", dtype, [&](auto type) {
    using Element = decltype(type);
    const auto pairs = static_cast<std::int64_t>(rope.inv_freq.size());
    for (std::size_t s = 0; s < from.size(); ++s) {
      if (from[s] == to[s]) continue;
      auto* key = reinterpret_cast<Element*>(keys.at(static_cast<std::int64_t>(s)));
      for (std::int64_t f = 0; f < pairs; ++f) {
        const double angle = rope_angle(std::int64_t{to[s]} - from[s], rope.inv_freq[static_cast<std::size_t>(f)]);
        const double cosine = std::cos(angle), sine = std::sin(angle);
        const auto [i, j] = rope_pair(rope.style, f, pairs);
        const auto a = static_cast<double>(static_cast<float>(key[i])),
                   b = static_cast<double>(static_cast<float>(key[j]));
        key[i] = static_cast<Element>(static_cast<float>(product(a, cosine) - product(b, sine)));
        key[j] = static_cast<Element>(static_cast<float>(product(b, cosine) + product(a, sine)));
      }
    }
  });
}

}  // namespace kvkeep
