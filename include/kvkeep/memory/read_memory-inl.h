#pragma once
// Bodies of read_memory.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/memory/read_memory.h"
#include "kvkeep/memory/row_zoom.h"

namespace kvkeep {
namespace read_memory_detail {

/// Softmaxes of the heads of a group, starting at head `head` of query `query`.
inline cpu::OpenHeads open_at(OpenAttention& open, std::int64_t query, std::int64_t head) {
  const std::int64_t at = query * open.top.size(1) + head, dim = open.out.size(2);
  return {open.top.data<float>() + at, open.sum.data<float>() + at, open.out.data<float>() + at * dim};
}

}  // namespace read_memory_detail

KVKEEP_INLINE ReadCounts& ReadCounts::operator+=(const ReadCounts& other) {
  queries += other.queries, zooms += other.zooms, tokens += other.tokens, bytes += other.bytes;
  unmet += other.unmet, resident += other.resident;
  return *this;
}

KVKEEP_INLINE ReadCounts read_memory(OpenAttention& open, std::span<const MemoryRow> rows, const Tensor& queries,
                                     double scale, const Reading& reading,
                                     std::vector<std::vector<std::int32_t>>* opened, std::span<ReadCounts> by_head) {
  const auto kv_heads = static_cast<std::int64_t>(rows.size());
  KVKEEP_REQUIRE(kv_heads > 0, "memory: no rows; allowed one per KV head");
  const std::int64_t dim = rows.front().spans->dim();
  KVKEEP_REQUIRE(queries.dim() == 3 && queries.device().is_cpu() && is_scorable(queries.dtype()) &&
                     queries.size(1) >= kv_heads && queries.size(1) % kv_heads == 0 && queries.size(2) == dim,
                 "memory: queries have the wrong shape, dtype or device; allowed f32, f16 or bf16 [n, Hq, ", dim,
                 "] on the CPU with Hq a multiple of ", kv_heads);
  KVKEEP_REQUIRE(open.out.sizes() == queries.sizes() && open.out.is_contiguous() && open.top.is_contiguous() &&
                     open.sum.is_contiguous(),
                 "memory: softmaxes do not match the queries; allowed f32 [n, Hq, D], contiguous");
  KVKEEP_REQUIRE(reading.router == nullptr ||
                     (reading.router->query_heads() == queries.size(1) && reading.router->key_dim() == dim),
                 "memory: the router is for other heads; allowed one for ", queries.size(1), " heads of ", dim);
  const std::int64_t n = queries.size(0), group = queries.size(1) / kv_heads;
  const Tensor q = as<float>(queries);
  if (opened != nullptr) opened->assign(rows.size(), {});
  std::vector<ReadCounts> counts(static_cast<std::size_t>(n * kv_heads));
  parallel_for(0, n * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    cpu::RowReader reader(reading, group, static_cast<float>(scale));
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t kv = task % kv_heads;
      const MemoryRow& row = rows[static_cast<std::size_t>(kv)];
      if (row.spans->size() == 0) continue;
      const cpu::OpenHeads softmaxes = read_memory_detail::open_at(open, task / kv_heads, kv * group);
      counts[static_cast<std::size_t>(task)] =
          reader.read(row, kv * group, q.data<float>() + task * group * dim, softmaxes);
      if (opened != nullptr && task / kv_heads == n - 1) (*opened)[static_cast<std::size_t>(kv)] = reader.opened();
    }
  });
  for (std::size_t task = 0; !by_head.empty() && task < counts.size(); ++task)
    by_head[task % rows.size()] += counts[task];
  return std::accumulate(counts.begin(), counts.end(), ReadCounts{});
}

}  // namespace kvkeep
