#pragma once
// Bodies of keeper.h: compiled by src/policy, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>
#include <variant>

#include "kvkeep/core/header_only.h"
#include "kvkeep/core/page_allocator.h"
#include "kvkeep/keep/compact.h"
#include "kvkeep/keeper/keeper.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/parts/ranks.h"
#include "kvkeep/parts/surprisal.h"
#include "kvkeep/policy/require_pinned.h"

namespace kvkeep {
namespace keeper_detail {

/// K and V bytes of one slot of one head, scales included.
inline std::int64_t slot_bytes(const ModelSpec& spec, const LayerKv& layer) {
  const auto of = [&spec](const auto& kv) -> std::int64_t {
    if constexpr (std::is_same_v<std::decay_t<decltype(kv)>, std::monostate>) {
      return 0;
    } else {
      const auto bytes = [](const Tensor& t, std::int64_t numbers) {
        return t.defined() ? numbers * t.element_size() : 0;
      };
      return bytes(kv.keys, spec.key_dim) + (lies_within(kv.values, kv.keys) ? 0 : bytes(kv.values, spec.value_dim)) +
             bytes(kv.key_scales, 1) + (lies_within(kv.value_scales, kv.key_scales) ? 0 : bytes(kv.value_scales, 1));
    }
  };
  return std::visit(of, layer);
}

/// K and V bytes of the live slots of all full layers.
inline std::int64_t live_bytes(const ModelSpec& spec, std::span<const std::int32_t> full_layers,
                               const CacheView& view) {
  std::int64_t bytes = 0;
  for (const std::int32_t l : full_layers) {
    std::int64_t slots = 0;
    for (std::size_t i = 0; i < view.sequences.size(); ++i)
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) slots += view.lengths.at(i, l * spec.kv_heads + h);
    bytes += slot_bytes(spec, view.layers[static_cast<std::size_t>(l)]) * slots;
  }
  return bytes;
}

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
  for (const PageMove& move : moves) {
    std::int32_t* row = view.block_table.data<std::int32_t>() + move.sequence * view.block_table.stride(0);
    std::copy(move.after.begin(), move.after.end(), row);
    std::fill(row + move.after.size(), row + move.before.size(), -1);
  }
}

}  // namespace keeper_detail

KVKEEP_INLINE std::vector<std::string> problems(const KVPolicy& policy, const ModelSpec& of_engine,
                                                const Provided& provided) {
  const Machine& machine = provided.machine();
  const ModelSpec spec = machine.part(of_engine);
  std::vector<std::string> found = policy.problems(spec);
  const Needs needs = policy.needs();
  const std::string there = machine.device().str();
  for (std::string& one : policy.problems_on(machine, spec)) found.push_back(std::move(one));
  if (policy.memory() != nullptr) {
    for (std::string& one : machine.problems(*policy.memory(), spec)) found.push_back(std::move(one));
    if (!provided.reads_folded)
      found.push_back(
          text("reads_folded: ", policy.name(),
               " folds spans, but the engine does not say that it calls view() after each layer's attention"));
  }
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

KVKEEP_INLINE void check(const KVPolicy& policy, const ModelSpec& spec, const Provided& provided) {
  const std::vector<std::string> found = problems(policy, spec, provided);
  if (found.empty()) return;
  std::string all = text("policy ", policy.name(), " cannot run here:");
  if (found.size() == 1) refuse(all, " ", found.front());
  for (const std::string& one : found) all += "\n  " + one;
  refuse(all);
}

KVKEEP_INLINE Keeper::Keeper(ModelSpec spec, std::unique_ptr<KVPolicy> policy, Provided provided)
    : policy_(std::move(policy)),
      provided_(std::move(provided)),
      sequences_(std::make_unique<Sequences>(provided_.machine().part(std::move(spec)))),
      spec_(sequences_->spec()) {
  spec_.check();
  KVKEEP_REQUIRE(policy_ != nullptr, "Keeper: policy must not be null; allowed one from make_policy()");
  kvkeep::check(*policy_, spec_, provided_);
  needs_ = policy_->needs();
  rope_unstated_ = spec_.first_without_rope();
  KVKEEP_REQUIRE(
      !sequences_->full_layers().empty(),
      "Keeper: the model has no full-attention layer, so there is nothing to keep or drop; allowed one or more");
  if (const MemoryOptions* memory = policy_->memory()) memory_ = provided_.machine().folded_memory(spec_, *memory);
  const PartContext context{*sequences_, *policy_, provided_.machine()};
  parts_.push_back(std::make_unique<parts::Pins>(context));
  if (needs_.given_scores) parts_.push_back(std::make_unique<parts::Given>(context));
  if (needs_.surprisal) parts_.push_back(std::make_unique<parts::Surprisal>(context));
  if (spec_.whole_heads() > spec_.kv_heads) parts_.push_back(std::make_unique<parts::Ranks>(context));
  for (const MakePart make : policy_->parts()) parts_.push_back(make(context));
  for (const std::unique_ptr<Part>& part : parts_) most_positions_ = std::min(most_positions_, part->most_positions());
  provided_.machine().claim();
}

KVKEEP_INLINE void Keeper::join(SequenceId sequence, std::int32_t tokens, std::int32_t prompt) {
  KVKEEP_REQUIRE_AS(StateError, !knows(sequence), "join: sequence ", sequence,
                    " is already here; allowed after leave(), or use reset()");
  KVKEEP_REQUIRE(tokens >= 0 && tokens <= kMostPositions, "join: sequence ", sequence, " begins with ", tokens,
                 " cached tokens; allowed 0 to ", kMostPositions);
  KVKEEP_REQUIRE(prompt == -1 || prompt >= tokens, "join: sequence ", sequence, " has a prompt of ", prompt,
                 " tokens and ", tokens, " of them cached; allowed at least the number cached, or -1 if unknown");
  const auto layers = static_cast<std::int32_t>(sequences_->full_layers().size());
  Machine& machine = provided_.machine();
  SequenceState fresh{machine.columns(layers * spec_.kv_heads),
                      QueryRing(layers, needs_.queries, spec_.query_heads, spec_.key_dim, machine.memory())};
  std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens));
  std::iota(positions.begin(), positions.end(), 0);
  fresh.columns->append(positions);
  fresh.prefix = fresh.next_position = fresh.event_position = fresh.prompt_end = tokens;
  fresh.logical = fresh.asked = tokens;
  fresh.prompt = prompt == -1 && tokens > 0 ? tokens : prompt;
  fresh.prompt_slots.assign(sequences_->full_layers().size(), -1);
  if (memory_ != nullptr) {
    fresh.folded = memory_->rows(layers * spec_.kv_heads);
    fresh.viewed.resize(sequences_->full_layers().size());
  }
  sequences_->add(sequence, std::move(fresh));
  try {
    for (const std::unique_ptr<Part>& part : parts_) part->join(sequence);
  } catch (...) {
    forget(sequence);
    throw;
  }
}

KVKEEP_INLINE void Keeper::forget(SequenceId sequence) noexcept {
  for (const std::unique_ptr<Part>& part : parts_) part->leave(sequence);
  sequences_->remove(sequence);
}

KVKEEP_INLINE void Keeper::leave(SequenceId sequence) {
  static_cast<void>(sequences_->ready("leave", sequence));
  forget(sequence);
  sequences_->changed();
}

KVKEEP_INLINE void Keeper::end_prompt(SequenceId sequence) {
  SequenceState& s = sequences_->at(sequence);
  KVKEEP_REQUIRE_AS(StateError, s.pass == nullptr, "end_prompt: the prompt of sequence ", sequence,
                    " is still running through the layers; allowed after its last layer");
  KVKEEP_REQUIRE_AS(StateError, s.logical > 0 && (s.prompt < 0 || s.logical < s.prompt), "end_prompt: sequence ",
                    sequence, " has ", s.logical, " tokens, ", s.prompt < 0 ? s.logical : s.prompt,
                    " of them its prompt; allowed once, before the prompt has ended");
  s.prompt = s.logical;
  s.prompt_end = s.next_position;
}

KVKEEP_INLINE void Keeper::reset(SequenceId sequence) {
  leave(sequence);
  join(sequence);
}

KVKEEP_INLINE RowTable Keeper::table_of(const CacheView& view, std::span<const std::int32_t> due) const {
  RowTable table = make_rows(spec_, view, sequences_->full_layers(), due);
  for (Row& row : table.rows)
    sequences_->at(view.sequences[static_cast<std::size_t>(row.sequence)])
        .columns->describe(sequences_->row_of(row.layer, row.head), row);
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
    for (const std::unique_ptr<Part>& part : parts_)
      part->describe(view.sequences[static_cast<std::size_t>(group.sequence)], group);
    if (s.columns->on_host()) continue;
    group.newest = s.columns->newest();
    const std::int32_t prompt_slots = s.prompt_slots[static_cast<std::size_t>(index)];
    group.prompt_slots = prompt_slots >= 0
                             ? prompt_slots
                             : static_cast<std::int32_t>(std::ranges::lower_bound(group.newest, group.prompt_end) -
                                                         group.newest.begin());
  }
  return table;
}

KVKEEP_INLINE Evidence Keeper::evidence_of(const RowTable& table) const {
  return {.spec = spec_,
          .table = table,
          .basis = basis_,
          .moment = Moment::step_end,
          .output_projections = provided_.output_projections};
}

KVKEEP_INLINE std::int64_t Keeper::workspace_bytes(const CacheView& view) const {
  if (policy_->trigger().never) return 0;
  std::vector<std::int32_t> all(view.sequences.size());
  std::iota(all.begin(), all.end(), 0);
  const RowTable table = table_of(view, all);
  return provided_.machine().workspace_bytes(*policy_, evidence_of(table));
}

/// Rows that move in place must not be anybody else's.
KVKEEP_INLINE void Keeper::check_places(const CacheView& view) const {
  const auto* dense = std::get_if<DenseKv>(&view.layers[static_cast<std::size_t>(sequences_->full_layers().front())]);
  if (dense == nullptr || view.places.empty()) return;
  const std::int64_t batch = dense->keys.size(0);
  places_.assign(static_cast<std::size_t>(batch), false);
  for (std::size_t i = 0; i < view.places.size(); ++i) {
    const std::int32_t place = view.places[i];
    KVKEEP_REQUIRE(place >= 0 && place < batch, "cache: sequence ", view.sequences[i], " is at place ", place,
                   " of the batch; allowed 0 to ", batch - 1);
    KVKEEP_REQUIRE(
        !places_[static_cast<std::size_t>(place)], "cache: sequences ",
        view.sequences[static_cast<std::size_t>(std::ranges::find(view.places, place) - view.places.begin())], " and ",
        view.sequences[i], " are both at place ", place, "; allowed one place per sequence");
    places_[static_cast<std::size_t>(place)] = true;
  }
}

/// The pages that the i-th sequence of the view holds, by its longest row.
KVKEEP_INLINE std::span<const std::int32_t> Keeper::pages_of(const CacheView& view, std::size_t i,
                                                             std::int64_t page_size) const {
  std::int64_t longest = 0;
  for (const std::int32_t l : sequences_->full_layers())
    for (std::int32_t h = 0; h < spec_.kv_heads; ++h)
      longest = std::max<std::int64_t>(longest, view.lengths.at(i, l * spec_.kv_heads + h));
  const std::int64_t held = std::min((longest + page_size - 1) / page_size, view.block_table.size(1));
  return {view.block_table.data<std::int32_t>() + static_cast<std::int64_t>(i) * view.block_table.stride(0),
          static_cast<std::size_t>(held)};
}

/// Counts in holders_ how often the block table names each page that all layers have.
KVKEEP_INLINE void Keeper::count_holders(const CacheView& view, std::int64_t page_size) const {
  std::int64_t pages = std::numeric_limits<std::int64_t>::max();
  for (const std::int32_t l : sequences_->full_layers())
    pages = std::min(pages, std::get<PagedKv>(view.layers[static_cast<std::size_t>(l)]).keys.size(0));
  holders_.assign(static_cast<std::size_t>(pages), 0);
  for (std::size_t i = 0; i < view.sequences.size(); ++i)
    for (const std::int32_t page : pages_of(view, i, page_size))
      if (page >= 0 && page < pages) ++holders_[static_cast<std::size_t>(page)];
}

/// Among the sequences that are due, the block table names no page more often than it has holders.
KVKEEP_INLINE void Keeper::check_pages(const CacheView& view, const RowTable& table) const {
  if (table.page_size == 0) return;
  count_holders(view, table.page_size);
  for (const RowGroup& group : table.groups) {
    if (group.layer != table.groups.front().layer) break;  // the same in every layer
    for (const std::int32_t page : pages_of(view, static_cast<std::size_t>(group.sequence), table.page_size)) {
      const std::int32_t named =
          page >= 0 && page < std::ssize(holders_) ? holders_[static_cast<std::size_t>(page)] : 0;
      if (named == 0 || (named == 1 && view.pages == nullptr)) continue;
      const std::int32_t held = view.pages == nullptr ? 1 : view.pages->references(page);
      KVKEEP_REQUIRE(named <= held, "cache: the block table names page ", page, " of sequence ",
                     view.sequences[static_cast<std::size_t>(group.sequence)],
                     named == 1 ? "" : text(" ", named, " times"), ", and ", held,
                     view.pages == nullptr ? " may hold it (without a PageAllocator)" : " hold it",
                     "; allowed at most once per holder");
    }
  }
}

KVKEEP_INLINE void Keeper::require_shown(const char* operation, SequenceId id, const SequenceState& s,
                                         std::int32_t layer, std::int64_t shown) const {
  KVKEEP_REQUIRE_AS(StateError, needs_.queries == 0 || shown == s.logical, operation, ": layer ", layer, " has shown ",
                    shown, " of the ", s.logical, " tokens of sequence ", id,
                    "; observe() or record() every full layer in each step");
}

/// Every full layer has recorded the queries of the step that began last, if the sequence is in it. What a graph
/// replays is unknown here.
KVKEEP_INLINE void Keeper::require_recorded(const char* operation, SequenceId id, const SequenceState& s) const {
  if (s.step != step_) return;
  for (std::size_t l = 0; l < recorded_.size(); ++l)
    if (recorded_[l] == 0) require_shown(operation, id, s, sequences_->full_layers()[l], s.logical - s.step_tokens);
}

/// The newest query that the policy reads and that is not finite.
KVKEEP_INLINE std::optional<Unscored> Keeper::unscored(SequenceId id, const SequenceState& s) const {
  if (needs_.queries == 0) return {};
  for (const std::int32_t l : sequences_->full_layers())
    if (const std::optional<std::int32_t> position = s.ring.not_finite(sequences_->index_of(l)))
      return Unscored{.sequence = id, .layer = l, .position = *position};
  return {};
}

KVKEEP_INLINE Plan Keeper::plan(const CacheView& view) const {
  Plan plan;
  plan.version = sequences_->version();
  plan.keeper = identity_;
  const Trigger trigger = policy_->trigger();
  std::vector<std::int32_t> due;
  const std::span<SequenceState* const> met = sequences_->meet("step", view.sequences);
  KVKEEP_REQUIRE_AS(StateError, !pending_,
                    "step: the last event, of other sequences, is pending; allowed after finish()");
  const Device there = make_rows(spec_, view, sequences_->full_layers(), {})
                           .device;  // a view that does not match is refused on every step, not only at events
  KVKEEP_REQUIRE(there == device(), "cache: it is on ", there.str(), ", but the keeper works on ", device().str(),
                 "; allowed one device, named by Provided::accelerator if it is not the CPU");
  check_places(view);
  if (!trigger.never) layout_.check(spec_, view);
  std::int64_t bytes_per_slot = 0;
  for (const std::int32_t l : sequences_->full_layers())
    bytes_per_slot += spec_.kv_heads * keeper_detail::slot_bytes(spec_, view.layers[static_cast<std::size_t>(l)]);
  slot_bytes_ = bytes_per_slot;
  for (std::size_t i = 0; i < view.sequences.size(); ++i) {
    const SequenceState& s = *met[i];
    KVKEEP_REQUIRE_AS(StateError, s.pass == nullptr, "step: the prompt of sequence ", view.sequences[i],
                      " has only reached layer ", s.next_layer, "; allowed after narrow() of the last layer");
    std::int64_t slots = 0;
    for (const std::int32_t l : sequences_->full_layers()) {
      for (std::int32_t h = 0; h < spec_.kv_heads; ++h) {
        const std::int32_t held = view.lengths.at(i, l * spec_.kv_heads + h),
                           known = s.columns->length(sequences_->row_of(l, h));
        KVKEEP_REQUIRE_AS(StateError, held == known, "step: sequence ", view.sequences[i], " holds ", held,
                          " slots in layer ", l, ", head ", h, "; kvkeep has seen ", known,
                          " (observe every new token, and write an event's new lengths back)");
        slots += held;
      }
    }
    require_recorded("step", view.sequences[i], s);
    for (const std::unique_ptr<Part>& part : parts_) part->check_step(view.sequences[i], s);
    for (const std::int32_t l : sequences_->full_layers()) {
      const auto index = static_cast<std::size_t>(sequences_->index_of(l));
      bool folded = false;
      for (std::int32_t h = 0; h < spec_.kv_heads && s.folded != nullptr; ++h)
        folded = folded || s.folded->spans(sequences_->row_of(l, h)) > 0;
      if (!folded) continue;
      KVKEEP_REQUIRE_AS(StateError, s.viewed[index] == s.logical, "step: layer ", l, " of sequence ", view.sequences[i],
                        " has read its folded spans for ", s.viewed[index], " of ", s.logical,
                        " tokens; call view() after each layer's attention");
    }
    if (!trigger.due(occasion_of(view.sequences[i], s, slots))) continue;
    for (const std::int32_t l : sequences_->full_layers()) {
      const std::int32_t index = sequences_->index_of(l);
      require_shown("step", view.sequences[i], s, l, s.prefix + s.ring.seen(index));
      KVKEEP_REQUIRE_AS(StateError, s.ring.unread(index) == 0, "step: an event of sequence ", view.sequences[i],
                        " reads the newest ", needs_.queries, " queries of layer ", l, ", but ", s.ring.unread(index),
                        " of them were observed as unread; allowed if they were given, as tokens_to_event() and "
                        "queries_read() say");
    }
    if (const std::optional<Unscored> left = unscored(view.sequences[i], s))
      plan.unscored.push_back(*left);
    else
      due.push_back(static_cast<std::int32_t>(i));
  }
  plan.bytes_before = plan.bytes_after = keeper_detail::live_bytes(spec_, sequences_->full_layers(), view);
  if (due.empty()) return plan;

  plan.table = table_of(view, due);
  check_pages(view, plan.table);
  plan.decision = provided_.machine().decide(*policy_, evidence_of(plan.table));

  if (!plan.decision.keep) return plan;
  const KeepSet& keep = *plan.decision.keep;
  require_pinned(policy_->name(), plan.table, keep);
  for (const std::int32_t i : due) {
    const SequenceId id = view.sequences[static_cast<std::size_t>(i)];
    plan.cuts.push_back({.sequence = id, .logical_length = sequences_->at(id).logical});
  }
  measure(plan);
  if (plan.decision.fold) check_fold(plan);
  if (plan.table.page_size > 0)
    plan.pages = plan_pages(plan.table, keep, view.sequences, view.pages, view.shared_pages);
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
    Cut& cut = plan.cuts[r / static_cast<std::size_t>(spec_.kv_heads) %
                         plan.cuts.size()];  // rows are in the order layer, sequence, head
    cut.length_before = std::max(cut.length_before, row.length);
    cut.length_after = std::max(cut.length_after, static_cast<std::int32_t>(keep.count(r)));
    cut.slots_before += row.length;
    cut.slots_after += keep.count(r);
    cut.slots_chosen += plan.decision.chosen(r);
  }
}

/// The view names the sequences for which the plan was made.
KVKEEP_INLINE void Keeper::check_planned(const char* operation, const Plan& plan, const CacheView& view) const {
  for (std::size_t i = 0; i < plan.cuts.size(); ++i) {
    const auto place =
        static_cast<std::size_t>(plan.table.groups[i].sequence);  // groups of the first layer come first, one per cut
    KVKEEP_REQUIRE_AS(StateError, place < view.sequences.size() && view.sequences[place] == plan.cuts[i].sequence,
                      operation, ": the plan cuts sequence ", plan.cuts[i].sequence, ", which is not at place ", place,
                      " of the view; allowed the view of the plan");
  }
}

/// Reserves memory for all that settle() writes; says where the machine writes columns.
KVKEEP_INLINE std::vector<ColumnTarget> Keeper::reserve_settled(const Plan& plan, const CacheView& view) {
  const KeepSet& keep = *plan.decision.keep;
  std::vector<ColumnTarget> targets;
  targets.reserve(plan.table.rows.size());
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    SequenceState& s = sequences_->at(view.sequences[static_cast<std::size_t>(row.sequence)]);
    targets.push_back(s.columns->reserve_settled(sequences_->row_of(row.layer, row.head), keep.count(r),
                                                 plan.decision.credit.has_value(), plan.decision.tally.has_value()));
  }
  return targets;
}

KVKEEP_INLINE Report Keeper::apply(const Plan& plan, const CacheView& view) {
  KVKEEP_REQUIRE_AS(StateError, plan.keeper == identity_,
                    "apply: the plan is not from this keeper; allowed plans that its own plan() returned");
  KVKEEP_REQUIRE_AS(StateError, plan.version == sequences_->version(),
                    "apply: the plan is out of date: tokens were observed or rows were cut since; make a new one");
  sequences_->meet("apply", view.sequences);
  check_planned("apply", plan, view);
  Report report{.cuts = plan.cuts,
                .pages = plan.pages,
                .unscored = plan.unscored,
                .bytes_before = plan.bytes_before,
                .bytes_after = plan.bytes_after};
  std::unique_ptr<Folding> folding;
  std::optional<Pending> pending;
  if (plan.decision.tables.counts != nullptr) pending.emplace(Pending{.plan = plan, .pages = {}});
  if (plan.decision.keep) {
    if (pending)
      KVKEEP_REQUIRE(view.lengths.rows_per_sequence == spec_.num_layers() * spec_.kv_heads, "apply: under ",
                     policy_->name(),
                     " the scores decide how many slots of a row stay, but the view has one length per sequence; "
                     "allowed one length per row");
    else
      keeper_detail::require_one_length(plan.table, *plan.decision.keep, view);
    folding = fold_dropped(plan, view);
    for (const std::unique_ptr<Part>& part : parts_) part->reserve({plan.table, plan.decision, view.sequences});
    const std::vector<ColumnTarget> targets = reserve_settled(plan, view);
    std::vector<std::int32_t> taken;
    if (std::ranges::any_of(report.pages, [](const PageMove& move) { return move.taken > 0; })) {
      count_holders(view, plan.table.page_size);
      taken = take_pages(report.pages, view.pages, holders_);
    }
    try {
      report.bytes_moved = bytes_to_move(plan.table, *plan.decision.keep, report.pages);
      provided_.machine().move(plan.table, plan.decision, report.pages, targets);
    } catch (...) {
      give_back_taken(taken, view.pages);
      throw;
    }
  }
  settle_step(view, report);  // nothing fails after the first byte has moved
  if (pending) {
    for (const Cut& cut : report.cuts) sequences_->at(cut.sequence).pending = true;
    pending->pages = std::exchange(report.pages, {});
    pending_ = std::move(pending);
    sequences_->changed();
    report.pending = true;
    return report;
  }
  settle(plan, view, folding.get(), report);
  if (plan.decision.keep) give_back_pages(report.pages, view.pages);
  return report;
}

/// What every step settles, with an event or without.
KVKEEP_INLINE void Keeper::settle_step(const CacheView& view, const Report& report) noexcept {
  ++totals_.steps;
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

KVKEEP_INLINE void Keeper::settle(const Plan& plan, const CacheView& view, Folding* folding, Report& report) noexcept {
  if (!plan.decision.keep) return;
  const KeepSet& keep = *plan.decision.keep;
  keeper_detail::write_table(report.pages, view);
  for (const PageMove& move : report.pages) report.pages_freed += static_cast<std::int64_t>(move.freed.size());
  const float* credit = plan.decision.credit ? plan.decision.credit->data<float>() : nullptr;
  const float* tally = plan.decision.tally ? plan.decision.tally->data<float>() : nullptr;
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    const auto i = static_cast<std::size_t>(row.sequence);
    SequenceState& s = sequences_->at(view.sequences[i]);
    s.columns->settle(sequences_->row_of(row.layer, row.head), keep, r,
                      credit == nullptr ? nullptr : credit + row.first, tally == nullptr ? nullptr : tally + row.first);
    view.lengths.at(i, row.layer * spec_.kv_heads + row.head) = static_cast<std::int32_t>(keep.count(r));
    report.slots_dropped += row.length - keep.count(r);
  }
  for (const Cut& cut : report.cuts) {
    report.slots_kept += cut.slots_after;
    report.slots_chosen += cut.slots_chosen;
  }
  settle_folded(plan, view, folding, report);
  const std::int32_t room = policy_->trigger().interval;
  for (std::size_t g = 0; g < plan.table.groups.size(); ++g) {
    const RowGroup& group = plan.table.groups[g];
    SequenceState& s = sequences_->at(view.sequences[static_cast<std::size_t>(group.sequence)]);
    for (const std::unique_ptr<Part>& part : parts_) part->settle({plan.table, plan.decision, view.sequences}, g);
    s.last_event = s.logical;
    s.ring.forget_normalisers();
    s.event_position = s.next_position;
    s.prompt_slots[static_cast<std::size_t>(sequences_->index_of(group.layer))] = group.prompt_slots;
    if (group.layer == plan.table.groups.front().layer) s.columns->finish_event(room);
  }
  sequences_->changed();
  ++totals_.events;
  totals_.sequences_cut += static_cast<std::int64_t>(report.cuts.size());
  totals_.slots_kept += report.slots_kept;
  totals_.slots_chosen += report.slots_chosen;
  totals_.slots_dropped += report.slots_dropped;
  totals_.slots_folded += report.slots_folded;
  totals_.bytes_moved += report.bytes_moved;
  totals_.pages_freed += report.pages_freed;
}

KVKEEP_INLINE void Keeper::truncate(SequenceId sequence, std::int64_t logical_length) {
  SequenceState& s = sequences_->ready("truncate", sequence);
  KVKEEP_REQUIRE_AS(StateError, s.pass == nullptr, "truncate: the prompt of sequence ", sequence,
                    " is still running through the layers; allowed after its last layer");
  KVKEEP_REQUIRE(logical_length >= 0 && logical_length <= s.logical, "truncate: sequence ", sequence, " is ", s.logical,
                 " tokens long; given ", logical_length, "; allowed 0 to that");
  const std::int64_t taken = s.logical - logical_length;
  KVKEEP_REQUIRE_AS(StateError, logical_length >= std::max<std::int64_t>(s.last_event, s.prefix), "truncate: sequence ",
                    sequence, " was cut at length ", s.last_event, " and what was dropped then is gone; given ",
                    logical_length, "; allowed ", std::max<std::int64_t>(s.last_event, s.prefix), " or more");
  KVKEEP_REQUIRE_AS(StateError, needs_.queries == 0 || s.ring.can_forget(taken), "truncate: ", taken,
                    " tokens of sequence ", sequence, " are more than the query ring can take back; allowed at most ",
                    QueryRing::kRollback);
  if (taken == 0) return;
  const auto newest = s.columns->newest();
  const bool some_left = logical_length > std::max<std::int64_t>(s.last_event, s.prefix);  // of tokens that came since
  s.next_position = some_left ? newest[newest.size() - static_cast<std::size_t>(taken) - 1] + 1 : s.event_position;
  if (s.logical >= s.prompt && logical_length < s.prompt) {
    s.prompt = logical_length;
    s.prompt_end = s.next_position;
  }
  s.columns->truncate(static_cast<std::int32_t>(taken));
  s.ring.forget(taken);
  s.logical = logical_length;
  s.asked = std::min(s.asked, s.logical);
  for (std::int64_t& viewed : s.viewed) viewed = std::min(viewed, s.logical);
  for (const std::unique_ptr<Part>& part : parts_) part->truncate(sequence, s);
  sequences_->changed();
}

KVKEEP_INLINE std::int64_t Keeper::tokens_to_event(SequenceId sequence) const {
  const SequenceState& s = sequences_->ready("tokens_to_event", sequence);
  if (s.prompt < 0) return 0;
  std::int64_t slots = 0;
  for (std::int32_t r = 0; r < std::ssize(sequences_->full_layers()) * spec_.kv_heads; ++r)
    slots += s.columns->length(r);
  return policy_->trigger().tokens_until(occasion_of(sequence, s, slots));
}

/// What the trigger of a sequence reads, whose rows here hold `slots`: of all ranks, if they hold a part of the heads
/// each.
KVKEEP_INLINE Occasion Keeper::occasion_of(SequenceId id, const SequenceState& s, std::int64_t slots) const {
  const std::int32_t here = spec_.kv_heads, heads = spec_.whole_heads();
  for (const std::unique_ptr<Part>& part : parts_) slots += part->slots_elsewhere(s, id);
  Occasion occasion{.slots = slots,
                    .rows = std::ssize(sequences_->full_layers()) * heads,
                    .seen = s.logical,
                    .prompt = s.prompt < 0 ? s.logical : s.prompt,
                    .step = s.logical - s.asked,
                    .slot_bytes = slot_bytes_ / here * heads};
  if (policy_->trigger().kind == Trigger::Kind::window) {
    const auto newest = s.columns->newest();
    occasion.unsettled = newest.end() - std::ranges::lower_bound(newest, s.settled);
  }
  return occasion;
}

KVKEEP_INLINE std::int32_t Keeper::physical_length(SequenceId sequence, std::int32_t layer, std::int32_t head) const {
  return sequences_->ready("physical_length", sequence).columns->length(sequences_->row_of(layer, head));
}

KVKEEP_INLINE std::span<const std::int32_t> Keeper::positions(SequenceId sequence, std::int32_t layer,
                                                              std::int32_t head) const {
  return sequences_->ready("positions", sequence).columns->positions(sequences_->row_of(layer, head));
}

KVKEEP_INLINE std::span<const float> Keeper::credit(SequenceId sequence, std::int32_t layer, std::int32_t head) const {
  return sequences_->ready("credit", sequence).columns->credit(sequences_->row_of(layer, head));
}

KVKEEP_INLINE void Keeper::pin(SequenceId sequence, std::int64_t begin, std::int64_t end) {
  part<parts::Pins>().pin(sequence, begin, end);
}

KVKEEP_INLINE void Keeper::unpin(SequenceId sequence, std::int64_t begin, std::int64_t end) {
  part<parts::Pins>().unpin(sequence, begin, end);
}

KVKEEP_INLINE std::span<const PositionSpan> Keeper::pinned(SequenceId sequence) const {
  return part<parts::Pins>().pinned(sequence);
}

KVKEEP_INLINE void Keeper::give(const GivenScores& scores) {
  KVKEEP_REQUIRE(scores.layer >= 0 && scores.layer < spec_.num_layers(), "give: layer ", scores.layer,
                 " is out of range; allowed 0 to ", spec_.num_layers() - 1);
  if (needs_.given_scores) part<parts::Given>().give(scores);
}

KVKEEP_INLINE void Keeper::surprise(SequenceId sequence, std::span<const float> nats) {
  static_cast<void>(sequences_->at(sequence));
  if (needs_.surprisal) part<parts::Surprisal>().supply(sequence, nats);
}

}  // namespace kvkeep
