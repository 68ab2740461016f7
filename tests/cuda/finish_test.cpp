// SPDX-License-Identifier: Apache-2.0
// Events in which the scores decide how many slots stay: between step() and finish() nothing that the engine sees has
// changed, and calls that would need the counts are refused by name.

#include "captured_graph.h"
#include "engines.h"
#include "fresh_accelerator.h"
#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/score/recency.h"

namespace kvkeep::cuda::finish_test {
namespace {

using testing::Array;
using namespace engines;

const char* const kPolicy = "adakv-tova,budget=48,interval=12,recent=4";

template <class Error = StateError, class Body>
std::string refusal(Body&& body) {
  try {
    static_cast<void>(body());
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool names(const std::string& message, const std::string& what) { return message.find(what) != std::string::npos; }

/// Two sequences, both due at the next cut().
template <class AnyEngine>
void make_due(AnyEngine& engine) {
  oracle::Random random(51);
  for (const SequenceId id : {1, 2}) engine.join(id);
  static_cast<void>(engine.step(numbers_of(random, {{1, 50}, {2, 56}})));
  engine.feed(numbers_of(random, {{1, 14}, {2, 14}}));
}

DenseEngine dense(const std::shared_ptr<Machine>& accelerator, const char* policy = kPolicy, bool ragged = true) {
  return {policy, ragged, Dtype::f32, accelerator};
}

using PendingEvents = OnDevice;

TEST_F(PendingEvents, LeaveLengthsAndPagesAsTheyWereUntilTheyAreFinished) {
  for (const std::int32_t page_size : {1, 16}) {
    DenseEngine cpu = dense(nullptr);
    PagedEngine device(kPolicy, true, Dtype::f32, page_size, PageLayout::slot_head, Form::apart, 1600,
                       fresh_accelerator());
    make_due(cpu);
    make_due(device);
    const std::map<SequenceId, Ints> lengths = device.lengths;
    const std::int32_t free = device.pool.free_pages();
    std::vector<Cut> bounds;
    device.while_pending = [&](const CacheView& view, const Report& report) {
      EXPECT_TRUE(report.pages.empty());
      EXPECT_EQ(report.slots_dropped, 0);
      EXPECT_EQ(device.pool.free_pages(), free);
      for (std::size_t i = 0; i < view.sequences.size(); ++i) {
        const SequenceId id = view.sequences[i];
        for (std::int32_t r = 0; r < kRows; ++r)
          EXPECT_EQ(view.lengths.at(i, r), lengths.at(id)[static_cast<std::size_t>(r)]);
        EXPECT_TRUE(std::ranges::equal(
            device.sequences.pages(id),
            std::span(view.block_table.data<std::int32_t>() + static_cast<std::int64_t>(i) * view.block_table.stride(0),
                      device.sequences.pages(id).size())));
      }
      bounds = report.cuts;
    };
    const Report a = cpu.cut({1, 2}), b = device.cut({1, 2});
    EXPECT_FALSE(a.pending);
    EXPECT_FALSE(b.pending);
    ASSERT_EQ(a.cuts.size(), 2U);
    ASSERT_EQ(b.cuts.size(), 2U);
    ASSERT_EQ(bounds.size(), 2U);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(a.cuts[i].length_after, b.cuts[i].length_after);
      EXPECT_EQ(a.cuts[i].slots_after, b.cuts[i].slots_after);
      EXPECT_EQ(a.cuts[i].slots_chosen, b.cuts[i].slots_chosen);
      EXPECT_EQ(bounds[i].length_before, b.cuts[i].length_before);
      EXPECT_GE(bounds[i].length_after, b.cuts[i].length_after);
      EXPECT_GT(bounds[i].slots_after, b.cuts[i].slots_after) << "four rows that might each keep more than their share";
    }
    EXPECT_EQ(a.slots_dropped, b.slots_dropped);
    EXPECT_EQ(a.slots_chosen, b.slots_chosen);
    EXPECT_EQ(device.keeper.totals().slots_chosen, b.slots_chosen);
    EXPECT_EQ(a.bytes_after, b.bytes_after);
    EXPECT_GT(b.pages_freed, 0);
    EXPECT_EQ(device.pool.free_pages(), free + b.pages_freed);
    expect_alike(cpu, device);
    EXPECT_EQ(device.keeper.totals().events, 1);
    EXPECT_EQ(device.keeper.totals().slots_dropped, b.slots_dropped);
  }
}

TEST_F(PendingEvents, GiveBackCopiesOfSharedPagesThatTheyDoNotNeed) {
  const char* const policy = "adakv-tova,budget=24,interval=12,recent=4";
  DenseEngine cpu = dense(nullptr, policy);
  PagedEngine device(policy, true, Dtype::f32, 1, PageLayout::slot_head, Form::apart, 1600, fresh_accelerator());
  oracle::Random random(52);
  const Numbers first = numbers_of(random, {{1, 57}}), second = numbers_of(random, {{2, 14}});
  for (Engine* engine : {static_cast<Engine*>(&cpu), static_cast<Engine*>(&device)}) {
    engine->join(1);
    static_cast<void>(engine->step(first));
    engine->fork(2, 1, 57);
    engine->feed(second);
  }
  const std::int32_t free = device.pool.free_pages();
  std::int32_t taken = 0;
  device.while_pending = [&](const CacheView&, const Report&) { taken = free - device.pool.free_pages(); };
  EXPECT_EQ(cpu.cut({2}).cuts.size(), 1U);
  const Report report = device.cut({2});
  ASSERT_EQ(report.pages.size(), 1U);
  EXPECT_GT(taken, report.pages[0].taken) << "else every copy was needed";
  EXPECT_GT(report.pages[0].taken, 0);
  expect_alike(cpu, device);
  std::int64_t holders = 0, held = 0;
  for (std::int32_t p = 0; p < device.pool.capacity(); ++p) holders += device.pool.references(p);
  for (const auto& [id, lengths] : device.lengths) held += *std::ranges::max_element(lengths);
  EXPECT_EQ(holders, held);
}

TEST_F(PendingEvents, RefuseWhatNeedsTheirLengthsByName) {
  DenseEngine cpu = dense(nullptr, "adakv-given,budget=48,interval=12,recent=4"),
              device = dense(fresh_accelerator(), "adakv-given,budget=48,interval=12,recent=4");
  make_due(cpu);
  make_due(device);
  device.join(3);
  cpu.join(3);
  oracle::Random random(53);
  const Numbers of_one = numbers_of(random, {{1, 1}}), of_third = numbers_of(random, {{3, 5}});
  Keeper& keeper = device.keeper;
  device.while_pending = [&](const CacheView& view, const Report&) {
    const SequenceId one = 1;
    const Ints indptr{0, 1};
    const auto refused = [&](const char* operation, auto&& body) {
      const std::string message = refusal(body);
      EXPECT_TRUE(
          names(message, text(operation, ": the event that cuts sequence 1 is pending; allowed after finish()")))
          << operation << ": " << message;
    };
    const Array queries = of_one.queries[0].to(keeper.device()),
                scores = of_one.keys[0].select(2, 0).to(keeper.device());
    refused("observe", [&] {
      return keeper.observe({.layer = 0, .sequences = {&one, 1}, .indptr = indptr, .queries = queries}), 0;
    });
    refused("begin_step", [&] { return keeper.begin_step({.sequences = {&one, 1}, .indptr = indptr}), 0; });
    refused("give", [&] {
      return keeper.part<parts::Given>().give({.layer = 0, .sequences = {&one, 1}, .indptr = indptr, .scores = scores}),
             0;
    });
    refused("step", [&] { return keeper.plan(view).cuts.size(); });
    refused("truncate", [&] { return keeper.truncate(1, keeper.logical_length(1) - 1), 0; });
    refused("tokens_to_event", [&] { return keeper.tokens_to_event(1); });
    refused("physical_length", [&] { return keeper.physical_length(1, 0, 0); });
    refused("positions", [&] { return keeper.positions(1, 0, 0).size(); });
    refused("credit", [&] { return keeper.credit(1, 0, 0).size(); });
    refused("pin", [&] { return keeper.part<parts::Pins>().pin(1, 2, 3), 0; });
    refused("save", [&] { return keeper.save(1, "never_written.safetensors"), 0; });
    refused("leave", [&] { return keeper.leave(1), 0; });
    EXPECT_TRUE(names(refusal([&] { return keeper.bind(device.layers), 0; }), "bind: the last event is pending"));
    EXPECT_EQ(keeper.logical_length(1), 64);

    // Another sequence may take tokens, but has no event before this one is complete.
    device.feed(of_third);
    EXPECT_EQ(keeper.physical_length(3, 1, 1), 5);
    const SequenceId third = 3;
    Ints lengths(kRows, 5), places{3};
    const CacheView own{{&third, 1}, {lengths, kRows}, places};
    EXPECT_TRUE(names(refusal([&] { return keeper.plan(own).cuts.size(); }), "the last event, of other sequences"));
  };
  EXPECT_EQ(cpu.cut({1, 2}).cuts.size(), 2U);
  EXPECT_EQ(device.cut({1, 2}).cuts.size(), 2U);
  cpu.feed(of_third);
  for (Engine* engine : {&cpu, &device}) EXPECT_EQ(engine->cut({3}).cuts.size(), 0U);
  expect_alike(cpu, device);
  EXPECT_EQ(device.keeper.tokens_to_event(1), cpu.keeper.tokens_to_event(1));
  device.keeper.leave(1);
}

TEST_F(PendingEvents, AreFinishedOnceAndOverTheirOwnView) {
  DenseEngine cpu = dense(nullptr), device = dense(fresh_accelerator());
  make_due(cpu);
  make_due(device);
  Keeper& keeper = device.keeper;
  EXPECT_TRUE(names(refusal([&] { return keeper.finish({}).pending; }), "finish: no event is pending"));
  device.while_pending = [&](const CacheView& view, const Report&) {
    const auto refused = [&](const char* what, const CacheView& other) {
      const Ints before(view.lengths.data.begin(), view.lengths.data.end());
      const std::string message = refusal([&] { return keeper.finish(other).pending; });
      EXPECT_TRUE(names(message, "finish: ") && names(message, what)) << message;
      EXPECT_TRUE(std::ranges::equal(before, view.lengths.data)) << "nothing is written";
    };
    CacheView other = view;
    const std::vector<SequenceId> swapped{2, 1};
    other.sequences = swapped;
    refused("which is not at place 0 of the view", other);
    other = view;
    Ints lengths(2, 64);
    other.lengths = {lengths, 1};
    refused("2 lengths, 1 per sequence", other);
    view.lengths.at(1, 2) += 1;
    refused("sequence 2 holds 71 slots in layer 1, head 0, and 70 when the event was planned", view);
    view.lengths.at(1, 2) -= 1;
  };
  EXPECT_EQ(cpu.cut({1, 2}).cuts.size(), 2U);
  EXPECT_EQ(device.cut({1, 2}).cuts.size(), 2U);
  expect_alike(cpu, device);
  EXPECT_TRUE(names(refusal([&] { return keeper.finish({}).pending; }), "finish: no event is pending"));
  EXPECT_TRUE(names(refusal([&] { return cpu.keeper.finish({}).pending; }), "finish: no event is pending"));
}

TEST_F(PendingEvents, RefuseABlockTableThatChangedSince) {
  PagedEngine device(kPolicy, true, Dtype::f32, 16, PageLayout::slot_head, Form::apart, 1600, fresh_accelerator());
  make_due(device);
  device.while_pending = [&](const CacheView& view, const Report&) {
    std::int32_t& page = view.block_table.data<std::int32_t>()[view.block_table.stride(0)];
    ++page;
    EXPECT_TRUE(names(refusal([&] { return device.keeper.finish(view).pending; }),
                      "the block table of sequence 2 has other pages"));
    --page;
  };
  EXPECT_EQ(device.cut({1, 2}).cuts.size(), 2U);
}

TEST_F(PendingEvents, ComeOfPlansWhoseLengthsAreBounds) {
  DenseEngine cpu = dense(nullptr), device = dense(fresh_accelerator());
  make_due(cpu);
  make_due(device);
  std::vector<SequenceId> ids{1, 2};
  Ints lengths, places{1, 2};
  for (const SequenceId id : ids)
    lengths.insert(lengths.end(), device.lengths.at(id).begin(), device.lengths.at(id).end());
  const CacheView view{ids, {lengths, kRows}, places};
  const Plan first = device.keeper.plan(view), plan = device.keeper.plan(view);
  EventHandle event = device.keeper.apply(plan, view);
  EXPECT_FALSE(event.done());
  const Report pending = event.report();
  EXPECT_TRUE(pending.pending);
  EXPECT_EQ(pending.bytes_after, plan.bytes_after);
  for (const Plan* again : {&first, &plan})
    EXPECT_THROW(static_cast<void>(device.keeper.apply(*again, view)), StateError);
  view.lengths.at(0, 0) += 1;
  EXPECT_TRUE(names(refusal([&] { return event.wait().pending; }), "finish: sequence 1 holds 65 slots"));
  view.lengths.at(0, 0) -= 1;
  EXPECT_FALSE(event.done()) << "it may be waited for again";
  const Report report = event.wait();
  EXPECT_TRUE(event.done());
  EXPECT_EQ(event.wait().bytes_moved, report.bytes_moved) << "and once more, for nothing";
  EXPECT_LT(report.bytes_after, plan.bytes_after);
  EXPECT_LE(report.bytes_moved, pending.bytes_moved);
  EXPECT_EQ(device.keeper.totals().bytes_moved, report.bytes_moved);
  EXPECT_EQ(report.bytes_after, cpu.cut(ids).bytes_after);
  for (std::size_t i = 0; i < ids.size(); ++i)
    for (std::int32_t r = 0; r < kRows; ++r)
      device.lengths.at(ids[i])[static_cast<std::size_t>(r)] = view.lengths.at(i, r);
  expect_alike(cpu, device);
}

TEST_F(PendingEvents, NeedALengthForEachRow) {
  for (const char* policy : {kPolicy, "threshold-knorm,threshold=-2,budget=48,interval=12"}) {
    DenseEngine device = dense(fresh_accelerator(), policy, false);
    EXPECT_TRUE(names(refusal<InvalidArgument>([&] { make_due(device); }),
                      "but the view has one length per sequence; allowed one length per row"))
        << "at the first step";
    EXPECT_EQ(device.keeper.totals().events, 0);
  }
}

TEST_F(PendingEvents, AreNotCaptured) {
  DenseEngine cpu = dense(nullptr), device = dense(fresh_accelerator());
  make_due(cpu);
  make_due(device);
  const c10::Stream side = side_stream(device.keeper.device());
  {
    const c10::StreamGuard guard(side);
    const std::string message =
        refusal([&] { return CapturedGraph(side, [&] { static_cast<void>(device.cut({1, 2})); }).nodes({}); });
    EXPECT_TRUE(names(message,
                      "decide: under adakv-tova the scores decide how many slots stay, which a replay could "
                      "not tell the host"))
        << message;
  }
  EXPECT_EQ(cpu.cut({1, 2}).cuts.size(), 2U);
  EXPECT_EQ(device.cut({1, 2}).cuts.size(), 2U) << "after that it runs as ever";
  expect_alike(cpu, device);
}

#if defined(KVKEEP_CUDA_MODEL)
std::vector<Array> bytes_of(const Engine& engine) {
  std::vector<Array> all;
  for (const LayerKv& layer : engine.layers)
    for (const Tensor& side : {std::get<DenseKv>(layer).keys, std::get<DenseKv>(layer).values})
      all.push_back(Array(side).clone());
  return all;
}

void expect_same(const std::vector<Array>& before, const std::vector<Array>& after) {
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(before[i], after[i])) << "K or V number " << i;
}

TEST_F(PendingEvents, MoveRowsWithoutAnybodyWaiting) {
  DenseEngine cpu = dense(nullptr), device = dense(fresh_accelerator());
  make_due(cpu);
  make_due(device);
  const std::vector<Array> before = bytes_of(device);
  device.while_pending = [&](const CacheView&, const Report&) { expect_same(before, bytes_of(device)); };
  model::hold_streams(true);
  EXPECT_EQ(device.cut({1, 2}).cuts.size(), 2U);
  model::hold_streams(false);
  EXPECT_EQ(cpu.cut({1, 2}).cuts.size(), 2U);
  expect_alike(cpu, device);
}
#endif

/// Says that it allots with one allocator, and does so with another.
class Misled final : public KVPolicy {
 public:
  [[nodiscard]] std::string_view name() const override { return "misled"; }
  [[nodiscard]] Needs needs() const override { return {}; }
  [[nodiscard]] Trigger trigger() const override { return {.budget = {.slots = 48}, .interval = 12}; }
  [[nodiscard]] std::string to_json() const override { return "{}"; }
  [[nodiscard]] std::vector<std::string> problems_on(const Machine&, const ModelSpec&) const override { return {}; }
  [[nodiscard]] Decision decide(Machine& machine, const Evidence& evidence) const override {
    const Limits limits = even_limits(evidence.table, 48);
    const Needs needs;
    const Recency scorer;
    const Flat said;
    const AdaptiveHeads done({.safeguard = 0.2});
    const std::unique_ptr<Event> event =
        machine.begin(evidence, limits, Demand{name(), needs, scorer, said, Sharing::per_layer_per_head});
    Decision decision;
    event->allot(done, event->score(scorer, {}), {}, decision);
    return decision;
  }
};

TEST_F(PendingEvents, HaveRoomForTheAllocatorThatTheyWereBegunWith) {
  DenseEngine device(std::make_unique<Misled>(), true, Dtype::f32, fresh_accelerator());
  make_due(device);
  EXPECT_TRUE(names(refusal<InvalidArgument>([&] { return device.cut({1, 2}).pending; }),
                    "allot: adaptive_heads is not what the event was begun with; allowed Demand::allocator, flat"));
}

}  // namespace
}  // namespace kvkeep::cuda::finish_test
