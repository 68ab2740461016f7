/// Layers of prompts on a device: from scores to the tokens that continue.

#include "event.h"
#include "last_query.h"
#include "layer_selector.h"
#include "narrow.h"
#include "prompt_scores.h"
#include "ranks.h"

namespace kvkeep::cuda {
namespace {

/// Tokens of a prompt before the window.
std::int32_t ranked(const PromptRanks& ranks) { return ranks.tokens - ranks.options.window; }

std::int32_t* ring_of(PromptRanks& ranks, DevicePool& pool) {
  if (ranks.ring == nullptr)
    ranks.ring = pool.allocate(std::int64_t{ranks.options.ranked_layers()} * ranked(ranks) *
                               static_cast<std::int64_t>(sizeof(std::int32_t)));
  return static_cast<std::int32_t*>(ranks.ring.get());
}

/// From one array to another, as launchers count.
std::int64_t elements_between(const std::int32_t* from, const std::int32_t* to) {
  const auto bytes = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to)) -
                     static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(from));
  return bytes / static_cast<std::int64_t>(sizeof(std::int32_t));
}

}  // namespace

PromptScores CudaEvent::prompt_scores(const PromptScoreOptions& options) {
  const bool maximum = options.kind == PromptScoreOptions::Pool::maximum;
  asked_ = ask(options.window, false, maximum ? Reader::other : Reader::attention);
  const std::int64_t before =
      evidence.table.slots / evidence.spec.kv_heads - std::ssize(evidence.table.groups) * options.window;
  PromptScores scores{tensor(flat(), evidence.table.slots), tensor(take<float>(before), before), {}};
  PromptScoresArguments a{.evidence = arguments,
                          .queries = asked_.queries,
                          .window = options.window,
                          .pool = options.pool,
                          .maximum = maximum,
                          .slots = evidence.table.slots,
                          .heads = scores.heads.data<float>(),
                          .tokens = scores.tokens.data<float>()};
  a.workspace = take<std::byte>(prompt_scores_workspace_bytes(a));
  launch(launch_prompt_scores, a);
  return scores;
}

Tensor CudaEvent::last_query_scores(std::int32_t pool) {
  asked_ = ask(1, false, Reader::other);
  const std::int64_t tokens = evidence.table.slots / evidence.spec.kv_heads;
  LastQueryArguments a{.evidence = arguments,
                       .queries = asked_.queries,
                       .pool = pool,
                       .slots = evidence.table.slots,
                       .scores = take<float>(tokens)};
  a.workspace = take<std::byte>(last_query_workspace_bytes(a));
  launch(launch_last_query, a);
  return tensor(a.scores, tokens);
}

void CudaEvent::rank(const PromptScores& scores, std::span<PromptRanks* const> ranks, bool list) {
  const std::int32_t layer = evidence.table.groups.front().layer;
  std::vector<RankedPrompt> rings, newest;  // a prompt's ranks of all layers that are compared; of this one
  std::vector<LayerSelection> states;
  const PromptRanks* any = nullptr;
  std::int32_t* base = nullptr;
  std::int64_t first = 0;
  listed_.clear();
  for (std::size_t g = 0; g < ranks.size(); ++g) {
    const std::int32_t ranked = length_of(g) - asked_.window;
    if (ranks[g] != nullptr) {
      PromptRanks& own = *ranks[g];
      any = &own;
      base = base == nullptr ? ring_of(own, pool_) : base;
      const auto select = static_cast<std::int64_t>(own.options.select), n = std::ssize(rings);
      rings.push_back({.scores = first,
                       .ranks = elements_between(base, ring_of(own, pool_)),
                       .stride = ranked,
                       .kept = n * select,
                       .ranked = ranked,
                       .state = static_cast<std::int32_t>(n)});
      newest.push_back(rings.back());
      newest.back().ranks += rank_place(own.options, layer) * std::int64_t{ranked};
      states.push_back(own.state);
      listed_.push_back({.group = g,
                         .ranks = &own,
                         .tokens = n * select * static_cast<std::int64_t>(sizeof(std::int32_t)),
                         .count = own.options.select,
                         .always = list});
    }
    first += ranked;
  }
  if (any == nullptr) return;
  const LayerSelectorOptions& options = any->options;
  launch(launch_ranks, RanksArguments{.prompts = newest,
                                      .scores = scores.tokens.data<float>(),
                                      .ranks = base,
                                      .workspace = take<std::byte>(ranks_workspace_bytes(newest))});
  const bool fixed = options.fixed_layer >= 0;
  if (!fixed && layer < options.min_layer && !list) return listed_.clear();
  const auto state_bytes = static_cast<std::int64_t>(states.size() * sizeof(LayerSelection));
  list_bytes_ = state_bytes + std::ssize(states) * options.select * static_cast<std::int64_t>(sizeof(std::int32_t));
  lists_ = take<std::byte>(list_bytes_);
  for (Listed& one : listed_) one.tokens += state_bytes;
  auto* const there = reinterpret_cast<LayerSelection*>(lists_);
  if (fixed)
    for (LayerSelection& state : states) state.layer = layer;
  staging_.upload(there, states.data(), static_cast<std::size_t>(state_bytes), stream_);
  if (!fixed && layer >= options.min_layer)
    launch(launch_layer_selector,
           LayerSelectorArguments{.options = options,
                                  .layer = layer,
                                  .prompts = rings,
                                  .ranks = base,
                                  .states = there,
                                  .workspace = take<std::byte>(layer_selector_workspace_bytes(rings))});
  // Of every prompt: the host, which cannot know yet whose lists it needs, copies all of them at once.
  launch(launch_narrow, NarrowArguments{.prompts = newest,
                                        .select = options.select,
                                        .window = options.window,
                                        .ranks = base,
                                        .tokens = reinterpret_cast<std::int32_t*>(lists_ + state_bytes)});
}

void CudaEvent::choose(const Tensor& scores, std::int32_t best, const std::vector<bool>& of) {
  const std::int64_t tokens = scores.numel();
  std::vector<RankedPrompt> prompts;
  std::int64_t first = 0, listed = 0;
  listed_.clear();
  for (std::size_t g = 0; g < of.size(); ++g) {
    const std::int32_t length = length_of(g);
    if (of[g]) {
      prompts.push_back({.scores = first, .ranks = first, .kept = listed, .ranked = length});
      listed_.push_back({.group = g,
                         .ranks = nullptr,
                         .tokens = listed * static_cast<std::int64_t>(sizeof(std::int32_t)),
                         .count = std::min(best, length),
                         .always = true});
      listed += listed_.back().count;
    }
    first += length;
  }
  auto* const ranks = take<std::int32_t>(tokens);
  launch(launch_ranks, RanksArguments{.prompts = prompts,
                                      .scores = scores.data<float>(),
                                      .ranks = ranks,
                                      .workspace = take<std::byte>(ranks_workspace_bytes(prompts))});
  list_bytes_ = listed * static_cast<std::int64_t>(sizeof(std::int32_t));
  lists_ = take<std::byte>(list_bytes_);
  launch(launch_narrow, NarrowArguments{.prompts = prompts,
                                        .select = best,
                                        .window = 0,
                                        .ranks = ranks,
                                        .tokens = reinterpret_cast<std::int32_t*>(lists_)});
}

std::vector<std::optional<std::vector<std::int32_t>>> CudaEvent::chosen() {
  std::vector<std::optional<std::vector<std::int32_t>>> all(evidence.table.groups.size());
  if (listed_.empty()) return all;
  std::vector<std::byte> here(static_cast<std::size_t>(list_bytes_));
  download(here.data(), lists_, here.size(), stream_);
  for (std::size_t n = 0; n < listed_.size(); ++n) {
    const Listed& one = listed_[n];
    bool there = one.always;
    if (one.ranks != nullptr) {
      LayerSelection state;
      std::memcpy(&state, here.data() + n * sizeof state, sizeof state);
      one.ranks->state = state;
      if (state.layer >= 0) one.ranks->ring.reset();
      there = there || state.layer >= 0;
    }
    if (!there) continue;
    std::vector<std::int32_t>& tokens = all[one.group].emplace(static_cast<std::size_t>(one.count));
    std::memcpy(tokens.data(), here.data() + one.tokens, tokens.size() * sizeof(std::int32_t));
  }
  listed_.clear();
  return all;
}

}  // namespace kvkeep::cuda
