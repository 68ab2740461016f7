#pragma once
// Bodies of window_attention.h: compiled by src/score, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "kvkeep/core/device.h"
#include "kvkeep/core/each_row.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/score/panel_scratch.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/score/window_queries.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep {
namespace history_attention_detail {

using cpu::kPanels;
using Scratch = cpu::PanelScratch;

/// Slots [first, end) of one row, how many queries look at them, and over how many slots from `first` on a softmax
/// goes.
struct Span {
  std::int32_t first = 0, end = 0, queries = 0, reach = 0;
  [[nodiscard]] std::int64_t slots() const { return end - first; }
};

/// `whole`: a softmax goes over all that a query sees.
inline Span span_of(const Row& row, const QueryView& queries, RowWindow window, std::int32_t first, bool whole) {
  if (window.queries == 0) return {};
  const std::int32_t oldest = queries.position(queries.count - window.queries);
  const auto visible =
      static_cast<std::int32_t>(std::upper_bound(row.positions, row.positions + row.length, oldest) - row.positions);
  const std::int32_t end = std::min(window.history, visible), begin = std::min(first, end);
  return {begin, end, window.queries, (whole ? row.length : end) - begin};
}

/// One row while its window is reduced.
class HistoryReduction {
 public:
  HistoryReduction(const Evidence& evidence, const Row& row, const QueryView& queries, Span span,
                   HistoryOptions options, Scratch& scratch)
      : heads_(evidence.spec.group()),
        dim_(evidence.spec.key_dim),
        span_(span),
        options_(options),
        scratch_(scratch),
        keys_{row.keys, evidence.table.key_dtype, dim_},
        width_(cpu::panel_width(heads_ * span.queries)) {
    if (options_.window != WindowReduce::worst) return;
    for (std::int32_t i = queries.count - span.queries; i < queries.count; ++i)
      sees_.push_back(std::upper_bound(row.positions, row.positions + row.length, queries.position(i)) - row.positions -
                      span.first);
  }

  /// `out`: the row's part of the result, starting at slot span.first.
  void run(float* out) {
    std::fill_n(scratch_.usage, span_.slots() * cpu::panel_vector(width_), 0.0F);
    if (options_.group == GroupReduce::mean_prob)
      mean_over_heads();
    else
      maximum_over_heads();
    cpu::fold_lanes(width_, scratch_.usage, span_.slots(), out);
    if (options_.window == WindowReduce::worst) return;
    const std::int64_t heads = options_.group == GroupReduce::mean_prob ? heads_ : 1;
    const auto parts = static_cast<float>(heads * (span_.queries - 1 + options_.newest_counts));
    for (std::int64_t t = 0; t < span_.slots(); ++t) out[t] /= parts;
  }

 private:
  /// How often the i-th query of the window counts.
  [[nodiscard]] float counts(std::int64_t i) const {
    return i == span_.queries - 1 ? static_cast<float>(options_.newest_counts) : 1.0F;
  }

  void clear(std::int64_t panels) { std::fill_n(scratch_.panels, panels * dim_ * width_, 0.0F); }

  /// Puts query n of the product (query head by query head) into a lane of a panel.
  void place(std::int64_t n, std::int64_t panel, std::int64_t lane) {
    const float* query = scratch_.queries + n * dim_;
    for (std::int64_t d = 0; d < dim_; ++d) scratch_.panels[(panel * dim_ + d) * width_ + lane] = query[d];
  }

  void logits(std::int64_t panels) {
    std::fill_n(scratch_.top, panels * width_, -std::numeric_limits<float>::infinity());
    cpu::panel_logits(width_, keys_, span_.first, span_.first + span_.reach, scratch_.panels, panels,
                      span_.reach * width_, scratch_.logits, scratch_.top, scratch_.widened);
  }

  /// Softmax of one panel x, then added to the usage; `query_of(lane)` is -1 for lanes without a query.
  template <class QueryOf>
  void add_softmax(float* x, const float* top, QueryOf&& query_of) {
    if (options_.window == WindowReduce::worst) return add_worst(x, query_of);
    cpu::panel_exp(width_, x, span_.slots(), top, scratch_.sum);
    for (std::int64_t lane = 0; lane < width_; ++lane) {
      const std::int64_t query = query_of(lane);
      scratch_.weight[lane] = query >= 0 ? counts(query) / scratch_.sum[lane] : 0.0F;
    }
    cpu::panel_weigh(width_, x, span_.slots(), scratch_.weight, scratch_.usage);
  }

  /// Softmax of one panel over what each query sees. Its shares in the history, pooled, keep their sum; the largest of
  /// them and the usage so far, in its first lane.
  template <class QueryOf>
  void add_worst(float* x, QueryOf&& query_of) {
    const std::int64_t slots = span_.slots(), vector = cpu::panel_vector(width_), reach = options_.pool / 2;
    for (std::int64_t lane = 0; lane < width_; ++lane)
      if (const std::int64_t query = query_of(lane); query >= 0)
        for (std::int64_t t = sees_[static_cast<std::size_t>(query)]; t < span_.reach; ++t)
          x[t * width_ + lane] = -std::numeric_limits<float>::infinity();
    float* const top = scratch_.weight;
    std::copy_n(x, width_, top);
    for (std::int64_t t = 1; t < span_.reach; ++t)
      for (std::int64_t lane = 0; lane < width_; ++lane) top[lane] = std::max(top[lane], x[t * width_ + lane]);
    cpu::panel_exp(width_, x, span_.reach, top, scratch_.sum);

    const auto begin = [&](std::int64_t t) { return std::max<std::int64_t>(t - reach, 0); };
    const auto end = [&](std::int64_t t) { return std::min(t + reach + 1, slots); };
    float *const share = scratch_.weight, *const older = scratch_.top;
    std::fill_n(share, width_, 0.0F);
    std::fill_n(older, width_, 0.0F);
    for (std::int64_t t = 0; t < slots; ++t) {
      const auto pools = static_cast<float>(end(t) - begin(t));  // that slot t is in
      for (std::int64_t lane = 0; lane < width_; ++lane) {
        older[lane] += x[t * width_ + lane];
        share[lane] += product(pools, x[t * width_ + lane]);
      }
    }
    for (std::int64_t lane = 0; lane < width_; ++lane)
      share[lane] = query_of(lane) >= 0 && share[lane] != 0 ? older[lane] / scratch_.sum[lane] / share[lane] : 0;
    for (std::int64_t t = 0; t < slots; ++t) {
      float* const pooled = scratch_.sum;
      std::fill_n(pooled, width_, 0.0F);
      for (std::int64_t n = begin(t); n < end(t); ++n)
        for (std::int64_t lane = 0; lane < width_; ++lane) pooled[lane] += x[n * width_ + lane];
      float& worst = scratch_.usage[t * vector];
      for (std::int64_t lane = 0; lane < width_; ++lane) worst = std::max(worst, pooled[lane] * share[lane]);
    }
  }

  void mean_over_heads() {
    const std::int64_t total = heads_ * span_.queries, tile = kPanels * width_;
    for (std::int64_t first = 0; first < total; first += tile) {
      const std::int64_t count = std::min(tile, total - first), panels = (count + width_ - 1) / width_;
      clear(panels);
      for (std::int64_t n = 0; n < count; ++n) place(first + n, n / width_, n % width_);
      logits(panels);
      for (std::int64_t p = 0; p < panels; ++p)
        add_softmax(scratch_.logits + p * span_.reach * width_, scratch_.top + p * width_, [&](std::int64_t lane) {
          const std::int64_t n = first + p * width_ + lane;
          return n < total ? n % span_.queries : -1;
        });
    }
  }

  /// As many queries at a time as fit in a panel; a panel holds the same queries of as many heads as fit.
  void maximum_over_heads() {
    const std::int64_t stride = std::min<std::int64_t>(span_.queries, width_), per_panel = width_ / stride;
    for (std::int64_t first = 0; first < span_.queries; first += stride) {
      const std::int64_t queries = std::min(stride, span_.queries - first);
      for (std::int64_t head = 0; head < heads_; head += kPanels * per_panel) {
        const std::int64_t heads = std::min(kPanels * per_panel, heads_ - head),
                           panels = (heads + per_panel - 1) / per_panel;
        clear(panels);
        for (std::int64_t h = 0; h < heads; ++h)
          for (std::int64_t i = 0; i < queries; ++i)
            place((head + h) * span_.queries + first + i, h / per_panel, h % per_panel * stride + i);
        logits(panels);
        for (std::int64_t p = 0; p < panels; ++p)
          cpu::panel_group_max(width_, scratch_.logits + p * span_.reach * width_, span_.reach,
                               std::min(per_panel, heads - p * per_panel), queries, stride, head + p == 0,
                               scratch_.largest, scratch_.peak);
      }
      add_softmax(scratch_.largest, scratch_.peak,
                  [&](std::int64_t lane) { return lane < queries ? first + lane : -1; });
    }
  }

  std::int64_t heads_, dim_;
  Span span_;
  HistoryOptions options_;
  Scratch& scratch_;
  cpu::Keys keys_;
  std::int64_t width_;
  std::vector<std::int64_t> sees_;  ///< [queries] WindowReduce::worst: slots from span_.first on that a query sees
};

}  // namespace history_attention_detail

KVKEEP_INLINE std::int64_t history_attention_workspace(const ModelSpec& spec, std::int32_t slots, std::int32_t queries,
                                                       GroupReduce group) {
  return cpu::PanelSizes(spec, slots, queries, {.maxima = group == GroupReduce::max_logit}).total() *
         static_cast<std::int64_t>(sizeof(float));
}

KVKEEP_INLINE Tensor history_attention(const Evidence& evidence, std::span<const RowWindow> windows,
                                       HistoryOptions options, std::span<const std::int32_t> first) {
  require_host("history_attention", evidence.table.device);
  const RowTable& table = evidence.table;
  KVKEEP_REQUIRE(is_scorable(table.key_dtype), "history_attention: keys are ", table.key_dtype,
                 "; allowed f32, f16, bf16 (other dtypes can be moved, not scored)");
  const Tensor result = empty({table.slots}, Dtype::f32);
  float* out = result.data<float>();
  const auto heads = static_cast<std::size_t>(evidence.spec.kv_heads);
  const cpu::WindowTurns turns(evidence, windows);
  std::vector<history_attention_detail::Span> spans(table.rows.size());
  std::int64_t slots = 0, queries = 0;
  for (std::size_t r = 0; r < spans.size(); ++r) {
    spans[r] = history_attention_detail::span_of(table.rows[r], table.groups[r / heads].queries, windows[r],
                                                 first.empty() ? 0 : first[r], options.window == WindowReduce::worst);
    slots = std::max<std::int64_t>(slots, spans[r].reach);
    queries = std::max<std::int64_t>(queries, spans[r].queries);
  }
  const cpu::PanelSizes sizes(evidence.spec, slots, queries, {.maxima = options.group == GroupReduce::max_logit});
  const auto make = [&] { return history_attention_detail::Scratch(sizes); };
  each_row(table, make, [&](std::size_t r, const Row& row, history_attention_detail::Scratch& scratch) {
    std::fill_n(out + row.first, row.length, 0.0F);
    if (spans[r].slots() == 0) return;
    const std::size_t g = r / heads;
    cpu::gather_queries(evidence, table.groups[g].queries, row.head, spans[r].queries, turns.of(g), scratch.queries);
    history_attention_detail::HistoryReduction(evidence, row, table.groups[g].queries, spans[r], options, scratch)
        .run(out + row.first + spans[r].first);
  });
  return result;
}

}  // namespace kvkeep
