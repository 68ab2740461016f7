#pragma once
/// Vectorised inner loops of window attention. Queries lie in panels: `panel_width()` of them side by side, one per lane, so every logit is one
/// chain of multiply-adds over the head dimension in ascending order. Equal keys therefore score equal bits, wherever they lie and whatever else is there.

#include <cstdint>

#include "kvkeep/core/row.h"

namespace kvkeep::cpu {

/// Queries in a panel: two vectors of the machine.
std::int64_t panel_width();

/// Keys as they lie in a cache.
struct Keys {
  SlotAddress slots;
  ScalarType dtype;
  std::int64_t dim;
};

/// logits[p][t - from][lane] = panel p's query . key t, for t in [from, to). panels: [count, dim, width]; logits: `panel_stride` floats from panel to panel.
/// Raises top[p][lane] to the largest logit seen. `widened`: scratch of 6 * dim floats. Cost: 2 * count * width * dim flop a key.
void panel_logits(const Keys& keys, std::int64_t from, std::int64_t to, const float* panels, std::int64_t count, std::int64_t panel_stride, float* logits,
                  float* top, float* widened);

/// One panel, in place: x = exp(x - top) for `slots` slots; sum[lane] gets the sums, in ascending order of slots.
void panel_exp(float* x, std::int64_t slots, const float* top, float* sum);

/// Maximum over the heads of one panel: head h has its `queries` (at most the panel's width) in lanes [h * stride, h * stride + queries).
/// largest[t][i] = max over h of x[t][h * stride + i], and over what it holds unless `first`; top[i] likewise over t. Lanes from `queries` on become 0.
/// Reads up to one panel's width behind x[slots]. largest: [slots, width]; top: [width].
void panel_group_max(const float* x, std::int64_t slots, std::int64_t heads, std::int64_t queries, std::int64_t stride, bool first, float* largest, float* top);

/// usage[t][half] += x[t] * weight, folded to one vector a slot; usage: [slots, width / 2].
void panel_weigh(const float* x, std::int64_t slots, const float* weight, float* usage);

/// out[t] = sum over lanes of usage[t]; usage: [slots, width / 2].
void fold_lanes(const float* usage, std::int64_t slots, float* out);

/// to[i] += a * from[i].
void add_scaled(float* to, const float* from, float a, std::int64_t n);

/// to[i] = from[i] as fp32. dtype f32, f16 or bf16.
void widen(const void* from, ScalarType dtype, std::int64_t n, float* to);

}  // namespace kvkeep::cpu
