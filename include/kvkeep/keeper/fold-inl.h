#pragma once
// Bodies of keeper.h: compiled by src/policy, or where they are included under KVKEEP_HEADER_ONLY.
// Keeper's part of folded spans: the slots that leave the rows, and what attention reads of them.

#include <algorithm>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/keeper/keeper.h"

namespace kvkeep {

/// Every slot that folds is dropped, and is in one span.
KVKEEP_INLINE void Keeper::check_fold(const Plan& plan) const {
  const Fold& fold = *plan.decision.fold;
  KVKEEP_REQUIRE(policy_->memory() != nullptr, "fold: policy ", policy_->name(),
                 " does not say how folded spans are kept; allowed only with KVPolicy::memory()");
  KVKEEP_REQUIRE(plan.decision.keep && fold.indptr.size() == plan.table.rows.size() + 1 &&
                     fold.indptr.back() == static_cast<std::int64_t>(fold.spans.size()) - 1 &&
                     (!fold.listed || fold.spans.back() == static_cast<std::int64_t>(fold.slots.size())) &&
                     (fold.weights.empty() || fold.weights.size() == fold.slots.size()) &&
                     (fold.settled.empty() || fold.settled.size() == plan.table.groups.size()),
                 "fold: its tables do not match ", plan.table.rows.size(), " rows of ", plan.table.groups.size(),
                 " groups; allowed one more entry than rows, and than spans");
  if (!fold.listed) {  // on a device
    for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
      const Row& row = plan.table.rows[r];
      const std::int64_t folded = fold.spans[static_cast<std::size_t>(fold.indptr[r + 1])] -
                                  fold.spans[static_cast<std::size_t>(fold.indptr[r])],
                         dropped = row.length - plan.decision.keep->count(r);
      KVKEEP_REQUIRE(folded == dropped, "fold: the spans of layer ", row.layer, ", head ", row.head, " have ", folded,
                     " slots; allowed all ", dropped, " that it drops");
    }
    return;
  }
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    std::vector<std::int32_t> owner(static_cast<std::size_t>(row.length), -1);  // span of a slot; -2: it stays
    for (const std::int32_t slot : plan.decision.keep->row(r)) owner[static_cast<std::size_t>(slot)] = -2;
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

KVKEEP_INLINE std::unique_ptr<Folding> Keeper::fold_dropped(const Plan& plan, const CacheView& view) {
  if (!plan.decision.fold) return nullptr;
  std::vector<FoldTarget> targets;
  targets.reserve(plan.table.rows.size());
  for (const Row& row : plan.table.rows) {
    const SequenceId id = view.sequences[static_cast<std::size_t>(row.sequence)];
    targets.push_back({sequences_->at(id).folded.get(), sequences_->row_of(row.layer, row.head), id});
  }
  return memory_->fold(plan.table, plan.decision, targets);
}

KVKEEP_INLINE void Keeper::settle_folded(const Plan& plan, const CacheView& view, Folding* folding,
                                         Report& report) noexcept {
  if (folding == nullptr) return;
  folding->keep();
  report.slots_folded = folding->tokens();
  report.far_bytes = folding->far_bytes();
  const std::vector<std::int32_t>& settled = plan.decision.fold->settled;
  for (std::size_t g = 0; g < plan.table.groups.size(); ++g) {
    SequenceState& s = sequences_->at(view.sequences[static_cast<std::size_t>(plan.table.groups[g].sequence)]);
    std::ranges::fill(s.viewed, s.logical);
    if (!settled.empty()) s.settled = std::max(s.settled, settled[g]);
  }
}

KVKEEP_INLINE void Keeper::check_attended(const Observation& o, const Attended& attended) const {
  KVKEEP_REQUIRE(o.queries.defined(), "view: layer ", o.layer,
                 " has no queries, and folded spans are read by queries; allowed the queries of every token");
  check_queries("view", o);
  const std::int64_t tokens = o.indptr.back();
  KVKEEP_REQUIRE(o.basis == QueryBasis::post_rope, "view: queries of layer ", o.layer,
                 " are taken before RoPE; allowed after RoPE");
  const auto fits = [this](const Tensor& t, Shape shape) {
    return t.defined() && t.has_memory() && t.dtype() == Dtype::f32 && t.device() == device() && t.is_contiguous() &&
           t.sizes() == shape;
  };
  KVKEEP_REQUIRE(fits(attended.out, {tokens, spec_.query_heads, spec_.value_dim}) &&
                     fits(attended.log_sum_exp, {tokens, spec_.query_heads}),
                 "view: the output of attention in layer ", o.layer, " has the wrong shape, dtype or device; given on ",
                 attended.out.device().str(), " and ", attended.log_sum_exp.device().str(),
                 "; allowed contiguous f32 [", tokens, ", ", spec_.query_heads, ", ", spec_.value_dim, "] and [",
                 tokens, ", ", spec_.query_heads, "] on ", device().str());
}

KVKEEP_INLINE ReadCounts Keeper::view(const Observation& o, const Attended& attended) {
  KVKEEP_REQUIRE(o.layer >= 0 && o.layer < spec_.num_layers(), "view: layer ", o.layer,
                 " is out of range; allowed 0 to ", spec_.num_layers() - 1);
  const std::int32_t index = sequences_->index_of(o.layer);
  if (index < 0 || memory_ == nullptr) return {};
  sequences_->meet("view", o.sequences, o.indptr);
  check_attended(o, attended);
  readers_.clear();
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    const SequenceState& s = *sequences_->met()[i];
    readers_.push_back({s.folded.get(), s.columns.get(), s.logical, o.indptr[i], o.indptr[i + 1] - o.indptr[i]});
  }
  const ReadCounts counts = memory_->view({o.layer, index, readers_, o.queries, attended});
  for (const SequenceId id : o.sequences) {
    SequenceState& s = sequences_->at(id);
    s.viewed[static_cast<std::size_t>(index)] = s.logical;
  }
  totals_.reads += counts;
  return counts;
}

KVKEEP_INLINE FoldedState Keeper::folded(SequenceId sequence) const {
  const SequenceState& s = sequences_->at(sequence);
  return s.folded == nullptr ? FoldedState{} : s.folded->state();
}

KVKEEP_INLINE const SpanRow& Keeper::spans(SequenceId sequence, std::int32_t layer, std::int32_t head) const {
  const SequenceState& s = sequences_->at(sequence);
  KVKEEP_REQUIRE_AS(Unsupported, s.folded != nullptr, "kvkeep: policy ", policy_->name(),
                    " does not fold; allowed only with one that does");
  const std::span<const SpanRow> rows = s.folded->host_rows();
  KVKEEP_REQUIRE_AS(Unsupported, !rows.empty(), "spans: those of sequence ", sequence, " are on ", device().str(),
                    " and are not read back; allowed only on the CPU");
  return rows[static_cast<std::size_t>(sequences_->row_of(layer, head))];
}

}  // namespace kvkeep
