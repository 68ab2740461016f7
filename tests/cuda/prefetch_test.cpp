// SPDX-License-Identifier: Apache-2.0
// Folds::prefetch() on a device: what comes near beside attention, on a stream of the accelerator's own, changes no bit
// of what view() gives.

#include <gtest/gtest.h>

#include "captured_graph.h"
#include "device.h"
#include "folding_engine.h"
#include "fresh_accelerator.h"
#include "message_of.h"
#include "temporary_folder.h"
#include "trained_router.h"

#if defined(KVKEEP_CUDA_MODEL)
#include "accelerator.h"
#include "device_pool.h"
#include "held_memory.h"
#include "kvkeep/cuda.h"
#include "memory.h"
#endif

namespace kvkeep::cuda::prefetch_test {
namespace {

using testing::Array;
using testing::FoldingEngine;
using testing::message_of;
using Prefetch = OnDevice;

const std::string kTova = FoldingEngine::kTova;

/// Memory of it goes back in the order of streams, however far they are behind.
std::shared_ptr<Machine> in_order() {
#if defined(KVKEEP_CUDA_MODEL)
  return make_accelerator(Device{}, pool_resources(0));
#else
  return fresh_accelerator();
#endif
}

using Work = std::vector<std::pair<SequenceId, std::int32_t>>;

/// Two keepers that are given the same, of which one prefetches.
struct Pair {
  explicit Pair(const std::string& policy, std::int32_t page_size = 0, Dtype dtype = Dtype::f32,
                const std::function<std::shared_ptr<Machine>()>& accelerator = in_order)
      : plain(policy, 3, page_size, dtype, accelerator()), ahead(policy, 3, page_size, dtype, accelerator()) {
    ahead.ahead = [this](const Observation& seen) { folds().prefetch(seen); };
  }
  parts::Folds& folds() { return ahead.keeper.part<parts::Folds>(); }
  void join(SequenceId id) { plain.join(id), ahead.join(id); }
  void leave(SequenceId id) { plain.leave(id), ahead.leave(id); }
  void step(const Work& work) {
    hold(true);
    const Report b = ahead.step(work);
    hold(false);
    const Report a = plain.step(work);
    ASSERT_EQ(a.slots_folded, b.slots_folded);
    events += a.slots_folded > 0 ? 1 : 0;
    for (std::size_t l = 0; l < plain.outputs.size(); ++l)
      ASSERT_EQ(testing::apart(plain.outputs[l], ahead.outputs[l]), 0) << "layer " << l;
  }
  /// Prompts, decoding, sequences that come and go, several tokens a step.
  void run() {
    for (const SequenceId id : {1, 2, 3}) join(id);
    ASSERT_NO_FATAL_FAILURE(step({{1, 40}, {2, 70}, {3, 7}}));
    for (int i = 0; i < 5; ++i) ASSERT_NO_FATAL_FAILURE(step({{3, 1}, {2, 1}, {1, 2}})) << "step " << i;
    leave(2);
    join(4);
    ASSERT_NO_FATAL_FAILURE(step({{1, 1}, {4, 50}, {3, 4}}));
    for (int i = 0; i < 5; ++i) ASSERT_NO_FATAL_FAILURE(step({{4, 2}, {1, 1}})) << "step " << i;
    ASSERT_NO_FATAL_FAILURE(step({{3, 30}, {4, 1}}));
    EXPECT_GE(events, 4);
  }
  /// The streams of the keeper that prefetches are held while it steps: its device runs behind the host, stream beside
  /// stream, in another order each time.
  void hold([[maybe_unused]] bool hold) {
#if defined(KVKEEP_CUDA_MODEL)
    if (seed > 0) HeldMemory::hold_streams(hold, hold ? seed++ : 0);
#endif
  }

  FoldingEngine plain, ahead;
  std::vector<std::vector<Array>> kept;  ///< of steps that were broken off
  std::int64_t events = 0;
  std::uint64_t seed = 0;  ///< 0: streams are not held
};

TEST_F(Prefetch, ChangesNoBitOfWhatAttentionGives) {
  const std::string rank = ",memory.rank=max,memory.max_rank=3";
  for (const std::string& options : {rank, rank + ",memory.sketch=false,memory.reach=48",
                                     rank + ",memory.zoom_heads=group,memory.mass=0", rank + ",memory.zoom=coverage"}) {
    SCOPED_TRACE(options);
    const bool paged = options == rank;
    ASSERT_NO_FATAL_FAILURE(Pair(kTova + options, paged ? 4 : 0, paged ? Dtype::bf16 : Dtype::f32).run());
  }
  Pair surprised(FoldingEngine::kSekv);
  ASSERT_NO_FATAL_FAILURE(surprised.run());
}

class LearnedPrefetch : public testing::TemporaryFolder {};

TEST_F(LearnedPrefetch, ChangesNoBitOfWhatAttentionGives) {
  if (!has_machine()) GTEST_SKIP() << "no GPU here";
  const std::string learned = testing::routed_by(
      folder_, 93, {.layers = FoldingEngine::kLayers, .heads = FoldingEngine::kQueryHeads, .max_rank = 4});
  for (const std::string& options : {std::string(), std::string(",memory.rank=gates,memory.max_rank=4")}) {
    SCOPED_TRACE(options);
    Pair both(kTova + learned + options);
    both.seed = 11;
    ASSERT_NO_FATAL_FAILURE(both.run());
  }
}

/// A step that ends before its last layer is read, of which tokens are taken back.
void break_off(Pair& both, const Work& work) {
  both.ahead.views = false;
  both.hold(true);
  EXPECT_THROW(both.ahead.step(work), StateError);
  both.ahead.views = true;
  both.kept.push_back(std::exchange(both.ahead.in_flight, {}));
  for (const auto& [id, tokens] : work) {
    both.ahead.keeper.truncate(id, both.ahead.keeper.logical_length(id) - tokens);
    FoldingEngine::Living& s = both.ahead.living.at(id);
    const auto left = static_cast<std::size_t>(both.ahead.keeper.logical_length(id));
    s.surprisal.resize(left);
    s.keys.resize(left * FoldingEngine::kLayers * FoldingEngine::kHeads * FoldingEngine::kDim);
    s.values.resize(s.keys.size());
    s.queries.resize(left * FoldingEngine::kLayers * FoldingEngine::kQueryHeads * FoldingEngine::kDim);
    s.random = both.plain.living.at(id).random;
  }
}

TEST_F(Prefetch, ThatNobodyReadsIsForgotten) {
  for (const std::uint64_t seed : {0, 1, 40, 70}) {
    SCOPED_TRACE(text("seed ", seed));
    Pair both(kTova + ",memory.rank=max,memory.max_rank=3");
    both.seed = seed;
    for (const SequenceId id : {1, 2, 3}) both.join(id);
    ASSERT_NO_FATAL_FAILURE(both.step({{1, 40}, {2, 70}, {3, 50}}));
    for (int i = 0; i < 6; ++i) {
      ASSERT_NO_FATAL_FAILURE(both.step({{1, 1}, {2, 1}, {3, 1}})) << "step " << i;
      break_off(both, i == 1 ? Work{{1, 1}} : Work{{2, 1}, {1, 2}});
      const bool again = i % 2 == 0;  // the next step asks for another one, or for none
      const auto prefetch = again ? nullptr : std::exchange(both.ahead.ahead, nullptr);
      if (i == 3) {  // and folds what nobody has to read before
        both.leave(2), both.join(2);
        both.plain.views = both.ahead.views = false;
        ASSERT_NO_FATAL_FAILURE(both.step({{2, 50}}));
        ASSERT_NO_FATAL_FAILURE(both.step({{2, 1}}));
        both.plain.views = both.ahead.views = true;
      } else {
        ASSERT_NO_FATAL_FAILURE(both.step({{1, 1}})) << "step " << i;
      }
      if (!again) both.ahead.ahead = prefetch;
    }
    EXPECT_GE(both.events, 2);
  }
}

TEST_F(Prefetch, IsRefusedInACapture) {
  const Device there = fresh_accelerator()->device();
  const c10::Stream side = side_stream(there);
  const c10::StreamGuard guard(side);
  FoldingEngine engine(kTova, 1, 0, Dtype::f32, fresh_accelerator());
  engine.join(1);
  engine.step({{1, 90}});
  std::string said;
  engine.ahead = [&](const Observation& seen) {
    const CapturedGraph graph(
        side, [&] { said = message_of<StateError>([&] { engine.keeper.part<parts::Folds>().prefetch(seen); }); });
  };
  engine.step({{1, 1}});
  EXPECT_NE(said.find("prefetch: the stream is being captured"), std::string::npos) << said;
}

#if defined(KVKEEP_CUDA_MODEL)
TEST_F(Prefetch, ChangesNoBitInTurnsAndWhereTheArenaIsFull) {
  for (const FoldBounds bounds : {FoldBounds{20000, 20000, 600}, {1, 1, 0}}) {
    SCOPED_TRACE(text(bounds.view_bytes, " bytes"));
    Pair both(kTova + ",memory.rank=max,memory.max_rank=3", 0, Dtype::f32,
              [&] { return make_accelerator(Device{}, pool_resources(0), bounds); });
    both.seed = 9;
    ASSERT_NO_FATAL_FAILURE(both.run());
  }
}

TEST_F(Prefetch, IsOrderedByEventsHoweverFarTheStreamsAreApart) {
  for (const std::uint64_t seed : {100, 200, 300}) {
    SCOPED_TRACE(text("seed ", seed));
    Pair both(kTova + ",memory.rank=max,memory.max_rank=3");
    both.seed = seed;
    ASSERT_NO_FATAL_FAILURE(both.run());
  }
}

TEST_F(Prefetch, KeepsMemoryUntilItsStreamIsDone) {
  DevicePool pool(Device{}, pool_resources(0));
  const Stream stream = pool.stream(), side = pool.side();
  EXPECT_NE(side, stream);
  EXPECT_EQ(pool.side(), side) << "made once";
  model::hold_streams(true);
  DeviceMemory memory = pool.allocate(64);
  const StreamMark done(side);
  memory.reset();
  EXPECT_FALSE(done.reached());
  expect(cudaStreamSynchronize(stream));
  EXPECT_TRUE(done.reached());
  model::hold_streams(false);
}

/// The stream of attention stands still, or goes on, while the other one does its part.
TEST_F(Prefetch, RunsBesideAttention) {
  FoldingEngine engine(kTova, 1, 0, Dtype::f32, fresh_accelerator());
  engine.join(1);
  engine.step({{1, 90}});
  engine.step({{1, 1}});
  const auto launches = [] { return model::counters().launches; };
  std::int64_t before = 0, layers = 0;
  engine.ahead = [&](const Observation& seen) {
    HeldMemory::hold_streams(true);
    before = launches();
    engine.keeper.part<parts::Folds>().prefetch(seen);
    expect(cudaStreamSynchronize(nullptr));
    EXPECT_EQ(launches(), before) << "the stream of attention does not wait for it";
    HeldMemory::hold_streams(false);
    EXPECT_EQ(launches(), before + 4) << "logits, a guess, pieces, fetch";
    before = launches();
  };
  engine.hold = [&](bool hold) {
    if (hold) return;
    EXPECT_EQ(launches(), before + 5) << "what opens, pieces, fetch, merge: 2";
    if (++layers == FoldingEngine::kLayers) engine.hold = [](bool) {};
  };
  engine.step({{1, 1}});
  EXPECT_EQ(layers, FoldingEngine::kLayers);
}

/// Its memory and tables are then free for what comes.
TEST_F(Prefetch, IsWaitedForByTheNextCallEvenIfNobodyReadsIt) {
  FoldingEngine engine(kTova, 3, 0, Dtype::f32, in_order());
  for (const SequenceId id : {1, 2, 3}) engine.join(id);
  engine.step({{1, 90}});
  engine.step({{1, 1}, {2, 60}, {3, 60}});
  engine.step({{2, 1}});  // an event like the last one below, which then frees nothing
  parts::Folds& folds = engine.keeper.part<parts::Folds>();
  auto ran = [before = std::int64_t{0}]() mutable {
    return model::counters().launches - std::exchange(before, model::counters().launches);
  };
  engine.ahead = [&](const Observation& seen) {
    HeldMemory::hold_streams(true);
    static_cast<void>(ran());
    for (int i = 0; i < 2; ++i) folds.prefetch(seen);
    expect(cudaStreamSynchronize(nullptr));
    EXPECT_EQ(ran(), 4) << "the first one, before anything of the second";
    HeldMemory::hold_streams(false);
    EXPECT_EQ(ran(), 4);
  };
  engine.step({{1, 1}});
  engine.views = false;
  engine.ahead = [&](const Observation& seen) { folds.prefetch(seen); };
  HeldMemory::hold_streams(true);
  EXPECT_THROW(engine.step({{1, 1}}), StateError) << "nobody has read";
  const std::vector<Array> kept = std::exchange(engine.in_flight, {});
  engine.ahead = nullptr;
  EXPECT_GT(engine.step({{3, 1}}).slots_folded, 0);
  expect(cudaStreamSynchronize(nullptr));
  static_cast<void>(ran());
  HeldMemory::hold_streams(false);
  EXPECT_EQ(ran(), 0) << "folding waited for it";
}
#endif

}  // namespace
}  // namespace kvkeep::cuda::prefetch_test
