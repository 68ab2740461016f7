// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Folded spans of one layer by hand, one step at a time: what a trace shows of them, and a program that trains a
/// router reads. Keepers fold by kvkeep::fold() and read by kvkeep::read_memory(), which does the same at once.

#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/memory/row_zoom.h"
#include "kvkeep/memory/segmenter.h"

namespace kvkeep::lm {

/// Folded spans of one layer whose KV heads share one table of spans, as in a prompt that was cut by its surprisal.
/// Written once, read by any number of threads.
class SpanStore {
 public:
  SpanStore() = default;

  /// keys, values: f32, f16 or bf16 [Hkv, T, D], keys as attention reads them (after RoPE); surprisal: [T]; spans
  /// inside T. `gates`: required if options.rank is gates. Throws InvalidArgument for other shapes and spans that
  /// overlap, and as fold(). Cost: as fold().
  SpanStore(const kvkeep::Tensor& keys, const kvkeep::Tensor& values, std::span<const float> surprisal,
            std::vector<Span> spans, const FactorOptions& options, const RankGates* gates = nullptr);

  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(spans_.size()); }
  [[nodiscard]] std::span<const Span> spans() const { return spans_; }
  [[nodiscard]] std::int64_t kv_heads() const { return static_cast<std::int64_t>(rows_.size()); }
  [[nodiscard]] std::int64_t dim() const { return rows_.empty() ? 0 : rows_.front().dim(); }
  [[nodiscard]] const SpanRow& row(std::int64_t head) const { return rows_[static_cast<std::size_t>(head)]; }
  [[nodiscard]] std::span<const SpanRow> rows() const { return rows_; }

  /// f32 [Hkv, spans, D]: a copy of what the rows hold.
  [[nodiscard]] kvkeep::Tensor coarse(KvSide side) const;
  [[nodiscard]] const SpanFactors& factors(std::int64_t span, std::int64_t head, KvSide side) const {
    return row(head).span(span).factors[static_cast<std::size_t>(side)];
  }
  /// f32 [Hkv, L, D]: SpanRow::rows() of all heads.
  [[nodiscard]] kvkeep::Tensor rows(std::int64_t span, KvSide side) const;

  /// f32 [spans, Hkv, 2, max_rank] of what was factorised, descending, padded with 0.
  [[nodiscard]] const kvkeep::Tensor& singular_values() const { return singular_values_; }
  /// The same of gates; undefined unless options.rank is gates.
  [[nodiscard]] const kvkeep::Tensor& gates() const { return gates_; }

  /// Bytes of tensors, without tables. Near: per span 2 * Hkv * D in the rows' dtype, and 4 for the logarithm, which
  /// the heads share. Far: the factors.
  [[nodiscard]] std::int64_t near_bytes() const;
  [[nodiscard]] std::int64_t far_bytes() const;

 private:
  std::vector<Span> spans_;
  std::vector<SpanRow> rows_;
  kvkeep::Tensor singular_values_, gates_;
};

/// What one layer remembers of a prompt.
struct SpanMemory {
  Segments segments;
  kvkeep::Tensor dense_keys, dense_values;  ///< [Hkv, dense, D] of segments.dense(), in the dtype they came in
  SpanStore spans;

  /// Bytes of tensors near the device: dense rows and SpanStore::near_bytes().
  [[nodiscard]] std::int64_t near_bytes() const;
};

/// keys, values: f32, f16 or bf16 [Hkv, T, D], keys after RoPE. Copies the dense rows and folds the spans. Throws and
/// costs as SpanStore.
[[nodiscard]] SpanMemory fold_prompt(const kvkeep::Tensor& keys, const kvkeep::Tensor& values,
                                     std::span<const float> surprisal, Segments segments,
                                     const FactorOptions& options = {}, const RankGates* gates = nullptr);

/// f32 [n, Hq, D]; 0 if there was no entry.
[[nodiscard]] kvkeep::Tensor closed(const OpenAttention& open);
/// f32 [n, Hq] log of the sum of exp(logit) over the entries.
[[nodiscard]] kvkeep::Tensor log_mass(const OpenAttention& open);

/// Attention of queries over dense rows. keys, values: f32, f16 or bf16 [Hkv, T, D]; queries: f32, f16 or bf16 [n, Hq,
/// D] after RoPE; every query sees every row. Query head h reads KV head h / (Hq / Hkv). Throws InvalidArgument for
/// other shapes and dtypes. Cost: 4 * n * Hq * T * D flop; queries and KV heads in parallel.
[[nodiscard]] OpenAttention attend_rows(const kvkeep::Tensor& keys, const kvkeep::Tensor& values,
                                        const kvkeep::Tensor& queries, double scale);

/// f32 [n, Hq, spans]: logit of the coarse entry of every span, with the logarithm of its length. Throws as
/// attend_rows(). Cost: one matrix product.
[[nodiscard]] kvkeep::Tensor coarse_logits(const SpanStore& spans, const kvkeep::Tensor& queries, double scale);

/// Merges every span into `open`: as its coarse entry, with its logit from `coarse` (coarse_logits()), if `zoomed` (u8
/// [n, Hq, spans]) is 0, else token by token from its factors. Throws InvalidArgument for other shapes. Cost per zoomed
/// span and head: one multiply-add for each number of its factors, or of its rows.
void merge_spans(OpenAttention& open, const SpanStore& spans, const kvkeep::Tensor& queries, double scale,
                 const kvkeep::Tensor& coarse, const kvkeep::Tensor& zoomed);

/// f32 [Hq, spans]: 1 / |W kmean|, at most 1e8: Router::norms() of all rows. Throws
/// InvalidArgument if heads or D differ. Cost: a matrix product.
[[nodiscard]] kvkeep::Tensor router_norms(const Router& router, const SpanStore& spans);

/// f32 [n, Hq, spans] in [0, 1]: sigmoid((W q) . (W kmean) * norm / sqrt(d') + log L). norms: router_norms(). queries:
/// [n, Hq, D] after RoPE. Cost: a matrix product with the coarse keys.
[[nodiscard]] kvkeep::Tensor relevance(const Router& router, const SpanStore& spans, const kvkeep::Tensor& norms,
                                       const kvkeep::Tensor& queries);

/// u8 [n, Hq, spans]: relevance above the head's threshold.
[[nodiscard]] kvkeep::Tensor wanted(const Router& router, const kvkeep::Tensor& relevance);

/// f32 [n, Hq, spans]: share of attention that each coarse entry draws if nothing is zoomed. coarse: coarse_logits();
/// dense: attention over the dense rows.
[[nodiscard]] kvkeep::Tensor estimated_mass(const kvkeep::Tensor& coarse, const OpenAttention& dense);

/// u8 [n, Hq, spans]: spans that the rules of ZoomOptions without training ask for. Equal masses: the lower index
/// first. Throws InvalidArgument for Rule::learned; automatic means mass.
[[nodiscard]] kvkeep::Tensor wanted_by_mass(const kvkeep::Tensor& mass, const ZoomOptions& options);

/// u8 [n, Hq, spans]: the spans of `wanted` that are zoomed. Each KV head walks the spans that any of its heads wants,
/// by the highest relevance among those heads, then the lower index; one that does not fit is skipped. Throws
/// InvalidArgument for shapes that do not fit. Cost: a sort per query and KV head.
[[nodiscard]] kvkeep::Tensor within_budget(const kvkeep::Tensor& relevance, const kvkeep::Tensor& wanted,
                                           const SpanStore& spans, const cpu::ZoomBudget& budget,
                                           ZoomOptions::Heads heads);

}  // namespace kvkeep::lm
