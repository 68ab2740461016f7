// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Small events for Expected Attention.

#include <cmath>
#include <numeric>
#include <vector>

#include "arrays.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/score/expected.h"

namespace kvkeep::expected_test {

using testing::Array;
using testing::normals;

/// One layer and sequence, one KV head; what stands in it is given.
struct Small {
  ModelSpec spec;
  Array keys, values, queries;  ///< [1, Hkv, T, D], [1, Hkv, T, Dv], [N, Hq, D]
  std::int32_t next = 0;
  QueryBasis basis = QueryBasis::pre_rope;

  Array score(const ExpectedOptions& options) const {
    const SequenceId id = 0;
    auto length = static_cast<std::int32_t>(keys.size(2));
    const std::int32_t zero = 0, count = static_cast<std::int32_t>(queries.size(0));
    const std::vector<LayerKv> cache{DenseKv{keys, values}};
    RowTable table = make_rows(spec, cache, {{&id, 1}, {{&length, 1}}}, {&zero, 1}, {&zero, 1});
    std::vector<std::int32_t> positions(static_cast<std::size_t>(length)),
        query_positions(static_cast<std::size_t>(count));
    std::iota(positions.begin(), positions.end(), 0);
    std::iota(query_positions.begin(), query_positions.end(), next - count);
    for (Row& row : table.rows) row.positions = positions.data();
    const auto bytes = static_cast<std::int64_t>(queries.element_size());
    table.groups[0].queries = {.data = static_cast<const std::byte*>(queries.bytes()),
                               .dtype = queries.dtype(),
                               .token_stride = queries.stride(0) * bytes,
                               .head_stride = queries.stride(1) * bytes,
                               .positions = query_positions.data(),
                               .ring = count,
                               .begin = 0,
                               .count = count};
    table.groups[0].next_position = next;
    Limits limits = even_limits(table, 1);
    for (RowLimit& row : limits.rows) row.due = true;
    WindowAttention seen;
    return Expected(options).score({spec, table, basis}, limits, seen).data;
  }
};

inline Small random_small(std::int32_t group, std::int32_t dim, std::int64_t slots, std::int64_t queries, Dtype dtype,
                          double size = 1) {
  oracle::Random random(static_cast<std::uint64_t>(queries * 1000 + dim));
  Small s{.spec = {.query_heads = group,
                   .kv_heads = 1,
                   .key_dim = dim,
                   .value_dim = dim,
                   .softmax_scale = 0,
                   .rope = {},
                   .layers = std::vector<LayerSpec>(1)},
          .keys = normals(random, {1, 1, slots, dim}).to(dtype),
          .values = normals(random, {1, 1, slots, dim}).to(dtype),
          .queries = normals(random, {queries, group, dim}, size).to(dtype),
          .next = static_cast<std::int32_t>(slots)};
  for (std::int32_t f = 0; f < dim / 2; ++f) s.spec.rope.inv_freq.push_back(std::pow(1e4, -2.0 * f / dim));
  if (dim < 2) s.spec.rope = RopeSpec::absent();
  return s;
}

inline bool close(const Array& a, const Array& b, double relative, double absolute) {
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const double x = static_cast<double>(a.data<float>()[i]), y = static_cast<double>(b.data<float>()[i]);
    if (!(std::abs(x - y) <= absolute + relative * std::abs(y))) return false;
  }
  return a.sizes() == b.sizes();
}

}  // namespace kvkeep::expected_test
