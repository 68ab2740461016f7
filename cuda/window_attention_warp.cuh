// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What one warp does in window attention on matrix units, and what its block has in shared memory.
/// window_attention_matrix.cu says what is computed, and in which lane each number is.

#include "window_attention_queries.cuh"
#include "workspace.h"

namespace kvkeep::cuda::attention {

using tuning::kMatrixThreads;

/// Times 2^top: sums below it can be added up by the million.
constexpr float kFarAbove = 0x1p100F;
constexpr std::int32_t kWarps = kMatrixThreads / 32;

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
  Kind kind;
  bool split;  ///< low numbers come with them, behind the tiles
  bool aligned;
  SlotAddress keys;
  const std::int32_t* positions;

  [[nodiscard]] __device__ std::int32_t tiles() const { return pieces(plan.total, kTileQueries); }
};

/// What a launch does with the keys of a row. both: a block has the whole row, and goes back over it for the columns.
enum class Pass : std::uint8_t { statistics, columns, both };

/// Shared memory of a block with `resident` tiles of a row's `most` that copies `ahead` of a warp's blocks of slots at
/// a time.
template <class T, int kSpans, Pass kPass>
struct AttentionMatrixShared {
  static constexpr std::int32_t kBlocks = kSpans > 4 ? 2 : 4;  ///< of eight slots that a warp has
  static constexpr std::int32_t kSlots = 8 * kBlocks, kRound = kWarps * kSlots;
  using Tile = QueryTile<kSpans>;
  using Word = PackedElements<T, 8>;  ///< eight components of a key
  static constexpr std::size_t kWork = 0, kWarpSlots = (sizeof(BlockWork) + 31) / 32 * 32;
  static constexpr std::size_t kPositions = kWarpSlots + (sizeof(WarpSlot) * kRound + 31) / 32 * 32;
  static constexpr std::size_t kScales = kPositions + sizeof(std::int32_t) * kRound;
  static constexpr std::size_t kHeld = kScales + (std::is_same_v<T, Bits8> ? sizeof(float) * kRound : 0);
  static constexpr std::size_t kRest = kHeld + 2 * sizeof(std::int32_t) * kMatrixThreads;
  std::size_t tiles, words, tops, sums;
  std::size_t own;  ///< what each thread adds to newest, once there are no statistics
  std::size_t bytes;

  KVKEEP_HD AttentionMatrixShared(std::int32_t resident, std::int32_t most, std::int32_t ahead) {
    const auto count = static_cast<std::size_t>(resident),
               states = static_cast<std::size_t>(kPass == Pass::columns ? 0 : kWarps * queries_of(resident, most));
    Parts parts{kRest};
    tiles = parts.take(sizeof(Tile) * count);
    words = parts.take(sizeof(Word) * kSpans * kMatrixThreads * static_cast<std::size_t>(ahead));
    Parts later = parts;
    tops = parts.take(sizeof(float) * states);
    sums = parts.take(sizeof(float) * states);
    own = later.take(kPass == Pass::statistics ? 0 : sizeof(float4) * kMatrixThreads * (kBlocks / 2));
    bytes = later.bytes < parts.bytes ? parts.bytes : later.bytes;
  }
  /// Whose statistics a warp has at most.
  KVKEEP_HD static std::int32_t queries_of(std::int32_t resident, std::int32_t most) {
    return (resident < most ? resident : most) * kTileQueries;
  }
};

/// What a warp works with: of its block's shared memory, and of the slots that it has now. A lane has the products of
/// queries lane / 4 + 8 i and slots 8 b + lane % 4 * 2 + e as x[b][2 * i + e]: see the picture there.
template <class T, int kSpans, Pass kPass>
class WarpState {
  using Shared = AttentionMatrixShared<T, kSpans, kPass>;
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
        own_(reinterpret_cast<float4*>(shared + parts.own) + threadIdx.x),
        tops_(reinterpret_cast<float*>(shared + parts.tops) + index() * Shared::queries_of(m.resident, m.queries.most)),
        sums_(reinterpret_cast<float*>(shared + parts.sums) + index() * Shared::queries_of(m.resident, m.queries.most)),
        words_(reinterpret_cast<Word*>(shared + parts.words) + threadIdx.x),
        position_(reinterpret_cast<std::int32_t*>(shared + Shared::kPositions) + index() * Shared::kSlots + lane()) {}

  [[nodiscard]] __device__ static std::int32_t index() { return static_cast<std::int32_t>(threadIdx.x / 32); }

  /// Begins to copy what read() of slots [slot0, end) takes, if there are any.
  __device__ void ask(std::int32_t slot0, std::int32_t end) const {
    if (slot0 >= end) return;
    if (const std::int32_t slot = slot0 + lane(); lane() < Shared::kSlots && slot < end) {
      copy_ahead<4>(position_, work_.positions + static_cast<std::uint32_t>(slot));
      if constexpr (std::is_same_v<T, Bits8>) copy_ahead<4>(scale(), work_.plan.row->key_scales.at(slot));
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
  template <Pass kFor>
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
                              : work_.kind == Kind::history   ? kFirst
                                                              : *position_;
      // On the suffix only strictly later queries count.
      slots_[lane()] = {at, work_.kind == Kind::window && slot >= plan.history && at != kNever ? at + 1 : at,
                        std::is_same_v<T, Bits8> && slot < end ? *scale() : 0.0F};
    }
    __syncwarp();
    clear_ = slot0 >= plan.from && slot0 + Shared::kSlots <= end && slots_[Shared::kSlots - 1].newest <= plan.oldest &&
             (kFor == Pass::statistics || work_.kind != Kind::window || slot0 + Shared::kSlots <= plan.history);
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
  /// Of the lane's own slot, behind the positions.
  [[nodiscard]] __device__ float* scale() const {
    static_assert(Shared::kScales - Shared::kPositions == sizeof(std::int32_t) * Shared::kRound);
    return reinterpret_cast<float*>(position_ + Shared::kRound);
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
  uint4 keys_[kBlocks][kSpans];
  bool clear_;  ///< every query sees every slot that the warp has, and for the columns counts in it
};

}  // namespace kvkeep::cuda::attention
