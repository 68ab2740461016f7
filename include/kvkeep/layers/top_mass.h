#pragma once
/// Per-head top-p caches: each KV head keeps as many slots of a prompt as hold a share of its attention.
/// Source: ASL's code (`cache_p`), not in its paper. Differs (`strict`): counts are rounded up to a multiple of 8, so
/// that the requested mass is always held; among equal masses the larger slot is first. NaN ranks last and counts as no
/// mass, so a row that holds less than the requested mass stays whole.

#include "kvkeep/core/decision.h"
#include "kvkeep/core/evidence.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/protect.h"

namespace kvkeep {

struct TopMassOptions {
  double mass = 0.9;                  ///< share of the window's attention that the slots that stay must hold, (0, 1]
  std::int32_t window = 32;           ///< W newest queries; their slots and slot 0 always stay
  Variant variant = Variant::strict;  ///< official: counts are rounded down, which can hold less than `mass`
};

/// Slots of every row, ascending: slot 0, the window, and the fewest others that reach `mass`, by their mean share of
/// attention over the window's queries and the group's heads. Rows may end up unequal. Throws InvalidArgument for a
/// mass outside (0, 1], a window below 1 or with fewer queries, and what attention_sum() refuses. Cost:
/// attention_sum(), and a sort of each row. Rows run in parallel.
[[nodiscard]] KeepSet keep_top_mass(const Evidence& evidence, TopMassOptions options = {});

/// The same if attention_sum() of the window is already known: `sums`, f32 [slots]. `limits`: rows that are not due
/// keep every slot; null: all are.
[[nodiscard]] KeepSet keep_top_mass(const RowTable& table, const Tensor& sums, TopMassOptions options = {},
                                    const Limits* limits = nullptr);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/layers/top_mass-inl.h"
#endif
