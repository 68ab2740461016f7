// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Rows of an event for the kernels' benches, and the CPU's scores for a sample of them.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "evidence.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/torch.h"
#include "machine.h"

namespace kvkeep::cuda {

inline std::vector<std::uint16_t> bf16_noise(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> noise(count);
  for (std::uint16_t& x : noise) x = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(random)) >> 16);
  return noise;
}

/// Fills `elements` bf16 numbers from `to` on with noise.
inline void fill_with_noise(std::byte* to, std::size_t elements) {
  static const std::vector<std::uint16_t> noise = bf16_noise((std::size_t{1} << 20) + 7, 2);
  fill_with(to, elements * 2, noise.data(), noise.size() * 2);
}

/// Rows whose answers are checked: the first, the last, one in between.
inline std::vector<std::int32_t> sample_of(std::int32_t count) { return {0, count / 2, count - 1}; }

/// Keeps the newest 32 and the oldest 4.
inline constexpr Protected kGuarded{4, 32};

/// All rows of an event over one dense bf16 cache, with random scores and slots that stay.
struct RandomEvent {
  RandomEvent(const Shape& shape, Size size)
      : count(shape.layers * size.batch * shape.kv_heads),
        length(size.length),
        budget(size.budget),
        width(shape.dim * 2),
        cache(std::size_t{2} * static_cast<std::size_t>(count * length * width)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<Row> all(static_cast<std::size_t>(count));
    const std::int64_t side = count * length * width;
    for (std::int32_t r = 0; r < count; ++r) {
      Row& row = all[static_cast<std::size_t>(r)];
      row.layer = r / (size.batch * shape.kv_heads);
      row.head = r % shape.kv_heads;
      row.length = size.length;
      row.first = r * length;
      row.keys = {cache.data() + row.first * width, width, width};
      row.values = {cache.data() + side + row.first * width, width, width};
      indptr.push_back(r * budget);
      std::vector<std::int32_t> order(static_cast<std::size_t>(length));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin() + 4, order.end(), random);
      std::sort(order.begin(), order.begin() + budget);
      kept.insert(kept.end(), order.begin(), order.begin() + budget);
    }
    indptr.push_back(count * budget);
    rows = std::make_unique<DeviceArray<Row>>(all);
    limits = std::make_unique<DeviceArray<RowLimit>>(
        std::vector<RowLimit>(static_cast<std::size_t>(count), RowLimit{size.budget, true, kGuarded}));
    windows = std::make_unique<DeviceArray<RowWindow>>(
        std::vector<RowWindow>(static_cast<std::size_t>(count), RowWindow{32, size.length - 32}));
    newest = std::make_unique<DeviceArray<std::int32_t>>(std::vector<std::int32_t>{size.length - 1});
    QueryView last;
    last.positions = newest->data();
    last.ring = last.count = 1;
    queries = std::make_unique<DeviceArray<QueryView>>(
        std::vector<QueryView>(static_cast<std::size_t>(count / shape.kv_heads), last));
    bounds = std::make_unique<DeviceArray<std::int64_t>>(indptr);
    slots = std::make_unique<DeviceArray<std::int32_t>>(kept);
    drawn.resize(static_cast<std::size_t>(count * length));
    for (float& x : drawn) x = normal(random);
    scores = std::make_unique<DeviceArray<float>>(drawn);
    std::vector<float> squares(drawn);
    for (float& x : squares) x = x * x / static_cast<float>(length);
    usage = std::make_unique<DeviceArray<float>>(squares);
  }

  /// What was kept of a row.
  [[nodiscard]] std::vector<std::int32_t> kept_of(std::int32_t row) const {
    return slots->download(static_cast<std::size_t>(row * budget), static_cast<std::size_t>(budget));
  }
  /// Checks that kept slots of a sample of rows ascend, are in the row, and include the guarded ones.
  void check_kept(Result& result) const {
    for (const std::int32_t r : sample_of(static_cast<std::int32_t>(count))) {
      const std::vector<std::int32_t> slots_of_row = kept_of(r);
      for (std::size_t n = 1; n < slots_of_row.size(); ++n)
        if (slots_of_row[n] <= slots_of_row[n - 1]) return result.fail("kept slots do not ascend");
      if (slots_of_row.front() != 0 || slots_of_row[3] != 3 || slots_of_row[slots_of_row.size() - 32] != length - 32 ||
          slots_of_row.back() != length - 1)
        return result.fail("a guarded slot is gone");
    }
  }

  std::int64_t count, length, budget, width;
  DeviceArray<std::byte> cache;
  std::vector<std::int64_t> indptr;
  std::vector<std::int32_t> kept;
  std::vector<float> drawn;
  std::unique_ptr<DeviceArray<Row>> rows;
  std::unique_ptr<DeviceArray<RowLimit>> limits;
  std::unique_ptr<DeviceArray<RowWindow>> windows;
  std::unique_ptr<DeviceArray<std::int32_t>> newest;
  std::unique_ptr<DeviceArray<QueryView>> queries;
  std::unique_ptr<DeviceArray<std::int64_t>> bounds;
  std::unique_ptr<DeviceArray<std::int32_t>> slots;
  std::unique_ptr<DeviceArray<float>> scores, usage;
};

/// What scorers read: bf16 keys near one of eight directions, or near none, and bf16 queries from after RoPE.
/// Positions have no gaps.
struct Asked {
  Asked(const Shape& of, Size size, std::int32_t newest, bool crowded = true)
      : shape(of),
        count(shape.layers * size.batch * shape.kv_heads),
        length(size.length),
        budget(size.budget),
        slots(std::int64_t{count} * length),
        window(newest),
        key_bytes(slots * shape.dim * 2),
        keys(static_cast<std::size_t>(slots * shape.dim)),
        queries(static_cast<std::size_t>(std::int64_t{count} * shape.group * window * shape.dim)),
        filed(queries.size()),
        scores(static_cast<std::size_t>(slots)) {
    const auto drawn_keys = static_cast<std::size_t>(length) +
                            101;  // a little more than a row: no two rows are alike, and no key appears twice in one
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto dim = static_cast<std::size_t>(shape.dim);
    std::vector<float> directions(8 * dim);
    for (float& x : directions) x = normal(random);
    std::vector<std::uint16_t> drawn(drawn_keys * dim);
    for (std::size_t k = 0; k < drawn_keys; ++k) {
      const float* near = directions.data() + random() % 8 * dim;
      for (std::size_t d = 0; d < dim; ++d)
        drawn[k * dim + d] = static_cast<std::uint16_t>(
            std::bit_cast<std::uint32_t>(crowded ? near[d] + 0.5F * normal(random) : normal(random)) >> 16);
    }
    keys.fill(drawn);
    std::vector<float> asked((std::size_t{1} << 18) + 3);
    for (float& x : asked) x = std::bit_cast<float>(std::bit_cast<std::uint32_t>(normal(random)) >> 16 << 16);
    queries.fill(asked);
    std::vector<std::uint16_t> halves;
    for (const float x : asked) halves.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16));
    filed.fill(halves);
    all_positions.resize(static_cast<std::size_t>(length));
    std::iota(all_positions.begin(), all_positions.end(), 0);
    positions = std::make_unique<DeviceArray<std::int32_t>>(all_positions);
    for (std::int32_t r = 0; r < count; ++r) {
      Row row;
      row.layer = r / (size.batch * shape.kv_heads);
      row.head = r % shape.kv_heads;
      row.length = length;
      row.first = std::int64_t{r} * length;
      const std::int64_t width = std::int64_t{shape.dim} * 2;
      row.keys = {reinterpret_cast<std::byte*>(keys.data()) + row.first * width, width, width};
      row.positions = positions->data();
      host_rows.push_back(row);
    }
    rows = std::make_unique<DeviceArray<Row>>(host_rows);
    limits = std::make_unique<DeviceArray<RowLimit>>(
        std::vector<RowLimit>(static_cast<std::size_t>(count), RowLimit{budget, true, kGuarded}));
    windows = std::make_unique<DeviceArray<RowWindow>>(
        std::vector<RowWindow>(static_cast<std::size_t>(count), RowWindow{window, length - window}));
    std::vector<QueryView> last(static_cast<std::size_t>(groups()));
    for (std::size_t g = 0; g < last.size(); ++g) {
      const std::int64_t head = std::int64_t{window} * shape.dim;
      last[g].data =
          reinterpret_cast<const std::byte*>(filed.data() + static_cast<std::int64_t>(g) * shape.query_heads() * head);
      last[g].dtype = Dtype::bf16;
      last[g].token_stride = std::int64_t{shape.dim} * 2;
      last[g].head_stride = head * 2;
      last[g].positions = positions->data() + length - window;
      last[g].ring = last[g].count = window;
    }
    views = std::make_unique<DeviceArray<QueryView>>(last);
    evidence = {.rows = rows->data(),
                .limits = limits->data(),
                .queries = views->data(),
                .count = count,
                .longest = length,
                .kv_heads = shape.kv_heads,
                .group = shape.group,
                .dim = shape.dim,
                .keys = Element::bf16,
                .scale = 1.0F / std::sqrt(static_cast<float>(shape.dim))};
  }

  /// For scorers that read values.
  void let_keys_be_values() {
    for (Row& row : host_rows) row.values = row.keys;
    rows = std::make_unique<DeviceArray<Row>>(host_rows);
    evidence.rows = rows->data();
  }

  [[nodiscard]] std::int32_t groups() const { return count / shape.kv_heads; }
  /// The (layer, sequence)s whose scores are compared with the CPU's.
  [[nodiscard]] std::vector<std::int32_t> sampled_groups() const {
    return groups() > 1 ? std::vector<std::int32_t>{0, groups() - 1} : std::vector<std::int32_t>{0};
  }
  /// Flat numbers of all rows of a (layer, sequence).
  [[nodiscard]] std::vector<float> of_group(const DeviceArray<float>& flat, std::int32_t group) const {
    const auto each = static_cast<std::size_t>(shape.kv_heads) * static_cast<std::size_t>(length);
    return flat.download(static_cast<std::size_t>(group) * each, each);
  }
  /// Sum of the scores of a row.
  [[nodiscard]] double sum_of_row(std::int32_t r) const {
    const std::vector<float> g = scores.download(static_cast<std::size_t>(host_rows[static_cast<std::size_t>(r)].first),
                                                 static_cast<std::size_t>(length));
    return std::accumulate(g.begin(), g.end(), 0.0);
  }

  Shape shape;
  std::int32_t count, length, budget;
  std::int64_t slots;
  std::int32_t window;
  std::int64_t key_bytes;
  DeviceArray<std::uint16_t> keys;
  DeviceArray<float> queries;        ///< [groups, Hq, window, D]
  DeviceArray<std::uint16_t> filed;  ///< the same in bf16, which `views` show
  DeviceArray<float> scores;
  std::vector<std::int32_t> all_positions;
  std::vector<Row> host_rows;
  std::unique_ptr<DeviceArray<std::int32_t>> positions;
  std::unique_ptr<DeviceArray<Row>> rows;
  std::unique_ptr<DeviceArray<RowLimit>> limits;
  std::unique_ptr<DeviceArray<RowWindow>> windows;
  std::unique_ptr<DeviceArray<QueryView>> views;
  EvidenceArguments evidence;
};

/// One (layer, sequence) of an Asked as the CPU's functions take it.
struct OnCpu {
  OnCpu(const Asked& asked, std::int32_t group) : evidence{spec, table, QueryBasis::post_rope} {
    const Shape& shape = asked.shape;
    const auto each = static_cast<std::size_t>(shape.kv_heads) * static_cast<std::size_t>(asked.length) *
                      static_cast<std::size_t>(shape.dim);
    const auto asks =
        static_cast<std::size_t>(shape.query_heads()) * static_cast<std::size_t>(asked.window * shape.dim);
    keys = asked.keys.download(static_cast<std::size_t>(group) * each, each);
    queries = asked.queries.download(static_cast<std::size_t>(group) * asks, asks);
    spec.query_heads = shape.query_heads(), spec.kv_heads = shape.kv_heads, spec.key_dim = spec.value_dim = shape.dim;
    spec.layers.resize(static_cast<std::size_t>(shape.layers));
    table.key_dtype = Dtype::bf16;
    table.slots = std::int64_t{shape.kv_heads} * asked.length;
    const std::int64_t width = std::int64_t{shape.dim} * 2, query = std::int64_t{shape.dim} * 4;
    for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
      Row row = asked.host_rows[static_cast<std::size_t>(group * shape.kv_heads + h)];
      row.first = std::int64_t{h} * asked.length;
      row.keys = {reinterpret_cast<std::byte*>(keys.data()) + row.first * width, width, width};
      row.positions = const_cast<std::int32_t*>(asked.all_positions.data());
      table.rows.push_back(row);
      limits.rows.push_back({asked.budget, true, kGuarded});
    }
    RowGroup one;
    one.layer = table.rows[0].layer;
    one.next_position = asked.length;
    one.queries = {.data = reinterpret_cast<const std::byte*>(queries.data()),
                   .dtype = Dtype::f32,
                   .token_stride = query,
                   .head_stride = query * asked.window,
                   .positions = asked.all_positions.data() + asked.length - asked.window,
                   .ring = asked.window,
                   .begin = 0,
                   .count = asked.window};
    table.groups.push_back(one);
  }
  OnCpu(const OnCpu&) = delete;
  OnCpu& operator=(const OnCpu&) = delete;

  void let_keys_be_values() {
    table.value_dtype = Dtype::bf16;
    for (Row& row : table.rows) row.values = row.keys;
  }

  [[nodiscard]] WindowAttention attention(std::int32_t window, WindowNeeds needs) const {
    return window_attention(evidence, row_windows(evidence, limits, window, false), needs);
  }
  [[nodiscard]] std::vector<float> flat(const Tensor& numbers) const {
    return {numbers.data<float>(), numbers.data<float>() + table.slots};
  }

  ModelSpec spec;
  RowTable table;
  Limits limits;
  std::vector<std::uint16_t> keys;
  std::vector<float> queries;
  Evidence evidence;
};

/// Fails if numbers differ by more than `absolute` plus `relative` times the wanted one.
inline void expect_close(Result& result, const std::string& what, const std::vector<float>& got,
                         const std::vector<float>& want, double absolute, double relative) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;  // infinities
    const double off = std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    if (!(off <= absolute + relative * std::abs(static_cast<double>(want[i]))))
      return result.fail(text(what, " of slot ", i, " is ", got[i], ", on the CPU ", want[i]));
  }
}

}  // namespace kvkeep::cuda
