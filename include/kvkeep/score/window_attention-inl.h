#pragma once
// Bodies of window_attention.h: compiled by src/score, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kvkeep/core/device.h"
#include "kvkeep/core/each_row.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/score/panel_scratch.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/score/window_queries.h"
#include "kvkeep/simd/attention_lanes.h"

namespace kvkeep {
namespace window_attention_detail {

using cpu::kPanels;

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
      cpu::panel_exp(width_, x, length, top, sum);
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

}  // namespace kvkeep
