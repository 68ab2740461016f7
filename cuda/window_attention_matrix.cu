// SPDX-License-Identifier: Apache-2.0
// Window attention on matrix units, for keys of 16 and 8 bits. For one row:
//
//   R  rows: a KV head of a sequence in a layer (e.count)   W  queries of its window (plan.window), the newest last
//   T  slots of the row (row.length), t and u               G  query heads that read its KV head (e.group)
//   D  components of a head (e.dim)                         n  a query of one head; G W of them (plan.total)
//
//   share[n, t] = exp(scale q_n.k_t) / (exp(sink of n's head) + sum of exp(scale q_n.k_u) over the slots u that n sees:
//                 those at or before it)
//   usage[t]    = mean of share[n, t] over all n; on the suffix, t >= plan.history, over those later than t
//   newest[t]   = mean over the G heads of the newest query's share
//   sum[t]      = sum over the W queries of the mean over the G heads
//   history[t]  = as usage, but only slots [plan.from, plan.to) are seen, and the newest query counts several times
//
// A slot whose logit is NaN or infinite counts as if n did not see it. Exponentials are powers of two: with the product
// x = q_n.k_t, the logit is x * factor, factor = scale log2(e), and the share is 2^(x * factor + shift).
//
//   split       q_n / 2^e = high + low, in the keys' dtype; factor *= 2^e         (window_attention_queries.cuh)
//   statistics  for each part of a row (512 slots or a multiple of that):         (left out if log_sum_exp was given)
//                 each warp, for its 32 slots in every 256, for every 16 queries:
//                   x = q.k; top = max(old, x * factor); sum = sum * 2^(old - top) + sum of 2^(x * factor - top)
//                 the 8 warps of the block join their (top, sum), the last block that arrives at a row joins the parts:
//                   shift = -(top + log2(sum + 2^(sink log2(e) - top)))
//   weigh       shift += log2(weight of n)                                      (left out if no weights were given)
//   columns     each warp, for its 32 slots in every 256, for every 16 queries:
//                   x = q.k; s = 2^(x * factor + shift); column[t] += s; for the newest query newest[t] += s / G
//                 write_slot() divides column[t] by the queries that count
//
// Where both passes would give every block a whole row, one launch makes them: the block takes its row's statistics,
// and goes back over the row for the columns, from its last slots on, whose keys are still in shared memory. The slots
// before them have been read least long ago, and may still be in the L2. Its queries stay where they are. All bits are
// those of two launches.
//
// A warp reads the keys of its slots once, into registers, and all queries pass by in shared memory: a QueryTile has 16
// of them. While they do, the keys of its next slots are copied to shared memory, each word by the lane that takes it
// from there, so that no warp waits for another; keys for which there is no room are read when they are needed. Above
// 128 components a warp has 16 slots, and 8 warps have 128. Where shared memory does not hold all tiles, `columns`
// brings them again for every round of 256 slots, and `statistics` reads the keys again for every batch of tiles.
//
// No logit leaves the registers. The G W logits of a slot are more bytes than its key: with W = 32, G = 4 and D = 128
// in 16 bits, writing and reading them would move 1024 bytes, where the second pass reads 256 bytes of key again.
//
// Queries that were turned by RoPE here are f32. One number of 16 bits would lose digits, so each is the sum of two,
// and both multiply the same key into the same sum. A tile whose low numbers are all 0 is multiplied once.
//
// kFarAbove: where every query sees every slot, `statistics` keeps the `top` that the warp had before, and only adds up
// 2^(x * factor - top), which may be above 1. That is right while the sum fits f32: a tile's sum for a query must stay
// below 2^100. If one reaches it, or is NaN, nothing is added. The warp takes the tile again, looks at every logit, and
// raises `top` (take_all(), take_some()). `columns` takes a tile again if a share is no number (give_all(),
// give_some()).
//
// A product is mma.m16n8k16: 16 queries by 8 slots over 16 components. Two of them, p = 0 and 1, cover span s, which is
// components 32 s to 32 s + 31. Lane 4 g + c has (g = 0..7, c = 0..3, d = 32 s + 8 c + 4 p; b counts slots by eight):
//
//                                             right[0]: d, d+1                    of the key of slot 8 b + g
//                                             right[1]: d+2, d+3
//   left[0]: d, d+1    left[2]: d+2, d+3      x[b][0]          x[b][1]            query g
//   left[1]: d, d+1    left[3]: d+2, d+3      x[b][2]          x[b][3]            query g + 8
//                                             slot 8 b + 2 c   slot 8 b + 2 c + 1
//
// mma calls these four components 2c, 2c+1, 2c+8 and 2c+9. Any other order serves, as long as queries and keys have the
// same: with this one a lane reads 16 neighbouring bytes of a key for both products. The four lanes of one g have the
// logits of a query, the eight of one c those of a slot: shuffles among them add up over slots or over queries.

#include <algorithm>

#include "launch.cuh"
#include "window_attention_warp.cuh"

namespace kvkeep::cuda::attention {
namespace {

/// Divides the workspace. Returns its size.
std::int64_t divide(const EvidenceArguments& e, std::int32_t window, std::int32_t parts, void* workspace,
                    SplitQueries& queries, float2*& partial) {
  WorkspaceParts of(workspace);
  const std::int64_t products = std::int64_t{e.group} * window;
  queries.most = static_cast<std::int32_t>((products + kTileQueries - 1) / kTileQueries);
  with_spans(e.dim, [&](auto spans) {
    using Tile = QueryTile<spans()>;
    const std::int64_t all = std::int64_t{e.count} * queries.most;
    queries.tiles = reinterpret_cast<std::byte*>(of.take<Tile>(all));
    queries.low = of.take<uint4>(all * Tile::kWords);
  });
  queries.plans = of.take<AttentionPlan>(e.count);
  queries.arrived = of.take<std::int32_t>(e.count);
  partial = of.take<float2>(e.count * parts * products);
  return of.bytes();
}

/// Brings `count` tiles of a row's queries from `first` on to shared memory. The block waits before and after.
template <int kSpans>
__device__ void bring(const SplitQueries& queries, const BlockWork& work, std::int32_t first, std::int32_t count,
                      std::byte* to) {
  using Tile = QueryTile<kSpans>;
  const Tile* from = queries.of<kSpans>() + work.tile0 + first;
  auto* words = reinterpret_cast<uint4*>(to);
  __syncthreads();
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count * Tile::kAll; i += kMatrixThreads)
    copy_ahead(words + i, reinterpret_cast<const uint4*>(from) + i);
  if (work.split) {
    const uint4* low = queries.low + (work.tile0 + first) * Tile::kWords;
    words += work.at_a_time * Tile::kAll;
    const auto all = static_cast<std::uint32_t>(count * Tile::kWords);
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x; i < all; i += kMatrixThreads)
      if ((from[i / Tile::kWords].flags.x & kSplit) != 0) copy_ahead(words + i, low + i);
  }
  wait_for_copies();
  __syncthreads();
}

/// Writes the statistics of the part of a row that begins at `begin` for `count` tiles of queries from `first` on: what
/// the warps found.
template <class Shared>
__device__ void combine_warps(const AttentionMatrixTask& m, const BlockWork& work, std::int32_t begin,
                              std::int32_t first, std::int32_t count, std::byte* shared, const Shared& parts) {
  const auto* tops = reinterpret_cast<const float*>(shared + parts.tops);
  const auto* sums = reinterpret_cast<const float*>(shared + parts.sums);
  const std::int32_t each = Shared::queries_of(m.resident, m.queries.most);
  const std::int32_t left = work.plan.total - first * kTileQueries,
                     queries = left < count * kTileQueries ? left : count * kTileQueries;
  float2* to = m.of.partial + (work.row * m.of.parts + begin / work.part) * m.of.most + first * kTileQueries;
  __syncthreads();
  for (auto q = static_cast<std::int32_t>(threadIdx.x); q < queries; q += kMatrixThreads) {
    float top = kNothing, sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w * each + q]);
#pragma unroll
    for (int w = 0; w < kWarps && top > kNothing; ++w)
      sum = fmaf(sums[w * each + q], exp2_of(tops[w * each + q] - top), sum);
    to[q] = {top, sum};
  }
  __syncthreads();
}

/// Sets the shifts of the row's queries from its parts in ascending order: of the tiles `near`, or of all that wait.
template <int kSpans>
__device__ void set_shifts(const AttentionMatrixTask& m, const BlockWork& work, QueryTile<kSpans>* near) {
  const AttentionPlan& plan = work.plan;
  const AttentionTask& task = m.of;
  const std::int64_t r = work.row;
  const std::int32_t all = pieces(plan.row->length, work.part);
  QueryTile<kSpans>* const tiles = near != nullptr ? near : m.queries.of<kSpans>() + work.tile0;
  for (auto n = static_cast<std::int32_t>(threadIdx.x); n < plan.total; n += kMatrixThreads) {
    float top = kNothing, sum = 0;
    for (std::int32_t p = 0; p < all; ++p)
      top = fmaxf(top, __ldcg(task.partial + (r * task.parts + p) * task.most + n).x);
    for (std::int32_t p = 0; p < all && top > kNothing; ++p) {
      const float2 of = __ldcg(task.partial + (r * task.parts + p) * task.most + n);
      sum = fmaf(of.y, exp2_of(of.x - top), sum);
    }
    sum += sum > 0 ? sink_of(task, plan, n, top / kLog2OfE) : 0.0F;
    float shift = sum > 0 ? -(top + log2f(sum)) : kNothing;
    if (task.kind == Kind::history && plan.query_of(n) == plan.window - 1)
      shift += log2f(static_cast<float>(task.newest_counts));
    tiles[n / kTileQueries].lines[n % kTileQueries].shift = shift;
  }
}

/// Counts the parts of a row that the block looked at as there. The block that finds all of them there sets the shifts
/// of the row's queries.
template <int kSpans>
__device__ void arrive(const AttentionMatrixTask& m, const BlockWork& work) {
  const std::int64_t r = work.row;
  const std::int32_t all = pieces(work.plan.row->length, work.part), parts = pieces(work.stop - work.begin, work.part);
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();  // hands on, with the count, what the block wrote before the barrier
    last = atomicAdd(m.queries.arrived + r, parts) + parts == all;
    __threadfence();  // what other blocks handed on is there, and after the next barrier it is for the whole block
  }
  if (__syncthreads_or(last ? 1 : 0) != 0) set_shifts<kSpans>(m, work, nullptr);
}

/// Fills `work` with the block's next. Returns false if there is none. The whole block calls, and waits. `columns` goes
/// backwards: the last rows that `statistics` read may still be in the L2.
template <Pass kPass, std::int32_t kRound>
__device__ bool find_work(const AttentionMatrixTask& m, BlockWork& work) {
  const AttentionTask& task = m.of;
  const std::int64_t all = std::int64_t{task.e.count} * m.pieces;
  __syncthreads();
  std::int64_t number = work.number, r = 0;
  std::int32_t length = 0, part = kRound, begin = 0;
  bool some = false;
  for (; !some && number < all; number += gridDim.x) {
    const auto n = static_cast<std::uint32_t>(kPass == Pass::columns ? all - 1 - number : number);
    r = n / static_cast<std::uint32_t>(m.pieces);
    if (!task.e.due(r)) continue;
    const std::int32_t total = m.queries.plans[r].total;
    length = task.e.rows[r].length;
    if constexpr (kPass != Pass::columns) part = part_of(length);
    begin = static_cast<std::int32_t>(n - static_cast<std::uint32_t>(r * m.pieces)) * m.at_once * part;
    some = begin < length && (kPass != Pass::statistics || total > 0);
  }
  __syncthreads();
  if (!some) return false;
  if (threadIdx.x == 0) {
    const Row& row = task.e.rows[r];
    const std::int32_t stop = kPass == Pass::both ? length : begin + m.at_once * part;
    work.plan = m.queries.plans[r];
    work.number = number;
    work.row = r;
    work.tile0 = r * m.queries.most;
    work.part = part;
    work.kind = task.kind;
    work.begin = begin;
    work.stop = stop < length ? stop : length;
    work.end = work.plan.to < work.stop ? work.plan.to : work.stop;
    work.keys = row.keys;
    work.positions = row.positions;
    work.aligned = is_aligned(row.keys);
  }
  __syncthreads();
  return true;
}

/// Finds out if the row's queries need low numbers. The whole block calls, and waits.
template <int kSpans>
__device__ void find_split(const AttentionMatrixTask& m, BlockWork& work) {
  std::int32_t flags = 0;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < work.tiles(); i += kMatrixThreads)
    flags |= m.queries.of<kSpans>()[work.tile0 + i].flags.x;
  const bool split = __syncthreads_or(flags & kSplit) != 0;
  if (threadIdx.x == 0) {
    work.split = split;
    work.at_a_time = split ? m.resident / 2 : m.resident;
  }
  __syncthreads();
}

/// One pass over the keys, or both.
template <class T, int kSpans, Pass kPass>
class BlockState {
  using Shared = AttentionMatrixShared<T, kSpans, kPass>;
  using Warp = WarpState<T, kSpans, kPass>;
  static constexpr std::int32_t kRound = Shared::kRound;

 public:
  __device__ BlockState(const AttentionMatrixTask& m, const Shared& parts)
      : m_(m),
        parts_(parts),
        shared_(dynamic_shared()),
        work_(*reinterpret_cast<BlockWork*>(shared_ + Shared::kWork)),
        own_(Warp::index() * Shared::kSlots),
        warp_(m, shared_, parts) {}

  __device__ void run() {
    if (threadIdx.x == 0) work_.number = blockIdx.x;
    while (find_work<kPass, kRound>(m_, work_)) {
      warp_.ask(work_.begin + own_, work_.end);
      find_split<kSpans>(m_, work_);
      if constexpr (kPass != Pass::columns) take();
      if constexpr (kPass == Pass::statistics) arrive<kSpans>(m_, work_);
      if constexpr (kPass == Pass::both) {
        set_shifts<kSpans>(m_, work_, stay() ? reinterpret_cast<QueryTile<kSpans>*>(shared_ + parts_.tiles) : nullptr);
        __syncthreads();
        // From the last round on, whose keys are still there.
        for (hold(kRoundHeld, (work_.stop - 1) / kRound * kRound); round() >= 0; hold(kRoundHeld, round() - kRound))
          give();
      }
      if constexpr (kPass == Pass::columns)
        for (hold(kRoundHeld, work_.begin); round() < work_.stop; hold(kRoundHeld, round() + kRound)) give();
    }
  }

 private:
  /// Whether all tiles are in shared memory together, so that those for the statistics serve for the columns.
  [[nodiscard]] __device__ bool stay() const { return work_.tiles() <= work_.at_a_time; }
  [[nodiscard]] __device__ std::int32_t batch(std::int32_t first) const {
    const std::int32_t left = work_.tiles() - first;
    return left < work_.at_a_time ? left : work_.at_a_time;
  }

  /// Statistics of all parts.
  __device__ void take() {
    for (std::int32_t s = 0; s < work_.tiles(); s += work_.at_a_time) {
      const std::int32_t count = batch(s);
      bring<kSpans>(m_.queries, work_, s, count, shared_ + parts_.tiles);
      for (std::int32_t begin = work_.begin; begin < work_.stop; begin += work_.part) {
        const std::int32_t end = work_.end - begin < work_.part ? work_.end : begin + work_.part;
        warp_.begin(s, count);
        for (std::int32_t slot0 = begin + own_; slot0 < end; slot0 += kRound) {
          warp_.template read<Pass::statistics>(slot0, end);
          std::int32_t next = slot0 + kRound;
          if (next >= work_.end) {
            if (s + count < work_.tiles())
              next = work_.begin + own_;  // for other tiles
            else if (kPass == Pass::both && m_.ahead < Shared::kBlocks)
              next = slot0;  // for the columns, which find these keys where they are if there was room for all
          }
          warp_.ask(next, work_.end);
          warp_.take(count, slot0 == begin + own_);
        }
        combine_warps(m_, work_, begin, s, count, shared_, parts_);
      }
    }
  }

  /// The round whose columns are made, and the first of the tiles that give them: numbers that each thread has in
  /// shared memory, where they take no registers.
  enum Held : std::uint8_t { kRoundHeld, kTileHeld };
  [[nodiscard]] __device__ volatile std::int32_t* held(Held which) const {
    return reinterpret_cast<volatile std::int32_t*>(shared_ + Shared::kHeld) + which * kMatrixThreads + threadIdx.x;
  }
  [[nodiscard]] __device__ std::int32_t round() const { return *held(kRoundHeld); }
  [[nodiscard]] __device__ std::int32_t tile() const { return *held(kTileHeld); }
  __device__ void hold(Held which, std::int32_t number) { *held(which) = number; }

  /// The columns of one round of slots.
  __device__ void give() {
    typename Warp::Sums columns = {};
    warp_.begin_newest();
    for (hold(kTileHeld, 0); tile() < work_.tiles(); hold(kTileHeld, tile() + work_.at_a_time)) {
      const std::int32_t count = batch(tile());
      if (!stay() || (kPass == Pass::columns && round() == work_.begin))
        bring<kSpans>(m_.queries, work_, tile(), count, shared_ + parts_.tiles);
      if (const std::int32_t slot0 = round() + own_; slot0 < work_.end) {
        if (tile() == 0) warp_.template read<Pass::columns>(slot0, work_.end);
        if (tile() + count == work_.tiles() && (kPass == Pass::columns || slot0 >= kRound))
          warp_.ask(kPass == Pass::columns ? slot0 + kRound : slot0 - kRound, work_.end);
        warp_.give(count, columns);
      }
    }
    warp_.write(columns, round() + own_, work_.stop);
  }

  const AttentionMatrixTask& m_;
  const Shared& parts_;
  std::byte* shared_;
  BlockWork& work_;
  std::int32_t own_;
  Warp warp_;
};

template <class T, int kSpans, Pass kPass>
__global__ void __launch_bounds__(kMatrixThreads, 2) attention_matrix_kernel(AttentionMatrixTask m) {
  wait_for_earlier_kernels();
  const AttentionMatrixShared<T, kSpans, kPass> parts(m.resident, m.queries.most, m.ahead);
  BlockState<T, kSpans, kPass>(m, parts).run();
}

/// What the current device has.
std::int32_t of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, attribute, device);
  KVKEEP_REQUIRE_AS(DeviceError, status == cudaSuccess, "window_attention: ", cudaGetErrorString(status));
  return value;
}

/// Tiles of queries that a block keeps in shared memory: so many that two blocks fit a multiprocessor. Where that is
/// not all of them, they come in turns of about the same size.
template <class Shared>
std::int32_t resident_tiles(std::int32_t wanted, std::int32_t tiles, std::size_t limit) {
  std::int32_t most = 2;
  while (most < wanted && Shared(most + 2, tiles, 1).bytes <= limit) most += 2;
  const std::int32_t turns = pieces(wanted, most);
  return pieces(pieces(wanted, turns), 2) * 2;
}

/// How many of a row's `all` pieces of `slots` a block takes so that `rows` rows take the shortest time, if `blocks`
/// run at the same time and the beginning of each takes as long as kMatrixStart slots.
std::int32_t pieces_at_once(std::int64_t rows, std::int32_t all, std::int32_t slots, std::int64_t blocks) {
  std::int32_t best = 1;
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
  for (std::int32_t n = 1; n <= all && n * slots <= std::max(slots, tuning::kMatrixSlots); ++n) {
    const std::int64_t turns = (rows * pieces(all, n) + blocks - 1) / blocks,
                       time = turns * (n * slots + tuning::kMatrixStart);
    if (time < shortest) shortest = time, best = n;
  }
  return best;
}

/// Blocks that run at the same time.
std::int64_t blocks_at_once() { return std::int64_t{2} * of_device(cudaDevAttrMultiProcessorCount); }

/// Whether both passes take the shortest time with a whole row for every block, so that one launch makes them.
bool is_one_launch(const EvidenceArguments& e, std::int32_t parts, std::int32_t round) {
  const std::int32_t rounds = pieces(e.longest, round);
  const std::int64_t blocks = blocks_at_once();
  return pieces_at_once(e.count, parts, part_of(e.longest), blocks) == parts &&
         pieces_at_once(e.count, rounds, round, blocks) == rounds;
}

template <class T, int kSpans, Pass kPass>
void launch_pass(const char* name, AttentionMatrixTask m, Stream stream) {
  // Queries that come in the keys' own dtype need no second number; those that were turned do.
  const bool likely_split = m.of.queries != nullptr || with_element(m.of.e.query, [](auto x) {
                              return !std::is_same_v<decltype(x), MatrixElement<T>>;
                            });
  using Shared = AttentionMatrixShared<T, kSpans, kPass>;
  const std::size_t limit =  // a block has 1 KiB more than it asks for
      (static_cast<std::size_t>(of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin)) - 1024) / 2;
  m.resident = resident_tiles<Shared>(likely_split ? m.queries.most * 2 : m.queries.most, m.queries.most, limit);
  for (m.ahead = 1; m.ahead < Shared::kBlocks && Shared(m.resident, m.queries.most, 2 * m.ahead).bytes <= limit;)
    m.ahead *= 2;
  const std::int32_t all = kPass == Pass::columns ? pieces(m.of.e.longest, Shared::kRound) : m.of.parts;
  m.at_once = kPass == Pass::both
                  ? all
                  : pieces_at_once(m.of.e.count, all, kPass == Pass::columns ? Shared::kRound : part_of(m.of.e.longest),
                                   blocks_at_once());
  m.pieces = pieces(all, m.at_once);
  // For two blocks on a multiprocessor as little as possible of its shared memory may serve as L1.
  const cudaError_t status =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(attention_matrix_kernel<T, kSpans, kPass>),
                           cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  KVKEEP_REQUIRE_AS(DeviceError, status == cudaSuccess, name, ": ", cudaGetErrorString(status));
  launch(name, attention_matrix_kernel<T, kSpans, kPass>,
         {.blocks = blocks_for(std::int64_t{m.of.e.count} * m.pieces),
          .threads = kMatrixThreads,
          .shared_bytes = Shared(m.resident, m.queries.most, m.ahead).bytes},
         stream, m);
}

}  // namespace

std::int64_t matrix_workspace_bytes(const EvidenceArguments& e, std::int32_t window, std::int32_t parts) {
  SplitQueries queries{};
  float2* partial = nullptr;
  return divide(e, window, parts, nullptr, queries, partial);
}

void launch_on_matrix_units(const AttentionTask& task, void* workspace, Stream stream) {
  AttentionMatrixTask m{};
  m.of = task;
  divide(task.e, task.window, task.parts, workspace, m.queries, m.of.partial);
  with_element(task.e.keys, [&](auto type) {
    using T = decltype(type);
    with_spans(task.e.dim, [&](auto spans) {
      if constexpr (!std::is_same_v<T, float>) {
        constexpr std::int32_t kThreads = tuning::kSplitThreads;
        const std::int64_t tiles = std::int64_t{task.e.count} * m.queries.most;
        launch("attention_split_queries", attention_split_queries_kernel<MatrixElement<T>, spans()>,
               {.blocks = blocks_of_threads(tiles * 32, kThreads), .threads = kThreads}, stream, m);
        if (task.log_sum_exp == nullptr) {
          if (task.weights == nullptr &&
              is_one_launch(task.e, task.parts, AttentionMatrixShared<T, spans(), Pass::both>::kRound))
            return launch_pass<T, spans(), Pass::both>("attention_matrix", m, stream);
          launch_pass<T, spans(), Pass::statistics>("attention_matrix_statistics", m, stream);
        }
        if (task.weights != nullptr)
          launch("attention_weigh", attention_weigh_kernel<spans()>,
                 {.blocks = blocks_of_threads(tiles * kTileQueries, kThreads), .threads = kThreads}, stream, m);
        launch_pass<T, spans(), Pass::columns>("attention_matrix", m, stream);
      }
    });
  });
}

}  // namespace kvkeep::cuda::attention
