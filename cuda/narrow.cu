// SPDX-License-Identifier: Apache-2.0
#include "narrow.h"

#include "batch.cuh"
#include "launch.cuh"
#include "select.cuh"
#include "tuning.cuh"
#include "word.cuh"

namespace kvkeep::cuda {
namespace {

using tuning::kCompactThreads;
using tuning::kCompactWords;
using tuning::kMostThreads;

struct NarrowTask {
  Batch<RankedPrompt> prompts;
  const std::int32_t* ranks;
  const LayerSelection* states;
  std::int32_t* tokens;
  std::int32_t select, window, layer;
};

__global__ void __launch_bounds__(kMostThreads) narrow_kernel(NarrowTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const BlockTeam team(scratch);
  const RankedPrompt& prompt = task.prompts.of[blockIdx.x];
  const LayerSelection* state = task.states == nullptr ? nullptr : task.states + prompt.state;
  if (state != nullptr && task.layer >= 0 && state->layer != task.layer) return;
  const std::int32_t* ranks = task.ranks + prompt.ranks;
  const std::int32_t best = state != nullptr && state->enough >= 0 ? state->enough : task.select - task.window;
  write_kept(
      team, prompt.ranked + task.window, [&](std::int32_t t) { return t >= prompt.ranked || ranks[t] <= best; },
      task.tokens + prompt.kept);
}

constexpr std::int32_t kTile = kCompactThreads * kCompactWords;

struct GatherRowsTask {
  Batch<GatheredPrompt> prompts;
  const std::int32_t* tokens;
  const std::byte* from;
  std::byte* to;
  std::int64_t from_stride, to_stride;
  std::int32_t words;  ///< of a row
  std::int32_t each;   ///< rows that one block copies at a time
};

/// Blocks with the same y walk the rows of one prompt. A thread requests several words before it writes the first.
template <class Word>
__global__ void __launch_bounds__(kCompactThreads) narrow_gather_rows_kernel(GatherRowsTask a) {
  wait_for_earlier_kernels();
  const GatheredPrompt& prompt = a.prompts.of[blockIdx.y];
  const std::int32_t* list = prompt.kept < 0 ? nullptr : a.tokens + prompt.kept;
  const std::byte* from = a.from + prompt.from * a.from_stride;
  std::byte* to = a.to + prompt.to * a.to_stride;
  for (std::int64_t begin = std::int64_t{blockIdx.x} * a.each; begin < prompt.rows;
       begin += std::int64_t{gridDim.x} * a.each) {
    const std::int64_t left = prompt.rows - begin;
    const std::int32_t all = static_cast<std::int32_t>(left < a.each ? left : a.each) * a.words;
    for (std::int32_t first = 0; first < all; first += kTile) {
      Word held[kCompactWords];
      Word* target[kCompactWords];
#pragma unroll
      for (int i = 0; i < kCompactWords; ++i) {
        const std::int32_t n = first + i * kCompactThreads + static_cast<std::int32_t>(threadIdx.x), own = n / a.words,
                           word = n - own * a.words;
        target[i] = nullptr;
        if (n >= all) continue;
        const std::int64_t row = begin + own, source = list == nullptr ? row : list[row];
        held[i] = reinterpret_cast<const Word*>(from + source * a.from_stride)[word];
        target[i] = reinterpret_cast<Word*>(to + row * a.to_stride) + word;
      }
#pragma unroll
      for (int i = 0; i < kCompactWords; ++i)
        if (target[i] != nullptr) *target[i] = held[i];
    }
  }
}

}  // namespace

void launch_narrow(const NarrowArguments& a, Stream stream) {
  KVKEEP_REQUIRE(a.window >= 0, "narrow: window; given ", a.window, "; allowed 0 or more");
  KVKEEP_REQUIRE(a.select > a.window, "narrow: select; given ", a.select, "; allowed more than the window of ",
                 a.window);
  for (const RankedPrompt& prompt : a.prompts)
    KVKEEP_REQUIRE(prompt.ranked >= 0, "narrow: a prompt of ", prompt.ranked, " ranked tokens; allowed 0 or more");
  each_batch(a.prompts, [&](const Batch<RankedPrompt>& batch) {
    std::int32_t longest = 0;
    for (std::int32_t p = 0; p < batch.count; ++p) longest = std::max(longest, batch.of[p].ranked + a.window);
    const NarrowTask task{.prompts = batch,
                          .ranks = a.ranks,
                          .states = a.states,
                          .tokens = a.tokens,
                          .select = a.select,
                          .window = a.window,
                          .layer = a.layer};
    launch("narrow", narrow_kernel, {.blocks = blocks_for(batch.count), .threads = tuning::threads_for(longest)},
           stream, task);
  });
}

void launch_gather_rows(const GatherRowsArguments& a, Stream stream) {
  constexpr std::int64_t kMost = 1 << 30;
  KVKEEP_REQUIRE(a.row_bytes >= 1 && a.row_bytes <= kMost, "gather rows: bytes of a row; given ", a.row_bytes,
                 "; allowed 1 to ", kMost);
  KVKEEP_REQUIRE(a.from_stride >= a.row_bytes && a.to_stride >= a.row_bytes, "gather rows: strides; given ",
                 a.from_stride, " and ", a.to_stride, "; allowed from the row's ", a.row_bytes, " bytes on");
  for (const GatheredPrompt& prompt : a.prompts) {
    KVKEEP_REQUIRE(prompt.rows >= 0, "gather rows: rows of a prompt; given ", prompt.rows, "; allowed 0 or more");
    KVKEEP_REQUIRE(prompt.kept < 0 || prompt.rows == 0 || a.tokens != nullptr, "gather rows: a prompt has a list at ",
                   prompt.kept, " and there are no tokens; allowed -1, every row");
  }
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(a.from) | reinterpret_cast<std::uintptr_t>(a.to) |
                             static_cast<std::uint64_t>(a.row_bytes) | static_cast<std::uint64_t>(a.from_stride) |
                             static_cast<std::uint64_t>(a.to_stride);
  each_batch(a.prompts, [&](const Batch<GatheredPrompt>& batch) {
    std::int64_t most = 0;
    for (std::int32_t p = 0; p < batch.count; ++p) most = std::max<std::int64_t>(most, batch.of[p].rows);
    with_word(bits, [&](auto word) {
      using Word = decltype(word);
      const auto words = static_cast<std::int32_t>(a.row_bytes / static_cast<std::int64_t>(sizeof(Word)));
      const GatherRowsTask rows{.prompts = batch,
                                .tokens = a.tokens,
                                .from = a.from,
                                .to = a.to,
                                .from_stride = a.from_stride,
                                .to_stride = a.to_stride,
                                .words = words,
                                .each = std::max(1, kTile / words)};
      launch("narrow_gather_rows", narrow_gather_rows_kernel<Word>,
             {.blocks = blocks_for((most + rows.each - 1) / rows.each, static_cast<unsigned>(batch.count)),
              .threads = kCompactThreads},
             stream, rows);
    });
  });
}

}  // namespace kvkeep::cuda
