// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of evict.h: compiled by src/policy, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/score/window_attention.h"
#if KVKEEP_FOLDING
#include "kvkeep/policy/rest_options.h"
#endif

namespace kvkeep {
namespace evict_detail {

/// Pinned slots of a row from `first` on. Positions of rows on a device are not read: none is missing there.
inline std::int32_t pinned_from(std::int32_t first, const Row& row, const RowGroup& group) {
  const auto spans = static_cast<std::int32_t>(group.pinned.size());
  if (group.prompt_slots < 0) return pinned_slots(row, group.pinned.data(), spans, first);
  return static_cast<std::int32_t>(positions_from(first, group.pinned) -
                                   positions_from(std::max(first, group.next_position), group.pinned));
}

inline void check_pinned(std::string_view who, const Row& row, const RowGroup& group,
                         std::span<const std::int32_t> kept) {
  for (const PositionSpan& span : group.pinned) {
    const SlotRange slots = slots_at(row, span);
    if (slots.from == slots.to) continue;
    const auto first = std::ranges::lower_bound(kept, slots.from) - kept.begin();
    const std::int64_t last = first + slots.to - slots.from - 1;
    KVKEEP_REQUIRE_AS(Unsupported, last < std::ssize(kept) && kept[static_cast<std::size_t>(last)] == slots.to - 1,
                      "step: ", who, " drops pinned slots of layer ", row.layer, ", head ", row.head,
                      "; allowed policies and allocators that keep every slot which RowLimit::guarded holds");
  }
}

/// An allocator spreads its policy's budgets over the same rows, each with room for what it must keep, and gives no
/// sequence more slots in all than they are.
inline void check_spread(std::string_view who, const Evidence& evidence, std::span<const std::int32_t> budgets,
                         std::span<const std::int32_t> least, std::span<const RowLimit> rows) {
  const RowTable& table = evidence.table;
  KVKEEP_REQUIRE(rows.size() == table.rows.size(), "step: ", who, " spread budgets over ", rows.size(),
                 " rows; allowed the ", table.rows.size(), " that it was given");
  const std::size_t heads = table.groups.empty() ? 1 : rows.size() / table.groups.size();
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const std::int32_t fewest = std::max(1, std::min(least[r / heads], budgets[r / heads]));
    KVKEEP_REQUIRE(!rows[r].due || rows[r].budget >= fewest, "step: ", who, " gives layer ", table.rows[r].layer,
                   ", head ", table.rows[r].head, " a budget of ", rows[r].budget, "; allowed ", fewest,
                   " or more, which its sinks and the slots that always stay take (`least`)");
  }
  if (std::ranges::count(evidence.spec.layers, LayerKind::remote, &LayerSpec::kind) > 0) return;  // a part of them
  struct Sum {
    std::int64_t given = 0, allowed = 0;
  };
  std::vector<Sum> sums;  // by sequence
  for (std::size_t g = 0; g < table.groups.size(); ++g) {
    const auto sequence = static_cast<std::size_t>(table.groups[g].sequence);
    if (sequence >= sums.size()) sums.resize(sequence + 1);
    for (std::size_t r = g * heads; r < (g + 1) * heads; ++r) {
      sums[sequence].given += rows[r].due ? rows[r].budget : table.rows[r].length;
      sums[sequence].allowed += budgets[g];
    }
  }
  for (const Sum& sum : sums)
    KVKEEP_REQUIRE(sum.given <= sum.allowed, "step: ", who, " gives the rows of a sequence ", sum.given,
                   " slots in all; allowed ", sum.allowed,
                   ", which the policy's budget gives them (a row that is not due counts its own)");
}

/// An allocator keeps all slots of a row that is not due, and of any other those that stay whatever they score, and no
/// more than its budget if rows stay `even`.
inline void check_allotted(std::string_view who, const RowTable& table, const Limits& limits, const KeepSet& keep,
                           bool even) {
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const Row& row = table.rows[r];
    const RowLimit& limit = limits.rows[r];
    const std::int64_t count = keep.count(r), sinks = limit.guarded.sinks, recents = limit.guarded.recents;
    const auto of_row = [&] {
      return text("step: ", who, " drops ", "slots of layer ", row.layer, ", head ", row.head);
    };
    KVKEEP_REQUIRE(limit.due || count == row.length, of_row(), ", which is not due; allowed all ", row.length,
                   " slots (RowLimit::due)");
    KVKEEP_REQUIRE(!limit.due || !even || count <= limit.budget, "step: ", who, " keeps ", count, " slots of layer ",
                   row.layer, ", head ", row.head, "; allowed up to ", limit.budget, " (RowLimit::budget)");
    if (!limit.due || !keep.in_place.empty()) continue;
    const std::span<const std::int32_t> kept = keep.row(r);
    const bool whole = count >= sinks + recents &&
                       (sinks == 0 || kept[static_cast<std::size_t>(sinks) - 1] == sinks - 1) &&
                       (recents == 0 || kept[static_cast<std::size_t>(count - recents)] == row.length - recents);
    KVKEEP_REQUIRE(whole, of_row(),
                   " that stay whatever they score; allowed all that RowLimit::guarded holds, here the "
                   "oldest ",
                   sinks, " and the newest ", recents);
  }
}

/// Unless an allocator is ragged(), rows of one sequence that were alike stay so, and all that are cut keep as many.
inline void check_even(std::string_view who, const RowTable& table, const Limits& limits, const KeepSet& keep) {
  if (table.groups.empty()) return;
  const auto of_layer = std::ranges::count(table.groups, table.groups.front().layer, &RowGroup::layer);
  const std::size_t heads = table.rows.size() / table.groups.size(), sequences = static_cast<std::size_t>(of_layer);
  std::vector<std::size_t> first(sequences, table.rows.size());  // row of each sequence that is due
  const auto sequence_of = [&](std::size_t r) { return r / heads % sequences; };
  for (std::size_t r = 0; r < table.rows.size(); ++r)
    if (limits.rows[r].due) first[sequence_of(r)] = std::min(first[sequence_of(r)], r);
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const std::size_t f = first[sequence_of(r)];
    if (f == table.rows.size()) continue;
    const Row &row = table.rows[r], &of = table.rows[f];
    KVKEEP_REQUIRE(keep.count(r) == keep.count(f) || (!limits.rows[r].due && row.length != of.length), "step: ", who,
                   " leaves rows unequal: ", keep.count(f), " slots of layer ", of.layer, ", head ", of.head, ", and ",
                   keep.count(r), " of layer ", row.layer, ", head ", row.head,
                   " of one sequence; allowed with ragged()");
  }
}

/// How a decision divides one row, if it does.
inline void check_segments(std::string_view who, const Row& row, std::span<const std::int32_t> ends, std::size_t quotas,
                           std::string_view operation) {
  std::int32_t before = 0;
  bool ascend = true;
  for (const std::int32_t end : ends) ascend = ascend && end > std::exchange(before, end);
  KVKEEP_REQUIRE(ends.empty() || (ascend && before == row.length), operation, ": ", who, " divides layer ", row.layer,
                 ", head ", row.head, " into segments whose ends ", ascend ? "stop at " : "do not ascend",
                 ascend ? text(before) : "", "; allowed none, or ascending ones up to its length, ", row.length);
  KVKEEP_REQUIRE(quotas == ends.size(), operation, ": ", who, " gives layer ", row.layer, ", head ", row.head, " ",
                 quotas, " quotas; allowed one for each of its ", ends.size(), " segments");
}

/// Tokens of one prompt that continue.
inline void check_tokens(std::string_view who, const RowTable& table, const RowGroup& group, const TokenSet& set) {
  const std::int32_t present = table.rows[static_cast<std::size_t>(group.first_row)].length;
  const std::int64_t count = set.tokens.defined() ? set.tokens.numel() : 1;
  KVKEEP_REQUIRE(count >= 1 && count <= present, "narrow: ", who, " lets ", count, " tokens of layer ", group.layer,
                 " continue; allowed 1 to all ", present);
  require_flat(text("narrow: tokens of ", who), set.tokens, Dtype::i32, count, Device{});
  KVKEEP_REQUIRE((set.indptr == std::vector<std::int64_t>{0, count}), "narrow: offsets of the tokens of ", who,
                 " are not those of one prompt; allowed 0 and their number, ", count, " (tokens_of() makes them)");
  require_ascending({set.tokens.data<std::int32_t>(), static_cast<std::size_t>(count)}, present,
                    [&] { return text("narrow: ", who, " lets tokens of layer ", group.layer, " continue"); });
}

}  // namespace evict_detail

KVKEEP_INLINE void check_decision(std::string_view who, const RowTable& table, const Decision& decision,
                                  std::string_view operation) {
  const std::size_t rows = table.rows.size();
  const bool counted = decision.keep && decision.keep->in_place.empty();  // on a device, a trial has no memory yet
  const auto of_slots = [&](std::string_view what, const Tensor& given) {
    require_flat(text(operation, ": ", what, " of ", who), given, Dtype::f32, table.slots, table.device, counted);
  };
  if (decision.credit) of_slots("credit", *decision.credit);
  if (decision.tally) of_slots("tally", *decision.tally);
  if (decision.scores.data.defined()) of_slots("scores", decision.scores.data);
  KVKEEP_REQUIRE(decision.guarded.empty() || decision.guarded.size() == rows, operation, ": Decision::guarded of ", who,
                 " has ", decision.guarded.size(), " rows; allowed none, or the ", rows, " of the event");
  for (std::size_t r = 0; r < decision.guarded.size(); ++r) {
    const Row& row = table.rows[r];
    const std::int64_t most = counted ? decision.keep->count(r) : row.length;
    KVKEEP_REQUIRE(decision.guarded[r] >= 0 && decision.guarded[r] <= most, operation, ": Decision::guarded of ", who,
                   " says that ", decision.guarded[r], " slots of layer ", row.layer, ", head ", row.head,
                   " stay whatever they score; allowed 0 to the ", most, " that stay");
  }
  if (!decision.allotment) return;
  const Allotment& allotment = *decision.allotment;
  if (allotment.mass.data.defined()) of_slots("mass", allotment.mass.data);
  if (allotment.mass_used.data.defined()) of_slots("used mass", allotment.mass_used.data);
  KVKEEP_REQUIRE(allotment.ends.size() == rows && allotment.quotas.size() == rows, operation, ": ", who,
                 " says how it divides ", allotment.ends.size(), " rows, with the quotas of ", allotment.quotas.size(),
                 "; allowed both of the event's ", rows, " rows, or no Decision::allotment");
  for (std::size_t r = 0; r < rows; ++r)
    evict_detail::check_segments(who, table.rows[r], allotment.ends[r], allotment.quotas[r].size(), operation);
}

KVKEEP_INLINE void check_layer(std::string_view who, const RowTable& table, const LayerDecision& layer) {
  KVKEEP_REQUIRE(layer.prompts.size() == table.groups.size(), "narrow: ", who, " decides for ", layer.prompts.size(),
                 " prompts; allowed the ", table.groups.size(), " of the layer");
  const std::optional<KeepSet>& keep = layer.rows.keep;
  if (keep) check_keep(who, table, *keep, "narrow");
  check_decision(who, table, layer.rows, "narrow");
  const std::size_t heads = table.groups.empty() ? 1 : table.rows.size() / table.groups.size();
  for (std::size_t g = 0; g < layer.prompts.size(); ++g) {
    const LayerDecision::Prompt& prompt = layer.prompts[g];
    const RowGroup& group = table.groups[g];
    KVKEEP_REQUIRE(keep || !prompt.cut, "narrow: ", who, " cuts rows of layer ", group.layer,
                   ", and does not say what stays of them; allowed with Decision::keep");
    for (std::size_t r = g * heads; keep && !prompt.cut && r < (g + 1) * heads; ++r)
      KVKEEP_REQUIRE(keep->count(r) == table.rows[r].length, "narrow: ", who, " keeps ", keep->count(r),
                     " slots of layer ", group.layer, ", head ", table.rows[r].head,
                     ", of a prompt that it does not cut; allowed all ", table.rows[r].length, ", or with `cut`");
    if (prompt.narrow) evict_detail::check_tokens(who, table, group, *prompt.narrow);
  }
}

KVKEEP_INLINE void check_keep(std::string_view who, const RowTable& table, const KeepSet& keep,
                              std::string_view operation) {
  const bool written = keep.in_place.empty();
  const std::size_t rows = table.rows.size(), heads = table.groups.empty() ? 1 : rows / table.groups.size();
  KVKEEP_REQUIRE(keep.indptr.size() == rows + 1 && keep.indptr.front() == 0, operation, ": ", who, " gave ",
                 keep.indptr.size(), " offsets of kept slots; allowed ", rows + 1,
                 ", from 0 (empty_keep_set() makes them)");
  require_flat(text(operation, ": kept slots of ", who), keep.slots, Dtype::i32, keep.indptr.back(),
               written ? Device{} : table.device, written);
  for (std::size_t r = 0; r < rows; ++r) {
    const Row& row = table.rows[r];
    const std::int64_t count = keep.count(r);
    KVKEEP_REQUIRE(count <= row.length && count >= std::min(row.length, 1), operation, ": ", who, " keeps ", count,
                   " slots of layer ", row.layer, ", head ", row.head, "; allowed 1 to all ", row.length);
    if (!written) continue;
    const std::span<const std::int32_t> kept = keep.row(r);
    require_ascending(kept, row.length, [&] {
      return text(operation, ": ", who, " keeps slots of layer ", row.layer, ", head ", row.head);
    });
    const RowGroup& group = table.groups[r / heads];
    if (group.prompt_slots < 0) evict_detail::check_pinned(who, row, group, kept);
  }
}

KVKEEP_INLINE Evict::Evict(std::string name, std::unique_ptr<Scorer> scorer, std::unique_ptr<Allocator> allocator,
                           Retention retention, std::string json)
    : name_(std::move(name)),
      scorer_(std::move(scorer)),
      allocator_(std::move(allocator)),
      retention_(retention),
      json_(std::move(json)) {
  const std::int64_t least = std::int64_t{retention_.sink} + std::max(scorer_->keeps_newest(), 1);
  KVKEEP_REQUIRE(retention_.share == Sharing::per_layer_per_head || !allocator_->ragged() || allocator_->thins(),
                 "policy: share of ", name_, " joins rows, and allocator ", allocator_->name(),
                 " lets them keep different numbers of slots (ragged()); allowed share=per_layer_per_head");
  KVKEEP_REQUIRE(least <= INT32_MAX, "policy: sink of ", name_, " and the other slots it always keeps add up to ",
                 least, " slots; allowed at most ", INT32_MAX);
  if (retention_.trigger.prefill == Trigger::Prefill::pieces) {
    KVKEEP_REQUIRE(!retention_.protect_prompt, "policy: prefill of ", name_,
                   " is \"pieces\" with protect_prompt, which keeps all of a prompt; allowed protect_prompt=false, or "
                   "prefill=cut");
    KVKEEP_REQUIRE(retention_.rest == nullptr, "policy: prefill of ", name_,
                   " is \"pieces\" with rest=fold, which folds a prompt that is whole; allowed rest=drop, or "
                   "prefill=cut");
  }
  Budget& budget = retention_.trigger.budget;
  budget.least = std::max(budget.least, retention_.sink + 1);
  if (retention_.protect_prompt) budget.beyond_prompt = std::max(newest(INT32_MAX), 1);
  budget.period = retention_.trigger.interval;
  retention_.trigger.ragged = allocator_->ragged();
  retention_.trigger.thins = allocator_->thins();
#if KVKEEP_FOLDING
  if (fills_reach())
    require_no_problems("policy: memory",
                        retention_.rest->memory.too_tight("reach", budget.slots, retention_.rest->max_span));
#endif
}

KVKEEP_INLINE const MemoryOptions* Evict::memory() const {
#if KVKEEP_FOLDING
  if (retention_.rest != nullptr) return &retention_.rest->memory;
#endif
  return nullptr;
}

KVKEEP_INLINE Demand Evict::demand(const Needs& needs) const {
  Demand demand{name_, needs, *scorer_, *allocator_, retention_.share};
#if KVKEEP_FOLDING
  if (retention_.rest != nullptr) demand.rest = retention_.rest->cut(), demand.memory = memory();
#endif
  return demand;
}

KVKEEP_INLINE Needs needs_of(const Retention& retention, const Scorer& scorer, const Allocator& allocator) {
  Needs needs = scorer.needs();
  const auto read = [&needs](std::int32_t queries) {
    const std::int32_t fewer = std::min(needs.queries, queries);
    needs.queries = fewer < 0 ? fewer : std::max(needs.queries, queries);  // problems() refuses a negative number
  };
  // The published window leaves out one query that has been seen.
  if (allocator.window() > 0) {
    read(allocator.window() + (retention.variant == Variant::official ? 1 : 0));
    needs.keys = true;
  }
  const Needs own = allocator.needs();
  read(own.queries);
  needs.keys = needs.keys || own.keys;
  needs.values = needs.values || own.values;
  needs.output_projection = needs.output_projection || own.output_projection;
  needs.given_scores = needs.given_scores || own.given_scores;
  return needs;
}

KVKEEP_INLINE std::int32_t Evict::newest(std::int32_t slots) const {
  const std::int32_t own = retention_.newest(slots);
  return retention_.variant == Variant::strict ? std::max(own, scorer_->keeps_newest()) : own;
}

KVKEEP_INLINE Protected Evict::guarded(std::int32_t slots) const {
  const Protected own = protect(slots, slots, retention_.sink, newest(slots), retention_.variant);
  return stays({retention_.variant, padding(), {{slots, true, own}}}, 0, slots);
}

KVKEEP_INLINE void Evict::check_pins(std::span<const PositionSpan> pins) const {
  KVKEEP_REQUIRE_AS(Unsupported, retention_.variant == Variant::strict, "pin: ", name_,
                    " has variant official, and its published form pins nothing; allowed strict");
  const Budget& budget = retention_.trigger.budget;
  if (budget.unit != Budget::Unit::slots || retention_.protect_prompt) return;  // the event knows
  const std::int32_t newest = std::max(scorer_->keeps_newest(), 1);
  const std::int64_t given = positions_from(retention_.sink, pins),
                     allowed = std::max<std::int64_t>(0, std::int64_t{budget.slots} - retention_.sink - newest);
  KVKEEP_REQUIRE(given <= allowed, "pin: ", given, " positions after the ", retention_.sink, " sinks of ", name_,
                 ", whose budget is ", budget.slots, " slots, of which the newest ", newest,
                 " always stay; allowed up to ", allowed);
}

/// Pinned slots leave room for what the scorer never drops, and for one slot at least.
KVKEEP_INLINE void Evict::require_room(const RowGroup& group, std::int32_t sinks, std::int32_t pinned,
                                       std::int32_t budget) const {
  const std::int32_t newest = std::max(scorer_->keeps_newest(), 1);
  const std::int64_t allowed = std::max<std::int64_t>(0, std::int64_t{budget} - sinks - newest);
  KVKEEP_REQUIRE(pinned <= allowed, "pin: the sequence at index ", group.sequence, " of the step holds ", pinned,
                 " pinned slots in layer ", group.layer, " after ", sinks, " sinks, under ", name_,
                 ", whose budget is now ", budget, " slots, of which the newest ", newest,
                 " always stay; allowed up to ", allowed, ": unpin some, or end the sequence");
}

KVKEEP_INLINE Limits Evict::limits(const Evidence& evidence) const {
  const RowTable& table = evidence.table;
  const auto heads = static_cast<std::size_t>(evidence.spec.kv_heads);
  Limits limits{retention_.variant, padding(), std::vector<RowLimit>(table.rows.size())};
  std::size_t spans = 0;
  std::vector<std::int32_t> budgets, least, recents;
  budgets.reserve(table.groups.size());
  least.reserve(table.groups.size());
  recents.reserve(table.groups.size());
  const std::int64_t rows_of_a_sequence = std::ssize(evidence.spec.full_layers()) * evidence.spec.whole_heads();
  for (const RowGroup& group : table.groups) {
    const Row& first = table.rows[static_cast<std::size_t>(group.first_row)];
    const std::int64_t slot_bytes = first.slot_bytes() * rows_of_a_sequence;
    const std::int32_t budget = retention_.trigger.budget.resolve(group.seen, group.prompt, slot_bytes);
    budgets.push_back(budget);
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t r = static_cast<std::size_t>(group.first_row) + h;
      limits.rows[r] = {budget, table.rows[r].length > budget, {}};
    }
    const std::int32_t prompt = retention_.protect_prompt ? static_cast<std::int32_t>(group.prompt.tokens) : 0;
    recents.push_back(newest(budget - prompt));
    least.push_back(std::max(retention_.sink, prompt) + scorer_->keeps_newest());
    if (group.pinned.empty()) continue;
    check_pins({});
    const std::int32_t sinks = least.back() - scorer_->keeps_newest(),
                       pinned = evict_detail::pinned_from(sinks, first, group);
    require_room(group, sinks, pinned, budget);
    least.back() = sinks + std::max(scorer_->keeps_newest(), 1) + pinned;
    if (group.prompt_slots < 0) spans += heads * group.pinned.size();
  }
  allocator_->spread(evidence, least, limits.rows);
  evict_detail::check_spread(allocator_of(), evidence, budgets, least, limits.rows);
  SlotRange* ranges = nullptr;
  if (spans > 0) {
    const std::shared_ptr<SlotRange[]> all(new SlotRange[spans]);
    ranges = all.get();
    limits.pins = all;
  }
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const Row& row = table.rows[r];
    std::int32_t sink = retention_.sink;
    if (retention_.protect_prompt) {
      const RowGroup& group = table.groups[r / heads];
      const std::int32_t held =
          group.prompt_slots >= 0
              ? group.prompt_slots
              : static_cast<std::int32_t>(
                    std::lower_bound(row.positions, row.positions + row.length, group.prompt_end) - row.positions);
      sink = std::max(sink, held);
    }
    RowLimit& limit = limits.rows[r];
    limit.guarded = protect(row.length, limit.budget, sink, recents[r / heads], retention_.variant);
    const RowGroup& group = table.groups[r / heads];
    if (group.pinned.empty() || !limit.due) continue;
    require_room(group, limit.guarded.sinks, evict_detail::pinned_from(limit.guarded.sinks, row, group), limit.budget);
    if (group.prompt_slots >= 0) continue;  // its machine finds the slots
    const auto count = static_cast<std::int32_t>(group.pinned.size());
    protect_pinned(row, group.pinned.data(), count, std::min(limit.budget, row.length), limit.guarded, ranges);
    ranges += count;
  }
  return limits;
}

/// Where rows end up with different lengths, the scores said so, and a row may keep all its slots; but for budgets by
/// layer, which are known before.
KVKEEP_INLINE KVPolicy::MostKept Evict::most_kept(const Evidence& shapes) const {
  MostKept most = KVPolicy::most_kept(shapes);
  most.exact = !allocator_->ragged() || allocator_->across_heads() == AcrossHeads::nothing;
  if (!most.exact) return most;
  const Limits limits = this->limits(shapes);
  for (std::size_t r = 0; r < most.slots.size(); ++r)
    if (limits.rows[r].due) most.slots[r] = std::min(most.slots[r], limits.rows[r].budget);
  return most;
}

KVKEEP_INLINE std::vector<std::int32_t> Evict::guarded_slots(const Evidence& evidence, const Limits& limits) const {
  const RowTable& table = evidence.table;
  const auto heads = static_cast<std::size_t>(evidence.spec.kv_heads);
  std::vector<std::int32_t> slots;
  slots.reserve(table.rows.size());
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const Row& row = table.rows[r];
    const RowGroup& group = table.groups[r / heads];
    std::int32_t all = limits.rows[r].due ? stays(limits, r, row.length).count() : row.length;
    if (limits.rows[r].due && !group.pinned.empty() && group.prompt_slots >= 0)  // its machine finds them
      all = std::min(all + evict_detail::pinned_from(limits.rows[r].guarded.sinks, row, group), limits.rows[r].budget);
    slots.push_back(all);
  }
  return slots;
}

KVKEEP_INLINE std::vector<std::string> Evict::problems(const ModelSpec& spec) const {
  std::vector<std::string> found = scorer_->problems(spec);
#if KVKEEP_FOLDING
  if (retention_.rest != nullptr)
    for (std::string& one : retention_.rest->memory.problems(spec)) found.push_back(std::move(one));
  if (fills_reach())
    for (std::string& one :
         retention_.rest->memory.too_tight("reach", retention_.trigger.budget.slots, retention_.rest->max_span, spec))
      found.push_back(std::move(one));
#endif
  return found;
}

KVKEEP_INLINE std::vector<std::string> Evict::problems_on(const Machine& machine, const ModelSpec& spec) const {
  const Needs needs = this->needs();
  return machine.problems(demand(needs), spec);
}

KVKEEP_INLINE Decision Evict::decide(Machine& machine, const Evidence& evidence) const {
  const Limits limits = this->limits(evidence);
  const Needs needs = this->needs();
  const std::unique_ptr<Event> event = machine.begin(evidence, limits, demand(needs));
  WindowNeeds reductions = scorer_->shares();
  reductions.usage = allocator_->window() > 0;
  WindowAttention seen;
  if (reductions.usage || reductions.newest)
    seen = event->attend(std::max(allocator_->window(), 1), retention_.variant == Variant::official, reductions);
  Decision decision;
  decision.reason = Reason::over_budget;
  decision.share = retention_.share;
  decision.guarded = guarded_slots(evidence, limits);
  decision.scores = event->score(*scorer_, seen);
  if (scorer_->accumulates()) decision.tally = decision.scores.data;
  for (const Sharing share : {scorer_->sharing(), retention_.share})
    if (share != Sharing::per_layer_per_head) decision.scores = event->share(decision.scores, share);
  event->allot(*allocator_, decision.scores, std::move(seen), decision);
  KVKEEP_REQUIRE(
      decision.keep.has_value(), "decide: allocator ", allocator_->name(), " of ", name_,
      " chose no slots; allowed one whose allot() fills Decision::keep, with every slot of a row that is not "
      "due");
  const std::string who = allocator_of();
  check_keep(who, evidence.table, *decision.keep);
  evict_detail::check_allotted(who, evidence.table, limits, *decision.keep, !allocator_->ragged());
  if (!allocator_->ragged()) evict_detail::check_even(who, evidence.table, limits, *decision.keep);
  check_decision(who, evidence.table, decision);
#if KVKEEP_FOLDING
  if (retention_.rest != nullptr) fold_rest(machine, evidence.table, retention_.rest->cut(), decision);
#endif
  return decision;
}

}  // namespace kvkeep
