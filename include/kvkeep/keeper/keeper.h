#pragma once
/// The pipeline: observe -> decide -> apply -> settle -> view. One object between an engine and a policy.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvkeep/core/cache_layout.h"
#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/columns.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/pins.h"
#include "kvkeep/keep/pages.h"
#include "kvkeep/observe/attended.h"
#include "kvkeep/observe/given_scores.h"
#include "kvkeep/observe/observation.h"
#include "kvkeep/observe/query_ring.h"
#include "kvkeep/parts/part.h"
#include "kvkeep/parts/sequences.h"
#include "kvkeep/policy/folded_memory.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {

class StateFile;

/// What an event does, or did, to one sequence. Lengths are those of its longest row.
struct Cut {
  SequenceId sequence = 0;
  std::int64_t logical_length = 0;  ///< tokens seen
  std::int32_t length_before = 0;   ///< slots
  std::int32_t length_after = 0;
  std::int64_t slots_before = 0;  ///< over all its rows
  std::int64_t slots_after = 0;
  std::int64_t slots_chosen = 0;  ///< of slots_after: those that stay because of their scores, being neither sinks, nor
                                  ///< recents, nor pinned, nor of a protected prompt, nor in a row that was not cut. A
                                  ///< lower bound on a device if some are pinned
};

/// A sequence that was due but was not cut: the policy reads a query of it that is NaN or infinite, so what that
/// attends to is undefined. Other sequences are cut as if it were not there. End it, or let the query leave the window.
/// On a device there is no such check: the scores are NaN, which rank last.
struct Unscored {
  SequenceId sequence = 0;
  std::int32_t layer = 0;
  std::int32_t position = 0;  ///< logical, of the query
};

/// What an event would do. Where a device's scores decide how many slots stay, its lengths, slots, bytes and pages
/// after the event are upper bounds. Refers to the view and the keeper that it was made from: apply it before either
/// changes. On a device, the keeper's next plan overwrites the memory of its tensors.
struct Plan {
  std::vector<Cut> cuts;  ///< one per sequence that is due
  RowTable table;         ///< the rows of those sequences
  Decision decision;
  std::vector<PageMove> pages;     ///< paged caches: one per sequence that is due
  std::vector<Unscored> unscored;  ///< sequences that are due and will not be cut
  std::int64_t bytes_before = 0;   ///< K and V bytes of live slots in full layers, for all sequences of the view
  std::int64_t bytes_after = 0;
  std::uint64_t version = 0;
  std::shared_ptr<const void> keeper;  ///< the keeper that made the plan
};

/// What an event did: proof in numbers that compression ran.
struct Report {
  std::vector<Cut> cuts;
  std::vector<PageMove> pages;  ///< paged caches: the pages that each cut sequence now holds, as its row of the block
                                ///< table says, and those it gave back
  std::vector<Unscored> unscored;  ///< sequences that were due and were not cut
  std::int64_t slots_kept = 0;     ///< of the cut sequences, over all rows
  std::int64_t slots_chosen = 0;   ///< of these, by the scorer (Cut)
  std::int64_t slots_dropped = 0;  ///< over all rows
  std::int64_t slots_folded = 0;   ///< of these, folded into spans
  std::int64_t far_bytes = 0;      ///< of the factors stored for them; an upper bound on a device (FoldedState)
  std::int64_t bytes_before = 0;   ///< as in Plan
  std::int64_t bytes_after = 0;
  std::int64_t bytes_moved = 0;  ///< K and V bytes copied within the cache; an upper bound on a device, because the
                                 ///< host does not know which slots were already in place
  std::int64_t pages_freed = 0;  ///< holders removed, over all sequences; a page without holders is free
  bool pending = false;  ///< the device has yet to say how many slots stay: what comes after the event is an upper
                         ///< bound, `pages` is empty, and the view is as it was until Keeper::finish()
};

/// What one layer did to one prompt.
struct Narrowing {
  SequenceId sequence = 0;
  std::optional<std::vector<std::int32_t>> tokens =
      {};               ///< places, among the tokens present, of those that continue, ascending; absent: all continue
  bool afresh = false;  ///< they do not continue here: the sequence leaves this step with an empty cache, and from the
                        ///< next step its prompt is these tokens alone, at positions from 0
  std::int64_t slots_dropped = 0;  ///< of this layer's rows
  std::int64_t bytes_moved = 0;
};

/// What one layer did to the prompts of a step.
struct LayerReport {
  std::vector<Narrowing> prompts;  ///< one per sequence of the step that changed
  std::vector<PageMove> pages;     ///< paged caches: the pages that an ended prompt now holds, as its row of the block
                                   ///< table says, and those it gave back
};

/// Counters since construction of the keeper.
struct Totals {
  std::int64_t steps = 0;
  std::int64_t events = 0;  ///< steps in which something was cut
  std::int64_t sequences_cut = 0;
  std::int64_t slots_kept = 0;    ///< at events, as in Report
  std::int64_t slots_chosen = 0;  ///< of these; 0 after events: the scorer had no say
  std::int64_t slots_dropped = 0;
  std::int64_t bytes_moved = 0;
  std::int64_t pages_freed = 0;
  std::int64_t slots_folded = 0;
  ReadCounts reads;  ///< of folded spans; 0 on a device
};

/// Keeps the columns and queries of the living sequences and runs the pipeline. Not thread safe: one thread at a time
/// per keeper.
///
///     keeper.join(id);
///     // in every layer of a step
///     keeper.observe({.layer = l, .sequences = ids, .indptr = indptr, .queries = q});
///     // once, after the last layer
///     kvkeep::Report report = keeper.step(cache);
///
/// Positions are logical throughout: the next token of a sequence is at logical_length(id), whatever was dropped. If
/// the engine gives its own positions with gaps, it is after the last of those.
class Keeper {
 public:
  /// Throws InvalidArgument if the spec is inconsistent, or, with every reason at once, if the policy needs what the
  /// engine does not supply. Throws StateError for an accelerator that serves, or has served, another keeper.
  Keeper(ModelSpec spec, std::unique_ptr<KVPolicy> policy, Provided provided = {});

  /// A sequence begins. `tokens` of it are already in the cache (a prefix that kvkeep did not see), at positions
  /// 0..tokens-1. `prompt`: tokens of its prompt, including those; -1: the cached tokens, or if there are none, the
  /// tokens of the first step. No event happens before the prompt has ended, however many chunks it comes in.
  void join(SequenceId sequence, std::int32_t tokens = 0, std::int32_t prompt = -1);
  /// A sequence ends, at any point but in a pending event: the keeper forgets everything about it.
  void leave(SequenceId sequence);
#ifndef KVKEEP_HEADER_ONLY
  /// Writes the keeper's state of a sequence to a file (docs/reference/state.md), whole or not at all; the sequence
  /// continues. The engine must save its rows of the cache. Call it between steps; if queries are kept, once every full
  /// layer has been observed. Throws: StateError for an unknown sequence, in the middle of a step, while its event is
  /// pending or its prompt narrows, and while the stream is being captured; Unsupported on a device under a policy that
  /// folds; as io::write_safetensors does. Nothing changes if it throws. Cost: the size of the state, including far
  /// bytes, once in memory and once in the file. On a device: waits, and copies each column and the queries to the
  /// host, once each.
  void save(SequenceId sequence, const std::filesystem::path& file) const;
  /// Restores a sequence to its state when it was saved, under any free id, in any process. The engine must restore its
  /// rows before the next step. The sequence continues to the same bits. Throws: StateError for a known sequence;
  /// InvalidArgument that names the file if it is damaged, or was saved under another policy or model, with each field
  /// that differs; Unsupported as save(); StateError if host_bytes leaves no room for its factors. The keeper is
  /// unchanged if it throws. Cost: one read of the file, and a copy of its far bytes, or of its columns and queries to
  /// the device. A state that was saved on the CPU can continue on a device, and vice versa; from there on it has that
  /// machine's bits.
  void restore(SequenceId sequence, const std::filesystem::path& file);
#endif
  /// The prompt of a sequence ends with the tokens observed so far, for engines that cannot tell join() how long it
  /// will be: they join with a `prompt` of kMostPositions. Throws StateError for an unknown sequence, one without
  /// tokens, one whose prompt has ended, and while the prompt narrows.
  void end_prompt(SequenceId sequence);
  /// leave(), then join().
  void reset(SequenceId sequence);
  /// Pins logical positions [begin, end): whatever their slots score, they stay in every row, and do not fold, until
  /// they are unpinned or truncated away. Tokens may still be to come. Pinned slots count within the budget. Throws,
  /// and changes nothing: StateError for an unknown sequence and for positions that an event has dropped from some row;
  /// InvalidArgument for a span that is empty or not within [0, kMostPositions), and if sinks, pinned positions and the
  /// slots that the policy's scorer never drops exceed the budget; Unsupported under policies that
  /// narrow prompts, of variant official, or without protected slots. Budgets that depend on length (ratio, bytes,
  /// protect_prompt) are checked by plan(), which throws InvalidArgument before anything is written. Cost: O(spans),
  /// plus a look-up in every row; a span more in every row of an event.
  void pin(SequenceId sequence, std::int64_t begin, std::int64_t end);
  /// Positions [begin, end) compete again from the next event on. Those that are not pinned may be among them. Throws
  /// as pin() does for an unknown sequence and for a wrong span.
  void unpin(SequenceId sequence, std::int64_t begin, std::int64_t end);
  /// Ascending, neither overlapping nor touching. Valid until the next call.
  [[nodiscard]] std::span<const PositionSpan> pinned(SequenceId sequence) const;
  [[nodiscard]] bool knows(SequenceId sequence) const { return sequences_->contains(sequence); }

  /// Records the new tokens of one layer. Call it in every full layer, or in one of them if the policy needs no
  /// queries; other layers are ignored. Tokens that are `unread` leave the window without queries up to them. Throws:
  /// StateError for a sequence that never joined; InvalidArgument for a wrong layer, indptr, shape, dtype or device, a
  /// duplicate sequence, missing queries, unread ones by which a policy narrows, and positions that do not ascend or
  /// are too large. If it throws, nothing is recorded for any sequence. Cost: copies the newest queries; allocates at a
  /// sequence's first tokens, and when its columns outgrow their largest size so far.
  void observe(const Observation& observation);

  /// observe() in two parts, for engines that decode in a CUDA graph: what changes from step to step, once, and what a
  /// graph repeats, in every layer. Counts the new tokens in all layers, and on a device sends the table by which
  /// record() files their queries. Call it before the first layer, outside the graph, on the stream that the graph runs
  /// on. Throws as observe() does, and records nothing then; StateError also if layers have observed different tokens,
  /// while the stream is being captured, and for more tokens than the table has room for once a graph knows its
  /// address: run a step of the largest size before the first capture. Unsupported under policies that narrow prompts.
  /// Cost: 32 bytes per token to the device, in one copy.
  void begin_step(const StepTokens& tokens);
  /// Queries [tokens, Hq, D] of one layer of the step that began, and their log-sum-exps [tokens, Hq] if it was said
  /// that they come. Call it in every full layer; does nothing in others, and if the policy reads no queries. May be
  /// captured: it changes nothing on the host, and a replay files the queries of the step that began before it. Rows
  /// after those of the step are padding. Throws InvalidArgument for a wrong layer, shape, dtype or device; StateError
  /// before the first begin_step(), for fewer rows than the step has tokens (not while capturing, when a graph is made
  /// for other steps), and for more than its table. Cost: one launch, which reads and writes the queries once.
  void record(std::int32_t layer, const Tensor& queries, const Tensor& log_sum_exp = {});

  /// Under a policy that narrows: call it in every layer, once attention has run over the keys and values of all tokens
  /// present, with the arguments of observe(). Sequences that are not in the first pass of a prompt are left alone, so
  /// steps may mix them. Decides for each prompt separately, cuts this layer's rows, and says which tokens continue.
  /// Give the later layers (and observe()) only these tokens, at their own positions. Output projection and MLP of the
  /// others need not run any more. `view`: lengths per row, as they will be after the step. Writes the lengths of this
  /// layer if slots were dropped, those of later layers if tokens were, and, at the end of a paged prompt, its row of
  /// the block table. A prompt must come whole, in one step. If tokens of the sequence were cached before (join), it
  /// runs as under a policy that does not narrow. Throws, before anything is written: StateError for layers out of
  /// order or lengths that differ from what was observed; InvalidArgument for missing queries or one length per
  /// sequence; as the policy does. On a device it waits in a layer that may select, once for all prompts, and throws
  /// StateError while the stream is being captured. Cost: the policy's, plus moving the slots that stay.
  LayerReport narrow(const Observation& observation, const CacheView& view);

  /// What happened to the newest prompt of a sequence; null if the policy does not narrow, or before the first tokens.
  /// Valid until the sequence leaves.
  [[nodiscard]] const PromptReport* prompt_report(SequenceId sequence) const;

  /// Surprisal, in nats, of the oldest tokens that have none yet: log-sum-exp of the logits before a token minus its
  /// own logit (PromptSurprisal, token_surprisal); 0 for the first token of a text. If the policy reads it, all
  /// observed tokens, including cached ones, need it before step(). Other policies ignore it. Throws InvalidArgument
  /// for more values than such tokens.
  void surprise(SequenceId sequence, std::span<const float> nats);

  /// Scores of the engine's own, such as those that a gate learned (policies over `given`). Call it in every full
  /// layer, at any time between observe() of the tokens and step(): for each sequence, scores of its oldest slots in
  /// that layer that have none yet, cached tokens included. Before step(), every slot needs its score. A score belongs
  /// to its slot: it moves with it, goes with truncate(), and is saved with the sequence. Other policies ignore it, and
  /// so do layers that are not full. Throws: StateError for a sequence that never joined; InvalidArgument for a wrong
  /// layer, indptr, shape, dtype or device, a duplicate sequence, missing scores, more tokens than have none, and NaN
  /// (on a device NaN is not looked for: it ranks last). If it throws, nothing is recorded for any sequence. Cost:
  /// reads and writes the scores once.
  void give(const GivenScores& scores);

  /// Under a policy that folds: call it in every full layer of every step, once attention has run over the rows, with
  /// the arguments of observe() but queries after RoPE. Merges the folded spans of each sequence into `attended`, in
  /// place, so that both share one softmax. Does nothing if nothing was folded, in other layers, and under other
  /// policies. Throws: InvalidArgument, before anything is written, for queries before RoPE, other shapes or dtypes;
  /// StateError on a device while a stream is captured. Cost: read_memory(). On a device it only launches, and returns
  /// counts of 0: what is opened is known there alone. The first layer of a step sends the tables of all layers, 112
  /// bytes for every layer, sequence and KV head; later calls for the same tokens send nothing.
  ReadCounts view(const Observation& observation, const Attended& attended);

  /// The folded part of a sequence, in numbers.
  [[nodiscard]] FoldedState folded(SequenceId sequence) const;
  /// The folded spans of one row. Throws Unsupported under a policy that does not fold, and on a device. Valid until
  /// the next step.
  [[nodiscard]] const SpanRow& spans(SequenceId sequence, std::int32_t layer, std::int32_t head) const;
  /// [full layers * Hkv] What view() has counted in each layer and KV head, which sum up to Totals::reads; empty under
  /// a policy that does not fold, and on a device.
  [[nodiscard]] std::span<const ReadCounts> reads() const {
    return memory_ == nullptr ? std::span<const ReadCounts>() : memory_->reads();
  }
  /// FoldedMemory::far_bytes(); 0 under a policy that does not fold.
  [[nodiscard]] std::int64_t far_bytes() const { return memory_ == nullptr ? 0 : memory_->far_bytes(); }

  /// Decides, and moves nothing. Throws: StateError if the view's lengths differ from what was observed, if a layer has
  /// not observed or recorded all tokens, and if an event would read queries that were observed as unread;
  /// InvalidArgument for a duplicate sequence, place or page in the view, and for rows that share memory
  /// (CacheLayout::check); InvalidArgument and Unsupported as make_rows and the policy do. If no sequence is due and
  /// the tensors are those of the last call, it allocates nothing.
  [[nodiscard]] Plan plan(const CacheView& view) const;

  /// Folds what the plan folds, moves K, V and columns, writes the new lengths and, in pages, the new block table into
  /// the view, then gives back the pages that are no longer held. Throws, before the first byte moves: as fold() does,
  /// for rows that are not finite (not on a device: attention over such a span is NaN there) and for factors above
  /// host_bytes; StateError for a plan of another keeper or one that is out of date (on a device also for one that a
  /// later plan() replaced, and for one that folds while a stream is captured), if there are no free pages for copies
  /// of shared ones, and if PageAllocator::take() gives a page that is in use or that no layer has.
  Report apply(const Plan& plan, const CacheView& view);

  /// On a device, some policies' scores decide how many slots stay (`adakv-*`, `threshold-*`, `criticalkv-*` with
  /// adaptive heads). Their apply() then launches the event and returns: Report::pending is set, the view still has its
  /// old lengths and block table, and the cut sequences take no other call than unpin(), end_prompt(), surprise() and
  /// those that read logical lengths, prompts and pins; no further event begins. This completes the event, over the
  /// view that apply() had: writes the new lengths and block table, gives back pages, and returns what apply() would
  /// have returned. Waits until the device has chosen the slots, which by then it normally has. Throws, before anything
  /// is written: StateError if no event is pending, and for a view that is not as apply() had it; DeviceError. Cost:
  /// one copy of 4 bytes per row, which apply() began.
  Report finish(const CacheView& view);

  /// plan(), then apply(); for those policies finish() follows.
  Report step(const CacheView& view) { return apply(plan(view), view); }

  /// On a device: workspace bytes of an event over this view if all its sequences were due
  /// (Machine::use_workspace). 0 on the CPU. Launches nothing. Throws as plan() does.
  [[nodiscard]] std::int64_t workspace_bytes(const CacheView& view) const;

  /// Takes back the newest tokens (speculative decoding): the sequence is `logical_length` tokens long afterwards, and
  /// the engine must shorten its cache to match. Either exact or a StateError: it cannot go back past the last event,
  /// or further than the query ring remembers. The next position is the one after the last remaining token; positions
  /// from there on are no longer pinned. If a prompt that had ended loses tokens, it becomes as long as the remaining
  /// sequence.
  void truncate(SequenceId sequence, std::int64_t logical_length);

  /// The fewest tokens with which an event may cut the sequence, however they are split into steps; 0: the next step
  /// may do so; Trigger::kNoEvent: none will (Trigger::tokens_until() says when it is exact). An engine to which
  /// queries cost something gives those of the newest queries_read() tokens before an event, and observes the others as
  /// `unread`: in a step of n tokens, it gives queries if n > tokens_to_event() - queries_read(). An event whose window
  /// holds unread tokens is a StateError.
  [[nodiscard]] std::int64_t tokens_to_event(SequenceId sequence) const;
  /// Newest queries of every full layer that an event reads; 0: none.
  [[nodiscard]] std::int64_t queries_read() const { return needs_.queries; }

  /// Tokens seen; the position of the next one. Never shrinks at an event.
  [[nodiscard]] std::int64_t logical_length(SequenceId sequence) const { return sequences_->at(sequence).logical; }
  /// Tokens of its prompt; -1 until known.
  [[nodiscard]] std::int64_t prompt_length(SequenceId sequence) const { return sequences_->at(sequence).prompt; }
  /// Slots held by one row.
  [[nodiscard]] std::int32_t physical_length(SequenceId sequence, std::int32_t layer, std::int32_t head) const;
  /// Logical position of every slot of one row, ascending. Valid until the next call. On a device: copies to the host,
  /// and waits.
  [[nodiscard]] std::span<const std::int32_t> positions(SequenceId sequence, std::int32_t layer,
                                                        std::int32_t head) const;
  /// EMA credit of the oldest slots of one row (empty before the first event). Otherwise like positions().
  [[nodiscard]] std::span<const float> credit(SequenceId sequence, std::int32_t layer, std::int32_t head) const;

  /// Where cache and queries must be.
  [[nodiscard]] Device device() const { return provided_.machine().device(); }
  [[nodiscard]] const ModelSpec& spec() const { return spec_; }
  [[nodiscard]] const KVPolicy& policy() const { return *policy_; }
  [[nodiscard]] const Totals& totals() const { return totals_; }

  /// A part that every keeper has, or that its policy asks for. Throws Unsupported for one that this keeper lacks.
  template <class P>
  [[nodiscard]] P& part() {
    return const_cast<P&>(std::as_const(*this).template part<P>());
  }
  template <class P>
  [[nodiscard]] const P& part() const {
    for (const std::unique_ptr<Part>& one : parts_)
      if (const auto* found = dynamic_cast<const P*>(one.get())) return *found;
    refuse<Unsupported>("part: ", policy_->name(), " asks for no such part; allowed those of its KVPolicy::parts()");
  }

 private:
  /// An event between apply() and finish().
  struct Pending {
    Plan plan;
    std::vector<PageMove> pages;
  };
  void forget(SequenceId sequence) noexcept;
  [[nodiscard]] Occasion occasion_of(SequenceId id, const SequenceState& sequence, std::int64_t slots) const;
  void check_places(const CacheView& view) const;
  [[nodiscard]] std::span<const std::int32_t> pages_of(const CacheView& view, std::size_t i,
                                                       std::int64_t page_size) const;
  void count_holders(const CacheView& view, std::int64_t page_size) const;
  void check_pages(const CacheView& view, const RowTable& table) const;
  void require_shown(const char* operation, SequenceId id, const SequenceState& sequence, std::int32_t layer,
                     std::int64_t shown) const;
  void require_recorded(const char* operation, SequenceId id, const SequenceState& sequence) const;
  void check(const char* operation, const Observation& observation) const;
  void check_basis(const char* operation, QueryBasis basis) const;
  void require_one_basis(const char* operation, QueryBasis basis) const;
  void check(const StepTokens& tokens, const Observation& first) const;
  void count(SequenceState& sequence, std::int32_t tokens);
  void find_positions(const Observation& observation, std::size_t i, const SequenceState& sequence);
  void make_room(const Observation& observation);
  [[nodiscard]] std::optional<Unscored> unscored(SequenceId id, const SequenceState& sequence) const;
  void check_planned(const char* operation, const Plan& plan, const CacheView& view) const;
  void check_pending(const Plan& plan, const CacheView& view) const;
  void measure(Plan& plan) const;
  [[nodiscard]] std::vector<ColumnTarget> reserve_settled(const Plan& plan, const CacheView& view);
  void settle_step(const CacheView& view, const Report& report) noexcept;
  void settle(const Plan& plan, const CacheView& view, Folding* folding, Report& report) noexcept;
  void check_queries(const char* operation, const Observation& observation) const;
  void check_normalisers(const char* operation, const Observation& observation) const;
  [[nodiscard]] std::span<const std::int32_t> already_shown(const SequenceState& sequence, std::int32_t layer,
                                                            std::int32_t tokens) const;
  [[nodiscard]] RowTable table_of(const CacheView& view, std::span<const std::int32_t> due) const;
  [[nodiscard]] Evidence evidence_of(const RowTable& table) const;
  [[nodiscard]] bool leads(const SequenceState& sequence, std::int32_t layer, std::int32_t tokens) const;
  [[nodiscard]] bool begins_prompt(const SequenceState& sequence, std::int32_t tokens) const;
  struct Begun {
    SequenceState* sequence;
    std::unique_ptr<PromptPass> pass;
    std::vector<std::int32_t> present;
    PromptReport report;
  };
  [[nodiscard]] Begun begin_prompt(SequenceState& sequence, std::span<const std::int32_t> positions) const;
  void check_fold(const Plan& plan) const;
  [[nodiscard]] std::unique_ptr<Folding> fold_dropped(const Plan& plan, const CacheView& view);
  void settle_folded(const Plan& plan, const CacheView& view, Folding* folding, Report& report) noexcept;
  void check_attended(const Observation& observation, const Attended& attended) const;
#ifndef KVKEEP_HEADER_ONLY
  void require_no_capture(const char* operation) const;
  void require_saveable(SequenceId sequence, const SequenceState& s) const;
  void restore_columns(SequenceState& s, const StateFile& state) const;
  void restore_queries(SequenceState& s, const StateFile& state) const;
  void restore_memory(SequenceState& s, const StateFile& state);
#endif
  struct LayerPlan;
  [[nodiscard]] LayerPlan plan_layer(SequenceState& sequence, const Observation& observation, std::size_t i,
                                     const CacheView& view) const;
  void decide_layer(std::span<LayerPlan> plans, const Observation& observation, const CacheView& view);
  void let_go_on(const LayerPlan& plan, const CacheView& view, Narrowing& report);
  void begin_afresh(const LayerPlan& plan, const CacheView& view, LayerReport& report);

  std::unique_ptr<KVPolicy> policy_;
  Provided provided_;
  std::unique_ptr<FoldedMemory> memory_;  ///< if the policy folds; outlives the rows of sequences
  std::unique_ptr<Sequences> sequences_;  ///< where parts find them if the keeper moves
  ModelSpec spec_;
  Needs needs_;
  std::int32_t most_positions_ = kMostPositions;  ///< below which every position is
  std::vector<std::unique_ptr<Part>> parts_;
  QueryBasis basis_ = QueryBasis::pre_rope;
  bool basis_known_ = false;
  std::int32_t rope_unstated_ = -1;      ///< the first full layer whose RoPE the spec leaves open
  mutable std::int64_t slot_bytes_ = 0;  ///< of one slot in every row, as the newest view has them; 0 before the first
  std::shared_ptr<const void> identity_ =
      std::make_shared<char>();  ///< unique among living keepers and keepers with a living plan
  Totals totals_;
  std::optional<Pending> pending_;
  std::vector<std::int32_t> positions_;  ///< scratch of observe()
  std::vector<Begun> begun_;             ///< also scratch: prompts that begin with this step
  std::vector<QueryArrival> arrivals_;   ///< also scratch, on a device
  std::vector<QueryPlace> step_places_;  ///< also scratch, of begin_step()
  DeviceMemory step_table_;              ///< QueryPlace [step_room_] of the step that began
  std::int32_t step_room_ = 0, step_tokens_ = 0;
  std::uint64_t step_ = 0;      ///< counts begin_step()
  std::vector<char> recorded_;  ///< [full layers] record() came in the step that began, or a graph may bring it
  Dtype step_dtype_ = Dtype::f32;
  bool step_normalised_ = false;               ///< its queries come with their log-sum-exps
  bool step_captured_ = false;                 ///< a graph knows the table's address
  std::vector<FoldedReader> readers_;          ///< also scratch, of view()
  mutable std::vector<bool> places_;           ///< [places of the cache] named by the view
  mutable std::vector<std::int32_t> holders_;  ///< [pages] how many rows of the block table name a page
  mutable CacheLayout layout_;                 ///< of the newest view
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/keeper/finish-inl.h"
#include "kvkeep/keeper/fold-inl.h"
#include "kvkeep/keeper/keeper-inl.h"
#include "kvkeep/keeper/keeper_observe-inl.h"
#include "kvkeep/keeper/narrow-inl.h"
#endif
