// SPDX-License-Identifier: Apache-2.0
// Prompts that are narrowed while their cache, queries and columns are on a device: tokens, slots, reports and pages
// are those of a keeper on the CPU, and what decodes afterwards is the same.

#include "layer_by_layer_engine.h"

#include <array>
#include <bit>
#include <cmath>

#include "captured_graph.h"
#include "device.h"
#include "fresh_accelerator.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/prompts.h"
#include "message_of.h"
#include "restored.h"

namespace kvkeep::cuda::layer_event_test {
namespace {

using testing::Array;
using namespace layer_by_layer;

using DevicePrompts = OnDevice;

const char* const kNarrowings[] = {
    "asl,budget=24,window=6,pool=3,min_layer=1,observed_layers=2,threshold=0.6",
    "asl,budget=24,window=6,pool=3,pooling=max,min_layer=1,observed_layers=2,threshold=0.6,cache=16",
    "asl,budget=24,window=6,pool=3,min_layer=2,observed_layers=8,threshold=0,cache=16",
    "fastkv,budget=24,window=6,layer=2,cache=24",
    "fastkv,budget=24,window=6,layer=2,cache=40",
    "fastkv,budget=7,window=6,layer=0",
    "fastkv,budget=24,window=6,layer=5,cache=12",
    "asl,budget=24,window=6,pool=3,min_layer=2,missed_mass=0.5,select_mass=0.8,cache=30",
    "asl,budget=24,window=6,pool=3,pooling=max,min_layer=3,observed_layers=3,missed_mass=0.4,cache_mass=0.6",
    "asl,budget=40,window=6,pool=3,min_layer=1,observed_layers=2,threshold=0.9,select_mass=0.6,cache_mass=0.8",
    "fastkv,budget=24,window=6,layer=2,cache_mass=0.7,variant=official",
    "pyramidinfer,keep=0.5,min_context=8,sink=2",
    "pyramidinfer,keep=0.7,min_context=8,sink=12,schedule=constant,distance_weight=0.3",
};

/// In the model, work of a layer runs only when somebody waits for it, or after it.
class HeldStreams {
 public:
#if defined(KVKEEP_CUDA_MODEL)
  HeldStreams() { model::hold_streams(true); }
  ~HeldStreams() { model::hold_streams(false); }
#else
  HeldStreams() = default;
  ~HeldStreams() {}
#endif
  HeldStreams(const HeldStreams&) = delete;
  HeldStreams& operator=(const HeldStreams&) = delete;
};

std::int64_t waits() {
#if defined(KVKEEP_CUDA_MODEL)
  return model::counters().waits;
#else
  return 0;
#endif
}

/// The same engine on the CPU and on a device.
struct Twins {
  explicit Twins(const std::string& policy, std::int32_t page_size = 0)
      : cpu(policy, page_size), device(policy, page_size, fresh_accelerator()), paged(page_size > 0) {}

  void join(std::initializer_list<SequenceId> ids, QueryBasis basis = QueryBasis::pre_rope) {
    for (Engine* engine : {&cpu, &device}) {
      engine->basis = basis;
      for (const SequenceId id : ids) engine->join(id);
    }
  }

  /// Returns how many sequences an event cut.
  std::size_t step(const std::vector<Engine::Work>& work) {
    const Report a = cpu.step(work), b = step_on_device(work);
    EXPECT_EQ(a.cuts.size(), b.cuts.size());
    EXPECT_EQ(a.slots_dropped, b.slots_dropped);
    EXPECT_EQ(a.bytes_after, b.bytes_after);
    expect_same_narrowings();
    return a.cuts.size();
  }

  Report step_on_device(const std::vector<Engine::Work>& work) {
    device.begin(work);
    for (std::int32_t l = 0; l < kLayers; ++l) {
      device.observe(l);
      const std::int64_t before = waits();
      const HeldStreams held;
      device.narrow(l);
      waited[static_cast<std::size_t>(l)] = waits() - before;
    }
    return device.end();
  }

  void expect_same_narrowings() const {
    ASSERT_EQ(cpu.narrowed.size(), device.narrowed.size());
    for (std::size_t n = 0; n < cpu.narrowed.size(); ++n) {
      const auto& [layer, a] = cpu.narrowed[n];
      const auto& [layer_there, b] = device.narrowed[n];
      EXPECT_EQ(layer, layer_there);
      EXPECT_EQ(a.sequence, b.sequence);
      EXPECT_EQ(a.tokens, b.tokens) << "sequence " << a.sequence << ", layer " << layer;
      EXPECT_EQ(a.restart, b.restart);
      EXPECT_EQ(a.slots_dropped, b.slots_dropped);
      EXPECT_LE(a.bytes_moved, b.bytes_moved) << "an upper bound";
    }
  }

  /// Slots, lengths, K and V, pages, and what the prompt's report says, to the bit.
  void expect_alike(std::initializer_list<SequenceId> ids) {
    for (const SequenceId id : ids) {
      ASSERT_EQ(cpu.kept(id), device.kept(id)) << "sequence " << id;
      ASSERT_EQ(cpu.lengths.at(id), device.lengths.at(id));
      ASSERT_NO_FATAL_FAILURE(device.expect_holds(id));
      if (paged) {
        const auto a = cpu.pages.pages(id), b = device.pages.pages(id);
        ASSERT_EQ(a.size(), b.size()) << "pages of sequence " << id;
        ASSERT_TRUE(!same_pages || std::ranges::equal(a, b)) << "pages of sequence " << id;
      }
      const PromptReport *a = cpu.keeper.part<parts::Prompts>().report_of(id),
                         *b = device.keeper.part<parts::Prompts>().report_of(id);
      ASSERT_EQ(a == nullptr, b == nullptr);
      if (a == nullptr) continue;
      EXPECT_EQ(a->tokens, b->tokens);
      EXPECT_EQ(a->selection_layer, b->selection_layer);
      EXPECT_EQ(a->entered, b->entered);
      EXPECT_EQ(a->going_on, b->going_on);
      EXPECT_EQ(a->second_pass, b->second_pass);
      for (std::size_t l = 0; l < kLayers; ++l)
        EXPECT_TRUE((std::isnan(a->relative_variance[l]) && std::isnan(b->relative_variance[l])) ||
                    std::bit_cast<std::uint64_t>(a->relative_variance[l]) ==
                        std::bit_cast<std::uint64_t>(b->relative_variance[l]))
            << "layer " << l << ": " << a->relative_variance[l] << " and " << b->relative_variance[l];
    }
    EXPECT_EQ(cpu.keeper.totals().slots_dropped, device.keeper.totals().slots_dropped);
    EXPECT_EQ(cpu.keeper.totals().pages_freed, device.keeper.totals().pages_freed);
  }

  Engine cpu, device;
  bool paged;
  bool same_pages = true;                      ///< false: a device gives pages back later, and takes others afterwards
  std::array<std::int64_t, kLayers> waited{};  ///< by narrow() of each layer of the newest step on the device
};

TEST_F(DevicePrompts, ContinueWithTheTokensOfTheCpuAndLeaveItsSlots) {
  int which = 0;
  for (const char* policy : kNarrowings)
    for (const std::int32_t page_size : {0, 1, 16}) {
      SCOPED_TRACE(text(policy, ", pages of ", page_size));
      Twins twins(policy, page_size);
      twins.join({1, 2, 3, 4, 5}, which++ % 2 == 0 ? QueryBasis::pre_rope : QueryBasis::post_rope);
      twins.step({{4, 10}});
      twins.step({{4, 1}});
      twins.step({{3, 55}, {4, 1}, {1, 70}, {2, 41}, {5, 24}});  // prompts beside one that decodes, one of them short
      ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1, 2, 3, 4, 5}));
      for (int n = 0; n < 3; ++n) twins.step({{1, 1}, {2, 1}, {4, 1}, {5, 1}, {3, 2}});
      ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1, 2, 3, 4, 5}));
      EXPECT_TRUE(twins.device.keeper.totals().slots_dropped > 0 ||
                  twins.device.keeper.part<parts::Prompts>().report_of(1)->going_on.size() < 70U);
    }
}

TEST_F(DevicePrompts, AreFollowedByEventsThatKeepWhatTheCpuKeeps) {
  for (const char* prefill : {kNarrowings[1], kNarrowings[3]})
    for (const char* decode :
         {"ams-tova,budget=16,interval=4,sink=1,recent=2,window=8,min_segment=2,max_segment=8,min_quota=1",
          "h2o,budget=16,interval=4,sink=1,recent=2", "streaming,budget=16,interval=4,sink=1,recent=2",
          "snapkv,budget=16,interval=4,sink=1,window=8", "given,budget=16,interval=4,sink=1,recent=2",
          "expected,budget=16,interval=4,sink=1"}) {
      SCOPED_TRACE(text(prefill, "+", decode));
      Twins twins(text(prefill, "+", decode), 16);
      twins.join({1, 2});
      twins.step({{1, 70}, {2, 45}});
      std::size_t cuts = 0;
      for (int n = 0; n < 16; ++n) cuts += twins.step({{1, 1}, {2, 1}});
      EXPECT_GE(cuts, 4U);
      ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1, 2}));
    }
}

/// Rows differ in length between layers after the prompt, and between heads after the first event.
TEST_F(DevicePrompts, AreFollowedByEventsInWhichScoresDecideHowManySlotsOfAHeadStay) {
  for (const char* prefill : {kNarrowings[1], kNarrowings[3]})
    for (const char* decode :
         {"adakv-tova,budget=16,interval=4,sink=1,recent=2", "adakv-h2o,budget=16,interval=4,sink=1,recent=2",
          "adakv-snapkv,budget=16,interval=4,sink=1,window=4,recent=4,allocator.safeguard=0.2",
          "threshold-given,threshold=0.3,budget=16,interval=4,sink=1,recent=2"})
      for (const std::int32_t page_size : {0, 4}) {
        SCOPED_TRACE(text(prefill, "+", decode, ", pages of ", page_size));
        Twins twins(text(prefill, "+", decode), page_size);
        twins.same_pages = false;
        twins.join({1, 2});
        twins.step({{1, 70}, {2, 45}});
        ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1, 2}));
        std::size_t cuts = 0;
        bool uneven = false;
        for (int n = 0; n < 16; ++n) {
          cuts += twins.step({{1, 1}, {2, 1}});
          ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1, 2})) << "step " << n;
          for (std::int32_t l = 0; l < kLayers; ++l)
            uneven =
                uneven || twins.device.keeper.physical_length(1, l, 0) != twins.device.keeper.physical_length(1, l, 1);
        }
        EXPECT_GE(cuts, 4U);
        EXPECT_TRUE(uneven);
      }
}

/// The heads of a layer hold different numbers of slots from the prompt on.
TEST_F(DevicePrompts, AreFollowedByEventsOverHeadsThatKeepWhatHoldsAMass) {
  bool uneven = false;
  for (const char* decode : {"streaming,budget=16,interval=4,sink=1,recent=2", "knorm,budget=16,interval=4,sink=1",
                             "ams-tova,budget=16,interval=4,sink=1,recent=2,window=8,min_segment=2,max_segment=8"})
    for (const std::int32_t page_size : {0, 4}) {
      SCOPED_TRACE(text(decode, ", pages of ", page_size));
      Twins twins(text("asl,budget=24,window=6,min_layer=2,threshold=2,cache_mass=0.5+", decode), page_size);
      twins.same_pages = false;
      twins.join({1, 2});
      twins.step({{1, 70}, {2, 45}});
      ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1, 2}));
      for (std::int32_t l = 0; l < kLayers; ++l)
        uneven = uneven || twins.device.keeper.physical_length(1, l, 0) != twins.device.keeper.physical_length(1, l, 1);
      std::size_t cuts = 0;
      for (int n = 0; n < 12; ++n) cuts += twins.step({{1, 1}, {2, 1}});
      EXPECT_GE(cuts, 4U);
      ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1, 2}));
    }
  EXPECT_TRUE(uneven);
}

TEST_F(DevicePrompts, GoOnWhereverTheyAreRestored) {
  for (const char* prefill : {kNarrowings[1], kNarrowings[3]})
    for (const char* decode :
         {"h2o,budget=16,interval=4,sink=1,recent=2", "adakv-tova,budget=16,interval=4,sink=1,recent=2",
          "tova,budget=48,interval=4,sink=1,recent=2,protect_prompt=true"})
      for (const auto& [from, to] : {std::pair{true, true}, {true, false}, {false, true}})
        for (const std::int32_t page_size : {0, 16}) {
          SCOPED_TRACE(text(prefill, "+", decode, ", pages of ", page_size, from ? ", from a device" : ", from the CPU",
                            to ? " to a device" : " to the CPU"));
          const testing::StateFileOfATest file("narrowed");
          const std::string policy = text(prefill, "+", decode);
          Engine here(policy, page_size, from ? fresh_accelerator() : nullptr),
              there(policy, page_size, to ? fresh_accelerator() : nullptr);
          here.join(1), here.join(2), there.join(3);
          static_cast<void>(here.step({{1, 70}, {2, 45}}));
          static_cast<void>(there.step({{3, 50}}));
          for (int n = 0; n < 3; ++n) static_cast<void>(here.step({{1, 1}, {2, 1}}));
          here.keeper.save(1, file.path);
          ASSERT_NO_FATAL_FAILURE(there.restore(1, file.path, here));
          const PromptReport *a = here.keeper.part<parts::Prompts>().report_of(1),
                             *b = there.keeper.part<parts::Prompts>().report_of(1);
          ASSERT_TRUE(a != nullptr && b != nullptr);
          EXPECT_EQ(std::tie(a->tokens, a->selection_layer, a->entered, a->going_on),
                    std::tie(b->tokens, b->selection_layer, b->entered, b->going_on));
          EXPECT_EQ(here.kept(1), there.kept(1));
          std::size_t cuts = 0;
          for (int n = 0; n < 40; ++n) {
            static_cast<void>(here.step({{1, 1}}));
            cuts += there.step({{1, 1}, {3, 1}}).cuts.size();
            ASSERT_EQ(here.kept(1), there.kept(1)) << "step " << n;
            ASSERT_NO_FATAL_FAILURE(there.expect_holds(1));
          }
          EXPECT_GE(cuts, 1U);
        }
}

TEST_F(DevicePrompts, ProtectInEveryLayerThePromptThatReachedIt) {
  for (const char* prefill : {kNarrowings[3], kNarrowings[4]}) {
    SCOPED_TRACE(prefill);
    Twins twins(text(prefill, "+tova,budget=48,interval=4,sink=1,recent=2,protect_prompt=true"));
    twins.join({1, 2});
    twins.step({{1, 70}, {2, 45}});
    std::size_t cuts = 0;
    for (int n = 0; n < 40; ++n) cuts += twins.step({{1, 1}, {2, 1}});
    EXPECT_GE(cuts, 4U);
    ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1, 2}));
  }
}

TEST_F(DevicePrompts, KeepScoresThatTheEngineGaveBeforeTheyReachedTheLayer) {
  Twins twins(text(kNarrowings[3], "+given,budget=16,interval=4,sink=1,recent=2"));
  twins.join({1, 2});
  for (Engine* engine : {&twins.cpu, &twins.device}) {
    engine->begin({{1, 70}, {2, 45}});
    for (std::int32_t l = 0; l < kLayers; ++l) {
      engine->keeper.observe(engine->run(l));
      for (std::int32_t later = 0; l == 0 && later < kLayers; ++later)
        engine->keeper.part<parts::Given>().give({.layer = later,
                                                  .sequences = engine->active,
                                                  .indptr = engine->indptr,
                                                  .scores = engine->queries.select(2, later).narrow(1, 0, kHeads)});
      engine->narrow(l);
    }
    static_cast<void>(engine->end());
  }
  std::size_t cuts = 0;
  for (int n = 0; n < 8; ++n) cuts += twins.step({{1, 1}, {2, 1}});
  ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1, 2}));
  EXPECT_GE(cuts, 2U);
}

TEST_F(DevicePrompts, BeginAfreshWithTheTokensThatTheCpuChooses) {
  for (const char* policy : {"gemfilter,budget=20,layer=2", "gemfilter,budget=20,layer=5",
                             "gemfilter,budget=20,layer=0", "asl-2pass,budget=20,window=6,min_layer=1,threshold=0.6",
                             "asl-2pass,budget=20,window=6,min_layer=1,threshold=0",
                             "asl-2pass,budget=20,window=6,min_layer=1,threshold=0.6,indices=last_query",
                             "asl-2pass,budget=20,window=6,min_layer=1,threshold=0,indices=last_query",
                             "asl-2pass,budget=20,window=6,min_layer=1,missed_mass=0.9"})
    for (const std::int32_t page_size : {0, 16}) {
      SCOPED_TRACE(text(policy, ", pages of ", page_size));
      Twins twins(text(policy, "+tova,budget=12,interval=4,sink=1,recent=2"), page_size);
      twins.join({1, 2, 3});
      twins.step({{3, 48}});
      twins.step({{1, 70}, {3, 1}, {2, 15}});
      ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1, 2, 3}));
      EXPECT_EQ(twins.cpu.tokens.at(1), twins.device.tokens.at(1));
      EXPECT_EQ(twins.device.keeper.logical_length(1), 0);
      twins.step({{2, 1}, {1, 13}});  // the second pass may come in chunks
      twins.step({{1, 7}, {3, 20}});
      for (int n = 0; n < 10; ++n) twins.step({{1, 1}, {2, 1}, {3, 1}});
      ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1, 2, 3}));
      EXPECT_LT(twins.device.keeper.physical_length(1, 3, 1), 16);
    }
}

TEST_F(DevicePrompts, AreTakenBackAsOnTheCpuIfNothingWasDropped) {
  Twins twins("asl,budget=24,window=6,pool=3,min_layer=1,observed_layers=2,threshold=0");
  twins.join({1});
  twins.step({{1, 70}});
  twins.step({{1, 3}});
  for (Engine* engine : {&twins.cpu, &twins.device}) {
    engine->keeper.truncate(1, 65);
    engine->fed[1] = 65;
    engine->lengths[1] = Ints(kRows, 65);
  }
  twins.step({{1, 2}});
  ASSERT_NO_FATAL_FAILURE(twins.expect_alike({1}));
  EXPECT_EQ(twins.device.keeper.physical_length(1, 4, 1), 67);
}

#if defined(KVKEEP_CUDA_MODEL)
using Waits = std::array<std::int64_t, kLayers>;

TEST_F(DevicePrompts, AreWaitedForOnceInALayerThatMaySelectAndNowhereElse) {
  const std::vector<Engine::Work> work{{1, 70}, {2, 60}};
  const auto waited = [&](const char* policy) {
    Twins twins(policy);
    twins.join({1, 2});
    twins.step(work);
    Waits all = twins.waited;
    twins.step({{1, 1}, {2, 1}});
    EXPECT_EQ(twins.waited, Waits{}) << "a step without a prompt";
    return all;
  };
  EXPECT_EQ(waited("asl,budget=24,window=6,min_layer=2,observed_layers=2,threshold=0,cache=16"),
            (Waits{0, 0, 1, 1, 1, 1}))
      << "it is ranked from layer 1 on, cut in every layer, and may select from layer 2 on";
  EXPECT_EQ(waited("asl,budget=24,window=6,min_layer=2,observed_layers=2,threshold=2,cache=16"),
            (Waits{0, 0, 1, 0, 0, 0}))
      << "layers after the selection only cut";
  EXPECT_EQ(waited("fastkv,budget=24,window=6,layer=3,cache=16"), (Waits{0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(waited("gemfilter,budget=24,layer=1"), (Waits{0, 1, 0, 0, 0, 0}));
  EXPECT_EQ(waited("asl,budget=80,window=6,cache=80"), Waits{}) << "prompts that fit";
  EXPECT_EQ(waited("asl,budget=24,window=6,min_layer=2,observed_layers=2,missed_mass=0.99,select_mass=0.5,cache=16"),
            (Waits{0, 0, 1, 0, 0, 0}))
      << "how many continue comes with the tokens";
  EXPECT_EQ(waited("asl-2pass,budget=24,window=6,min_layer=1,observed_layers=2,threshold=2,indices=last_query"),
            (Waits{0, 2, 0, 0, 0, 0}))
      << "the layer that selects is asked again";
  EXPECT_EQ(waited("asl,budget=24,window=6,min_layer=2,observed_layers=2,threshold=2,cache_mass=0.8"),
            (Waits{0, 0, 1, 0, 0, 0}))
      << "how many slots stay is waited for by itself, not all that the stream has to do";
  EXPECT_EQ(waited("pyramidinfer,keep=0.5,min_context=8"), (Waits{0, 2, 2, 2, 2, 2})) << "once for each prompt";
}

TEST_F(DevicePrompts, TakeNineLaunchesInALayerThatMaySelectHoweverManyThereAre) {
  const auto launches = [](const char* policy, std::int32_t layer) {
    Engine engine(policy, 0, fresh_accelerator());
    for (const SequenceId id : {1, 2, 3}) engine.join(id);
    engine.begin({{1, 70}, {2, 60}, {3, 40}});
    for (std::int32_t l = 0;; ++l) {
      engine.observe(l);
      const std::int64_t before = model::counters().launches;
      engine.narrow(l);
      if (l == layer) return model::counters().launches - before;
    }
  };
  const char* const settles = "asl,budget=24,window=6,min_layer=2,observed_layers=2,threshold=0";
  EXPECT_EQ(launches(settles, 0), 0);
  EXPECT_EQ(launches(settles, 1), 6);
  EXPECT_EQ(launches(settles, 2), 9);
  EXPECT_EQ(launches("asl,budget=24,window=6,min_layer=2,observed_layers=2,threshold=0,cache=16", 2), 11);
  EXPECT_EQ(launches("fastkv,budget=24,window=6,layer=1", 1), 7);
  EXPECT_EQ(launches("gemfilter,budget=24,layer=1", 1), 5);
  const char* const mass = "asl,budget=24,window=6,min_layer=2,observed_layers=2,missed_mass=0.01,select_mass=0.9";
  EXPECT_EQ(launches(mass, 0), 0);
  EXPECT_EQ(launches(mass, 1), 8);
  EXPECT_EQ(launches(mass, 2), 12);
  EXPECT_EQ(launches("asl,budget=24,window=6,min_layer=2,observed_layers=2,threshold=0,select_mass=0.9", 1), 6);
  EXPECT_EQ(launches("asl,budget=24,window=6,min_layer=2,observed_layers=2,threshold=0,select_mass=0.9", 2), 11);
  EXPECT_EQ(launches("fastkv,budget=24,window=6,layer=3,cache_mass=0.5", 1), 7);
  EXPECT_EQ(launches("pyramidinfer,keep=0.5,min_context=8", 1), 24) << "eight for each prompt";
}
#endif

TEST_F(DevicePrompts, AreRefusedByNameUnderWhatHasNoKernel) {
  const std::string said = testing::message_of<InvalidArgument>(
      [] { Engine("fastkv,budget=24,window=6,layer=2+adakv-tova,budget=16,rest=fold", 0, fresh_accelerator()); });
  EXPECT_NE(said.find("the scores decide how many slots fold"), std::string::npos) << said;
}

TEST_F(DevicePrompts, AreLeftAsTheyAreIfTheirKeysCannotBeRead) {
  Engine engine("fastkv,budget=24,window=6,layer=0,cache=24", 0, fresh_accelerator(), Dtype::i8);
  engine.join(1), engine.join(2);
  engine.begin({{1, 70}, {2, 40}});
  engine.observe(0);
  const Array before = Array(std::get<DenseKv>(engine.layers[0]).keys).clone();
  const Ints lengths = engine.flat;
  const std::string said = testing::message_of<Unsupported>([&] { engine.narrow(0); });
  EXPECT_NE(said.find("keys of layer 0 are i8 without f32 scales"), std::string::npos) << said;
  EXPECT_TRUE(Array(std::get<DenseKv>(engine.layers[0]).keys).equal(before));
  EXPECT_EQ(engine.flat, lengths);
  EXPECT_EQ(engine.keeper.physical_length(1, 3, 0), 70);
  EXPECT_EQ(engine.keeper.part<parts::Prompts>().report_of(1)->entered, Ints(kLayers));
  EXPECT_EQ(engine.keeper.totals().slots_dropped, 0);
}

TEST_F(DevicePrompts, AreNotNarrowedInACapture) {
  Engine engine("fastkv,budget=24,window=6,layer=0", 0, fresh_accelerator());
  const c10::Stream stream = side_stream(engine.keeper.device());
  const c10::StreamGuard guard(stream);
  engine.join(1);
  engine.begin({{1, 70}});
  engine.observe(0);
  std::string said;
  static_cast<void>(CapturedGraph(stream, [&] { said = testing::message_of<StateError>([&] { engine.narrow(0); }); }));
  EXPECT_NE(said.find("the stream is being captured"), std::string::npos) << said;
  engine.narrow(0);
  EXPECT_EQ(engine.keeper.physical_length(1, 1, 0), 24);
}

}  // namespace
}  // namespace kvkeep::cuda::layer_event_test
