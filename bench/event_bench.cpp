// SPDX-License-Identifier: Apache-2.0
// One event for all layers, through the public API, beside its own limit measured in the same run:
// the products of the window's queries with the keys through LibTorch's matmul, one exponential per logit, a memcpy of
// the bytes that move.
//
//   kvkeep_bench --benchmark_filter=Event        rows: Event/<model>/<dtype>/<preset>, EventInPages/<policy>/<slots>
//
// Counters are medians over the iterations; warm caches where the data fits (32 MiB of level 3 hold about a third of
// the smallest case).

#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kvkeep/allot/divide.h"
#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/keep/compact.h"
#include "kvkeep/keep/select.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/score/tova.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/torch.h"
#include "timing.h"

namespace kvkeep::event_bench {
namespace {

constexpr std::int32_t kBefore = 1536, kAfter = 1024, kSeen = 160;

struct Shape {
  const char* name;
  std::int32_t layers, query_heads, kv_heads, dim;
};
constexpr Shape kShapes[] = {{"qwen7b", 28, 28, 4, 128}, {"llama8b", 32, 32, 8, 128}};

/// A cache of one sequence with 1536 slots in every layer, ready for an event.
class Subject {
 public:
  /// page_size: 0 dense, else a divisor of kBefore.
  Subject(const Shape& shape, Dtype dtype, const std::string& policy, std::int32_t page_size = 0) : policy_(policy) {
    spec_ = {.query_heads = shape.query_heads,
             .kv_heads = shape.kv_heads,
             .key_dim = shape.dim,
             .value_dim = shape.dim,
             .softmax_scale = 0,
             .rope = {},
             .layers = {}};
    for (int f = 0; f < shape.dim / 2; ++f) spec_.rope.inv_freq.push_back(std::pow(1e6, -2.0 * f / shape.dim));
    spec_.layers.resize(static_cast<std::size_t>(shape.layers));
    const auto options = at::TensorOptions().dtype(at::kFloat);
    for (std::int32_t l = 0; l < shape.layers; ++l) {
      const auto rows = [&] {
        return page_size == 0 ? at::randn({1, shape.kv_heads, kBefore, shape.dim}, options).to(torch_dtype(dtype))
                              : at::randn({kBefore / page_size, page_size, shape.kv_heads, shape.dim}, options)
                                    .to(torch_dtype(dtype));
      };
      if (page_size == 0)
        layers_.emplace_back(DenseKv{rows(), rows()});
      else
        layers_.emplace_back(PagedKv{rows(), rows()});
      queries_.push_back(at::randn({kSeen, shape.query_heads, shape.dim}, options).to(torch_dtype(dtype)));
    }
    view_.sequences = ids_;
    view_.lengths.data = lengths_;
    for (std::int32_t p = 0; page_size > 0 && p < kBefore / page_size; ++p) pages_.push_back(p);
    std::ranges::reverse(pages_);
  }

  /// A keeper that has seen everything but the event.
  Keeper ready() {
    Keeper keeper(spec_, make_policy(policy_));
    keeper.bind(layers_);
    keeper.join(0, kBefore - kSeen);
    const std::int32_t indptr[] = {0, kSeen};
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l)
      keeper.observe(
          {.layer = l, .sequences = ids_, .indptr = indptr, .queries = queries_[static_cast<std::size_t>(l)]});
    lengths_[0] = kBefore;
    table_ = pages_;
    if (!pages_.empty()) view_.block_table = Tensor(table_.data(), Dtype::i32, {1, std::ssize(table_)});
    return keeper;
  }

  /// The products alone, one exponential per logit, and a memcpy of `bytes`.
  void limit(std::int32_t window, std::int64_t bytes, std::vector<char>& from, std::vector<char>& to) {
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l) {
      const at::Tensor q = queries_[static_cast<std::size_t>(l)]
                               .slice(0, kSeen - window)
                               .permute({1, 0, 2})
                               .reshape({spec_.kv_heads, spec_.group() * window, spec_.key_dim});
      const at::Tensor logits =
          at::matmul(q, torch_tensor(std::get<DenseKv>(layers_[static_cast<std::size_t>(l)]).keys)[0].transpose(1, 2))
              .to(at::kFloat);
      logits.exp_();
      benchmark::DoNotOptimize(logits.data_ptr());
    }
    copy(bytes, from, to);
  }

  static void copy(std::int64_t bytes, std::vector<char>& from, std::vector<char>& to) {
    at::parallel_for(0, bytes, 1, [&](std::int64_t begin, std::int64_t end) {
      std::memcpy(to.data() + begin, from.data() + begin, static_cast<std::size_t>(end - begin));
    });
  }

  ModelSpec spec_;
  std::vector<LayerKv> layers_;
  CacheView view_;

 private:
  std::string policy_;
  std::vector<SequenceId> ids_{0};
  std::vector<std::int32_t> lengths_{kBefore}, pages_, table_;
  std::vector<at::Tensor> queries_;
};

/// Compaction of one row against an out-of-place gather, so that nothing wrong is timed.
bool moves_the_right_bytes(Subject& subject) {
  Keeper keeper = subject.ready();
  const Plan plan = keeper.plan(subject.view_);
  const at::Tensor keys = std::get<DenseKv>(subject.layers_[0]).keys;
  const auto kept = plan.decision.keep->row(0);
  const at::Tensor index = at::empty({static_cast<std::int64_t>(kept.size())}, at::TensorOptions().dtype(at::kInt));
  std::copy(kept.begin(), kept.end(), index.data_ptr<std::int32_t>());
  const at::Tensor expected = at::index_select(keys[0][0], 0, index);
  keeper.apply(plan, subject.view_);
  return expected.equal(keys[0][0].slice(0, 0, static_cast<std::int64_t>(kept.size())));
}

void Event(benchmark::State& state, const Shape& shape, Dtype dtype, bool paper) {
  const std::int32_t window = paper ? 128 : 32;
  Subject subject(shape, dtype,
                  std::string("ams-tova,budget=1024,interval=512,preset=") + (paper ? "paper" : "registry"));
  if (!moves_the_right_bytes(subject)) return state.SkipWithError("compaction moved wrong bytes");
  const std::int64_t all = std::int64_t{2} * shape.layers * shape.kv_heads * kBefore * shape.dim * element_size(dtype);
  std::vector<char> from(static_cast<std::size_t>(all), 1), to(static_cast<std::size_t>(all), 2);

  std::vector<double> event, limit, window_part, scoring, allot, moving, copying;
  std::int64_t bytes = 0;
  for (auto _ : state) {
    {
      Keeper keeper = subject.ready();
      event.push_back(milliseconds([&] { bytes = keeper.step(subject.view_).wait().bytes_moved; }));
      state.SetIterationTime(event.back() / 1e3);
    }
    limit.push_back(milliseconds([&] { subject.limit(window, bytes, from, to); }));
    Keeper keeper = subject.ready();
    const Plan plan = keeper.plan(subject.view_);
    const Evidence evidence{subject.spec_, plan.table};
    const Limits limits = even_limits(plan.table, kAfter, 4, 32);
    WindowAttention seen;
    window_part.push_back(milliseconds([&] {
      seen = window_attention(evidence, row_windows(evidence, limits, window, false), {.usage = true, .newest = true});
    }));
    Decision decision;
    scoring.push_back(milliseconds([&] { decision.scores = Tova().score(evidence, limits, seen); }));
    MassSegmentedOptions options;
    if (paper)
      options = {.window = 128,
                 .segment_mass = 0.1,
                 .min_segment = 16,
                 .max_segment = 256,
                 .min_quota = 1,
                 .credit_decay = 0.9,
                 .credit_mix = 0.9};
    allot.push_back(
        milliseconds([&] { MassSegmented(options).allot(evidence, limits, decision.scores, seen, decision); }));
    moving.push_back(milliseconds([&] { compact(plan.table, *decision.keep); }));
    copying.push_back(milliseconds([&] { Subject::copy(bytes, from, to); }));
  }
  const double whole = median(event);
  state.counters["event_ms"] = whole;
  state.counters["limit_ms"] = median(limit);
  state.counters["event/limit"] = whole / median(limit);
  state.counters["window_ms"] = median(window_part);
  state.counters["decide_rest_ms"] = median(scoring) + median(allot);
  state.counters["decide_rest/event"] = (median(scoring) + median(allot)) / whole;
  state.counters["compact_ms"] = median(moving);
  state.counters["memcpy/compact"] = median(copying) / median(moving);
  state.counters["memcpy_GB/s"] = static_cast<double>(bytes) / median(copying) / 1e6;
  state.counters["ms/layer"] = whole / shape.layers;
}

/// The whole event over pages [pages, page_size, Hkv, D] that lie in reverse.
void EventInPages(benchmark::State& state, const char* policy, std::int32_t page_size) {
  Subject subject(kShapes[0], Dtype::bf16, std::string(policy) + ",budget=1024,interval=512", page_size);
  std::vector<double> event;
  for (auto _ : state) {
    Keeper keeper = subject.ready();
    event.push_back(milliseconds([&] { benchmark::DoNotOptimize(keeper.step(subject.view_).wait()); }));
    state.SetIterationTime(event.back() / 1e3);
  }
  state.counters["event_ms"] = median(event);
}

/// Selection and compaction against what LibTorch offers: topk, sort and gather, for each row and segment.
void SelectAndCompact(benchmark::State& state, const Shape& shape, Dtype dtype) {
  Subject subject(shape, dtype, "ams-tova,budget=1024,interval=512");
  Keeper keeper = subject.ready();
  const Plan plan = keeper.plan(subject.view_);
  const float* scores = plan.decision.scores.data.data<float>();
  const at::Tensor all_scores = plan.decision.scores.data;
  std::vector<at::Tensor> all_keys, all_values;
  for (const LayerKv& layer : subject.layers_) {
    all_keys.push_back(std::get<DenseKv>(layer).keys);
    all_values.push_back(std::get<DenseKv>(layer).values);
  }
  std::vector<double> ours, torch;
  for (auto _ : state) {
    ours.push_back(milliseconds([&] {
      at::parallel_for(
          0, static_cast<std::int64_t>(plan.table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
            std::vector<std::uint64_t> keys;
            std::vector<std::int32_t> slots(kAfter);
            for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
              select_in_segments({scores + plan.table.rows[r].first, kBefore}, plan.decision.allotment->ends[r],
                                 plan.decision.allotment->quotas[r], {}, keys, slots);
              compact_slots(plan.table.rows[r].keys, slots);
              compact_slots(plan.table.rows[r].values, slots);
            }
          });
    }));
    state.SetIterationTime(ours.back() / 1e3);
    torch.push_back(milliseconds([&] {
      for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
        const Row& row = plan.table.rows[r];
        std::vector<at::Tensor> parts;
        std::int32_t start = 0;
        for (std::size_t i = 0; i < plan.decision.allotment->ends[r].size(); ++i) {
          const std::int32_t end = plan.decision.allotment->ends[r][i], quota = plan.decision.allotment->quotas[r][i];
          parts.push_back(
              at::add(std::get<1>(all_scores.slice(0, row.first + start, row.first + end).topk(quota)), start));
          start = end;
        }
        const at::Tensor index = std::get<0>(at::cat(parts).sort());
        const auto layer = static_cast<std::size_t>(row.layer);
        benchmark::DoNotOptimize(all_keys[layer][0][row.head].index_select(0, index).data_ptr());
        benchmark::DoNotOptimize(all_values[layer][0][row.head].index_select(0, index).data_ptr());
      }
    }));
  }
  state.counters["ours_ms"] = median(ours);
  state.counters["torch_ms"] = median(torch);
  state.counters["torch/ours"] = median(torch) / median(ours);
}

const int kRegistered = [] {
  for (const char* policy : {"ams-tova", "keydiff", "knorm", "streaming"})
    for (const std::int32_t page_size : {0, 16, 24})
      benchmark::RegisterBenchmark(text("EventInPages/", policy, "/", page_size).c_str(), EventInPages, policy,
                                   page_size)
          ->UseManualTime()
          ->Iterations(15)
          ->Unit(benchmark::kMillisecond);
  for (const Shape& shape : kShapes)
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      const std::string tail = std::string(shape.name) + (dtype == Dtype::f32 ? "/f32" : "/bf16");
      for (const bool paper : {false, true})
        benchmark::RegisterBenchmark(("Event/" + tail + (paper ? "/paper" : "/registry")).c_str(), Event, shape, dtype,
                                     paper)
            ->UseManualTime()
            ->Iterations(9)
            ->Unit(benchmark::kMillisecond);
      benchmark::RegisterBenchmark(("SelectAndCompact/" + tail).c_str(), SelectAndCompact, shape, dtype)
          ->UseManualTime()
          ->Iterations(9)
          ->Unit(benchmark::kMillisecond);
    }
  return 0;
}();

}  // namespace
}  // namespace kvkeep::event_bench
