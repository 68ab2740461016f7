#pragma once
/// Tensor parallel: ranks that hold a part of the KV heads of every layer decide alike.

#include <memory>

#include "kvkeep/core/collective.h"
#include "kvkeep/policy/machine.h"

namespace kvkeep {

/// A machine whose decisions are those of one that held all heads: the same slots stay, bit for bit, on any number of
/// ranks. Rank r holds KV heads [r * kv_heads, (r + 1) * kv_heads), and the query heads that read them; the engine's
/// ModelSpec, cache, queries and output projections are of these heads alone. Use it as Provided::accelerator of a
/// keeper on every rank; the ranks' keepers get the same policy, sequences, tokens and calls.
///
/// Where rows decide by themselves, nothing is sent. Rows that decide together (TOVA's and RPC's mean over heads,
/// `share` across heads, AdaKV, ChunkKV's shared chunks, layers that narrow) gather once: f32 [slots] of each rank's
/// rows, and the places of protected slots. Rows that keep as many slots as their scores say (threshold, cache_mass)
/// gather these counts, AMS with `suffix_fill=max_global` f32 [rows]. A layer that narrows gathers each kind at most
/// once.
///
/// Throws RankError out of plan(), step() or narrow(), on every rank and before anything is written, if a rank does not
/// answer, failed before the gather, or is in another event (another policy, other tokens or lengths): end its
/// sequences everywhere. What no gather can see: a rank that fails after it, or, under policies whose rows decide by
/// themselves, a query that is not finite on one rank only.
///
/// `own`: the machine of this rank, null: the CPU. A GPU takes policies whose rows decide by themselves; others, and
/// learned routers and gates, which are of all heads, are refused by name.
[[nodiscard]] std::shared_ptr<Machine> across_ranks(std::shared_ptr<Collective> ranks,
                                                    std::shared_ptr<Machine> own = nullptr);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/across_ranks-inl.h"
#endif
