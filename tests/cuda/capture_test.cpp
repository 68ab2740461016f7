// SPDX-License-Identifier: Apache-2.0
// Events in CUDA graphs and on several streams: a replay is the event that was captured, whatever ran between; memory
// lives as long as graphs and streams need it.

#include <ATen/ops/empty.h>

#include <deque>
#include <numeric>
#include <optional>
#include <set>

#include "arrays.h"
#include "captured_graph.h"
#include "engines.h"
#include "fresh_accelerator.h"
#include "memory.h"

namespace kvkeep::cuda::capture_test {
namespace {

using testing::Array;
using namespace engines;

using Ids = std::vector<SequenceId>;

const char* const kPolicy = "ams-tova,budget=48,interval=12,recent=4,window=8,min_segment=2,max_segment=16";

/// A keeper on the CPU and one on the device, fed alike. Sequences 1 and 2 are due whenever 12 tokens came.
class Twins {
 public:
  explicit Twins(Dtype dtype = Dtype::f32, const std::shared_ptr<Machine>& accelerator = fresh_accelerator())
      : cpu(kPolicy, false, dtype), device(std::in_place, kPolicy, false, dtype, accelerator) {
    for (const SequenceId id : {1, 2}) join(id, 50);
  }
  void join(SequenceId id, std::int32_t tokens) {
    cpu.join(id);
    device->join(id);
    feed({{id, tokens}});
    expect_cut({id}, false);
  }
  void feed(const std::vector<std::pair<SequenceId, std::int32_t>>& work) {
    const Numbers& numbers = fed_.emplace_back(numbers_of(random_, work));
    cpu.feed(numbers);
    device->feed(numbers);
  }
  void expect_cut(const Ids& ids, bool due = true) {
    expect_cpu_cut(ids, due);
    EXPECT_EQ(!device->cut(ids).cuts.empty(), due);
  }
  void expect_cpu_cut(const Ids& ids, bool due = true) { EXPECT_EQ(!cpu.cut(ids).cuts.empty(), due); }
  /// Cuts on the CPU, and captures the same on the device.
  CapturedGraph capture(const c10::Stream& stream, const Ids& ids) {
    expect_cpu_cut(ids);
    return CapturedGraph(stream, [&] { static_cast<void>(device->cut(ids)); });
  }
  /// Two events of either sequence; the last is that of `last`. Enough that the next ones allocate nothing.
  void warm_up(SequenceId last) {
    for (int round = 0; round < 2; ++round) {
      feed({{1, 12}, {2, 12}});
      expect_cut({3 - last});
      expect_cut({last});
    }
    feed({{1, 12}, {2, 12}});
  }

  DenseEngine cpu;
  std::optional<DenseEngine> device;

 private:
  oracle::Random random_{41};
  std::deque<Numbers> fed_;
};

using CapturedEvents = OnSideStream<>;

TEST_F(CapturedEvents, AreWhatTheyWereThoughAnotherEventRanBeforeTheReplay) {
  Twins twins;
  twins.warm_up(1);
  const CapturedGraph graph = twins.capture(stream(), {1});
  twins.expect_cut({2});
  graph.replay();
  expect_alike(twins.cpu, *twins.device);
}

TEST_F(CapturedEvents, LeaveNothingToTheNextEventThatItWouldTakeForItsOwn) {
  Twins twins;
  twins.warm_up(2);
  const CapturedGraph graph = twins.capture(stream(), {1});
  twins.expect_cut({2});
  graph.replay();
  ASSERT_NO_FATAL_FAILURE(expect_alike(twins.cpu, *twins.device));
  twins.feed({{1, 12}, {2, 12}});
  twins.expect_cut({2});
  twins.expect_cut({1});
  expect_alike(twins.cpu, *twins.device);
}

TEST_F(CapturedEvents, MayBeAnyNumberWithoutAnEventThatIsNotCapturedBetween) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    Twins twins(dtype);
    twins.warm_up(2);
    std::deque<CapturedGraph> graphs;
    for (int round = 0; round < 6; ++round) {
      const auto capture = [&](SequenceId id) -> const CapturedGraph& {
        twins.expect_cpu_cut({id});
        return graphs.emplace_back(stream(), [&] { static_cast<void>(twins.device->cut({id})); });
      };
      const CapturedGraph &first = capture(1), &second = capture(2);
      EXPECT_LE(first.nodes(cudaGraphNodeTypeKernel), 6);
      EXPECT_EQ(first.nodes(cudaGraphNodeTypeMemcpy), 2) << "both tables, though one of them is as it was";
      for (const CapturedGraph* graph : {&second, &first}) graph->replay();
      ASSERT_NO_FATAL_FAILURE(expect_alike(twins.cpu, *twins.device)) << "round " << round;
      twins.feed({{1, 12}, {2, 12}});
    }
    EXPECT_EQ(twins.device->keeper.totals().events, 2 * 2 + 2 * 6);
  }
}

TEST_F(CapturedEvents, TakeConstantsAlongWhereTheFirstIsCaptured) {
  // The first event of a keeper uploads rotary frequencies. Where it is captured they come with its replay, and later
  // events must not count on that.
#if !defined(KVKEEP_CUDA_MODEL)
  GTEST_SKIP() << "a first event allocates, which a GPU allows in a pool of the graph alone";
#endif
  Twins twins;
  twins.feed({{1, 12}, {2, 12}});
  const CapturedGraph graph = twins.capture(stream(), {1});
  twins.expect_cut({2});
  graph.replay();
  expect_alike(twins.cpu, *twins.device);
}

TEST_F(CapturedEvents, MayBeTheSecondOfTheirSize) {
  // The first event takes all of its workspace at once: several blocks would be merged, which allocates, when the next
  // one begins.
  constexpr std::int32_t kSequences = 8, kFull = 960, kBudget = 512;
  ModelSpec spec;
  spec.query_heads = 8, spec.kv_heads = 4, spec.key_dim = spec.value_dim = 32;
  spec.layers.resize(2);
  Keeper keeper(spec, make_policy(text("ams-tova,budget=", kBudget, ",interval=", kFull - kBudget)),
                {.accelerator = fresh_accelerator()});
  oracle::Random random(61);
  const auto numbers = [&](const Shape& sizes) { return testing::normals(random, sizes).to(keeper.device()); };
  std::vector<LayerKv> layers;
  for (int l = 0; l < 2; ++l)
    layers.emplace_back(DenseKv{numbers({kSequences, 4, kFull, 32}), numbers({kSequences, 4, kFull, 32})});
  std::vector<SequenceId> ids(kSequences);
  std::iota(ids.begin(), ids.end(), 0);
  Ints lengths;
  for (const SequenceId id : ids) keeper.join(id, kBudget), lengths.push_back(kBudget);
  const auto fill = [&] {
    const std::int32_t tokens = kFull - kBudget;
    const Array queries = numbers({kSequences * tokens, 8, 32});
    Ints indptr{0};
    for (std::int32_t& length : lengths) length += tokens, indptr.push_back(indptr.back() + tokens);
    for (std::int32_t l = 0; l < 2; ++l)
      keeper.observe(
          {.layer = l, .sequences = ids, .indptr = indptr, .queries = queries, .basis = QueryBasis::post_rope});
  };
  keeper.bind(layers);
  const auto view = [&] { return CacheView{ids, {lengths}}; };
  fill();
  ASSERT_GT(keeper.workspace_bytes(view()), std::int64_t{1} << 20) << "more than the least block";
  EXPECT_EQ(keeper.step(view()).wait().cuts.size(), ids.size());
  EXPECT_EQ(lengths, Ints(kSequences, kBudget));
  fill();
#if defined(KVKEEP_CUDA_MODEL)
  const std::int64_t before = model::counters().allocations;
#endif
  const CapturedGraph graph(stream(), [&] { EXPECT_EQ(keeper.step(view()).wait().cuts.size(), ids.size()); });
#if defined(KVKEEP_CUDA_MODEL)
  EXPECT_EQ(model::counters().allocations, before) << "the second event allocates";
#endif
  graph.replay();
  EXPECT_EQ(keeper.positions(7, 1, 3).size(), static_cast<std::size_t>(kBudget));
}

/// A decode step of up to `rows` tokens in a graph: queries lie where the engine always has them, padded.
class DecodeGraph {
 public:
  DecodeGraph(DenseEngine& engine, const c10::Stream& stream, std::int64_t rows)
      : queries_(filled({kLayers, rows, 4, kKeyDim}, engine)),
        normalisers_(filled({kLayers, rows, 4}, engine)),
        graph_(stream, [&] {
          for (std::int32_t l = 0; l < kLayers; ++l)
            engine.keeper.record(l, queries_[l], engine.gives_log_sum_exp ? normalisers_[l] : Array());
        }) {}
  /// What the engine's attention would do before the graph reads it.
  void place(std::int32_t layer, const Array& queries, const Array& normalisers) {
    queries_[layer].narrow(0, 0, queries.size(0)).copy_(queries);
    if (normalisers.defined()) normalisers_[layer].narrow(0, 0, queries.size(0)).copy_(normalisers);
  }
  void replay() const { graph_.replay(); }
  [[nodiscard]] const CapturedGraph& graph() const { return graph_; }

 private:
  static Array filled(const Shape& sizes, const Engine& engine) {
    return Array::full(sizes, 1e30, Dtype::f32, engine.keeper.device());
  }

  Array queries_, normalisers_;
  CapturedGraph graph_;
};

using CapturedSteps = CapturedEvents;

/// A hundred steps: a prompt is eager, decode steps replay graphs of three sizes.
void expect_alike_through_graphs(const c10::Stream& stream, bool normalised) {
  Twins twins;
  DenseEngine& device = *twins.device;
  const auto eager = [&](std::int32_t layer, const Array& queries, const Array& normalisers) {
    device.keeper.record(layer, queries, normalisers);
  };
  device.record = eager;
  device.gives_log_sum_exp = normalised;
  twins.feed({{1, 12}, {2, 12}});
  twins.expect_cut({1, 2});
  std::deque<DecodeGraph> graphs;  // captured between steps, one per size, as engines do
  for (const std::int64_t rows : {1, 2, 8}) {
    const DecodeGraph& made = graphs.emplace_back(device, stream, rows);
    EXPECT_EQ(made.graph().nodes(cudaGraphNodeTypeKernel), kLayers);
    EXPECT_EQ(made.graph().nodes(cudaGraphNodeTypeMemcpy), 0);
  }
  int events = 0;
  for (int step = 0; step < 100; ++step) {
    if (step == 40) {
      device.record = eager;  // a prompt does not go through a graph
      twins.join(3, 30);
    }
    const Ids ids = step < 40 ? Ids{1, 2} : step < 70 ? Ids{2, 3, 1} : Ids{3};
    DecodeGraph& graph = graphs[ids.size() == 1 ? 0U : ids.size() == 2 && step % 2 == 0 ? 1U : 2U];
    device.record = [&](std::int32_t layer, const Array& queries, const Array& normalisers) {
      graph.place(layer, queries, normalisers);
    };
    std::vector<std::pair<SequenceId, std::int32_t>> work;
    for (const SequenceId id : ids) work.emplace_back(id, 1);
    twins.feed(work);
    graph.replay();
    const bool due = !twins.cpu.cut(ids).cuts.empty();
    EXPECT_EQ(!device.cut(ids).cuts.empty(), due);
    events += due ? 1 : 0;
    ASSERT_NO_FATAL_FAILURE(expect_alike(twins.cpu, device)) << "step " << step;
  }
  EXPECT_GE(events, 8);
}

TEST_F(CapturedSteps, FileTheQueriesOfTheStepThatBeganBeforeTheReplay) { expect_alike_through_graphs(stream(), false); }

TEST_F(CapturedSteps, FileTheirLogSumExpsToo) { expect_alike_through_graphs(stream(), true); }

TEST_F(CapturedEvents, ReadTheKeysOnceWhereTheEngineGaveItsLogSumExps) {
  const auto kernels = [&](Twins& twins) {
    const CapturedGraph graph = twins.capture(stream(), {1});
    graph.replay();
    expect_alike(twins.cpu, *twins.device);
    return graph.nodes(cudaGraphNodeTypeKernel);
  };
  Twins twice, once, late;
  once.device->gives_log_sum_exp = true;
  for (Twins* const twins : {&twice, &once, &late}) twins->warm_up(2);
  EXPECT_EQ(kernels(twice), 6);
  EXPECT_EQ(kernels(once), 5);
  // Fewer tokens than the window has came with them: the others must be found.
  late.feed({{1, 7}});
  late.device->gives_log_sum_exp = true;
  late.feed({{1, 7}});
  EXPECT_EQ(kernels(late), 6);
}

TEST_F(CapturedSteps, AreRefusedWhereAGraphWouldReadAnotherTable) {
  Twins twins;
  DenseEngine& device = *twins.device;
  device.record = [&](std::int32_t layer, const Array& queries, const Array&) { device.keeper.record(layer, queries); };
  const auto begin = [&](std::int32_t tokens) {
    const SequenceId id = 1;
    const Ints indptr{0, tokens};
    device.keeper.begin_step({.sequences = {&id, 1}, .indptr = indptr});
  };
  twins.feed({{1, 1}});
  EXPECT_THROW(CapturedGraph(stream(), [&] { begin(1); }), StateError);
  const DecodeGraph graph(device, stream(), 1);
  const std::int64_t before = device.keeper.logical_length(1);
  EXPECT_THROW(begin(1000), StateError) << "its table moves";
  EXPECT_EQ(device.keeper.logical_length(1), before);
  begin(20);
  EXPECT_THROW(static_cast<void>(DecodeGraph(device, stream(), 1000)), StateError);
}

using Uploads = CapturedEvents;

TEST_F(Uploads, LeaveABufferAloneUntilItsCopyIsDone) {
  constexpr std::size_t kUploads = 30, kBytes = 3000;
  const auto native = static_cast<cudaStream_t>(stream().native_handle());
  const auto bytes_of = [&](std::size_t n) {
    return std::vector<std::byte>(1 + n * 37 % kBytes, static_cast<std::byte>(n + 1));
  };
  Staging staging;
  std::deque<DeviceArray<std::byte>> there;
  for (std::size_t n = 0; n < kUploads; ++n) there.emplace_back(bytes_of(n).size());
  const auto upload = [&](std::size_t n) {
    std::vector<std::byte> bytes = bytes_of(n);
    staging.upload(there[n].data(), bytes.data(), bytes.size(), native);
    std::ranges::fill(bytes, std::byte{0});
  };
  const auto expect_there = [&](std::size_t first, std::size_t last) {
    for (std::size_t n = first; n < last; ++n) EXPECT_EQ(there[n].download(), bytes_of(n)) << "upload " << n;
  };
#if defined(KVKEEP_CUDA_MODEL)
  model::hold_streams(true);
#endif
  for (std::size_t n = 0; n < 3; ++n) upload(n);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  expect(cudaStreamBeginCapture(native, cudaStreamCaptureModeGlobal));
  for (std::size_t n = 3; n < 13; ++n) upload(n);
  expect(cudaStreamEndCapture(native, &graph));
  expect(cudaGraphInstantiate(&ready, graph, 0));
  for (std::size_t n = 13; n < kUploads; ++n) upload(n);
#if defined(KVKEEP_CUDA_MODEL)
  model::hold_streams(false);
#endif
  expect(cudaStreamSynchronize(native));
  expect_there(0, 3);
  expect_there(13, kUploads);
  for (int replay = 0; replay < 2; ++replay) {
    for (std::size_t n = 3; n < 13; ++n) there[n].upload(std::vector<std::byte>(there[n].size()));
    expect(cudaGraphLaunch(ready, native));
    expect(cudaStreamSynchronize(native));
    expect_there(3, 13);
  }
  expect(cudaGraphExecDestroy(ready));
  expect(cudaGraphDestroy(graph));
}

#if defined(KVKEEP_CUDA_MODEL)  // what LibTorch's allocator is asked to do can be seen under the model alone

/// While it lives, notes what memory LibTorch's allocator gives and gets back.
class WatchedMemory final : public c10::Allocator {
 public:
  WatchedMemory() : below_(c10::GetAllocator(c10::kCPU)) { c10::SetAllocator(c10::kCPU, this, kPriority); }
  ~WatchedMemory() override { c10::SetAllocator(c10::kCPU, below_, kPriority); }
  WatchedMemory(const WatchedMemory&) = delete;
  WatchedMemory& operator=(const WatchedMemory&) = delete;

  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr memory = below_->allocate(bytes);
    void* const data = memory.get();
    log_->living.insert(data);
    return {data, new Piece{std::move(memory), log_}, [](void* piece) { delete static_cast<Piece*>(piece); },
            c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  [[nodiscard]] const std::set<const void*>& living() const { return log_->living; }
  /// What was given back since the last call.
  [[nodiscard]] std::vector<const void*> freed() const { return std::exchange(log_->freed, {}); }

 private:
  static constexpr std::uint8_t kPriority = 255;  ///< the highest: what another test has set makes way
  struct Log {
    std::set<const void*> living;
    std::vector<const void*> freed;
  };
  struct Piece {
    c10::DataPtr memory;
    std::shared_ptr<Log> log;
    ~Piece() {
      log->living.erase(memory.get());
      log->freed.push_back(memory.get());
    }
  };
  c10::Allocator* below_;
  std::shared_ptr<Log> log_ = std::make_shared<Log>();
};

TEST_F(CapturedEvents, FindTheirMemoryThoughTablesColumnsAndWorkspaceGrewSince) {
  if (model::settings().guard) GTEST_SKIP() << "device memory is not LibTorch's";
  const WatchedMemory watched;
  const std::shared_ptr<Machine> accelerator = fresh_accelerator();
  const auto workspace = [&](std::int64_t bytes) {
    const Array memory = at::empty({bytes + 256}, at::TensorOptions().dtype(at::kByte));  // which is watched
    return memory.narrow(0, (256 - reinterpret_cast<std::intptr_t>(memory.bytes()) % 256) % 256, bytes);
  };
  accelerator->use_workspace(workspace(8 << 20));
  Twins twins(Dtype::f32, accelerator);
  twins.warm_up(2);
  const CapturedGraph graph = twins.capture(stream(), {1});
  graph.replay();
  twins.expect_cut({2});
  const std::set<const void*> known = watched.living();
  static_cast<void>(watched.freed());

  accelerator->use_workspace(workspace(16 << 20));
  twins.feed({{1, 40}, {2, 40}});  // more than their columns hold
  twins.join(3, 200);
  twins.feed({{3, 12}});
  twins.expect_cut({1, 2, 3});
  for (const void* memory : watched.freed()) ASSERT_FALSE(known.contains(memory)) << "a graph still writes it";
  ASSERT_NO_FATAL_FAILURE(expect_alike(twins.cpu, *twins.device));

  graph.replay();  // no event any more, but columns that were replaced since are none of the sequence's
  for (std::int32_t r = 0; r < kRows; ++r) {
    const auto a = twins.cpu.keeper.positions(1, r / kHeads, r % kHeads),
               b = twins.device->keeper.positions(1, r / kHeads, r % kHeads);
    EXPECT_TRUE(std::ranges::equal(a, b)) << "row " << r;
  }
  const auto kept = [&] {
    const std::vector<const void*> freed = watched.freed();
    return std::ranges::count_if(freed, [&](const void* memory) { return known.contains(memory); });
  };
  static_cast<void>(kept());
  twins.device->keeper.leave(1);
  EXPECT_GE(kept(), 2) << "with its sequence goes what its columns were before";
}

TEST_F(CapturedEvents, FreeWhatIsReplacedWhereNothingWasCaptured) {
  if (model::settings().guard) GTEST_SKIP() << "device memory is not LibTorch's";
  const WatchedMemory watched;
  Twins twins;
  twins.warm_up(2);
  twins.expect_cut({1, 2});
  const std::set<const void*> known = watched.living();
  static_cast<void>(watched.freed());
  twins.feed({{1, 40}, {2, 40}});
  EXPECT_EQ(std::ranges::count_if(watched.freed(), [&](const void* memory) { return known.contains(memory); }), 4)
      << "positions and credit of two sequences";
}

#endif

}  // namespace
}  // namespace kvkeep::cuda::capture_test
