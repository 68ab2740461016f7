// SPDX-License-Identifier: Apache-2.0
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

/// Ranks of the layers that are compared and, behind them, masses.
std::int32_t* ring_of(PromptRanks& ranks, DevicePool& pool) {
  if (ranks.ring == nullptr)
    ranks.ring = pool.allocate((ranks.options.holds_masses() ? 2 : 1) * std::int64_t{ranks.options.ranked_layers()} *
                               ranked(ranks) * static_cast<std::int64_t>(sizeof(std::int32_t)));
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
  using By = PromptScoreOptions::By;
  if (options.by == By::last_query) return {.tokens = last_query_scores(options.pool)};
  const bool weighted = options.by == By::weighted,
             maximum = !weighted && options.kind == PromptScoreOptions::Pool::maximum;
  asked_ = ask(options.window, false, maximum ? Reader::other : Reader::attention);
  const auto per_slot = [&](bool wanted) { return wanted ? tensor(flat(), evidence.table.slots) : Tensor{}; };
  PromptScores scores{.heads = per_slot(!weighted), .sums = per_slot(weighted || sums)};
  if (!weighted) scores.tokens = per_token(options.window);
  PromptScoresArguments a{.evidence = arguments,
                          .queries = asked_.queries,
                          .window = options.window,
                          .pool = options.pool,
                          .maximum = maximum,
                          .slots = evidence.table.slots,
                          .heads = weighted ? nullptr : scores.heads.data<float>(),
                          .tokens = weighted ? nullptr : scores.tokens.data<float>(),
                          .sums = scores.sums.defined() ? scores.sums.data<float>() : nullptr};
  if (weighted && !options.weights.empty()) {
    const auto queries = static_cast<std::size_t>(options.window);
    KVKEEP_REQUIRE(options.weights.size() >= queries, "token sums: ", options.weights.size(),
                   " weights for a window of ", options.window, " queries; allowed one each");
    auto* const weights = take<float>(options.window);
    staging_.upload(weights, options.weights.last(queries).data(), queries * sizeof(float), stream_);
    a.weights = weights;
  }
  a.workspace = take<std::byte>(prompt_scores_workspace_bytes(a));
  launch(launch_prompt_scores, a);
  if (weighted) scores.tokens = token_sums(scores.sums, options.window, 1, options.sinks);
  return scores;
}

Tensor CudaEvent::per_token(std::int32_t window) const {
  const std::int64_t before =
      evidence.table.slots / evidence.spec.kv_heads - std::ssize(evidence.table.groups) * window;
  return tensor(take<float>(before), before);
}

Tensor CudaEvent::token_sums(const Tensor& of_slots, std::int32_t window, float weight, std::int32_t sinks) const {
  const Tensor tokens = per_token(window);
  launch(launch_token_sums, TokenSumsArguments{.rows = arguments.rows,
                                               .count = arguments.count,
                                               .longest = arguments.longest,
                                               .heads = arguments.kv_heads,
                                               .window = window,
                                               .sinks = sinks,
                                               .weight = weight,
                                               .sums = of_slots.data<float>(),
                                               .tokens = tokens.data<float>()});
  return tokens;
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

ChosenTokens CudaEvent::rank(const PromptScores& scores, std::span<PromptRanks* const> ranks, bool list) {
  const std::int32_t layer = evidence.table.groups.front().layer;
  std::vector<RankedPrompt> rings, newest;  // a prompt's ranks of all layers that are compared; of this one
  std::vector<LayerSelection> states;
  const PromptRanks* any = nullptr;
  std::int32_t* base = nullptr;
  std::int64_t first = 0;
  ChosenTokens chosen{ChosenTokens::Places(ranks.size())};
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
      chosen.lists.push_back({.prompt = g,
                              .ranks = &own,
                              .tokens = n * select * static_cast<std::int64_t>(sizeof(std::int32_t)),
                              .count = own.options.select,
                              .always = list});
    }
    first += ranked;
  }
  if (any == nullptr) return chosen;
  const LayerSelectorOptions& options = any->options;
  launch(launch_ranks, RanksArguments{.prompts = newest,
                                      .scores = scores.tokens.data<float>(),
                                      .ranks = base,
                                      .workspace = take<std::byte>(ranks_workspace_bytes(newest))});
  const bool fixed = options.fixed_layer >= 0, may_select = fixed || layer >= options.min_layer,
             by_mass = options.reads_mass(), selects = by_mass || !fixed;
  LayerSelectorArguments selector{.options = options, .layer = layer, .prompts = rings, .ranks = base};
  if (by_mass && (may_select || options.holds_masses())) {
    const auto queries = std::int64_t{evidence.spec.kv_heads} * options.window;
    selector.masses = token_sums(scores.sums, options.window, 1.0F / static_cast<float>(queries), 0).data<float>();
  }
  selector.workspace = take<std::byte>(layer_selector_workspace_bytes(rings, options));
  if (!may_select && !list) {
    if (selector.masses != nullptr) launch(launch_layer_selector, selector);
    chosen.lists.clear();
    return chosen;
  }
  const auto state_bytes = static_cast<std::int64_t>(states.size() * sizeof(LayerSelection));
  chosen.bytes = state_bytes + std::ssize(states) * options.select * static_cast<std::int64_t>(sizeof(std::int32_t));
  auto* const lists = take<std::byte>(chosen.bytes);
  chosen.there = lists;
  for (ChosenTokens::List& one : chosen.lists) one.tokens += state_bytes;
  auto* const there = reinterpret_cast<LayerSelection*>(lists);
  if (!selects)
    for (LayerSelection& state : states) state.layer = layer;
  staging_.upload(there, states.data(), static_cast<std::size_t>(state_bytes), stream_);
  selector.states = there;
  if (selects) launch(launch_layer_selector, selector);
  // Of every prompt: the host, which cannot know yet whose lists it needs, copies all of them at once.
  launch(launch_narrow, NarrowArguments{.prompts = newest,
                                        .select = options.select,
                                        .window = options.window,
                                        .ranks = base,
                                        .states = options.select_mass < 1 ? there : nullptr,
                                        .tokens = reinterpret_cast<std::int32_t*>(lists + state_bytes)});
  return chosen;
}

ChosenTokens CudaEvent::choose(const Tensor& scores, std::int32_t best, std::int32_t window,
                               const std::vector<bool>& of) {
  const std::int64_t tokens = scores.numel();
  std::vector<RankedPrompt> prompts;
  std::int64_t first = 0, listed = 0;
  ChosenTokens chosen{ChosenTokens::Places(of.size())};
  for (std::size_t g = 0; g < of.size(); ++g) {
    const std::int32_t ranked = length_of(g) - window;
    if (of[g]) {
      prompts.push_back({.scores = first, .ranks = first, .kept = listed, .ranked = ranked});
      chosen.lists.push_back({.prompt = g,
                              .ranks = nullptr,
                              .tokens = listed * static_cast<std::int64_t>(sizeof(std::int32_t)),
                              .count = std::min(best, ranked) + window,
                              .always = true});
      listed += chosen.lists.back().count;
    }
    first += ranked;
  }
  auto* const ranks = take<std::int32_t>(tokens);
  launch(launch_ranks, RanksArguments{.prompts = prompts,
                                      .scores = scores.data<float>(),
                                      .ranks = ranks,
                                      .workspace = take<std::byte>(ranks_workspace_bytes(prompts))});
  chosen.bytes = listed * static_cast<std::int64_t>(sizeof(std::int32_t));
  auto* const lists = take<std::byte>(chosen.bytes);
  chosen.there = lists;
  launch(launch_narrow, NarrowArguments{.prompts = prompts,
                                        .select = best + window,
                                        .window = window,
                                        .ranks = ranks,
                                        .tokens = reinterpret_cast<std::int32_t*>(lists)});
  return chosen;
}

}  // namespace kvkeep::cuda
