#pragma once
/// Folded spans of one layer whose KV heads share one table of spans, as in a prompt that was cut by its surprisal.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/memory/rank_gates.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/memory/span_row.h"

namespace kvkeep {

/// Written once, read by any number of threads.
class SpanStore {
 public:
  SpanStore() = default;

  /// keys, values: f32, f16 or bf16 [Hkv, T, D], keys as attention reads them (after RoPE); surprisal: [T]; spans
  /// inside T. `gates`: required if options.rank is gates. Throws InvalidArgument for other shapes and spans that
  /// overlap, and as fold(). Cost: as fold().
  SpanStore(const Tensor& keys, const Tensor& values, std::span<const float> surprisal, std::vector<Span> spans,
            const FactorOptions& options, const RankGates* gates = nullptr);

  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(spans_.size()); }
  [[nodiscard]] std::span<const Span> spans() const { return spans_; }
  [[nodiscard]] std::int64_t kv_heads() const { return static_cast<std::int64_t>(rows_.size()); }
  [[nodiscard]] std::int64_t dim() const { return rows_.empty() ? 0 : rows_.front().dim(); }
  [[nodiscard]] const SpanRow& row(std::int64_t head) const { return rows_[static_cast<std::size_t>(head)]; }
  [[nodiscard]] std::span<const SpanRow> rows() const { return rows_; }

  /// f32 [Hkv, spans, D]: a copy of what the rows hold.
  [[nodiscard]] Tensor coarse(KvSide side) const;
  [[nodiscard]] const SpanFactors& factors(std::int64_t span, std::int64_t head, KvSide side) const {
    return row(head).span(span).factors[static_cast<std::size_t>(side)];
  }
  /// f32 [Hkv, L, D]: SpanRow::rows() of all heads.
  [[nodiscard]] Tensor rows(std::int64_t span, KvSide side) const;

  /// f32 [spans, Hkv, 2, max_rank] of what was factorised, descending, padded with 0.
  [[nodiscard]] const Tensor& singular_values() const { return singular_values_; }
  /// The same of gates; undefined unless options.rank is gates.
  [[nodiscard]] const Tensor& gates() const { return gates_; }

  /// Bytes of tensors, without tables. Near: per span 2 * Hkv * D in the rows' dtype, and 4 for the logarithm, which
  /// the heads share. Far: the factors.
  [[nodiscard]] std::int64_t near_bytes() const;
  [[nodiscard]] std::int64_t far_bytes() const;

 private:
  std::vector<Span> spans_;
  std::vector<SpanRow> rows_;
  Tensor singular_values_, gates_;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/factorise.h"  // and, after it, the bodies of this file
#endif
