// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of machine.h and policy.h: compiled by src/policy, or where they are included under KVKEEP_HEADER_ONLY.
// The CPU as a machine: the line's stages are the library's own functions.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

#include "kvkeep/core/fields.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/compact.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/policy/machine.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/simd/stored_side.h"
#if KVKEEP_FOLDING
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/policy/folded_memory.h"
#endif

namespace kvkeep {
namespace host_detail {

/// Gives rows that share one selection the same scores, in place.
inline void share_scores(const RowTable& table, const Limits& limits, const SharedRows& sharing, float* g) {
  for (std::int64_t set = 0; set < sharing.sets(); ++set) {
    const Row& first = table.rows[static_cast<std::size_t>(sharing.row(set, 0))];
    if (!limits.rows[static_cast<std::size_t>(sharing.row(set, 0))].due) continue;
    const auto scores_of = [&](std::int64_t member) {
      return g + table.rows[static_cast<std::size_t>(sharing.row(set, member))].first;
    };
    float* const shared = scores_of(0);
    for (std::int64_t m = 1; m < sharing.members(); ++m)
      std::transform(scores_of(m), scores_of(m) + first.length, shared, shared,
                     [sharing](float a, float b) { return sharing.join(a, b); });
    std::transform(shared, shared + first.length, shared, [sharing](float x) { return sharing.settle(x); });
    for (std::int64_t m = 1; m < sharing.members(); ++m) std::copy_n(shared, first.length, scores_of(m));
  }
}

#if KVKEEP_FOLDING
/// Groups the dropped slots of one row into spans, one per segment: small spans merge with the next, large ones are
/// cut.
inline void fold_row(const KeepSet& keep, std::size_t r, std::int32_t length, std::span<const std::int32_t> ends,
                     const SpanCut& cut, Fold& fold) {
  const std::span<const std::int32_t> kept = keep.row(r);
  const std::size_t first = fold.slots.size();
  std::size_t next = 0, segment = 0;
  const auto dropped = [&] { return static_cast<std::int64_t>(fold.slots.size() - first); };
  const auto put = [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t count = piece_count(end - begin, cut.max_span);
    for (std::int64_t i = 1; i <= count; ++i)
      fold.spans.push_back(static_cast<std::int64_t>(first) + begin + piece_begin(end - begin, i, count));
  };
  SpanJoiner joiner(cut.min_span);
  for (std::int32_t slot = 0; slot < length; ++slot) {
    while (segment < ends.size() && slot >= ends[segment]) ++segment, joiner.end_at(dropped(), put);
    if (next < kept.size() && kept[next] == slot)
      ++next;
    else
      fold.slots.push_back(slot);
  }
  joiner.finish(dropped(), put);
}

/// The spans of all rows, and the slots in them.
inline Fold listed_spans(const RowTable& table, const Decision& decision, const SpanCut& cut) {
  Fold fold;
  const KeepSet& keep = *decision.keep;
  const bool weighed = cut.by_mass && decision.allotment.has_value() && decision.allotment->mass.data.defined();
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const Row& row = table.rows[r];
    const auto first = static_cast<std::ptrdiff_t>(fold.slots.size());
    fold_row(keep, r, row.length,
             decision.allotment.has_value() ? std::span<const std::int32_t>(decision.allotment->ends[r])
                                            : std::span<const std::int32_t>(),
             cut, fold);
    fold.indptr.push_back(static_cast<std::int64_t>(fold.spans.size()) - 1);
    if (!weighed) continue;
    const float* mass = decision.allotment->mass.data.data<float>() + row.first;
    std::transform(fold.slots.begin() + first, fold.slots.end(), std::back_inserter(fold.weights),
                   [mass](std::int32_t slot) { return mass[slot]; });
  }
  return fold;
}

/// The same where only the device knows the slots: how many each span has, or, where segments end there, how many spans
/// there may be.
inline Fold counted_spans(const RowTable& table, const Decision& decision, const SpanCut& cut) {
  Fold fold;
  fold.listed = false;
  const EventTables& tables = decision.tables;
  if (tables.ends != nullptr)
    fold.joined_from = cut.min_span, fold.cut_above = cut.max_span, fold.by_mass = cut.by_mass;
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const std::int64_t dropped = table.rows[r].length - decision.keep->count(r), first = fold.spans.back(),
                       count = fold.bounded() ? most_spans(dropped, tables.most_ends, cut.min_span, cut.max_span)
                                              : piece_count(dropped, cut.max_span);
    for (std::int64_t i = 1; i <= count; ++i)
      fold.spans.push_back(first + (fold.bounded() ? dropped : piece_begin(dropped, i, count)));
    fold.indptr.push_back(std::ssize(fold.spans) - 1);
  }
  return fold;
}
#endif

/// What an event reads: its rows as they are, or, of keys and values in 8 bits or blocks, copies in f32. Rows move and
/// fold as they are. The same keys and values then give the same scores, however they are stored.
class ReadableEvidence {
 public:
  /// Copies keys if `needs.keys`, values if `needs.values`; a dtype that nothing reads is left to those who refuse it.
  /// Throws Unsupported for scales that are not f32.
  ReadableEvidence(const Evidence& evidence, const Needs& needs) : given_(evidence) {
    const ModelSpec& spec = evidence.spec;
    const RowTable& given = evidence.table;
    const auto turns = [](Dtype dtype, std::int32_t rotated) {
      return cpu::is_readable(dtype) && (!is_scorable(dtype) || rotated > 0);
    };
    const bool keys = needs.keys && turns(given.key_dtype, given.keys_rotated),
               values = needs.values && turns(given.value_dtype, given.values_rotated);
    if (!keys && !values) return;
    table_ = given;
    if (keys) widen("keys", spec.key_dim, &Row::keys, &Row::key_scales, table_.key_dtype, table_.keys_rotated, keys_);
    if (values)
      widen("values", spec.value_dim, &Row::values, &Row::value_scales, table_.value_dtype, table_.values_rotated,
            values_);
    copied_.emplace(Evidence{.spec = spec,
                             .table = table_,
                             .basis = evidence.basis,
                             .moment = evidence.moment,
                             .explain = evidence.explain,
                             .output_projections = evidence.output_projections});
  }
  ReadableEvidence(const ReadableEvidence&) = delete;
  ReadableEvidence& operator=(const ReadableEvidence&) = delete;

  [[nodiscard]] const Evidence& get() const { return copied_ ? *copied_ : given_; }

 private:
  void widen(const char* what, std::int64_t dim, SlotAddress Row::* slots, SlotAddress Row::* scales, Dtype& dtype,
             std::int32_t& rotated, std::unique_ptr<float[]>& numbers) {
    for (const Row& row : table_.rows)
      KVKEEP_REQUIRE_AS(Unsupported, (row.*scales).width == 0 || (row.*scales).width == 4, "decide: ", what,
                        " of layer ", row.layer, " have scales of ", (row.*scales).width, " bytes; allowed f32");
    numbers.reset(new float[static_cast<std::size_t>(table_.slots * dim)]);
    each_row(table_, [&](std::size_t r, const Row&) {
      Row& row = table_.rows[r];
      const cpu::StoredSide stored{row.*slots, row.*scales, dtype, dim, rotated};
      float* const first = numbers.get() + row.first * dim;
      for (std::int32_t slot = 0; slot < row.length; ++slot) cpu::widen_slot(stored, slot, first + slot * dim);
      const std::int64_t bytes = dim * std::int64_t{sizeof(float)};
      row.*slots = {.base = reinterpret_cast<std::byte*>(first), .stride = bytes, .width = bytes};
    });
    dtype = Dtype::f32;
    rotated = 0;
  }

  const Evidence& given_;
  RowTable table_;
  std::unique_ptr<float[]> keys_, values_;  // [slots, dim]
  std::optional<Evidence> copied_;
};

/// One side of a layer that a policy reads.
inline void require_readable(const char* side, const Tensor& rows, const Tensor& scales, std::int32_t layer,
                             const KVPolicy& policy) {
  if (!rows.defined()) return;  // bind() says so
  const auto what = [&] {
    return text("bind: ", side, " of layer ", layer, ", which policy ", policy.name(), " reads, are ", rows.dtype());
  };
  KVKEEP_REQUIRE(cpu::is_readable(rows.dtype()), what(), "; allowed ", cpu::kReadable);
  KVKEEP_REQUIRE(rows.dtype() != Dtype::i8 || scales.defined(), what(),
                 " without scales; allowed with an f32 scale of each slot, or of each head");
  KVKEEP_REQUIRE(!scales.defined() || is_scorable(rows.dtype()) || scales.dtype() == Dtype::f32, what(),
                 " with scales that are ", scales.dtype(), "; allowed f32");
}

class HostEvent final : public Event {
 public:
  HostEvent(const Evidence& evidence, const Limits& limits, const Needs& needs)
      : given_(evidence), needs_(needs), limits_(limits) {}

  [[nodiscard]] WindowAttention attend(std::int32_t window, bool official, WindowNeeds needs) override {
    return window_attention(evidence(), row_windows(evidence(), limits_, window, official), needs);
  }

  [[nodiscard]] Scores score(const Scorer& scorer, const WindowAttention& seen) override {
    Scores scores = scorer.score(evidence(), limits_, seen);
    require_flat(text("step: scores of ", scorer.name()), scores.data, Dtype::f32, given_.table.slots, Device{});
    if (scorer.accumulates()) return scores;  // of all rows: they are the next event's tally
    for (std::size_t r = 0; r < limits_.rows.size(); ++r)
      if (const Row& row = given_.table.rows[r]; !limits_.rows[r].due)
        std::fill_n(scores.data.data<float>() + row.first, row.length, 0.0F);
    return scores;
  }

  [[nodiscard]] Scores share(const Scores& scores, Sharing share) override {
    Scores shared{clone(scores.data)};
    share_scores(evidence().table, limits_, shared_rows(evidence(), limits_, share), shared.data.data<float>());
    return shared;
  }

  void allot(const Allocator& allocator, const Scores& scores, WindowAttention seen, Decision& decision) override {
    allocator.allot(evidence(), limits_, scores, std::move(seen), decision);
  }

  [[nodiscard]] PromptScores prompt_scores(const PromptScoreOptions& options) override {
    return kvkeep::prompt_scores(evidence(), options);
  }

  [[nodiscard]] ChosenTokens rank(const PromptScores& scores, std::span<PromptRanks* const> ranks, bool list) override {
    ChosenTokens chosen{ChosenTokens::Places(ranks.size())};
    Tensor mass;
    std::int64_t first = 0;
    for (std::size_t g = 0; g < ranks.size(); ++g) {
      const RowGroup& group = evidence().table.groups[g];
      const Row& row = evidence().table.rows[static_cast<std::size_t>(group.first_row)];
      // All prompts of a layer have the window of one policy; one that is not ranked has as many scores.
      const std::int64_t tokens = row.length - window_of(ranks);
      if (ranks[g] != nullptr) {
        PromptRanks& own = *ranks[g];
        if (own.options.reads_mass() && !mass.defined()) mass = token_mass(evidence(), scores.sums, own.options.window);
        const auto of_prompt = [&](const Tensor& t) {
          return t.defined() ? std::span(t.data<float>() + first, static_cast<std::size_t>(tokens))
                             : std::span<float>();
        };
        if (own.selector.see(group.layer, of_prompt(scores.tokens), of_prompt(mass)) || list)
          chosen.places[g] = own.selector.tokens();
        own.state.layer = own.selector.layer(), own.state.relative = own.selector.relative_variance();
      }
      first += tokens;
    }
    return chosen;
  }

  [[nodiscard]] ChosenTokens choose(const Tensor& scores, std::int32_t best, std::int32_t window,
                                    const std::vector<bool>& of) override {
    ChosenTokens chosen{ChosenTokens::Places(of.size())};
    std::int64_t first = 0;
    for (std::size_t g = 0; g < of.size(); ++g) {
      const std::int32_t tokens =
          evidence().table.rows[static_cast<std::size_t>(evidence().table.groups[g].first_row)].length - window;
      if (of[g]) {
        chosen.places[g] = best_tokens({scores.data<float>() + first, static_cast<std::size_t>(tokens)}, best);
        for (std::int32_t i = 0; i < window; ++i) chosen.places[g]->push_back(tokens + i);
      }
      first += tokens;
    }
    return chosen;
  }

 private:
  [[nodiscard]] static std::int32_t window_of(std::span<PromptRanks* const> ranks) {
    for (const PromptRanks* own : ranks)
      if (own != nullptr) return own->options.window;
    return 0;
  }

  /// Made where it is first read: what it refuses is then said as any stage's errors are.
  [[nodiscard]] const Evidence& evidence() {
    if (!readable_) readable_.emplace(given_, needs_);
    return readable_->get();
  }

  const Evidence& given_;
  const Needs needs_;
  const Limits& limits_;
  std::optional<ReadableEvidence> readable_;
};

class Host final : public Machine {
 public:
  Host() : Machine(host_memory()) {}

  [[nodiscard]] std::vector<std::string> problems(const Ask&, const ModelSpec&) const override { return {}; }
#if KVKEEP_FOLDING
  [[nodiscard]] std::unique_ptr<FoldedMemory> folded_memory(const ModelSpec& spec,
                                                            const MemoryOptions& memory) override {
    return host_folded_memory(spec, memory);
  }
#endif
  [[nodiscard]] std::unique_ptr<Event> begin(const Evidence& evidence, const Limits& limits, const Ask& ask) override {
    const auto* const demand = std::get_if<Demand>(&ask);
    require_host(demand == nullptr ? "narrow" : "decide", evidence.table.device);
    return std::make_unique<HostEvent>(evidence, limits,
                                       demand == nullptr ? Needs{.keys = true, .values = true} : demand->needs);
  }
  std::int64_t workspace(const KVPolicy&, const Evidence&, bool) override { return 0; }
  void move(const RowTable& table, const Decision& decision, std::span<const PageMove> pages,
            std::span<const ColumnTarget> columns) override {
    compact(table, *decision.keep, pages);
    for (std::size_t r = 0; r < columns.size(); ++r) move_columns(table.rows[r], r, decision, columns[r]);
  }
  void read_counts(std::span<std::int32_t>) override {
    refuse<StateError>("counts: a decision on the host has them; allowed on a device");
  }
  void use_workspace(Tensor) override { refuse<Unsupported>("workspace: the CPU takes none; allowed on a device"); }
};

}  // namespace host_detail

KVKEEP_INLINE ChosenTokens::Places ChosenTokens::read(MachineMemory& memory) && {
  if (lists.empty()) return std::move(places);
  std::vector<std::byte> here(static_cast<std::size_t>(bytes));
  memory.read(here.data(), there, bytes);
  for (std::size_t n = 0; n < lists.size(); ++n) {
    const List& one = lists[n];
    bool chosen = one.always;
    std::int32_t count = one.count;
    if (one.ranks != nullptr) {
      LayerSelection state;
      std::memcpy(&state, here.data() + n * sizeof state, sizeof state);
      one.ranks->state = state;
      if (state.layer >= 0) one.ranks->ring.reset();
      chosen = chosen || state.layer >= 0;
      if (state.enough >= 0) count = state.enough + one.ranks->options.window;
    }
    if (!chosen) continue;
    std::vector<std::int32_t>& tokens = places[one.prompt].emplace(static_cast<std::size_t>(count));
    std::memcpy(tokens.data(), here.data() + one.tokens, tokens.size() * sizeof(std::int32_t));
  }
  return std::move(places);
}

KVKEEP_INLINE SharedRows shared_rows(const Evidence& evidence, const Limits& limits, Sharing share) {
  const RowTable& table = evidence.table;
  SharedRows sharing{.share = share, .heads = evidence.spec.kv_heads};
  for (const RowGroup& group : table.groups) sharing.sequences += group.layer == table.groups.front().layer ? 1 : 0;
  const std::int64_t of_layer = sharing.sequences * sharing.heads;
  sharing.layers = of_layer == 0 ? 0 : std::ssize(table.rows) / of_layer;
  for (std::int64_t set = 0; set < sharing.sets(); ++set) {
    const auto first = static_cast<std::size_t>(sharing.row(set, 0));
    for (std::int64_t m = 1; m < sharing.members(); ++m) {
      const auto r = static_cast<std::size_t>(sharing.row(set, m));
      const Row& other = table.rows[r];
      KVKEEP_REQUIRE_AS(Unsupported, share != Sharing::layer || limits.rows[r].due == limits.rows[first].due,
                        "share: the heads of layer ", other.layer,
                        " share one selection, but only some are due; allowed "
                        "heads that are cut together");
      if (!limits.rows[first].due) continue;
      KVKEEP_REQUIRE_AS(Unsupported, other.length == table.rows[first].length,
                        "share: rows that share one selection hold ", table.rows[first].length, " and ", other.length,
                        " slots (layer ", other.layer, ", head ", other.head, "); allowed rows of one length");
    }
  }
  return sharing;
}

#if KVKEEP_FOLDING
KVKEEP_INLINE void fold_rest(const Machine& machine, const RowTable& table, const SpanCut& cut, Decision& decision) {
  decision.fold = machine.is_host() ? host_detail::listed_spans(table, decision, cut)
                                    : host_detail::counted_spans(table, decision, cut);
}
#endif

KVKEEP_INLINE Machine& host() {
  static host_detail::Host host;
  return host;
}

KVKEEP_INLINE LayerDecision KVPolicy::decide_layer(Machine&, const Evidence&, std::span<PromptPass* const>) const {
  refuse<Unsupported>("narrow: ", name(), " does not act on prompts; allowed policies that narrow");
}

KVKEEP_INLINE Decision KVPolicy::decide(PromptPass& pass, const Evidence& evidence) const {
  PromptPass* const passes[] = {&pass};
  LayerDecision layer = decide_layer(host(), evidence, passes);
  check_layer(name(), evidence.table, layer);
  LayerDecision::Prompt& prompt = layer.prompts.front();
  Decision decision = std::move(layer.rows);
  if (!prompt.cut) decision = {};
  decision.reason = prompt.reason;
  decision.narrow = std::move(prompt.narrow);
  decision.relative_variance = prompt.relative_variance;
  return decision;
}

KVKEEP_INLINE std::unique_ptr<PromptPass> begun_prompt(const char* operation, const KVPolicy& policy, Machine& machine,
                                                       const ModelSpec& spec, std::int32_t tokens) {
  std::unique_ptr<PromptPass> pass = policy.begin_prompt(machine, spec, tokens);
  KVKEEP_REQUIRE(pass != nullptr, operation, ": begin_prompt() of ", policy.name(),
                 " gives none; allowed a PromptPass, of a policy that narrows");
  return pass;
}

KVKEEP_INLINE std::int32_t wanted_queries(const char* operation, const KVPolicy& policy, const PromptPass& pass,
                                          std::int32_t layer, std::int32_t present) {
  const std::int32_t wanted = pass.wants(layer, present);
  KVKEEP_REQUIRE(wanted >= 0 && wanted <= present, operation, ": ", policy.name(), " wants the newest ", wanted,
                 " queries of layer ", layer, " (PromptPass::wants()); allowed 0 to the ", present,
                 " tokens that reached it");
  return wanted;
}

KVKEEP_INLINE std::vector<std::string> KVPolicy::problems_on(const Machine& machine, const ModelSpec& spec) const {
  if (trigger().never) return {};
  std::vector<std::string> found;
  if (!machine.is_host())
    found.push_back(
        text("device: ", name(), " has no kernels; given ", machine.device().str(), "; allowed only on the CPU"));
  if (spec.whole_heads() != spec.kv_heads)
    found.push_back(text("ranks: ", name(), " does not say what heads must know of each other; given ", spec.kv_heads,
                         " of ", spec.whole_heads(), " KV heads; allowed all, or policies that override problems_on"));
  return found;
}

KVKEEP_INLINE std::vector<std::string> problems(const KVPolicy& policy, const ModelSpec& of_engine,
                                                const Provided& provided) {
  const Machine& machine = provided.machine();
  const ModelSpec spec = machine.part(of_engine);
  std::vector<std::string> found = policy.problems(spec);
  const Needs needs = policy.needs();
  const std::string there = machine.device().str();
  for (std::string& one : policy.problems_on(machine, spec)) found.push_back(std::move(one));
  if (policy.memory() != nullptr && !provided.reads_folded)
    found.push_back(
        text("reads_folded: ", policy.name(),
             " folds spans, but the engine does not say that it calls view() after each layer's attention"));
  if (needs.surprisal && !provided.surprisal)
    found.push_back(text("surprisal: ", policy.name(), " reads that of every token, but the engine supplies none"));
  if (needs.given_scores && !provided.given_scores)
    found.push_back(text("given_scores: ", policy.name(),
                         " reads a score of every token and KV head, but the engine does not say that it supplies them "
                         "with give()"));
  if (const std::int32_t open = spec.first_without_rope(); needs.rope && open >= 0)
    found.push_back(text("rope: ", policy.name(),
                         " turns queries or keys, and the model spec does not state the RoPE of layer ", open,
                         "; allowed rope.inv_freq, or RopeStyle::none for a layer that has none"));
  if (needs.queries < 0 || needs.queries > kMostQueries)
    found.push_back(text("queries: ", policy.name(), " reads the newest ", needs.queries,
                         " of every full layer (Needs::queries); allowed 0 to ", kMostQueries));
  if (needs.queries > 0 && !provided.queries)
    found.push_back(text("queries: ", policy.name(), " reads the newest ", needs.queries,
                         " of every full layer, but the engine supplies none"));
  if (policy.narrows() && !provided.layer_by_layer)
    found.push_back(
        text("layer_by_layer: ", policy.name(),
             " narrows prompts while they run, but the engine does not say that it runs them layer by layer "
             "and calls narrow() after each"));
  if (policy.narrows() && (!provided.queries || spec.query_heads == 0))
    found.push_back(
        text("queries: ", policy.name(), " reads those of prompts, but ",
             provided.queries ? "the model spec does not say how many heads they have" : "the engine supplies none"));
  if (needs.queries > 0 && spec.query_heads == 0)
    found.push_back(text("query_heads: ", policy.name(),
                         " reads queries, but the model spec does not say how many heads they have"));
  if (!needs.output_projection) return found;
  const auto& given = provided.output_projections;
  if (given.empty()) {
    found.push_back(text("output_projections: ", policy.name(), " weighs values by W_o, but the engine supplies none"));
  } else if (given.size() != spec.layers.size()) {
    found.push_back(text("output_projections: given ", given.size(), "; allowed one for each of the ",
                         spec.layers.size(), " layers"));
  } else {
    const std::int64_t width = std::int64_t{spec.query_heads} * spec.value_dim;
    for (const std::int32_t l : spec.full_layers()) {
      const Tensor& w = given[static_cast<std::size_t>(l)];
      if (w.defined() && w.device() != machine.device())
        found.push_back(text("output_projections: W_o of layer ", l, " is on ", w.device().str(), "; allowed ", there,
                             ", where the keeper works"));
      if (!w.defined() || w.dim() != 2 || w.size(1) != width || !w.is_contiguous() || !is_scorable(w.dtype()))
        found.push_back(text("output_projections: W_o of layer ", l,
                             w.defined() ? " has the wrong shape, dtype or strides" : " is missing",
                             "; allowed a contiguous f32, f16 or bf16 [hidden, ", width, "]"));
    }
  }
  return found;
}

KVKEEP_INLINE void check_readable(const KVPolicy& policy, const ModelSpec& spec, const Machine& machine,
                                  std::span<const LayerKv> layers) {
  const bool reads = machine.is_host() && spec.whole_heads() <= spec.kv_heads;
  const Needs needs = policy.needs();
  const bool folds = policy.memory() != nullptr, keys = needs.keys || folds || policy.narrows();
  for (const std::int32_t l : spec.full_layers()) {
    const auto layer = static_cast<std::size_t>(l);
    if (layer >= layers.size() || std::holds_alternative<std::monostate>(layers[layer])) return;  // bind() says so
    const LayerSides sides = sides_of(layers[layer]);
    KVKEEP_REQUIRE_AS(Unsupported, !folds || !sides.extra.defined(), "bind: layer ", l,
                      " has extras, which folded spans do not hold; allowed layers without extras under policy ",
                      policy.name(), ", which folds");
    if (!reads) continue;
    if (keys) host_detail::require_readable("keys", sides.keys, sides.key_scales, l, policy);
    if (needs.values || folds) host_detail::require_readable("values", sides.values, sides.value_scales, l, policy);
  }
}

KVKEEP_INLINE void check(const KVPolicy& policy, const ModelSpec& spec, const Provided& provided) {
  require_no_problems(text("policy ", policy.name(), " cannot run here"), problems(policy, spec, provided));
}

}  // namespace kvkeep
