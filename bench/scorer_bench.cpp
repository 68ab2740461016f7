// SPDX-License-Identifier: Apache-2.0
// One layer's rows scored, beside one read of their keys in the same run.
//
//   kvkeep_bench --benchmark_filter=Scorer        rows: Scorer/<name>/<model>/<dtype>/<T>
//
// Counters are medians over the iterations: ms of the scorer (the window attention that it shares included), keys_ms of
// reading the keys once with as many threads, their ratio, and the bytes of the keys over the scorer's time. Keys are
// near one of a few directions, as keys after RoPE are; "far" keys are independent of each other, which is the worst
// case for a scorer that looks for similar ones. A new scorer is one line in kSubjects.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>

#include "kvkeep/kvkeep.h"
#include "kvkeep/score/calibration.h"
#include "kvkeep/score/cur.h"
#include "kvkeep/score/defensive.h"
#include "kvkeep/score/expected.h"
#include "kvkeep/score/h2o.h"
#include "kvkeep/score/keydiff.h"
#include "kvkeep/score/knorm.h"
#include "kvkeep/score/random.h"
#include "kvkeep/score/rkv.h"
#include "kvkeep/score/rpc.h"
#include "kvkeep/score/snapkv.h"
#include "kvkeep/score/tova.h"
#include "kvkeep/score/triattention.h"
#include "kvkeep/score/vase.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/torch.h"
#include "timing.h"

namespace kvkeep::scorer_bench {
namespace {

struct Shape {
  const char* name;
  std::int32_t query_heads, kv_heads, dim;
};
constexpr Shape kShapes[] = {{"qwen7b", 28, 4, 128}, {"llama8b", 32, 8, 128}};

struct Subject {
  const char* name;
  bool far;  ///< keys without neighbours
  std::function<std::unique_ptr<Scorer>()> make;
  std::function<std::unique_ptr<Scorer>(const Shape&)> make_for =
      {};  ///< instead of `make`, if the scorer knows the model
};

/// TriAttention with any statistics: its time does not depend on them.
std::unique_ptr<Scorer> triattention(const Shape& shape, TriAttentionOptions::Aggregate aggregate) {
  Calibration c{.head_dim = shape.dim, .heads = {}, .inv_freq = {}, .model_name = {}};
  for (std::int32_t h = 0; h < shape.query_heads; ++h)
    c.heads[{0, h}] = {std::vector<std::complex<float>>(static_cast<std::size_t>(shape.dim) / 2, {0.3F, 0.2F}),
                       std::vector<float>(static_cast<std::size_t>(shape.dim) / 2, 1.0F)};
  return std::make_unique<TriAttention>(std::move(c), TriAttentionOptions{.aggregate = aggregate});
}

const Subject kSubjects[] = {
    {"tova", false, [] { return std::make_unique<Tova>(); }},
    {"keydiff", false, [] { return std::make_unique<KeyDiff>(); }},
    {"knorm", false, [] { return std::make_unique<Knorm>(); }},
    {"cur", false, [] { return std::make_unique<Cur>(); }},
    {"defensive", false, [] { return std::make_unique<Defensive>(); }},
    {"vase", false, [] { return std::make_unique<Vase>(); }},
    {"rkv", false, [] { return std::make_unique<Rkv>(); }},
    {"rkv_far", true, [] { return std::make_unique<Rkv>(); }},
    {"expected", false, [] { return std::make_unique<Expected>(); }},
    {"expected_plain", false, [] { return std::make_unique<Expected>(ExpectedOptions{.matrix_unit = false}); }},
    {"snapkv", false, [] { return std::make_unique<SnapKV>(); }},
    {"snapkv_rkv", false,
     [] {
       return std::make_unique<SnapKV>(SnapKVOptions{.window = 8, .pool = 7, .style = SnapKVOptions::Style::rkv});
     }},
    {"rpc", false, [] { return std::make_unique<Rpc>(); }},
    {"h2o", false, [] { return std::make_unique<H2O>(); }},
    {"random", false, [] { return std::make_unique<RandomScorer>(); }},
    {"triattention",
     false,
     {},
     [](const Shape& shape) { return triattention(shape, TriAttentionOptions::Aggregate::mean); }},
    {"triattention_max",
     false,
     {},
     [](const Shape& shape) { return triattention(shape, TriAttentionOptions::Aggregate::max); }},
};

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
std::uint64_t
sum_of(const std::uint64_t* words, std::int64_t count) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}

/// One layer of one sequence, ready to be scored.
class Layer {
 public:
  Layer(const Shape& shape, Dtype dtype, std::int32_t length, bool far, std::int32_t seen)
      : spec_{.query_heads = shape.query_heads,
              .kv_heads = shape.kv_heads,
              .key_dim = shape.dim,
              .value_dim = shape.dim,
              .softmax_scale = 0,
              .rope = {},
              .layers = {}},
        length_(length),
        positions_(static_cast<std::size_t>(length)),
        query_positions_(static_cast<std::size_t>(seen)) {
    spec_.layers.resize(1);
    for (int f = 0; f < shape.dim / 2; ++f) spec_.rope.inv_freq.push_back(std::pow(1e6, -2.0 * f / shape.dim));
    const auto options = at::TensorOptions().dtype(at::kFloat);
    at::Tensor keys = at::randn({1, shape.kv_heads, length, shape.dim}, options);
    if (!far)
      keys = keys.mul_(0.6).add_(
          at::randn({8, shape.dim}, options)
              .index_select(0, at::randint(8, {length}, at::TensorOptions().dtype(c10::ScalarType::Long))));
    layers_ = {DenseKv{keys.to(torch_dtype(dtype)),
                       at::randn({1, shape.kv_heads, length, shape.dim}, options).to(torch_dtype(dtype))}};
    view_.sequences = {&id_, 1};
    view_.lengths = {{&length_, 1}, 1};
    const std::int32_t zero = 0;
    table_ = make_rows(spec_, layers_, view_, {&zero, 1}, {&zero, 1});
    std::iota(positions_.begin(), positions_.end(), 0);
    std::iota(query_positions_.begin(), query_positions_.end(), length - seen);
    for (Row& row : table_.rows) row.positions = positions_.data();
    RowGroup& group = table_.groups[0];
    group.next_position = length;
    if (seen == 0) return;
    queries_ = at::randn({seen, shape.query_heads, shape.dim}, options).to(torch_dtype(dtype));
    const auto bytes = static_cast<std::int64_t>(queries_.element_size());
    group.queries = {.data = static_cast<const std::byte*>(queries_.const_data_ptr()),
                     .dtype = dtype,
                     .token_stride = queries_.stride(0) * bytes,
                     .head_stride = queries_.stride(1) * bytes,
                     .positions = query_positions_.data(),
                     .ring = seen,
                     .begin = 0,
                     .count = seen};
  }

  Scores score(const Scorer& scorer) const {
    const Evidence evidence{spec_, table_};
    const Limits limits = even_limits(table_, length_ * 2 / 3, 4, 32);
    WindowAttention seen;
    const WindowNeeds shared = scorer.shares();
    if (shared.usage || shared.newest)
      seen = window_attention(evidence, row_windows(evidence, limits, 1, false), shared);
    return scorer.score(evidence, limits, seen);
  }

  /// Reads every key once and does next to nothing with it.
  void read_keys() const {
    std::vector<std::uint64_t> sums(table_.rows.size());
    at::parallel_for(0, static_cast<std::int64_t>(table_.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r)
        sums[r] = sum_of(reinterpret_cast<const std::uint64_t*>(table_.rows[r].keys.base),
                         table_.rows[r].keys.width * table_.rows[r].length / 8);
    });
    benchmark::DoNotOptimize(sums.data());
  }

  [[nodiscard]] double key_bytes() const {
    return static_cast<double>(table_.rows.front().keys.width) * length_ * static_cast<double>(table_.rows.size());
  }

 private:
  ModelSpec spec_;
  SequenceId id_ = 0;
  std::int32_t length_;
  std::vector<std::int32_t> positions_, query_positions_;
  at::Tensor queries_;
  std::vector<LayerKv> layers_;
  CacheView view_;
  RowTable table_;
};

void Score(benchmark::State& state, const Subject& subject, const Shape& shape, Dtype dtype, std::int32_t length) {
  const std::unique_ptr<Scorer> scorer = subject.make ? subject.make() : subject.make_for(shape);
  const Layer layer(shape, dtype, length, subject.far, scorer->needs().queries);
  benchmark::DoNotOptimize(layer.score(*scorer).data.bytes());
  std::vector<double> scoring, reading;
  for (auto _ : state) {
    scoring.push_back(milliseconds([&] { benchmark::DoNotOptimize(layer.score(*scorer).data.bytes()); }));
    state.SetIterationTime(scoring.back() / 1e3);
    reading.push_back(milliseconds([&] { layer.read_keys(); }));
  }
  state.counters["ms"] = median(scoring);
  state.counters["keys_ms"] = median(reading);
  state.counters["ratio"] = median(scoring) / median(reading);
  state.counters["GB/s"] = layer.key_bytes() / median(scoring) / 1e6;
}

const int kRegistered = [] {
  for (const Subject& subject : kSubjects)
    for (const Shape& shape : kShapes)
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
        for (const std::int32_t length : {1536, 32768}) {
          const std::string name = std::string("Scorer/") + subject.name + "/" + shape.name +
                                   (dtype == Dtype::f32 ? "/f32/" : "/bf16/") + std::to_string(length);
          benchmark::RegisterBenchmark(name.c_str(), Score, subject, shape, dtype, length)
              ->UseManualTime()
              ->Iterations(length > 8192 ? 9 : 41)
              ->Unit(benchmark::kMillisecond);
        }
  return 0;
}();

}  // namespace
}  // namespace kvkeep::scorer_bench
