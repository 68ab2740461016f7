// SPDX-License-Identifier: Apache-2.0
#include "memory_attention.h"

#include <algorithm>

#include "key_lanes.cuh"
#include "kvkeep/memory/opening.h"
#include "launch.cuh"
#include "memory_wants.cuh"
#include "softmax.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kMemoryHeads;
using tuning::kMemorySpans;
using tuning::kMemoryThreads;
using tuning::kMemoryTile;
static_assert(kMemoryThreads == tuning::kKeyThreads && kMemoryThreads == 32 * kMemoryHeads && kMemoryTile == 64);

constexpr std::int32_t kBlockSigns = 16, kWordSigns = 32;  ///< of kvkeep::KeySketch
constexpr std::int32_t kPatterns = 16,
                       kTables = kWordSigns /
                                 4;  ///< sums of four components under all patterns of their signs; tables of a word

std::int64_t parts_of(const MemoryAttentionArguments& a) {
  const std::int64_t slices = (a.group + kMemoryHeads - 1) / kMemoryHeads,
                     blocks = std::max<std::int64_t>(1, std::int64_t{a.count} * a.most_queries * slices);
  const std::int64_t most =
      std::min<std::int64_t>(tuning::kMemoryParts, (a.most_spans + kMemoryTile - 1) / kMemoryTile);
  return std::clamp<std::int64_t>((tuning::kMemoryBlocks + blocks - 1) / blocks, 1, std::max<std::int64_t>(1, most));
}

/// The arguments of the kernels, and the parts of the workspace.
struct MemoryAttentionTask {
  explicit MemoryAttentionTask(const MemoryAttentionArguments& arguments)
      : a(arguments),
        slices((a.group + kMemoryHeads - 1) / kMemoryHeads),
        parts(static_cast<std::int32_t>(parts_of(a))) {
    WorkspaceParts w(a.workspace);
    const std::int64_t of_heads = std::int64_t{a.tokens} * a.query_heads(),
                       of_rows = std::int64_t{a.tokens} * a.kv_heads;
    coarse = w.take<float>(of_heads * a.most_spans);
    relevance = w.take<float>(of_heads * a.most_spans);
    entries = w.take<std::uint64_t>(2 * of_rows * a.most_spans);
    flags = w.take<std::uint8_t>(of_rows * a.most_spans);
    partial = w.take<float>(of_heads * parts * (a.dim + 2));
    guessed = a.brought != nullptr ? w.take<float>(of_heads * a.most_spans) : nullptr;
    bytes = w.bytes();
  }

  [[nodiscard]] __device__ std::int64_t head_at(std::int32_t token, std::int32_t head) const {
    return std::int64_t{token} * a.query_heads() + head;
  }
  [[nodiscard]] __device__ std::int64_t row_at(std::int32_t token, std::int32_t head) const {
    return std::int64_t{token} * a.kv_heads + head;
  }

  MemoryAttentionArguments a;
  std::int32_t slices;               ///< of kMemoryHeads query heads or less
  std::int32_t parts;                ///< of a row, when it is merged
  float* coarse = nullptr;           ///< [tokens, Hq, most_spans] logits
  float* relevance = nullptr;        ///< the same: what sketches predict that spans draw, then their share
  std::uint64_t* entries = nullptr;  ///< [tokens, Hkv, 2, most_spans] of a sort
  std::uint8_t* flags = nullptr;     ///< [tokens, Hkv, most_spans]
  float* partial = nullptr;          ///< [tokens, Hq, parts, 2 + D] top, sum and sum of values
  float* guessed = nullptr;          ///< [tokens, Hq, most_spans] shares as launch_memory_guess takes them to be
  std::int64_t bytes = 0;
};

/// A row, one of its queries, and some of the query heads that read it.
struct Asked {
  const FoldedRow* row;
  std::int32_t token, first_head, heads;  ///< heads of all Hq
  bool there;
};

/// `work`: a number below count * most_queries * slices.
__device__ Asked asked_of(const MemoryAttentionTask& task, std::int64_t work, std::int32_t slices, std::int32_t heads) {
  const std::int64_t of_row = std::int64_t{task.a.most_queries} * slices, r = work / of_row;
  const auto rest = static_cast<std::int32_t>(work - r * of_row), query = rest / slices,
             first = (rest - query * slices) * heads;
  const FoldedRow& row = task.a.rows[r];
  const std::int32_t left = task.a.group - first;
  return {&row, row.first_query + query, row.head * task.a.group + first, left < heads ? left : heads,
          query < row.queries && row.spans > 0};
}

/// Floats from one query to the next in shared memory.
KVKEEP_HD inline std::int32_t staged_query(std::int32_t dim) { return (dim + 7) / 8 * 8; }

/// number(h, d): of head h of those that are asked, component d.
template <class Number>
__device__ void stage(const Asked& asked, std::int32_t dim, float* to, const Number& number) {
  const std::int32_t stride = staged_query(dim);
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < asked.heads * stride; i += kMemoryThreads) {
    const std::int32_t h = i / stride, d = i - h * stride;
    to[i] = d < dim ? number(h, d) : 0.0F;
  }
}

__device__ void stage_queries(const MemoryAttentionTask& task, const Asked& asked, float* to) {
  stage(asked, task.a.dim, to, [&](std::int32_t h, std::int32_t d) {
    const std::byte* query =
        task.a.queries + asked.token * task.a.token_stride + (asked.first_head + h) * task.a.head_stride;
    float x = 0;
    with_wide_element(task.a.query,
                      [&](auto type) { x = to_float(reinterpret_cast<const decltype(type)*>(query)[d]); });
    return x;
  });
}

/// Calls told(row, head, dot) by one thread for each of `count` rows of `dim` numbers and each query. The whole block
/// calls; queries: staged_query() apart.
template <class T, class Told>
__device__ void row_products(const T* rows, std::int32_t count, std::int32_t dim, const float* queries,
                             std::int32_t heads, const Told& told) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x), own = thread / kLanes, lane = thread % kLanes,
             stride = staged_query(dim);
  const std::int64_t width = dim * static_cast<std::int64_t>(sizeof(T));
  const SlotAddress keys{reinterpret_cast<std::byte*>(const_cast<T*>(rows)), width, width};
  const bool aligned = is_aligned(keys);
  for (std::int32_t first = 0; first < count; first += kKeysAtOnce) {
    const std::int32_t row = first + own;
    float sums[kMemoryHeads] = {};
    if (row < count)
      each_word<T>(keys, row, dim, aligned, Element{}, [&](std::int32_t d, const float* x) {
#pragma unroll
        for (int h = 0; h < kMemoryHeads; ++h) {
          if (h >= heads) break;
#pragma unroll
          for (int i = 0; i < kPerWord<T>; i += 4) {
            const auto q = *reinterpret_cast<const Elements<float>*>(queries + h * stride + d + i);
#pragma unroll
            for (int k = 0; k < 4; ++k) sums[h] = fmaf(x[i + k], q.x[k], sums[h]);
          }
        }
      });
#pragma unroll
    for (int h = 0; h < kMemoryHeads; ++h) {
      if (h >= heads) break;
      const float dot = sum_of_lanes(sums[h]);
      if (row < count && lane == 0) told(row, h, dot);
    }
  }
}

struct LogitsShared {
  KVKEEP_HD LogitsShared(std::int32_t dim, bool sketch) {
    queries = parts.take(sizeof(float) * static_cast<std::size_t>(kMemoryHeads * staged_query(dim)));
    tables = parts.take(sketch ? sizeof(float) *
                                     static_cast<std::size_t>(kMemoryHeads * ((dim + kWordSigns - 1) / kWordSigns) *
                                                              kTables * kPatterns)
                               : 0);
  }
  Parts parts;
  std::size_t queries, tables;
};

/// tables [heads][components / 4][16]: sums of four components of a query, plus where a bit is set, else minus.
__device__ void fill_tables(const float* queries, std::int32_t heads, std::int32_t dim, std::int32_t entries,
                            float* tables) {
  const std::int32_t stride = staged_query(dim);
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < heads * entries; i += kMemoryThreads) {
    const std::int32_t h = i / entries, entry = i - h * entries, first = entry / kPatterns * 4,
                       pattern = entry % kPatterns;
    float sum = 0;
    for (int k = 0; k < 4; ++k)
      if (first + k < dim)
        sum += (pattern >> k & 1) != 0 ? queries[h * stride + first + k] : -queries[h * stride + first + k];
    tables[i] = sum;
  }
}

/// Adds the log-sum-exp of the logits that sketches predict for the tokens of spans [begin, end) to what `relevance`
/// holds of their coarse keys. Eight lanes per span.
__device__ void add_told(const MemoryAttentionTask& task, const Asked& asked, std::int32_t begin, std::int32_t end,
                         const float* tables, std::int32_t entries, float* relevance) {
  const FoldedRow& row = *asked.row;
  const auto thread = static_cast<std::int32_t>(threadIdx.x), own = thread / kLanes, lane = thread % kLanes,
             words = entries / (kTables * kPatterns);
  const auto* sizes = reinterpret_cast<const __nv_bfloat16*>(row.sizes);
  for (std::int32_t first = begin; first < end; first += kKeysAtOnce) {
    const std::int32_t s = first + own;
    Running seen[kMemoryHeads];
    const bool there = s < end && row.table[s].length > 0;
    if (there) {
      const MemorySpan& span = row.table[s];
      for (std::int64_t t = span.first_token + lane; t < span.first_token + span.length; t += kLanes) {
        float sums[kMemoryHeads] = {};
        for (std::int32_t w = 0; w < words; ++w) {
          std::uint32_t bits = row.signs[(t / kBlockSigns * words + w) * kBlockSigns + t % kBlockSigns];
          const float* table = tables + w * kTables * kPatterns;
#pragma unroll
          for (int n = 0; n < kTables; ++n, bits >>= 4, table += kPatterns)
#pragma unroll
            for (int h = 0; h < kMemoryHeads; ++h)
              if (h < asked.heads) sums[h] += table[h * entries + static_cast<std::int32_t>(bits & 15U)];
        }
        const float factor = task.a.scale * to_float(sizes[t]);
#pragma unroll
        for (int h = 0; h < kMemoryHeads; ++h)
          if (h < asked.heads) seen[h].add(factor * sums[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kMemoryHeads; ++h) {
      if (h >= asked.heads) break;
      const Running all = over_lanes<kLanes>(seen[h]);
      if (there && lane == 0)
        relevance[std::int64_t{h} * task.a.most_spans + s] += all.top + logf(all.sum) - row.log_length[s];
    }
  }
}

/// Logits of kMemorySpans spans of a row, for one query and up to kMemoryHeads heads: of their coarse entries, and what
/// relevance is made of. kLearned: what a router makes of them.
template <class T, bool kLearned>
__global__ void __launch_bounds__(kMemoryThreads)
    memory_attention_logits_kernel(MemoryAttentionTask task, std::int32_t chunks) {
  wait_for_earlier_kernels();
  const std::int64_t work = blockIdx.x / static_cast<unsigned>(chunks);
  const Asked asked = asked_of(task, work, task.slices, kMemoryHeads);
  const auto begin = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(chunks)) * kMemorySpans;
  if (!asked.there || begin >= asked.row->spans) return;
  const FoldedRow& row = *asked.row;
  const std::int32_t dim = task.a.dim, end = begin + kMemorySpans < row.spans ? begin + kMemorySpans : row.spans,
                     entries = (dim + kWordSigns - 1) / kWordSigns * kTables * kPatterns;
  const LogitsShared at(dim, true);
  auto* queries = reinterpret_cast<float*>(dynamic_shared() + at.queries);
  auto* tables = reinterpret_cast<float*>(dynamic_shared() + at.tables);
  const bool told = row.signs != nullptr && !kLearned;
  stage_queries(task, asked, queries);
  __syncthreads();
  if (told) fill_tables(queries, asked.heads, dim, entries, tables);
  const std::int64_t first_head = task.head_at(asked.token, asked.first_head), first = first_head * task.a.most_spans;
  float *coarse = task.coarse + first, *relevance = task.relevance + first;
  const auto* keys = reinterpret_cast<const T*>(row.coarse_keys) + std::int64_t{begin} * dim;
  row_products(keys, end - begin, dim, queries, asked.heads, [&](std::int32_t i, std::int32_t h, float dot) {
    const std::int64_t place = std::int64_t{h} * task.a.most_spans + begin + i;
    coarse[place] = relevance[place] = task.a.scale * dot + row.log_length[begin + i];
  });
  __syncthreads();
  if (told) add_told(task, asked, begin, end, tables, entries, relevance);
  if constexpr (!kLearned) return;
  stage(asked, dim, queries, [&](std::int32_t h, std::int32_t d) { return task.a.routed[(first_head + h) * dim + d]; });
  __syncthreads();
  const std::int32_t first_in_group = asked.first_head - row.head * task.a.group;
  row_products(keys, end - begin, dim, queries, asked.heads, [&](std::int32_t i, std::int32_t h, float dot) {
    const std::int32_t s = begin + i;
    relevance[std::int64_t{h} * task.a.most_spans + s] = router_relevance(
        dot, row.norms[std::int64_t{s} * task.a.group + first_in_group + h], task.a.inner, row.log_length[s]);
  });
}

/// Marks what the heads of one row and query want, [heads, most_spans], by the rule: their shares take the place of
/// logits in `relevance`. guess: as if rows drew what they drew from the last query.
__device__ void want(const MemoryAttentionTask& task, const BlockTeam& team, const SortScratch& sort,
                     const Asked& asked, bool guess, const float* logits, float* relevance, std::uint8_t* marks) {
  using Rule = MemoryAttentionArguments::Rule;
  const MemoryAttentionArguments& a = task.a;
  const FoldedRow& row = *asked.row;
  const std::int64_t stride = a.most_spans, first = task.head_at(asked.token, asked.first_head);
  const bool last = asked.token == row.first_query + row.queries - 1;
  for (std::int32_t h = team.thread() / 32; h < asked.heads; h += team.size() / 32) {
    float* own = relevance + h * stride;
    if (a.rule != Rule::learned) {
      const float dense = !guess ? a.lse[first + h] : row.dense != nullptr ? row.dense[h] : Running::kNothing;
      find_shares(row.spans, dense, logits + h * stride, own);
      if (!guess && last && row.dense != nullptr && team.thread() % 32 == 0) row.dense[h] = dense;
    }
    if (a.rule == Rule::coverage) continue;
    const double above = a.rule == Rule::learned ? static_cast<double>(a.thresholds[asked.first_head + h]) : a.mass;
    for (std::int32_t s = WarpTeam{}.thread(); s < row.spans; s += 32)
      marks[h * stride + s] = static_cast<double>(own[s]) > above && row.holds(s) ? 1 : 0;
  }
  team.sync();
  for (std::int32_t h = 0; a.rule == Rule::coverage && h < asked.heads; ++h)
    want_by_coverage(a.coverage, a.coverage_floor, team, sort, row, relevance + h * stride, marks + h * stride);
}

/// One block decides what one row and query opens, or guesses it before attention over the rows is known. A guess
/// leaves the logits as they are.
__global__ void __launch_bounds__(kMemoryThreads, 3)
    memory_attention_open_kernel(MemoryAttentionTask task, bool guess) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(std::uint32_t, counters, sort_counters(kMemoryThreads));
  const BlockTeam team(scratch);
  const Asked asked = asked_of(task, blockIdx.x, 1, task.a.group);
  const FoldedRow& row = *asked.row;
  const std::int64_t place = task.row_at(asked.token, row.head);
  if (!asked.there) {
    if (team.thread() == 0 && asked.token < row.first_query + row.queries) task.a.opened_count[place] = 0;
    return;
  }
  const std::int64_t stride = task.a.most_spans, first = task.head_at(asked.token, asked.first_head);
  float* const found = task.relevance + first * stride;  // what is learned needs no attention, and is no guess
  const bool keeps = guess && task.a.rule != MemoryAttentionArguments::Rule::learned;
  float* const relevance = keeps ? task.guessed + first * stride : found;
  std::uint8_t* marks = task.a.marks + first * stride;
  std::int32_t* list = task.a.opened + place * stride;
  std::uint64_t* entries = task.entries + 2 * place * stride;
  const SortScratch sort{counters, entries, entries + stride, list};
  want(task, team, sort, asked, guess, found, relevance, marks);
  const std::int32_t together = task.a.per_head ? 1 : asked.heads;
  for (std::int32_t h = 0; h < asked.heads; h += together)
    open_within(task.a, team, sort, row, {relevance + h * stride, marks + h * stride, together, stride},
                task.flags + place * stride);
  const SharingHeads all{relevance, marks, asked.heads, stride};
  const std::int32_t opened = write_kept(team, row.spans, [&](std::int32_t s) { return all.anyone(s); }, list);
  if (team.thread() == 0) task.a.opened_count[place] = opened;
}

/// One block lists the pieces of one row.
__global__ void __launch_bounds__(kMemoryThreads)
    memory_attention_pieces_kernel(MemoryAttentionTask task, FarPiece* pieces, std::int32_t* counts) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const BlockTeam team(scratch);
  const FoldedRow& row = task.a.rows[blockIdx.x];
  FarPiece* list = pieces + std::int64_t{blockIdx.x} * task.a.most_spans;
  std::int64_t used = task.a.late ? task.a.brought[blockIdx.x] : 0, listed = 0;
  for (std::int32_t first = 0; first < row.spans; first += team.size()) {
    const std::int32_t s = first + team.thread();
    bool wanted = false;
    if (s < row.spans) {
      const std::byte* now = task.a.late || task.a.keeps_near ? row.near[s] : nullptr;
      if (task.a.late)
        now = now == row.far[s] ? nullptr : now;
      else if (!task.a.keeps_near)
        row.near[s] = row.far[s];
      else if (now == row.far[s] || (now >= row.arena && now < row.arena + row.arena_bytes))
        row.near[s] = now = nullptr;
      if (now == nullptr && row.table[s].bytes > 0)
        for (std::int32_t q = 0; q < row.queries && !wanted; ++q) {
          const SharingHeads heads{
              nullptr, task.a.marks + task.head_at(row.first_query + q, row.head * task.a.group) * task.a.most_spans,
              task.a.group, task.a.most_spans};
          wanted = heads.anyone(s);
        }
    }
    const std::int64_t bytes = wanted ? row.table[s].bytes : 0, room = (bytes + 15) / 16 * 16;
    const std::int64_t at = used + static_cast<std::int64_t>(team.sum_before(static_cast<std::uint64_t>(room)));
    used += static_cast<std::int64_t>(team.sum(static_cast<std::uint64_t>(room)));
    const bool fits = wanted && at + room <= row.arena_bytes;
    const auto place = listed + static_cast<std::int64_t>(team.sum_before(fits ? 1 : 0));
    listed += static_cast<std::int64_t>(team.sum(fits ? 1 : 0));
    if (wanted) row.near[s] = fits ? row.arena + at : row.far[s];
    if (fits) list[place] = {row.far[s], row.arena + at, bytes};
  }
  if (team.thread() != 0) return;
  counts[blockIdx.x] = static_cast<std::int32_t>(listed);
  if (task.a.brought != nullptr && !task.a.late) task.a.brought[blockIdx.x] = used;
}

struct MergeShared {
  KVKEEP_HD explicit MergeShared(std::int32_t dim) {
    const auto of_dim = sizeof(float) * static_cast<std::size_t>(kMemoryHeads * staged_query(dim));
    queries = parts.take(of_dim);
    inner = parts.take(of_dim);
    drawn = parts.take(of_dim);
  }
  Parts parts;
  std::size_t queries, inner, drawn;
};

/// Softmaxes of up to kMemoryHeads heads while entries are merged into them. A thread holds component `d` of every
/// `apart`-th head from `first` on.
class Merging {
 public:
  __device__ Merging(std::int32_t dim, std::int32_t heads, float* weights, float* tops, float* sums, float* shrink,
                     float* drawn_sum)
      : weights_(weights),
        tops_(tops),
        totals_(sums),
        shrink_(shrink),
        drawn_sum_(drawn_sum),
        dim_(dim),
        heads_(heads) {
    const std::int32_t columns = (dim + 31) / 32 * 32;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    apart_ = kMemoryThreads / columns;
    d_ = thread % columns;
    first_ = thread / columns;
    if (d_ >= dim || first_ >= apart_) first_ = heads;  // holds nothing
  }

  /// Where the logit of entry t of the tile goes.
  [[nodiscard]] __device__ float& entry(std::int32_t h, std::int32_t t) const { return weights_[h * kMemoryTile + t]; }

  /// Turns the tile's `count` logits, which were written before, into weights, and brings what was summed, drawn
  /// [heads][rank] included, to the new scale.
  __device__ void weigh(std::int32_t count, float* drawn = nullptr, std::int32_t rank = 0) {
    __syncthreads();
    const auto thread = static_cast<std::int32_t>(threadIdx.x), h = thread / 32, lane = thread % 32;
    if (h < heads_) {
      float most = Running::kNothing, sum = 0;
      for (std::int32_t t = lane; t < count; t += 32) most = entry(h, t) > most ? entry(h, t) : most;
      most = WarpTeam{}.largest(most);
      const bool nothing = most == Running::kNothing;
      const float before = tops_[h], top = fmaxf(before, most), shrink = nothing ? 1.0F : expf(before - top);
      for (std::int32_t t = lane; t < count; t += 32) {
        const float x = entry(h, t), e = !nothing ? expf(x - top) : x == x ? 0.0F : x;  // NaN stays visible
        entry(h, t) = e;
        sum += e;
      }
      sum = sum_of_warp(sum);
      __syncwarp(kWholeWarp);  // every lane has read what lane 0 writes
      if (lane == 0) {
        tops_[h] = top;
        totals_[h] = totals_[h] * shrink + sum;
        shrink_[h] = shrink;
        drawn_sum_[h] = drawn_sum_[h] * shrink + sum;
      }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kMemoryHeads; ++k)
      if (first_ + k * apart_ < heads_) sums_[k] *= shrink_[first_ + k * apart_];
    for (std::int32_t i = thread; i < heads_ * rank; i += kMemoryThreads) drawn[i] *= shrink_[i / rank];
  }

  /// Adds `count` rows, each times its weight: weight h of row t is weights[h * stride + t].
  template <class T>
  __device__ void add_rows(const T* rows, std::int32_t count, const float* weights, std::int32_t stride) {
    if (first_ >= heads_) return;
#pragma unroll 4
    for (std::int32_t t = 0; t < count; ++t) {
      const float x = to_float(rows[std::int64_t{t} * dim_ + d_]);
#pragma unroll
      for (int k = 0; k < kMemoryHeads; ++k)
        if (first_ + k * apart_ < heads_) sums_[k] = fmaf(weights[(first_ + k * apart_) * stride + t], x, sums_[k]);
    }
  }
  /// The tile's rows.
  template <class T>
  __device__ void add_tile(const T* rows, std::int32_t count) {
    add_rows(rows, count, weights_, kMemoryTile);
    __syncthreads();
  }
  /// Begins the sum of the weights of a span.
  __device__ void begin_span() {
    __syncthreads();
    if (threadIdx.x < static_cast<unsigned>(heads_)) drawn_sum_[threadIdx.x] = 0;
  }
  [[nodiscard]] __device__ const float* drawn_sum() const { return drawn_sum_; }

  /// Writes to `to`, [parts][2 + dim], one head after the other.
  __device__ void write(float* to, std::int64_t head_stride) const {
    __syncthreads();
    if (threadIdx.x < static_cast<unsigned>(heads_)) {
      to[threadIdx.x * head_stride] = tops_[threadIdx.x];
      to[threadIdx.x * head_stride + 1] = totals_[threadIdx.x];
    }
#pragma unroll
    for (int k = 0; k < kMemoryHeads; ++k)
      if (first_ + k * apart_ < heads_) to[(first_ + k * apart_) * head_stride + 2 + d_] = sums_[k];
  }

 private:
  float sums_[kMemoryHeads] = {};
  float* weights_;         ///< [heads][kMemoryTile]
  float *tops_, *totals_;  ///< [heads]
  float* shrink_;          ///< [heads]
  float* drawn_sum_;       ///< [heads]
  std::int32_t dim_, heads_, apart_, d_, first_;
};

/// An opened span: logits from its key factors, values from the others, neither of them ever multiplied out.
template <class T>
class OpenedSpan {
 public:
  __device__ OpenedSpan(const MemoryAttentionTask& task, const FoldedRow& row, std::int32_t s, unsigned open)
      : span_(row.table[s]),
        blob_(reinterpret_cast<const T*>(row.near[s])),
        coarse_key_(reinterpret_cast<const T*>(row.coarse_keys) + std::int64_t{s} * task.a.dim),
        coarse_value_(reinterpret_cast<const T*>(row.coarse_values) + std::int64_t{s} * task.a.dim),
        scale_(task.a.scale),
        dim_(task.a.dim),
        open_(open) {}

  /// queries, inner, drawn: [heads][staged_query()]; offset: [heads].
  __device__ void merge(Merging& softmax, const float* queries, float* inner, float* drawn, float* offset,
                        std::int32_t heads) const {
    const SpanFactors &keys = span_.factors[0], &values = span_.factors[1];
    const T *left = blob_ + values.offset, *right = left + std::int64_t{span_.length} * values.rank;
    const std::int32_t rank = values.raw ? 0 : values.rank;
    softmax.begin_span();
    project(keys, queries, inner, offset, heads);
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < heads * rank; i += kMemoryThreads) drawn[i] = 0;
    for (std::int32_t first = 0; first < span_.length; first += kMemoryTile) {
      const std::int32_t count = span_.length - first < kMemoryTile ? span_.length - first : kMemoryTile;
      __syncthreads();
      logits(softmax, keys, first, count, queries, inner, offset, heads);
      softmax.weigh(count, drawn, rank);
      if (values.raw) {
        softmax.add_tile(left + std::int64_t{first} * dim_, count);
        continue;
      }
      __syncthreads();
      for (auto i = static_cast<std::int32_t>(threadIdx.x); i < heads * rank;
           i += kMemoryThreads) {  // (weights A) of the tile
        const std::int32_t h = i / rank, r = i - h * rank;
        float sum = drawn[i];
        for (std::int32_t t = 0; t < count; ++t)
          sum = fmaf(softmax.entry(h, t), to_float(left[std::int64_t{first + t} * rank + r]), sum);
        drawn[i] = sum;
      }
      __syncthreads();
    }
    if (values.raw) return;
    softmax.add_rows(right, rank, drawn, rank);
    if (values.centred) softmax.add_rows(coarse_value_, 1, softmax.drawn_sum(), 1);
  }

 private:
  /// inner = B q, offset = c . q.
  __device__ void project(const SpanFactors& keys, const float* queries, float* inner, float* offset,
                          std::int32_t heads) const {
    if (threadIdx.x < static_cast<unsigned>(heads)) offset[threadIdx.x] = 0;
    if (keys.raw) return;
    __syncthreads();
    row_products(blob_ + keys.offset + std::int64_t{span_.length} * keys.rank, keys.rank, dim_, queries, heads,
                 [&](std::int32_t r, std::int32_t h, float dot) { inner[h * keys.rank + r] = dot; });
    if (keys.centred)
      row_products(coarse_key_, 1, dim_, queries, heads,
                   [&](std::int32_t, std::int32_t h, float dot) { offset[h] = dot; });
  }

  /// Logits of tokens [first, first + count): nothing for heads that have not opened the span.
  __device__ void logits(const Merging& softmax, const SpanFactors& keys, std::int32_t first, std::int32_t count,
                         const float* queries, const float* inner, const float* offset, std::int32_t heads) const {
    const auto entry_of_head = [&](std::int32_t t, std::int32_t h, float dot) {
      softmax.entry(h, t) = (open_ >> h & 1U) != 0 ? scale_ * (dot + offset[h]) : Running::kNothing;
    };
    if (keys.raw) {
      row_products(blob_ + keys.offset + std::int64_t{first} * dim_, count, dim_, queries, heads, entry_of_head);
      return;
    }
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < heads * count; i += kMemoryThreads) {
      const std::int32_t h = i / count, t = i - h * count;
      const T* row = blob_ + keys.offset + std::int64_t{first + t} * keys.rank;
      float dot = 0;
      for (std::int32_t r = 0; r < keys.rank; ++r) dot = fmaf(to_float(row[r]), inner[h * keys.rank + r], dot);
      entry_of_head(t, h, dot);
    }
  }

  const MemorySpan& span_;
  const T* blob_;
  const T *coarse_key_, *coarse_value_;
  float scale_;
  std::int32_t dim_;
  unsigned open_;  ///< heads that have opened it, one bit each
};

/// One part of a row, for one query and up to kMemoryHeads heads: a run of its coarse entries, and every parts-th
/// opened span.
template <class T>
__global__ void __launch_bounds__(kMemoryThreads) memory_attention_merge_kernel(MemoryAttentionTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(float, weights, kMemoryHeads* kMemoryTile);
  KVKEEP_SHARED(float, tops, kMemoryHeads);
  KVKEEP_SHARED(float, sums, kMemoryHeads);
  KVKEEP_SHARED(float, shrink, kMemoryHeads);
  KVKEEP_SHARED(float, drawn_sum, kMemoryHeads);
  KVKEEP_SHARED(float, offset, kMemoryHeads);
  const auto parts = static_cast<unsigned>(task.parts);
  const Asked asked = asked_of(task, blockIdx.x / parts, task.slices, kMemoryHeads);
  if (!asked.there) return;
  const auto part = static_cast<std::int32_t>(blockIdx.x % parts);
  const FoldedRow& row = *asked.row;
  const MergeShared at(task.a.dim);
  auto* queries = reinterpret_cast<float*>(dynamic_shared() + at.queries);
  auto* inner = reinterpret_cast<float*>(dynamic_shared() + at.inner);
  auto* drawn = reinterpret_cast<float*>(dynamic_shared() + at.drawn);
  stage_queries(task, asked, queries);
  if (threadIdx.x < kMemoryHeads) {
    tops[threadIdx.x] = Running::kNothing;
    sums[threadIdx.x] = drawn_sum[threadIdx.x] = 0;
  }
  Merging softmax(task.a.dim, asked.heads, weights, tops, sums, shrink, drawn_sum);
  const std::int64_t first_head = task.head_at(asked.token, asked.first_head), stride = task.a.most_spans;
  const std::uint8_t* marks = task.a.marks + first_head * stride;
  const auto end = static_cast<std::int32_t>(std::int64_t{row.spans} * (part + 1) / task.parts);
  for (auto first = static_cast<std::int32_t>(std::int64_t{row.spans} * part / task.parts); first < end;
       first += kMemoryTile) {
    const std::int32_t count = end - first < kMemoryTile ? end - first : kMemoryTile;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < asked.heads * count; i += kMemoryThreads) {
      const std::int32_t h = i / count, t = i - h * count;
      softmax.entry(h, t) =
          marks[h * stride + first + t] != 0 ? Running::kNothing : task.coarse[(first_head + h) * stride + first + t];
    }
    softmax.weigh(count);
    softmax.add_tile(reinterpret_cast<const T*>(row.coarse_values) + std::int64_t{first} * task.a.dim, count);
  }
  const std::int64_t place = task.row_at(asked.token, row.head);
  for (std::int32_t i = part; i < task.a.opened_count[place]; i += task.parts) {
    const std::int32_t s = task.a.opened[place * stride + i];
    unsigned open = 0;
    for (std::int32_t h = 0; h < asked.heads; ++h) open |= marks[h * stride + s] != 0 ? 1U << h : 0U;
    if (open != 0) OpenedSpan<T>(task, row, s, open).merge(softmax, queries, inner, drawn, offset, asked.heads);
  }
  const std::int64_t width = task.a.dim + 2;
  softmax.write(task.partial + (first_head * task.parts + part) * width, task.parts * width);
}

constexpr std::int32_t kCombineThreads = 128;

/// One block combines the parts of one head with what was read before.
__global__ void __launch_bounds__(kCombineThreads) memory_attention_combine_kernel(MemoryAttentionTask task) {
  wait_for_earlier_kernels();
  const Asked asked = asked_of(task, blockIdx.x, task.a.group, 1);
  if (!asked.there) return;
  const std::int32_t dim = task.a.dim;
  const std::int64_t head = task.head_at(asked.token, asked.first_head), width = dim + 2;
  const float* parts = task.partial + head * task.parts * width;
  const float before = task.a.lse[head];
  float most = Running::kNothing;
  for (std::int32_t p = 0; p < task.parts; ++p) most = fmaxf(most, parts[p * width]);
  const float top = fmaxf(before, most), own = expf(before - top);
  float drawn = 0;
  for (std::int32_t p = 0; p < task.parts; ++p)
    drawn += parts[p * width + 1] * (most == Running::kNothing ? 1.0F : expf(parts[p * width] - top));
  if (drawn == 0 && most == Running::kNothing) return;  // every entry was nothing
  const float sum = own + drawn;
  float* out = task.a.out + head * dim;
  for (auto d = static_cast<std::int32_t>(threadIdx.x); d < dim; d += kCombineThreads) {
    float x = own > 0 ? own * out[d] : 0.0F;
    for (std::int32_t p = 0; p < task.parts; ++p) x = fmaf(parts[p * width + 2 + d], expf(parts[p * width] - top), x);
    out[d] = x / sum;
  }
  __syncthreads();  // every thread has read lse
  if (threadIdx.x == 0) task.a.lse[head] = top + logf(sum);
}

void check(const MemoryAttentionArguments& a) {
  require_aligned("memory_attention", a.workspace);
  check_dim("memory attention", a.dim);
  KVKEEP_REQUIRE(a.count >= 0 && a.most_spans >= 0 && a.most_queries >= 0 && a.tokens >= 0,
                 "memory attention: ", a.count, " rows of ", a.most_spans, " spans and ", a.most_queries, " queries, ",
                 a.tokens, " tokens; allowed 0 or more");
  KVKEEP_REQUIRE(a.kv_heads >= 1 && a.group >= 1, "memory attention: ", a.kv_heads, " KV heads of ", a.group,
                 " query heads; allowed 1 or more");
  check_wide("memory attention", "factors", a.store);
  check_wide("memory attention", "queries", a.query);
  KVKEEP_REQUIRE(a.rule != MemoryAttentionArguments::Rule::learned ||
                     (a.routed != nullptr && a.thresholds != nullptr && a.inner >= 1),
                 "memory attention: rule learned; given no router, or one of ", a.inner,
                 " numbers; allowed with its queries and thresholds, of 1 or more");
  constexpr std::int64_t kMost = 0x7FFFFFFF;
  const std::int64_t asked = std::int64_t{a.count} * a.most_queries,
                     of_asked = std::max<std::int64_t>(
                         {a.group, tuning::kMemoryParts,
                          (a.most_spans + kMemorySpans - 1) / kMemorySpans * ((a.group + 7) / 8)});
  KVKEEP_REQUIRE(asked <= kMost / of_asked, "memory attention: ", a.count, " rows with ", a.most_queries,
                 " queries are too many blocks; allowed ", kMost / of_asked, " of a row and a query");
}

void require_brought(const MemoryAttentionArguments& a) {
  check(a);
  KVKEEP_REQUIRE(a.brought != nullptr || a.count == 0, "memory attention: no room for what is brought of ", a.count,
                 " rows before attention is known; allowed `brought`");
}

void launch_logits(const MemoryAttentionTask& task, Stream stream) {
  const MemoryAttentionArguments& a = task.a;
  const std::int32_t chunks = (a.most_spans + kMemorySpans - 1) / kMemorySpans;
  with_wide_element(a.store, [&](auto element) {
    launch("memory_attention_logits",
           a.rule == MemoryAttentionArguments::Rule::learned ? memory_attention_logits_kernel<decltype(element), true>
                                                             : memory_attention_logits_kernel<decltype(element), false>,
           {.blocks = blocks_for(std::int64_t{a.count} * a.most_queries * task.slices * chunks),
            .threads = kMemoryThreads,
            .shared_bytes = LogitsShared(a.dim, true).parts.bytes},
           stream, task, chunks);
  });
}

void launch_opening(const MemoryAttentionTask& task, bool guess, Stream stream) {
  launch("memory_attention_open", memory_attention_open_kernel,
         {.blocks = blocks_for(std::int64_t{task.a.count} * task.a.most_queries), .threads = kMemoryThreads}, stream,
         task, guess);
}

}  // namespace

std::int64_t memory_attention_workspace_bytes(const MemoryAttentionArguments& arguments) {
  MemoryAttentionArguments sized = arguments;
  sized.workspace = nullptr;
  return MemoryAttentionTask(sized).bytes;
}

void launch_memory_route(const MemoryAttentionArguments& a, Stream stream) {
  check(a);
  const MemoryAttentionTask task(a);
  launch_logits(task, stream);
  launch_opening(task, false, stream);
}

void launch_memory_guess(const MemoryAttentionArguments& a, Stream stream) {
  require_brought(a);
  const MemoryAttentionTask task(a);
  launch_logits(task, stream);
  launch_opening(task, true, stream);
}

void launch_memory_open(const MemoryAttentionArguments& a, Stream stream) {
  require_brought(a);
  launch_opening(MemoryAttentionTask(a), false, stream);
}

void launch_memory_pieces(const MemoryAttentionArguments& a, FarPiece* pieces, std::int32_t* counts, Stream stream) {
  check(a);
  launch("memory_attention_pieces", memory_attention_pieces_kernel,
         {.blocks = blocks_for(a.count), .threads = kMemoryThreads}, stream, MemoryAttentionTask(a), pieces, counts);
}

void launch_memory_merge(const MemoryAttentionArguments& a, Stream stream) {
  check(a);
  const MemoryAttentionTask task(a);
  const std::int64_t asked = a.most_spans == 0 ? 0 : std::int64_t{a.count} * a.most_queries;
  with_wide_element(a.store, [&](auto element) {
    launch("memory_attention_merge", memory_attention_merge_kernel<decltype(element)>,
           {.blocks = blocks_for(asked * task.slices * task.parts),
            .threads = kMemoryThreads,
            .shared_bytes = MergeShared(a.dim).parts.bytes},
           stream, task);
  });
  launch("memory_attention_combine", memory_attention_combine_kernel,
         {.blocks = blocks_for(asked * a.group), .threads = kCombineThreads}, stream, task);
}

}  // namespace kvkeep::cuda
