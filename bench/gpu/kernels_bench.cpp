// Kernels on a GPU against what the chip can do: bytes moved against its own copy, measured in the same run.
//
// Names: <kernel>/<model>/batch:<B>/<slots before>-><slots after>. Times are GPU times of one launch over all layers, medians over the repetitions that Google Benchmark asks for;
// `copy_GBps` is a device-to-device copy of 1 GiB in the same run, read and write counted, `share` what the kernel reaches of it. Inputs lie in the GPU's memory, larger than its caches
// from batch 8 on. Every case is checked before it is timed.

#include <benchmark/benchmark.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "chunks.h"
#include "compact.h"
#include "gpu_timing.h"
#include "h2o.h"
#include "kvkeep/score/draw.h"
#include "critical.h"
#include "expected.h"
#include "factorise.h"
#include "fetch.h"
#include "layer_selector.h"
#include "mass_segmented.h"
#include "memory_attention.h"
#include "narrow.h"
#include "prompt_scores.h"
#include "random.h"
#include "ranks.h"
#include "recency.h"
#include "rkv.h"
#include "rpc.h"
#include "select.h"

namespace kvkeep::cuda {
namespace {

struct Shape {
  const char* name;
  std::int32_t layers, kv_heads, dim, group;  ///< group: query heads of a KV head
};
constexpr Shape kShapes[] = {{"qwen7b", 28, 4, 128, 7}, {"llama8b", 32, 8, 128, 4}};

template <class T>
class Device {
 public:
  explicit Device(std::size_t count) : count_(count) { expect(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<std::size_t>(count, 1) * sizeof(T))); }
  explicit Device(const std::vector<T>& from) : Device(from.size()) { expect(cudaMemcpy(data_, from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice)); }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::vector<T> download() const {
    std::vector<T> to(count_);
    expect(cudaMemcpy(to.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

/// All rows of an event over one dense bf16 cache, with random scores and slots that stay.
struct Event {
  Event(const Shape& shape, std::int32_t batch, std::int32_t slots_before, std::int32_t slots_after)
      : count(shape.layers * batch * shape.kv_heads), length(slots_before), budget(slots_after), width(shape.dim * 2), cache(std::size_t{2} * static_cast<std::size_t>(count) * length * width) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<Row> all(static_cast<std::size_t>(count));
    const std::int64_t side = std::int64_t{count} * length * width;
    for (std::int32_t r = 0; r < count; ++r) {
      Row& row = all[static_cast<std::size_t>(r)];
      row.layer = r / (batch * shape.kv_heads);
      row.head = r % shape.kv_heads;
      row.length = length;
      row.first = std::int64_t{r} * length;
      row.keys = {cache.data() + row.first * width, width, width};
      row.values = {cache.data() + side + row.first * width, width, width};
      indptr.push_back(std::int64_t{r} * budget);
      std::vector<std::int32_t> order(static_cast<std::size_t>(length));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin() + 4, order.end(), random);
      std::sort(order.begin(), order.begin() + budget);
      kept.insert(kept.end(), order.begin(), order.begin() + budget);
    }
    indptr.push_back(std::int64_t{count} * budget);
    rows = std::make_unique<Device<Row>>(all);
    limits = std::make_unique<Device<RowLimit>>(std::vector<RowLimit>(static_cast<std::size_t>(count), RowLimit{budget, true, {4, 32}}));
    windows = std::make_unique<Device<RowWindow>>(std::vector<RowWindow>(static_cast<std::size_t>(count), RowWindow{32, length - 32}));
    newest = std::make_unique<Device<std::int32_t>>(std::vector<std::int32_t>{length - 1});
    QueryWindow last;
    last.positions = newest->data();
    last.ring = last.count = 1;
    queries = std::make_unique<Device<QueryWindow>>(std::vector<QueryWindow>(static_cast<std::size_t>(count / shape.kv_heads), last));
    bounds = std::make_unique<Device<std::int64_t>>(indptr);
    slots = std::make_unique<Device<std::int32_t>>(kept);
    std::vector<float> drawn(static_cast<std::size_t>(count) * static_cast<std::size_t>(length));
    for (float& x : drawn) x = normal(random);
    scores = std::make_unique<Device<float>>(drawn);
    for (float& x : drawn) x = x * x / static_cast<float>(length);
    usage = std::make_unique<Device<float>>(drawn);
  }

  std::int32_t count, length, budget;
  std::int64_t width;
  Device<std::byte> cache;
  std::vector<std::int64_t> indptr;
  std::vector<std::int32_t> kept;
  std::unique_ptr<Device<Row>> rows;
  std::unique_ptr<Device<RowLimit>> limits;
  std::unique_ptr<Device<RowWindow>> windows;
  std::unique_ptr<Device<std::int32_t>> newest;
  std::unique_ptr<Device<QueryWindow>> queries;
  std::unique_ptr<Device<std::int64_t>> bounds;
  std::unique_ptr<Device<std::int32_t>> slots;
  std::unique_ptr<Device<float>> scores, usage;
};

/// Times `work` and reports it against `bytes` read and written.
template <class Work>
void time(benchmark::State& state, double bytes, const Work& work) {
  work();
  expect(cudaDeviceSynchronize());
  std::vector<double> ms;
  for (auto _ : state) {
    ms.push_back(gpu_milliseconds(work));
    state.SetIterationTime(ms.back() / 1e3);
  }
  std::nth_element(ms.begin(), ms.begin() + static_cast<std::ptrdiff_t>(ms.size() / 2), ms.end());
  const double median = ms[ms.size() / 2];
  state.counters["us"] = median * 1e3;
  state.counters["GBps"] = bytes / median / 1e6;
  state.counters["copy_GBps"] = copy_bandwidth();
  state.counters["share"] = bytes / median / 1e6 / copy_bandwidth();
}

void Compact(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  const Event event(shape, batch, length, budget);
  const CompactArguments arguments{.rows = event.rows->data(), .columns = nullptr, .count = event.count, .slots = event.slots->data(), .indptr = event.bounds->data(), .pages_after = nullptr, .pages_stride = 0};
  // Every key says whose it is and where it stood.
  std::vector<std::int32_t> tags(static_cast<std::size_t>(event.cache.download().size() / 4));
  const std::int64_t words = event.width / 4;
  for (std::size_t i = 0; i < tags.size(); ++i) tags[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) / words);
  expect(cudaMemcpy(event.cache.data(), tags.data(), tags.size() * 4, cudaMemcpyHostToDevice));
  launch_compact(arguments, nullptr);
  const std::vector<std::byte> moved = event.cache.download();
  for (std::int64_t r = 0; r < event.count; ++r)
    for (std::int64_t j = 0; j < budget; ++j)
      if (reinterpret_cast<const std::int32_t*>(moved.data())[(r * length + j) * words] != static_cast<std::int32_t>(r * length + event.kept[static_cast<std::size_t>(r * budget + j)]))
        return state.SkipWithError("a slot holds another slot's bytes");
  time(state, 2.0 * 2 * static_cast<double>(event.count) * budget * static_cast<double>(event.width), [&] { launch_compact(arguments, nullptr); });
}

void Select(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  const Event event(shape, batch, length, budget);
  const SelectArguments arguments{.rows = event.rows->data(),
                                  .limits = event.limits->data(),
                                  .count = event.count,
                                  .longest = length,
                                  .scores = event.scores->data(),
                                  .indptr = event.bounds->data(),
                                  .slots = event.slots->data()};
  time(state, static_cast<double>(event.count) * (length + budget) * 4, [&] { launch_select(arguments, nullptr); });
  const std::vector<std::int32_t> kept = event.slots->download();
  for (std::size_t n = 1; n < kept.size(); ++n)
    if (n % static_cast<std::size_t>(budget) != 0 && kept[n] <= kept[n - 1]) return state.SkipWithError("kept slots do not ascend");
}

void MassSegmented(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  const Event event(shape, batch, length, budget);
  const std::size_t slots = static_cast<std::size_t>(event.count) * static_cast<std::size_t>(length);
  const Device<float> mass(slots), credit(slots);
  MassSegmentedArguments a;
  a.rows = event.rows->data();
  a.limits = event.limits->data();
  a.windows = event.windows->data();
  a.queries = event.queries->data();
  a.count = event.count;
  a.heads = shape.kv_heads;
  a.longest = length;
  a.slots_in_all = static_cast<std::int64_t>(slots);
  a.scores = event.scores->data();
  a.mass = mass.data();
  a.credit = credit.data();
  a.indptr = event.bounds->data();
  a.slots = event.slots->data();
  const Device<std::byte> workspace(mass_segmented_workspace_bytes(a.options, a.count, a.longest, a.slots_in_all));
  a.workspace = workspace.data();
  const auto again = [&] { expect(cudaMemcpyAsync(mass.data(), event.usage->data(), slots * 4, cudaMemcpyDeviceToDevice)); };
  again();
  time(state, static_cast<double>(event.count) * (4.0 * length + budget) * 4, [&] { launch_mass_segmented(a, nullptr); });
  const std::vector<std::int32_t> kept = event.slots->download();
  for (std::size_t n = 1; n < kept.size(); ++n)
    if (n % static_cast<std::size_t>(budget) != 0 && kept[n] <= kept[n - 1]) return state.SkipWithError("kept slots do not ascend");
}

/// What scorers read: bf16 keys that lie near one of eight directions, or near none, and queries that were turned. Positions have no gaps.
struct Asked {
  Asked(const Shape& shape, std::int32_t batch, std::int32_t length, std::int32_t budget, std::int32_t newest, bool crowded = true)
      : count(shape.layers * batch * shape.kv_heads), slots(std::int64_t{count} * length), window(newest), key_bytes(slots * shape.dim * 2), keys(static_cast<std::size_t>(slots * shape.dim)),
        queries(static_cast<std::size_t>(count) * static_cast<std::size_t>(shape.group * window * shape.dim)), scores(static_cast<std::size_t>(slots)) {
    constexpr std::size_t kDrawn = 65536;  // keys; repeated, and never twice in a row of the table
    if (length > static_cast<std::int32_t>(kDrawn)) throw std::runtime_error("Asked: rows are too long for the keys that are drawn");
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto dim = static_cast<std::size_t>(shape.dim);
    std::vector<float> directions(8 * dim);
    for (float& x : directions) x = normal(random);
    std::vector<std::uint16_t> drawn(kDrawn * dim);
    for (std::size_t k = 0; k < kDrawn; ++k) {
      const float* near = directions.data() + random() % 8 * dim;
      for (std::size_t d = 0; d < dim; ++d) drawn[k * dim + d] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(crowded ? near[d] + 0.5F * normal(random) : normal(random)) >> 16);
    }
    fill(keys.data(), static_cast<std::size_t>(slots) * dim, drawn);
    std::vector<float> asked(1 << 20);
    for (float& x : asked) x = normal(random) / std::sqrt(static_cast<float>(shape.dim));
    fill(queries.data(), static_cast<std::size_t>(count) * static_cast<std::size_t>(shape.group * window) * dim, asked);
    std::vector<std::int32_t> all(static_cast<std::size_t>(length));
    std::iota(all.begin(), all.end(), 0);
    positions = std::make_unique<Device<std::int32_t>>(all);
    for (std::int32_t r = 0; r < count; ++r) {
      Row row;
      row.layer = r / (batch * shape.kv_heads);
      row.head = r % shape.kv_heads;
      row.length = length;
      row.first = std::int64_t{r} * length;
      const std::int64_t width = std::int64_t{shape.dim} * 2;
      row.keys = {reinterpret_cast<std::byte*>(keys.data()) + row.first * width, width, width};
      row.positions = positions->data();
      host_rows.push_back(row);
    }
    rows = std::make_unique<Device<Row>>(host_rows);
    limits = std::make_unique<Device<RowLimit>>(std::vector<RowLimit>(static_cast<std::size_t>(count), RowLimit{budget, true, {4, 32}}));
    windows = std::make_unique<Device<RowWindow>>(std::vector<RowWindow>(static_cast<std::size_t>(count), RowWindow{window, length - window}));
    QueryWindow last;
    last.positions = positions->data() + length - window;
    last.ring = last.count = window;
    views = std::make_unique<Device<QueryWindow>>(std::vector<QueryWindow>(static_cast<std::size_t>(count / shape.kv_heads), last));
    evidence = {.rows = rows->data(),
                .limits = limits->data(),
                .queries = views->data(),
                .count = count,
                .longest = length,
                .kv_heads = shape.kv_heads,
                .group = shape.group,
                .dim = shape.dim,
                .keys = Element::bf16};
  }

  /// Sum of the scores of a row.
  [[nodiscard]] double sum_of_row(std::int32_t r) const {
    const std::vector<float> g = scores.download();
    const Row& row = host_rows[static_cast<std::size_t>(r)];
    return std::accumulate(g.begin() + row.first, g.begin() + row.first + row.length, 0.0);
  }

  std::int32_t count;
  std::int64_t slots;
  std::int32_t window;
  std::int64_t key_bytes;
  Device<std::uint16_t> keys;
  Device<float> queries, scores;
  std::vector<Row> host_rows;
  std::unique_ptr<Device<std::int32_t>> positions;
  std::unique_ptr<Device<Row>> rows;
  std::unique_ptr<Device<RowLimit>> limits;
  std::unique_ptr<Device<RowWindow>> windows;
  std::unique_ptr<Device<QueryWindow>> views;
  EvidenceArguments evidence;

 private:
  template <class T>
  static void fill(T* to, std::size_t wanted, const std::vector<T>& drawn) {
    for (std::size_t at = 0; at < wanted; at += drawn.size()) expect(cudaMemcpy(to + at, drawn.data(), std::min(drawn.size(), wanted - at) * sizeof(T), cudaMemcpyHostToDevice));
  }
};

void Recency(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  const Asked asked(shape, batch, length, budget, 1);
  const RecencyArguments a{.evidence = asked.evidence, .scores = asked.scores.data()};
  launch_recency(a, nullptr);
  const std::vector<float> got = asked.scores.download();
  for (std::size_t i = 0; i < got.size(); ++i)
    if (got[i] != static_cast<float>(i % static_cast<std::size_t>(length))) return state.SkipWithError("a slot's score is not its number");
  time(state, static_cast<double>(asked.slots) * 4, [&] { launch_recency(a, nullptr); });
}

void Random(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  const Asked asked(shape, batch, length, budget, 1);
  const RandomArguments a{.evidence = asked.evidence, .seed = 7, .scores = asked.scores.data()};
  launch_random(a, nullptr);
  const std::vector<float> got = asked.scores.download();
  for (const Row& row : asked.host_rows)
    for (std::int32_t t = 0; t < length; ++t)
      if (got[static_cast<std::size_t>(row.first + t)] != draw(draws_of_row(7, row.layer, row.head), t)) return state.SkipWithError("a draw is not the CPU's");
  time(state, static_cast<double>(asked.slots) * 8, [&] { launch_random(a, nullptr); });
}

void Rpc(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  const Asked asked(shape, batch, length, budget, 32);
  RpcArguments a{.evidence = asked.evidence, .windows = asked.windows->data(), .queries = asked.queries.data(), .window = 32, .pool = 1, .slots = asked.slots, .scores = asked.scores.data()};
  const Device<std::byte> workspace(static_cast<std::size_t>(rpc_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_rpc(a, nullptr);
  if (std::abs(asked.sum_of_row(asked.count - 1) - 32) > 1e-2) return state.SkipWithError("every query gives 1 in all where nothing is pooled");
  a.pool = 7;
  time(state, 2.0 * static_cast<double>(asked.key_bytes), [&] { launch_rpc(a, nullptr); });
}

void H2O(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  const Asked asked(shape, batch, length, budget, length - budget);  // one interval's tokens
  H2OArguments a{.evidence = asked.evidence, .queries = asked.queries.data(), .window = asked.window, .scores = asked.scores.data()};
  const Device<std::byte> workspace(static_cast<std::size_t>(h2o_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_h2o(a, nullptr);
  if (std::abs(asked.sum_of_row(asked.count - 1) - asked.window) > 1e-3 * asked.window) return state.SkipWithError("every query gives 1 in all");
  time(state, 2.0 * static_cast<double>(asked.key_bytes), [&] { launch_h2o(a, nullptr); });
}

/// `bytes`: the keys as often as they are read where every key finds a partner at once.
void time_rkv(benchmark::State& state, const Asked& asked) {
  RkvArguments a{.evidence = asked.evidence,
                 .windows = asked.windows->data(),
                 .queries = asked.queries.data(),
                 .window = 8,
                 .lambda = 0,
                 .history_alone = true,
                 .slots = asked.slots,
                 .scores = asked.scores.data()};
  const Device<std::byte> workspace(static_cast<std::size_t>(rkv_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_rkv(a, nullptr);
  if (std::abs(asked.sum_of_row(asked.count - 1) + 1) > 1e-3) return state.SkipWithError("redundancy is a softmax");
  a.lambda = 0.07;
  a.history_alone = false;
  time(state, 5.0 * static_cast<double>(asked.key_bytes), [&] { launch_rkv(a, nullptr); });
}

void Rkv(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) { time_rkv(state, Asked(shape, batch, length, budget, 8)); }

/// The worst case: no key resembles any.
void RkvFar(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) { time_rkv(state, Asked(shape, batch, length, budget, 8, false)); }

/// Fills `elements` bf16 numbers from `to` on with noise.
void fill_with_noise(std::byte* to, std::size_t elements) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<__nv_bfloat16> noise(std::size_t{1} << 20);
  for (auto& x : noise) x = __float2bfloat16(normal(random));
  for (std::size_t at = 0; at < elements; at += noise.size())
    expect(cudaMemcpy(to + 2 * at, noise.data(), 2 * std::min(noise.size(), elements - at), cudaMemcpyHostToDevice));
}

/// Expected Attention on a window of 256 queries before RoPE.
void Expected(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  constexpr std::int32_t kQueries = 256;
  const Event event(shape, batch, length, budget);
  fill_with_noise(event.cache.data(), std::size_t{2} * static_cast<std::size_t>(event.count) * static_cast<std::size_t>(length) * static_cast<std::size_t>(shape.dim));
  const std::int32_t groups = event.count / shape.kv_heads;
  const std::int64_t head = shape.dim * 2, token = head * shape.kv_heads * shape.group;
  const Device<std::byte> rings(static_cast<std::size_t>(groups * kQueries * token));
  fill_with_noise(rings.data(), static_cast<std::size_t>(groups * kQueries * token / 2));
  std::vector<std::int32_t> at(kQueries);
  std::iota(at.begin(), at.end(), length - kQueries);
  const Device<std::int32_t> positions(at), next(std::vector<std::int32_t>(static_cast<std::size_t>(groups), length));
  std::vector<QueryWindow> all;
  for (std::int32_t g = 0; g < groups; ++g) all.push_back({rings.data() + g * kQueries * token, token, head, positions.data(), kQueries, 0, kQueries});
  const Device<QueryWindow> windows(all);
  std::vector<double> frequencies;
  for (std::int32_t f = 0; f < shape.dim / 2; ++f) frequencies.push_back(std::pow(1e4, -2.0 * f / shape.dim));
  const Device<double> inv_freq(frequencies);
  const std::size_t slots = static_cast<std::size_t>(event.count) * static_cast<std::size_t>(length);
  const Device<float> scores(slots);
  ExpectedArguments a;
  a.evidence.rows = event.rows->data();
  a.evidence.limits = event.limits->data();
  a.evidence.queries = windows.data();
  a.evidence.count = event.count;
  a.evidence.longest = length;
  a.evidence.kv_heads = shape.kv_heads;
  a.evidence.group = shape.group;
  a.evidence.dim = a.value_dim = shape.dim;
  a.evidence.keys = a.evidence.query = a.values = Element::bf16;
  a.evidence.scale = 1.0F / std::sqrt(static_cast<float>(shape.dim));
  a.next_positions = next.data();
  a.inv_freq = inv_freq.data();
  a.pairs = shape.dim / 2;
  a.queries = kQueries;
  a.slots = static_cast<std::int64_t>(slots);
  a.scores = scores.data();
  const Device<std::byte> workspace(static_cast<std::size_t>(expected_workspace_bytes(a)));
  a.workspace = workspace.data();
  time(state, static_cast<double>(slots) * shape.dim * 4, [&] { launch_expected(a, nullptr); });
  const std::vector<float> got = scores.download();
  for (std::size_t r = 0; r < got.size(); r += static_cast<std::size_t>(length))
    if (!(got[r] == *std::max_element(got.begin() + static_cast<std::ptrdiff_t>(r), got.begin() + static_cast<std::ptrdiff_t>(r) + length))) return state.SkipWithError("a sink has not the largest score");
}

/// True where the kept slots of every row ascend.
bool ascend(const std::vector<std::int32_t>& kept, std::int32_t budget) {
  for (std::size_t n = 1; n < kept.size(); ++n)
    if (n % static_cast<std::size_t>(budget) != 0 && kept[n] <= kept[n - 1]) return false;
  return true;
}

void Chunks(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  const Event event(shape, batch, length, budget);
  ChunksArguments a;
  a.rows = event.rows->data();
  a.limits = event.limits->data();
  a.count = event.count;
  a.heads = shape.kv_heads;
  a.longest = length;
  a.slots_in_all = std::int64_t{event.count} * length;
  a.scores = event.scores->data();
  a.indptr = event.bounds->data();
  a.slots = event.slots->data();
  const Device<std::byte> workspace(static_cast<std::size_t>(chunks_workspace_bytes(a)));
  a.workspace = workspace.data();
  time(state, static_cast<double>(event.count) * (length + budget) * 4, [&] { launch_chunks(a, nullptr); });
  if (!ascend(event.slots->download(), budget)) return state.SkipWithError("kept slots do not ascend");
}

/// CriticalKV, all layers with the same output weights. It is bound by its products: TFLOPS says how fast they run.
void Critical(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  const Event event(shape, batch, length, budget);
  fill_with_noise(event.cache.data(), std::size_t{2} * static_cast<std::size_t>(event.count) * static_cast<std::size_t>(length) * static_cast<std::size_t>(shape.dim));
  const std::int64_t heads = std::int64_t{shape.kv_heads} * shape.group, hidden = heads * shape.dim;
  const Device<std::byte> weights(static_cast<std::size_t>(hidden * hidden * 2));
  fill_with_noise(weights.data(), static_cast<std::size_t>(hidden * hidden));
  const Device<const void*> projections(std::vector<const void*>(static_cast<std::size_t>(shape.layers), weights.data()));
  CriticalArguments a;
  a.evidence.rows = event.rows->data();
  a.evidence.limits = event.limits->data();
  a.evidence.count = event.count;
  a.evidence.longest = length;
  a.evidence.kv_heads = shape.kv_heads;
  a.evidence.group = shape.group;
  a.value_dim = shape.dim;
  a.values = a.projection = Element::bf16;
  a.projections = projections.data();
  a.hidden = static_cast<std::int32_t>(hidden);
  a.slots_in_all = std::int64_t{event.count} * length;
  a.scores = event.usage->data();
  a.indptr = event.bounds->data();
  a.slots = event.slots->data();
  const Device<std::byte> workspace(static_cast<std::size_t>(critical_workspace_bytes(a)));
  a.workspace = workspace.data();
  time(state, static_cast<double>(a.slots_in_all) * shape.dim * 2, [&] { launch_critical(a, nullptr); });
  state.counters["TFLOPS"] = 2.0 * static_cast<double>(a.slots_in_all) * shape.group * shape.dim * static_cast<double>(hidden) / state.counters["us"] / 1e6;
  if (!ascend(event.slots->download(), budget)) return state.SkipWithError("kept slots do not ascend");
}

/// Prompts that are ranked, one behind the other.
std::vector<RankedPrompt> side_by_side(std::int32_t batch, std::int32_t ranked, std::int32_t kept) {
  std::vector<RankedPrompt> prompts;
  for (std::int32_t p = 0; p < batch; ++p) prompts.push_back({.scores = std::int64_t{p} * ranked, .ranks = std::int64_t{p} * ranked, .kept = std::int64_t{p} * kept, .ranked = ranked, .state = p});
  return prompts;
}

/// A permutation of 1 to n for every prompt.
std::vector<std::int32_t> drawn_ranks(std::mt19937& random, std::int32_t batch, std::int32_t n) {
  std::vector<std::int32_t> ranks(static_cast<std::size_t>(batch) * static_cast<std::size_t>(n));
  for (auto begin = ranks.begin(); begin != ranks.end(); begin += n) {
    std::iota(begin, begin + n, 1);
    std::shuffle(begin, begin + n, random);
  }
  return ranks;
}

/// One layer of a prefill, as all below.
void PromptScores(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  shape.layers = 1;
  const Asked asked(shape, batch, length, budget, 32);
  const Device<float> tokens(static_cast<std::size_t>(batch) * static_cast<std::size_t>(length - 32));
  PromptScoresArguments a{.evidence = asked.evidence, .queries = asked.queries.data(), .pool = 1, .slots = asked.slots, .heads = asked.scores.data(), .tokens = tokens.data()};
  const Device<std::byte> workspace(static_cast<std::size_t>(prompt_scores_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_prompt_scores(a, nullptr);
  const std::vector<float> got = tokens.download(), heads = asked.scores.download();
  const double sum = std::accumulate(got.begin(), got.end(), 0.0), of_heads = std::accumulate(heads.begin(), heads.end(), 0.0), most = 32.0 * batch * shape.kv_heads * shape.group;
  if (!(sum > 0.5 * most && sum <= 1.001 * most) || std::abs(sum - of_heads) > 1e-3 * sum) return state.SkipWithError("every query gives 1 in all, most of it before the window");
  a.pool = 7;
  time(state, 2.0 * static_cast<double>(asked.key_bytes), [&] { launch_prompt_scores(a, nullptr); });
}

/// `bytes`: every score read once, every rank written once.
void Ranks(benchmark::State& state, Shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> drawn(static_cast<std::size_t>(batch) * static_cast<std::size_t>(length));
  for (float& x : drawn) x = std::exp(normal(random));
  const Device<float> scores(drawn);
  const Device<std::int32_t> ranks(drawn.size());
  const std::vector<RankedPrompt> prompts = side_by_side(batch, length, budget);
  const Device<std::byte> workspace(static_cast<std::size_t>(ranks_workspace_bytes(prompts)));
  const RanksArguments a{.prompts = prompts, .scores = scores.data(), .ranks = ranks.data(), .workspace = workspace.data()};
  launch_ranks(a, nullptr);
  const std::vector<std::int32_t> got = ranks.download();
  for (const RankedPrompt& prompt : prompts) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(length));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t x, std::int32_t y) { return drawn[static_cast<std::size_t>(prompt.scores + x)] > drawn[static_cast<std::size_t>(prompt.scores + y)]; });
    for (std::int32_t i = 0; i < length; ++i)
      if (got[static_cast<std::size_t>(prompt.ranks + order[static_cast<std::size_t>(i)])] != i + 1) return state.SkipWithError("a rank is not that of a sort");
  }
  time(state, 8.0 * static_cast<double>(drawn.size()), [&] { launch_ranks(a, nullptr); });
}

/// Eight layers of ranks compared.
void LayerVariance(benchmark::State& state, Shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  constexpr std::int32_t kLayers = 8;
  std::mt19937 random(1);
  std::vector<std::int32_t> ring;
  for (int l = 0; l < kLayers; ++l) {
    const std::vector<std::int32_t> ranks = drawn_ranks(random, batch, length);
    ring.insert(ring.end(), ranks.begin(), ranks.end());
  }
  const std::int64_t stride = std::int64_t{batch} * length;
  const Device<std::int32_t> ranks(ring);
  const Device<LayerSelection> states(std::vector<LayerSelection>(static_cast<std::size_t>(batch)));
  const std::vector<RankedPrompt> prompts = side_by_side(batch, length, budget);
  const Device<std::byte> workspace(static_cast<std::size_t>(layer_selector_workspace_bytes(prompts)));
  LayerSelectorArguments a{.options = {.select = budget, .min_layer = kLayers, .observed_layers = kLayers, .threshold = -1}, .layer = kLayers, .prompts = prompts, .ranks = ranks.data(), .stride = stride,
                           .states = states.data(), .workspace = workspace.data()};
  launch_layer_selector(a, nullptr);
  double sum = 0, counted = 0;
  for (std::int64_t t = 0; t < length; ++t) {
    double mean = 0, square = 0;
    std::int32_t least = length;
    for (std::int64_t l = 0; l < kLayers; ++l) {
      const std::int32_t rank = ring[static_cast<std::size_t>(l * stride + t)];
      least = std::min(least, rank);
      mean += rank / static_cast<double>(kLayers);
      square += std::pow(rank, 2.0) / kLayers;
    }
    if (least > budget - a.options.window) continue;
    sum += square - mean * mean;
    ++counted;
  }
  if (std::abs(states.download()[0].first - sum / counted) > 1e-6 * sum / counted) return state.SkipWithError("the variance is not that of a loop");
  time(state, 4.0 * kLayers * static_cast<double>(stride), [&] { launch_layer_selector(a, nullptr); });
}

void Narrow(benchmark::State& state, Shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  std::mt19937 random(1);
  const Device<std::int32_t> ranks(drawn_ranks(random, batch, length - 32)), tokens(static_cast<std::size_t>(batch) * static_cast<std::size_t>(budget));
  const std::vector<RankedPrompt> prompts = side_by_side(batch, length - 32, budget);
  const NarrowArguments a{.prompts = prompts, .select = budget, .window = 32, .ranks = ranks.data(), .tokens = tokens.data()};
  launch_narrow(a, nullptr);
  if (!ascend(tokens.download(), budget)) return state.SkipWithError("tokens do not ascend");
  time(state, 4.0 * batch * (static_cast<double>(length) + budget), [&] { launch_narrow(a, nullptr); });
}

/// Hidden states of bf16, one in length / budget of them.
void GatherRows(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  const std::int64_t width = std::int64_t{shape.kv_heads} * shape.group * shape.dim * 2;
  const Device<std::byte> hidden(static_cast<std::size_t>(std::int64_t{batch} * length * width)), packed(static_cast<std::size_t>(std::int64_t{batch} * budget * width));
  for (std::int64_t row = 0; row < std::int64_t{batch} * length; ++row) expect(cudaMemsetAsync(hidden.data() + row * width, static_cast<int>(row % 251), static_cast<std::size_t>(width)));
  std::vector<std::int32_t> lists;
  std::vector<GatheredPrompt> prompts;
  for (std::int32_t p = 0; p < batch; ++p) {
    prompts.push_back({.from = std::int64_t{p} * length, .to = std::int64_t{p} * budget, .kept = std::int64_t{p} * budget, .rows = budget});
    for (std::int64_t i = 0; i < budget; ++i) lists.push_back(static_cast<std::int32_t>(i * length / budget));
  }
  const Device<std::int32_t> tokens(lists);
  const GatherRowsArguments a{.prompts = prompts, .tokens = tokens.data(), .from = hidden.data(), .to = packed.data(), .row_bytes = width, .from_stride = width, .to_stride = width};
  launch_gather_rows(a, nullptr);
  const std::vector<std::byte> got = packed.download();
  for (std::size_t n = 0; n < got.size(); ++n) {
    const auto i = static_cast<std::int64_t>(n) / width;
    if (got[n] != static_cast<std::byte>((i / budget * length + lists[static_cast<std::size_t>(i)]) % 251)) return state.SkipWithError("a row holds another row's bytes");
  }
  time(state, 2.0 * static_cast<double>(got.size()), [&] { launch_gather_rows(a, nullptr); });
}

/// One layer of a memory: `length` tokens a sequence folded into spans of 64, sketches and factors of 8 components in bf16, one query a sequence.
struct Folded {
  static constexpr std::int32_t kLength = 64, kRank = 8;

  Folded(const Shape& shape, std::int32_t batch, std::int32_t length)
      : spans(length / kLength),
        rows(batch * shape.kv_heads),
        heads(std::int64_t{batch} * shape.kv_heads * shape.group),
        blob_bytes(std::int64_t{2} * 2 * kRank * (kLength + shape.dim)),
        coarse(static_cast<std::size_t>(std::int64_t{2} * rows * spans * shape.dim * 2)),
        signs(static_cast<std::size_t>(std::int64_t{rows} * length * shape.dim / 8)),
        sizes(static_cast<std::size_t>(std::int64_t{rows} * length * 2)),
        blobs(static_cast<std::size_t>(rows * spans * blob_bytes)),
        queries(static_cast<std::size_t>(heads * shape.dim * 2)),
        log_length(std::vector<float>(static_cast<std::size_t>(spans), std::log(static_cast<float>(kLength)))),
        out(static_cast<std::size_t>(heads * shape.dim)),
        lse(static_cast<std::size_t>(heads)),
        marks(static_cast<std::size_t>(heads * spans)),
        opened(static_cast<std::size_t>(rows * spans)),
        counts(static_cast<std::size_t>(rows)) {
    fill_with_noise(coarse.data(), static_cast<std::size_t>(std::int64_t{2} * rows * spans * shape.dim));
    fill_with_noise(signs.data(), static_cast<std::size_t>(std::int64_t{rows} * length * shape.dim / 16));
    fill_with_noise(blobs.data(), static_cast<std::size_t>(rows * spans * blob_bytes / 2));
    fill_with_noise(queries.data(), static_cast<std::size_t>(heads * shape.dim));
    const std::vector<__nv_bfloat16> one(static_cast<std::size_t>(std::int64_t{rows} * length), __float2bfloat16(0.5F));
    expect(cudaMemcpy(sizes.data(), one.data(), one.size() * 2, cudaMemcpyHostToDevice));
    std::vector<MemorySpan> of_row;
    for (std::int32_t s = 0; s < spans; ++s)
      of_row.push_back({kLength, std::int64_t{s} * kLength, blob_bytes, {{kRank, false, true, 0}, {kRank, false, true, kRank * (kLength + std::int64_t{shape.dim})}}});
    table = std::make_unique<Device<MemorySpan>>(of_row);
    std::vector<const std::byte*> where;
    for (std::int64_t i = 0; i < std::int64_t{rows} * spans; ++i) where.push_back(blobs.data() + i * blob_bytes);
    near = std::make_unique<Device<const std::byte*>>(where);
    std::vector<FoldedRow> all;
    const std::int64_t side = std::int64_t{spans} * shape.dim * 2;
    for (std::int32_t r = 0; r < rows; ++r) {
      FoldedRow& row = all.emplace_back(FoldedRow{.spans = spans, .head = r % shape.kv_heads, .first_query = r / shape.kv_heads, .queries = 1});
      row.table = table->data();
      row.coarse_keys = coarse.data() + 2 * r * side;
      row.coarse_values = row.coarse_keys + side;
      row.log_length = log_length.data();
      row.signs = reinterpret_cast<const std::uint32_t*>(signs.data()) + std::int64_t{r} * length * shape.dim / 32;
      row.sizes = reinterpret_cast<const std::uint16_t*>(sizes.data()) + std::int64_t{r} * length;
      row.near = near->data() + std::int64_t{r} * spans;
    }
    table_of_rows = std::make_unique<Device<FoldedRow>>(all);
    expect(cudaMemset(out.data(), 0, static_cast<std::size_t>(heads * shape.dim) * 4));
    expect(cudaMemset(lse.data(), 0, static_cast<std::size_t>(heads) * 4));
    a = {.rows = table_of_rows->data(), .count = rows, .most_spans = spans, .most_queries = 1, .tokens = batch, .kv_heads = shape.kv_heads, .group = shape.group, .dim = shape.dim, .store = Element::bf16, .query = Element::bf16,
         .scale = 1 / std::sqrt(static_cast<float>(shape.dim)), .queries = queries.data(), .token_stride = std::int64_t{shape.kv_heads} * shape.group * shape.dim * 2, .head_stride = std::int64_t{shape.dim} * 2,
         .out = out.data(), .lse = lse.data(), .marks = marks.data(), .opened = opened.data(), .opened_count = counts.data()};
    workspace = std::make_unique<Device<std::byte>>(static_cast<std::size_t>(memory_attention_workspace_bytes(a)));
    a.workspace = workspace->data();
  }

  /// Spans that the rows have opened.
  [[nodiscard]] std::int64_t zooms() const {
    const std::vector<std::int32_t> all = counts.download();
    return std::accumulate(all.begin(), all.end(), std::int64_t{0});
  }

  std::int32_t spans, rows;
  std::int64_t heads, blob_bytes;
  Device<std::byte> coarse, signs, sizes, blobs, queries;
  Device<float> log_length, out, lse;
  Device<std::uint8_t> marks;
  Device<std::int32_t> opened, counts;
  std::unique_ptr<Device<MemorySpan>> table;
  std::unique_ptr<Device<const std::byte*>> near;
  std::unique_ptr<Device<FoldedRow>> table_of_rows;
  std::unique_ptr<Device<std::byte>> workspace;
  MemoryAttentionArguments a;
};

/// `bytes`: coarse keys and sketches, once.
void MemoryRoute(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t) {
  Folded folded(shape, batch, length);
  folded.a.mass = 1.0 / folded.spans;
  launch_memory_route(folded.a, nullptr);
  const std::int64_t zooms = folded.zooms();
  if (zooms < 1 || zooms >= std::int64_t{folded.rows} * folded.spans) return state.SkipWithError("some spans draw more than their share, and some less");
  const double bytes = static_cast<double>(folded.rows) * folded.spans * (2.0 * shape.dim + Folded::kLength * (shape.dim / 8.0 + 2));
  time(state, bytes, [&] { launch_memory_route(folded.a, nullptr); });
  state.counters["opened"] = static_cast<double>(zooms) / folded.rows;
}

/// `bytes`: coarse values and the factors of opened spans, once.
void MemoryMerge(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t) {
  Folded folded(shape, batch, length);
  folded.a.mass = 2.0 / folded.spans;
  launch_memory_route(folded.a, nullptr);
  launch_memory_merge(folded.a, nullptr);
  for (const float mass : folded.lse.download())
    if (!(mass > std::log(static_cast<float>(length)) - 2 && std::isfinite(mass))) return state.SkipWithError("a head's mass is not that of all tokens");
  const double bytes = static_cast<double>(folded.rows) * folded.spans * 2 * shape.dim + static_cast<double>(folded.zooms()) * static_cast<double>(folded.blob_bytes);
  time(state, bytes, [&] { launch_memory_merge(folded.a, nullptr); });
  state.counters["opened"] = static_cast<double>(folded.zooms()) / folded.rows;
}

/// Pieces of `budget` bytes out of page-locked host memory, `batch` lists of them; `length` bytes in all.
void Fetch(benchmark::State& state, Shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  std::byte* far = nullptr;
  expect(cudaHostAlloc(reinterpret_cast<void**>(&far), static_cast<std::size_t>(length), cudaHostAllocDefault));
  const std::unique_ptr<std::byte, void (*)(std::byte*)> held(far, [](std::byte* at) { cudaFreeHost(at); });
  for (std::int32_t i = 0; i < length; ++i) far[i] = static_cast<std::byte>(i % 251);
  const Device<std::byte> near(static_cast<std::size_t>(length));
  std::vector<FarPiece> pieces;
  for (std::int32_t at = 0; at + budget <= length; at += budget) pieces.push_back({far + at, near.data() + at, budget});
  const auto stride = static_cast<std::int32_t>(pieces.size()) / batch;
  const Device<FarPiece> there(pieces);
  const Device<std::int32_t> counts(std::vector<std::int32_t>(static_cast<std::size_t>(batch), stride));
  const FetchArguments a{.pieces = there.data(), .counts = counts.data(), .lists = batch, .stride = stride};
  launch_fetch(a, nullptr);
  const std::vector<std::byte> got = near.download();
  const std::int64_t bytes = std::int64_t{batch} * stride * budget;
  for (std::int64_t i = 0; i < bytes; ++i)
    if (got[static_cast<std::size_t>(i)] != static_cast<std::byte>(i % 251)) return state.SkipWithError("a byte is not what lies far");
  time(state, static_cast<double>(bytes), [&] { launch_fetch(a, nullptr); });
}

/// Keys of `length` tokens in spans of `budget`, all layers and heads. `bytes`: the rows once.
void FactoriseSpans(benchmark::State& state, Shape shape, std::int32_t batch, std::int32_t length, std::int32_t budget) {
  const std::int32_t rows = shape.layers * batch * shape.kv_heads, spans = length / budget;
  const std::int64_t width = shape.dim * 2;
  const Device<std::byte> keys(static_cast<std::size_t>(std::int64_t{rows} * length * width));
  fill_with_noise(keys.data(), static_cast<std::size_t>(std::int64_t{rows} * length * shape.dim));
  FactoriseArguments a{.longest = budget, .dim = shape.dim, .element = Element::bf16, .store = Element::bf16, .options = {.centred = FactoriseOptions::Centred::always, .max_rank = 16}};
  std::vector<RowMatrix> all;
  for (std::int64_t n = 0; n < std::int64_t{rows} * spans; ++n) all.push_back({.rows = {keys.data() + n * budget * width, width, width}, .length = budget, .offset = n * factor_numbers(budget, shape.dim, a.options)});
  const Device<RowMatrix> matrices(all);
  const Device<FactorsFound> found(all.size());
  const Device<std::byte> coarse(all.size() * static_cast<std::size_t>(width)), factors(all.size() * static_cast<std::size_t>(factor_numbers(budget, shape.dim, a.options)) * 2);
  a.matrices = matrices.data(), a.count = static_cast<std::int32_t>(all.size()), a.found = found.data(), a.coarse = coarse.data(), a.factors = factors.data();
  launch_factorise(a, nullptr);
  for (const FactorsFound& f : found.download())
    if (!f.finite || f.raw || f.rank != 16) return state.SkipWithError("noise has more components than are allowed");
  time(state, static_cast<double>(all.size()) * budget * static_cast<double>(width), [&] { launch_factorise(a, nullptr); });
  state.counters["matrices"] = static_cast<double>(all.size());
}

void add_all() {
  struct Size {
    std::int32_t batch, length, budget;
  };
  const auto add = [](const char* kernel, auto body, std::initializer_list<Size> sizes) {
    for (const Shape& shape : kShapes)
      for (const Size& s : sizes) {
        const std::string name = std::string(kernel) + "/" + shape.name + "/batch:" + std::to_string(s.batch) + "/" + std::to_string(s.length) + "->" + std::to_string(s.budget);
        benchmark::RegisterBenchmark(name.c_str(), body, shape, s.batch, s.length, s.budget)->UseManualTime()->Iterations(31)->Unit(benchmark::kMicrosecond);
      }
  };
  add("Compact", Compact, {{1, 1536, 1024}, {1, 1024, 512}, {8, 1536, 1024}, {32, 1536, 1024}});
  add("Select", Select, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("Chunks", Chunks, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("Critical", Critical, {{1, 1536, 1024}, {1, 32768, 2048}});
  add("Expected", Expected, {{1, 1536, 1024}, {8, 1536, 1024}, {1, 32768, 2048}});
  add("MassSegmented", MassSegmented, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("Recency", Recency, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("Random", Random, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("Rpc", Rpc, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("H2O", H2O, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("Rkv", Rkv, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("PromptScores", PromptScores, {{1, 32768, 2048}, {1, 65536, 2048}});
  add("Ranks", Ranks, {{1, 8192, 2048}, {1, 32768, 2048}, {1, 131072, 2048}, {16, 8192, 2048}});
  add("LayerVariance", LayerVariance, {{1, 32768, 2048}, {1, 131072, 2048}});
  add("Narrow", Narrow, {{1, 32768, 2048}, {1, 131072, 2048}});
  add("GatherRows", GatherRows, {{1, 32768, 2048}, {1, 131072, 2048}});
  add("MemoryRoute", MemoryRoute, {{1, 32768, 0}, {1, 131072, 0}, {32, 32768, 0}});
  add("MemoryMerge", MemoryMerge, {{1, 32768, 0}, {1, 131072, 0}, {32, 32768, 0}});
  add("Fetch", Fetch, {{8, 1 << 20, 8192}, {8, 1 << 26, 8192}, {256, 1 << 26, 8192}});
  add("FactoriseSpans", FactoriseSpans, {{1, 2048, 32}, {1, 2048, 64}, {1, 2048, 128}});
  add("RkvFar", RkvFar, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
}

}  // namespace
}  // namespace kvkeep::cuda

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "kvkeep_gpu_bench: there is no GPU here\n");
    return 2;
  }
  cudaDeviceProp chip{};
  kvkeep::cuda::expect(cudaGetDeviceProperties(&chip, 0));
  benchmark::AddCustomContext("gpu", chip.name);
  benchmark::AddCustomContext("copy_GBps", std::to_string(kvkeep::cuda::copy_bandwidth()));
  kvkeep::cuda::add_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
