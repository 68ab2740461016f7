// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Vectorised inner loops of window attention. Queries are stored in panels: `width` of them
/// side by side, one per lane, so every logit is one chain of multiply-adds over the head dimension in ascending order.
/// Equal keys therefore score equal bits, wherever they are and whatever else is there.

#include <cstdint>

#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/row.h"
#include "kvkeep/simd/aligned.h"

namespace kvkeep::cpu {

/// Queries in the widest panel: two machine vectors.
std::int64_t panel_width();

/// Queries per panel for `queries` queries: one vector of at most 8 lanes if all fit, else two machine vectors. The
/// loops below take this width.
std::int64_t panel_width(std::int64_t queries);

/// Lanes of one vector of a panel.
std::int64_t panel_vector(std::int64_t width);

/// Scratch of panel_logits, in keys: the keys of one multiplication, and then as many queries as fit in two vectors of
/// 8 lanes.
inline constexpr std::int64_t kPanelKeys = 48;

/// Keys as they are stored in a cache.
struct Keys {
  SlotAddress slots;
  Dtype dtype;
  std::int64_t dim;
};

/// Prefetches a key that is read soon: while a block of keys is multiplied, the machine does not look that far ahead by
/// itself.
inline void fetch_key(const Keys& keys, std::int64_t slot) {
  const std::byte* at = keys.slots.at(slot);
  const std::int64_t bytes = keys.dim * (keys.dtype == Dtype::f32 ? 4 : 2);
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

/// logits[p][t - from][lane] = panel p's query . key t, for t in [from, to). panels: [count, dim, width]; logits:
/// `panel_stride` floats from panel to panel. Raises top[p][lane] to the largest logit seen. `widened`: scratch of
/// kPanelKeys * dim floats. Cost: 2 * count * width * dim flop per key.
void panel_logits(std::int64_t width, const Keys& keys, std::int64_t from, std::int64_t to, const float* panels,
                  std::int64_t count, std::int64_t panel_stride, float* logits, float* top, float* widened);

/// x[i] = cap * tanh(x[i] / cap), to about 2e-7 of itself; NaN stays.
void cap_logits(float* x, std::int64_t n, float cap);

/// One panel, in place: x = exp(x - top) for `slots` slots; sum[lane] gets the sums, in ascending order of slots.
void panel_exp(std::int64_t width, float* x, std::int64_t slots, const float* top, float* sum);

/// Maximum over the heads of one panel: head h has its `queries` (at most the panel's width) in lanes [h * stride, h *
/// stride + queries). largest[t][i] = max over h of x[t][h * stride + i], and of its previous value unless `first`;
/// top[i] likewise over t. Lanes from `queries` on become 0. Reads up to one panel's width past x[slots]. largest:
/// [slots, width]; top: [width].
void panel_group_max(std::int64_t width, const float* x, std::int64_t slots, std::int64_t heads, std::int64_t queries,
                     std::int64_t stride, bool first, float* largest, float* top);

/// usage[t] += x[t] * weight, folded to one vector per slot; usage: [slots, panel_vector(width)].
void panel_weigh(std::int64_t width, const float* x, std::int64_t slots, const float* weight, float* usage);

/// out[t] += sum of x[t] * weight over the lanes whose weight is not 0, always in the same order.
void panel_gather(std::int64_t width, const float* x, std::int64_t slots, const float* weight, float* out);

/// out[t] = sum over lanes of usage[t]; usage: [slots, panel_vector(width)].
void fold_lanes(std::int64_t width, const float* usage, std::int64_t slots, float* out);

/// to[i] += a * from[i].
void add_scaled(float* to, const float* from, float a, std::int64_t n);

/// to[i] = from[i] as fp32. dtype f32, f16, bf16, or whole blocks: q8_0, q4_0.
void widen(const void* from, Dtype dtype, std::int64_t n, float* to);

/// Norms of values under the output projection: sums[t][half] += |x[t]|, folded to one vector per slot. x: [slots,
/// width]; sums: [slots, width / 2].
void panel_sizes(const float* x, std::int64_t slots, float* sums);

// Not part of the interface. Scratch that one thread needs for softmaxes over panels of queries: first the sizes, so
// that they can be reported, then one allocation of that size.

inline constexpr std::int64_t kPanels = 2;  ///< panels that share one read of a key

/// Buffers kept besides the logits.
struct PanelExtras {
  bool usage = true;    ///< sums over queries
  bool maxima = false;  ///< the largest logits of a group
};

/// In floats.
struct PanelSizes {
  /// `slots`: longest stretch of a row; `window`: most queries. Rows with fewer of either fit as well.
  PanelSizes(const ModelSpec& spec, std::int64_t slots, std::int64_t window, PanelExtras extras) {
    const std::int64_t dim = spec.key_dim, rows = spec.group() * window, width = panel_width(rows),
                       held = rows > width ? kPanels : 1;
    queries = rows * dim;
    panels = held * dim * width;
    widened = kPanelKeys * dim;
    lanes = held * width;
    peak = width;
    logits = held * slots * width + width;  // panel_group_max reads past the last slot
    usage = extras.usage ? slots * panel_vector(width) : 0;
    largest = extras.maxima ? slots * width : 0;
  }
  std::int64_t queries, panels, widened, lanes, peak, logits, usage, largest;
  [[nodiscard]] std::int64_t total() const {
    return queries + panels + widened + 3 * lanes + peak + logits + usage + largest;
  }
};

struct PanelScratch {
  explicit PanelScratch(const PanelSizes& sizes) : arena(aligned_floats(sizes.total())) {
    float* at = arena.get();
    const auto take = [&at](std::int64_t floats) {
      float* taken = at;
      at += floats;
      return taken;
    };
    queries = take(sizes.queries);
    panels = take(sizes.panels);
    widened = take(sizes.widened);
    top = take(sizes.lanes);
    sum = take(sizes.lanes);
    weight = take(sizes.lanes);
    peak = take(sizes.peak);
    logits = take(sizes.logits);
    usage = take(sizes.usage);
    largest = take(sizes.largest);
  }
  PanelScratch(const PanelScratch&) = delete;
  PanelScratch& operator=(const PanelScratch&) = delete;

  AlignedFloats arena;
  float *queries, *panels, *widened;  ///< [G * W, D], [panels, D, width], [kPanelKeys, D]
  float *top, *sum, *weight;          ///< [panels, width]
  float* peak;                        ///< [width] top of `largest`
  float *logits, *usage, *largest;    ///< [panels, slots, width], [slots, panel_vector(width)], [slots, width]
};

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/simd/attention_lanes-inl.h"
#endif
