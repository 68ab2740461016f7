// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Folds: slots that an event drops may fold into spans, which attention still reads.

#include <algorithm>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/observe/observation.h"
#include "kvkeep/parts/check_observation.h"
#include "kvkeep/parts/part.h"
#include "kvkeep/policy/folded_memory.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep::parts {

/// Of keepers whose policy folds: keeper.part<parts::Folds>().
class Folds final : public Part {
 public:
  explicit Folds(const PartContext& context);

  /// Optional, for speed: begins what view() of the same layer does, with the same observation. Call it between
  /// observe() of the layer and its attention, and leave the queries as they are until view(). On a device the factors
  /// of the spans that are likely to open come over the bus while attention runs, on a stream of the accelerator's own;
  /// view() waits for them there, and brings what is missing. Of a step of many tokens that is its first turn
  /// (docs/inside/cuda.md). On the CPU it only checks. Results are the same, bit for bit. view() then reads this very
  /// layer, or it is refused; what nobody reads is dropped by the next step. Throws: InvalidArgument as view();
  /// StateError for a layer that has been read, or before observe() has counted its tokens, and on a device while a
  /// stream is captured. Cost: that of view() but for the merge.
  void prefetch(const Observation& observation);

  /// Call it in every full layer of every step, once attention has run over the rows, with the arguments of observe()
  /// but queries after RoPE. Merges the folded spans of each sequence into `attended`, in place, so that both share one
  /// softmax. Does nothing if nothing was folded, and in other layers. Throws: InvalidArgument, before anything is
  /// written, for queries before RoPE, other shapes or dtypes, and after prefetch() for another layer, other sequences
  /// or other queries than it was given; StateError on a device while a stream is captured. Cost: read_memory(). On a
  /// device it only launches, and returns counts of 0: what is opened is known there alone. The first layer of a step
  /// sends the tables of all layers, 136 bytes for every layer, sequence and KV head; later calls for the same tokens
  /// send nothing.
  ReadCounts view(const Observation& observation, const Attended& attended);

  /// The folded part of a sequence, in numbers.
  [[nodiscard]] FoldedState of(SequenceId sequence) const;
  /// The folded spans of one row. Throws Unsupported on a device. Valid until the next step.
  [[nodiscard]] const SpanRow& spans(SequenceId sequence, std::int32_t layer, std::int32_t head) const;
  /// [full layers * Hkv] What view() has counted in each layer and KV head, which sum up to Totals::reads; empty on a
  /// device.
  [[nodiscard]] std::span<const ReadCounts> reads() const { return memory_->reads(); }
  /// FoldedMemory::far_bytes().
  [[nodiscard]] std::int64_t far_bytes() const { return memory_->far_bytes(); }

  void join(SequenceId sequence) override;
  void fork(SequenceId child, SequenceId parent) override;
  void leave(SequenceId sequence) noexcept override { folded_.remove(sequence), ahead_.layer = -1; }
  void check_step(SequenceId sequence, const SequenceState& s) const override;
  void check_decision(const PartEvent& event) const override;
  void truncate(SequenceId sequence, const SequenceState& s) noexcept override;
  void reserve(const PartEvent& event) override;
  void abandon() noexcept override { folding_.reset(); }
  void settle(const PartEvent& event, std::size_t group) noexcept override;
  void report(Report& report) noexcept override;
#if KVKEEP_FILES
  void save(SequenceId sequence, StateTensors& to) const override;
  void restore(SequenceId sequence, const SequenceState& s, const StateFile& state) override;
#endif

 private:
  struct Folded {
    std::unique_ptr<FoldedRows> rows = nullptr;
    std::vector<std::int64_t> viewed = {};  ///< [full layers] logical length when the layer last read its spans
  };
  /// What prefetch() was given, until view() reads it.
  struct Ahead {
    std::int32_t layer = -1;  ///< -1: nothing
    std::vector<SequenceId> sequences = {};
    std::vector<std::int32_t> indptr = {};
    std::vector<std::int64_t> seen = {};  ///< tokens of each sequence
    const std::byte* queries = nullptr;
    Dtype dtype = Dtype::f32;
    std::int64_t token_step = 0, head_step = 0;  ///< in numbers
  };
  using Named = std::span<SequenceState* const>;
  void check_asked(const char* operation, const Observation& observation) const;
  void check_attended(const Observation& observation, const Attended& attended) const;
  /// Whether prefetch() was called for what is read now. Throws InvalidArgument if it was, but for something else.
  [[nodiscard]] bool is_ahead(const Observation& observation, Named named) const;
  void collect_readers(const Observation& observation, Named named);

  std::unique_ptr<FoldedMemory> memory_;  ///< outlives the rows
  PerSequence<Folded> folded_;
  std::optional<Folding> folding_;     ///< between reserve() and report()
  std::vector<FoldedReader> readers_;  ///< scratch of view()
  Ahead ahead_;
};

inline Folds::Folds(const PartContext& context)
    : Part(context), memory_(machine().folded_memory(spec(), *policy().memory())) {}

inline void Folds::join(SequenceId sequence) {
  std::vector<SpanRow> rows(static_cast<std::size_t>(sequences().rows()),
                            SpanRow(spec().key_dim, policy().memory()->factors.store));
  folded_[sequence] = {memory_->rows(std::move(rows)), std::vector<std::int64_t>(sequences().full_layers().size())};
}

inline void Folds::fork(SequenceId child, SequenceId parent) {
  const Folded& from = *folded_.find(parent);
  Folded& own = *folded_.find(child);
  own.viewed = from.viewed;
  if (from.rows->state().spans == 0) return;
  const std::span<const SpanRow> rows = from.rows->host_rows();
  KVKEEP_REQUIRE_AS(Unsupported, !rows.empty(), "fork: folded spans of sequence ", parent, " are on ",
                    machine().device().str(), " and are not copied there; allowed only on the CPU");
  own.rows = memory_->rows({rows.begin(), rows.end()});
}

inline void Folds::truncate(SequenceId sequence, const SequenceState& s) noexcept {
  for (std::int64_t& viewed : folded_.find(sequence)->viewed) viewed = std::min(viewed, s.logical);
  ahead_.layer = -1;
}

inline void Folds::check_step(SequenceId sequence, const SequenceState& s) const {
  const Folded& own = *folded_.find(sequence);
  for (std::size_t l = 0; l < own.viewed.size(); ++l) {
    bool folded = false;
    for (std::int32_t h = 0; h < spec().kv_heads; ++h)
      folded = folded || own.rows->count(static_cast<std::int32_t>(l) * spec().kv_heads + h).spans > 0;
    KVKEEP_REQUIRE_AS(StateError, !folded || own.viewed[l] == s.logical, "step: layer ", sequences().full_layers()[l],
                      " of sequence ", sequence, " has read its folded spans for ", own.viewed[l], " of ", s.logical,
                      " tokens; call view() after each layer's attention");
  }
}

/// Every slot that folds is dropped, and is in one span.
inline void Folds::check_decision(const PartEvent& event) const {
  if (!event.decision.fold) return;
  const Fold& fold = *event.decision.fold;
  KVKEEP_REQUIRE(event.decision.keep && fold.indptr.size() == event.table.rows.size() + 1 &&
                     fold.indptr.back() == static_cast<std::int64_t>(fold.spans.size()) - 1 &&
                     (!fold.listed || fold.spans.back() == static_cast<std::int64_t>(fold.slots.size())) &&
                     (fold.weights.empty() || fold.weights.size() == fold.slots.size()) &&
                     (fold.settled.empty() || fold.settled.size() == event.table.groups.size()),
                 "fold: its tables do not match ", event.table.rows.size(), " rows of ", event.table.groups.size(),
                 " groups; allowed one more entry than rows, and than spans");
  if (!fold.listed) {  // on a device
    for (std::size_t r = 0; r < event.table.rows.size(); ++r) {
      const Row& row = event.table.rows[r];
      const std::int64_t folded = fold.spans[static_cast<std::size_t>(fold.indptr[r + 1])] -
                                  fold.spans[static_cast<std::size_t>(fold.indptr[r])],
                         dropped = row.length - event.decision.keep->count(r);
      KVKEEP_REQUIRE(folded == dropped, "fold: the spans of layer ", row.layer, ", head ", row.head, " have ", folded,
                     " slots; allowed all ", dropped, " that it drops");
    }
    return;
  }
  for (std::size_t r = 0; r < event.table.rows.size(); ++r) {
    const Row& row = event.table.rows[r];
    std::vector<std::int32_t> owner(static_cast<std::size_t>(row.length), -1);  // span of a slot; -2: it stays
    for (const std::int32_t slot : event.decision.keep->row(r)) owner[static_cast<std::size_t>(slot)] = -2;
    for (std::int64_t s = fold.indptr[r]; s < fold.indptr[r + 1]; ++s) {
      const auto number = static_cast<std::int32_t>(s - fold.indptr[r]);
      for (std::int64_t i = fold.spans[static_cast<std::size_t>(s)]; i < fold.spans[static_cast<std::size_t>(s) + 1];
           ++i) {
        const std::int32_t slot = fold.slots[static_cast<std::size_t>(i)];
        const auto where = [&] {
          return text("fold: slot ", slot, " of layer ", row.layer, ", head ", row.head, ", span ", number);
        };
        KVKEEP_REQUIRE(slot >= 0 && slot < row.length, where(), " is outside the row; allowed 0 to ", row.length - 1);
        std::int32_t& held = owner[static_cast<std::size_t>(slot)];
        KVKEEP_REQUIRE(held != -2, where(), " stays; allowed slots that are dropped");
        KVKEEP_REQUIRE(held == -1, where(), " is in span ", held, " too; allowed in only one");
        held = number;
      }
    }
  }
}

inline void Folds::reserve(const PartEvent& event) {
  folding_.reset();
  ahead_.layer = -1;
  if (!event.decision.fold) return;
  std::vector<FoldTarget> targets;
  targets.reserve(event.table.rows.size());
  for (const Row& row : event.table.rows) {
    const SequenceId id = event.ids[static_cast<std::size_t>(row.sequence)];
    targets.push_back({folded_.find(id)->rows.get(), sequences().row_of(row.layer, row.head), id});
  }
  folding_ = memory_->fold(event.table, event.decision, targets);
}

inline void Folds::settle(const PartEvent& event, std::size_t g) noexcept {
  if (!folding_) return;
  if (g == 0) folding_->keep();
  const SequenceId id = event.ids[static_cast<std::size_t>(event.table.groups[g].sequence)];
  SequenceState& s = sequences().at(id);
  std::ranges::fill(folded_.find(id)->viewed, s.logical);
  const std::vector<std::int32_t>& settled = event.decision.fold->settled;
  if (!settled.empty()) s.settled = std::max(s.settled, settled[g]);
}

inline void Folds::report(Report& report) noexcept {
  if (!folding_) return;
  report.slots_folded = folding_->tokens;
  report.far_bytes = folding_->far_bytes;
  folding_.reset();
}

inline void Folds::check_asked(const char* operation, const Observation& o) const {
  KVKEEP_REQUIRE(o.queries.defined(), operation, ": layer ", o.layer,
                 " has no queries, and folded spans are read by queries; allowed the queries of every token");
  check_queries(operation, o, spec(), machine().device(), policy());
  KVKEEP_REQUIRE(o.basis == QueryBasis::post_rope, operation, ": queries of layer ", o.layer,
                 " are taken before RoPE; allowed after RoPE");
}

inline void Folds::check_attended(const Observation& o, const Attended& attended) const {
  const std::int64_t tokens = o.indptr.back();
  const auto fits = [this](const Tensor& t, Shape shape) {
    return t.defined() && t.has_memory() && t.dtype() == Dtype::f32 && t.device() == machine().device() &&
           t.is_contiguous() && t.sizes() == shape;
  };
  KVKEEP_REQUIRE(fits(attended.out, {tokens, spec().query_heads, spec().value_dim}) &&
                     fits(attended.log_sum_exp, {tokens, spec().query_heads}),
                 "view: the output of attention in layer ", o.layer, " has the wrong shape, dtype or device; given on ",
                 attended.out.device().str(), " and ", attended.log_sum_exp.device().str(),
                 "; allowed contiguous f32 [", tokens, ", ", spec().query_heads, ", ", spec().value_dim, "] and [",
                 tokens, ", ", spec().query_heads, "] on ", machine().device().str());
}

inline bool Folds::is_ahead(const Observation& o, Named named) const {
  if (ahead_.layer < 0) return false;
  for (std::size_t i = 0; i < ahead_.sequences.size(); ++i)  // a step that nobody read is over
    if (sequences().at(ahead_.sequences[i]).logical != ahead_.seen[i]) return false;
  KVKEEP_REQUIRE(o.layer == ahead_.layer, "view: layer ", o.layer, ", but layer ", ahead_.layer,
                 " was prefetched and not read; allowed that one first");
  KVKEEP_REQUIRE(std::ranges::equal(o.sequences, ahead_.sequences) && std::ranges::equal(o.indptr, ahead_.indptr),
                 "view: layer ", o.layer, " was prefetched for ", ahead_.sequences.size(), " sequences and ",
                 ahead_.indptr.back(), " tokens; given ", named.size(), " and ", o.indptr.back(),
                 ", or in another order; allowed the same");
  KVKEEP_REQUIRE(o.queries.bytes() == ahead_.queries && o.queries.dtype() == ahead_.dtype &&
                     o.queries.step(0) == ahead_.token_step && o.queries.step(1) == ahead_.head_step,
                 "view: queries of layer ", o.layer, " are not those that were prefetched; given ", o.queries.dtype(),
                 " at steps of ", o.queries.step(0), " and ", o.queries.step(1), "; allowed the same memory, ",
                 ahead_.dtype, " at steps of ", ahead_.token_step, " and ", ahead_.head_step);
  return true;
}

inline void Folds::collect_readers(const Observation& o, Named named) {
  readers_.clear();
  for (std::size_t i = 0; i < named.size(); ++i)
    readers_.push_back({folded_.find(o.sequences[i])->rows.get(), &named[i]->columns, named[i]->logical, o.indptr[i],
                        o.indptr[i + 1] - o.indptr[i]});
}

inline void Folds::prefetch(const Observation& o) {
  const std::int32_t index = sequences().index_of("prefetch", o.layer);
  if (index < 0) return;
  const Named named = sequences().resolve("prefetch", o.sequences, o.indptr);
  check_asked("prefetch", o);
  for (std::size_t i = 0; i < named.size(); ++i) {
    const std::int64_t viewed = folded_.find(o.sequences[i])->viewed[static_cast<std::size_t>(index)];
    KVKEEP_REQUIRE_AS(StateError, viewed < named[i]->logical || o.indptr[i] == o.indptr[i + 1], "prefetch: layer ",
                      o.layer, " of sequence ", o.sequences[i], " has read its folded spans for all ", viewed,
                      " tokens; allowed after observe() of the layer, and before view()");
  }
  collect_readers(o, named);
  ahead_.layer = -1;  // if it throws
  memory_->view({o.layer, index, readers_, o.queries});
  ahead_.sequences.assign(o.sequences.begin(), o.sequences.end());
  ahead_.indptr.assign(o.indptr.begin(), o.indptr.end());
  ahead_.seen.clear();
  for (const SequenceState* s : named) ahead_.seen.push_back(s->logical);
  ahead_.queries = o.queries.bytes();
  ahead_.dtype = o.queries.dtype();
  ahead_.token_step = o.queries.step(0), ahead_.head_step = o.queries.step(1);
  ahead_.layer = o.layer;
}

inline ReadCounts Folds::view(const Observation& o, const Attended& attended) {
  const std::int32_t index = sequences().index_of("view", o.layer);
  if (index < 0) return {};
  const Named named = sequences().resolve("view", o.sequences, o.indptr);
  check_asked("view", o);
  check_attended(o, attended);
  const bool ahead = is_ahead(o, named);
  collect_readers(o, named);
  const UsingThreads own(threads());
  const ReadCounts counts = memory_->view({o.layer, index, readers_, o.queries, &attended, ahead});
  ahead_.layer = -1;
  for (std::size_t i = 0; i < named.size(); ++i)
    folded_.find(o.sequences[i])->viewed[static_cast<std::size_t>(index)] = named[i]->logical;
  sequences().totals.reads += counts;
  return counts;
}

inline FoldedState Folds::of(SequenceId sequence) const {
  static_cast<void>(sequences().at(sequence, "Folds::of"));
  return folded_.find(sequence)->rows->state();
}

inline const SpanRow& Folds::spans(SequenceId sequence, std::int32_t layer, std::int32_t head) const {
  static_cast<void>(sequences().at(sequence, "spans"));
  const std::span<const SpanRow> rows = folded_.find(sequence)->rows->host_rows();
  KVKEEP_REQUIRE_AS(Unsupported, !rows.empty(), "spans: those of sequence ", sequence, " are on ",
                    machine().device().str(), " and are not read back; allowed only on the CPU");
  return rows[static_cast<std::size_t>(sequences().row_of(layer, head))];
}

}  // namespace kvkeep::parts
