// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of window_attention.h: compiled by src/score, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep::cpu {
namespace window_turns_detail {

inline Turns turns_of(const Evidence& evidence, const RopeSpec& rope, const QueryView& queries, std::int32_t window) {
  KVKEEP_REQUIRE(evidence.basis == QueryBasis::post_rope || rope.stated(),
                 "window_attention: queries are taken before RoPE, which the model spec does not state; allowed with "
                 "rope.inv_freq, RopeStyle::none for a layer without RoPE, or QueryBasis::post_rope");
  Turns turns{.rope = &rope};
  if (evidence.basis != QueryBasis::post_rope && !rope.inv_freq.empty())
    turns.fill(window, [&](std::int32_t i) { return queries.position(queries.count - window + i); });
  return turns;
}

}  // namespace window_turns_detail

KVKEEP_INLINE bool same_positions(const QueryView& a, const QueryView& b) {
  if (a.count != b.count) return false;
  for (std::int32_t i = 0; i < a.count; ++i)
    if (a.position(i) != b.position(i)) return false;
  return true;
}

KVKEEP_INLINE WindowTurns::WindowTurns(const Evidence& evidence, std::span<const RowWindow> windows)
    : turns_(evidence.table.groups.size()), index_(evidence.table.groups.size()) {
  const std::vector<RowGroup>& groups = evidence.table.groups;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    std::int32_t widest = 0;
    for (std::int32_t h = 0; h < evidence.spec.kv_heads; ++h)
      widest = std::max(widest, windows[static_cast<std::size_t>(groups[g].first_row + h)].queries);
    index_[g] = g;
    const RopeSpec& rope = evidence.spec.rope_of(groups[g].layer);
    for (std::size_t e = 0; e < g; ++e)
      if (groups[e].sequence == groups[g].sequence && &evidence.spec.rope_of(groups[e].layer) == &rope &&
          same_positions(groups[e].queries, groups[g].queries)) {
        index_[g] = index_[e];
        break;
      }
    Turns& known = turns_[index_[g]];
    if (known.window < widest) known = window_turns_detail::turns_of(evidence, rope, groups[g].queries, widest);
  }
}

KVKEEP_INLINE void gather_queries(const Evidence& evidence, const QueryView& view, std::int32_t head,
                                  std::int32_t window, const Turns& turns, float* out) {
  const ModelSpec& spec = evidence.spec;
  const auto dim = static_cast<std::size_t>(spec.key_dim);
  const auto scale = static_cast<float>(spec.scale());
  with_dtype("window_attention", view.dtype, [&](auto type) {
    const std::int64_t skip = turns.window - window;
    for (std::int32_t i = 0; i < window; ++i)  // query heads of a token lie side by side
      for (std::int32_t g = 0; g < spec.group(); ++g) {
        float* const q = out + (std::int64_t{g} * window + i) * spec.key_dim;
        const auto* from =
            reinterpret_cast<const decltype(type)*>(view.at(view.count - window + i, head * spec.group() + g));
        for (std::size_t d = 0; d < dim; ++d) q[d] = static_cast<float>(from[d]);
        turns.apply(skip + i, q);
        constexpr auto kLargest = std::bit_cast<std::int32_t>(std::numeric_limits<float>::max());
        if (!kvkeep::detail::none_above(reinterpret_cast<const std::byte*>(q), spec.key_dim, kLargest)) {
          const auto d = std::find_if_not(q, q + dim, [](float x) { return std::isfinite(x); }) - q;
          refuse<InvalidArgument>("window_attention: query of head ", head * spec.group() + g, " at position ",
                                  view.position(view.count - window + i), " holds ", q[d], " in component ", d,
                                  "; allowed finite numbers");
        }
        for (std::size_t d = 0; d < dim; ++d) q[d] *= scale;
      }
  });
}

}  // namespace kvkeep::cpu

namespace kvkeep {
namespace window_attention_detail {

using cpu::kPanels;

/// Caps the logits of `panels` panels of `slots` slots, and the largest of each of their lanes.
inline void cap(const ModelSpec& spec, std::int64_t panels, std::int64_t slots, std::int64_t width, float* logits,
                float* top) {
  if (spec.logit_cap == 0) return;
  cpu::cap_logits(logits, panels * slots * width, static_cast<float>(spec.logit_cap));
  cpu::cap_logits(top, panels * width, static_cast<float>(spec.logit_cap));
}

/// panel_exp() of a softmax that sink logits join: `sink_of(lane)`, minus infinity where there is none.
template <class SinkOf>
void softmax_of_panel(std::int64_t width, float* x, std::int64_t slots, float* top, float* sum, const SinkOf& sink_of) {
  for (std::int64_t lane = 0; lane < width; ++lane) top[lane] = std::max(top[lane], sink_of(lane));
  cpu::panel_exp(width, x, slots, top, sum);
  for (std::int64_t lane = 0; lane < width; ++lane) sum[lane] += std::exp(sink_of(lane) - top[lane]);
}

/// Buffers of one thread.
struct Scratch : cpu::PanelScratch {
  Scratch(const cpu::PanelSizes& sizes, std::int32_t window) : cpu::PanelScratch(sizes) {
    visible.reserve(static_cast<std::size_t>(window));
  }
  std::vector<std::int32_t> visible;  ///< [W] slots that each window query sees
};

/// Where the reductions of one row are written; null: not wanted.
struct Targets {
  float* usage = nullptr;
  float* newest = nullptr;
  float* sum = nullptr;                 ///< not together with usage
  std::span<const float> weights = {};  ///< [W] of each query in `sum`; empty: 1
};

/// One row while its window is reduced.
class RowReduction {
 public:
  RowReduction(const Evidence& evidence, const Row& row, const RowGroup& group, RowWindow window, Scratch& scratch)
      : spec_(evidence.spec),
        row_(row),
        view_(group.queries),
        window_(window),
        scratch_(scratch),
        keys_{row.keys, evidence.table.key_dtype, evidence.spec.key_dim},
        sinks_(evidence.spec.sinks_of(row.layer, row.head)),
        width_(cpu::panel_width(std::int64_t{spec_.group()} * window.queries)) {}

  void run(const Evidence& evidence, const cpu::Turns& turns, const Targets& to) {
    cpu::gather_queries(evidence, view_, row_.head, window_.queries, turns, scratch_.queries);
    count_visible();
    const std::int64_t total = std::int64_t{spec_.group()} * window_.queries, tile = kPanels * width_;
    if (to.usage != nullptr || to.sum != nullptr)
      std::fill_n(scratch_.usage, row_.length * cpu::panel_vector(width_), 0.0F);
    if (to.usage != nullptr) std::fill_n(to.usage, row_.length, 0.0F);
    if (to.newest != nullptr) std::fill_n(to.newest, row_.length, 0.0F);
    for (std::int64_t first = 0; first < total; first += tile) {
      const std::int64_t queries = std::min(tile, total - first), panels = (queries + width_ - 1) / width_;
      probabilities(first, queries, panels);
      for (std::int64_t p = 0; p < panels; ++p) {
        const float* x = scratch_.logits + p * row_.length * width_;
        const std::int64_t begin = first + p * width_, end = std::min(begin + width_, total);
        if (to.newest != nullptr) add_newest(x, begin, end, to.newest);
        if (to.sum != nullptr && !to.weights.empty())
          weigh_queries(begin, end, to.weights, scratch_.weight + p * width_);
        if (to.sum != nullptr) cpu::panel_weigh(width_, x, row_.length, scratch_.weight + p * width_, scratch_.usage);
        if (to.usage == nullptr) continue;
        add_suffix(x, begin, end, to.usage);
        cpu::panel_weigh(width_, x, window_.history, scratch_.weight + p * width_, scratch_.usage);
      }
    }
    if (to.usage != nullptr) finish(to.usage, total);
    if (to.sum != nullptr) {
      cpu::fold_lanes(width_, scratch_.usage, row_.length, to.sum);
      for (std::int32_t t = 0; t < row_.length; ++t) to.sum[t] /= static_cast<float>(spec_.group());
    }
  }

 private:
  [[nodiscard]] std::int32_t query_of(std::int64_t n) const {
    return static_cast<std::int32_t>(n % window_.queries);
  }  ///< index in the window of the n-th row of the product
  [[nodiscard]] std::int32_t position(std::int32_t i) const {
    return view_.position(view_.count - window_.queries + i);
  }

  void count_visible() {
    scratch_.visible.clear();
    for (std::int32_t i = 0; i < window_.queries; ++i)
      scratch_.visible.push_back(static_cast<std::int32_t>(
          std::upper_bound(row_.positions, row_.positions + row_.length, position(i)) - row_.positions));
  }

  /// Turns scratch.logits into exp(logit - max) and scratch.weight into 1 / sum for queries [first, first + count).
  void probabilities(std::int64_t first, std::int64_t count, std::int64_t panels) {
    const std::int64_t dim = spec_.key_dim, length = row_.length;
    std::fill_n(scratch_.panels, panels * dim * width_, 0.0F);
    for (std::int64_t n = 0; n < count; ++n)
      for (std::int64_t d = 0; d < dim; ++d)
        scratch_.panels[(n / width_ * dim + d) * width_ + n % width_] = scratch_.queries[(first + n) * dim + d];
    std::fill_n(scratch_.top, panels * width_, -std::numeric_limits<float>::infinity());

    const std::int64_t open = scratch_.visible.front();  // slots before it are visible to every query
    float* ignored = scratch_.sum;  // largest logits of the slots from `open` on are found after masking
    cpu::panel_logits(width_, keys_, 0, open, scratch_.panels, panels, length * width_, scratch_.logits, scratch_.top,
                      scratch_.widened);
    cpu::panel_logits(width_, keys_, open, length, scratch_.panels, panels, length * width_,
                      scratch_.logits + open * width_, ignored, scratch_.widened);
    cap(spec_, panels, length, width_, scratch_.logits, scratch_.top);
    for (std::int64_t p = 0; p < panels; ++p) {
      float* x = scratch_.logits + p * length * width_;
      float *top = scratch_.top + p * width_, *sum = scratch_.sum + p * width_, *weight = scratch_.weight + p * width_;
      for (std::int64_t lane = 0; lane < width_; ++lane) {
        const std::int64_t n = p * width_ + lane;
        const std::int32_t visible =
            n < count ? scratch_.visible[static_cast<std::size_t>(query_of(first + n))] : row_.length;
        for (std::int64_t t = open; t < length; ++t) {
          float& logit = x[t * width_ + lane];
          if (t >= visible)
            logit = -std::numeric_limits<float>::infinity();
          else if (!(logit <= top[lane]))
            top[lane] = logit;
        }
        if (visible == 0) top[lane] = 0;  // older than every remaining slot: it sees nothing
      }
      if (sinks_ == nullptr)
        cpu::panel_exp(width_, x, length, top, sum);
      else
        softmax_of_panel(width_, x, length, top, sum, [&](std::int64_t lane) {
          const std::int64_t n = p * width_ + lane;
          return n < count ? sinks_[(first + n) / window_.queries] : -std::numeric_limits<float>::infinity();
        });
      for (std::int64_t lane = 0; lane < width_; ++lane)
        weight[lane] = p * width_ + lane < count && sum[lane] != 0 ? 1.0F / sum[lane] : 0.0F;
    }
  }

  void weigh_queries(std::int64_t begin, std::int64_t end, std::span<const float> weights, float* of_lanes) const {
    const std::size_t skipped =
        weights.size() -
        static_cast<std::size_t>(window_.queries);  // a narrower window is the newest part of the widest
    for (std::int64_t n = begin; n < end; ++n)
      of_lanes[n - begin] *= weights[skipped + static_cast<std::size_t>(query_of(n))];
  }

  void add_newest(const float* x, std::int64_t begin, std::int64_t end, float* newest) const {
    float* share = scratch_.sum;  // free once the weights are known
    bool any = false;
    for (std::int64_t lane = 0; lane < width_; ++lane) {
      const bool counts = begin + lane < end && query_of(begin + lane) == window_.queries - 1;
      share[lane] =
          counts ? scratch_.weight[begin / width_ % kPanels * width_ + lane] / static_cast<float>(spec_.group()) : 0.0F;
      any |= counts;
    }
    if (any) cpu::panel_gather(width_, x, row_.length, share, newest);
  }

  /// On the suffix only strictly later queries count; finish() divides by their number.
  void add_suffix(const float* x, std::int64_t begin, std::int64_t end, float* usage) const {
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t lane = n - begin;
      const float weight = scratch_.weight[begin / width_ % kPanels * width_ + lane];
      const std::int32_t at = position(query_of(n));
      for (std::int32_t t = window_.history; t < row_.length && row_.positions[t] < at; ++t)
        usage[t] += product(x[t * width_ + lane], weight);
    }
  }

  void finish(float* usage, std::int64_t total) const {
    cpu::fold_lanes(width_, scratch_.usage, window_.history, usage);
    for (std::int32_t t = 0; t < window_.history; ++t) usage[t] /= static_cast<float>(total);
    std::int32_t later = window_.queries;  // window queries strictly later than slot t; positions ascend, so this falls
    for (std::int32_t t = window_.history; t < row_.length; ++t) {
      while (later > 0 && position(window_.queries - later) <= row_.positions[t]) --later;
      usage[t] = later > 0 ? usage[t] / static_cast<float>(later * spec_.group()) : 0.0F;
    }
  }

  const ModelSpec& spec_;
  const Row& row_;
  const QueryView& view_;
  RowWindow window_;
  Scratch& scratch_;
  cpu::Keys keys_;
  const float* sinks_;  ///< [G] null: none
  std::int64_t width_;
};

}  // namespace window_attention_detail

KVKEEP_INLINE std::vector<RowWindow> row_windows(const Evidence& evidence, const Limits& limits, std::int32_t window,
                                                 bool official) {
  std::vector<RowWindow> windows(evidence.table.rows.size());
  for (const RowGroup& group : evidence.table.groups) {
    for (std::int32_t h = 0; h < evidence.spec.kv_heads; ++h) {
      const auto r = static_cast<std::size_t>(group.first_row + h);
      windows[r] = window_of(evidence.table.rows[r], group.queries, limits.rows[r], window, official);
    }
  }
  return windows;
}

KVKEEP_INLINE std::int64_t window_attention_workspace(const ModelSpec& spec, std::int32_t slots, std::int32_t queries) {
  return cpu::PanelSizes(spec, slots, queries, {}).total() * static_cast<std::int64_t>(sizeof(float)) +
         queries * static_cast<std::int64_t>(sizeof(std::int32_t));
}

namespace window_attention_detail {

/// Reduces every row that has a window; the others get zeros.
inline void reduce_rows(const Evidence& evidence, std::span<const RowWindow> windows, const Targets& to) {
  const RowTable& table = evidence.table;
  KVKEEP_REQUIRE(is_scorable(table.key_dtype), "window_attention: keys are ", table.key_dtype,
                 "; allowed f32, f16, bf16 (other dtypes can be moved, not scored)");
  const cpu::WindowTurns turns(evidence, windows);
  std::int32_t slots = 0, queries = 0;
  for (std::size_t r = 0; r < windows.size(); ++r) {
    if (windows[r].queries == 0) continue;
    slots = std::max(slots, table.rows[r].length);
    queries = std::max(queries, windows[r].queries);
  }
  const cpu::PanelSizes sizes(evidence.spec, slots, queries, {.usage = to.usage != nullptr || to.sum != nullptr});
  const auto make = [&] { return Scratch(sizes, queries); };
  each_row(table, make, [&](std::size_t r, const Row& row, Scratch& scratch) {
    const std::size_t g = r / static_cast<std::size_t>(evidence.spec.kv_heads);
    const auto part = [&](float* flat) { return flat == nullptr ? nullptr : flat + row.first; };
    const Targets own{part(to.usage), part(to.newest), part(to.sum), to.weights};
    if (windows[r].queries > 0)
      return RowReduction(evidence, row, table.groups[g], windows[r], scratch).run(evidence, turns.of(g), own);
    for (float* out : {own.usage, own.newest, own.sum})
      if (out != nullptr) std::fill_n(out, row.length, 0.0F);
  });
}

}  // namespace window_attention_detail

KVKEEP_INLINE WindowAttention window_attention(const Evidence& evidence, std::vector<RowWindow> windows,
                                               WindowNeeds needs) {
  require_host("window_attention", evidence.table.device);
  WindowAttention out;
  out.windows = std::move(windows);
  const auto f32 = Dtype::f32;
  if (needs.usage) out.usage = empty({evidence.table.slots}, f32);
  if (needs.newest) out.newest = empty({evidence.table.slots}, f32);
  window_attention_detail::reduce_rows(evidence, out.windows,
                                       {.usage = needs.usage ? out.usage.data<float>() : nullptr,
                                        .newest = needs.newest ? out.newest.data<float>() : nullptr});
  return out;
}

KVKEEP_INLINE Tensor attention_sum(const Evidence& evidence, std::span<const RowWindow> windows,
                                   std::span<const float> weights) {
  require_host("attention_sum", evidence.table.device);
  for (const RowWindow& window : windows)
    KVKEEP_REQUIRE(weights.empty() || weights.size() >= static_cast<std::size_t>(window.queries),
                   "attention_sum: ", weights.size(), " weights for a window of ", window.queries,
                   "; allowed one per query");
  const Tensor out = empty({evidence.table.slots}, Dtype::f32);
  window_attention_detail::reduce_rows(evidence, windows, {.sum = out.data<float>(), .weights = weights});
  return out;
}

KVKEEP_INLINE ReadWindow read_window(const Evidence& evidence, const Limits& limits, const WindowAttention& seen,
                                     const WindowReading& reading) {
  using Kind = WindowReading::Kind;
  const std::vector<Row>& rows = evidence.table.rows;
  if (reading.kind == Kind::newest && seen.newest.defined()) return {seen.windows, clone(seen.newest)};
  ReadWindow read{row_windows(evidence, limits, reading.window, false), {}};
  if (reading.kind == Kind::sum) {
    const auto heads = static_cast<std::size_t>(evidence.spec.kv_heads);
    for (std::size_t r = 0; r < rows.size(); ++r)
      read.windows[r] = fresh_window_of(rows[r], evidence.table.groups[r / heads].queries, reading.window);
    read.attention = attention_sum(evidence, read.windows);
  } else if (reading.kind == Kind::history) {
    std::vector<RowWindow> windows = read.windows;
    std::vector<std::int32_t> first(reading.after_sinks ? rows.size() : 0);
    for (std::size_t r = 0; r < windows.size(); ++r) {
      windows[r] = windows[r].without_oldest(reading.history.newest_counts - 1);
      if (reading.after_sinks) first[r] = std::min(limits.rows[r].guarded.sinks, windows[r].history);
    }
    read.attention = history_attention(evidence, windows, reading.history, first);
  } else if (reading.kind == Kind::usage && seen.usage.defined() && seen.windows == read.windows) {
    read.attention = clone(seen.usage);
  } else {
    const bool newest = reading.kind == Kind::newest;
    WindowAttention own = window_attention(evidence, std::move(read.windows), {.usage = !newest, .newest = newest});
    read = {std::move(own.windows), newest ? own.newest : own.usage};
  }
  return read;
}
namespace history_attention_detail {

using cpu::kPanels;
using Scratch = cpu::PanelScratch;

/// Slots [first, end) of one row, how many queries look at them, and over how many slots from `first` on a softmax
/// goes.
struct HistorySpan {
  std::int32_t first = 0, end = 0, queries = 0, reach = 0;
  [[nodiscard]] std::int64_t slots() const { return end - first; }
};

/// `whole`: a softmax goes over all that a query sees.
inline HistorySpan span_of(const Row& row, const QueryView& queries, RowWindow window, std::int32_t first, bool whole) {
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
  HistoryReduction(const Evidence& evidence, const Row& row, const QueryView& queries, HistorySpan span,
                   HistoryOptions options, Scratch& scratch)
      : spec_(evidence.spec),
        sinks_(evidence.spec.sinks_of(row.layer, row.head)),
        heads_(evidence.spec.group()),
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
    window_attention_detail::cap(spec_, panels, span_.reach, width_, scratch_.logits, scratch_.top);
  }

  /// x = exp(x - top) of one panel, and scratch_.sum; sinks join. `top` may rise.
  template <class SinkOf>
  void exponentials(float* x, std::int64_t slots, float* top, const SinkOf& sink_of) {
    if (sinks_ == nullptr)
      cpu::panel_exp(width_, x, slots, top, scratch_.sum);
    else
      window_attention_detail::softmax_of_panel(width_, x, slots, top, scratch_.sum, sink_of);
  }

  /// Softmax of one panel x, then added to the usage; `query_of(lane)` is -1 for lanes without a query, `sink_of(lane)`
  /// the sink logit, if there is any.
  template <class QueryOf, class SinkOf>
  void add_softmax(float* x, float* top, const QueryOf& query_of, const SinkOf& sink_of) {
    if (options_.window == WindowReduce::worst) return add_worst(x, query_of, sink_of);
    exponentials(x, span_.slots(), top, sink_of);
    for (std::int64_t lane = 0; lane < width_; ++lane) {
      const std::int64_t query = query_of(lane);
      scratch_.weight[lane] = query >= 0 ? counts(query) / scratch_.sum[lane] : 0.0F;
    }
    cpu::panel_weigh(width_, x, span_.slots(), scratch_.weight, scratch_.usage);
  }

  /// Softmax of one panel over what each query sees. Its shares in the history, pooled, keep their sum; the largest of
  /// them and the usage so far, in its first lane.
  template <class QueryOf, class SinkOf>
  void add_worst(float* x, const QueryOf& query_of, const SinkOf& sink_of) {
    const std::int64_t slots = span_.slots(), vector = cpu::panel_vector(width_), reach = options_.pool / 2;
    for (std::int64_t lane = 0; lane < width_; ++lane)
      if (const std::int64_t query = query_of(lane); query >= 0)
        for (std::int64_t t = sees_[static_cast<std::size_t>(query)]; t < span_.reach; ++t)
          x[t * width_ + lane] = -std::numeric_limits<float>::infinity();
    float* const top = scratch_.weight;
    std::copy_n(x, width_, top);
    for (std::int64_t t = 1; t < span_.reach; ++t)
      for (std::int64_t lane = 0; lane < width_; ++lane) top[lane] = std::max(top[lane], x[t * width_ + lane]);
    exponentials(x, span_.reach, top, sink_of);

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
      for (std::int64_t p = 0; p < panels; ++p) {
        const auto of_lane = [&](std::int64_t lane) { return first + p * width_ + lane; };
        add_softmax(
            scratch_.logits + p * span_.reach * width_, scratch_.top + p * width_,
            [&](std::int64_t lane) { return of_lane(lane) < total ? of_lane(lane) % span_.queries : -1; },
            [&](std::int64_t lane) { return sinks_[std::min(of_lane(lane), total - 1) / span_.queries]; });
      }
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
      add_softmax(
          scratch_.largest, scratch_.peak, [&](std::int64_t lane) { return lane < queries ? first + lane : -1; },
          [&](std::int64_t) { return *std::max_element(sinks_, sinks_ + heads_); });
    }
  }

  const ModelSpec& spec_;
  const float* sinks_;  ///< [G] null: none
  std::int64_t heads_, dim_;
  HistorySpan span_;
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
  std::vector<history_attention_detail::HistorySpan> spans(table.rows.size());
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
