// SPDX-License-Identifier: Apache-2.0
// What a serving engine does around a keeper, through the C interface: forks, state in memory, rows, lengths ahead,
// threads, metrics and traces.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "c_engine.h"
#include "kvkeep/keeper/thread_pool.h"

namespace kvkeep::c_day_test {
namespace {

using namespace c_engine;

constexpr const char* kPolicy = "ams-tova,budget=24,interval=6,recent=4,window=4,min_segment=2";

std::vector<std::byte> copied(const void* bytes, std::size_t count) {
  const auto* const from = static_cast<const std::byte*>(bytes);
  return {from, from + count};
}

TEST(CInterface, ForksAndKeepsStateInMemory) {
  for (const std::int32_t page_size : {0, 8}) {
    SCOPED_TRACE(page_size);
    CEngine c(kPolicy, page_size), other(kPolicy, page_size);
    kvkeep_keeper* const keeper = c.keeper.get();
    oracle::Random random(3);
    kvkeep_report report{};
    c.join(1);
    for (int i = 0; i < 12; ++i) {
      c.feed(numbers_of(random, {{1, i == 0 ? 30 : 2}}));
      ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
    }
    ASSERT_EQ(kvkeep_fork(keeper, 2, 1, -1, -1), KVKEEP_OK) << kvkeep_last_error();
    EXPECT_EQ(kvkeep_fork(keeper, 2, 1, -1, -1), KVKEEP_STATE_ERROR);
    for (std::int32_t r = 0; r < kRows; ++r) EXPECT_EQ(c.positions(2, r), c.positions(1, r));

    const void* bytes = nullptr;
    std::size_t count = 0;
    ASSERT_EQ(kvkeep_save_bytes(keeper, 1, &bytes, &count), KVKEEP_OK) << kvkeep_last_error();
    const std::vector<std::byte> state = copied(bytes, count);
    ASSERT_EQ(kvkeep_restore_bytes(other.keeper.get(), 5, state.data(), state.size(), -1), KVKEEP_OK)
        << kvkeep_last_error();
    EXPECT_EQ(kvkeep_restore_bytes(other.keeper.get(), 6, state.data(), state.size() - 1, -1), KVKEEP_INVALID_ARGUMENT);
    EXPECT_EQ(kvkeep_restore_bytes(other.keeper.get(), 6, state.data(), state.size(), 99), KVKEEP_STATE_ERROR);
    for (std::int32_t r = 0; r < kRows; ++r) EXPECT_EQ(other.positions(5, r), c.positions(1, r));
    std::int64_t length = 0;
    ASSERT_EQ(kvkeep_logical_length(keeper, 1, &length), KVKEEP_OK);
    ASSERT_EQ(kvkeep_restore_prefix(other.keeper.get(), 7, state.data(), state.size(), length - 1, -1), KVKEEP_OK)
        << kvkeep_last_error();
    for (std::int32_t r = 0; r < kRows; ++r) EXPECT_EQ(other.positions(7, r).size() + 1, c.positions(1, r).size());
    ASSERT_EQ(kvkeep_restore_prefix(other.keeper.get(), 8, state.data(), state.size(), -1, -1), KVKEEP_OK);
    EXPECT_EQ(other.positions(8, 0), c.positions(1, 0));
    EXPECT_EQ(kvkeep_restore_prefix(other.keeper.get(), 6, state.data(), state.size(), length + 1, -1),
              KVKEEP_INVALID_ARGUMENT);
    EXPECT_EQ(kvkeep_restore_prefix(other.keeper.get(), 6, state.data(), state.size(), 1, -1), KVKEEP_STATE_ERROR);

    std::vector<std::byte> rows;
    const auto copy = [&](const kvkeep_cache& cache) {
      const kvkeep_status status = kvkeep_copy_rows(keeper, &cache, 0, &bytes, &count);
      if (status == KVKEEP_OK) rows = copied(bytes, count);
      return status;
    };
    ASSERT_EQ(c.call(copy, {1}, report, false), KVKEEP_OK) << kvkeep_last_error();
    ASSERT_EQ(std::ssize(rows), c.lengths.at(1)[0] * kRows * (kKeyDim + kValueDim + kExtraDim) * 4);
    other.lengths[5] = c.lengths.at(1);
    while (page_size > 0 && std::ssize(other.pages[5]) * page_size < other.lengths.at(5)[0])
      other.pages[5].push_back(other.pool.take());
    const auto bring = [&](const kvkeep_cache& cache) {
      return kvkeep_restore_rows(other.keeper.get(), &cache, 0, rows.data(), rows.size());
    };
    ASSERT_EQ(other.call(bring, {5}, report, false), KVKEEP_OK) << kvkeep_last_error();
    for (std::int32_t r = 0; r < kRows; ++r)
      for (std::int32_t t = 0; t < c.lengths.at(1)[0]; ++t)
        for (const Sided side : kAllSides)
          ASSERT_TRUE(same_bits(c.slot_of(1, r / kHeads, r % kHeads, t, side),
                                other.slot_of(5, r / kHeads, r % kHeads, t, side)));
  }
}

TEST(CInterface, SaysLengthsAheadAndWhichPagesWereRewritten) {
  CEngine c(kPolicy, 8);
  oracle::Random random(4);
  kvkeep_report report{};
  c.join(1);
  std::int64_t written = 0, events = 0;
  for (int i = 0; i < 40; ++i) {
    const std::int32_t tokens = i == 0 ? 30 : random.between(1, 3);
    std::int32_t length = 0, event = 0, exact = 0, append = 0, of_event = 0;
    const auto needed = [&](std::int32_t shared, std::int32_t last) {
      return kvkeep_pages_needed(c.keeper.get(), 1, &tokens, 1, 8, shared, last, &append, &of_event);
    };
    const std::int32_t held = c.lengths.at(1)[0], more = (held + tokens + 7) / 8 - (held + 7) / 8;
    ASSERT_EQ(kvkeep_length_after(c.keeper.get(), 1, &tokens, 1, &length, &event, &exact), KVKEEP_OK)
        << kvkeep_last_error();
    ASSERT_EQ(needed(2, 0), KVKEEP_OK) << kvkeep_last_error();
    EXPECT_EQ(append, more);
    EXPECT_EQ(of_event, event == 1 ? 2 : 0);
    ASSERT_EQ(needed(2, 1), KVKEEP_OK) << kvkeep_last_error();
    EXPECT_EQ(append, more + (held % 8 != 0 ? 1 : 0));
    c.feed(numbers_of(random, {{1, tokens}}));
    ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
    EXPECT_EQ(exact, 1);
    EXPECT_EQ(event, report.num_cuts);
    EXPECT_EQ(length, c.lengths.at(1)[0]);
    for (std::int64_t p = 0; p < report.num_pages; ++p) {
      const kvkeep_page_move& move = report.pages[p];
      ++events, written += move.num_written;
      for (std::int32_t w = 0; w < move.num_written; ++w)
        EXPECT_NE(std::find(move.held, move.held + move.num_held, move.written[w]), move.held + move.num_held);
    }
  }
  EXPECT_GT(events, 3);
  EXPECT_GT(written, events);
}

TEST(CInterface, SaysLengthsAfterTheStepsInFlight) {
  CEngine c(kPolicy);
  kvkeep_keeper* const keeper = c.keeper.get();
  oracle::Random random(4);
  kvkeep_report report{};
  c.join(1);
  const std::int32_t tokens[] = {30, 2, 1, 3, 3, 1, 4};
  std::vector<std::int32_t> lengths, events;
  std::int32_t length = 0, event = 0, exact = 0;
  for (std::size_t steps = 1; steps <= std::size(tokens); ++steps) {
    ASSERT_EQ(kvkeep_length_after(keeper, 1, tokens, steps, &length, &event, &exact), KVKEEP_OK) << kvkeep_last_error();
    EXPECT_EQ(exact, 1);
    lengths.push_back(length), events.push_back(event);
  }
  for (std::size_t step = 0; step < std::size(tokens); ++step) {
    c.feed(numbers_of(random, {{1, tokens[step]}}));
    ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
    EXPECT_EQ(lengths[step], c.lengths.at(1)[0]) << step;
    EXPECT_EQ(events[step], report.num_cuts) << step;
  }
  EXPECT_GE(std::ranges::count(events, 1), 2);
  ASSERT_EQ(kvkeep_length_after(keeper, 1, nullptr, 0, &length, nullptr, nullptr), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(length, c.lengths.at(1)[0]);
  const std::int32_t back[] = {1, -1};
  EXPECT_EQ(kvkeep_length_after(keeper, 1, back, 2, &length, nullptr, nullptr), KVKEEP_INVALID_ARGUMENT);
  EXPECT_TRUE(std::string(kvkeep_last_error()).starts_with("forecast: a step of -1 tokens; allowed 0 to 2147483"));
  EXPECT_EQ(kvkeep_length_after(keeper, 1, nullptr, 1, &length, nullptr, nullptr), KVKEEP_INVALID_ARGUMENT);
  EXPECT_EQ(kvkeep_length_after(keeper, 1, tokens, 1, nullptr, nullptr, nullptr), KVKEEP_INVALID_ARGUMENT);
  EXPECT_EQ(kvkeep_length_after(keeper, 9, tokens, 1, &length, nullptr, nullptr), KVKEEP_STATE_ERROR);
}

TEST(CInterface, SaysPagesOfTheStepsInFlight) {
  CEngine c(kPolicy, 8);
  c.join(1);
  const std::int32_t tokens[] = {30, 2, 9};
  std::int32_t append = -1, event = -1;
  const auto needed = [&](std::size_t steps, std::int32_t page_size, std::int32_t* to) {
    return kvkeep_pages_needed(c.keeper.get(), 1, tokens, steps, page_size, 0, 0, to, &event);
  };
  ASSERT_EQ(needed(1, 8, &append), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(append, 4);
  ASSERT_EQ(needed(2, 8, &append), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(append, 0) << "32 slots in 4 pages";
  ASSERT_EQ(needed(3, 8, &append), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(append, 2);
  EXPECT_EQ(needed(0, 8, &append), KVKEEP_INVALID_ARGUMENT);
  EXPECT_STREQ(kvkeep_last_error(), "pages_needed: no step; allowed 1 or more");
  EXPECT_EQ(needed(1, 0, &append), KVKEEP_INVALID_ARGUMENT);
  EXPECT_EQ(needed(1, 8, nullptr), KVKEEP_INVALID_ARGUMENT);
  EXPECT_EQ(append, 2);
}

TEST(CInterface, APlanSaysWhichPagesItWillTake) {
  CEngine c("tova,budget=24,interval=4,recent=4,sink=2", 8);
  oracle::Random random(12);
  kvkeep_report report{};
  c.join(1);
  c.feed(numbers_of(random, {{1, 40}}));
  ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  for (const std::int32_t page : c.pages.at(1)) c.pool.retain(page);  // another sequence has the prompt, too
  const std::vector<std::int32_t> shared = c.pages.at(1);
  c.feed(numbers_of(random, {{1, 1}}));
  ASSERT_EQ(c.call(kvkeep_plan, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  ASSERT_EQ(report.num_pages, 1);
  const auto taken_later = [&](const kvkeep_page_move& move) {
    return std::count(move.held, move.held + move.num_held, -2);
  };
  const std::int32_t taken = report.pages[0].taken;
  EXPECT_GE(taken, 1);
  EXPECT_EQ(taken_later(report.pages[0]), taken);
  ASSERT_EQ(c.call(kvkeep_apply, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  ASSERT_EQ(report.num_pages, 1);
  EXPECT_EQ(report.pages[0].taken, taken);
  EXPECT_EQ(taken_later(report.pages[0]), 0);
  std::int32_t new_ones = 0;
  for (const std::int32_t page : c.pages.at(1)) new_ones += std::ranges::count(shared, page) == 0 ? 1 : 0;
  EXPECT_EQ(new_ones, taken);
}

TEST(CInterface, RefusesLabelsThatPrometheusCannotRead) {
  CEngine c(kPolicy);
  const char* page = nullptr;
  for (const char* labels : {"", R"(a="")", R"(_a1="x y",B="\\ \" \n")", R"(a="{,}", b="2")", "a=\"\xc3\xa9\""})
    EXPECT_EQ(kvkeep_metrics(c.keeper.get(), labels, &page), KVKEEP_OK) << labels << ": " << kvkeep_last_error();
  EXPECT_EQ(kvkeep_metrics(c.keeper.get(), nullptr, &page), KVKEEP_OK);
  for (const char* labels : {"bad label",
                             "a",
                             "a=",
                             "a=1",
                             R"(a="1)",
                             R"(a="1",)",
                             R"(a="1"b="2")",
                             R"(1a="1")",
                             R"(a-b="1")",
                             R"(="1")",
                             R"({a="1"})",
                             R"(a="\t")",
                             "a=\"\n\"",
                             R"(a="\)",
                             R"(le="1")",
                             " ",
                             R"(a="1",a="2")",
                             R"(a="1",b="2",a="1")",
                             "a=\"\xff\"",
                             "a=\"\xc3\"",
                             R"(__name__="x")",
                             R"(a="1",)"}) {
    EXPECT_EQ(kvkeep_metrics(c.keeper.get(), labels, &page), KVKEEP_INVALID_ARGUMENT) << labels;
    EXPECT_TRUE(std::string(kvkeep_last_error()).starts_with("metrics: labels are no list that Prometheus reads"));
  }
}

TEST(CInterface, WritesOnePageOfSeveralKeepers) {
  CEngine c(kPolicy), idle(kPolicy);
  oracle::Random random(5);
  kvkeep_report report{};
  c.join(1);
  for (int i = 0; i < 30; ++i) {
    c.feed(numbers_of(random, {{1, i == 0 ? 30 : 1}}));
    ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  }
  kvkeep_totals totals[2] = {{}, {}};
  totals[0].size = totals[1].size = sizeof totals[0];
  ASSERT_EQ(kvkeep_read_totals(c.keeper.get(), &totals[0]), KVKEEP_OK);
  ASSERT_EQ(kvkeep_read_totals(idle.keeper.get(), &totals[1]), KVKEEP_OK);
  ASSERT_GT(totals[0].events, 2);
  EXPECT_GT(totals[0].event_seconds, 0);
  kvkeep_keeper_metrics keepers[] = {{&totals[0], R"(worker="0")"}, {&totals[1], R"(worker="1")"}};
  const char* text = nullptr;
  ASSERT_EQ(kvkeep_prometheus_metrics(keepers, 2, &text), KVKEEP_OK) << kvkeep_last_error();
  const std::string page = text;

  const char* alone = nullptr;
  ASSERT_EQ(kvkeep_metrics(c.keeper.get(), R"(worker="0")", &alone), KVKEEP_OK);
  const auto lines = [](const std::string& of) {
    std::multiset<std::string> all;
    std::istringstream in(of);
    for (std::string line; std::getline(in, line);) all.insert(line);
    return all;
  };
  std::multiset<std::string> both = lines(page);
  for (const std::string& line : lines(alone)) {
    ASSERT_EQ(both.count(line), 1U) << line << " is not there once in\n" << page;
    both.erase(line);
  }
  for (const std::string& line : both) EXPECT_NE(line.find(R"({worker="1")"), std::string::npos) << line;
  EXPECT_EQ(std::ranges::count_if(lines(alone), [](const std::string& l) { return l[0] != '#'; }), std::ssize(both));

  keepers[1].labels = keepers[0].labels;
  EXPECT_EQ(kvkeep_prometheus_metrics(keepers, 2, &text), KVKEEP_INVALID_ARGUMENT);
  EXPECT_TRUE(std::string(kvkeep_last_error()).starts_with("metrics: keepers 0 and 1 have the same labels"));
  keepers[1] = {nullptr, nullptr};
  EXPECT_EQ(kvkeep_prometheus_metrics(keepers, 2, &text), KVKEEP_INVALID_ARGUMENT);
  EXPECT_STREQ(kvkeep_last_error(), "metrics: totals is NULL; allowed an address");
  EXPECT_EQ(kvkeep_prometheus_metrics(nullptr, 1, &text), KVKEEP_INVALID_ARGUMENT);
  EXPECT_STREQ(kvkeep_last_error(), "metrics: keepers is NULL; allowed an address of 1 entries");
  totals[1].size = offsetof(kvkeep_totals, event_seconds);  // times of which it would say that all are above 5 s
  keepers[1] = {&totals[1], nullptr};
  EXPECT_EQ(kvkeep_prometheus_metrics(keepers, 2, &text), KVKEEP_INVALID_ARGUMENT);
  EXPECT_STREQ(kvkeep_last_error(),
               "metrics: totals have a size of 88, without the times of events; allowed 216 or more");
}

TEST(CInterface, RunsOnTheThreadsThatItIsLentAndIsWatched) {
  struct Lent {
    std::atomic<int> loops = 0;
    ThreadPool pool{2};
  } lent;
  kvkeep_threads threads{&lent, [](void* own, std::int64_t begin, std::int64_t end, std::int64_t grain,
                                   void (*body)(void*, std::int64_t, std::int64_t), void* loop) {
                           ++static_cast<Lent*>(own)->loops;
                           const Threads pool = static_cast<Lent*>(own)->pool.threads();
                           pool.run(pool.pool, begin, end, grain, body, loop);
                         }};
  std::string told;
  const kvkeep_trace_hook trace{
      &told, [](void* to, const char* stage) { static_cast<std::string*>(to)->append("+").append(stage); },
      [](void* to, const char* stage) { static_cast<std::string*>(to)->append("-").append(stage); }};
  kvkeep_provided provided{};
  provided.size = sizeof provided;
  provided.queries = 1;
  provided.threads = &threads;
  provided.trace = &trace;
  CEngine c(kPolicy, 0, &provided);
  oracle::Random random(5);
  kvkeep_report report{};
  c.join(1);
  c.feed(numbers_of(random, {{1, 40}}));
  ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(lent.loops, 0);
  c.feed(numbers_of(random, {{1, 1}}));
  ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_GT(lent.loops, 0);
  EXPECT_EQ(told, "+kvkeep.plan-kvkeep.plan+kvkeep.apply-kvkeep.apply");
  const char* page = nullptr;
  ASSERT_EQ(kvkeep_metrics(c.keeper.get(), R"(worker="3")", &page), KVKEEP_OK);
  EXPECT_NE(std::string(page).find("\nkvkeep_events_total{worker=\"3\"} 1\n"), std::string::npos) << page;

  threads.run = nullptr;
  const CModel model;
  kvkeep_keeper* made = nullptr;
  EXPECT_EQ(kvkeep_keeper_make(&model.of_c, kPolicy, &provided, &made), KVKEEP_INVALID_ARGUMENT);
  EXPECT_STREQ(kvkeep_last_error(), "provided: threads: run is NULL; allowed an address");
}

TEST(CInterface, SaysSomethingOfAnExceptionThatSaysNothing) {
  const kvkeep_trace_hook trace{nullptr, [](void*, const char*) { throw std::runtime_error(""); },
                                [](void*, const char*) {}};
  kvkeep_provided provided{};
  provided.size = sizeof provided;
  provided.queries = 1;
  provided.trace = &trace;
  CEngine c(kPolicy, 0, &provided);
  oracle::Random random(5);
  kvkeep_report report{};
  c.join(1);
  c.feed(numbers_of(random, {{1, 40}}));
  ASSERT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_OK) << kvkeep_last_error();
  c.feed(numbers_of(random, {{1, 1}}));
  EXPECT_EQ(c.call(kvkeep_step, {1}, report), KVKEEP_INTERNAL);
  EXPECT_STREQ(kvkeep_last_error(), "an exception that says nothing, perhaps of a plug-in");
}

}  // namespace
}  // namespace kvkeep::c_day_test
