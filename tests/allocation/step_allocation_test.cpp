// SPDX-License-Identifier: Apache-2.0
// What a step allocates, and what is left where it cannot. A program of its own: it replaces operator new.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>

#include "arrays.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/folds.h"

namespace {

std::atomic<long> allocations = 0;
std::atomic<long> until_failure = -1;  ///< allocations that succeed before one fails; -1: none fails

void* allocate(std::size_t bytes, std::size_t alignment = alignof(std::max_align_t)) {
  ++allocations;
  if (until_failure >= 0 && until_failure-- == 0) throw std::bad_alloc();
  const std::size_t whole = (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  if (void* memory = std::aligned_alloc(alignment, whole)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes > 0 ? bytes : 1); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes > 0 ? bytes : 1); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace kvkeep {
namespace {

using testing::Array;
using testing::normals;

constexpr std::int32_t kLayers = 2, kQueryHeads = 4, kKvHeads = 2, kDim = 8, kCapacity = 96, kPageSize = 4;

ModelSpec model() {
  ModelSpec spec;
  spec.query_heads = kQueryHeads;
  spec.kv_heads = kKvHeads;
  spec.key_dim = spec.value_dim = kDim;
  spec.rope.inv_freq = {1.0, 0.1};
  spec.layers.resize(kLayers);
  return spec;
}

Provided provided() {
  Provided all;
  all.reads_folded = true;
  return all;
}

/// Two sequences in a small cache, dense or in pages, with everything that an event may change in sight.
class Engine {
 public:
  Engine(const std::string& policy, bool paged)
      : keeper(model(), make_policy(policy), provided()), pool(2 * kCapacity / kPageSize, kPageSize), pages(pool) {
    for (std::int32_t l = 0; l < kLayers; ++l) {
      if (paged)
        layers.emplace_back(PagedKv{normals(random, {pool.capacity(), kPageSize, kKvHeads, kDim}),
                                    normals(random, {pool.capacity(), kPageSize, kKvHeads, kDim})});
      else
        layers.emplace_back(
            DenseKv{normals(random, {2, kKvHeads, kCapacity, kDim}), normals(random, {2, kKvHeads, kCapacity, kDim})});
    }
    for (const SequenceId id : ids) {
      keeper.join(id, 3, 9);
      if (paged) static_cast<void>(pages.admit(id, 3));
    }
    if (paged) table = pages.table(ids);
    keeper.bind(layers);
  }

  [[nodiscard]] CacheView view() {
    CacheView view{.sequences = ids, .lengths = {lengths, kLayers * kKvHeads}};
    if (table.defined()) view.block_table = table, view.pages = &pool;
    return view;
  }

  /// The arguments of observe() for the next tokens.
  void bring(std::int32_t tokens) {
    indptr = {0, tokens, 2 * tokens};
    queries.clear();
    for (std::int32_t l = 0; l < kLayers; ++l) queries.push_back(normals(random, {2 * tokens, kQueryHeads, kDim}));
    if (!table.defined()) return;
    for (const SequenceId id : ids) static_cast<void>(pages.append(id, tokens));
    table = pages.table(ids);
  }
  void observe(std::int32_t layer) {
    keeper.observe({.layer = layer,
                    .sequences = ids,
                    .indptr = indptr,
                    .queries = queries[static_cast<std::size_t>(layer)],
                    .basis = QueryBasis::post_rope});
  }
  void read_folded(std::int32_t layer) {
    auto* const folds = keeper.find<parts::Folds>();
    if (folds == nullptr) return;
    const std::int64_t tokens = indptr.back();
    folds->view({.layer = layer,
                 .sequences = ids,
                 .indptr = indptr,
                 .queries = queries[static_cast<std::size_t>(layer)],
                 .basis = QueryBasis::post_rope},
                {Array::zeros({tokens, kQueryHeads, kDim}), Array::zeros({tokens, kQueryHeads})});
  }
  void grow() {
    for (std::int32_t& length : lengths) length += indptr[1];
  }

  /// All that a caller can see.
  [[nodiscard]] std::vector<std::string> sight() {
    std::vector<std::string> seen;
    const auto add = [&seen](const void* data, std::size_t bytes) {
      seen.emplace_back(static_cast<const char*>(data), bytes);
    };
    for (const LayerKv& layer : layers)
      for (const Tensor& side : table.defined()
                                    ? std::array{std::get<PagedKv>(layer).keys, std::get<PagedKv>(layer).values}
                                    : std::array{std::get<DenseKv>(layer).keys, std::get<DenseKv>(layer).values})
        add(side.bytes(), static_cast<std::size_t>(side.nbytes()));
    add(lengths.data(), lengths.size() * 4);
    if (table.defined()) add(table.bytes(), static_cast<std::size_t>(table.nbytes()));
    seen.push_back(text(pool.free_pages()));
    const auto* const folds = keeper.find<parts::Folds>();
    for (const SequenceId id : ids) {
      seen.push_back(text(keeper.logical_length(id), ' ', keeper.prompt_length(id).value_or(-1), ' ',
                          folds == nullptr ? 0 : folds->of(id).tokens));
      for (std::int32_t r = 0; r < kLayers * kKvHeads; ++r) {
        const auto positions = keeper.positions(id, r / kKvHeads, r % kKvHeads);
        const auto credit = keeper.credit(id, r / kKvHeads, r % kKvHeads);
        add(positions.data(), positions.size_bytes());
        add(credit.data(), credit.size_bytes());
      }
    }
    return seen;
  }

  oracle::Random random{1};
  std::vector<SequenceId> ids{1, 2};
  Keeper keeper;
  PagePool pool;
  PagedSequences pages;
  std::vector<LayerKv> layers;
  Array table;
  std::vector<std::int32_t> lengths = std::vector<std::int32_t>(2 * kLayers * kKvHeads, 3), indptr;
  std::vector<Array> queries;
};

/// Runs a call, letting one allocation after the other fail, until it comes through. Where it does not, everything is
/// as before. Counts failures.
void come_through(Engine& engine, const std::string& what, const std::function<void()>& call, std::int64_t& failures) {
  for (long fails = 0;; ++fails) {
    const auto before = engine.sight();
    bool thrown = false;
    until_failure = fails;
    try {
      call();
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    until_failure = -1;
    if (!thrown) return;
    ++failures;
    ASSERT_EQ(engine.sight(), before) << what << ", allocation " << fails << " fails";
    ASSERT_LT(fails, 5000) << what << " does not come to an end";
  }
}

class OutOfMemory : public ::testing::TestWithParam<std::tuple<const char*, bool>> {};

TEST_P(OutOfMemory, LeavesEverythingAsItWas) {
  Engine engine(std::get<0>(GetParam()), std::get<1>(GetParam()));
  std::int32_t events = 0;
  std::int64_t failures = 0;
  for (std::int32_t step = 0; step < 14 && !::testing::Test::HasFatalFailure(); ++step) {
    engine.bring(step == 0 ? 6 : 1);
    for (std::int32_t layer = 0; layer < kLayers; ++layer) {
      come_through(
          engine, text("observe of layer ", layer, " at step ", step), [&] { engine.observe(layer); }, failures);
      engine.read_folded(layer);
    }
    engine.grow();
    CacheView view = engine.view();
    Report report;
    come_through(engine, text("step ", step), [&] { report = engine.keeper.step(view); }, failures);
    if (engine.table.defined()) engine.pages.settle(engine.ids, report.pages);
    events += report.cuts.empty() ? 0 : 1;
  }
  EXPECT_GE(events, 2);
  EXPECT_GE(failures, 50) << "allocations that failed on purpose";
}

INSTANTIATE_TEST_SUITE_P(
    Policies, OutOfMemory,
    ::testing::Combine(
        ::testing::Values("streaming,budget=8,interval=4,sink=2,recent=1", "tova,budget=8,interval=4,sink=1,recent=1",
                          "ams-tova,budget=8,interval=4,sink=1,recent=1,min_segment=2,max_segment=4,min_quota=1",
                          "h2o,budget=8,interval=4,sink=1,recent=1", "expected,budget=8,interval=4,sink=1,recent=1",
                          "adakv,budget=8,interval=4,sink=1,recent=1,scorer.window=2",
                          "knorm,budget=8,interval=4,sink=1,recent=1,rest=fold,min_span=2"),
        ::testing::Bool()));

TEST(IdleStep, AllocatesNothing) {
  for (const char* policy : {"streaming,budget=24,interval=16", "tova,budget=24,interval=16,recent=2",
                             "ams-tova,budget=24,interval=16,recent=2,window=8,min_segment=2,max_segment=8,min_quota=1",
                             "expected,budget=24,interval=16"})
    for (const bool paged : {false, true}) {
      Engine engine(policy, paged);
      std::int32_t idle = 0;
      for (std::int32_t step = 0; step < 90; ++step) {
        engine.bring(step == 0 ? 6 : 1);
        CacheView view = engine.view();
        const long before = allocations;
        for (std::int32_t layer = 0; layer < kLayers; ++layer) engine.observe(layer);
        const long observed = allocations;
        engine.grow();
        const Report report = engine.keeper.step(view);
        const long after = allocations;
        if (paged) engine.pages.settle(engine.ids, report.pages);
        if (step < 40) continue;  // columns and rings have come to their size
        EXPECT_EQ(observed - before, 0) << policy << ", observe at step " << step;
        if (!report.cuts.empty()) continue;
        EXPECT_EQ(after - observed, 0) << policy << ", step " << step;
        ++idle;
      }
      EXPECT_GT(idle, 20) << policy;
    }
}

TEST(BlockTable, AllocatesNothingWhereOneIsHeld) {
  PagePool pool(64, kPageSize);
  PagedSequences sequences(pool);
  const std::vector<SequenceId> ids{1, 2, 3};
  for (const SequenceId id : ids) static_cast<void>(sequences.admit(id, kPageSize));
  Tensor held;
  long made = 0;
  for (std::int32_t step = 0; step < 40; ++step) {
    static_cast<void>(sequences.append(ids[static_cast<std::size_t>(step % 3)], 1));
    const long before = allocations;
    const Tensor table = sequences.table(ids, held);
    made += allocations > before ? 1 : 0;
    ASSERT_EQ(table.size(0), 3);
  }
  EXPECT_LE(made, 3) << "1 page at first, 5 pages at last, and half as many again each time";
}

}  // namespace
}  // namespace kvkeep
