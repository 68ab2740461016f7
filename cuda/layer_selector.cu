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

using tuning::kMostThreads;
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
  std::int32_t* ranks;
  const float* masses;
  LayerSelection* states;
  VariancePart* parts = nullptr;  ///< [prompts][most]
  std::uint64_t* missed =
      nullptr;               ///< [prompts][layers] mass_units() of tokens that would not continue, under missed_mass
  float* by_rank = nullptr;  ///< [prompts][best] masses of the best, under select_mass
  double threshold, missed_mass, select_mass;
  std::int32_t most = 0;  ///< parts of the longest prompt
  std::int32_t layers;    ///< whose ranks are compared
  std::int32_t layer;
  std::int32_t place;  ///< its, among them
  std::int32_t min_layer, fixed_layer, select, window;
  bool holds_masses;

  /// Tokens before the window that continue, at most.
  [[nodiscard]] __device__ std::int32_t best() const { return select - window; }
  [[nodiscard]] __device__ bool wants(const RankedPrompt& prompt) const {
    return (states == nullptr || states[prompt.state].layer < 0) && prompt.ranked > best();
  }
  [[nodiscard]] __device__ const std::int32_t* newest_ranks(const RankedPrompt& prompt) const {
    return ranks + prompt.ranks + place * prompt.stride;
  }
  /// The masses of one of the layers that are compared.
  [[nodiscard]] __device__ float* masses_of(const RankedPrompt& prompt, std::int32_t l) const {
    return reinterpret_cast<float*>(ranks + prompt.ranks + (layers + l) * prompt.stride);
  }
};

KVKEEP_HD inline std::int32_t parts_of(std::int32_t ranked) { return (ranked + kVarianceTokens - 1) / kVarianceTokens; }

/// Files the masses of the newest layer and says how many of the best tokens draw enough, as LayerSelector::enough()
/// does. One block per prompt.
__global__ void __launch_bounds__(kMostThreads) layer_selector_mass_kernel(LayerSelectorTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const BlockTeam team(scratch);
  const RankedPrompt& prompt = task.prompts.of[blockIdx.x];
  if (!task.wants(prompt)) return;
  const float* masses = task.masses + prompt.scores;
  if (task.holds_masses) {
    float* const held = task.masses_of(prompt, task.place);
    for (std::int32_t t = team.thread(); t < prompt.ranked; t += team.size()) held[t] = masses[t];
  }
  if (task.states == nullptr) return;
  for (std::int32_t l = team.thread(); task.holds_masses && l < task.layers; l += team.size())
    task.missed[std::int64_t{blockIdx.x} * task.layers + l] = 0;
  if (!(task.select_mass < 1)) return;

  const std::int32_t* ranks = task.newest_ranks(prompt);
  const std::int32_t best = task.best();
  float* const by_rank = task.by_rank + std::int64_t{blockIdx.x} * best;
  std::uint64_t drawn = 0;
  for (std::int32_t t = team.thread(); t < prompt.ranked; t += team.size()) {
    drawn += mass_units(masses[t]);
    if (ranks[t] <= best) by_rank[ranks[t] - 1] = masses[t];
  }
  const std::uint64_t window = mass_units(1) - team.sum(drawn);  // what is missing from 1
  std::int32_t& enough = task.states[prompt.state].enough;
  const auto suffices = [&](std::uint64_t held) {
    return mass_of_units(static_cast<std::int64_t>(held)) >= task.select_mass;
  };
  // Ranks next to each other are one thread's; only one of them can bring what is held from too little to enough.
  const std::int32_t own = (best + team.size() - 1) / team.size(), from = team.thread() * own,
                     to = best - from < own ? best : from + own;
  std::uint64_t mine = 0;
  for (std::int32_t k = from; k < to; ++k) mine += mass_units(by_rank[k]);
  std::uint64_t held = window + team.sum_before(mine);
  if (team.thread() == 0) enough = suffices(held) ? 1 : best;
  team.sync();
  if (suffices(held) || !suffices(held + mine)) return;
  std::int32_t k = from;
  while (!suffices(held)) held += mass_units(by_rank[k++]);
  enough = k;
}

/// Adds up, for every layer that is compared, the masses of tokens that would not continue. In x, one block per part of
/// a prompt; in y, one per prompt.
__global__ void __launch_bounds__(kVarianceThreads) layer_selector_missed_kernel(LayerSelectorTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const BlockTeam team(scratch);
  const RankedPrompt& prompt = task.prompts.of[blockIdx.y];
  if (!task.wants(prompt)) return;
  const std::int32_t* ranks = task.newest_ranks(prompt);
  const std::int32_t enough = task.select_mass < 1 ? task.states[prompt.state].enough : task.best();
  for (auto p = static_cast<std::int32_t>(blockIdx.x); p < parts_of(prompt.ranked);
       p += static_cast<std::int32_t>(gridDim.x)) {
    const std::int32_t begin = p * kVarianceTokens, left = prompt.ranked - begin,
                       end = begin + (left < kVarianceTokens ? left : kVarianceTokens);
    for (std::int32_t l = 0; l < task.layers; ++l) {
      const float* masses = task.masses_of(prompt, l);
      std::uint64_t mine = 0;
      for (std::int32_t t = begin + team.thread(); t < end; t += kVarianceThreads)
        mine += ranks[t] > enough ? mass_units(masses[t]) : 0;
      mine = team.sum(mine);
      if (team.thread() == 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(task.missed + std::int64_t{blockIdx.y} * task.layers + l),
                  static_cast<unsigned long long>(mine));
    }
  }
}

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

/// As LayerSelector::see() does. missed: of the prompt, [layers], under missed_mass.
__device__ void decide(const LayerSelectorTask& task, double variance, const std::uint64_t* missed,
                       LayerSelection& state) {
  if (state.first < 0) state.first = variance;
  state.relative = LayerSelector::share_of_first(variance, state.first, task.layer == task.min_layer);
  bool selects = state.relative < task.threshold;
  if (missed != nullptr) {
    std::uint64_t most = 0;
    for (std::int32_t l = 0; l < task.layers; ++l) most = missed[l] > most ? missed[l] : most;
    selects = mass_of_units(static_cast<std::int64_t>(most)) < task.missed_mass;
  }
  if (selects) state.layer = task.layer;
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
         task.holds_masses ? task.missed + std::int64_t{blockIdx.x} * task.layers : nullptr, state);
}

std::int32_t longest_of(std::span<const RankedPrompt> prompts) {
  std::int32_t longest = 0;
  for (const RankedPrompt& prompt : prompts) longest = std::max(longest, prompt.ranked);
  return longest;
}

/// Divides the workspace of a launch for so many prompts. Returns its size.
std::int64_t divide(std::int64_t prompts, std::int32_t longest, const LayerSelectorOptions& o, void* workspace,
                    LayerSelectorTask& task) {
  WorkspaceParts parts(workspace);
  task.most = parts_of(longest);
  task.parts = parts.take<VariancePart>(prompts * task.most);
  task.missed = parts.take<std::uint64_t>(o.holds_masses() ? prompts * o.ranked_layers() : 0);
  task.by_rank = parts.take<float>(o.select_mass < 1 ? prompts * (o.select - o.window) : 0);
  return parts.bytes();
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
  KVKEEP_REQUIRE(o.missed_mass >= 0 && o.missed_mass < 1, "layer selector: missed_mass; given ", o.missed_mass,
                 "; allowed 0 for none, or a share below 1");
  KVKEEP_REQUIRE(o.select_mass > 0 && o.select_mass <= 1, "layer selector: select_mass; given ", o.select_mass,
                 "; allowed a share above 0, up to 1");
  KVKEEP_REQUIRE(!o.reads_mass() || a.masses != nullptr || a.prompts.empty(),
                 "layer selector: no masses; allowed one for each score (missed_mass and select_mass read them)");
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

std::int64_t layer_selector_workspace_bytes(std::span<const RankedPrompt> prompts,
                                            const LayerSelectorOptions& options) {
  LayerSelectorTask task{};
  return divide(static_cast<std::int64_t>(std::min<std::size_t>(prompts.size(), kPromptsAtOnce)), longest_of(prompts),
                options, nullptr, task);
}

void launch_layer_selector(const LayerSelectorArguments& a, Stream stream) {
  require_aligned("layer selector", a.workspace);
  check(a);
  const LayerSelectorOptions& o = a.options;
  const bool fixed = o.fixed_layer >= 0, may_select = fixed || a.layer >= o.min_layer;
  if (!may_select && !o.holds_masses()) return;
  each_batch(a.prompts, [&](const Batch<RankedPrompt>& batch) {
    const std::int32_t longest = longest_of({batch.of, static_cast<std::size_t>(batch.count)});
    LayerSelectorTask task{.prompts = batch,
                           .ranks = a.ranks,
                           .masses = a.masses,
                           .states = may_select ? a.states : nullptr,
                           .threshold = o.threshold,
                           .missed_mass = o.missed_mass,
                           .select_mass = o.select_mass,
                           .layers = o.ranked_layers(),
                           .layer = a.layer,
                           .place = rank_place(o, a.layer),
                           .min_layer = o.min_layer,
                           .fixed_layer = o.fixed_layer,
                           .select = o.select,
                           .window = o.window,
                           .holds_masses = o.holds_masses()};
    static_cast<void>(divide(batch.count, longest, o, a.workspace, task));
    const auto prompts = static_cast<unsigned>(batch.count);
    const Grid parts{.blocks = blocks_for(task.most, prompts), .threads = kVarianceThreads};
    if (o.reads_mass())
      launch("layer_selector_mass", layer_selector_mass_kernel,
             {.blocks = blocks_for(batch.count), .threads = tuning::threads_for(longest)}, stream, task);
    if (!may_select) return;
    if (o.holds_masses()) launch("layer_selector_missed", layer_selector_missed_kernel, parts, stream, task);
    if (!fixed) launch("layer_selector_variance", layer_selector_variance_kernel, parts, stream, task);
    launch("layer_selector_decide", layer_selector_decide_kernel, {.blocks = blocks_for(batch.count), .threads = 32},
           stream, task);
  });
}

}  // namespace kvkeep::cuda
