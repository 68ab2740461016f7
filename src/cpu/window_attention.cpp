#include "kvkeep/score/window_attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kvkeep/core/dispatch.h"
#include "attention_lanes.h"
#include "window_queries.h"

namespace kvkeep {
namespace {

constexpr std::int64_t kPanels = 2;  ///< panels that share one reading of a key

/// Buffers of one thread.
struct Scratch {
  std::vector<float> queries;          ///< [G * W, D]
  std::vector<float> panels;           ///< [kPanels, D, width]
  std::vector<float> logits;           ///< [kPanels, T, width]
  std::vector<float> usage;            ///< [T, width / 2]
  std::vector<float> widened;          ///< [6, D]
  std::vector<float> top, sum, weight; ///< [kPanels, width]
  std::vector<std::int32_t> visible;   ///< [W] slots that each window query sees
};

/// One row while its window is reduced.
class RowReduction {
 public:
  RowReduction(const Evidence& evidence, const Row& row, const RowGroup& group, RowWindow window, Scratch& scratch)
      : spec_(evidence.spec), row_(row), view_(group.queries), window_(window), scratch_(scratch), keys_{row.keys, evidence.table.key_dtype, evidence.spec.key_dim} {}

  /// `usage` and `newest` are the row's own parts of the result, or null.
  void run(const Evidence& evidence, const cpu::Turns& turns, float* usage, float* newest) {
    scratch_.queries.resize(static_cast<std::size_t>(std::int64_t{spec_.group()} * window_.queries * spec_.key_dim));
    cpu::gather_queries(evidence, view_, row_.head, window_.queries, turns, scratch_.queries.data());
    count_visible();
    const std::int64_t total = std::int64_t{spec_.group()} * window_.queries, tile = kPanels * width_;
    if (usage != nullptr) {
      scratch_.usage.assign(static_cast<std::size_t>(row_.length * width_ / 2), 0.0F);
      std::fill_n(usage, row_.length, 0.0F);
    }
    if (newest != nullptr) std::fill_n(newest, row_.length, 0.0F);
    for (std::int64_t first = 0; first < total; first += tile) {
      const std::int64_t queries = std::min(tile, total - first), panels = (queries + width_ - 1) / width_;
      probabilities(first, queries, panels);
      for (std::int64_t p = 0; p < panels; ++p) {
        const float* x = scratch_.logits.data() + p * row_.length * width_;
        const std::int64_t begin = first + p * width_, end = std::min(begin + width_, total);
        if (newest != nullptr) add_newest(x, begin, end, newest);
        if (usage == nullptr) continue;
        add_suffix(x, begin, end, usage);
        cpu::panel_weigh(x, window_.history, scratch_.weight.data() + p * width_, scratch_.usage.data());
      }
    }
    if (usage != nullptr) finish(usage, total);
  }

 private:
  [[nodiscard]] std::int32_t query_of(std::int64_t n) const { return static_cast<std::int32_t>(n % window_.queries); }  ///< index in the window of the n-th row of the product
  [[nodiscard]] std::int32_t position(std::int32_t i) const { return view_.position(view_.count - window_.queries + i); }

  void count_visible() {
    scratch_.visible.clear();
    for (std::int32_t i = 0; i < window_.queries; ++i)
      scratch_.visible.push_back(static_cast<std::int32_t>(std::upper_bound(row_.positions, row_.positions + row_.length, position(i)) - row_.positions));
  }

  /// Turns scratch.logits into exp(logit - max) and scratch.weight into 1 / sum for queries [first, first + count).
  void probabilities(std::int64_t first, std::int64_t count, std::int64_t panels) {
    const std::int64_t dim = spec_.key_dim, length = row_.length;
    scratch_.panels.assign(static_cast<std::size_t>(panels * dim * width_), 0.0F);
    for (std::int64_t n = 0; n < count; ++n)
      for (std::int64_t d = 0; d < dim; ++d)
        scratch_.panels[static_cast<std::size_t>((n / width_ * dim + d) * width_ + n % width_)] = scratch_.queries[static_cast<std::size_t>((first + n) * dim + d)];
    scratch_.logits.resize(static_cast<std::size_t>(kPanels * length * width_));
    scratch_.widened.resize(static_cast<std::size_t>(6 * dim));
    scratch_.top.assign(static_cast<std::size_t>(kPanels * width_), -std::numeric_limits<float>::infinity());
    scratch_.sum.resize(scratch_.top.size());
    scratch_.weight.resize(scratch_.top.size());

    const std::int64_t open = scratch_.visible.front();  // slots before it are visible to every query
    std::vector<float>& ignored = scratch_.sum;          // largest logits of the slots behind it are taken after masking
    cpu::panel_logits(keys_, 0, open, scratch_.panels.data(), panels, length * width_, scratch_.logits.data(), scratch_.top.data(), scratch_.widened.data());
    cpu::panel_logits(keys_, open, length, scratch_.panels.data(), panels, length * width_, scratch_.logits.data() + open * width_, ignored.data(),
                      scratch_.widened.data());
    for (std::int64_t p = 0; p < panels; ++p) {
      float* x = scratch_.logits.data() + p * length * width_;
      float *top = scratch_.top.data() + p * width_, *sum = scratch_.sum.data() + p * width_, *weight = scratch_.weight.data() + p * width_;
      for (std::int64_t lane = 0; lane < width_; ++lane) {
        const std::int64_t n = p * width_ + lane;
        const std::int32_t visible = n < count ? scratch_.visible[static_cast<std::size_t>(query_of(first + n))] : row_.length;
        for (std::int64_t t = open; t < length; ++t) {
          float& logit = x[t * width_ + lane];
          if (t >= visible) logit = -std::numeric_limits<float>::infinity();
          else if (!(logit <= top[lane])) top[lane] = logit;
        }
        if (visible == 0) top[lane] = 0;  // older than every slot that is left: it sees nothing
      }
      cpu::panel_exp(x, length, top, sum);
      for (std::int64_t lane = 0; lane < width_; ++lane) weight[lane] = p * width_ + lane < count && sum[lane] != 0 ? 1.0F / sum[lane] : 0.0F;
    }
  }

  void add_newest(const float* x, std::int64_t begin, std::int64_t end, float* newest) const {
    for (std::int64_t n = begin; n < end; ++n) {
      if (query_of(n) != window_.queries - 1) continue;
      const std::int64_t lane = n - begin;
      const float weight = scratch_.weight[static_cast<std::size_t>((begin / width_ % kPanels) * width_ + lane)] / static_cast<float>(spec_.group());
      for (std::int32_t t = 0; t < row_.length; ++t) newest[t] += x[t * width_ + lane] * weight;
    }
  }

  /// On the suffix only strictly later queries count; finish() divides by their number.
  void add_suffix(const float* x, std::int64_t begin, std::int64_t end, float* usage) const {
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t lane = n - begin;
      const float weight = scratch_.weight[static_cast<std::size_t>((begin / width_ % kPanels) * width_ + lane)];
      const std::int32_t at = position(query_of(n));
      for (std::int32_t t = window_.history; t < row_.length && row_.positions[t] < at; ++t) usage[t] += x[t * width_ + lane] * weight;
    }
  }

  void finish(float* usage, std::int64_t total) const {
    cpu::fold_lanes(scratch_.usage.data(), window_.history, usage);
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
  std::int64_t width_ = cpu::panel_width();
};

}  // namespace

std::vector<RowWindow> row_windows(const Evidence& evidence, const Limits& limits, std::int32_t window, bool official) {
  std::vector<RowWindow> windows(evidence.table.rows.size());
  for (const RowGroup& group : evidence.table.groups) {
    const std::int32_t seen = group.queries.count;
    for (std::int32_t h = 0; h < evidence.spec.kv_heads; ++h) {
      const auto r = static_cast<std::size_t>(group.first_row + h);
      const Row& row = evidence.table.rows[r];
      const std::int32_t fits = std::min({window, official ? seen - 1 : seen, row.length - 1, limits.rows[r].budget});
      if (!limits.rows[r].due || seen == 0 || row.length == 0 || (fits < 1 && !official)) {
        windows[r] = {0, row.length};
      } else if (official) {
        const std::int32_t queries = std::max(1, fits);
        windows[r] = {queries, std::max(0, row.length - queries)};
      } else {
        const std::int32_t oldest = group.queries.position(seen - fits);
        windows[r] = {fits, static_cast<std::int32_t>(std::lower_bound(row.positions, row.positions + row.length, oldest) - row.positions)};
      }
    }
  }
  return windows;
}

WindowAttention window_attention(const Evidence& evidence, std::vector<RowWindow> windows, WindowNeeds needs) {
  return dispatch("window_attention", evidence.table.device, [&] {
    const RowTable& table = evidence.table;
    require(is_scorable(table.key_dtype), "window_attention: keys are ", c10::toString(table.key_dtype), "; allowed f32, f16, bf16 (other rows can be moved, not scored)");
    WindowAttention out;
    out.windows = std::move(windows);
    const auto f32 = at::TensorOptions().dtype(kFloat32);
    if (needs.usage) out.usage = at::empty({table.slots}, f32);
    if (needs.newest) out.newest = at::empty({table.slots}, f32);
    float* usage = needs.usage ? out.usage.data_ptr<float>() : nullptr;
    float* newest = needs.newest ? out.newest.data_ptr<float>() : nullptr;

    const std::int32_t heads = evidence.spec.kv_heads;
    const cpu::WindowTurns turns(evidence, out.windows);
    at::parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      Scratch scratch;
      for (std::int64_t r = begin; r < end; ++r) {
        const Row& row = table.rows[static_cast<std::size_t>(r)];
        const auto g = static_cast<std::size_t>(r / heads);
        const RowWindow window = out.windows[static_cast<std::size_t>(r)];
        float* row_usage = usage == nullptr ? nullptr : usage + row.first;
        float* row_newest = newest == nullptr ? nullptr : newest + row.first;
        if (window.queries == 0) {
          if (row_usage != nullptr) std::fill_n(row_usage, row.length, 0.0F);
          if (row_newest != nullptr) std::fill_n(row_newest, row.length, 0.0F);
          continue;
        }
        RowReduction(evidence, row, table.groups[g], window, scratch).run(evidence, turns.of(g), row_usage, row_newest);
      }
    });
    return out;
  });
}

}  // namespace kvkeep
