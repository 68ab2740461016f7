#include "kvkeep/score/window_attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <utility>

#include "kvkeep/core/dispatch.h"
#include "softmax_lanes.h"

namespace kvkeep {
namespace {

constexpr std::int64_t kQueryTile = 64;   ///< query rows a product: their logits stay in the second-level cache
constexpr std::int64_t kKeyTile = 1024;   ///< slots that are widened to fp32 at a time

/// cos and sin of every window query of one sequence.
struct Turns {
  std::int32_t window = 0;
  std::vector<float> cosines, sines;  ///< [window, F], newest query last
};

/// Buffers of one thread.
struct Scratch {
  std::vector<float> queries, logits, keys;
};

Turns turns_of(const Evidence& evidence, const QueryView& queries, std::int32_t window) {
  Turns turns;
  const auto pairs = evidence.spec.rope.inv_freq.size();
  if (evidence.basis == QueryBasis::post_rope || pairs == 0) return turns;
  turns.window = window;
  turns.cosines.resize(static_cast<std::size_t>(window) * pairs);
  turns.sines.resize(turns.cosines.size());
  for (std::int32_t i = 0; i < window; ++i)
    rope_at(evidence.spec.rope, queries.position(queries.count - window + i), turns.cosines.data() + static_cast<std::size_t>(i) * pairs,
            turns.sines.data() + static_cast<std::size_t>(i) * pairs);
  return turns;
}

/// Queries of the group of `head`, [G * W, D] f32, rotated and multiplied by the softmax scale.
void gather_queries(const Evidence& evidence, const QueryView& view, std::int32_t head, std::int32_t window, const Turns& turns, std::vector<float>& out) {
  const ModelSpec& spec = evidence.spec;
  const auto dim = static_cast<std::size_t>(spec.key_dim);
  const auto pairs = static_cast<std::int64_t>(spec.rope.inv_freq.size());
  const auto scale = static_cast<float>(spec.scale());
  out.resize(static_cast<std::size_t>(spec.group()) * static_cast<std::size_t>(window) * dim);
  with_dtype("window_attention", view.dtype, [&](auto type) {
    float* q = out.data();
    const std::int64_t skip = turns.window - window;
    for (std::int32_t g = 0; g < spec.group(); ++g)
      for (std::int32_t i = 0; i < window; ++i, q += dim) {
        const auto* from = reinterpret_cast<const decltype(type)*>(view.at(view.count - window + i, head * spec.group() + g));
        for (std::size_t d = 0; d < dim; ++d) q[d] = static_cast<float>(from[d]);
        if (!turns.cosines.empty())
          rope_rotate(spec.rope.style, pairs, turns.cosines.data() + (skip + i) * pairs, turns.sines.data() + (skip + i) * pairs, q);
        for (std::size_t d = 0; d < dim; ++d) q[d] *= scale;
      }
  });
}

/// logits [rows, length] = queries [rows, D] * keys^T, through LibTorch's matrix product; 16-bit keys are widened a tile at a time.
void product(const Row& row, ScalarType dtype, std::int64_t dim, const float* queries, std::int64_t rows, Scratch& scratch) {
  const auto f32 = at::TensorOptions().dtype(kFloat32);
  scratch.logits.resize(static_cast<std::size_t>(kQueryTile * row.length));
  const Tensor q = at::from_blob(const_cast<float*>(queries), {rows, dim}, f32);
  const std::int64_t pitch = row.keys.stride / static_cast<std::int64_t>(sizeof(float));
  const bool direct = dtype == kFloat32 && pitch >= dim && row.keys.stride % static_cast<std::int64_t>(sizeof(float)) == 0;
  const std::int64_t tile = direct ? row.length : kKeyTile;
  for (std::int64_t from = 0; from < row.length; from += tile) {
    const std::int64_t n = std::min<std::int64_t>(tile, row.length - from);
    Tensor keys;
    if (direct) {
      keys = at::from_blob(row.keys.at(from), {n, dim}, {pitch, 1}, f32);
    } else {
      scratch.keys.resize(static_cast<std::size_t>(kKeyTile * dim));
      for (std::int64_t t = 0; t < n; ++t) cpu::widen(row.keys.at(from + t), dtype, dim, scratch.keys.data() + t * dim);
      keys = at::from_blob(scratch.keys.data(), {n, dim}, f32);
    }
    Tensor out = at::from_blob(scratch.logits.data() + from, {rows, n}, {row.length, 1}, f32);
    at::mm_out(out, q, keys.t());
  }
}

/// One row's reductions. `usage` and `newest` are the row's own part of the result, or null.
void reduce_row(const Evidence& evidence, const Row& row, const RowGroup& group, RowWindow window, const Turns& turns, Scratch& scratch, float* usage,
                float* newest) {
  const ModelSpec& spec = evidence.spec;
  const QueryView& view = group.queries;
  const std::int32_t queries = window.queries, length = row.length;
  const std::int32_t total = spec.group() * queries;
  const auto per_query = 1.0F / static_cast<float>(total), per_head = 1.0F / static_cast<float>(spec.group());
  gather_queries(evidence, view, row.head, queries, turns, scratch.queries);
  if (usage != nullptr) std::fill_n(usage, length, 0.0F);
  if (newest != nullptr) std::fill_n(newest, length, 0.0F);

  const float* pending = nullptr;  // history sums take two queries at a time
  float pending_weight = 0;
  for (std::int32_t first = 0; first < total; first += kQueryTile) {
    const std::int32_t rows = std::min<std::int32_t>(kQueryTile, total - first);
    product(row, evidence.table.key_dtype, spec.key_dim, scratch.queries.data() + static_cast<std::int64_t>(first) * spec.key_dim, rows, scratch);
    for (std::int32_t r = 0; r < rows; ++r) {
      const std::int32_t i = (first + r) % queries;
      const std::int32_t at = view.position(view.count - queries + i);
      const auto visible = static_cast<std::int32_t>(std::upper_bound(row.positions, row.positions + length, at) - row.positions);
      if (visible == 0) continue;  // older than every slot that is left: it sees nothing
      float* p = scratch.logits.data() + static_cast<std::int64_t>(r) * length;
      const float weight = 1.0F / cpu::exp_shifted(p, visible);
      if (newest != nullptr && i == queries - 1) cpu::add_scaled(newest, p, weight * per_head, nullptr, 0, visible);
      if (usage == nullptr) continue;
      if (visible < window.history) std::fill(p + visible, p + window.history, 0.0F);  // official windows can reach behind an event
      const auto earlier = static_cast<std::int32_t>(std::lower_bound(row.positions, row.positions + length, at) - row.positions);
      if (earlier > window.history) cpu::add_scaled(usage + window.history, p + window.history, weight, nullptr, 0, earlier - window.history);
      if (pending == nullptr) {
        pending = p;
        pending_weight = weight * per_query;
      } else {
        cpu::add_scaled(usage, pending, pending_weight, p, weight * per_query, window.history);
        pending = nullptr;
      }
    }
    if (pending != nullptr) cpu::add_scaled(usage, pending, pending_weight, nullptr, 0, window.history);
    pending = nullptr;
  }
  if (usage == nullptr) return;
  std::int32_t later = queries;  // window queries strictly later than slot t; positions ascend, so this falls
  const std::int32_t oldest = view.count - queries;
  for (std::int32_t t = window.history; t < length; ++t) {
    while (later > 0 && view.position(oldest + queries - later) <= row.positions[t]) --later;
    usage[t] = later > 0 ? usage[t] / static_cast<float>(later * spec.group()) : 0.0F;
  }
}

}  // namespace

std::vector<RowWindow> row_windows(const Evidence& evidence, std::int32_t window, std::int32_t budget, bool official) {
  std::vector<RowWindow> windows(evidence.table.rows.size());
  for (const RowGroup& group : evidence.table.groups) {
    const std::int32_t seen = group.queries.count;
    for (std::int32_t h = 0; h < evidence.spec.kv_heads; ++h) {
      const auto r = static_cast<std::size_t>(group.first_row + h);
      const Row& row = evidence.table.rows[r];
      const std::int32_t fits = std::min({window, official ? seen - 1 : seen, row.length - 1, budget});
      if (seen == 0 || row.length == 0 || (fits < 1 && !official)) {
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
    WindowAttention out;
    out.windows = std::move(windows);
    const auto f32 = at::TensorOptions().dtype(kFloat32);
    if (needs.usage) out.usage = at::empty({table.slots}, f32);
    if (needs.newest) out.newest = at::empty({table.slots}, f32);
    float* usage = needs.usage ? out.usage.data_ptr<float>() : nullptr;
    float* newest = needs.newest ? out.newest.data_ptr<float>() : nullptr;

    const std::int32_t heads = evidence.spec.kv_heads;
    std::vector<Turns> turns(table.groups.size());  // a sequence's queries stand at the same positions in every layer
    std::vector<std::size_t> turns_index(table.groups.size());
    for (std::size_t g = 0; g < table.groups.size(); ++g) {
      std::int32_t widest = 0;
      for (std::int32_t h = 0; h < heads; ++h) widest = std::max(widest, out.windows[static_cast<std::size_t>(table.groups[g].first_row + h)].queries);
      turns_index[g] = g;
      for (std::size_t e = 0; e < g; ++e)
        if (table.groups[e].sequence == table.groups[g].sequence) {
          turns_index[g] = turns_index[e];
          break;
        }
      Turns& known = turns[turns_index[g]];
      if (known.window < widest) known = turns_of(evidence, table.groups[g].queries, widest);
    }
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
        reduce_row(evidence, row, table.groups[g], window, turns[turns_index[g]], scratch, row_usage, row_newest);
      }
    });
    return out;
  });
}

}  // namespace kvkeep
