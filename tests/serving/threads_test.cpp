// SPDX-License-Identifier: Apache-2.0
// Threads that keepers are lent, counters and traces: each keeper has its own.

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

#include "engines.h"
#include "kvkeep/keeper/metrics.h"
#include "kvkeep/keeper/thread_pool.h"
#include "message_of.h"

namespace kvkeep::threads_test {
namespace {

using namespace engines;

const char* const kPolicy = "ams-tova,budget=32,interval=8,recent=8,window=4";

/// A dense cache and a keeper of it, which is lent threads.
struct Own {
  explicit Own(Provided provided) : keeper(model(), make_policy(kPolicy), std::move(provided)) {
    for (std::int32_t l = 0; l < kLayers; ++l)
      layers.emplace_back(DenseKv{testing::normals(random, {1, kHeads, 64, kKeyDim}),
                                  testing::normals(random, {1, kHeads, 64, kValueDim})});
    keeper.bind(layers);
    keeper.join(0);
  }
  void step(std::int32_t tokens) {
    const std::vector<SequenceId> ids{0};
    const std::int32_t indptr[] = {0, tokens};
    for (std::int32_t l = 0; l < kLayers; ++l)
      keeper.observe(
          {.layer = l, .sequences = ids, .indptr = indptr, .queries = testing::normals(random, {tokens, 4, kKeyDim})});
    length += tokens;
    static_cast<void>(Report(keeper.step({.sequences = ids, .lengths = {{&length, 1}}})));
  }
  oracle::Random random{12};
  std::vector<LayerKv> layers;
  Keeper keeper;
  std::int32_t length = 0;
};

/// Counts loops that a keeper runs on it.
struct Counted {
  ThreadPool pool{2};
  std::atomic<int> loops = 0;
  [[nodiscard]] Threads threads() {
    return {[](void* own, std::int64_t begin, std::int64_t end, std::int64_t grain,
               void (*body)(void*, std::int64_t, std::int64_t), void* context) {
              auto& counted = *static_cast<Counted*>(own);
              ++counted.loops;
              const Threads inner = counted.pool.threads();
              inner.run(inner.pool, begin, end, grain, body, context);
            },
            this};
  }
};

TEST(KeeperThreads, AreEachKeepersOwn) {
  const Threads* const before = detail::threads;
  Counted one, other;
  Own first({.threads = one.threads()}), second({.threads = other.threads()}), alone({});
  first.step(40), first.step(1);
  ASSERT_EQ(first.keeper.totals().events, 1);
  const int loops = one.loops;
  EXPECT_GT(loops, 0);
  EXPECT_EQ(other.loops, 0);
  second.step(40), second.step(1);
  alone.step(40), alone.step(1);
  EXPECT_EQ(one.loops, loops);
  EXPECT_EQ(other.loops, loops);
  EXPECT_EQ(detail::threads, before) << "nothing stays behind a call";
  for (std::int32_t l = 0; l < kLayers; ++l)
    for (std::int32_t h = 0; h < kHeads; ++h)
      EXPECT_TRUE(std::ranges::equal(first.keeper.positions(0, l, h), alone.keeper.positions(0, l, h)));
  {
    const UsingThreads here(one.threads());
    alone.step(8);
  }
  EXPECT_GT(one.loops, loops) << "a keeper without threads takes those of its caller";
}

TEST(KeeperThreads, ServeTwoKeepersInTwoThreads) {
  ThreadPool shared(3);
  std::vector<std::vector<std::int32_t>> kept(4);
  const auto serve = [&](std::size_t i, Threads threads) {
    Own own({.threads = threads});
    for (int step = 0; step < 60; ++step) own.step(step == 0 ? 40 : 1);
    const auto positions = own.keeper.positions(0, 1, 1);
    kept[i].assign(positions.begin(), positions.end());
  };
  ThreadPool a(2), b(2);
  std::thread with_a(serve, 0, a.threads()), with_b(serve, 1, b.threads()), also(serve, 2, shared.threads()),
      too(serve, 3, shared.threads());
  with_a.join(), with_b.join(), also.join(), too.join();
  ASSERT_FALSE(kept[0].empty());
  for (const auto& positions : kept) EXPECT_EQ(positions, kept[0]);
}

TEST(ThreadPool, RunsPartsOnItsThreadsAndThrowsWhatTheyThrow) {
  EXPECT_THROW(ThreadPool(0), InvalidArgument);
  ThreadPool pool(3);
  EXPECT_EQ(pool.count(), 3);
  const UsingThreads here(pool.threads());
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::vector<int> seen(100);
  parallel_for(0, 100, 1, [&](std::int64_t begin, std::int64_t end) {
    EXPECT_EQ(detail::threads, nullptr) << "a loop within a part runs on its thread";
    for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
    {
      const std::scoped_lock lock(mutex);
      ids.insert(std::this_thread::get_id());
    }
    // A part takes until every thread has one, so that none takes two: on a busy machine threads wake late.
    for (int waited = 0; ++waited < 10'000; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      const std::scoped_lock lock(mutex);
      if (ids.size() == 3) break;
    }
  });
  EXPECT_EQ(seen, std::vector<int>(100, 1));
  EXPECT_EQ(ids.size(), 3U);
  EXPECT_THROW(parallel_for(0, 10, 1,
                            [](std::int64_t begin, std::int64_t) {
                              if (begin > 0) throw StateError("of a part");
                            }),
               StateError);
  parallel_for(0, 10, 20, [&](std::int64_t, std::int64_t) { EXPECT_EQ(detail::threads->pool, &pool) << "too small"; });
}

TEST(TraceHook, IsToldOfTheStagesOfEvents) {
  std::vector<std::string> told;
  Own own({.trace = {[](void* to, const char* stage) {
                       static_cast<std::vector<std::string>*>(to)->push_back(std::string("begin ") + stage);
                     },
                     [](void* to, const char* stage) {
                       static_cast<std::vector<std::string>*>(to)->push_back(std::string("end ") + stage);
                     },
                     &told}});
  own.step(20);
  EXPECT_TRUE(told.empty()) << "a step without an event is no stage";
  own.step(20), own.step(1);
  EXPECT_EQ(told, (std::vector<std::string>{"begin kvkeep.plan", "end kvkeep.plan", "begin kvkeep.apply",
                                            "end kvkeep.apply"}));
}

TEST(Metrics, AreWhatPrometheusReads) {
  Own own({});
  for (int i = 0; i < 60; ++i) own.step(i == 0 ? 30 : 1);
  const Totals& totals = own.keeper.totals();
  ASSERT_GT(totals.events, 2);
  EXPECT_EQ(totals.event_seconds.count, totals.events);
  EXPECT_GT(totals.event_seconds.sum, 0);
  EXPECT_EQ(totals.event_seconds.up_to.back(), totals.events) << "none takes five seconds";
  const KeeperMetrics keepers[] = {{totals, R"(worker="0")"}, {Totals{}, R"(worker="1")"}};
  const std::string page = prometheus_metrics(keepers);
  const auto has = [&](const std::string& line) {
    EXPECT_NE(("\n" + page).find("\n" + line + "\n"), std::string::npos) << line << "\n" << page;
  };
  has("# TYPE kvkeep_events_total counter");
  has(text(R"(kvkeep_events_total{worker="0"} )", totals.events));
  has(R"(kvkeep_events_total{worker="1"} 0)");
  has(text(R"(kvkeep_slots_dropped_total{worker="0"} )", totals.slots_dropped));
  has(text(R"(kvkeep_slots_kept_total{worker="0"} )", totals.slots_kept));
  has(text(R"(kvkeep_slots_chosen_total{worker="0"} )", totals.slots_chosen));
  EXPECT_GT(totals.slots_kept, totals.slots_chosen);
  EXPECT_GT(totals.slots_chosen, 0);
  has(R"(kvkeep_unscored_total{worker="0"} 0)");
  has("# TYPE kvkeep_event_duration_seconds histogram");
  has(text(R"(kvkeep_event_duration_seconds_bucket{worker="0",le="+Inf"} )", totals.events));
  has(text(R"(kvkeep_event_duration_seconds_count{worker="0"} )", totals.events));
  EXPECT_NE(page.find(R"(kvkeep_event_duration_seconds_bucket{worker="0",le="0.0005"} )"), std::string::npos) << page;
  const KeeperMetrics alike[] = {{totals, R"(a="1",b="2")"}, {totals, ""}, {totals, R"(b="2",a="1")"}};
  EXPECT_EQ(testing::message_of<InvalidArgument>([&] { static_cast<void>(prometheus_metrics(alike)); }),
            R"(metrics: keepers 0 and 2 have the same labels; given "b="2",a="1""; allowed labels of its own for each )"
            R"(keeper, such as worker="0")");
  const KeeperMetrics empty[] = {{totals, ""}, {totals, R"(a="")"}};  // no label to Prometheus
  EXPECT_NE(testing::message_of<InvalidArgument>([&] { static_cast<void>(prometheus_metrics(empty)); }), "");
  const KeeperMetrics plain[] = {{totals, ""}};
  EXPECT_NE(prometheus_metrics(plain).find(text("\nkvkeep_steps_total ", totals.steps, "\n")), std::string::npos);
  EXPECT_NE(prometheus_metrics(plain).find("_bucket{le=\"0.00005\"} "), std::string::npos);
}

}  // namespace
}  // namespace kvkeep::threads_test
