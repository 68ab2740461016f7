// Window attention on matrix units. A warp has slots of its own: it reads their keys once, straight into the registers
// that a product takes them from, and multiplies them with all queries of the row, 16 at a time. The queries wait in
// shared memory. Logits never leave the registers; exponentials are powers of two.
//
// Queries are the left sides of products, 16 at a time, keys the right ones, eight. A sum over components may run in
// any order, so both are read in the same other one: of every 32 components of a key a lane has eight neighbouring
// ones, a word of 16 bytes, where two products want two pairs each.

#include "launch.cuh"
#include "parts.cuh"
#include "window_attention_task.cuh"
#include "workspace.h"

namespace kvkeep::cuda::attention {
namespace {

using tuning::kAttentionChunk;
using tuning::kMatrixThreads;

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2OfE = 1.44269504F;
constexpr float kFarAbove = 0x1p100F;  ///< times what a warp compares with: sums below it can be added up by the million
constexpr std::int32_t kWarps = kMatrixThreads / 32;
constexpr std::int32_t kStep = 16;  ///< queries that are multiplied at a time
constexpr std::int32_t kSpan = 32;  ///< components whose words are next to each other

/// What follows for a query from its product with a key: a share of 2^(product * factor + shift).
struct Line {
  float factor;
  float shift;
};

/// What a query counts for.
struct Mark {
  std::int32_t position;
  float newest;  ///< factor of its shares in newest
};

/// What is true of a step, in one number.
enum StepFlags : std::int32_t { kSplit = 1, kNewest = 2 };

/// 16 queries of a row as they are multiplied, times a power of two. kSpans: 2, 4 or 8 spans that the head size needs.
template <int kSpans>
struct alignas(16) Step {
  static constexpr std::int32_t kWords = 64 * kSpans;
  static constexpr std::int32_t kAll = kWords + (sizeof(Line) + sizeof(Mark)) * kStep / 16 + 1;  ///< words of the whole
  uint4 words[kWords];  ///< [spans, 2, 32] what a lane has of the left side of each product
  Line lines[kStep];
  Mark marks[kStep];
  int4 flags;  ///< x: StepFlags
};

/// All queries, each the sum of two numbers of the keys' dtype.
struct Prepared {
  std::byte* steps;       ///< Step [count, `most`] with the high numbers
  uint4* low;             ///< [count, most, kWords] the low ones, where a step's flags say that they are not all 0
  Plan* plans;            ///< [count]
  std::int32_t* arrived;  ///< [count] parts whose statistics are there
  std::int32_t most;      ///< steps of the largest product

  template <int kSpans>
  [[nodiscard]] __device__ Step<kSpans>* of() const {
    return reinterpret_cast<Step<kSpans>*>(steps);
  }
};

struct MatrixTask {
  Task of;
  Prepared queries;
  std::int32_t resident;  ///< steps that fit shared memory, or half as many where queries need both numbers
  std::int32_t at_once;   ///< chunks, or parts for their statistics, that a block looks at
};

/// Calls body with the spans that heads of `dim` components take, as a constant.
template <class Body>
decltype(auto) with_spans(std::int32_t dim, const Body& body) {
  if (dim <= 2 * kSpan) return body(std::integral_constant<int, 2>{});
  if (dim <= 4 * kSpan) return body(std::integral_constant<int, 4>{});
  return body(std::integral_constant<int, 8>{});
}

static_assert(sizeof(Step<4>) == sizeof(uint4) * Step<4>::kAll);

/// Divides the workspace. Returns its size.
std::int64_t divide(const EvidenceArguments& e, std::int32_t window, std::int32_t parts, void* workspace,
                    Prepared& queries, float2*& partial) {
  WorkspaceParts of(workspace);
  const std::int64_t products = std::int64_t{e.group} * window;
  queries.most = static_cast<std::int32_t>((products + kStep - 1) / kStep);
  with_spans(e.dim, [&](auto spans) {
    using Of = Step<spans()>;
    const std::int64_t all = std::int64_t{e.count} * queries.most;
    queries.steps = reinterpret_cast<std::byte*>(of.take<Of>(all));
    queries.low = of.take<uint4>(all * Of::kWords);
  });
  queries.plans = of.take<Plan>(e.count);
  queries.arrived = of.take<std::int32_t>(e.count);
  partial = of.take<float2>(e.count * parts * products);
  return of.bytes();
}

/// Splits 16 queries of a row, a thread for every eight components: into high and low numbers times a power of two that
/// brings the query's largest component to [1, 2), so that neither leaves f16.
template <class S, int kSpans>
__global__ void __launch_bounds__(kStep* kSpans * 4) queries_kernel(MatrixTask m) {
  const Task& task = m.of;
  const Prepared& to = m.queries;
  constexpr std::int32_t kParts = kSpans * 4;
  const std::int32_t dim = task.e.dim;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t q = thread / kParts, word = thread % kParts;
  for (std::int64_t work = blockIdx.x; work < std::int64_t{task.e.count} * to.most; work += gridDim.x) {
    const std::int64_t r = work / to.most;
    const std::int32_t n = static_cast<std::int32_t>(work - r * to.most) * kStep + q;
    if (!task.e.due(r)) continue;
    const Plan plan = plan_of(task, r);
    if (n == 0 && word == 0) {
      to.plans[r] = plan;
      to.arrived[r] = 0;
    }
    if (n - q >= plan.total) continue;
    const bool there = n < plan.total;
    const std::int32_t i = there ? plan.query_of(n) : 0;
    float x[8] = {};
    if (there && word * 8 < dim) {
      const std::int32_t head = n / plan.window;
      if (plan.queries != nullptr)
        load_wide<8>(plan.queries + head * head_stride(task) + std::int64_t{i} * dim + word * 8, Element::f32, x);
      else
        load_wide<8>(plan.view->at(plan.view->count - plan.window + i, plan.row->head * task.e.group + head) +
                         word * 8 * (task.e.query == Element::f32 ? 4 : 2),
                     task.e.query, x);
    }
    float largest = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(x[k]));
    for (std::int32_t step = kParts / 2; step > 0; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, step));
    std::int32_t exponent = static_cast<std::int32_t>(__float_as_uint(largest) >> 23U) - 127;
    if (exponent == -127 || exponent == 128) exponent = 0;  // zeros and subnormals; numbers that are not finite
    const float by = ldexpf(1.0F, -exponent);
    Elements<S> high, low;
    bool split = false;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      from_float(x[k] * by, high.x[k]);
      const float rest = x[k] * by - to_float(high.x[k]);
      from_float(rest, low.x[k]);
      split = split || rest != 0;
    }
    const bool newest = there && i == plan.window - 1;
    const bool any_split = __syncthreads_or(split ? 1 : 0) != 0, any_newest = __syncthreads_or(newest ? 1 : 0) != 0;
    // Pairs of components: two for the first product of the span, two for the second.
    Step<kSpans>& into = to.of<kSpans>()[work];
    auto* high_pairs = reinterpret_cast<Piece<S, 2>*>(into.words);
    auto* low_pairs = reinterpret_cast<Piece<S, 2>*>(to.low + work * Step<kSpans>::kWords);
    const std::int32_t place = (word / 4 * 64 + q % 8 * 4 + word % 4) * 4 + q / 8;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const std::int32_t at = place + pair / 2 * 32 * 4 + pair % 2 * 2;
      high_pairs[at] = {high.x[2 * pair], high.x[2 * pair + 1]};
      if (any_split) low_pairs[at] = {low.x[2 * pair], low.x[2 * pair + 1]};
    }
    if (word == 0) {
      const float lse = there && plan.lse != nullptr ? plan.lse[n / plan.window * std::int64_t{task.window} + i] : 0.0F;
      into.lines[q] = {there ? ldexpf(task.e.scale * kLog2OfE, exponent) : 0.0F,
                       there && plan.lse != nullptr && is_number(lse) ? -lse * kLog2OfE : kNothing};
      into.marks[q] = {there ? plan.position(i) : kFirst, newest ? 1.0F / static_cast<float>(task.e.group) : 0.0F};
    }
    if (thread == 0)
      into.flags = {(any_split ? kSplit : 0) + (any_newest && task.newest != nullptr ? kNewest : 0), 0, 0, 0};
  }
}

/// A slot that a warp has.
struct Place {
  std::int32_t newest;  ///< position from which on queries count it in newest
  std::int32_t column;  ///< the same in the column
  float scale;          ///< of a key of 8 bits
};

/// What a block does with a row, in shared memory, where it takes no registers.
struct Work {
  Plan plan;
  std::int64_t number;  ///< the next among all
  std::int64_t row;
  std::int64_t step0;      ///< the row's first step among all
  std::int32_t begin;      ///< first slot
  std::int32_t stop;       ///< behind the last one
  std::int32_t end;        ///< behind the last one that takes part
  std::int32_t part;       ///< slots whose statistics are taken together
  std::int32_t at_a_time;  ///< steps in shared memory
  bool some;               ///< there is any
  bool split;              ///< low numbers come with them, behind the steps
  bool aligned;

  [[nodiscard]] __device__ std::int32_t steps() const { return pieces(plan.total, kStep); }
};

/// Shared memory of a block with `resident` steps.
template <int kSpans, bool kApply>
struct MatrixShared {
  static constexpr std::int32_t kBlocks = kSpans > 4 ? 2 : 4;  ///< of eight slots that a warp has
  static constexpr std::int32_t kSlots = 8 * kBlocks, kRound = kWarps * kSlots;
  using Of = Step<kSpans>;
  static constexpr std::size_t kWork = 0;
  static constexpr std::size_t kPlaces = (sizeof(Work) + 31) / 32 * 32;
  static constexpr std::size_t kOwn = kPlaces + (sizeof(Place) * kRound + 31) / 32 * 32;  ///< words of each thread
  static constexpr std::size_t kRest = kOwn + sizeof(float4) * kMatrixThreads * (kApply ? kBlocks / 2 : 1);
  std::size_t steps, tops, sums, bytes;

  KVKEEP_HD explicit MatrixShared(std::int32_t resident) {
    const auto count = static_cast<std::size_t>(resident), states = kApply ? 0 : kWarps * kStep * count;
    Parts parts{kRest};
    steps = parts.take(sizeof(Of) * count);
    tops = parts.take(sizeof(float) * states);
    sums = parts.take(sizeof(float) * states);
    bytes = parts.bytes;
  }
};

/// Eight components of a key as they are stored. `own`: room of the thread for a key that is not aligned, which would
/// take many registers.
template <class T, bool kAligned>
__device__ inline uint4 key_word(const T* key, void* own) {
  Piece<T, 8> from;
  if constexpr (kAligned) {
    from = *reinterpret_cast<const Piece<T, 8>*>(key);
  } else {
#pragma unroll 1
    for (int k = 0; k < 8; ++k) static_cast<T*>(own)[k] = key[k];
    from = *static_cast<const Piece<T, 8>*>(own);
  }
  uint4 word{};
  memcpy(&word, &from, sizeof from);
  return word;
}

/// What a warp works with: of its block's shared memory, and of the slots that it has now. A lane has eight components
/// in 32 of slots 8 b + lane / 4, and of every product queries lane / 4 + 8 i and slots 8 b + lane % 4 * 2 + e, as
/// x[b][2 * i + e].
template <class T, int kSpans, bool kApply>
class Slots {
  using Shared = MatrixShared<kSpans, kApply>;
  static constexpr int kBlocks = Shared::kBlocks;
  using Products = float[kBlocks][4];

 public:
  using Sums = float[2 * kBlocks];  ///< of the lane's slots, [2 * b + e]

  __device__ Slots(const Task& task, std::byte* shared, const Shared& parts, std::int32_t resident)
      : task_(task),
        work_(*reinterpret_cast<const Work*>(shared + Shared::kWork)),
        steps_(reinterpret_cast<const Step<kSpans>*>(shared + parts.steps)),
        places_(reinterpret_cast<Place*>(shared + Shared::kPlaces) + warp() * Shared::kSlots),
        own_(reinterpret_cast<float4*>(shared + Shared::kOwn) + threadIdx.x),
        tops_(reinterpret_cast<float*>(shared + parts.tops) + warp() * resident * kStep),
        sums_(reinterpret_cast<float*>(shared + parts.sums) + warp() * resident * kStep) {}

  [[nodiscard]] __device__ static std::int32_t warp() { return static_cast<std::int32_t>(threadIdx.x / 32); }

  /// Reads the keys of slots [tile, end), at most kSlots of them and possibly none.
  __device__ void read(std::int32_t tile, std::int32_t end) {
    const Plan& plan = work_.plan;
    const Row& row = *plan.row;
    if (work_.aligned)
      read_keys<true>(row.keys, tile, end);
    else
      read_keys<false>(row.keys, tile, end);
    if constexpr (std::is_same_v<T, Bits8>) widen();  // once all of them are under way
    clear_ = tile >= plan.from && tile + Shared::kSlots <= end;
    if (clear_ && task_.kind != Kind::history)
      clear_ = row.positions[tile + Shared::kSlots - 1] <= plan.position(0) &&
               (!kApply || task_.kind != Kind::window || tile + Shared::kSlots <= plan.history);
    __syncwarp();
    if (lane() < Shared::kSlots) {
      const std::int32_t slot = tile + lane(), at = slot < end ? slot_position(task_, plan, slot) : kNever;
      // On the suffix only strictly later queries count.
      places_[lane()] = {at, task_.kind == Kind::window && slot >= plan.history && at != kNever ? at + 1 : at,
                         slot < end ? key_scale<T>(row, slot) : 0.0F};
    }
    __syncwarp();
  }

  /// The slots have got nothing in newest. What a lane's queries give its slots there is in shared memory: few steps
  /// add to it, and it takes no registers.
  __device__ void begin_newest() const {
#pragma unroll
    for (int b = 0; b < kBlocks; b += 2) own_[b / 2 * kMatrixThreads] = {0, 0, 0, 0};
  }

  /// Adds what `count` steps of queries give the slots.
  __device__ void give(std::int32_t count, Sums& columns) const {
    bool clear = clear_;
    for (std::int32_t step = 0; step < count;) {
      Products x;
      multiply(step, x);
      if (clear && !give_all(step, x, columns)) {
        clear = false;  // once more, with a look at every number
        continue;
      }
      if (!clear) give_some(step, x, columns);
      clear = clear_;
      ++step;
    }
  }

  /// Takes the statistics of `count` steps of queries over the slots, into the warp's own. first: it has none yet.
  __device__ void take(std::int32_t count, bool first) const {
    const bool all = clear_ && !first;
    bool clear = all;
    __syncwarp();
    for (std::int32_t step = 0; step < count;) {
      Products x;
      multiply(step, x);
      if (clear && !take_all(step, x)) {
        clear = false;
        continue;
      }
      if (!clear) take_some(step, x);
      clear = all;
      ++step;
    }
  }

  /// The warp's statistics of nothing.
  __device__ void begin(std::int32_t first, std::int32_t count) const {
    for (std::int32_t q = lane(); q < count * kStep; q += 32) {
      tops_[q] = first * kStep + q < work_.plan.total ? kNothing : 0.0F;
      sums_[q] = 0;
    }
  }

  /// Writes what the slots got, those of them before `stop`.
  __device__ void write(Sums& columns, std::int32_t tile, std::int32_t stop) const {
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
    const std::int32_t t = tile + slot_of(own / 2, own % 2);
    if (t < stop && (kBlocks == 4 || (lane() & 4) == 0)) write_slot(task_, work_.plan, t, column_sum, newest_sum);
  }

 private:
  [[nodiscard]] __device__ static std::int32_t lane() { return static_cast<std::int32_t>(threadIdx.x % 32); }
  [[nodiscard]] __device__ static std::int32_t slot_of(std::int32_t block, std::int32_t e) {
    return 8 * block + lane() % 4 * 2 + e;
  }
  /// Of the lane's i-th query.
  [[nodiscard]] __device__ const Line& line(std::int32_t step, int i) const {
    return steps_[step].lines[8 * i + lane() / 4];
  }
  [[nodiscard]] __device__ const Mark& mark(std::int32_t step, int i) const {
    return steps_[step].marks[8 * i + lane() / 4];
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

  /// What is behind the last slot or component is any other one: its products count for nothing.
  template <bool kAligned>
  __device__ void read_keys(const SlotAddress keys, std::int32_t tile, std::int32_t end) {
    const std::int32_t first = lane() % 4 * 8;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const std::int32_t slot = tile + 8 * b + lane() / 4;
      const T* key = reinterpret_cast<const T*>(keys.at(slot < end ? slot : 0));
#pragma unroll
      for (int s = 0; s < kSpans; ++s) {
        const std::int32_t d = s * kSpan + first;
        keys_[b][s] = key_word<T, kAligned>(key + (d < task_.e.dim ? d : 0), own_);
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

  __device__ void multiply(std::int32_t step, Products& x) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int k = 0; k < 4; ++k) x[b][k] = 0;
    add_products(steps_[step].words + lane(), x);
    if ((steps_[step].flags.x & kSplit) != 0)
      add_products(reinterpret_cast<const uint4*>(steps_ + work_.at_a_time) + step * Step<kSpans>::kWords + lane(), x);
    if constexpr (std::is_same_v<T, Bits8>) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float scale = places_[slot_of(b, e)].scale;
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

  /// give() of one step where every query sees every slot. Returns false, having added nothing, if a logit is no
  /// number. x: products, shares afterwards.
  __device__ bool give_all(std::int32_t step, Products& x, Sums& columns) const {
    const Line lines[2] = {line(step, 0), line(step, 1)};
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
    if ((steps_[step].flags.x & kNewest) != 0) give_newest(step, x);
    return true;
  }

  /// give() of one step where a query does not see a slot, or a logit is no number. Adds in the same order.
  __device__ void give_some(std::int32_t step, Products& x, Sums& columns) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Place place = places_[slot_of(b, e)];
        float counted[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& share = x[b][2 * i + e];
          const Line line = this->line(step, i);
          const std::int32_t position = mark(step, i).position;
          share = is_number(share * line.factor) ? exp2_of(fmaf(share, line.factor, line.shift)) : 0.0F;
          counted[i] = place.column <= position ? share : 0.0F;
          if (place.newest > position) share = 0;
        }
        columns[2 * b + e] += counted[0] + counted[1];
      }
    if ((steps_[step].flags.x & kNewest) != 0) give_newest(step, x);
  }

  /// Adds shares to newest.
  __device__ void give_newest(std::int32_t step, const Products& shares) const {
    const float counts[2] = {mark(step, 0).newest, mark(step, 1).newest};
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

  /// take() of one step where every query sees every slot and the warp has seen some. Returns false, having added
  /// nothing, if a logit is no number, or far above what was seen.
  __device__ bool take_all(std::int32_t step, const Products& x) const {
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = line(step, i).factor, top = tops_[step * kStep + 8 * i + lane() / 4];
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
    if ((lane() & 2) == 0) sums_[step * kStep + lane() / 4 + (odd ? 8 : 0)] += sum;
    return true;
  }

  /// take() of one step where a query does not see a slot, a logit is no number, or there is nothing to compare with.
  __device__ void take_some(std::int32_t step, const Products& x) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int32_t q = step * kStep + 8 * i + lane() / 4, position = mark(step, i).position;
      const float factor = line(step, i).factor, before = tops_[q];
      float top = before, sum = 0;
      bool seen[kBlocks][2];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float logit = x[b][2 * i + e] * factor;
          seen[b][e] = places_[slot_of(b, e)].newest <= position && is_number(logit);
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

  const Task& task_;
  const Work& work_;
  const Step<kSpans>* steps_;
  Place* places_;
  float4* own_;
  float *tops_, *sums_;
  uint4 keys_[kBlocks][kSpans];
  bool clear_;  ///< every query sees every slot that the warp has
};

/// Brings `count` steps of a row's queries from `first` on to shared memory. The block waits before and after.
template <int kSpans>
__device__ void bring(const Prepared& queries, const Work& work, std::int32_t first, std::int32_t count,
                      std::byte* to) {
  using Of = Step<kSpans>;
  const Of* from = queries.of<kSpans>() + work.step0 + first;
  auto* words = reinterpret_cast<uint4*>(to);
  __syncthreads();
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count * Of::kAll; i += kMatrixThreads)
    copy_ahead(words + i, reinterpret_cast<const uint4*>(from) + i);
  if (work.split) {
    const uint4* low = queries.low + (work.step0 + first) * Of::kWords;
    words += work.at_a_time * Of::kAll;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count * Of::kWords; i += kMatrixThreads)
      if ((from[i / Of::kWords].flags.x & kSplit) != 0) copy_ahead(words + i, low + i);
  }
  wait_for_copies();
  __syncthreads();
}

/// Writes the statistics of the part of a row that begins at `begin` for `count` steps of queries from `first` on: what
/// the warps found.
template <class Shared>
__device__ void combine_warps(const MatrixTask& m, const Work& work, std::int32_t begin, std::int32_t first,
                              std::int32_t count, std::byte* shared, const Shared& parts) {
  const auto* tops = reinterpret_cast<const float*>(shared + parts.tops);
  const auto* sums = reinterpret_cast<const float*>(shared + parts.sums);
  const std::int32_t left = work.plan.total - first * kStep, queries = left < count * kStep ? left : count * kStep;
  float2* to = m.of.partial + (work.row * m.of.parts + begin / work.part) * m.of.most + first * kStep;
  __syncthreads();
  for (auto q = static_cast<std::int32_t>(threadIdx.x); q < queries; q += kMatrixThreads) {
    float top = kNothing, sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w * m.resident * kStep + q]);
#pragma unroll
    for (int w = 0; w < kWarps && top > kNothing; ++w)
      sum = fmaf(sums[w * m.resident * kStep + q], exp2_of(tops[w * m.resident * kStep + q] - top), sum);
    to[q] = {top, sum};
  }
  __syncthreads();
}

/// Counts the parts of a row that the block looked at as there. The block that finds all of them there sets the shifts
/// of the row's queries, from the parts in ascending order.
template <int kSpans>
__device__ void arrive(const MatrixTask& m, const Work& work) {
  const Plan& plan = work.plan;
  const std::int64_t r = work.row;
  const std::int32_t all = pieces(plan.row->length, work.part), parts = pieces(work.stop - work.begin, work.part);
  __threadfence();
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) last = atomicAdd(m.queries.arrived + r, parts) + parts == all;
  if (__syncthreads_or(last ? 1 : 0) == 0) return;
  __threadfence();
  const Task& task = m.of;
  for (auto n = static_cast<std::int32_t>(threadIdx.x); n < plan.total; n += kMatrixThreads) {
    float top = kNothing, sum = 0;
    for (std::int32_t p = 0; p < all; ++p)
      top = fmaxf(top, __ldcg(task.partial + (r * task.parts + p) * task.most + n).x);
    for (std::int32_t p = 0; p < all && top > kNothing; ++p) {
      const float2 of = __ldcg(task.partial + (r * task.parts + p) * task.most + n);
      sum = fmaf(of.y, exp2_of(of.x - top), sum);
    }
    float shift = sum > 0 ? -(top + log2f(sum)) : kNothing;
    if (task.kind == Kind::history && plan.query_of(n) == plan.window - 1)
      shift += log2f(static_cast<float>(task.newest_counts));
    m.queries.of<kSpans>()[work.step0 + n / kStep].lines[n % kStep].shift = shift;
  }
}

/// Fills `work` with the block's next. Returns false if there is none. The whole block calls, and waits.
template <int kSpans, bool kApply>
__device__ bool find_work(const MatrixTask& m, Work& work) {
  const Task& task = m.of;
  __syncthreads();
  if (threadIdx.x == 0) {
    const std::int32_t pieces_of_a_row =
        pieces(kApply ? pieces(task.e.longest, kAttentionChunk) : task.parts, m.at_once);
    const std::int64_t all = std::int64_t{task.e.count} * pieces_of_a_row;
    for (work.some = false; !work.some && work.number < all; work.number += gridDim.x) {
      const std::int64_t r = work.number / pieces_of_a_row;
      if (!task.e.due(r)) continue;
      const std::int32_t length = task.e.rows[r].length, part = kApply ? kAttentionChunk : part_of(length);
      const std::int64_t begin = (work.number - r * pieces_of_a_row) * m.at_once * part,
                         stop = begin + std::int64_t{m.at_once} * part;
      work.plan = m.queries.plans[r];
      work.some = begin < length && (kApply || work.plan.total > 0);
      work.row = r;
      work.step0 = r * m.queries.most;
      work.part = part;
      work.begin = static_cast<std::int32_t>(begin);
      work.stop = stop < length ? static_cast<std::int32_t>(stop) : length;
      work.end = work.plan.to < work.stop ? work.plan.to : work.stop;
      work.aligned = is_aligned(work.plan.row->keys);
    }
  }
  __syncthreads();
  if (!work.some) return false;
  std::int32_t flags = 0;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < work.steps(); i += kMatrixThreads)
    flags |= m.queries.of<kSpans>()[work.step0 + i].flags.x;
  const bool split = __syncthreads_or(flags & kSplit) != 0;
  if (threadIdx.x == 0) {
    work.split = split;
    work.at_a_time = split ? m.resident / 2 : m.resident;
  }
  __syncthreads();
  return true;
}

template <class T, int kSpans, bool kApply>
__global__ void __launch_bounds__(kMatrixThreads, 2) matrix_kernel(MatrixTask m) {
  using Shared = MatrixShared<kSpans, kApply>;
  using Warp = Slots<T, kSpans, kApply>;
  const Shared parts(m.resident);
  std::byte *shared = dynamic_shared(), *steps = shared + parts.steps;
  Work& work = *reinterpret_cast<Work*>(shared + Shared::kWork);
  const std::int32_t own = Warp::warp() * Shared::kSlots;
  if (threadIdx.x == 0) work.number = blockIdx.x;
  while (find_work<kSpans, kApply>(m, work)) {
    if constexpr (kApply) {
      for (std::int32_t round = work.begin; round < work.stop; round += Shared::kRound) {
        Warp slots(m.of, shared, parts, m.resident);
        const bool some = round + own < work.end;
        slots.read(round + own, work.end);
        typename Warp::Sums columns = {};
        slots.begin_newest();
        for (std::int32_t s = 0; s < work.steps(); s += work.at_a_time) {
          const std::int32_t left = work.steps() - s, count = left < work.at_a_time ? left : work.at_a_time;
          if (round == work.begin || work.steps() > work.at_a_time) bring<kSpans>(m.queries, work, s, count, steps);
          if (some) slots.give(count, columns);
        }
        slots.write(columns, round + own, work.stop);
      }
    } else {
      for (std::int32_t s = 0; s < work.steps(); s += work.at_a_time) {
        const std::int32_t left = work.steps() - s, count = left < work.at_a_time ? left : work.at_a_time;
        bring<kSpans>(m.queries, work, s, count, steps);
        for (std::int32_t begin = work.begin; begin < work.stop; begin += work.part) {
          const std::int32_t end = work.end - begin < work.part ? work.end : begin + work.part;
          Warp(m.of, shared, parts, m.resident).begin(s, count);
          for (std::int32_t tile = begin + own; tile < end; tile += Shared::kRound) {
            Warp slots(m.of, shared, parts, m.resident);
            slots.read(tile, end);
            slots.take(count, tile == begin + own);
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

/// Steps of queries that a block keeps in shared memory: so many that two blocks fit a multiprocessor. Where that is not
/// all of them, they come in turns of about the same size.
template <int kSpans, bool kApply>
std::int32_t resident_steps(std::int32_t wanted) {
  const std::size_t limit = (static_cast<std::size_t>(of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin)) - 1024) / 2;
  std::int32_t most = 2;  // a block has 1 KiB more than it asks for
  while (most < wanted && MatrixShared<kSpans, kApply>(most + 2).bytes <= limit) most += 2;
  const std::int32_t turns = pieces(wanted, most);
  return pieces(pieces(wanted, turns), 2) * 2;
}

/// pieces_of_a_row: chunks or parts of the longest row.
template <class T, int kSpans, bool kApply>
void launch_pass(const char* name, MatrixTask m, std::int32_t pieces_of_a_row, Stream stream) {
  // Queries that come in the keys' own dtype need no second number; those that were turned do.
  const bool likely_split = m.of.queries != nullptr || with_element(m.of.e.query, [](auto x) {
    return !std::is_same_v<decltype(x), MatrixElement<T>>;
  });
  m.resident = resident_steps<kSpans, kApply>(likely_split ? m.queries.most * 2 : m.queries.most);
  const std::int64_t blocks = std::int64_t{of_device(cudaDevAttrMultiProcessorCount)} * tuning::kMatrixBlocks,
                     at_once = std::int64_t{m.of.e.count} * pieces_of_a_row / blocks;
  m.at_once = at_once < 1                       ? 1
              : at_once < tuning::kMatrixChunks ? static_cast<std::int32_t>(at_once)
                                                : tuning::kMatrixChunks;
  launch(name, matrix_kernel<T, kSpans, kApply>,
         {.blocks = blocks_for(std::int64_t{m.of.e.count} * pieces(pieces_of_a_row, m.at_once)),
          .threads = kMatrixThreads,
          .shared_bytes = MatrixShared<kSpans, kApply>(m.resident).bytes},
         stream, m);
}

}  // namespace

std::int64_t matrix_workspace_bytes(const EvidenceArguments& e, std::int32_t window, std::int32_t parts) {
  Prepared queries{};
  float2* partial = nullptr;
  return divide(e, window, parts, nullptr, queries, partial);
}

void launch_on_matrix_units(const Task& task, void* workspace, Stream stream) {
  MatrixTask m{};
  m.of = task;
  divide(task.e, task.window, task.parts, workspace, m.queries, m.of.partial);
  with_element(task.e.keys, [&](auto type) {
    using T = decltype(type);
    with_spans(task.e.dim, [&](auto spans) {
      if constexpr (!std::is_same_v<T, float>) {
        launch("attention_queries", queries_kernel<MatrixElement<T>, spans()>,
               {.blocks = blocks_for(std::int64_t{task.e.count} * m.queries.most), .threads = kStep * spans() * 4},
               stream, m);
        if (task.log_sum_exp == nullptr) launch_pass<T, spans(), false>("attention_statistics", m, task.parts, stream);
        launch_pass<T, spans(), true>("attention", m, pieces(task.e.longest, kAttentionChunk), stream);
      }
    });
  });
}

}  // namespace kvkeep::cuda::attention
