// SPDX-License-Identifier: Apache-2.0
#include "chunks.h"

#include "launch.cuh"
#include "select.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

struct ChunksTask {
  ChunksArguments a;
  double* sums;         ///< [slots] score of each slot, over the heads
  std::uint64_t* keys;  ///< [count, chunks] order of each chunk; 0: every slot of it is protected
  std::int32_t chunks;  ///< of the longest row
};

/// Where items, taken from the largest down, stop fitting.
struct ChunksCut {
  bool there;         ///< false: all fit
  std::uint64_t key;  ///< of the first that does not fit, and its number
  std::int32_t number;
  std::int32_t left;  ///< room left when it comes

  [[nodiscard]] __device__ bool fits(std::uint64_t of, std::int32_t n) const {
    return !there || of > key || (of == key && n > number);
  }
};

/// Items [from, to) by key_of(i), then by the larger i, into room for `wanted`, each weight_of(i) wide. An item with
/// key 0 is ignored. `histogram`: kDigits counters of shared memory.
template <class KeyOf, class WeightOf>
__device__ ChunksCut cut_of(const BlockTeam& team, std::int32_t* histogram, std::int32_t from, std::int32_t to,
                            std::int32_t wanted, const KeyOf& key_of, const WeightOf& weight_of) {
  const WarpTeam warp;
  ChunksCut cut{true, 0, 0, wanted};
  std::uint64_t key_mask = 0;
  std::uint32_t number = 0, number_mask = 0;
  for (int step = 0; step < 12; ++step) {
    const bool of_key = step < 8;
    const int shift = of_key ? 56 - 8 * step : 88 - 8 * step;
    if (!of_key && (to - 1) >> shift == 0) continue;  // the digit of every number is 0
    for (std::int32_t i = team.thread(); i < kDigits; i += team.size()) histogram[i] = 0;
    team.sync();
    for (std::int32_t i = from + team.thread(); i < to; i += team.size()) {
      const std::uint64_t key = key_of(i);
      if (key == 0 || (key & key_mask) != cut.key || (static_cast<std::uint32_t>(i) & number_mask) != number) continue;
      atomicAdd(&histogram[of_key ? key >> shift & 255U : static_cast<std::uint32_t>(i) >> shift & 255U], weight_of(i));
    }
    team.sync();
    // Every warp reads the counters for itself: lane l those of digits 255 - 8 l downwards.
    std::int32_t own = 0;
    for (int i = 0; i < 8; ++i) own += histogram[255 - 8 * warp.thread() - i];
    const auto above = static_cast<std::int32_t>(warp.sum_before(static_cast<std::uint64_t>(own)));
    const bool here = above <= cut.left && cut.left < above + own;
    std::int32_t digit = 0, left = 0;
    if (here) {
      left = cut.left - above;
      digit = 255 - 8 * warp.thread();
      while (left >= histogram[digit]) left -= histogram[digit--];
    }
    const unsigned votes = __ballot_sync(kWholeWarp, here ? 1 : 0);
    team.sync();
    if (votes == 0) return {false, 0, 0, 0};
    const int lane = __ffs(static_cast<int>(votes)) - 1;
    digit = __shfl_sync(kWholeWarp, digit, lane);
    cut.left = __shfl_sync(kWholeWarp, left, lane);
    if (of_key) {
      cut.key |= static_cast<std::uint64_t>(digit) << shift;
      key_mask |= std::uint64_t{255} << shift;
    } else {
      number |= static_cast<std::uint32_t>(digit) << shift;
      number_mask |= std::uint32_t{255} << shift;
    }
  }
  cut.number = static_cast<std::int32_t>(number);
  return cut;
}

__global__ void __launch_bounds__(tuning::kMostThreads) chunks_kernel(ChunksTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(std::int32_t, histogram, kDigits);
  const BlockTeam team(scratch);
  const ChunksArguments& a = task.a;
  const std::int32_t chunk = a.options.chunk, together = a.options.heads == ChunksOptions::Heads::shared ? a.heads : 1;
  const auto kept_of = [&](std::int64_t r) { return static_cast<std::int32_t>(a.indptr[r + 1] - a.indptr[r]); };
  for (std::int64_t n = blockIdx.x; n < a.count / together; n += gridDim.x) {
    const std::int64_t first = n * together;
    const std::int32_t length = a.rows[first].length, kept = kept_of(first);
    const auto keep_the_oldest = [&](std::int64_t r) {
      for (std::int32_t t = team.thread(); t < kept_of(r); t += team.size()) a.slots[a.indptr[r] + t] = t;
    };
    if (!a.limits[first].due) {
      for (std::int64_t r = first; r < first + together; ++r) keep_the_oldest(r);
      continue;
    }
    const Protected guarded = a.options.heads == ChunksOptions::Heads::shared
                                  ? protected_by_any(a.limits + first, a.heads, length, a.variant)
                                  : a.limits[first].guarded;

    double* sums = task.sums + a.rows[first].first;
    std::uint64_t* keys = task.keys + first * task.chunks;
    for (std::int32_t t = team.thread(); t < length; t += team.size()) {
      auto sum = static_cast<double>(a.scores[a.rows[first].first + t]);
      for (std::int64_t r = first + 1; r < first + together; ++r)
        sum += static_cast<double>(a.scores[a.rows[r].first + t]);
      sums[t] = sum;
    }
    team.sync();
    const std::int32_t chunks = chunks_in(length, chunk);
    for (std::int32_t c = team.thread(); c < chunks; c += team.size()) {
      const SlotRange slots = free_slots(c, chunk, length, guarded);
      keys[c] = free_count(slots, guarded) == 0 ? 0 : order_of(chunk_mean(sums, slots, guarded));
    }
    team.sync();

    const ChunksCut whole = cut_of(
        team, histogram, 0, chunks, kept - guarded.count(), [&](std::int32_t c) { return keys[c]; },
        [&](std::int32_t c) { return free_count(free_slots(c, chunk, length, guarded), guarded); });
    ChunksCut part{true, ~std::uint64_t{0}, 0, 0};  // of the chunk that does not fit
    if (whole.there && whole.left > 0) {
      const SlotRange slots = free_slots(whole.number, chunk, length, guarded);
      part = cut_of(
          team, histogram, slots.from, slots.to, whole.left,
          [&](std::int32_t t) { return guarded.pins_slot(t) ? 0 : order_of(sums[t]); }, [](std::int32_t) { return 1; });
    }
    const auto keeps = [&](std::int32_t t) {
      if (guarded.holds(t, length)) return true;
      const std::int32_t c = t / chunk;
      if (whole.there && c == whole.number) return part.fits(order_of(sums[t]), t);
      return whole.fits(keys[c], c);
    };
    std::int32_t* to = a.slots + a.indptr[first];
    write_kept(team, length, keeps, to);
    team.sync();
    for (std::int64_t r = first + 1; r < first + together; ++r) {
      if (!a.limits[r].due) {
        keep_the_oldest(r);
        continue;
      }
      for (std::int32_t i = team.thread(); i < kept_of(r) && i < kept; i += team.size())
        a.slots[a.indptr[r] + i] = to[i];
    }
    team.sync();
  }
}

/// Assigns the parts of the workspace. Returns its size.
std::int64_t divide(const ChunksArguments& a, ChunksTask& task) {
  task.a = a;
  task.chunks = a.longest > 0 ? chunks_in(a.longest, a.options.chunk) : 0;
  task.sums = static_cast<double*>(a.workspace);
  task.keys = task.sums == nullptr ? nullptr : reinterpret_cast<std::uint64_t*>(task.sums + a.slots_in_all);
  return 8 * (a.slots_in_all + std::int64_t{a.count} * task.chunks);
}

}  // namespace

std::int64_t chunks_workspace_bytes(const ChunksArguments& arguments) {
  ChunksTask task{};
  return divide(arguments, task);
}

void launch_chunks(const ChunksArguments& a, Stream stream) {
  require_aligned("chunks", a.workspace);
  KVKEEP_REQUIRE(a.options.chunk >= 1, "chunks: chunk; given ", a.options.chunk, "; allowed from 1 on");
  ChunksTask task{};
  divide(a, task);
  const std::int32_t together = a.options.heads == ChunksOptions::Heads::shared ? a.heads : 1;
  launch("chunks", chunks_kernel, {.blocks = blocks_for(a.count / together), .threads = tuning::threads_for(a.longest)},
         stream, task);
}

}  // namespace kvkeep::cuda
