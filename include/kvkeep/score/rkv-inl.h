// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of rkv.h: compiled by src/score, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/score/pool.h"
#include "kvkeep/score/rkv.h"
#include "kvkeep/simd/key_lanes.h"
#include "kvkeep/simd/similar_lanes.h"

namespace kvkeep {
namespace rkv_detail {

/// The buffers of one thread, parts of one allocation.
class Scratch {
 public:
  /// A null base only finds the size.
  Scratch(std::byte* base, std::int64_t length, std::int64_t dim) : base_(base) {
    sum = take<double>(dim);
    similar.spared = take<double>(length);
    inverse = take<float>(length);
    similar.open = take<std::int32_t>(length);
    similar.late = take<std::int32_t>(length);
    similar.late_below = take<std::int32_t>(length);
    similar.matched = take<std::uint8_t>(length);
    direction = take<float>(dim);
    similar.panel = take<float>(dim * cpu::similar_width());
    similar.widened = take<float>(6 * dim);
    similar.step = take<float>(length);
    similar.reach = take<float>(length);
    similar.coarse = take<std::uint8_t>(length * cpu::coarse_dim(dim));
    similar.coarse_panel = take<std::uint32_t>(cpu::coarse_dim(dim) / 4 * cpu::similar_width());
  }

  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

  double* sum;       ///< [dim]
  float* inverse;    ///< [length] 1 / (norm + floor)
  float* direction;  ///< [dim]
  cpu::SimilarWork similar;

 private:
  template <class T>
  T* take(std::int64_t count) {
    constexpr std::int64_t kLine = 64;
    T* part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (count * static_cast<std::int64_t>(sizeof(T)) + kLine - 1) / kLine * kLine;
    return part;
  }
  std::byte* base_;
  std::int64_t bytes_ = 0;
};

/// Writes the redundancy of the keys [0, n) of a row, before its softmax, to out[0, n).
inline void column_means(const cpu::Keys& keys, std::int64_t n, const RkvOptions& options, const Scratch& scratch,
                         float* out) {
  float* inverse = scratch.inverse;
  std::fill_n(scratch.sum, keys.dim, 0.0);
  for (std::int64_t t = 0; t < n; t += cpu::kKeyBlock) {
    const std::int64_t end = std::min(t + cpu::kKeyBlock, n);
    cpu::key_norms(keys, t, end, inverse + t);
    for (std::int64_t i = t; i < end; ++i) {
      const float norm = inverse[i];
      inverse[i] = 1.0F / (norm + Rkv::kFloor);
      const float own = norm * inverse[i];
      out[i] = own * own;
    }
    cpu::add_weighted_keys(keys, t, end, inverse + t, scratch.sum);
  }
  std::transform(scratch.sum, scratch.sum + keys.dim, scratch.direction,
                 [](double x) { return static_cast<float>(x); });
  float dots[cpu::kKeyBlock];
  for (std::int64_t t = 0; t < n; t += cpu::kKeyBlock) {
    const std::int64_t end = std::min(t + cpu::kKeyBlock, n);
    cpu::key_dots(keys, t, end, scratch.direction, dots);
    for (std::int64_t i = t; i < end; ++i) out[i] = product(dots[i - t], inverse[i]) - out[i];
  }

  cpu::find_similar(keys, n, inverse, static_cast<float>(options.similarity), scratch.similar);
  double* spared = scratch.similar.spared;
  if (options.no_similar == RkvOptions::NoSimilar::first) {
    cpu::widen(keys.slots.at(0), keys.dtype, keys.dim, scratch.direction);
    for (std::int64_t i = 1; i < n; ++i) {
      if (scratch.similar.matched[i] != 0) continue;
      cpu::key_dots(keys, i, i + 1, scratch.direction, dots);
      spared[0] += static_cast<double>(dots[0] * (inverse[i] * inverse[0]));
    }
  }
  for (std::int64_t i = 0; i < n; ++i)
    out[i] = static_cast<float>((static_cast<double>(out[i]) - spared[i]) / static_cast<double>(n));
}

/// In place. Any NaN makes all NaN.
inline void softmax(float* x, std::int64_t n) {
  const float top = *std::max_element(x, x + n);
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i] = std::exp(x[i] - top));
  const auto share = static_cast<float>(1 / sum);
  std::transform(x, x + n, x, [share](float e) { return e * share; });
}

}  // namespace rkv_detail

KVKEEP_INLINE std::int64_t Rkv::workspace_bytes(std::int64_t length, std::int64_t dim) {
  return rkv_detail::Scratch(nullptr, length, dim).bytes();
}

KVKEEP_INLINE Scores Rkv::score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const {
  require_host("rkv", evidence.table.device);
  const RowTable& table = evidence.table;
  const std::int64_t dim = evidence.spec.key_dim;
  with_dtype("rkv", table.key_dtype, [](auto) {});
  const std::vector<RowWindow> windows = row_windows(evidence, limits, options_.window, false);
  const Tensor attention = history_attention(evidence, windows, {.group = options_.group});
  Scores scores{empty({table.slots}, Dtype::f32)};
  const float* attended = attention.data<float>();
  float* out = scores.data.data<float>();
  const auto lambda = static_cast<float>(options_.lambda);
  parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t longest = 0;
    for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r)
      if (windows[r].queries > 0) longest = std::max<std::int64_t>(longest, table.rows[r].length);
    const Tensor room = empty({workspace_bytes(longest, dim)}, Dtype::u8);
    const rkv_detail::Scratch scratch(reinterpret_cast<std::byte*>(room.bytes()), longest, dim);
    for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
      const Row& row = table.rows[r];
      float* g = out + row.first;
      if (windows[r].queries == 0) {
        std::iota(g, g + row.length, 0.0F);
        continue;
      }
      const std::int32_t history = windows[r].history,
                         domain = options_.redundancy == RkvOptions::Redundancy::all ? row.length : history;
      rkv_detail::column_means({row.keys, table.key_dtype, dim}, domain, options_, scratch, g);
      rkv_detail::softmax(g, domain);
      float* pooled = scratch.inverse;  // no longer read
      pool_max(attended + row.first, history, options_.pool, pooled);
      for (std::int32_t t = 0; t < history; ++t) g[t] = mix(lambda, pooled[t], g[t]);
      std::fill(g + history, g + row.length, 0.0F);
    }
  });
  return scores;
}

}  // namespace kvkeep
