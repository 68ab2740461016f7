// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of prompts.h: compiled by src/parts, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/compact.h"
#include "kvkeep/parts/check_observation.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/prompts.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep::parts {
namespace prompts_detail {

/// The number of newest tokens of a prompt of `tokens` that all continued.
inline std::int32_t newest_contiguous(std::span<const std::int32_t> places, std::int32_t tokens) {
  std::int32_t count = 0;
  while (count < static_cast<std::int32_t>(places.size()) &&
         places[places.size() - 1 - static_cast<std::size_t>(count)] == tokens - 1 - count)
    ++count;
  return count;
}

/// The entries of a list that are left.
inline std::vector<std::int32_t> those_at(std::span<const std::int32_t> places, std::span<const std::int32_t> list) {
  std::vector<std::int32_t> left;
  left.reserve(places.size());
  for (const std::int32_t place : places) left.push_back(list[static_cast<std::size_t>(place)]);
  return left;
}

/// Checks that the block table's row for the sequence at `place` names pages of `pages` for `slots` slots.
inline void check_prompt_pages(const CacheView& view, std::size_t place, std::int64_t slots, std::int64_t page_size,
                               std::int64_t pages) {
  const Tensor& table = view.block_table;
  const std::int64_t held = (slots + page_size - 1) / page_size;
  KVKEEP_REQUIRE(table.size(1) >= held, "narrow: the block table names ", table.size(1),
                 " pages per sequence; sequence ", view.sequences[place], " came in with ", slots,
                 " tokens; allowed at least ", held);
  const BlockTable blocks(view);
  for (std::int64_t p = 0; p < held; ++p) {
    const std::int64_t page = blocks.page(static_cast<std::int64_t>(place), p);
    KVKEEP_REQUIRE(page >= 0 && page < pages, "narrow: page ", p, " of sequence ", view.sequences[place], " is ", page,
                   "; allowed 0 to ", pages - 1, ", because the prompt's pages are given back at its end");
  }
}

/// Rows that move in place must not be anybody else's: prompts that share rows cannot drop different ones.
inline void require_own_cache(const CacheView& view, std::size_t place, const RowTable& table) {
  for (std::size_t other = 0; other < view.places.size(); ++other)
    KVKEEP_REQUIRE(other == place || view.places[other] != view.places[place], "narrow: places: sequences ",
                   view.sequences[place], " and ", view.sequences[other], " are both at place ", view.places[place],
                   " of the cache; allowed one place per sequence");
  if (view.pages == nullptr || table.page_size == 0) return;
  const Row& row = table.rows.front();
  for (std::int32_t p = 0; p * table.page_size < row.length; ++p)
    KVKEEP_REQUIRE(view.pages->references(row.keys.pages[p]) <= 1, "narrow: block_table: page ", row.keys.pages[p],
                   " of sequence ", view.sequences[place], " is held by ", view.pages->references(row.keys.pages[p]),
                   " sequences; allowed only unshared pages while a prompt narrows");
}

/// The sequence at `place` held `before` slots and now holds `after` (`shortest` in its shortest row): the pages past
/// them leave its row of the block table, to be given back.
inline PageMove drop_pages(const CacheView& view, std::size_t place, std::int64_t before, std::int64_t after,
                           std::int64_t shortest, std::int64_t page_size) {
  const BlockTable blocks(view);
  const std::int64_t held = (before + page_size - 1) / page_size, needed = (after + page_size - 1) / page_size;
  PageMove move;
  move.sequence = static_cast<std::int32_t>(place);
  move.longest = static_cast<std::int32_t>(after), move.shortest = static_cast<std::int32_t>(shortest);
  for (std::int64_t p = 0; p < held; ++p)
    move.before.push_back(static_cast<std::int32_t>(blocks.page(move.sequence, p)));
  move.after.assign(move.before.begin(), move.before.begin() + needed);
  move.freed.assign(move.before.begin() + needed, move.before.end());
  blocks.write(move.sequence, move.after, move.before.size());
  return move;
}

/// Appends the rows of one prompt to those of others in the same layer.
inline void append(RowTable& all, const RowTable& one) {
  if (all.rows.empty()) {
    all = one;
    return;
  }
  for (RowGroup group : one.groups) {
    group.first_row += std::ssize(all.rows);
    all.groups.push_back(group);
  }
  for (Row row : one.rows) {
    row.first += all.slots;
    all.rows.push_back(row);
  }
  all.narrowed_pages.insert(all.narrowed_pages.end(), one.narrowed_pages.begin(), one.narrowed_pages.end());
  all.slots += one.slots;
}

inline void check_finite(SequenceId sequence, const RowGroup& group, const ModelSpec& spec) {
  const QueryView& queries = group.queries;
  with_dtype("narrow", queries.dtype, [&](auto type) {
    for (std::int32_t i = 0; i < queries.count; ++i)
      for (std::int32_t h = 0; h < spec.query_heads; ++h) {
        const auto* q = reinterpret_cast<const decltype(type)*>(queries.at(i, h));
        KVKEEP_REQUIRE(std::all_of(q, q + spec.key_dim, [](auto x) { return std::isfinite(static_cast<float>(x)); }),
                       "narrow: query of head ", h, " at position ", queries.position(i), " of sequence ", sequence,
                       ", layer ", group.layer, ",", " holds a number that is not finite; allowed finite numbers");
      }
  });
}

}  // namespace prompts_detail

/// One prompt at one layer: the input of its decision, then the decision; nothing of it is applied yet.
struct Prompts::LayerPlan {
  SequenceState* sequence = nullptr;
  Prompt* prompt = nullptr;
  SequenceId id = 0;
  std::int32_t layer = 0;
  std::size_t place = 0;  ///< in the view
  RowTable table = {};
  std::int32_t queries = 0;  ///< newest ones that decide; 0: the layer does not decide
  LayerDecision::Prompt decision = {};
  std::int64_t slots_dropped = 0, bytes_moved = 0;
};

KVKEEP_INLINE void Prompts::reserve_tokens(SequenceId id, const SequenceState& s,
                                           std::span<const std::int32_t> positions) {
  const Prompt* const had = prompts_.find(id);
  if (positions.empty() || s.logical > 0 || (had != nullptr && !had->begins)) return;
  const auto tokens = static_cast<std::int32_t>(positions.size()), layers = spec().num_layers();
  KVKEEP_REQUIRE(s.prompt <= tokens, "observe: sequence ", id, " passes ", tokens, " of the ", s.prompt,
                 " tokens of its prompt; ", policy().name(),
                 " compares layers over the whole prompt; allowed all of it in one step");
  PromptReport report{.tokens = tokens,
                      .selection_layer = -1,
                      .relative_variance = std::vector<double>(static_cast<std::size_t>(layers),
                                                               std::numeric_limits<double>::quiet_NaN()),
                      .entered = std::vector<std::int32_t>(static_cast<std::size_t>(layers)),
                      .going_on = std::vector<std::int32_t>(positions.size())};
  std::iota(report.going_on.begin(), report.going_on.end(), 0);
  prompts_[id] = {begun_prompt("observe", policy(), machine(), spec(), tokens), std::move(report),
                  Passing{.tokens = tokens, .present = {positions.begin(), positions.end()}, .contiguous = tokens}};
}

KVKEEP_INLINE void Prompts::append(SequenceId id, SequenceState& s) noexcept {
  if (Prompt* const prompt = prompts_.find(id); prompt != nullptr && prompt->begins)
    s.passing = *std::exchange(prompt->begins, {});
}

KVKEEP_INLINE void Prompts::check_step(SequenceId id, const SequenceState& s) const {
  KVKEEP_REQUIRE_AS(StateError, !s.passing, "step: the prompt of sequence ", id, " has only reached layer ",
                    s.passing->next_layer, "; allowed after narrow() of the last layer");
}

KVKEEP_INLINE Prompts::LayerPlan Prompts::plan_layer(SequenceId id, SequenceState& s, const Observation& o,
                                                     std::size_t i, const CacheView& view) {
  const ModelSpec& model = spec();
  const auto place = static_cast<std::size_t>(std::ranges::find(view.sequences, id) - view.sequences.begin());
  KVKEEP_REQUIRE(place < view.sequences.size(), "narrow: sequence ", id,
                 " is not in the view; allowed a view of the step's sequences");
  KVKEEP_REQUIRE_AS(StateError, s.passing->next_layer == o.layer, "narrow: layer ", o.layer,
                    " of the prompt of sequence ", id, "; layer ", s.passing->next_layer,
                    " comes next; allowed only that");
  const auto present = static_cast<std::int32_t>(s.passing->present.size());
  KVKEEP_REQUIRE(o.indptr[i + 1] - o.indptr[i] == present, "narrow: layer ", o.layer, " passes ",
                 o.indptr[i + 1] - o.indptr[i], " tokens of sequence ", id, "; ", present,
                 " continued to it; allowed exactly these");
  KVKEEP_REQUIRE(view.lengths.per_row() || model.num_layers() * model.kv_heads == 1,
                 "narrow: the view has one length per sequence, but layers of a prompt end up with different ones; "
                 "allowed one length per row");

  LayerPlan plan{.sequence = &s, .prompt = prompts_.find(id), .id = id, .layer = o.layer, .place = place};
  for (std::int32_t h = 0; h < model.kv_heads; ++h) {
    const std::int32_t held = view.lengths.at(place, o.layer * model.kv_heads + h);
    KVKEEP_REQUIRE_AS(StateError, held == present, "narrow: sequence ", id, " holds ", held, " slots in layer ",
                      o.layer, ", head ", h, "; ", present, " tokens continued to it");
  }
  if (const Given* const given = sequences().find<Given>()) given->require_all("narrow", id, s, o.layer);
  const std::int32_t due = static_cast<std::int32_t>(place);
  const BoundCache& cache = sequences().cache("narrow");
  plan.table = make_rows(model, cache.layers, cache.form, view, {&o.layer, 1}, {&due, 1});
  if (plan.table.page_size > 0)
    prompts_detail::check_prompt_pages(view, place, s.passing->tokens, plan.table.page_size,
                                       std::get<PagedKv>(cache.layers[static_cast<std::size_t>(o.layer)]).keys.size(0));
  const std::int32_t wanted = plan.queries = wanted_queries("narrow", policy(), *plan.prompt->pass, o.layer, present);
  if (wanted == 0) return plan;
  prompts_detail::require_own_cache(view, place, plan.table);
  for (Row& row : plan.table.rows) s.columns.describe(sequences().row_of(row.layer, row.head), row);
  RowGroup& group = plan.table.groups.front();
  const auto bytes = static_cast<std::int64_t>(o.queries.element_size());
  group.queries = {
      .data = static_cast<const std::byte*>(o.queries.bytes()) + (o.indptr[i + 1] - wanted) * o.queries.step(0) * bytes,
      .dtype = o.queries.dtype(),
      .token_stride = o.queries.step(0) * bytes,
      .head_stride = o.queries.step(1) * bytes,
      .positions = s.passing->present.data() + present - wanted,
      .ring = wanted,
      .begin = 0,
      .count = wanted};
  group.next_position = s.next_position;
  group.prompt_end = s.next_position;
  group.seen = group.prompt = {s.passing->tokens};
  if (s.columns.on_host())
    prompts_detail::check_finite(id, group, model);  // on a device scores are NaN then, which rank last
  else
    group.newest = s.columns.newest();
  return plan;
}

KVKEEP_INLINE LayerReport Prompts::narrow(const Observation& o, CacheView view) {
  const UsingThreads own(threads());
  LayerReport report;
  std::vector<LayerPlan> plans;
  bool checked = false;
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    SequenceState& s = sequences().at(o.sequences[i]);
    if (!s.passing) continue;
    if (!std::exchange(checked, true)) {
      sequences().resolve("narrow", o.sequences, o.indptr);
      check_queries("narrow", o, spec(), machine().device(), policy());
      check_basis("narrow", o.basis, sequences().without_rope());
    }
    plans.push_back(plan_layer(o.sequences[i], s, o, i, view));
  }
  // Passes remember what they have seen: none decides before everything that could be refused has been checked, in
  // every prompt.
  decide_layer(plans, o, view);
  const std::int32_t layers = spec().num_layers(), heads = spec().kv_heads;
  Totals& totals = sequences().totals;
  for (LayerPlan& plan : plans) {
    SequenceState& s = *plan.sequence;
    PromptReport& of_prompt = plan.prompt->report;
    Narrowing narrowing{.sequence = plan.id, .slots_dropped = plan.slots_dropped, .bytes_moved = plan.bytes_moved};
    of_prompt.entered[static_cast<std::size_t>(plan.layer)] = static_cast<std::int32_t>(s.passing->present.size());
    if (plan.decision.relative_variance)
      of_prompt.relative_variance[static_cast<std::size_t>(plan.layer)] = *plan.decision.relative_variance;
    if (plan.decision.reason == Reason::select_layer) of_prompt.selection_layer = plan.layer;
    s.passing->next_layer = plan.layer + 1;
    sequences().changed();
    if (plan.decision.narrow) continue_with(plan, view, narrowing);
    if (plan.decision.cut || plan.decision.narrow) report.prompts.push_back(narrowing);
    totals.slots_dropped += narrowing.slots_dropped;
    totals.bytes_moved += narrowing.bytes_moved;
    if (narrowing.restart) {
      restart_prompt(plan, view, report);
    } else if (plan.layer + 1 == layers) {
      s.passing.reset();
      plan.prompt->pass.reset();
      if (s.last_event == s.logical)  // layers hold different numbers of the prompt's slots
        for (std::int32_t l = 0; l < layers; ++l)
          s.prompt_slots[static_cast<std::size_t>(l)] = s.columns.length(sequences().row_of(l, 0));
      std::int64_t longest = 0, shortest = of_prompt.tokens;
      for (std::int32_t r = 0; r < layers * heads; ++r) {
        longest = std::max<std::int64_t>(longest, s.columns.length(r));
        shortest = std::min<std::int64_t>(shortest, s.columns.length(r));
      }
      const std::int32_t page_size = plan.table.page_size;
      // Reported even if no page became free: whoever shares pages must know how short the shortest row is.
      if (page_size > 0 && shortest < of_prompt.tokens)
        report.pages.push_back(
            prompts_detail::drop_pages(view, plan.place, of_prompt.tokens, longest, shortest, page_size));
    }
  }
  for (const PageMove& move : report.pages) totals.pages_freed += static_cast<std::int64_t>(move.freed.size());
  give_back_pages(report.pages, view.pages);
  return report;
}

/// Decides for every prompt that this layer decides, together, and drops the slots that do not stay.
KVKEEP_INLINE void Prompts::decide_layer(std::span<LayerPlan> plans, const Observation& o, const CacheView& view) {
  RowTable table;
  std::vector<PromptPass*> passes;
  std::vector<LayerPlan*> deciding;
  for (LayerPlan& plan : plans) {
    if (plan.queries == 0) continue;
    prompts_detail::append(table, plan.table);
    passes.push_back(plan.prompt->pass.get());
    deciding.push_back(&plan);
  }
  if (passes.empty()) return;
  LayerDecision layer = policy().decide_layer(machine(),
                                              {.spec = spec(),
                                               .table = table,
                                               .basis = o.basis,
                                               .moment = Moment::prefill_layer,
                                               .output_projections = output_projections()},
                                              passes);
  check_layer(policy().name(), table, layer);
  for (std::size_t i = 0; i < deciding.size(); ++i) deciding[i]->decision = layer.prompts[i];
  if (!layer.rows.keep) return;
  KeepSet& keep = *layer.rows.keep;
  const auto heads = static_cast<std::size_t>(spec().kv_heads);
  std::vector<ColumnTarget> targets;
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    LayerPlan& plan = *deciding[r / heads];
    const Row& row = table.rows[r];
    if (!plan.decision.cut) {
      targets.emplace_back();
      continue;
    }
    if (row.head == 0) plan.sequence->columns.bring_newest();
    targets.push_back(plan.sequence->columns.reserve_settled(sequences().row_of(row.layer, row.head), false, false));
  }
  const PartEvent event{table, layer.rows, view.sequences};
  for (const std::unique_ptr<Part>& part : sequences().parts()) part->reserve(event);
  machine().move(table, layer.rows, {}, targets);
  if (layer.rows.tables.counts != nullptr) {  // until here `keep` has bounds
    std::vector<std::int32_t> counts(table.rows.size());
    machine().read_counts(counts);
    for (std::size_t r = 0; r < counts.size(); ++r) keep.indptr[r + 1] = keep.indptr[r] + counts[r];
  }
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    LayerPlan& plan = *deciding[r / heads];
    if (!plan.decision.cut) continue;
    const Row& row = table.rows[r];
    SequenceState& s = *plan.sequence;
    plan.bytes_moved += bytes_to_move(table, keep, r);
    plan.slots_dropped += row.length - keep.count(r);
    s.columns.settle(sequences().row_of(row.layer, row.head), keep, r, false, false);
    if (row.head == 0)
      for (const std::unique_ptr<Part>& part : sequences().parts()) part->settle(event, r / heads);
    view.lengths.at(plan.place, row.layer * spec().kv_heads + row.head) = static_cast<std::int32_t>(keep.count(r));
    s.last_event = s.logical;
    s.event_position = s.next_position;
  }
}

KVKEEP_INLINE void Prompts::continue_with(const LayerPlan& plan, const CacheView& view, Narrowing& report) {
  SequenceState& s = *plan.sequence;
  const TokenSet& narrow = *plan.decision.narrow;
  const std::span<const std::int32_t> places{narrow.tokens.data<std::int32_t>(),
                                             static_cast<std::size_t>(narrow.tokens.numel())};
  report.tokens = std::vector<std::int32_t>(places.begin(), places.end());
  report.restart = narrow.restart;
  std::vector<std::int32_t>& going_on = plan.prompt->report.going_on;
  going_on = prompts_detail::those_at(places, going_on);
  s.passing->present = prompts_detail::those_at(places, s.passing->present);
  s.passing->contiguous = prompts_detail::newest_contiguous(going_on, s.passing->tokens);
  s.last_event = s.logical;
  s.event_position = s.next_position;
  const std::int32_t next = plan.layer + 1, layers = spec().num_layers(), heads = spec().kv_heads;
  if (narrow.restart || next == layers) return;
  s.columns.narrow(sequences().row_of(next, 0), places, s.passing->present);
  for (std::int32_t r = next * heads; r < layers * heads; ++r)
    view.lengths.at(plan.place, r) = static_cast<std::int32_t>(places.size());
}

/// The first pass is over: only what it chose remains.
KVKEEP_INLINE void Prompts::restart_prompt(const LayerPlan& plan, const CacheView& view, LayerReport& report) {
  PromptReport of_first_pass = std::move(plan.prompt->report);
  of_first_pass.second_pass = true;
  const std::int32_t page_size = plan.table.page_size;
  sequences().leave(plan.id);
  sequences().join(plan.id, 0, static_cast<std::int32_t>(of_first_pass.going_on.size()));
  for (std::int32_t r = 0; r < spec().num_layers() * spec().kv_heads; ++r) view.lengths.at(plan.place, r) = 0;
  if (page_size > 0)
    report.pages.push_back(prompts_detail::drop_pages(view, plan.place, of_first_pass.tokens, 0, 0, page_size));
  prompts_[plan.id].report = std::move(of_first_pass);
}

KVKEEP_INLINE const PromptReport* Prompts::report_of(SequenceId sequence) const {
  static_cast<void>(sequences().at(sequence, "report_of"));
  const Prompt* const prompt = prompts_.find(sequence);
  return prompt == nullptr || prompt->begins ? nullptr : &prompt->report;
}

}  // namespace kvkeep::parts
