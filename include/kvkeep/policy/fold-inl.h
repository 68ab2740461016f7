#pragma once
// Bodies of keeper.h: compiled by src/policy, or where they are included under KVKEEP_HEADER_ONLY.
// Keeper's part of folded spans: the slots that leave the rows, and what attention reads of them.

#include <algorithm>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/policy/keeper.h"

namespace kvkeep {

/// Every slot that folds is dropped, and is in one span.
KVKEEP_INLINE void Keeper::check_fold(const Plan& plan) const {
  const Fold& fold = *plan.decision.fold;
  KVKEEP_REQUIRE(policy_->memory() != nullptr, "fold: policy ", policy_->name(),
                 " does not say how folded spans are kept; allowed only with KVPolicy::memory()");
  KVKEEP_REQUIRE(plan.decision.keep && fold.indptr.size() == plan.table.rows.size() + 1 &&
                     fold.indptr.back() == static_cast<std::int64_t>(fold.spans.size()) - 1 &&
                     fold.spans.back() == static_cast<std::int64_t>(fold.slots.size()) &&
                     (fold.weights.empty() || fold.weights.size() == fold.slots.size()) &&
                     (fold.settled.empty() || fold.settled.size() == plan.table.groups.size()),
                 "fold: its tables do not match ", plan.table.rows.size(), " rows of ", plan.table.groups.size(),
                 " groups; allowed one more entry than rows, and than spans");
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

KVKEEP_INLINE std::vector<SpanRow> Keeper::fold_dropped(const Plan& plan, const CacheView& view) const {
  if (!plan.decision.fold) return {};
  const Fold& fold = *plan.decision.fold;
  const MemoryOptions& memory = *policy_->memory();
  std::vector<std::vector<std::int64_t>> spans(plan.table.rows.size());  // where each begins among the slots of its row
  std::vector<RowFold> rows;
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    const SequenceId id = view.sequences[static_cast<std::size_t>(row.sequence)];
    const std::int64_t first = fold.spans[static_cast<std::size_t>(fold.indptr[r])],
                       last = fold.spans[static_cast<std::size_t>(fold.indptr[r + 1])];
    for (std::int64_t s = fold.indptr[r]; s <= fold.indptr[r + 1]; ++s)
      spans[r].push_back(fold.spans[static_cast<std::size_t>(s)] - first);
    const auto own = [&](const auto& all) {
      return std::span(all).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first));
    };
    rows.push_back({.keys = row.keys,
                    .values = row.values,
                    .key_dtype = plan.table.key_dtype,
                    .value_dtype = plan.table.value_dtype,
                    .slots = own(fold.slots),
                    .indptr = spans[r],
                    .weights = fold.weights.empty() ? std::span<const float>() : own(fold.weights),
                    .positions = {row.positions, static_cast<std::size_t>(row.length)},
                    .label = {.sequence = id, .layer = row.layer, .head = row.head},
                    .spans_before = static_cast<std::int32_t>(
                        at(id).memory[static_cast<std::size_t>(row_of(row.layer, row.head))].size())});
  }
  std::vector<SpanRow> folded = kvkeep::fold(rows, spec_.key_dim, memory.fold_options(), *far_, memory.gates());
  if (memory.learned())
    for (std::size_t r = 0; r < folded.size(); ++r) {
      const Row& row = plan.table.rows[r];
      folded[r].set_norms(memory.routing->layers[static_cast<std::size_t>(row.layer)].norms(
          folded[r], std::int64_t{row.head} * spec_.group(), spec_.group()));
    }
  return folded;
}

KVKEEP_INLINE void Keeper::settle_folded(const Plan& plan, const CacheView& view, std::vector<SpanRow> folded,
                                         Report& report) noexcept {
  if (!plan.decision.fold) return;
  for (std::size_t r = 0; r < folded.size(); ++r) {
    const Row& row = plan.table.rows[r];
    Sequence& s = sequences_.at(view.sequences[static_cast<std::size_t>(row.sequence)]);
    report.slots_folded += folded[r].tokens();
    report.far_bytes += folded[r].far_bytes();
    s.memory[static_cast<std::size_t>(row_of(row.layer, row.head))].append(std::move(folded[r]));
    std::ranges::fill(s.viewed, s.logical);
  }
  const std::vector<std::int32_t>& settled = plan.decision.fold->settled;
  for (std::size_t g = 0; g < settled.size(); ++g) {
    Sequence& s = sequences_.at(view.sequences[static_cast<std::size_t>(plan.table.groups[g].sequence)]);
    s.settled = std::max(s.settled, settled[g]);
  }
}

KVKEEP_INLINE void Keeper::surprise(SequenceId sequence, std::span<const float> nats) {
  Sequence& s = const_cast<Sequence&>(at(sequence));
  if (!needs_.surprisal) return;
  const std::int64_t open = s.logical - s.surprised;
  KVKEEP_REQUIRE(static_cast<std::int64_t>(nats.size()) <= open, "surprise: ", nats.size(), " tokens of sequence ",
                 sequence, "; ", open, " of the ", s.logical, " observed have none yet; allowed at most that many");
  const auto newest = s.columns->newest();
  const auto positions = newest.last(static_cast<std::size_t>(open));
  for (std::size_t i = 0; i < nats.size(); ++i) {
    const auto at = static_cast<std::size_t>(positions[i]);
    if (const auto had = static_cast<std::int64_t>(s.surprisal.size());
        had <= positions[i]) {  // 0 for a prefix that was never seen, kNoToken for positions without a token
      s.surprisal.resize(at + 1, kNoToken);
      if (had < s.prefix)
        std::fill(s.surprisal.begin() + had, s.surprisal.begin() + std::min<std::int64_t>(s.prefix, positions[i]),
                  0.0F);
    }
    s.surprisal[at] = std::max(nats[i], 0.0F);
  }
  s.surprised += static_cast<std::int64_t>(nats.size());
}

KVKEEP_INLINE void Keeper::check_attended(const Observation& o, const Attended& attended) const {
  KVKEEP_REQUIRE(o.queries.defined(), "view: layer ", o.layer,
                 " has no queries, and folded spans are read by queries; allowed the queries of every token");
  check_queries("view", o);
  const std::int64_t tokens = o.indptr.back();
  KVKEEP_REQUIRE(o.basis == QueryBasis::post_rope, "view: queries of layer ", o.layer,
                 " are taken before RoPE; allowed after RoPE");
  const auto fits = [](const Tensor& t, Shape shape) {
    return t.defined() && t.dtype() == Dtype::f32 && t.device().is_cpu() && t.is_contiguous() && t.sizes() == shape;
  };
  KVKEEP_REQUIRE(fits(attended.out, {tokens, spec_.query_heads, spec_.value_dim}) &&
                     fits(attended.log_sum_exp, {tokens, spec_.query_heads}),
                 "view: the output of attention in layer ", o.layer,
                 " has the wrong shape, dtype or device; allowed contiguous f32 [", tokens, ", ", spec_.query_heads,
                 ", ", spec_.value_dim, "] and [", tokens, ", ", spec_.query_heads, "] on the CPU");
}

KVKEEP_INLINE ReadCounts Keeper::view(const Observation& o, const Attended& attended) {
  KVKEEP_REQUIRE(o.layer >= 0 && o.layer < spec_.num_layers(), "view: layer ", o.layer,
                 " is out of range; allowed 0 to ", spec_.num_layers() - 1);
  const std::int32_t index = layer_index_[static_cast<std::size_t>(o.layer)];
  const MemoryOptions* memory = policy_->memory();
  ReadCounts counts;
  if (index < 0 || memory == nullptr) return counts;
  check_sequences("view", o.sequences, o.indptr);
  check_attended(o, attended);
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    Sequence& s = sequences_.at(o.sequences[i]);
    const std::int64_t first = o.indptr[i], tokens = o.indptr[i + 1] - first;
    const std::int32_t first_row = index * spec_.kv_heads;
    std::vector<MemoryRow> rows;
    std::int64_t spans = 0;
    for (std::int32_t r = first_row; r < first_row + spec_.kv_heads; ++r) {
      rows.push_back({.spans = &s.memory[static_cast<std::size_t>(r)], .dense = s.columns->length(r)});
      spans += rows.back().spans->size();
    }
    std::int64_t& viewed = s.viewed[static_cast<std::size_t>(index)];
    if (spans == 0 || tokens == 0) {
      viewed = s.logical;
      continue;
    }
    const Reading reading{
        .zoom = memory->zoom,
        .router = memory->learned() ? &memory->routing->layers[static_cast<std::size_t>(o.layer)] : nullptr,
        .entries = memory->entries_share > 0 ? memory->entries_share * static_cast<double>(s.logical) : memory->entries,
        .entries_per_span = memory->entries_per_span(spec_.group(), spec_.key_dim, memory->learned()),
        .entries_per_token = memory->entries_per_token(spec_.key_dim),
        .per_head = memory->published_budget,
        .damage = memory->damage,
        .cache = near_.get()};
    const Tensor lse = attended.log_sum_exp.narrow(0, first, tokens), out = attended.out.narrow(0, first, tokens);
    OpenAttention open{lse, empty(lse.sizes(), Dtype::f32), out};
    const std::int64_t dim = out.size(2);
    float *sums = open.sum.data<float>(), *outputs = out.data<float>();
    for (std::int64_t n = 0; n < lse.numel(); ++n) {
      const bool seen = lse.data<float>()[n] != -std::numeric_limits<float>::infinity();
      sums[n] = seen ? 1.0F : 0.0F;
      if (!seen) std::fill_n(outputs + n * dim, dim, 0.0F);
    }
    std::vector<std::vector<std::int32_t>> opened;
    counts += read_memory(open, rows, o.queries.narrow(0, first, tokens), spec_.scale(), reading, &opened);
    for (std::int64_t n = 0; n < lse.numel(); ++n)
      for (float* x = outputs + n * dim; x < outputs + (n + 1) * dim; ++x) *x /= sums[n];
    copy(open.log_mass(), lse);
    std::ranges::move(opened, s.opened.begin() + first_row);
    viewed = s.logical;
  }
  bring_next(o.sequences, index);
  totals_.reads += counts;
  return counts;
}

/// Prefetches the spans that the next layer opened last, because it is likely to open them again. The first layer
/// follows the last.
KVKEEP_INLINE void Keeper::bring_next(std::span<const SequenceId> sequences, std::int32_t index) const {
  if (far_->file_bytes() == 0) return;
  const std::int32_t next = (index + 1) % static_cast<std::int32_t>(full_layers_.size()) * spec_.kv_heads;
  std::vector<FarBlobPtr> wanted;
  for (const SequenceId id : sequences) {
    const Sequence& s = at(id);
    for (auto r = static_cast<std::size_t>(next); r < static_cast<std::size_t>(next + spec_.kv_heads); ++r)
      for (const std::int32_t span : s.opened[r])
        if (const FarBlobPtr& blob = s.memory[r].blob(span); blob != nullptr) wanted.push_back(blob);
  }
  if (!wanted.empty()) near_->prefetch(wanted);
}

KVKEEP_INLINE FoldedState Keeper::folded(SequenceId sequence) const {
  FoldedState state;
  for (const SpanRow& row : at(sequence).memory) {
    state.spans += row.size();
    state.tokens += row.tokens();
    state.near_bytes += row.near_bytes();
    state.far_bytes += row.far_bytes();
    for (const FarBlobPtr& blob : row.blobs())
      if (blob != nullptr && blob->on_disk()) state.disk_bytes += blob->size();
  }
  return state;
}

KVKEEP_INLINE const SpanRow& Keeper::spans(SequenceId sequence, std::int32_t layer, std::int32_t head) const {
  const Sequence& s = at(sequence);
  KVKEEP_REQUIRE_AS(Unsupported, !s.memory.empty(), "kvkeep: policy ", policy_->name(),
                    " does not fold; allowed only with one that does");
  return s.memory[static_cast<std::size_t>(row_of(layer, head))];
}

}  // namespace kvkeep
