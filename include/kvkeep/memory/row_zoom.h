// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. One row's folded spans and the query heads that read them, for one token: the parts of
/// routing and merging. One thread each.

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kvkeep/memory/read_memory.h"
#include "kvkeep/simd/aligned.h"

namespace kvkeep::cpu {

/// Scratch of one thread.
struct ZoomScratch {
  Aligned<float> numbers[2], coarse, coarse_value, inner, logits, tokens, base;
};

/// out [heads, spans] = query . coarse key, before any scale. queries: [heads, D].
void coarse_products(const SpanRow& spans, const float* queries, std::int64_t heads, float* out, ZoomScratch& scratch);

/// The same as logits: scaled, with the logarithms of the lengths.
void coarse_logits(const SpanRow& spans, const float* queries, std::int64_t heads, float scale, float* out,
                   ZoomScratch& scratch);

/// mass [heads, spans] = share of attention that the tokens of each span draw, estimated from the sketch of their keys:
/// logits scale * (q . coarse key + signs), in a softmax with all of them and `dense` [heads], the log-sum-exps of the
/// dense rows. queries: [heads, D]; coarse: coarse_logits().
void sketch_mass(const SpanRow& spans, const float* queries, std::int64_t heads, float scale, const float* coarse,
                 const float* dense, float* mass, ZoomScratch& scratch);

/// mass [spans] = share of each coarse logit in a softmax with all of them and `dense`, the log-sum-exp of the dense
/// rows.
void coarse_mass(const float* logits, std::int64_t spans, float dense, float* mass);

/// Marks the spans of one head that a rule without training asks for. wanted: [spans].
void want_by_mass(std::span<const float> mass, const ZoomOptions& options, std::uint8_t* wanted);

/// A router's norms (Router::norms) of one row, as they are stored.
struct RouterNorms {
  const float* at;
  std::int64_t span_stride, head_stride;
};

/// relevance [heads, spans] by a learned router; queries: [heads, D] of the heads from `first_head` on.
void router_relevance(const Router& router, const SpanRow& spans, std::int64_t first_head, std::int64_t heads,
                      const RouterNorms& norms, const float* queries, float* relevance, ZoomScratch& scratch);

/// Entries of one KV head that may be in reach at once.
struct ZoomBudget {
  double entries = std::numeric_limits<double>::infinity();
  double resident = 0;    ///< taken even if nothing is opened
  bool per_head = false;  ///< Reading::per_head
};

/// Of the spans that `group` heads want, [group, spans], marks those that are opened within budget.entries. Returns how
/// many did not fit.
std::int64_t open_within(const SpanRow& spans, const float* relevance, const std::uint8_t* wanted, std::int64_t group,
                         const ZoomBudget& budget, ZoomOptions::Heads heads, std::uint8_t* zoomed);

/// Open softmaxes of the heads of one group: [heads], [heads], [heads, dim].
struct OpenHeads {
  float *top, *sum, *out;
};

/// Merges coarse entries into the softmaxes, except those that a head has opened. logits, zoomed: [heads, spans].
void merge_coarse(const SpanRow& spans, const float* logits, const std::uint8_t* zoomed, std::int64_t heads,
                  const OpenHeads& open, ZoomScratch& scratch);

/// Merges span `i`, token by token, into the softmaxes of the heads that have opened it (zoomed [heads, spans]).
void merge_opened(const SpanRow& spans, std::int64_t i, const std::uint8_t* zoomed, const float* queries,
                  std::int64_t heads, float scale, const OpenHeads& open, ZoomScratch& scratch);

/// True if one of `heads` rows of marks [heads, spans] marks span `s`.
inline bool anyone(const std::uint8_t* marks, std::int64_t heads, std::int64_t spans, std::int64_t s) {
  for (std::int64_t h = 0; h < heads; ++h)
    if (marks[h * spans + s] != 0) return true;
  return false;
}

/// Reads rows, one token's group of heads at a time: routes, opens, merges. For one thread.
class RowReader {
 public:
  RowReader(const Reading& reading, std::int64_t group, float scale)
      : reading_(reading), group_(group), scale_(scale) {}

  /// queries: [group, D].
  ReadCounts read(const MemoryRow& row, std::int64_t first_head, const float* queries, const OpenHeads& open);
  /// Spans that the last read() opened, ascending.
  [[nodiscard]] const std::vector<std::int32_t>& opened() const { return opened_; }

 private:
  /// Counts what it does not open.
  void route(const MemoryRow& row, std::int64_t first_head, const float* queries, const OpenHeads& open,
             ReadCounts& counts);

  const Reading& reading_;
  std::int64_t group_;
  float scale_;
  ZoomScratch scratch_;
  Aligned<float> coarse_, relevance_;
  std::vector<float> dense_;
  std::vector<std::uint8_t> wanted_, zoomed_;
  std::vector<std::int32_t> opened_;
};

/// Merges `count` rows (keys, values: [count, dim] f32) into one head's softmax. logits: scratch of `count`.
void merge_rows(const float* keys, const float* values, std::int64_t count, std::int64_t dim, const float* query,
                float scale, float* logits, float& top, float& sum, float* out);

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/row_zoom-inl.h"
#endif
