// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The pipeline: observe -> decide -> apply -> settle -> view. One object between an engine and a policy.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/keep/columns.h"
#include "kvkeep/keeper/checked_view.h"
#include "kvkeep/keeper/event_handle.h"
#include "kvkeep/keeper/length_forecast.h"
#include "kvkeep/keeper/observer.h"
#include "kvkeep/observe/observation.h"
#include "kvkeep/parts/part.h"
#include "kvkeep/parts/report.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {

#if KVKEEP_FILES
class StateFile;
struct SavedState;
#endif

/// Keeps the columns and queries of the living sequences and runs the pipeline. Not thread safe: one thread at a time
/// per keeper.
///
///     keeper.bind(layers);
///     keeper.join(id);
///     // in every layer of a step
///     keeper.observe({.layer = l, .sequences = ids, .indptr = indptr, .queries = q});
///     // once, after the last layer
///     kvkeep::Report report = keeper.step({ids, {lengths}});
///
/// Positions are logical throughout: the next token of a sequence is at logical_length(id), whatever was dropped. If
/// the engine gives its own positions with gaps, it is after the last of those.
class Keeper {
 public:
  /// Throws InvalidArgument if the spec is inconsistent, or, with every reason at once, if the policy needs what the
  /// engine does not supply. Throws StateError for an accelerator that serves, or has served, another keeper.
  Keeper(ModelSpec spec, std::unique_ptr<KVPolicy> policy, Provided provided = {});
  Keeper(Keeper&&) noexcept = default;
  /// What was here ends first, in order.
  Keeper& operator=(Keeper&& other) noexcept {
    if (this != &other) std::construct_at((std::destroy_at(this), this), std::move(other));
    return *this;
  }

  /// The cache: [num_layers] where the keys and values of each layer are. Once, before the first plan() or step(), and
  /// again whenever a tensor moves, grows or is replaced; kvkeep keeps its tensors alive as long as they own their
  /// memory, and reads them only in calls. Throws InvalidArgument if they do not fit the model (common_form()), if the
  /// policy cannot read their numbers (check_readable()), or if rows share memory (check_layout()); StateError while an
  /// event is pending. Makes plans out of date.
  void bind(std::vector<LayerKv> layers);
  /// [num_layers] what is bound; empty: nothing yet.
  [[nodiscard]] std::span<const LayerKv> layers() const { return sequences_->layers(); }

  /// A sequence begins. `tokens` of it are already in the cache (a prefix that kvkeep did not see), at positions
  /// 0..tokens-1. `prompt`: tokens of its prompt, including those; absent: the cached tokens, or if there are none,
  /// the tokens of the first step; kOpenPrompt: until end_prompt(). No event happens before the prompt has ended,
  /// however many chunks it comes in, but with prefill=pieces, which asks for its length or kOpenPrompt.
  void join(SequenceId sequence, std::int32_t tokens = 0, std::optional<std::int32_t> prompt = {}) {
    sequences_->join(sequence, tokens, prompt);
  }
  /// A sequence ends, at any point but in a pending event: the keeper forgets everything about it.
  void leave(SequenceId sequence) { sequences_->leave(sequence); }
  /// A sequence begins as the first `tokens` of another, absent: all of them (parallel samples, beams, a prefix that is
  /// still being served). It continues as if it had run them itself: with the columns, the query window, the pins and
  /// all that parts keep of them. The engine gives it the rows: the same pages, held once more, or copies. `prompt`:
  /// tokens of its prompt, or kOpenPrompt, if that goes on; it is then another request, which begins without pins.
  /// Absent: the prompt goes as far as the parent's. Call it between steps.
  /// Throws, and changes nothing: StateError for a child that is known and an unknown parent, in the middle of a step
  /// as save(), for tokens that truncate() could not go back to, and for a longer prompt after an event;
  /// InvalidArgument for a prompt below `tokens`; Unsupported for folded spans on a device. Cost: a copy of columns and
  /// queries; on a device it only launches.
  void fork(SequenceId child, SequenceId parent, std::optional<std::int64_t> tokens = {},
            std::optional<std::int32_t> prompt = {});
#if KVKEEP_FILES
  /// The keeper's state of a sequence (docs/reference/state.md) as bytes, or in a file that appears whole or not at
  /// all; the sequence continues. The engine must save its rows of the cache (copy_rows()), or hold its pages. Call it
  /// between steps; if queries are kept, once every full layer has been observed. Throws: StateError for an unknown
  /// sequence, in the middle of a step, while its event is pending or its prompt runs through the layers, and while the
  /// stream is being captured; as a part does that cannot be saved; as io::write_safetensors does. Nothing changes if
  /// it throws. Cost: the size of the state, once in memory and once in the result. On a device: waits, and copies each
  /// column and the queries to the host, once each.
  [[nodiscard]] std::vector<std::byte> save(SequenceId sequence) const;
  void save(SequenceId sequence, const std::filesystem::path& file) const;
  /// Restores a sequence to its state when it was saved, under any free id, any number of times, in any process. The
  /// engine must restore its rows before the next step. The sequence continues to the same bits. `prompt` and `tokens`:
  /// as in fork(), for a prefix whose state was saved beside its pages, or the first tokens of one. Throws: StateError
  /// for a known sequence; InvalidArgument that names the file if it is damaged, or was saved under another policy or
  /// model, with each field that differs; as fork() for the prompt and for tokens; as a part does that cannot take it.
  /// The keeper is unchanged if it throws.
  /// Cost: one copy of the state, and one of its columns and queries to the device. A state that was saved on the CPU
  /// can continue on a device, and vice versa; from there on it has that machine's bits.
  void restore(SequenceId sequence, std::span<const std::byte> state, std::optional<std::int32_t> prompt = {},
               std::optional<std::int64_t> tokens = {});
  void restore(SequenceId sequence, const std::filesystem::path& file, std::optional<std::int32_t> prompt = {},
               std::optional<std::int64_t> tokens = {});
#endif
  /// The prompt of a sequence ends with the tokens observed so far, for engines that cannot tell join() how long it
  /// will be: they join with kOpenPrompt. Throws StateError for an unknown sequence, one without
  /// tokens, one whose prompt has ended, and while the prompt runs through the layers.
  void end_prompt(SequenceId sequence);
  [[nodiscard]] bool knows(SequenceId sequence) const { return sequences_->contains(sequence); }

  /// Records the new tokens of one layer. Call it in every full layer, or in one of them if the policy needs no
  /// queries; other layers are ignored. Tokens that are `unread` leave the window without queries up to them. Throws:
  /// StateError for a sequence that never joined; InvalidArgument for a wrong layer, indptr, shape, dtype or device, a
  /// duplicate sequence, missing queries, unread ones that a policy reads, and positions that do not ascend or are too
  /// large. If it throws, nothing is recorded for any sequence. Cost: copies the newest queries; allocates at a
  /// sequence's first tokens, and when its columns outgrow their largest size so far.
  void observe(const Observation& observation) { observer_.observe(observation); }

  /// observe() in two parts, for engines that decode in a CUDA graph: what changes from step to step, once, and what a
  /// graph repeats, in every layer. Counts the new tokens in all layers, and on a device sends the table by which
  /// record() files their queries. Call it before the first layer, outside the graph, on the stream that the graph runs
  /// on. Throws as observe() does, and records nothing then; StateError also if layers have observed different tokens,
  /// while the stream is being captured, and for more tokens than the table has room for once a graph knows its
  /// address: run a step of the largest size before the first capture. Unsupported under policies that act between
  /// layers. Cost: 32 bytes per token to the device, in one copy.
  void begin_step(const StepTokens& tokens) { observer_.begin_step(tokens); }
  /// Queries [tokens, Hq, D] of one layer of the step that began, and their log-sum-exps [tokens, Hq] if it was said
  /// that they come. Call it in every full layer; does nothing in others, and if the policy reads no queries. May be
  /// captured: it changes nothing on the host, and a replay files the queries of the step that began before it. Rows
  /// after those of the step are padding. Throws InvalidArgument for a wrong layer, shape, dtype or device; StateError
  /// before the first begin_step(), for fewer rows than the step has tokens (not while capturing, when a graph is made
  /// for other steps), and for more than its table. Cost: one launch, which reads and writes the queries once.
  void record(std::int32_t layer, const Tensor& queries, const Tensor& log_sum_exp = {}) {
    observer_.record(layer, queries, log_sum_exp);
  }

  /// Decides, and moves nothing. Sequences that the trigger makes due are cut, and those that the view names; one that
  /// is left out of the view is not, however long its rows (docs/start/budget-and-trigger.md). Throws: StateError if no
  /// cache is bound, if the view's lengths differ from what was observed, if a layer has not observed or recorded all
  /// tokens, if an event would read queries that were observed as unread, and for a sequence that is named in the
  /// middle of its prompt; InvalidArgument for a duplicate sequence, place or page in the view, and a named sequence
  /// that is not in it; InvalidArgument and Unsupported as make_rows and the policy do. If no sequence is due, it
  /// allocates nothing.
  [[nodiscard]] Plan plan(const CacheView& view) const;

  /// Moves K, V and columns, writes the new lengths and, in pages, the new block table where the view says, then gives
  /// back the pages that are no longer held. Throws, before the first byte moves: as Part::reserve() of a part;
  /// StateError for a plan of another keeper or one that is out of date (on a device also for one that a later plan()
  /// replaced), if there are no free pages for copies of shared ones, and if PageAllocator::take() gives a page that is
  /// in use or that no layer has.
  EventHandle apply(const Plan& plan, CacheView view);

  /// On a device, some policies' scores decide how many slots stay (`adakv-*`, `threshold-*`, `criticalkv-*` with
  /// adaptive heads). Their apply() then launches the event and returns a handle that is not done: the view still has
  /// its old lengths and block table, and the cut sequences take no other call than end_prompt(), those that read
  /// logical lengths and prompts, and those of parts that say so; no further event begins. EventHandle::wait() calls
  /// this, which completes the event over the view that apply() had: writes the new lengths and block table, gives back
  /// pages, and returns what apply() would have returned. Waits until the device has chosen the slots, which by then it
  /// normally has. Throws, before anything is written: StateError if no event is pending, and for a view that is not as
  /// apply() had it; DeviceError. Cost: one copy of 4 bytes per row, which apply() began.
  Report finish(CacheView view);

  /// plan(), then apply().
  EventHandle step(CacheView view) { return apply(plan(view), view); }

  /// On a device: workspace bytes of an event over this view if all its sequences were due
  /// (Machine::use_workspace). 0 on the CPU. Launches nothing. Throws as plan() does.
  [[nodiscard]] std::int64_t workspace_bytes(const CacheView& view) const;

  /// Takes back the newest tokens (speculative decoding): the sequence is `logical_length` tokens long afterwards, and
  /// the engine must shorten its cache to match. Either exact or a StateError: it cannot go back past the last event,
  /// or further than the query ring remembers. The next position is the one after the last remaining token; what parts
  /// keep of positions from there on is gone. If a prompt that had ended loses tokens, it becomes as long as the
  /// remaining sequence. Between steps: StateError if a layer has not shown all tokens.
  void truncate(SequenceId sequence, std::int64_t logical_length) {
    require_all_shown("truncate", sequence);
    sequences_->truncate(sequence, logical_length);
  }
  /// truncate(), also further than the query ring remembers: the window then begins with the sequence's next tokens,
  /// before which no event must come.
  void truncate_with_window(SequenceId sequence, std::int64_t logical_length) {
    require_all_shown("truncate_with_window", sequence);
    sequences_->truncate(sequence, logical_length, "truncate_with_window", false);
  }
  /// The fewest tokens that a sequence can go back to: those that its last event saw, or that were cached before
  /// join(). Throws StateError for an unknown sequence.
  [[nodiscard]] std::int64_t least_length(SequenceId sequence) const { return sequences_->least_length(sequence); }

  /// The most of its newest tokens that truncate() takes back: it takes any number up to that, and refuses one more,
  /// but where queries that were observed as unread begin. 0 right after an event. Call it between steps. So far, too,
  /// go fork() and restore() of a prefix. Throws StateError where truncate() would for any length: for an unknown
  /// sequence, while its event is pending, and while its prompt runs through the layers. Cost: host integers.
  [[nodiscard]] std::int64_t rollback_limit(SequenceId sequence) const { return sequences_->rollback_limit(sequence); }

  /// Its oldest tokens that no event has touched: in every row of every full layer slot i holds token i, for all i
  /// below. Whole pages below it hold the tokens of their places, so a prefix cache may take them in under the text's
  /// own hashes, at any time (docs/reference/one-integer.md). All tokens before the first event; where a prompt runs
  /// twice, tokens of the second pass. Where the engine gives positions with gaps, after an event at most up to the
  /// first gap. Throws as rollback_limit(). Cost: reads the positions of these slots in every row; on a device: copies
  /// all of them to the host, and waits.
  [[nodiscard]] std::int64_t whole_prefix(SequenceId sequence) const;

  /// Tokens seen that no row holds any more: what an engine takes off a logical length to have the cached one. Never
  /// falls while the sequence lives, and changes at events alone. Throws StateError where rows have different lengths
  /// (physical_length() says them), and as physical_length(). Cost: O(rows), host integers.
  [[nodiscard]] std::int64_t evicted(SequenceId sequence) const;

  /// The fewest tokens with which an event may cut the sequence, however they are split into steps; 0: the next step
  /// may do so; Trigger::kNoEvent: none will (Trigger::tokens_until() says when it is exact). In the middle of a step
  /// it is 0. An engine to which queries cost something gives those of the newest queries_read() tokens before an
  /// event, and observes the others as `unread`: in a step of n tokens, it gives queries if n > tokens_to_event() -
  /// queries_read(). An event whose window holds unread tokens is a StateError.
  [[nodiscard]] std::int64_t tokens_to_event(SequenceId sequence) const;
  /// Newest queries of every full layer that an event reads; 0: none.
  [[nodiscard]] std::int64_t queries_read() const { return needs_.queries; }

  /// Counts steps of a sequence ahead: how long its rows will be, before anything is scored. Throws StateError as
  /// physical_length() does. Cost: O(rows).
  [[nodiscard]] LengthForecast forecast(SequenceId sequence) const;

  /// Tokens seen; the position of the next one. Never shrinks at an event.
  [[nodiscard]] std::int64_t logical_length(SequenceId sequence) const {
    return sequences_->at(sequence, "logical_length").logical;
  }
  /// Tokens of its prompt; absent until known.
  [[nodiscard]] std::optional<std::int64_t> prompt_length(SequenceId sequence) const {
    const std::int64_t prompt = sequences_->at(sequence, "prompt_length").prompt;
    return prompt < 0 ? std::nullopt : std::optional(prompt);
  }
  /// Slots held by one row.
  [[nodiscard]] std::int32_t physical_length(SequenceId sequence, std::int32_t layer, std::int32_t head) const {
    return sequences_->ready("physical_length", sequence).columns.length(sequences_->row_of(layer, head));
  }
  /// Logical position of every slot of one row, ascending. Valid until the next call. On a device: copies to the host,
  /// and waits.
  [[nodiscard]] std::span<const std::int32_t> positions(SequenceId sequence, std::int32_t layer,
                                                        std::int32_t head) const {
    return sequences_->ready("positions", sequence).columns.positions(sequences_->row_of(layer, head));
  }
  /// EMA credit of the oldest slots of one row (empty before the first event). Otherwise like positions().
  [[nodiscard]] std::span<const float> credit(SequenceId sequence, std::int32_t layer, std::int32_t head) const {
    return sequences_->ready("credit", sequence).columns.credit(sequences_->row_of(layer, head));
  }

  /// Where cache and queries must be.
  [[nodiscard]] Device device() const { return provided_.machine().device(); }
  [[nodiscard]] const ModelSpec& spec() const { return sequences_->spec(); }
  [[nodiscard]] const KVPolicy& policy() const { return *policy_; }
  [[nodiscard]] const Totals& totals() const { return sequences_->totals; }

  /// A feature that not every engine uses (the headers of kvkeep/parts). Null if the policy does not ask for it.
  template <class P>
  [[nodiscard]] P* find() {
    return sequences_->find<P>();
  }
  template <class P>
  [[nodiscard]] const P* find() const {
    return sequences_->find<P>();
  }
  /// The same; throws Unsupported if this keeper has none.
  template <class P>
  [[nodiscard]] P& part() {
    return const_cast<P&>(std::as_const(*this).template part<P>());
  }
  template <class P>
  [[nodiscard]] const P& part() const {
    if (const P* const found = find<P>()) return *found;
    refuse<Unsupported>("part: ", policy_->name(), " asks for no such part; allowed those that it asks for");
  }

 private:
  /// An event between apply() and finish().
  struct Pending {
    Plan plan;
    std::vector<PageMove> pages;
  };
  void require_no_capture(const char* operation) const;
#if KVKEEP_FILES
  [[nodiscard]] SavedState state_of(SequenceId sequence) const;
  void require_restorable(SequenceId sequence) const;
  void restore(SequenceId sequence, const StateFile& state, std::optional<std::int32_t> prompt,
               std::optional<std::int64_t> tokens);
#endif
  [[nodiscard]] Occasion occasion_of(SequenceId id, const SequenceState& sequence, std::int64_t slots) const;
  void check_named(const CacheView& view) const;
  void require_all_shown(const char* operation, SequenceId sequence) const;
  [[nodiscard]] std::int64_t check_lengths(const CacheView& view, std::size_t i, const SequenceState& s) const;
  [[nodiscard]] std::optional<Unscored> unscored(SequenceId id, const SequenceState& sequence) const;
  [[nodiscard]] RowTable table_of(const CacheView& view, std::span<const std::int32_t> due) const;
  [[nodiscard]] Evidence evidence_of(const RowTable& table) const;
  void check_planned(const char* operation, const Plan& plan, std::span<const PageMove> pages,
                     const CacheView& view) const;
  void measure(Plan& plan) const;
  [[nodiscard]] std::vector<ColumnTarget> reserve_settled(const Plan& plan, const CacheView& view);
  void move(const Plan& plan, const CacheView& view, Report& report);
  void settle_step(const CacheView& view, const Report& report) noexcept;
  void settle(const Plan& plan, const CacheView& view, Report& report) noexcept;

  std::unique_ptr<KVPolicy> policy_;
  Provided provided_;
  std::unique_ptr<Sequences> sequences_;  ///< where parts find them if the keeper moves
  Observer observer_;
  Needs needs_;
  std::shared_ptr<const void> identity_ =
      std::make_shared<char>();  ///< unique among living keepers and keepers with a living plan
  std::optional<Pending> pending_;
  mutable CheckedView checked_;  ///< scratch of plan()
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/keeper/keeper-inl.h"
#endif
