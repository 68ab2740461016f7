// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of keeper.h: compiled by src/keeper, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <utility>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/keep/compact.h"
#include "kvkeep/keeper/keeper.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/parts/prompts.h"
#include "kvkeep/parts/ranks.h"
#include "kvkeep/parts/surprisal.h"
#include "kvkeep/policy/evict.h"
#if KVKEEP_FOLDING
#include "kvkeep/parts/folds.h"
#endif

namespace kvkeep {
namespace keeper_detail {

/// Rows of one sequence may only end up unequal if the view can express it.
inline void require_one_length(const RowTable& table, const KeepSet& keep, const CacheView& view) {
  if (view.lengths.per_row()) return;
  std::vector<std::int64_t> lengths(view.sequences.size(), -1);
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    std::int64_t& length = lengths[static_cast<std::size_t>(table.rows[r].sequence)];
    KVKEEP_REQUIRE(length < 0 || length == keep.count(r), "apply: rows of sequence ",
                   view.sequences[static_cast<std::size_t>(table.rows[r].sequence)], " keep ", length, " and ",
                   keep.count(r), " slots, but the view has one length per sequence; allowed one length per row");
    length = keep.count(r);
  }
}

inline void write_table(std::span<const PageMove> moves, const CacheView& view) noexcept {
  for (const PageMove& move : moves) BlockTable(view).write(move.sequence, move.after, move.before.size());
}

/// The parts of a keeper, in the order in which they are called.
inline void add_parts(Sequences& sequences, const KVPolicy& policy, const Provided& provided) {
  const PartContext context{sequences, policy, provided.machine(), provided.output_projections, provided.threads};
  const Needs needs = policy.needs();
  sequences.add(std::make_unique<parts::Pins>(context));
  if (needs.given_scores) sequences.add(std::make_unique<parts::Given>(context));
  if (needs.surprisal) sequences.add(std::make_unique<parts::Surprisal>(context));
  if (policy.narrows()) sequences.add(std::make_unique<parts::Prompts>(context));
#if KVKEEP_FOLDING
  if (policy.memory() != nullptr) sequences.add(std::make_unique<parts::Folds>(context));
#endif
  if (sequences.spec().whole_heads() > sequences.spec().kv_heads)
    sequences.add(std::make_unique<parts::Ranks>(context));
  for (const MakePart make : policy.parts()) {
    std::unique_ptr<Part> part = make == nullptr ? nullptr : make(context);
    KVKEEP_REQUIRE(part != nullptr, "Keeper: parts() of ", policy.name(),
                   " gives a maker that makes none; allowed one that returns a Part");
    sequences.add(std::move(part));
  }
}

/// A stage of an event: its loops run on the keeper's threads, its trace hook is told, its time taken.
class Stage {
 public:
  Stage(const Provided& provided, const char* name) : threads_(provided.threads), hook_(provided.trace), name_(name) {
    if (hook_.begin != nullptr) hook_.begin(hook_.context, name_);
  }
  ~Stage() {
    if (hook_.end != nullptr) hook_.end(hook_.context, name_);
  }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;
  [[nodiscard]] double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  UsingThreads threads_;
  const TraceHook& hook_;
  const char* name_;
  Clock::time_point begin_ = Clock::now();
};

/// The sequences of a keeper, once everything that could be refused has been.
inline std::unique_ptr<Sequences> make_sequences(const ModelSpec& of_engine, const KVPolicy* policy,
                                                 const Provided& provided) {
  ModelSpec spec = provided.machine().part(of_engine);
  spec.check();
  KVKEEP_REQUIRE(policy != nullptr, "Keeper: policy must not be null; allowed one from make_policy()");
  kvkeep::check(*policy, spec, provided);
  const Trigger trigger = policy->trigger();
  KVKEEP_REQUIRE(trigger.never || trigger.interval >= 1, "Keeper: the trigger of ", policy->name(),
                 " has an interval of ", trigger.interval, " tokens; allowed 1 or more");
  const Budget& budget = trigger.budget;
  const bool reads_budget = !trigger.never && trigger.kind != Trigger::Kind::window;
  KVKEEP_REQUIRE(!reads_budget || budget.unit != Budget::Unit::slots || budget.slots >= 1, "Keeper: the trigger of ",
                 policy->name(), " has a budget of ", budget.slots, " slots; allowed 1 or more");
  KVKEEP_REQUIRE(!reads_budget || budget.unit != Budget::Unit::ratio || (budget.dropped >= 0 && budget.dropped < 1),
                 "Keeper: the trigger of ", policy->name(), " has a budget that drops a share of ", budget.dropped,
                 "; allowed 0 up to, not including, 1");
  KVKEEP_REQUIRE(!reads_budget || budget.unit != Budget::Unit::bytes || budget.bytes >= 1, "Keeper: the trigger of ",
                 policy->name(), " has a budget of ", budget.bytes, " bytes; allowed 1 or more");
  KVKEEP_REQUIRE(!reads_budget || budget.growth >= 0, "Keeper: the trigger of ", policy->name(),
                 " has a budget that grows by ", budget.growth, " slots; allowed 0 or more");
  auto sequences = std::make_unique<Sequences>(std::move(spec), policy->needs().queries, provided.machine());
  KVKEEP_REQUIRE(
      !sequences->full_layers().empty(),
      "Keeper: the model has no full-attention layer, so there is nothing to keep or drop; allowed one or more");
  add_parts(*sequences, *policy, provided);
  return sequences;
}

}  // namespace keeper_detail

KVKEEP_INLINE Keeper::Keeper(ModelSpec spec, std::unique_ptr<KVPolicy> policy, Provided provided)
    : policy_(std::move(policy)),
      provided_(std::move(provided)),
      sequences_(keeper_detail::make_sequences(spec, policy_.get(), provided_)),
      observer_(*sequences_, *policy_, provided_.machine()),
      needs_(policy_->needs()) {
  provided_.machine().claim();
}

KVKEEP_INLINE void Keeper::bind(std::vector<LayerKv> layers) {
  KVKEEP_REQUIRE_AS(StateError, !pending_, "bind: the last event is pending; allowed after finish()");
  check_readable(*policy_, spec(), provided_.machine(), layers);
  sequences_->bind(std::move(layers), !policy_->trigger().never || policy_->narrows());
}

KVKEEP_INLINE void Keeper::end_prompt(SequenceId sequence) {
  SequenceState& s = sequences_->at(sequence, "end_prompt");
  sequences_->require_whole("end_prompt", sequence, s);
  KVKEEP_REQUIRE_AS(StateError, s.logical > 0 && (s.prompt < 0 || s.logical < s.prompt), "end_prompt: sequence ",
                    sequence, " has ", s.logical, " tokens, ", s.prompt < 0 ? s.logical : s.prompt,
                    " of them its prompt; allowed once, before the prompt has ended");
  s.prompt = s.logical;
  s.prompt_end = s.next_position;
}

KVKEEP_INLINE RowTable Keeper::table_of(const CacheView& view, std::span<const std::int32_t> due) const {
  const BoundCache& cache = sequences_->cache("step");
  RowTable table = make_rows(spec(), cache.layers, cache.form, view, sequences_->full_layers(), due);
  for (Row& row : table.rows)
    sequences_->at(view.sequences[static_cast<std::size_t>(row.sequence)])
        .columns.describe(sequences_->row_of(row.layer, row.head), row);
  for (RowGroup& group : table.groups) {
    const SequenceState& s = sequences_->at(view.sequences[static_cast<std::size_t>(group.sequence)]);
    const std::int32_t index = sequences_->index_of(group.layer);
    group.queries = s.ring.view(index);
    const bool in_prompt = s.prompt < 0 || s.logical < s.prompt;
    group.next_position = s.next_position;
    group.prompt_end = in_prompt ? s.next_position : s.prompt_end;
    group.seen = {s.logical};
    group.prompt = {s.prompt < 0 ? s.logical : s.prompt};
    group.settled = s.settled;
    for (const std::unique_ptr<Part>& part : sequences_->parts())
      part->describe(view.sequences[static_cast<std::size_t>(group.sequence)], group);
    if (s.columns.on_host()) continue;
    group.newest = s.columns.newest();
    const std::int32_t prompt_slots = s.prompt_slots[static_cast<std::size_t>(index)];
    group.prompt_slots = prompt_slots >= 0
                             ? prompt_slots
                             : static_cast<std::int32_t>(std::ranges::lower_bound(group.newest, group.prompt_end) -
                                                         group.newest.begin());
  }
  return table;
}

KVKEEP_INLINE Evidence Keeper::evidence_of(const RowTable& table) const {
  return {.spec = spec(),
          .table = table,
          .basis = observer_.basis().value_or(QueryBasis::pre_rope),
          .moment = Moment::step_end,
          .output_projections = provided_.output_projections};
}

KVKEEP_INLINE std::int64_t Keeper::workspace_bytes(const CacheView& view) const {
  if (policy_->trigger().never) return 0;
  std::vector<std::int32_t> all(view.sequences.size());
  std::iota(all.begin(), all.end(), 0);
  const RowTable table = table_of(view, all);
  return provided_.machine().workspace(*policy_, evidence_of(table), false);
}

/// The newest query that the policy reads and that is not finite.
KVKEEP_INLINE std::optional<Unscored> Keeper::unscored(SequenceId id, const SequenceState& s) const {
  if (needs_.queries == 0) return {};
  for (const std::int32_t l : sequences_->full_layers())
    if (const std::optional<std::int32_t> position = s.ring.not_finite(sequences_->index_of(l)))
      return Unscored{.sequence = id, .layer = l, .position = *position};
  return {};
}

/// The view's lengths of the i-th sequence are those that were counted. Returns their sum.
KVKEEP_INLINE std::int64_t Keeper::check_lengths(const CacheView& view, std::size_t i, const SequenceState& s) const {
  std::int64_t slots = 0;
  std::int32_t row = 0;
  for (const std::int32_t l : sequences_->full_layers())
    for (std::int32_t h = 0; h < spec().kv_heads; ++h, ++row) {
      const std::int32_t held = view.lengths.at(i, l * spec().kv_heads + h), known = s.columns.length(row);
      KVKEEP_REQUIRE_AS(StateError, held == known, "step: sequence ", view.sequences[i], " holds ", held,
                        " slots in layer ", l, ", head ", h, "; kvkeep has seen ", known,
                        " (observe every new token, and write an event's new lengths back)");
      slots += held;
    }
  return slots;
}

/// What the program names is there, and its prompt may be cut by now.
KVKEEP_INLINE void Keeper::check_named(const CacheView& view) const {
  const Trigger trigger = policy_->trigger();
  for (const SequenceId id : view.named) {
    KVKEEP_REQUIRE(std::ranges::find(view.sequences, id) != view.sequences.end(), "step: sequence ", id,
                   " is named for an event and is not in the view; allowed sequences of the view");
    const SequenceState& s = sequences_->at(id, "step");
    KVKEEP_REQUIRE_AS(StateError, trigger.never || trigger.prefill == Trigger::Prefill::pieces || s.logical >= s.prompt,
                      "step: sequence ", id, " is named for an event with ", s.logical, " of the ", s.prompt,
                      " tokens of its prompt; allowed when the prompt has ended, or with prefill=pieces");
  }
}

KVKEEP_INLINE Plan Keeper::plan(const CacheView& view) const {
  Plan plan;
  plan.version = sequences_->version();
  plan.keeper = identity_;
  const Trigger trigger = policy_->trigger();
  std::vector<std::int32_t> due;
  const std::span<SequenceState* const> named = sequences_->resolve("step", view.sequences);
  KVKEEP_REQUIRE_AS(StateError, !pending_,
                    "step: the last event, of other sequences, is pending; allowed after finish()");
  const BoundCache& cache = sequences_->cache("step");
  checked_.check(*sequences_, cache, view);
  check_named(view);
  KVKEEP_REQUIRE(!trigger.ragged || trigger.never || spec().whole_heads() == 1 || view.lengths.per_row(),
                 "step: under ", policy_->name(),
                 " the rows of a sequence may keep different numbers of slots, but the view has one length per "
                 "sequence; allowed one length per row (Lengths::rows_per_sequence)");
  for (std::size_t i = 0; i < view.sequences.size(); ++i) {
    const SequenceState& s = *named[i];
    const std::int64_t slots = check_lengths(view, i, s);
    observer_.require_recorded("step", view.sequences[i], s);
    for (const std::unique_ptr<Part>& part : sequences_->parts()) part->check_step(view.sequences[i], s);
    Occasion occasion = occasion_of(view.sequences[i], s, slots);
    occasion.named = std::ranges::find(view.named, view.sequences[i]) != view.named.end();
    if (!trigger.due(occasion)) continue;
    observer_.require_shown("step", view.sequences[i], s);
    for (const std::int32_t l : sequences_->full_layers()) {
      const std::int64_t unread = s.ring.unread(sequences_->index_of(l));
      KVKEEP_REQUIRE_AS(StateError, unread == 0, "step: an event of sequence ", view.sequences[i], " reads the newest ",
                        needs_.queries, " queries of layer ", l, ", but ", unread,
                        " of them were observed as unread; allowed if they were given, as tokens_to_event() and "
                        "queries_read() say");
    }
    if (const std::optional<Unscored> left = unscored(view.sequences[i], s))
      plan.unscored.push_back(*left);
    else
      due.push_back(static_cast<std::int32_t>(i));
  }
  plan.bytes_before = plan.bytes_after = keeper_detail::live_bytes(*sequences_, cache, view);
  if (due.empty()) return plan;

  const keeper_detail::Stage stage(provided_, "kvkeep.plan");
  plan.table = table_of(view, due);
  checked_.check_pages(*sequences_, cache, view, plan.table);
  const Evidence evidence = evidence_of(plan.table);
  provided_.machine().workspace(*policy_, evidence, true);
  plan.decision = policy_->decide(provided_.machine(), evidence);

  KVKEEP_REQUIRE(plan.decision.keep || plan.decision.reason != Reason::over_budget, "step: ", policy_->name(),
                 " says that rows are over their budget, and not what stays of them; allowed with Decision::keep");
  if (!plan.decision.keep) return plan;  // nothing to carry out
  const KeepSet& keep = *plan.decision.keep;
  if (!policy_->checks_kept()) {
    check_keep(policy_->name(), plan.table, keep);
    check_decision(policy_->name(), plan.table, plan.decision);
  }
  for (const std::int32_t i : due) {
    const SequenceId id = view.sequences[static_cast<std::size_t>(i)];
    plan.cuts.push_back({.sequence = id, .logical_length = sequences_->at(id).logical});
  }
  measure(plan);
  for (const std::unique_ptr<Part>& part : sequences_->parts())
    part->check_decision({plan.table, plan.decision, view.sequences});
  if (plan.table.page_size > 0)
    plan.pages = plan_pages(plan.table, keep, view.sequences, view.pages, view.shared_pages);
  plan.counted = !plan.pages.empty() && view.pages != nullptr;
  plan.seconds = stage.seconds();
  return plan;
}

/// Counts what stays of every row of a plan.
KVKEEP_INLINE void Keeper::measure(Plan& plan) const {
  const KeepSet& keep = *plan.decision.keep;
  plan.bytes_after = plan.bytes_before;
  for (Cut& cut : plan.cuts) cut = {.sequence = cut.sequence, .logical_length = cut.logical_length};
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    plan.bytes_after -= (row.length - keep.count(r)) * row.slot_bytes();
    Cut& cut = plan.cuts[r / static_cast<std::size_t>(spec().kv_heads) %
                         plan.cuts.size()];  // rows are in the order layer, sequence, head
    cut.length_before = std::max(cut.length_before, row.length);
    cut.length_after = std::max(cut.length_after, static_cast<std::int32_t>(keep.count(r)));
    cut.slots_before += row.length;
    cut.slots_after += keep.count(r);
    cut.slots_chosen += plan.decision.chosen(r);
  }
}

/// The view names the sequences for which the plan was made.
/// The view is as it was when the event was planned; `pages`: its moves.
KVKEEP_INLINE void Keeper::check_planned(const char* operation, const Plan& plan, std::span<const PageMove> pages,
                                         const CacheView& view) const {
  const auto wanted = [&] { return text("; allowed the view of ", pending_ ? "apply()" : "the plan"); };
  for (std::size_t i = 0; i < plan.cuts.size(); ++i) {
    const auto place =
        static_cast<std::size_t>(plan.table.groups[i].sequence);  // groups of the first layer come first, one per cut
    KVKEEP_REQUIRE_AS(StateError, place < view.sequences.size() && view.sequences[place] == plan.cuts[i].sequence,
                      operation, ": the plan cuts sequence ", plan.cuts[i].sequence, ", which is not at place ", place,
                      " of the view", wanted());
  }
  if (!plan.decision.keep) return;
  check_view(spec(), plan.table, view);
  KVKEEP_REQUIRE_AS(StateError, !plan.counted || view.pages != nullptr, operation,
                    ": the view has no PageAllocator, and the event was planned with one", wanted());
  for (const Row& row : plan.table.rows) {
    const auto i = static_cast<std::size_t>(row.sequence);
    const std::int32_t held = view.lengths.at(i, row.layer * spec().kv_heads + row.head);
    KVKEEP_REQUIRE_AS(StateError, held == row.length, operation, ": sequence ", view.sequences[i], " holds ", held,
                      " slots in layer ", row.layer, ", head ", row.head, ", and ", row.length,
                      " when the event was planned", wanted());
  }
  for (const PageMove& move : pages) {
    const SequenceId id = view.sequences[static_cast<std::size_t>(move.sequence)];
    bool as_it_was = std::ssize(move.before) <= view.block_table.size(1);
    for (std::size_t p = 0; as_it_was && p < move.before.size(); ++p)
      as_it_was = BlockTable(view).page(move.sequence, static_cast<std::int64_t>(p)) == move.before[p];
    KVKEEP_REQUIRE_AS(StateError, as_it_was, operation, ": the block table of sequence ", id,
                      " has other pages than when the event was planned", wanted());
  }
}

/// Reserves memory for all that settle() writes; says where the machine writes columns.
KVKEEP_INLINE std::vector<ColumnTarget> Keeper::reserve_settled(const Plan& plan, const CacheView& view) {
  std::vector<ColumnTarget> targets;
  targets.reserve(plan.table.rows.size());
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    SequenceState& s = sequences_->at(view.sequences[static_cast<std::size_t>(row.sequence)]);
    targets.push_back(s.columns.reserve_settled(sequences_->row_of(row.layer, row.head),
                                                plan.decision.credit.has_value(), plan.decision.tally.has_value()));
  }
  return targets;
}

KVKEEP_INLINE EventHandle Keeper::apply(const Plan& plan, CacheView view) {
  KVKEEP_REQUIRE_AS(StateError, plan.keeper == identity_,
                    "apply: the plan is not from this keeper; allowed plans that its own plan() returned");
  KVKEEP_REQUIRE_AS(StateError, plan.version == sequences_->version(),
                    "apply: the plan is out of date: tokens were observed or rows were cut since; make a new one");
  sequences_->resolve("apply", view.sequences);
  check_planned("apply", plan, plan.pages, view);
  check_unshared(plan.pages, view.sequences, view.pages);
  std::optional<keeper_detail::Stage> stage;
  if (plan.decision.keep) stage.emplace(provided_, "kvkeep.apply");
  Report report{.cuts = plan.cuts,
                .pages = plan.pages,
                .unscored = plan.unscored,
                .bytes_before = plan.bytes_before,
                .bytes_after = plan.bytes_after};
  std::optional<Pending> pending;
  if (plan.decision.tables.counts != nullptr) pending.emplace(Pending{.plan = plan, .pages = {}});
  if (plan.decision.keep) {
    if (pending)
      KVKEEP_REQUIRE(view.lengths.rows_per_sequence == spec().num_layers() * spec().kv_heads, "apply: under ",
                     policy_->name(),
                     " the scores decide how many slots of a row stay, but the view has one length per sequence; "
                     "allowed one length per row");
    else
      keeper_detail::require_one_length(plan.table, *plan.decision.keep, view);
    move(plan, view, report);
  }
  settle_step(view, report);  // nothing fails after the first byte has moved
  if (pending) {
    for (const Cut& cut : report.cuts) sequences_->at(cut.sequence).pending = true;
    pending->pages = std::exchange(report.pages, {});
    pending_ = std::move(pending);
    sequences_->changed();
    pending_->plan.seconds += stage->seconds();
    report.pending = true;
    return {*this, view, std::move(report)};
  }
  settle(plan, view, report);
  if (stage) sequences_->totals.event_seconds.add(plan.seconds + stage->seconds());
  if (plan.decision.keep) give_back_pages(report.pages, view.pages);
  return EventHandle(std::move(report));
}

/// Everything that can fail, then the rows.
KVKEEP_INLINE void Keeper::move(const Plan& plan, const CacheView& view, Report& report) {
  std::vector<std::int32_t> taken;
  try {
    for (const std::unique_ptr<Part>& part : sequences_->parts())
      part->reserve({plan.table, plan.decision, view.sequences});
    const std::vector<ColumnTarget> targets = reserve_settled(plan, view);
    if (std::ranges::any_of(report.pages, [](const PageMove& move) { return move.taken > 0; }))
      taken =
          take_pages(report.pages, view.pages, checked_.count_holders(*sequences_, sequences_->cache("apply"), view));
    report.bytes_moved = bytes_to_move(plan.table, *plan.decision.keep, report.pages);
    provided_.machine().move(plan.table, plan.decision, report.pages, targets);
  } catch (...) {
    for (const std::unique_ptr<Part>& part : sequences_->parts()) part->abandon();
    give_back_taken(taken, view.pages);
    throw;
  }
}

/// What every step settles, with an event or without.
KVKEEP_INLINE void Keeper::settle_step(const CacheView& view, const Report& report) noexcept {
  ++sequences_->totals.steps;
  sequences_->totals.unscored += std::ssize(report.unscored);
  for (const SequenceId id : view.sequences) {
    SequenceState& s = sequences_->at(id);
    if (s.prompt < 0 && s.logical > 0) {
      s.prompt = s.logical;
      s.prompt_end = s.next_position;
    }
    if (std::ranges::find(report.unscored, id, &Unscored::sequence) == report.unscored.end()) s.asked = s.logical;
    if (needs_.queries == 0) s.ring.catch_up(s.logical - s.prefix);  // any full layer may show the next tokens
  }
}

KVKEEP_INLINE void Keeper::settle(const Plan& plan, const CacheView& view, Report& report) noexcept {
  if (!plan.decision.keep) return;
  const KeepSet& keep = *plan.decision.keep;
  keeper_detail::write_table(report.pages, view);
  for (const PageMove& move : report.pages) report.pages_freed += static_cast<std::int64_t>(move.freed.size());
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    const auto i = static_cast<std::size_t>(row.sequence);
    SequenceState& s = sequences_->at(view.sequences[i]);
    s.columns.settle(sequences_->row_of(row.layer, row.head), keep, r, plan.decision.credit.has_value(),
                     plan.decision.tally.has_value());
    view.lengths.at(i, row.layer * spec().kv_heads + row.head) = static_cast<std::int32_t>(keep.count(r));
    report.slots_dropped += row.length - keep.count(r);
  }
  for (const Cut& cut : report.cuts) {
    report.slots_kept += cut.slots_after;
    report.slots_chosen += cut.slots_chosen;
  }
  const std::int32_t room = policy_->trigger().interval;
  for (std::size_t g = 0; g < plan.table.groups.size(); ++g) {
    const RowGroup& group = plan.table.groups[g];
    SequenceState& s = sequences_->at(view.sequences[static_cast<std::size_t>(group.sequence)]);
    for (const std::unique_ptr<Part>& part : sequences_->parts())
      part->settle({plan.table, plan.decision, view.sequences}, g);
    s.last_event = s.logical;
    s.ring.forget_normalisers();
    s.event_position = s.next_position;
    s.prompt_slots[static_cast<std::size_t>(sequences_->index_of(group.layer))] = group.prompt_slots;
    if (group.layer == plan.table.groups.front().layer) s.columns.finish_event(room);
  }
  for (const std::unique_ptr<Part>& part : sequences_->parts()) part->report(report);
  sequences_->changed();
  Totals& totals = sequences_->totals;
  ++totals.events;
  totals.sequences_cut += static_cast<std::int64_t>(report.cuts.size());
  totals.slots_kept += report.slots_kept;
  totals.slots_chosen += report.slots_chosen;
  totals.slots_dropped += report.slots_dropped;
  totals.slots_folded += report.slots_folded;
  totals.bytes_moved += report.bytes_moved;
  totals.pages_freed += report.pages_freed;
}

/// Every layer has shown the tokens that the sequence has: no step has stopped in the middle.
KVKEEP_INLINE void Keeper::require_all_shown(const char* operation, SequenceId sequence) const {
  const SequenceState& s = sequences_->ready(operation, sequence);
  observer_.require_shown(operation, sequence, s);
  observer_.require_recorded(operation, sequence, s);
}

KVKEEP_INLINE void Keeper::fork(SequenceId child, SequenceId parent, std::optional<std::int64_t> tokens,
                                std::optional<std::int32_t> prompt) {
  require_all_shown("fork", parent);
  require_no_capture("fork");
  sequences_->fork(child, parent, tokens, prompt);
  if (prompt) part<parts::Pins>().unpin(child, 0, kMostPositions);  // of another request
}

/// What a captured stream copies is there only after a replay.
KVKEEP_INLINE void Keeper::require_no_capture(const char* operation) const {
  KVKEEP_REQUIRE_AS(StateError, provided_.machine().memory().capture() != Capture::now, operation,
                    ": the stream is being captured; allowed before and after");
}

KVKEEP_INLINE std::int64_t Keeper::whole_prefix(SequenceId sequence) const {
  const SequenceState& s = sequences_->ready("whole_prefix", sequence);
  sequences_->require_whole("whole_prefix", sequence, s);
  if (s.last_event == 0) return s.logical;  // whatever positions the engine gave
  std::int64_t whole = s.logical;
  for (std::int32_t r = 0; r < sequences_->rows() && whole > 0; ++r) {
    const std::span<const std::int32_t> positions = s.columns.positions(r);
    std::int64_t slot = 0;
    while (slot < std::min(whole, std::ssize(positions)) && positions[static_cast<std::size_t>(slot)] == slot) ++slot;
    whole = slot;
  }
  return whole;
}

KVKEEP_INLINE std::int64_t Keeper::evicted(SequenceId sequence) const {
  const SequenceState& s = sequences_->ready("evicted", sequence);
  sequences_->require_whole("evicted", sequence, s);
  const std::int32_t slots = s.columns.length(0);
  for (std::int32_t r = 1; r < sequences_->rows(); ++r)
    KVKEEP_REQUIRE_AS(StateError, s.columns.length(r) == slots, "evicted: rows of sequence ", sequence, " hold ", slots,
                      " and ", s.columns.length(r),
                      " slots; allowed where all are equally long (share=union keeps them so), or physical_length() of "
                      "each");
  return s.logical - slots;
}

KVKEEP_INLINE std::int64_t Keeper::tokens_to_event(SequenceId sequence) const {
  const SequenceState& s = sequences_->ready("tokens_to_event", sequence);
  if (s.prompt < 0) return 0;
  std::int64_t slots = 0;
  for (std::int32_t r = 0; r < std::ssize(sequences_->full_layers()) * spec().kv_heads; ++r)
    slots += s.columns.length(r);
  return policy_->trigger().tokens_until(occasion_of(sequence, s, slots));
}

KVKEEP_INLINE LengthForecast Keeper::forecast(SequenceId sequence) const {
  const SequenceState& s = sequences_->ready("forecast", sequence);
  LengthForecast::Begin now{.seen = s.logical,
                            .asked = s.asked,
                            .prompt = s.prompt,
                            .next_position = s.next_position,
                            .known = !s.passing.has_value()};
  for (std::int32_t r = 0; r < sequences_->rows(); ++r) now.lengths.push_back(s.columns.length(r));
  if (!sequences_->layers().empty()) now.slot_bytes = sequences_->cache("forecast").slot_bytes;
  const std::span<const PositionSpan> pinned = part<parts::Pins>().pinned(sequence);
  now.pinned.assign(pinned.begin(), pinned.end());
  return {*policy_, spec(), std::move(now)};
}

/// What the trigger of a sequence reads, whose rows here hold `slots`: of all ranks, if they hold a part of the heads
/// each.
KVKEEP_INLINE Occasion Keeper::occasion_of(SequenceId id, const SequenceState& s, std::int64_t slots) const {
  for (const std::unique_ptr<Part>& part : sequences_->parts()) slots += part->slots_elsewhere(s, id);
  Occasion occasion = Occasion::of(s.logical, s.asked, s.prompt, slots, std::ssize(sequences_->full_layers()),
                                   spec().whole_heads(), sequences_->slot_bytes() / spec().kv_heads);
  if (policy_->trigger().kind == Trigger::Kind::window) {
    const auto row = s.columns.positions(0);  // such policies run on the host
    occasion.unsettled = row.end() - std::ranges::lower_bound(row, s.settled);
  }
  return occasion;
}

KVKEEP_INLINE Report Keeper::finish(CacheView view) {
  KVKEEP_REQUIRE_AS(StateError, pending_.has_value(),
                    "finish: no event is pending; allowed once after each apply() whose report says so");
  auto& [plan, pages] = *pending_;
  const keeper_detail::Stage stage(provided_, "kvkeep.finish");
  const std::int32_t rows = spec().num_layers() * spec().kv_heads;
  KVKEEP_REQUIRE_AS(StateError, view.lengths.rows_per_sequence == rows, "finish: the view has ",
                    view.lengths.data.size(), " lengths, ", view.lengths.rows_per_sequence,
                    " per sequence; allowed the view of apply()");
  check_planned("finish", plan, pages, view);
  std::vector<std::int32_t> counts(plan.table.rows.size());
  provided_.machine().read_counts(counts);
  KeepSet& keep = *plan.decision.keep;
  for (std::size_t r = 0; r < counts.size(); ++r) keep.indptr[r + 1] = keep.indptr[r] + counts[r];
  measure(plan);
  shorten(pages, plan.table, keep);
  Report report{.cuts = plan.cuts,
                .pages = {},
                .unscored = plan.unscored,
                .bytes_before = plan.bytes_before,
                .bytes_after = plan.bytes_after,
                .bytes_moved = bytes_to_move(plan.table, keep, pages)};
  report.pages = std::move(pages);  // nothing fails from here on but give_back()
  for (const Cut& cut : report.cuts) sequences_->at(cut.sequence).pending = false;
  settle(plan, view, report);
  sequences_->totals.event_seconds.add(plan.seconds + stage.seconds());
  pending_.reset();
  give_back_pages(report.pages, view.pages);
  return report;
}

KVKEEP_INLINE const Report& EventHandle::wait() & {
  if (!done()) report_ = keeper_->finish(*view_);
  return report_;
}

}  // namespace kvkeep
