#pragma once
// Bodies of window_queries.h: compiled by src/score, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>

#include "kvkeep/core/header_only.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/score/window_queries.h"

namespace kvkeep::cpu {
namespace window_queries_detail {

inline Turns turns_of(const Evidence& evidence, const RopeSpec& rope, const QueryView& queries, std::int32_t window) {
  KVKEEP_REQUIRE(evidence.basis == QueryBasis::post_rope || rope.stated(),
                 "window_attention: queries are taken before RoPE, which the model spec does not state; allowed with "
                 "rope.inv_freq, RopeStyle::none for a layer without RoPE, or QueryBasis::post_rope");
  Turns turns{.rope = &rope};
  const auto pairs = rope.inv_freq.size();
  if (evidence.basis == QueryBasis::post_rope || pairs == 0) return turns;
  turns.window = window;
  turns.cosines.resize(static_cast<std::size_t>(window) * pairs);
  turns.sines.resize(turns.cosines.size());
  for (std::int32_t i = 0; i < window; ++i)
    rope_at(rope, queries.position(queries.count - window + i),
            turns.cosines.data() + static_cast<std::size_t>(i) * pairs,
            turns.sines.data() + static_cast<std::size_t>(i) * pairs);
  return turns;
}

}  // namespace window_queries_detail

KVKEEP_INLINE bool same_positions(const QueryView& a, const QueryView& b) {
  if (a.count != b.count) return false;
  for (std::int32_t i = 0; i < a.count; ++i)
    if (a.position(i) != b.position(i)) return false;
  return true;
}

KVKEEP_INLINE WindowTurns::WindowTurns(const Evidence& evidence, std::span<const RowWindow> windows)
    : turns_(evidence.table.groups.size()), index_(evidence.table.groups.size()) {
  const std::vector<RowGroup>& groups = evidence.table.groups;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    std::int32_t widest = 0;
    for (std::int32_t h = 0; h < evidence.spec.kv_heads; ++h)
      widest = std::max(widest, windows[static_cast<std::size_t>(groups[g].first_row + h)].queries);
    index_[g] = g;
    const RopeSpec& rope = evidence.spec.rope_of(groups[g].layer);
    for (std::size_t e = 0; e < g; ++e)
      if (groups[e].sequence == groups[g].sequence && &evidence.spec.rope_of(groups[e].layer) == &rope &&
          same_positions(groups[e].queries, groups[g].queries)) {
        index_[g] = index_[e];
        break;
      }
    Turns& known = turns_[index_[g]];
    if (known.window < widest) known = window_queries_detail::turns_of(evidence, rope, groups[g].queries, widest);
  }
}

KVKEEP_INLINE void gather_queries(const Evidence& evidence, const QueryView& view, std::int32_t head,
                                  std::int32_t window, const Turns& turns, float* out) {
  const ModelSpec& spec = evidence.spec;
  const auto dim = static_cast<std::size_t>(spec.key_dim);
  const auto pairs = turns.rope == nullptr ? 0 : static_cast<std::int64_t>(turns.rope->inv_freq.size());
  const auto scale = static_cast<float>(spec.scale());
  with_dtype("window_attention", view.dtype, [&](auto type) {
    float* q = out;
    const std::int64_t skip = turns.window - window;
    for (std::int32_t g = 0; g < spec.group(); ++g)
      for (std::int32_t i = 0; i < window; ++i, q += dim) {
        const auto* from =
            reinterpret_cast<const decltype(type)*>(view.at(view.count - window + i, head * spec.group() + g));
        for (std::size_t d = 0; d < dim; ++d) q[d] = static_cast<float>(from[d]);
        if (!turns.cosines.empty())
          rope_rotate(turns.rope->style, pairs, turns.cosines.data() + (skip + i) * pairs,
                      turns.sines.data() + (skip + i) * pairs, q);
        for (std::size_t d = 0; d < dim; ++d) {
          KVKEEP_REQUIRE(std::isfinite(q[d]), "window_attention: query of head ", head * spec.group() + g,
                         " at position ", view.position(view.count - window + i), " holds ", q[d], " in component ", d,
                         "; allowed finite numbers");
          q[d] *= scale;
        }
      }
  });
}

}  // namespace kvkeep::cpu
