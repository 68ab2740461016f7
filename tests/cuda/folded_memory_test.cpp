// SPDX-License-Identifier: Apache-2.0
// Policies that fold on a device: a keeper there keeps and folds the slots that a keeper on the CPU does, and attention
// reads of them what it reads there.

#include <gtest/gtest.h>

#include <cmath>

#include "captured_graph.h"
#include "device.h"
#include "folding_engine.h"
#include "fresh_accelerator.h"
#include "kvkeep/parts/pins.h"
#include "message_of.h"
#include "other_chip.h"
#include "temporary_folder.h"
#include "trained_router.h"

#if defined(KVKEEP_CUDA_MODEL)
#include "accelerator.h"
#include "device_folds.h"
#include "held_memory.h"
#include "kvkeep/parts/folds.h"
#include "torch_streams.h"
#endif

namespace kvkeep::cuda::folded_memory_test {
namespace {

using testing::Array;
using testing::FoldingEngine;
using testing::message_of;
using DeviceFolds = OnDevice;

const std::string kTova = FoldingEngine::kTova;
const std::string kSekv = FoldingEngine::kSekv;
const std::string kSegments = "ams-tova,budget=32,interval=8,recent=8,window=4,rest=fold",
                  kAms = kSegments + ",memory.max_span=16,memory.min_span=4";
const std::string kExact = ",memory.max_rank=64,memory.rank=max,memory.mass=0";

struct Engines {
  explicit Engines(const std::string& policy, std::int32_t places = 1, std::int32_t page_size = 0,
                   Dtype dtype = Dtype::f32, std::shared_ptr<Machine> accelerator = fresh_accelerator())
      : cpu(policy, places, page_size, dtype), device(policy, places, page_size, dtype, std::move(accelerator)) {}

  void join(SequenceId id) { cpu.join(id), device.join(id); }
  void leave(SequenceId id) { cpu.leave(id), device.leave(id); }

  /// The same step to both; what attention gives may be so far apart.
  void step(const std::vector<std::pair<SequenceId, std::int32_t>>& work, double tolerance) {
    const Report a = cpu.step(work), b = device.step(work);
    ASSERT_EQ(a.slots_folded, b.slots_folded);
    ASSERT_EQ(a.slots_dropped, b.slots_dropped);
    ASSERT_LE(a.far_bytes, b.far_bytes);
    ASSERT_EQ(a.cuts.size(), b.cuts.size());
    for (std::size_t i = 0; i < a.cuts.size(); ++i) ASSERT_EQ(a.cuts[i].slots_chosen, b.cuts[i].slots_chosen);
    folds += b.slots_folded > 0 ? 1 : 0;
    for (std::size_t l = 0; l < cpu.outputs.size(); ++l)
      ASSERT_LE(testing::apart(cpu.outputs[l], device.outputs[l]), tolerance) << "layer " << l;
    for (const auto& [id, tokens] : work) {
      for (std::int32_t l = 0; l < FoldingEngine::kLayers; ++l)
        for (std::int32_t h = 0; h < FoldingEngine::kHeads; ++h) {
          const auto x = cpu.keeper.positions(id, l, h), y = device.keeper.positions(id, l, h);
          ASSERT_TRUE(std::ranges::equal(x, y)) << "sequence " << id << ", layer " << l << ", head " << h;
        }
      const FoldedState x = cpu.keeper.part<parts::Folds>().of(id), y = device.keeper.part<parts::Folds>().of(id);
      ASSERT_EQ(x.tokens, y.tokens);
      ASSERT_TRUE(bounds ? x.spans <= y.spans : x.spans == y.spans) << x.spans << " and " << y.spans;
      ASSERT_TRUE(bounds ? x.near_bytes <= y.near_bytes : x.near_bytes == y.near_bytes);
      ASSERT_LE(x.far_bytes, y.far_bytes);
    }
  }

  /// The newest tokens, of both.
  void take_back(SequenceId id, std::int32_t tokens) {
    for (FoldingEngine* engine : {&cpu, &device}) {
      engine->keeper.truncate(id, engine->keeper.logical_length(id) - tokens);
      auto& s = engine->living.at(id);
      for (std::int32_t& length : s.lengths) length -= tokens;
      const auto left = static_cast<std::size_t>(engine->keeper.logical_length(id)) * FoldingEngine::kLayers;
      s.surprisal.resize(left / FoldingEngine::kLayers);
      s.keys.resize(left * FoldingEngine::kHeads * FoldingEngine::kDim), s.values.resize(s.keys.size());
      s.queries.resize(left * FoldingEngine::kQueryHeads * FoldingEngine::kDim);
    }
  }

  FoldingEngine cpu, device;
  bool bounds = false;  ///< the host knows of the device's spans only how many there may be
  std::int64_t folds = 0;
};

TEST_F(DeviceFolds, GiveExactAttentionWhereEverySpanIsOpenedAtFullRank) {
  for (const std::int32_t page_size : {0, 4})
    for (const std::string& policy : {kTova, kTova + ",memory.centred=always", kSekv, kAms}) {
      SCOPED_TRACE(text("pages of ", page_size, ", ", policy));
      FoldingEngine engine(policy + kExact, 1, page_size, Dtype::f32, fresh_accelerator());
      engine.join(1);
      engine.step({{1, 90}});
      std::int64_t folds = 0;
      for (int i = 0; i < 40; ++i) {
        folds += engine.step({{1, 1}}).slots_folded > 0 ? 1 : 0;
        ASSERT_LT(engine.error(), 1e-4) << "step " << i;
      }
      EXPECT_GE(folds, 4);
      engine.step({{1, 5}});  // several tokens in one step: every one sees all spans, and those before it
      EXPECT_LT(engine.error(), 1e-4);
    }
}

TEST_F(DeviceFolds, AreReadAsOnTheCpu) {
  const std::string reach = ",memory.reach=48", rank = ",memory.rank=max,memory.max_rank=3";
  for (const std::string& options :
       {std::string(), rank, std::string(",memory.sketch=false"), std::string(",memory.mass=1"), rank + reach,
        ",memory.zoom_heads=group" + rank + reach, std::string(",memory.zoom=coverage,memory.coverage=0.6"),
        ",memory.zoom=coverage,memory.sketch=false,memory.coverage_floor=0.02" + rank + reach}) {
    SCOPED_TRACE(options);
    Engines both(kTova + options);
    both.join(1);
    ASSERT_NO_FATAL_FAILURE(both.step({{1, 80}}, 1e-5));
    for (int i = 0; i < 26; ++i) ASSERT_NO_FATAL_FAILURE(both.step({{1, i % 5 == 0 ? 3 : 1}}, 2e-3)) << "step " << i;
    EXPECT_GE(both.folds, 3);
  }
}

/// Segments end where the device says: it cuts the spans, and the host knows how many there may be.
TEST_F(DeviceFolds, OverSegmentsAreThoseOfTheCpu) {
  const std::string rank = ",memory.rank=max,memory.max_rank=3";
  for (const std::string& policy :
       {kAms + rank, kAms + rank + ",memory.weights=mass",
        kAms + rank + ",memory.sketch=false,memory.zoom=coverage,memory.coverage=1", kAms + rank + ",memory.reach=48",
        kSegments + rank + ",memory.min_span=1,memory.max_span=3", kAms})
    for (const std::int32_t page_size : {0, 4}) {
      if (page_size > 0 && policy != kAms + rank) continue;
      SCOPED_TRACE(policy + text(", pages of ", page_size));
      Engines both(policy, 3, page_size);
      both.bounds = true;
      for (const SequenceId id : {1, 2, 3}) both.join(id);
      ASSERT_NO_FATAL_FAILURE(both.step({{1, 40}, {2, 190}, {3, 7}}, 1e-5));
      for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(both.step({{3, 3}, {2, 1}, {1, 2}}, 2e-3)) << "step " << i;
      EXPECT_GE(both.folds, 8);
    }
}

/// The host cuts them by surprisal: the same slots and spans, whatever else is in the batch.
TEST_F(DeviceFolds, OfSekvAreThoseOfTheCpu) {
  for (const std::string& options :
       {std::string(), std::string(",memory.zoom=coverage"), std::string(",budget=40"),
        std::string(",memory.sketch=false"), std::string(",budget_share=0.5,memory.zoom_heads=group")})
    for (const std::int32_t page_size : {0, 4}) {
      if (page_size > 0 && !options.empty()) continue;
      SCOPED_TRACE(options + text(", pages of ", page_size));
      Engines both(kSekv + options, 3, page_size);
      for (const SequenceId id : {1, 2, 3}) both.join(id);
      ASSERT_NO_FATAL_FAILURE(both.step({{1, 40}, {2, 80}, {3, 7}}, 1e-5));
      for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(both.step({{3, 3}, {2, 1}, {1, 2}}, 2e-3)) << "step " << i;
      both.leave(2);
      both.join(4);
      ASSERT_NO_FATAL_FAILURE(both.step({{1, 1}, {4, 60}, {3, 4}}, 2e-3));
      for (int i = 0; i < 12; ++i) ASSERT_NO_FATAL_FAILURE(both.step({{4, 2}, {1, 1}}, 2e-3)) << "step " << i;
      EXPECT_GE(both.folds, 8);
    }
  Engines narrow(kSekv + ",memory.store=bf16", 1, 0, Dtype::bf16);
  narrow.join(1);
  ASSERT_NO_FATAL_FAILURE(narrow.step({{1, 80}}, 1e-5));
  for (int i = 0; i < 18; ++i) ASSERT_NO_FATAL_FAILURE(narrow.step({{1, 1}}, 3e-2)) << "step " << i;
  EXPECT_GE(narrow.folds, 3);
}

/// Only the device has the positions of slots: pins, gaps and tokens that are taken back are told by surprisal.
TEST_F(DeviceFolds, OfSekvFollowPinsGapsAndTokensThatAreTakenBack) {
  Engines both(kSekv);
  both.cpu.first_position = both.device.first_position = 5;
  both.join(1);
  const auto pin = [&](std::int64_t begin, std::int64_t end) {
    for (FoldingEngine* engine : {&both.cpu, &both.device}) engine->keeper.part<parts::Pins>().pin(1, begin, end);
  };
  pin(20, 27);
  ASSERT_NO_FATAL_FAILURE(both.step({{1, 80}}, 1e-5));
  pin(90, 97);  // some of them are still to come
  for (int i = 0; i < 40; ++i) {
    ASSERT_NO_FATAL_FAILURE(both.step({{1, 2}}, 2e-3)) << "step " << i;
    if (i == 20)
      for (FoldingEngine* engine : {&both.cpu, &both.device}) engine->keeper.part<parts::Pins>().unpin(1, 20, 27);
    if (i % 9 == 4 && both.device.keeper.rollback_limit(1) < both.device.keeper.logical_length(1)) both.take_back(1, 1);
  }
  EXPECT_GE(both.folds, 5);
}

TEST_F(DeviceFolds, OfSekvAreTheSameWhenTheDeviceIsFarBehind) {
#if defined(KVKEEP_CUDA_MODEL)
  Engines both(kSekv, 3);
  both.device.hold = [](bool hold) { HeldMemory::hold_streams(hold); };
  for (const SequenceId id : {1, 2, 3}) both.join(id);
  ASSERT_NO_FATAL_FAILURE(both.step({{1, 40}, {2, 80}, {3, 7}}, 1e-5));
  for (int i = 0; i < 14; ++i) ASSERT_NO_FATAL_FAILURE(both.step({{3, 3}, {2, 1}, {1, 2}}, 2e-3)) << "step " << i;
  EXPECT_GE(both.folds, 3);
#else
  GTEST_SKIP() << "a GPU cannot be held";
#endif
}

class LearnedFolds : public testing::TemporaryFolder {
 protected:
  void SetUp() override {
    if (!has_machine()) GTEST_SKIP() << "no GPU here";
    TemporaryFolder::SetUp();
    learned_ = testing::routed_by(
        folder_, 92, {.layers = FoldingEngine::kLayers, .heads = FoldingEngine::kQueryHeads, .max_rank = 4});
  }
  std::string learned_;
};

/// The published form: gates that weigh, spans of any length, a budget for each query head.
TEST_F(LearnedFolds, OfSekvAsItIsPublishedAreThoseOfTheCpu) {
  for (const std::string& options : {std::string(), std::string(",budget=40"), std::string(",memory.zoom=mass")}) {
    SCOPED_TRACE(options);
    Engines both("sekv,variant=official,interval=8,memory.max_rank=4" + learned_ + options, 2);
    both.join(1), both.join(2);
    ASSERT_NO_FATAL_FAILURE(both.step({{1, 80}, {2, 30}}, 1e-5));
    for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(both.step({{1, 2}, {2, 1}}, 2e-3)) << "step " << i;
    EXPECT_GE(both.folds, 3);
  }
}

TEST_F(LearnedFolds, AreReadAsOnTheCpu) {
  const std::string gates = ",memory.rank=gates,memory.max_rank=4", reach = ",memory.reach=48";
  for (const std::string& options :
       {std::string(), ",memory.rank=max,memory.max_rank=3" + reach, gates, gates + ",memory.centred=always",
        gates + ",memory.zoom=mass,memory.store=bf16", ",memory.zoom=mass" + gates + reach}) {
    SCOPED_TRACE(options);
    Engines both(kTova + learned_ + options, 2);
    both.join(1), both.join(2);
    ASSERT_NO_FATAL_FAILURE(both.step({{1, 80}, {2, 10}}, 1e-5));
    for (int i = 0; i < 26; ++i)
      ASSERT_NO_FATAL_FAILURE(both.step({{1, i % 5 == 0 ? 3 : 1}, {2, 2}}, options.ends_with("bf16") ? 3e-2 : 2e-3))
          << "step " << i;
    EXPECT_GE(both.folds, 3);
    EXPECT_GT(both.cpu.keeper.totals().reads.zooms, 20);
  }
}

TEST_F(LearnedFolds, AreRefusedWhereARouterDoesNotFitABlock) {
  const std::string wide = testing::routed_by(
      folder_, 94, {.layers = FoldingEngine::kLayers, .heads = FoldingEngine::kQueryHeads, .inner = 1 << 14});
  const std::string said = message_of<InvalidArgument>([&] { Engines(kTova + wide, 1); });
  EXPECT_NE(said.find("router: projections of 16384 numbers take 25"), std::string::npos) << said;
}

TEST_F(DeviceFolds, AreThoseOfEachSequenceWhateverElseIsInTheBatch) {
  for (const std::int32_t page_size : {0, 4}) {
    SCOPED_TRACE(text("pages of ", page_size));
    Engines both(kTova + ",memory.rank=max,memory.max_rank=3", 3, page_size);
    for (const SequenceId id : {1, 2, 3}) both.join(id);
    ASSERT_NO_FATAL_FAILURE(both.step({{1, 40}, {2, 80}, {3, 7}}, 1e-5));
    for (int i = 0; i < 14; ++i) ASSERT_NO_FATAL_FAILURE(both.step({{3, 1}, {2, 1}, {1, 2}}, 2e-3)) << "step " << i;
    both.leave(2);
    both.join(4);  // in its place, and with a prompt that comes beside decoding
    ASSERT_NO_FATAL_FAILURE(both.step({{1, 1}, {4, 60}, {3, 4}}, 2e-3));
    for (int i = 0; i < 10; ++i) ASSERT_NO_FATAL_FAILURE(both.step({{4, 2}, {1, 1}}, 2e-3)) << "step " << i;
    ASSERT_NO_FATAL_FAILURE(both.step({{3, 30}, {4, 1}}, 2e-3));
    EXPECT_GE(both.folds, 6);
  }
}

TEST_F(DeviceFolds, AreReadInHalfWidth) {
  for (const char* store : {"f32", "bf16"}) {
    Engines both(kTova + ",memory.rank=max,memory.max_rank=3,memory.store=" + store, 1, 0, Dtype::bf16);
    both.join(1);
    ASSERT_NO_FATAL_FAILURE(both.step({{1, 80}}, 1e-5));
    for (int i = 0; i < 18; ++i) ASSERT_NO_FATAL_FAILURE(both.step({{1, 1}}, 3e-2)) << "step " << i;
    EXPECT_GE(both.folds, 3);
  }
}

TEST_F(DeviceFolds, FollowEveryAllocatorWithoutSegments) {
  for (const char* policy :
       {"snapkv,budget=32,interval=8,window=8,rest=fold", "chunkkv-tova,budget=32,interval=8,chunk=5,rest=fold",
        "pyramidkv-knorm,budget=32,interval=8,recent=4,rest=fold", "tova,budget=32,interval=8,share=union,rest=fold"}) {
    SCOPED_TRACE(policy);
    Engines both(std::string(policy) + ",memory.rank=max,memory.max_rank=3");
    both.join(1);
    ASSERT_NO_FATAL_FAILURE(both.step({{1, 70}}, 1e-5));
    for (int i = 0; i < 18; ++i) ASSERT_NO_FATAL_FAILURE(both.step({{1, 1}}, 2e-3)) << "step " << i;
    EXPECT_GE(both.folds, 2);
  }
}

TEST_F(DeviceFolds, StayWhenTokensAreTakenBack) {
  Engines both(kTova + kExact);
  both.join(1);
  ASSERT_NO_FATAL_FAILURE(both.step({{1, 80}}, 1e-5));
  std::int64_t taken = 0;
  for (int i = 0; i < 24; ++i) {
    const std::int64_t folded = both.folds;
    ASSERT_NO_FATAL_FAILURE(both.step({{1, 3}}, 2e-3)) << "step " << i;
    if (both.folds > folded || i % 2 != 0) continue;
    both.take_back(1, 2);
    ++taken;
  }
  EXPECT_GE(taken, 3);
  EXPECT_GE(both.folds, 4);
  EXPECT_LT(both.device.error(), 1e-4);
}

/// Nothing that was launched may need what the host has changed since.
TEST_F(DeviceFolds, AreTheSameWhenTheDeviceIsFarBehind) {
#if defined(KVKEEP_CUDA_MODEL)
  Engines both(kTova + ",memory.rank=max,memory.max_rank=3", 3);
  both.device.hold = [](bool hold) { HeldMemory::hold_streams(hold); };
  for (const SequenceId id : {1, 2, 3}) both.join(id);
  ASSERT_NO_FATAL_FAILURE(both.step({{1, 40}, {2, 80}, {3, 7}}, 1e-5));
  for (int i = 0; i < 14; ++i) ASSERT_NO_FATAL_FAILURE(both.step({{3, 1}, {2, 1}, {1, 2}}, 2e-3)) << "step " << i;
  EXPECT_GE(both.folds, 3);
#else
  GTEST_SKIP() << "a GPU cannot be held";
#endif
}

#if defined(KVKEEP_CUDA_MODEL)
/// Bounds: every span and every token by itself; some at a time, which end within a sequence. Few or none of the
/// factors that are opened are brought near.
TEST_F(DeviceFolds, AreMadeAndReadInTurnsWhereMemoryIsBounded) {
  const std::string policy = kTova + ",memory.rank=max,memory.max_rank=3";
  const auto run = [&](FoldBounds bounds) {
    Engines both(policy, 3, 0, Dtype::f32, make_accelerator(Device{}, model::resources(), bounds));
    for (const SequenceId id : {1, 2, 3}) both.join(id);
    const std::int64_t before = model::counters().launches;
    both.step({{1, 40}, {2, 80}, {3, 7}}, 1e-5);
    for (int i = 0; i < 12; ++i) both.step({{3, 4}, {2, 1}, {1, 3}}, 2e-3);
    EXPECT_GE(both.folds, 4);
    return std::pair{model::counters().launches - before, both.device.outputs};
  };
  const auto [launches, outputs] = run({});
  std::int64_t most = launches;
  for (const FoldBounds bounds : {FoldBounds{20000, 20000, 600}, {1, 1, 0}}) {
    SCOPED_TRACE(text(bounds.view_bytes, " bytes"));
    const auto [in_turns, same] = run(bounds);
    EXPECT_GT(in_turns, most);
    most = in_turns;
    for (std::size_t l = 0; l < outputs.size(); ++l) EXPECT_LE(testing::apart(outputs[l], same[l]), 1e-5);
  }
  EXPECT_GT(most, 12 * FoldingEngine::kLayers * 8 * 4) << "eight tokens a step, each by itself: four launches a layer";
}

/// An event that fails may have moved arrays, and the next layer that is read must not find the old ones.
TEST_F(DeviceFolds, TellWhereArraysMoved) {
  const FoldedRows counted(4);
  DeviceRows rows(counted, 2, 16, Dtype::f32, true, true, host_memory(), 1);
  auto before = rows.version();
  for (const auto& [spans, tokens] : {std::pair{3, 40}, {3, 40000}, {60, 40000}}) {
    rows.reserve(spans, tokens);
    const auto after = rows.version();
    EXPECT_NE(after, before) << spans << " spans, " << tokens << " tokens";
    rows.reserve(spans, tokens);
    EXPECT_EQ(rows.version(), after) << "nothing moved";
    before = after;
  }
}

TEST_F(DeviceFolds, LeaveRoomThatTheDeviceMayStillUse) {
  DevicePool pool(Device{}, model::resources());
  const Stream stream = pool.stream();
  PageLocked store(std::int64_t{1} << 30);
  LeavingRooms leaving(pool);
  const auto leave = [&](std::int64_t bytes) { static_cast<void>(leaving.hold(store.room(bytes))); };
  model::hold_streams(true);
  leave(640);
  leaving.sweep();
  EXPECT_EQ(store.bytes(), 640) << "the stream has not got there";
  expect(cudaStreamSynchronize(stream));
  leave(128);
  leaving.sweep();
  EXPECT_EQ(store.bytes(), 128);
  model::hold_streams(false);
  leaving.sweep();
  EXPECT_EQ(store.bytes(), 0);
}
#endif

TEST_F(DeviceFolds, AreNeitherMadeNorReadInACapture) {
  const Device there = fresh_accelerator()->device();
  const c10::Stream side = side_stream(there);
  const c10::StreamGuard guard(side);
  FoldingEngine engine(kTova, 1, 0, Dtype::f32, fresh_accelerator());
  engine.join(1);
  engine.step({{1, 90}});
  engine.step({{1, 1}});
  const std::vector<SequenceId> ids{1};
  const std::vector<std::int32_t> indptr{0, 1};
  const Array q = Array::zeros({1, 4, 16}).to(there), out = q.clone(), lse = Array::zeros({1, 4}).to(there);
  std::string said;
  const CapturedGraph graph(side, [&] {
    said = message_of<StateError>([&] {
      engine.keeper.part<parts::Folds>().view(
          {.layer = 0, .sequences = ids, .indptr = indptr, .queries = q, .basis = QueryBasis::post_rope}, {out, lse});
    });
  });
  EXPECT_NE(said.find("view: the stream is being captured"), std::string::npos) << said;
}

#if defined(KVKEEP_CUDA_MODEL)
TEST_F(DeviceFolds, AreRefusedByNameWhereAChipHasTooLittleSharedMemory) {
  ModelSpec spec = FoldingEngine::model();
  spec.key_dim = spec.value_dim = 128;
  const auto make = [&](const char* max_span) {
    return Keeper(spec, make_policy(text("tova,budget=256,interval=8,rest=fold,memory.max_span=", max_span)),
                  {.reads_folded = true, .accelerator = fresh_accelerator()});
  };
  EXPECT_NO_THROW(static_cast<void>(make("128")));
  const OtherChip small({.shared_bytes = 99 << 10});
  EXPECT_NO_THROW(static_cast<void>(make("96")));
  const std::string said = message_of<InvalidArgument>([&] { static_cast<void>(make("128")); });
  EXPECT_NE(
      said.find("memory.max_span: a span of 128 slots of 128 numbers takes 132 KiB of shared memory to decompose; "
                "given cpu with 99; allowed shorter spans, or the CPU"),
      std::string::npos)
      << said;
}
#endif

TEST_F(DeviceFolds, CountRoomOfFactorsAndGiveItBack) {
  FoldingEngine engine(kTova, 2, 0, Dtype::f32, fresh_accelerator());
  engine.join(1), engine.join(2);
  engine.step({{1, 90}, {2, 50}});
  for (int i = 0; i < 12; ++i) engine.step({{1, 1}, {2, 1}});
  EXPECT_GT(engine.keeper.part<parts::Folds>().of(1).far_bytes, 0);
  EXPECT_EQ(engine.keeper.part<parts::Folds>().far_bytes(),
            engine.keeper.part<parts::Folds>().of(1).far_bytes + engine.keeper.part<parts::Folds>().of(2).far_bytes);
  EXPECT_EQ(engine.keeper.totals().reads.queries, 0) << "known to the device alone";
  engine.leave(1);
  for (int i = 0; i < 10; ++i) engine.step({{2, 1}});  // the next event finds that the device has passed the end
  EXPECT_EQ(engine.keeper.part<parts::Folds>().far_bytes(), engine.keeper.part<parts::Folds>().of(2).far_bytes);
}

TEST_F(DeviceFolds, RefuseFactorsAboveTheirCapBeforeAnythingMoves) {
  FoldingEngine engine(kTova + ",memory.host_bytes=40000", 1, 0, Dtype::f32, fresh_accelerator());
  engine.join(1);
  engine.step({{1, 90}});
  const FoldedState before = engine.keeper.part<parts::Folds>().of(1);
  std::string said;
  for (int i = 0; i < 60 && said.empty(); ++i) try {
      engine.step({{1, 1}});
    } catch (const StateError& full) {
      said = full.what();
    }
  EXPECT_NE(said.find("folded spans: no room for"), std::string::npos) << said;
  EXPECT_GE(engine.keeper.part<parts::Folds>().of(1).spans, before.spans);
  EXPECT_EQ(engine.keeper.part<parts::Folds>().of(1).far_bytes, engine.keeper.part<parts::Folds>().far_bytes());
  EXPECT_EQ(engine.keeper.part<parts::Folds>().of(1).tokens / (FoldingEngine::kLayers * FoldingEngine::kHeads) +
                engine.keeper.physical_length(1, 0, 0),
            engine.keeper.logical_length(1))
      << "no slot has left";
}

/// What the CPU refuses, a device cannot see: it stays visible in what attention gives.
TEST_F(DeviceFolds, GiveWhatIsNoNumberToAttention) {
  FoldingEngine engine("streaming,budget=32,interval=8,recent=8,rest=fold", 1, 0, Dtype::f32, fresh_accelerator());
  engine.join(1);
  engine.step({{1, 10}});
  engine.poison = std::nanf("");
  engine.step({{1, 3}});
  engine.poison = 0;
  std::vector<float>& keys = engine.living.at(1).keys;
  keys[keys.size() - FoldingEngine::kDim] = 0;  // only the cache still has it
  for (int i = 0; i < 40; ++i) engine.step({{1, 1}});
  const auto held = engine.keeper.positions(1, 1, 1);
  ASSERT_FALSE(std::ranges::binary_search(held, 10) || std::ranges::binary_search(held, 12)) << "it has folded";
  EXPECT_TRUE(std::isnan(engine.outputs[1][0][3][0].item<float>()));
  EXPECT_FALSE(std::isnan(engine.outputs[1][0][1][0].item<float>())) << "of another head";
}

TEST_F(DeviceFolds, RefuseByNameWhatHasNoKernel) {
  const auto said = [](const std::string& policy) {
    return message_of<InvalidArgument>([&] { FoldingEngine(policy, 1, 0, Dtype::f32, fresh_accelerator()); });
  };
  EXPECT_NE(said("adakv-tova,budget=32,interval=8,rest=fold").find("the scores decide how many slots fold"),
            std::string::npos);
}

TEST_F(DeviceFolds, StayOnTheDevice) {
  FoldingEngine engine(kTova, 1, 0, Dtype::f32, fresh_accelerator());
  engine.join(1);
  engine.step({{1, 90}});
  EXPECT_NE(message_of<Unsupported>([&] {
              static_cast<void>(engine.keeper.part<parts::Folds>().spans(1, 0, 0));
            }).find("are not read back"),
            std::string::npos);
  EXPECT_THROW(engine.keeper.save(1, "/tmp/kvkeep_device_folds.state"), Unsupported);
}

}  // namespace
}  // namespace kvkeep::cuda::folded_memory_test
