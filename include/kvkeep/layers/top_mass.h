#pragma once
/// Per-head top-p caches: each KV head keeps as many slots of a prompt as hold a share of its attention.
/// Source: ASL's code (`cache_p`), not in its paper. Differs (`strict`): counts are rounded up to a multiple of 8, so
/// that the asked mass is always held; equal masses: the larger slot. NaN ranks last and counts as no mass, so a row
/// that holds less than was asked for stays whole.

#include "kvkeep/core/decision.h"
#include "kvkeep/core/evidence.h"
#include "kvkeep/core/variant.h"

namespace kvkeep {

struct TopMassOptions {
  double mass = 0.9;                  ///< share of the window's attention that what stays must hold, (0, 1]
  std::int32_t window = 32;           ///< W newest queries; their slots always stay, and slot 0
  Variant variant = Variant::strict;  ///< official: counts are rounded down, which can hold less than asked
};

/// Slots of every row, ascending: slot 0, the window, and the fewest others, by their mean share of the attention of
/// the window's queries and the group's heads, that reach `mass`. Rows may end up unequal. Throws InvalidArgument for a
/// mass outside (0, 1], a window below 1 or with fewer queries, and what attention_sum() refuses. Cost:
/// attention_sum(), and a sort of each row. Rows run in parallel.
[[nodiscard]] KeepSet keep_top_mass(const Evidence& evidence, TopMassOptions options = {});

/// The same where attention_sum() of the window was taken already: `sums`, f32 [slots].
[[nodiscard]] KeepSet keep_top_mass(const RowTable& table, const Tensor& sums, TopMassOptions options = {});

}  // namespace kvkeep
