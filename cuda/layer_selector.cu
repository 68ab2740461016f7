// SPDX-License-Identifier: Apache-2.0
#include "layer_selector.h"

#include <cmath>

#include "batch.cuh"
#include "launch.cuh"
#include "team.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kVarianceThreads;
using tuning::kVarianceTokens;

/// What one block found: the sum over its tokens of (layers^2 times the variance of a token's ranks), in two halves
/// that cannot overflow, and the tokens that count.
struct VariancePart {
  std::uint64_t low, high, counted;
};

/// The arguments of the kernels.
struct LayerSelectorTask {
  Batch<RankedPrompt> prompts;
  const std::int32_t* ranks;
  LayerSelection* states;
  VariancePart* parts;  ///< [prompts][most]
  double threshold;
  std::int32_t most;    ///< parts of the longest prompt
  std::int32_t layers;  ///< whose ranks are compared
  std::int32_t layer;
  std::int32_t min_layer, fixed_layer, select, window;

  /// Tokens before the window that continue.
  [[nodiscard]] __device__ std::int32_t best() const { return select - window; }
  [[nodiscard]] __device__ bool wants(const RankedPrompt& prompt) const {
    return states[prompt.state].layer < 0 && prompt.ranked > best();
  }
};

KVKEEP_HD inline std::int32_t parts_of(std::int32_t ranked) { return (ranked + kVarianceTokens - 1) / kVarianceTokens; }

/// In x, one block per part of a prompt; in y, one per prompt.
__global__ void __launch_bounds__(kVarianceThreads) layer_selector_variance_kernel(LayerSelectorTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const BlockTeam team(scratch);
  const RankedPrompt& prompt = task.prompts.of[blockIdx.y];
  if (!task.wants(prompt)) return;
  const std::int32_t* ranks = task.ranks + prompt.ranks;
  const auto layers = static_cast<std::uint64_t>(task.layers);
  for (auto p = static_cast<std::int32_t>(blockIdx.x); p < parts_of(prompt.ranked);
       p += static_cast<std::int32_t>(gridDim.x)) {
    const std::int32_t begin = p * kVarianceTokens, left = prompt.ranked - begin,
                       end = begin + (left < kVarianceTokens ? left : kVarianceTokens);
    VariancePart mine{0, 0, 0};
    for (std::int32_t t = begin + team.thread(); t < end; t += kVarianceThreads) {
      std::int32_t least = prompt.ranked;
      std::uint64_t sum = 0, squares = 0;
      for (std::int32_t l = 0; l < task.layers; ++l) {
        const std::int32_t rank = ranks[l * prompt.stride + t];
        least = rank < least ? rank : least;
        sum += static_cast<std::uint64_t>(rank);
        squares += static_cast<std::uint64_t>(rank) * static_cast<std::uint64_t>(rank);
      }
      if (least > task.best()) continue;
      const std::uint64_t spread = layers * squares - sum * sum;  // layers^2 times the population variance
      mine.low += spread & 0xFFFFFFFFU;
      mine.high += spread >> 32;
      ++mine.counted;
    }
    const VariancePart all{team.sum(mine.low), team.sum(mine.high), team.sum(mine.counted)};
    if (team.thread() == 0) task.parts[std::int64_t{blockIdx.y} * task.most + p] = all;
  }
}

/// As LayerSelector::see() does.
__device__ void decide(const LayerSelectorTask& task, double variance, LayerSelection& state) {
  if (state.first < 0) state.first = variance;
  state.relative = LayerSelector::share_of_first(variance, state.first, task.layer == task.min_layer);
  if (state.relative < task.threshold) state.layer = task.layer;
}

/// One warp per prompt.
__global__ void __launch_bounds__(32) layer_selector_decide_kernel(LayerSelectorTask task) {
  wait_for_earlier_kernels();
  const WarpTeam warp;
  const RankedPrompt& prompt = task.prompts.of[blockIdx.x];
  const bool wanted = task.wants(prompt);
  warp.sync();  // every lane has looked before one of them writes
  if (!wanted) return;
  LayerSelection& state = task.states[prompt.state];
  if (task.fixed_layer >= 0) {
    if (warp.thread() == 0) state.layer = task.layer;
    return;
  }
  VariancePart mine{0, 0, 0};
  for (std::int32_t p = warp.thread(); p < parts_of(prompt.ranked); p += warp.size()) {
    const VariancePart part = task.parts[std::int64_t{blockIdx.x} * task.most + p];
    mine.low += part.low;
    mine.high += part.high;
    mine.counted += part.counted;
  }
  const VariancePart all{warp.sum(mine.low), warp.sum(mine.high), warp.sum(mine.counted)};
  if (warp.thread() != 0) return;
  decide(task,
         LayerSelector::mean_variance(static_cast<double>(all.high), static_cast<double>(all.low), task.layers,
                                      static_cast<double>(all.counted)),
         state);
}

std::int32_t longest_of(std::span<const RankedPrompt> prompts) {
  std::int32_t longest = 0;
  for (const RankedPrompt& prompt : prompts) longest = std::max(longest, prompt.ranked);
  return longest;
}

void check(const LayerSelectorArguments& a) {
  const LayerSelectorOptions& o = a.options;
  KVKEEP_REQUIRE(o.window >= 1, "layer selector: window; given ", o.window, "; allowed 1 or more");
  KVKEEP_REQUIRE(o.select > o.window, "layer selector: select; given ", o.select, "; allowed more than the window of ",
                 o.window);
  KVKEEP_REQUIRE(o.min_layer >= 0, "layer selector: min_layer; given ", o.min_layer, "; allowed 0 or more");
  KVKEEP_REQUIRE(o.observed_layers >= 1, "layer selector: observed_layers; given ", o.observed_layers,
                 "; allowed 1 or more");
  KVKEEP_REQUIRE(!std::isnan(o.threshold), "layer selector: threshold; given NaN; allowed numbers");
  KVKEEP_REQUIRE(o.fixed_layer >= -1, "layer selector: fixed_layer; given ", o.fixed_layer,
                 "; allowed 0 or more, or -1 for none");
  KVKEEP_REQUIRE_AS(Unsupported, !o.reads_mass(), "layer selector: missed_mass and select_mass; given ", o.missed_mass,
                    " and ", o.select_mass, "; allowed 0 and 1 on a GPU");
  for (const RankedPrompt& prompt : a.prompts)
    KVKEEP_REQUIRE(prompt.ranked >= 0, "layer selector: a prompt of ", prompt.ranked,
                   " ranked tokens; allowed 0 or more");
  KVKEEP_REQUIRE(std::int64_t{o.ranked_layers()} * longest_of(a.prompts) < std::int64_t{1} << 32,
                 "layer selector: ranks of ", o.ranked_layers(), " layers of ", longest_of(a.prompts),
                 " tokens; allowed fewer than 2^32 of a prompt");
  KVKEEP_REQUIRE_AS(StateError, a.layer >= 0 && o.wants_ranks(a.layer), "layer selector: the ranks of layer ", a.layer,
                    "; allowed ",
                    o.fixed_layer >= 0 ? text("layer ", o.fixed_layer, " alone")
                                       : text("layers from ", o.min_layer - o.ranked_layers() + 1, " on"));
}

}  // namespace

std::int64_t layer_selector_workspace_bytes(std::span<const RankedPrompt> prompts) {
  const auto at_once = static_cast<std::int64_t>(std::min<std::size_t>(prompts.size(), kPromptsAtOnce));
  return at_once * parts_of(longest_of(prompts)) * static_cast<std::int64_t>(sizeof(VariancePart));
}

void launch_layer_selector(const LayerSelectorArguments& a, Stream stream) {
  require_aligned("layer selector", a.workspace);
  check(a);
  const LayerSelectorOptions& o = a.options;
  const bool fixed = o.fixed_layer >= 0;
  if (!fixed && a.layer < o.min_layer) return;
  each_batch(a.prompts, [&](const Batch<RankedPrompt>& batch) {
    const LayerSelectorTask task{.prompts = batch,
                                 .ranks = a.ranks,
                                 .states = a.states,
                                 .parts = static_cast<VariancePart*>(a.workspace),
                                 .threshold = o.threshold,
                                 .most = parts_of(longest_of({batch.of, static_cast<std::size_t>(batch.count)})),
                                 .layers = o.ranked_layers(),
                                 .layer = a.layer,
                                 .min_layer = o.min_layer,
                                 .fixed_layer = o.fixed_layer,
                                 .select = o.select,
                                 .window = o.window};
    const auto prompts = static_cast<unsigned>(batch.count);
    if (!fixed)
      launch("layer_selector_variance", layer_selector_variance_kernel,
             {.blocks = blocks_for(task.most, prompts), .threads = kVarianceThreads}, stream, task);
    launch("layer_selector_decide", layer_selector_decide_kernel, {.blocks = blocks_for(batch.count), .threads = 32},
           stream, task);
  });
}

}  // namespace kvkeep::cuda
