// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Tensor parallel: ranks that hold a part of the KV heads of every layer decide alike.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/policy/machine.h"

namespace kvkeep {

/// Ranks 0 to size() - 1. All of them make the same calls in the same order; one call at a time.
class Collective {
 public:
  virtual ~Collective() = default;
  [[nodiscard]] virtual std::int32_t rank() const = 0;
  [[nodiscard]] virtual std::int32_t size() const = 0;

  /// Fills `all` with the bytes of every rank, in the order of ranks: size() times as many as `mine`, whose size is the
  /// same on every rank. Returns once they are there. Throws RankError if a rank has died, fails, or does not answer
  /// within a time that the collective sets; its later calls may then throw too.
  virtual void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;
};

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
