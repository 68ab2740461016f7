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
#include "window_attention_queries.cuh"
#include "workspace.h"

namespace kvkeep::cuda::attention {
namespace {

using tuning::kMatrixThreads;

/// Times 2^top: sums below it can be added up by the million.
constexpr float kFarAbove = 0x1p100F;
constexpr std::int32_t kWarps = kMatrixThreads / 32;

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

/// A slot that a warp has.
struct WarpSlot {
  std::int32_t newest;  ///< position from which on queries count it in newest
  std::int32_t column;  ///< the same in the column
  float scale;          ///< of a key of 8 bits
};

/// What a block does with a row, in shared memory, where it takes no registers.
struct BlockWork {
  AttentionPlan plan;
  std::int64_t number;  ///< the next among all
  std::int64_t row;
  std::int64_t tile0;      ///< the row's first tile among all
  std::int32_t begin;      ///< first slot
  std::int32_t stop;       ///< behind the last one
  std::int32_t end;        ///< behind the last one that takes part
  std::int32_t part;       ///< slots whose statistics are taken together
  std::int32_t at_a_time;  ///< tiles in shared memory
  bool split;              ///< low numbers come with them, behind the tiles
  bool aligned;
  SlotAddress keys;
  const std::int32_t* positions;

  [[nodiscard]] __device__ std::int32_t tiles() const { return pieces(plan.total, kTileQueries); }
};

/// Shared memory of a block with `resident` tiles of a row's `most` that copies `ahead` of a warp's blocks of slots at
/// a time.
template <class T, int kSpans, bool kApply>
struct AttentionMatrixShared {
  static constexpr std::int32_t kBlocks = kSpans > 4 ? 2 : 4;  ///< of eight slots that a warp has
  static constexpr std::int32_t kSlots = 8 * kBlocks, kRound = kWarps * kSlots;
  using Tile = QueryTile<kSpans>;
  using Word = PackedElements<T, 8>;  ///< eight components of a key
  static constexpr std::size_t kWork = 0, kWarpSlots = (sizeof(BlockWork) + 31) / 32 * 32;
  static constexpr std::size_t kPositions = kWarpSlots + (sizeof(WarpSlot) * kRound + 31) / 32 * 32;
  static constexpr std::size_t kScales = kPositions + sizeof(std::int32_t) * kRound;
  static constexpr std::size_t kOwn =
      kScales + (std::is_same_v<T, Bits8> ? sizeof(float) * kRound : 0);  ///< what each thread adds to newest
  static constexpr std::size_t kRest = kOwn + sizeof(float4) * kMatrixThreads * (kApply ? kBlocks / 2 : 0);
  std::size_t tiles, tops, sums, words, bytes;

  KVKEEP_HD AttentionMatrixShared(std::int32_t resident, std::int32_t most, std::int32_t ahead) {
    const auto count = static_cast<std::size_t>(resident),
               states = static_cast<std::size_t>(kApply ? 0 : kWarps * queries_of(resident, most));
    Parts parts{kRest};
    tiles = parts.take(sizeof(Tile) * count);
    tops = parts.take(sizeof(float) * states);
    sums = parts.take(sizeof(float) * states);
    words = parts.take(sizeof(Word) * kSpans * kMatrixThreads * static_cast<std::size_t>(ahead));
    bytes = parts.bytes;
  }
  /// Whose statistics a warp has at most.
  KVKEEP_HD static std::int32_t queries_of(std::int32_t resident, std::int32_t most) {
    return (resident < most ? resident : most) * kTileQueries;
  }
};

/// What a warp works with: of its block's shared memory, and of the slots that it has now. A lane has the products of
/// queries lane / 4 + 8 i and slots 8 b + lane % 4 * 2 + e as x[b][2 * i + e]: see the picture above.
template <class T, int kSpans, bool kApply>
class WarpState {
  using Shared = AttentionMatrixShared<T, kSpans, kApply>;
  using Word = typename Shared::Word;
  static constexpr int kBlocks = Shared::kBlocks;
  using Products = float[kBlocks][4];

 public:
  using Sums = float[2 * kBlocks];  ///< of the lane's slots, [2 * b + e]

  __device__ WarpState(const AttentionMatrixTask& m, std::byte* shared, const Shared& parts)
      : task_(m.of),
        ahead_(m.ahead),
        work_(*reinterpret_cast<const BlockWork*>(shared + Shared::kWork)),
        tiles_(reinterpret_cast<const QueryTile<kSpans>*>(shared + parts.tiles)),
        slots_(reinterpret_cast<WarpSlot*>(shared + Shared::kWarpSlots) + index() * Shared::kSlots),
        own_(reinterpret_cast<float4*>(shared + Shared::kOwn) + threadIdx.x),
        tops_(reinterpret_cast<float*>(shared + parts.tops) + index() * Shared::queries_of(m.resident, m.queries.most)),
        sums_(reinterpret_cast<float*>(shared + parts.sums) + index() * Shared::queries_of(m.resident, m.queries.most)),
        words_(reinterpret_cast<Word*>(shared + parts.words) + threadIdx.x),
        position_(reinterpret_cast<std::int32_t*>(shared + Shared::kPositions) + index() * Shared::kSlots + lane()),
        scale_(reinterpret_cast<float*>(shared + Shared::kScales) + index() * Shared::kSlots + lane()) {}

  [[nodiscard]] __device__ static std::int32_t index() { return static_cast<std::int32_t>(threadIdx.x / 32); }

  /// Begins to copy what read() of slots [slot0, end) takes, if there are any.
  __device__ void ask(std::int32_t slot0, std::int32_t end) const {
    if (slot0 >= end) return;
    if (const std::int32_t slot = slot0 + lane(); lane() < Shared::kSlots && slot < end) {
      copy_ahead<4>(position_, work_.positions + static_cast<std::uint32_t>(slot));
      if constexpr (std::is_same_v<T, Bits8>) copy_ahead<4>(scale_, work_.plan.row->key_scales.at(slot));
    }
    copy_keys(slot0, end);
    const SlotAddress keys = work_.keys;
#pragma unroll 1
    for (std::int32_t b = ahead_; b < kBlocks; ++b) {  // no further than to the L2
      const T* key = this->key(keys, slot0 + 8 * b, end);
#pragma unroll
      for (int s = 0; s < kSpans; ++s) fetch_ahead(key + component(s));
    }
  }

  /// Takes slots [slot0, end), at most kSlots of them and at least one, that were asked for.
  __device__ void read(std::int32_t slot0, std::int32_t end) {
    const AttentionPlan& plan = work_.plan;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if ((b & (ahead_ - 1)) == 0) {
        if (b > 0) copy_keys(slot0 + 8 * b, end);
        wait_for_copies();
      }
#pragma unroll
      for (int s = 0; s < kSpans; ++s) {
        keys_[b][s] = {};
        memcpy(&keys_[b][s], word(b & (ahead_ - 1), s), sizeof(Word));
      }
    }
    if constexpr (std::is_same_v<T, Bits8>) widen();  // once all of them are under way
    __syncwarp();
    if (lane() < Shared::kSlots) {
      const std::int32_t slot = slot0 + lane();
      const std::int32_t at = slot < plan.from || slot >= end ? kNever
                              : task_.kind == Kind::history   ? kFirst
                                                              : *position_;
      // On the suffix only strictly later queries count.
      slots_[lane()] = {at, task_.kind == Kind::window && slot >= plan.history && at != kNever ? at + 1 : at,
                        std::is_same_v<T, Bits8> && slot < end ? *scale_ : 0.0F};
    }
    __syncwarp();
    clear_ = slot0 >= plan.from && slot0 + Shared::kSlots <= end && slots_[Shared::kSlots - 1].newest <= plan.oldest &&
             (!kApply || task_.kind != Kind::window || slot0 + Shared::kSlots <= plan.history);
  }

  /// The slots have got nothing in newest. What a lane's queries give its slots there is in shared memory: few tiles
  /// add to it, and it takes no registers.
  __device__ void begin_newest() const {
#pragma unroll
    for (int b = 0; b < kBlocks; b += 2) own_[b / 2 * kMatrixThreads] = {0, 0, 0, 0};
  }

  /// Adds what `count` tiles of queries give the slots.
  __device__ void give(std::int32_t count, Sums& columns) const {
    bool clear = clear_;
    __syncwarp();
    for (std::int32_t tile = 0; tile < count;) {
      Products x;
      multiply(tile, x);
      if (clear && !give_all(tile, x, columns)) {
        clear = false;  // once more, with a look at every number
        continue;
      }
      if (!clear) give_some(tile, x, columns);
      clear = clear_;
      ++tile;
    }
  }

  /// Takes the statistics of `count` tiles of queries over the slots, into the warp's own. first: it has none yet.
  __device__ void take(std::int32_t count, bool first) const {
    const bool all = clear_ && !first;
    bool clear = all;
    __syncwarp();
    for (std::int32_t tile = 0; tile < count;) {
      Products x;
      multiply(tile, x);
      if (clear && !take_all(tile, x)) {
        clear = false;
        continue;
      }
      if (!clear) take_some(tile, x);
      clear = all;
      ++tile;
    }
  }

  /// The warp's statistics of nothing.
  __device__ void begin(std::int32_t first, std::int32_t count) const {
    for (std::int32_t q = lane(); q < count * kTileQueries; q += 32) {
      tops_[q] = first * kTileQueries + q < work_.plan.total ? kNothing : 0.0F;
      sums_[q] = 0;
    }
  }

  /// Writes what the slots got, those of them before `stop`.
  __device__ void write(Sums& columns, std::int32_t slot0, std::int32_t stop) const {
    Sums newest;
#pragma unroll
    for (int b = 0; b < kBlocks; b += 2) {
      const float4 of = own_[b / 2 * kMatrixThreads];
      newest[2 * b] = of.x, newest[2 * b + 1] = of.y, newest[2 * b + 2] = of.z, newest[2 * b + 3] = of.w;
    }
    const float column_sum = over_queries(columns), newest_sum = over_queries(newest);
    // What over_queries() leaves a lane with.
    std::int32_t own = (lane() >> 4 & 1) * 2 + (lane() >> 3 & 1);
    if constexpr (kBlocks == 4) own = own * 2 + (lane() >> 2 & 1);
    const std::int32_t t = slot0 + slot_of(own / 2, own % 2);
    if (t < stop && (kBlocks == 4 || (lane() & 4) == 0)) write_slot(task_, work_.plan, t, column_sum, newest_sum);
  }

 private:
  [[nodiscard]] __device__ static std::int32_t lane() { return static_cast<std::int32_t>(threadIdx.x % 32); }
  [[nodiscard]] __device__ static std::int32_t slot_of(std::int32_t block, std::int32_t e) {
    return 8 * block + lane() % 4 * 2 + e;
  }
  /// Of the lane's i-th query.
  [[nodiscard]] __device__ const QueryLine& line(std::int32_t tile, int i) const {
    return tiles_[tile].lines[8 * i + lane() / 4];
  }
  [[nodiscard]] __device__ const QueryMark& mark(std::int32_t tile, int i) const {
    return tiles_[tile].marks[8 * i + lane() / 4];
  }
  /// Sums over the lanes that have the same slots; each lane gets that of one of its slots.
  [[nodiscard]] __device__ static float over_queries(Sums& sums) {
#pragma unroll
    for (int bit = 16, n = kBlocks; bit >= 4; bit /= 2, n /= 2) {
      const bool upper = (lane() & bit) != 0;
      if (n == 0) {
        sums[0] += __shfl_xor_sync(0xFFFFFFFFU, sums[0], bit);
        break;
      }
#pragma unroll
      for (int i = 0; i < n; ++i)
        sums[i] = (upper ? sums[n + i] : sums[i]) + __shfl_xor_sync(0xFFFFFFFFU, upper ? sums[i] : sums[n + i], bit);
    }
    return sums[0];
  }

  /// Key of the lane's slot of the eight from slot0 on. What is behind the last slot or component is any other one: its
  /// products count for nothing.
  [[nodiscard]] __device__ static const T* key(const SlotAddress& keys, std::int32_t slot0, std::int32_t end) {
    const std::int32_t slot = slot0 + lane() / 4;
    return reinterpret_cast<const T*>(keys.at(slot < end ? slot : end - 1));
  }
  /// Where the lane's part of a span begins.
  [[nodiscard]] __device__ std::int32_t component(int span) const {
    const std::int32_t first = lane() % 4 * 8, d = span * kSpan + first;
    return d < task_.e.dim ? d : 0;
  }
  [[nodiscard]] __device__ Word* word(int block, int span) const {
    return words_ + (block * kSpans + span) * kMatrixThreads;
  }
  /// Begins to copy as many keys as there is room for.
  __device__ void copy_keys(std::int32_t slot0, std::int32_t end) const {
    const SlotAddress keys = work_.keys;
    const bool aligned = work_.aligned;
#pragma unroll 1
    for (std::int32_t b = 0; b < ahead_; ++b) {
      const T* key = this->key(keys, slot0 + 8 * b, end);
      if (aligned) {
#pragma unroll
        for (int s = 0; s < kSpans; ++s) copy_ahead<sizeof(Word)>(word(b, s), key + component(s));
      } else {
#pragma unroll 1
        for (int k = 0; k < 8 * kSpans; ++k) word(b, k / 8)->x[k % 8] = key[component(k / 8) + k % 8];
      }
    }
  }

  /// Keys of 8 bits, as they are multiplied.
  __device__ void widen() {
    with_format(task_.e.keys, [&](auto format) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int s = 0; s < kSpans; ++s) {
          uint4& key = keys_[b][s];
          const uint2 low = halves_of<decltype(format)::value>(key.x), high = halves_of<decltype(format)::value>(key.y);
          key = {low.x, low.y, high.x, high.y};
        }
    });
  }

  __device__ void multiply(std::int32_t tile, Products& x) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int k = 0; k < 4; ++k) x[b][k] = 0;
    add_products(tiles_[tile].words + lane(), x);
    if ((tiles_[tile].flags.x & kSplit) != 0)
      add_products(reinterpret_cast<const uint4*>(tiles_ + work_.at_a_time) + tile * QueryTile<kSpans>::kWords + lane(),
                   x);
    if constexpr (std::is_same_v<T, Bits8>) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float scale = slots_[slot_of(b, e)].scale;
          x[b][e] *= scale;
          x[b][2 + e] *= scale;
        }
    }
  }

  __device__ void add_products(const uint4* words, Products& x) const {
#pragma unroll
    for (int s = 0; s < kSpans; ++s) {
      const uint4 first = words[s * 64], second = words[s * 64 + 32];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        multiply_add<MatrixElement<T>>(x[b], {first.x, first.y, first.z, first.w}, {keys_[b][s].x, keys_[b][s].y});
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        multiply_add<MatrixElement<T>>(x[b], {second.x, second.y, second.z, second.w}, {keys_[b][s].z, keys_[b][s].w});
    }
  }

  /// give() of one tile where every query sees every slot. Returns false, having added nothing, if a logit is no
  /// number. x: products, shares afterwards.
  __device__ bool give_all(std::int32_t tile, Products& x, Sums& columns) const {
    const QueryLine lines[2] = {line(tile, 0), line(tile, 1)};
    float all = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int i = 0; i < 2; ++i) x[b][2 * i + e] = exp2_of(fmaf(x[b][2 * i + e], lines[i].factor, lines[i].shift));
        all += x[b][e] + x[b][2 + e];
      }
    if (__all_sync(0xFFFFFFFFU, is_number(all) ? 1 : 0) == 0) return false;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) columns[2 * b + e] += x[b][e] + x[b][2 + e];
    if ((tiles_[tile].flags.x & kNewest) != 0) give_newest(tile, x);
    return true;
  }

  /// give() of one tile where a query does not see a slot, or a logit is no number. Adds in the same order.
  __device__ void give_some(std::int32_t tile, Products& x, Sums& columns) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const WarpSlot slot = slots_[slot_of(b, e)];
        float counted[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& share = x[b][2 * i + e];
          const QueryLine line = this->line(tile, i);
          const std::int32_t position = mark(tile, i).position;
          share = is_number(share * line.factor) ? exp2_of(fmaf(share, line.factor, line.shift)) : 0.0F;
          counted[i] = slot.column <= position ? share : 0.0F;
          if (slot.newest > position) share = 0;
        }
        columns[2 * b + e] += counted[0] + counted[1];
      }
    if ((tiles_[tile].flags.x & kNewest) != 0) give_newest(tile, x);
  }

  /// Adds shares to newest.
  __device__ void give_newest(std::int32_t tile, const Products& shares) const {
    const float counts[2] = {mark(tile, 0).newest, mark(tile, 1).newest};
    const auto more = [&](float sum, int b, int e) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sum = counts[i] == 0 ? sum : fmaf(shares[b][2 * i + e], counts[i], sum);
      return sum;
    };
#pragma unroll
    for (int b = 0; b < kBlocks; b += 2) {
      float4& of = own_[b / 2 * kMatrixThreads];
      of = {more(of.x, b, 0), more(of.y, b, 1), more(of.z, b + 1, 0), more(of.w, b + 1, 1)};
    }
  }

  /// take() of one tile where every query sees every slot and the warp has seen some. Returns false, having added
  /// nothing, if a logit is no number, or far above what was seen.
  __device__ bool take_all(std::int32_t tile, const Products& x) const {
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = line(tile, i).factor, top = tops_[tile * kTileQueries + 8 * i + lane() / 4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e) sums[i] += exp2_of(fmaf(x[b][2 * i + e], factor, -top));
    }
    // Each lane gets the sum of one of its two queries.
    const bool odd = lane() % 2 != 0;
    float sum = (odd ? sums[1] : sums[0]) + __shfl_xor_sync(0xFFFFFFFFU, odd ? sums[0] : sums[1], 1);
    sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 2);
    if (__all_sync(0xFFFFFFFFU, sum < kFarAbove ? 1 : 0) == 0) return false;
    if ((lane() & 2) == 0) sums_[tile * kTileQueries + lane() / 4 + (odd ? 8 : 0)] += sum;
    return true;
  }

  /// take() of one tile where a query does not see a slot, a logit is no number, or there is nothing to compare with.
  __device__ void take_some(std::int32_t tile, const Products& x) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int32_t q = tile * kTileQueries + 8 * i + lane() / 4, position = mark(tile, i).position;
      const float factor = line(tile, i).factor, before = tops_[q];
      float top = before, sum = 0;
      bool seen[kBlocks][2];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float logit = x[b][2 * i + e] * factor;
          seen[b][e] = slots_[slot_of(b, e)].newest <= position && is_number(logit);
          if (seen[b][e]) top = fmaxf(top, logit);
        }
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFU, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFU, top, 2));
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (seen[b][e]) sum += exp2_of(fmaf(x[b][2 * i + e], factor, -top));
      sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 2);
      __syncwarp();
      if (lane() % 4 == 0 && top > kNothing) {
        sums_[q] = fmaf(sums_[q], exp2_of(before - top), sum);
        tops_[q] = top;
      }
    }
  }

  const AttentionTask& task_;
  const std::int32_t ahead_;
  const BlockWork& work_;
  const QueryTile<kSpans>* tiles_;
  WarpSlot* slots_;
  float4* own_;
  float *tops_, *sums_;
  Word* words_;             ///< copies of the lane's words of keys, kMatrixThreads apart
  std::int32_t* position_;  ///< of the lane's own slot
  float* scale_;
  uint4 keys_[kBlocks][kSpans];
  bool clear_;  ///< every query sees every slot that the warp has
};

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
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count * Tile::kWords; i += kMatrixThreads)
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

/// Counts the parts of a row that the block looked at as there. The block that finds all of them there sets the shifts
/// of the row's queries, from the parts in ascending order.
template <int kSpans>
__device__ void arrive(const AttentionMatrixTask& m, const BlockWork& work) {
  const AttentionPlan& plan = work.plan;
  const std::int64_t r = work.row;
  const std::int32_t all = pieces(plan.row->length, work.part), parts = pieces(work.stop - work.begin, work.part);
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();  // hands on, with the count, what the block wrote before the barrier
    last = atomicAdd(m.queries.arrived + r, parts) + parts == all;
    __threadfence();  // what other blocks handed on is there, and after the next barrier it is for the whole block
  }
  if (__syncthreads_or(last ? 1 : 0) == 0) return;
  const AttentionTask& task = m.of;
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
    m.queries.of<kSpans>()[work.tile0 + n / kTileQueries].lines[n % kTileQueries].shift = shift;
  }
}

/// Fills `work` with the block's next. Returns false if there is none. The whole block calls, and waits. `columns` goes
/// backwards: the last rows that `statistics` read may still be in the L2.
template <bool kApply, std::int32_t kRound>
__device__ bool find_work(const AttentionMatrixTask& m, BlockWork& work) {
  const AttentionTask& task = m.of;
  const std::int64_t all = std::int64_t{task.e.count} * m.pieces;
  __syncthreads();
  std::int64_t number = work.number, r = 0;
  std::int32_t length = 0, part = kRound, begin = 0;
  bool some = false;
  for (; !some && number < all; number += gridDim.x) {
    const auto n = static_cast<std::uint32_t>(kApply ? all - 1 - number : number);
    r = n / static_cast<std::uint32_t>(m.pieces);
    if (!task.e.due(r)) continue;
    const std::int32_t total = m.queries.plans[r].total;
    length = task.e.rows[r].length;
    if constexpr (!kApply) part = part_of(length);
    begin = static_cast<std::int32_t>(n - static_cast<std::uint32_t>(r * m.pieces)) * m.at_once * part;
    some = begin < length && (kApply || total > 0);
  }
  __syncthreads();
  if (!some) return false;
  if (threadIdx.x == 0) {
    const Row& row = task.e.rows[r];
    const std::int32_t stop = begin + m.at_once * part;
    work.plan = m.queries.plans[r];
    work.number = number;
    work.row = r;
    work.tile0 = r * m.queries.most;
    work.part = part;
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

/// One pass over the keys: kApply gives the columns, else the statistics are taken.
template <class T, int kSpans, bool kApply>
__global__ void __launch_bounds__(kMatrixThreads, 2) attention_matrix_kernel(AttentionMatrixTask m) {
  wait_for_earlier_kernels();
  using Shared = AttentionMatrixShared<T, kSpans, kApply>;
  using Warp = WarpState<T, kSpans, kApply>;
  const Shared parts(m.resident, m.queries.most, m.ahead);
  std::byte *shared = dynamic_shared(), *tiles = shared + parts.tiles;
  BlockWork& work = *reinterpret_cast<BlockWork*>(shared + Shared::kWork);
  const std::int32_t own = Warp::index() * Shared::kSlots;
  if (threadIdx.x == 0) work.number = blockIdx.x;
  while (find_work<kApply, Shared::kRound>(m, work)) {
    Warp(m, shared, parts).ask(work.begin + own, work.end);
    find_split<kSpans>(m, work);
    if constexpr (kApply) {
      for (std::int32_t round = work.begin; round < work.stop; round += Shared::kRound) {
        Warp warp(m, shared, parts);
        typename Warp::Sums columns = {};
        warp.begin_newest();
        for (std::int32_t s = 0; s < work.tiles(); s += work.at_a_time) {
          const std::int32_t left = work.tiles() - s, count = left < work.at_a_time ? left : work.at_a_time;
          if (round == work.begin || work.tiles() > work.at_a_time) bring<kSpans>(m.queries, work, s, count, tiles);
          if (round + own >= work.end) continue;
          if (s == 0) warp.read(round + own, work.end);
          if (left == count) warp.ask(round + Shared::kRound + own, work.end);
          warp.give(count, columns);
        }
        warp.write(columns, round + own, work.stop);
      }
    } else {
      for (std::int32_t s = 0; s < work.tiles(); s += work.at_a_time) {
        const std::int32_t left = work.tiles() - s, count = left < work.at_a_time ? left : work.at_a_time;
        bring<kSpans>(m.queries, work, s, count, tiles);
        for (std::int32_t begin = work.begin; begin < work.stop; begin += work.part) {
          const std::int32_t end = work.end - begin < work.part ? work.end : begin + work.part;
          Warp(m, shared, parts).begin(s, count);
          for (std::int32_t slot0 = begin + own; slot0 < end; slot0 += Shared::kRound) {
            Warp warp(m, shared, parts);
            warp.read(slot0, end);
            const std::int32_t next = slot0 + Shared::kRound;
            warp.ask(next < work.end || left == count ? next : work.begin + own, work.end);  // or for other tiles
            warp.take(count, slot0 == begin + own);
          }
          combine_warps(m, work, begin, s, count, shared, parts);
        }
      }
      arrive<kSpans>(m, work);
    }
  }
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

template <class T, int kSpans, bool kApply>
void launch_pass(const char* name, AttentionMatrixTask m, Stream stream) {
  // Queries that come in the keys' own dtype need no second number; those that were turned do.
  const bool likely_split = m.of.queries != nullptr || with_element(m.of.e.query, [](auto x) {
                              return !std::is_same_v<decltype(x), MatrixElement<T>>;
                            });
  using Shared = AttentionMatrixShared<T, kSpans, kApply>;
  const std::size_t limit =  // a block has 1 KiB more than it asks for
      (static_cast<std::size_t>(of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin)) - 1024) / 2;
  m.resident = resident_tiles<Shared>(likely_split ? m.queries.most * 2 : m.queries.most, m.queries.most, limit);
  for (m.ahead = 1; m.ahead < Shared::kBlocks && Shared(m.resident, m.queries.most, 2 * m.ahead).bytes <= limit;)
    m.ahead *= 2;
  const std::int32_t all = kApply ? pieces(m.of.e.longest, Shared::kRound) : m.of.parts;
  m.at_once = pieces_at_once(m.of.e.count, all, kApply ? Shared::kRound : part_of(m.of.e.longest),
                             std::int64_t{2} * of_device(cudaDevAttrMultiProcessorCount));
  m.pieces = pieces(all, m.at_once);
  // For two blocks on a multiprocessor as little as possible of its shared memory may serve as L1.
  const cudaError_t status =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(attention_matrix_kernel<T, kSpans, kApply>),
                           cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  KVKEEP_REQUIRE_AS(DeviceError, status == cudaSuccess, name, ": ", cudaGetErrorString(status));
  launch(name, attention_matrix_kernel<T, kSpans, kApply>,
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
        if (task.log_sum_exp == nullptr) launch_pass<T, spans(), false>("attention_matrix_statistics", m, stream);
        if (task.weights != nullptr)
          launch("attention_weigh", attention_weigh_kernel<spans()>,
                 {.blocks = blocks_of_threads(tiles * kTileQueries, kThreads), .threads = kThreads}, stream, m);
        launch_pass<T, spans(), true>("attention_matrix", m, stream);
      }
    });
  });
}

}  // namespace kvkeep::cuda::attention
