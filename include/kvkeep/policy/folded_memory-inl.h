#pragma once
// Bodies of folded_memory.h: compiled by src/policy, or where they are included under KVKEEP_HEADER_ONLY.
// Folded spans on the CPU.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kvkeep/core/header_only.h"
#include "kvkeep/memory/read_memory.h"
#include "kvkeep/memory/span_row.h"
#include "kvkeep/policy/folded_memory.h"

namespace kvkeep {
namespace folded_memory_detail {

class HostFoldedMemory final : public FoldedMemory {
 public:
  HostFoldedMemory(const ModelSpec& spec, const MemoryOptions& memory) : FoldedMemory(spec, memory, host_memory()) {
    reads_.resize(spec.full_layers().size() * static_cast<std::size_t>(spec.kv_heads));
  }

  [[nodiscard]] Folding fold(const RowTable& table, const Decision& decision,
                             std::span<const FoldTarget> targets) override {
    const Fold& fold = *decision.fold;
    std::vector<std::vector<std::int64_t>> spans(table.rows.size());  // where each begins among the slots of its row
    std::vector<RowFold> rows;
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      const Row& row = table.rows[r];
      const std::int64_t first = fold.spans[static_cast<std::size_t>(fold.indptr[r])],
                         last = fold.spans[static_cast<std::size_t>(fold.indptr[r + 1])];
      for (std::int64_t s = fold.indptr[r]; s <= fold.indptr[r + 1]; ++s)
        spans[r].push_back(fold.spans[static_cast<std::size_t>(s)] - first);
      const auto own = [&](const auto& all) {
        return std::span(all).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first));
      };
      rows.push_back({.keys = row.keys,
                      .values = row.values,
                      .key_scales = row.key_scales,
                      .value_scales = row.value_scales,
                      .key_dtype = table.key_dtype,
                      .value_dtype = table.value_dtype,
                      .keys_rotated = table.keys_rotated,
                      .values_rotated = table.values_rotated,
                      .slots = own(fold.slots),
                      .indptr = spans[r],
                      .weights = fold.weights.empty() ? std::span<const float>() : own(fold.weights),
                      .positions = {row.positions, static_cast<std::size_t>(row.length)},
                      .label = {.sequence = targets[r].id, .layer = row.layer, .head = row.head},
                      .spans_before = targets[r].sequence->count(targets[r].row).spans});
    }
    std::vector<SpanRow> folded = kvkeep::fold(rows, spec_.key_dim, memory_.fold_options(), memory_.gates(), nullptr,
                                               memory_.host_bytes - far_bytes_);
    if (memory_.learned())
      for (std::size_t r = 0; r < folded.size(); ++r) {
        const Row& row = table.rows[r];
        folded[r].set_norms(memory_.routing->layers[static_cast<std::size_t>(row.layer)].norms(
            folded[r], std::int64_t{row.head} * spec_.group(), spec_.group()));
      }
    Folding folding;
    for (std::size_t r = 0; r < folded.size(); ++r) {
      SpanRow& own = folded[r];
      FoldedRows::Part part{.row = targets[r].row,
                            .count = {static_cast<std::int32_t>(own.size()), own.tokens()},
                            .near_bytes = own.near_bytes(),
                            .far_bytes = own.far_bytes()};
      part.spans = std::move(own);
      targets[r].sequence->reserve(part);
      folding.tokens += part.count.tokens;
      folding.far_bytes += part.far_bytes;
      folding.parts.push_back({targets[r].sequence, std::move(part)});
    }
    return folding;
  }

  ReadCounts view(const FoldedReading& r) override {
    ReadCounts counts;
    for (const FoldedReader& reader : r.readers) counts += view(r, reader);
    return counts;
  }

 private:
  ReadCounts view(const FoldedReading& r, const FoldedReader& reader) {
    const std::int32_t first_row = r.index * spec_.kv_heads;
    const FoldedRows& own = *reader.rows;
    std::vector<MemoryRow> rows;
    std::int64_t spans = 0;
    for (std::int32_t row = first_row; row < first_row + spec_.kv_heads; ++row) {
      rows.push_back({.spans = &own.host_rows()[static_cast<std::size_t>(row)], .dense = reader.columns->length(row)});
      spans += own.count(row).spans;
    }
    if (spans == 0 || reader.tokens == 0) return {};
    const Reading reading{
        .zoom = memory_.zoom,
        .router = memory_.learned() ? &memory_.routing->layers[static_cast<std::size_t>(r.layer)] : nullptr,
        .entries = memory_.entries_after(reader.seen),
        .entries_per_span = memory_.entries_per_span(spec_.group(), spec_.key_dim, memory_.learned()),
        .entries_per_token = memory_.entries_per_token(spec_.key_dim),
        .per_head = memory_.published_budget};
    const Tensor lse = r.attended.log_sum_exp.narrow(0, reader.first, reader.tokens),
                 out = r.attended.out.narrow(0, reader.first, reader.tokens);
    OpenAttention open{lse, empty(lse.sizes(), Dtype::f32), out};
    const std::int64_t dim = out.size(2);
    float *sums = open.sum.data<float>(), *outputs = out.data<float>();
    for (std::int64_t n = 0; n < lse.numel(); ++n) {
      const bool seen = lse.data<float>()[n] != -std::numeric_limits<float>::infinity();
      sums[n] = seen ? 1.0F : 0.0F;
      if (!seen) std::fill_n(outputs + n * dim, dim, 0.0F);
    }
    const ReadCounts counts =
        read_memory(open, rows, r.queries.narrow(0, reader.first, reader.tokens), spec_.scale(), reading, nullptr,
                    std::span(reads_).subspan(static_cast<std::size_t>(first_row), rows.size()));
    for (std::int64_t n = 0; n < lse.numel(); ++n) {
      for (float* x = outputs + n * dim; x < outputs + (n + 1) * dim; ++x) *x /= sums[n];
      lse.data<float>()[n] += std::log(sums[n]);
    }
    return counts;
  }
};

}  // namespace folded_memory_detail

KVKEEP_INLINE FoldedRows::FoldedRows(std::vector<SpanRow> rows, std::int64_t& held)
    : counts_(rows.size()), host_rows_(std::move(rows)), held_(&held) {
  for (std::size_t r = 0; r < host_rows_.size(); ++r) {
    const SpanRow& row = host_rows_[r];
    counts_[r] = {static_cast<std::int32_t>(row.size()), row.tokens()};
    near_bytes_ += row.near_bytes();
    far_bytes_ += row.far_bytes();
  }
  *held_ += far_bytes_;
}

KVKEEP_INLINE void FoldedRows::reserve(const Part& part) {
  if (part.spans) host_rows_[static_cast<std::size_t>(part.row)].reserve(*part.spans);
  if (part.far != nullptr) far_.reserve(far_.size() + 1);
}

KVKEEP_INLINE void FoldedRows::add(Part part) noexcept {
  Count& own = counts_[static_cast<std::size_t>(part.row)];
  own.spans += part.count.spans;
  own.tokens += part.count.tokens;
  near_bytes_ += part.near_bytes;
  far_bytes_ += part.far_bytes;
  if (held_ != nullptr) *held_ += part.far_bytes;
  if (part.spans) host_rows_[static_cast<std::size_t>(part.row)].append(*std::move(part.spans));
  if (part.far != nullptr) far_.push_back(std::move(part.far));
  ++version_;
}

KVKEEP_INLINE std::unique_ptr<FoldedRows> FoldedMemory::rows(std::vector<SpanRow> rows) {
  if (!on_host_) {
    KVKEEP_REQUIRE_AS(Unsupported, std::ranges::all_of(rows, [](const SpanRow& row) { return row.size() == 0; }),
                      "folded spans: they are not restored on ", device_.str(), "; allowed on the CPU");
    return std::make_unique<FoldedRows>(rows.size());
  }
  auto own = std::make_unique<FoldedRows>(std::move(rows), far_bytes_);
  KVKEEP_REQUIRE_AS(StateError, far_bytes_ <= memory_.host_bytes, "folded spans: no room for ", own->state().far_bytes,
                    " bytes of factors; host_bytes allows ", memory_.host_bytes, " in all");
  return own;
}

KVKEEP_INLINE std::unique_ptr<FoldedMemory> host_folded_memory(const ModelSpec& spec, const MemoryOptions& memory) {
  return std::make_unique<folded_memory_detail::HostFoldedMemory>(spec, memory);
}

}  // namespace kvkeep
