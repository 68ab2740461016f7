// SPDX-License-Identifier: Apache-2.0
#include "prepare.h"

#include "element.cuh"
#include "kvkeep/core/protect.h"
#include "launch.cuh"
#include "team.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {
namespace {

using tuning::kTurnThreads;

/// Writes the newest positions of one row; the older ones are already there.
__device__ void append_positions(const Row& row, const NewestPositions& newest) {
  auto* to = const_cast<std::int32_t*>(row.positions) + row.length - newest.slots;
  for (std::int32_t n = 0; n < newest.count; ++n) {
    const PositionRun run = newest.runs[n];
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < run.count; i += kTurnThreads) to[i] = run.position + i;
    to += run.count;
  }
}

/// Finds the pinned slots of a row, whose positions are all there.
__device__ void settle_limit(const PrepareArguments& a, std::int64_t r) {
  const Row& row = a.evidence.rows[r];
  const PinnedSpans& pins = a.pins[r / a.evidence.kv_heads];
  RowLimit limit = a.given[r];
  if (limit.due)
    protect_pinned(row, pins.spans, pins.count, limit.budget < row.length ? limit.budget : row.length, limit.guarded,
                   pins.ranges + r % a.evidence.kv_heads * pins.count);
  a.settled[r] = limit;
}

/// One token of a group: all its heads are at the same position.
template <class From>
__device__ void turn_token(const PrepareArguments& a, std::int64_t group, std::int32_t i, RopeTurn* turns) {
  const EvidenceArguments& e = a.evidence;
  const std::int32_t heads = e.query_heads();
  const QueryView& view = e.queries[group];
  const std::int32_t token = view.count - a.window + i;
  if (a.normalisers != nullptr)
    for (auto h = static_cast<std::int32_t>(threadIdx.x); h < heads; h += kTurnThreads)
      a.normalisers[(group * heads + h) * a.window + i] =
          token >= 0 ? view.normalisers[view.index(token) * heads + h] : 0.0F;
  if (a.queries == nullptr) return;
  __syncthreads();
  const RopeView rope = a.turn ? e.ropes[group] : RopeView();
  if (token >= 0)
    for (auto f = static_cast<std::int32_t>(threadIdx.x); f < rope.pairs; f += kTurnThreads)
      turns[f] = rope_turn(view.position(token), rope.inv_freq[f], rope.attention_scaling);
  __syncthreads();
  for (auto at = static_cast<std::int32_t>(threadIdx.x); at < heads * e.dim; at += kTurnThreads) {
    const std::int32_t head = at / e.dim, d = at - head * e.dim;
    float x = 0;
    if (token >= 0) {
      const auto* q = reinterpret_cast<const From*>(view.at(token, head));
      x = to_float(q[d]);
      if (d < 2 * rope.pairs) {
        const std::int32_t f = rope.style == RopeStyle::half ? d % rope.pairs : d / 2;
        const auto [first, second] = rope_pair(rope.style, f, rope.pairs);
        const float p = to_float(q[first]), s = to_float(q[second]);
        x = d == first ? p * turns[f].cosine - s * turns[f].sine : s * turns[f].cosine + p * turns[f].sine;
      }
    }
    a.queries[((group * heads + head) * a.window + i) * e.dim + d] = x;
  }
}

/// The first blocks have one row each, the others one token of a group.
template <class From>
__global__ void __launch_bounds__(kTurnThreads)
    prepare_kernel(PrepareArguments a, std::int64_t rows, std::int64_t tokens) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(RopeTurn, turns, 128);
  const EvidenceArguments& e = a.evidence;
  for (std::int64_t n = blockIdx.x; n < rows + tokens; n += gridDim.x) {
    if (n >= rows) {
      const std::int64_t group = (n - rows) / a.window;
      turn_token<From>(a, group, static_cast<std::int32_t>(n - rows - group * a.window), turns);
      continue;
    }
    if (a.newest != nullptr) {
      append_positions(e.rows[n], a.newest[n / e.kv_heads]);
      __syncthreads();
    }
    if (threadIdx.x >= 32) continue;
    if (a.pins != nullptr && threadIdx.x == 0) settle_limit(a, n);
    __syncwarp();  // e.limits are what was settled
    if (a.windows != nullptr) {
      const Row& row = e.rows[n];
      const QueryView& view = e.queries[n / e.kv_heads];
      const RowWindow seen = a.fresh ? fresh_window_of(row, view, a.window, WarpTeam{})
                                     : window_of(row, view, e.limits[n], a.window, a.official, WarpTeam{});
      if (threadIdx.x == 0) a.windows[n] = seen;
    }
  }
}

}  // namespace

void launch_prepare(const PrepareArguments& arguments, Stream stream) {
  const EvidenceArguments& e = arguments.evidence;
  check_dim("prepare", e.dim);
  KVKEEP_REQUIRE(!arguments.turn || e.ropes != nullptr,
                 "prepare: queries are turned without ropes; allowed with those "
                 "of every group");
  check_wide("prepare", "queries", e.query);
  const std::int64_t rows = arguments.newest != nullptr || arguments.windows != nullptr ? e.count : 0;
  const bool tokens_wanted = arguments.queries != nullptr || arguments.normalisers != nullptr;
  const std::int64_t tokens = tokens_wanted ? std::int64_t{e.count} / e.kv_heads * arguments.window : 0;
  with_wide_element(e.query, [&](auto from) {
    launch("prepare", prepare_kernel<decltype(from)>, {.blocks = blocks_for(rows + tokens), .threads = kTurnThreads},
           stream, arguments, rows, tokens);
  });
}

}  // namespace kvkeep::cuda
