// SPDX-License-Identifier: Apache-2.0
// What kvkeep plan --gpu predicts: against arithmetic by hand, against a slow simulation that shares no code with it,
// and against what the documents show of it.

#ifdef KVKEEP_CLI_PATH

#include "serving.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <sstream>

#include "command.h"
#include "gpu_times.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/policy/registry.h"
#include "served.h"
#include "shapes.h"

namespace kvkeep::cli_serving_test {
namespace {

using nlohmann::json;
using namespace cli;

fs::path root() { return fs::path(KVKEEP_TEST_GOLDEN_DIR) / ".." / ".."; }

// The rows of bench/gpu/h100.jsonl by their cases.
std::map<std::string, json> measured() {
  std::istringstream lines(content(root() / "bench/gpu/h100.jsonl"));
  std::map<std::string, json> rows;
  for (std::string line; std::getline(lines, line);)
    if (const json row = json::parse(line); row.contains("case") && !row.contains("kernel")) rows[row["case"]] = row;
  return rows;
}

TEST(GpuTimes, AreThoseThatWereMeasured) {
  const std::map<std::string, json> rows = measured();
  const auto us = [&](const std::string& kernel, const EventTime& of, const char* end, const char* key) {
    return rows.at(text(kernel, "/", of.shape, "/batch:1/", of.before, "->", of.after, end)).at(key).get<double>();
  };
  std::ptrdiff_t events = 0;
  for (const auto& [name, row] : rows)
    events += name.starts_with("Event/") && name.find("/batch:1/") != std::string::npos && name.ends_with("/dense");
  EXPECT_EQ(std::ranges::count(kEventTimes, false, &EventTime::counted), events);
  // What is counted: the events and kernels that bench/gpu_times.py names.
  const std::map<std::string, std::pair<const char*, const char*>> counted{{"ams-expected", {"ams-tova", "Expected"}},
                                                                           {"expected", {"streaming", "Expected"}},
                                                                           {"keydiff", {"streaming", "KeyDiff"}}};
  for (const EventTime& of : kEventTimes) {
    const auto& [event, kernel] = of.counted ? counted.at(of.policy) : std::pair{of.policy, ""};
    const double beside = of.counted ? us(kernel, of, "", "us") : 0;
    EXPECT_NEAR(of.us, us(text("Event/", event), of, "/dense", "eager_us") + beside, 1e-3) << of.policy;
  }
  EXPECT_DOUBLE_EQ(kReadRate, 1e9 * rows.at("Ceiling/read").at("GBps").get<double>());
  EXPECT_DOUBLE_EQ(kProductRate, 1e12 * rows.at("Ceiling/products").at("TFLOPS").get<double>());
  EXPECT_EQ(kObservedOne, rows.at("StepWithoutEvent/llama8b/batch:1").at("eager_us").get<double>());
  EXPECT_EQ(kObservedBatchUs, rows.at(text("StepWithoutEvent/llama8b/batch:", kObservedBatch)).at("eager_us"));
}

EventPrice priced(const std::string& policy, const char* shape = "llama8b", const char* gpu = "h100",
                  Dtype dtype = Dtype::bf16) {
  return {shape_called(shape), *make_policy(policy), dtype, gpu_called(gpu)};
}

TEST(EventPrice, IsTheTimeThatWasMeasuredWhereThereIsOneAndBetweenThemOtherwise) {
  const std::int64_t rows = 32 * 8;
  const EventPrice ams = priced("ams-tova,budget=1024");
  EXPECT_NEAR(ams.seconds(rows * 1536, rows * 1024), 452.032e-6, 1e-12);
  EXPECT_NEAR(ams.seconds(rows * 32768, rows * 2048), 3727.328e-6, 1e-12);
  EXPECT_NEAR(priced("ams-tova,budget=1024", "qwen7b").seconds(28 * 4 * 1536, 28 * 4 * 1024), 400.704e-6, 1e-12);
  // Keys of 256 bytes once, kept rows of 512 bytes twice. Between llama8b at 1536 (369,098,752 bytes) and qwen7b at
  // 32768 (1,174,405,120, 2200.768 us).
  const double bytes = rows * (4096.0 * 256 + 2048.0 * 1024);
  ASSERT_EQ(bytes, 805306368);
  EXPECT_NEAR(ams.seconds(rows * 4096, rows * 2048),
              1e-6 * (452.032 + (2200.768 - 452.032) * (bytes - 369098752) / (1174405120.0 - 369098752)), 1e-12);
  EXPECT_NEAR(ams.seconds(1, 1), 400.704e-6, 1e-12) << "never below the smallest that was measured";
  EXPECT_NEAR(ams.seconds(rows * 65536, rows * 4096), 2 * 3727.328e-6, 1e-12) << "above, as the largest by its bytes";
  const double faster = gpu_called("h200").bandwidth / gpu_called("h100").bandwidth;
  EXPECT_NEAR(priced("ams-tova,budget=1024", "llama8b", "h200").seconds(rows * 1536, rows * 1024), 452.032e-6 / faster,
              1e-12);
  EXPECT_EQ(EventPrice(5e-6).seconds(1000000, 5), 5e-6);
}

TEST(EventPrice, IsRefusedForWhatNobodyMeasured) {
  EXPECT_THROW(priced("rkv,budget=1024"), Unsupported);
  EXPECT_THROW(priced("snapkv,budget=1024,window=16"), Unsupported);
  EXPECT_THROW(priced("tova,budget=1024", "llama8b", "h100", Dtype::f32), Unsupported);
  EXPECT_THROW(priced("tova,budget=1024", "llama8b", "h100", Dtype::q8_0), Unsupported);
  EXPECT_NO_THROW(priced("tova,budget=1024", "llama8b", "h100", Dtype::f16));
}

TEST(Course, OfATinyCacheIsTheOneThatAPencilGives) {
  // 2 rows, 256 bytes a slot, positions of 4 bytes; a page of 4 slots. The prompt of 10 is cut to 6, then 3 more are
  // due.
  const Course course =
      course_of(shape_called("1:2:2:64"), *make_policy("streaming,budget=6,interval=3,prefill=cut"),
                {.prompt = 10, .length = 18, .dtype = Dtype::bf16, .page_size = 4, .piece = 4}, EventPrice(1e-3));
  const std::vector<std::int64_t> slots{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 7, 8, 9, 7, 8, 9, 7, 8};
  ASSERT_EQ(course.read.size(), slots.size());
  for (std::size_t seen = 0; seen < slots.size(); ++seen) {
    EXPECT_EQ(course.read[seen], slots[seen] * 2 * 256) << seen;
    EXPECT_EQ(course.held[seen], (slots[seen] + 3) / 4 * 4 * 2 * 256 + 4 * 2 * slots[seen]) << seen;
    EXPECT_EQ(course.event[seen], seen == 10 || seen == 13 || seen == 16 ? 1e-3 : 0) << seen;
  }
  EXPECT_EQ(course.scratch, 4 * 2 * 10) << "scores of the largest event";
  EXPECT_EQ(course.answer(), 8);
  EXPECT_EQ(course.mean_read(), 512.0 * (7 + 8 + 9 + 7 + 8 + 9 + 7) / 7) << "the last token is fed to nobody";
  EXPECT_NEAR(course.mean_event(), 2e-3 / 7, 1e-15);
  EXPECT_EQ(course.most_after_prompt(), 12 * 512 + 8 * 9);
  EXPECT_EQ(requests_that_fit(course, 80 + 12 * 512 + 80 + 2 * (12 * 512 + 72)), 3) << "a prompt and two others";
  EXPECT_EQ(requests_that_fit(course, 80 + 12 * 512 + 80 + 2 * (12 * 512 + 72) - 1), 2);
  EXPECT_EQ(requests_that_fit(course, 80 + 12 * 512 + 79), 0);
}

TEST(Course, CountsLayersThatSlideAndPromptsInPieces) {
  ModelSpec spec = shape_called("2:2:2:64");
  spec.layers[0] = {.kind = LayerKind::sliding, .window = 5};
  const SequencePlan plan{.prompt = 8, .length = 12, .dtype = Dtype::bf16, .page_size = 1, .piece = 8};
  const Course full = course_of(spec, *make_policy("full"), plan, std::nullopt);
  EXPECT_EQ(full.read[3], 2 * 3 * 512);
  EXPECT_EQ(full.held[12], (12 + 5) * 512);
  EXPECT_EQ(full.sliding, 5 * 512);
  EXPECT_EQ(full.token_bytes, 512);
  const Course pieces =
      course_of(shape_called("1:2:2:64"), *make_policy("streaming,budget=6,prefill=pieces"),
                {.prompt = 16, .length = 20, .dtype = Dtype::bf16, .page_size = 1, .piece = 8}, EventPrice(1));
  EXPECT_EQ(pieces.read[8], 8 * 512);
  EXPECT_EQ(pieces.read[16], 14 * 512) << "six stayed of the first piece";
  EXPECT_EQ(pieces.event[8] + pieces.event[16], 2);
  EXPECT_EQ(pieces.read[17], 7 * 512);
}

TEST(Roofline, OfTheFullCacheIsAClosedForm) {
  const ModelSpec spec = shape_called("llama8b");
  const Roofline roofline = roofline_of(spec, 8.03e9, gpu_called("h100"), 0.5);
  const Course full =
      course_of(spec, *make_policy("full"),
                {.prompt = 1000, .length = 3000, .dtype = Dtype::bf16, .page_size = 16, .piece = 2048}, std::nullopt);
  // 32 layers of 8 heads of 128, K and V of two bytes: 131,072 bytes a token; tokens 1001 to 2999 are fed.
  const double weights = 16.06e9 / 3068.816e9, products = 2 * 8.03e9 / (0.5 * 891.303e12), gaps = 11 * 32 * 1.3e-6;
  for (const std::int64_t n : {1, 7, 100, 400}) {
    const auto many = static_cast<double>(n);
    EXPECT_NEAR(roofline.decode(full, n), std::max(weights, many * products) + many * 2000 * 131072 / 3068.816e9 + gaps,
                1e-9)
        << n;
  }
  EXPECT_GT(400 * products, weights) << "where operations limit a step";
  // One piece: 32 heads of 128, two products, half of all pairs.
  EXPECT_NEAR(roofline.prompt(full),
              1000 * products + 4.0 * 32 * 128 * 32 * 1000 * 1001 / 2 / (0.5 * 891.303e12) + gaps, 1e-9);
  EXPECT_NEAR(break_even(roofline, full, 5), 2000, 1e-6) << "of the full cache with itself: what it holds";
  // 452 us an event at 1536 slots, 512 tokens apart; queries are shown in 100 us.
  const Course cut =
      course_of(spec, *make_policy("ams-tova,budget=1024"),
                {.prompt = 1536, .length = 1536 + 5121, .dtype = Dtype::bf16, .page_size = 16, .piece = 2048},
                priced("ams-tova,budget=1024"));
  EXPECT_NEAR(cut.mean_event() * 5120, 10 * 452.032e-6, 1e-6) << "at token 1537 and every 512 from there";
  EXPECT_NEAR(break_even(roofline, cut, 1),
              cut.mean_read() / 131072 + (100.032e-6 + cut.mean_event()) * 3068.816e9 / 131072, 1e-6);
  EXPECT_NEAR(roofline.showing(32), 268.992e-6, 1e-12);
  EXPECT_EQ(roofline.showing(0), 0);
}

// Steps that take a second each, whatever is in them.
Roofline a_second_a_step() {
  Roofline roofline;
  roofline.bandwidth = roofline.products = 1e30, roofline.gaps = 1;
  return roofline;
}

// Requests that hold a byte a token.
Course bytes(std::int32_t prompt, std::int32_t length, std::int32_t piece) {
  Course course{.prompt = prompt, .length = length, .piece = piece, .held = {}, .read = {}, .event = {}};
  for (std::int32_t t = 0; t <= length; ++t) course.held.push_back(t), course.read.push_back(t);
  course.event.assign(course.held.size(), 0);
  course.slot_bytes = course.rows = course.token_bytes = 1;
  return course;
}

TEST(Served, ThreeRequestsByHand) {
  // Prompts of 4, one in a step; answers of 3. With room for all: first tokens after 1, 2 and 3 s, and 2 s more for
  // each.
  const Course course = bytes(4, 7, 4);
  const Served all = serve(course, a_second_a_step(), 1000, {.requests = 3});
  EXPECT_EQ(all.finished, 3);
  EXPECT_EQ(all.tokens, 9);
  EXPECT_EQ(all.steps, 5);
  EXPECT_NEAR(all.seconds, 5, 1e-9);
  EXPECT_NEAR(all.first[0], 2, 1e-9);
  EXPECT_NEAR(all.first[1], 3, 1e-9);
  EXPECT_NEAR(all.between[2], 1, 1e-3);
  EXPECT_EQ(all.most_at_once, 3);
  EXPECT_EQ(all.most_bytes, 6 + 5 + 4) << "in the third step";
  EXPECT_NEAR(all.in_flight, (1 + 2 + 3 + 2 + 1) / 5.0, 1e-9);
  EXPECT_EQ(all.away, 0);
  // With room for one they follow each other.
  const Served one = serve(course, a_second_a_step(), 7, {.requests = 3});
  EXPECT_NEAR(one.seconds, 9, 1e-9);
  EXPECT_EQ(one.most_at_once, 1);
  EXPECT_THROW(serve(course, a_second_a_step(), 5, {.requests = 3}), InvalidArgument);
}

// The same rules once more: every request and every token by itself, all times kept.
struct Plainly {
  struct One {
    double arrived = 0, newest = -1;
    std::int32_t seen = 0;
    bool returns = false;
  };
  double now = 0;
  std::int64_t steps = 0, away = 0, most_bytes = 0, events = 0;
  std::vector<double> first, between;

  Plainly(const Course& c, const Roofline& r, std::int64_t room, std::int64_t requests, double rate,
          std::uint32_t seed) {
    std::vector<One> waiting, inside, outside;
    std::mt19937 bits(seed);
    double at = 0;
    for (std::int64_t i = 0; i < requests; ++i) {
      if (rate > 0) at -= std::log((bits() + 0.5) / 4294967296.0) / rate;
      waiting.push_back({.arrived = at});
    }
    const std::int64_t prompt = *std::max_element(c.held.begin(), c.held.begin() + c.prompt + 1);
    const auto holds = [&](const One& one) {
      return one.seen < c.prompt ? prompt : c.held.at(static_cast<std::size_t>(one.seen + 1));
    };
    const auto sum = [&] {
      return std::accumulate(inside.begin(), inside.end(), c.scratch,
                             [&](std::int64_t all, const One& one) { return all + holds(one); });
    };
    while (!waiting.empty() || !inside.empty() || !outside.empty()) {
      if (inside.empty() && outside.empty()) now = std::max(now, waiting.front().arrived);
      double moved = 0;
      const auto fits = [&](const One& one) {
        return inside.empty() || sum() + holds(one) + 16 * std::ssize(inside) * c.token_bytes <= room;
      };
      for (; sum() > room; ++away) {
        outside.insert(outside.begin(), inside.back());
        inside.pop_back();
        moved += static_cast<double>(c.read.at(static_cast<std::size_t>(outside.front().seen)));
      }
      std::int32_t left = c.piece;
      std::map<std::size_t, std::int32_t> pieces;  // by the place in `inside`
      const auto takes_piece = [&](std::size_t i) {
        const std::int32_t tokens = std::min(c.piece, c.prompt - inside[i].seen);
        if (inside[i].seen >= c.prompt || tokens > left) return false;
        left -= tokens;
        pieces[i] = tokens;
        return true;
      };
      for (std::size_t i = 0; i < inside.size(); ++i) takes_piece(i);
      while (!outside.empty() && fits(outside.front())) {
        moved += static_cast<double>(c.read.at(static_cast<std::size_t>(outside.front().seen)));
        inside.push_back(outside.front());
        outside.erase(outside.begin());
        takes_piece(inside.size() - 1);
      }
      while (outside.empty() && !waiting.empty() && waiting.front().arrived <= now && fits(waiting.front())) {
        inside.push_back(waiting.front());
        if (!takes_piece(inside.size() - 1)) {
          inside.pop_back();
          break;
        }
        waiting.erase(waiting.begin());
      }
      most_bytes = std::max(most_bytes, sum());
      Roofline::Work work;
      double event = 0;
      for (std::size_t i = 0; i < inside.size(); ++i) {
        One& one = inside[i];
        const bool writes = one.seen >= c.prompt;
        if (!writes && !pieces.contains(i)) continue;
        one.seen += writes ? 1 : pieces[i];
        if (writes)
          ++work.decoding, work.read += static_cast<double>(c.read.at(static_cast<std::size_t>(one.seen)));
        else
          work.prompt_tokens += pieces[i], work.prompt_seconds += r.attention(c, pieces[i], one.seen);
        work.shown += c.shows_queries ? 1 : 0;
        event += c.event.at(static_cast<std::size_t>(one.seen));
        events += c.event.at(static_cast<std::size_t>(one.seen)) > 0 ? 1 : 0;
      }
      now += r.seconds(work) + event + moved / kHostLink;
      ++steps;
      for (std::size_t i = 0; i < inside.size(); ++i) {
        One& one = inside[i];
        if (one.seen < c.prompt) continue;
        if (one.newest < 0)
          first.push_back(now - one.arrived);
        else
          between.push_back(now - one.newest);
        one.newest = now;
      }
      std::erase_if(inside, [&](const One& one) { return one.seen == c.length - 1; });
    }
  }

  static double at(std::vector<double> times, double share) {
    std::ranges::sort(times);
    return times.at(static_cast<std::size_t>(std::ceil(share * static_cast<double>(times.size()))) - 1);
  }
};

TEST(Served, AgreesWithASlowSimulationOnRandomLoadsAndKeepsWithinItsMemory) {
  std::mt19937 bits(20261130);
  const auto between = [&](std::uint32_t least, std::uint32_t most) {
    return static_cast<std::int32_t>(least + bits() % (most - least + 1));
  };
  const Roofline roofline = roofline_of(shape_called("2:4:2:64"), 1e6, gpu_called("h100"), 0.5);
  std::int64_t away = 0, events = 0;
  for (int n = 0; n < 300; ++n) {
    SCOPED_TRACE(n);
    const std::int32_t prompt = between(1, 60);
    const std::string budget = text("budget=", between(6, 30), ",interval=", between(1, 20),
                                    std::array{"", ",prefill=cut", ",prefill=pieces"}[bits() % 3]);
    const std::string policy = std::array<std::string, 3>{"full", "streaming," + budget, "knorm," + budget}[bits() % 3];
    const SequencePlan plan{.prompt = prompt,
                            .length = prompt + between(3, 80),
                            .dtype = Dtype::bf16,
                            .page_size = between(1, 8),
                            .piece = between(1, 64)};
    Course course = course_of(shape_called("2:4:2:64"), *make_policy(policy), plan, EventPrice(1e-6 * between(1, 500)));
    course.shows_queries = bits() % 2 == 0;
    const std::int64_t room = course.scratch + course.most_held(0) * between(10, 80) / 10;
    const Load load{.requests = between(1, 40),
                    .rate = bits() % 4 == 0 ? 0.0 : 1000.0 * between(1, 100) / 10,
                    .seed = static_cast<std::uint32_t>(n)};
    const Served fast = serve(course, roofline, room, load);
    const Plainly slow(course, roofline, room, load.requests, load.rate, load.seed);
    EXPECT_EQ(fast.finished, load.requests);
    EXPECT_EQ(fast.tokens, load.requests * course.answer());
    EXPECT_EQ(fast.steps, slow.steps);
    EXPECT_EQ(fast.events, slow.events);
    EXPECT_EQ(fast.away, slow.away);
    EXPECT_EQ(fast.most_bytes, slow.most_bytes);
    EXPECT_LE(fast.most_bytes, room);
    EXPECT_NEAR(fast.seconds, slow.now, 1e-9 * slow.now);
    EXPECT_EQ(std::ssize(slow.between), fast.tokens - fast.finished) << "every gap between two tokens";
    EXPECT_GT(*std::ranges::min_element(slow.between), 0);
    for (std::size_t i = 0; i < 3; ++i) {
      const double share = std::array{0.5, 0.9, 0.99}[i];
      EXPECT_NEAR(fast.first[i], Plainly::at(slow.first, share), 1e-9 * slow.now);
      EXPECT_NEAR(fast.between[i], Plainly::at(slow.between, share), 2e-3 * fast.between[i]);
    }
    away += fast.away, events += fast.events;
    const Served again = serve(course, roofline, room, load);
    EXPECT_EQ(again.seconds, fast.seconds);
  }
  EXPECT_GT(away, 100) << "or the cases try too little";
  EXPECT_GT(events, 1000);
}

TEST(Served, AnUnhurriedRequestTakesItsClosedForm) {
  const ModelSpec spec = shape_called("llama8b");
  const Roofline roofline = roofline_of(spec, 8.03e9, gpu_called("h100"), 0.5);
  for (const char* policy : {"full", "ams-tova,budget=1024,prefill=cut"}) {
    const Course course =
        course_of(spec, *make_policy(policy),
                  {.prompt = 5000, .length = 7000, .dtype = Dtype::bf16, .page_size = 16, .piece = 2048},
                  priced("ams-tova,budget=1024"));
    const Served one = serve(course, roofline, std::int64_t{1} << 40, {.requests = 1});
    const double prompt = roofline.prompt(course), step = roofline.decode(course, 1) + course.mean_event();
    EXPECT_NEAR(one.first[0], prompt, 1e-9);
    EXPECT_NEAR(one.seconds, prompt + course.decode_steps() * step, 1e-9);
  }
}

class PlanOnAGpu : public Command {
 protected:
  json plan(Words words) {
    words.insert(words.begin(), {"plan", "--shape", "llama8b", "-o", "json"});
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.code == 0 ? json::parse(outcome.out) : json();
  }
};

TEST_F(PlanOnAGpu, PredictsFromTheMemoryThatThePlanWithoutItCounts) {
  const Words how{"--policy", "ams-tova,budget=4096,prefill=cut", "--length", "32768", "--prompt", "31744"};
  Words on_gpu = how;
  on_gpu.insert(on_gpu.end(), {"--gpu", "h100", "--requests", "50"});
  const json all = plan(on_gpu), memory = plan(how);
  EXPECT_EQ(all["prediction"], true);
  EXPECT_EQ(all["room_bytes"], 72'000'000'000 - 16'060'000'000) << "0.9 of 80 GB, less the weights";
  EXPECT_EQ(all["full"]["most_bytes"], memory["sequence"]["full_bytes"]);
  EXPECT_EQ(all["cut"]["most_bytes"].get<std::int64_t>(), memory["sequence"]["peak_bytes"].get<std::int64_t>() +
                                                              memory["own"]["sum"].get<std::int64_t>() -
                                                              memory["own"]["event"].get<std::int64_t>());
  EXPECT_EQ(all["full"]["requests_that_fit"], 55'940'000'000 / (std::int64_t{32768} * 131072));
  EXPECT_EQ(all["served"].size(), 4U);
  for (const json& row : all["served"]) {
    EXPECT_EQ(row["finished"], 50);
    EXPECT_LE(row["most_bytes"], all["room_bytes"]);
  }
  on_gpu.insert(on_gpu.end(), {"--seed", "2"});
  const json other = plan(on_gpu);
  EXPECT_NE(other["served"][0]["seconds"], all["served"][0]["seconds"]) << "arrivals follow from the seed";
  EXPECT_EQ(other["served"][2], all["served"][2]) << "at once there is nothing to draw";
}

TEST_F(PlanOnAGpu, ServesTextsThatNoFullCacheHolds) {
  const json all = plan({"--policy", "tova,budget=8192,prefill=pieces", "--length", "602000", "--prompt", "600000",
                         "--gpu", "h100", "--requests", "20"});
  EXPECT_EQ(all["full"]["requests_that_fit"], 0);
  EXPECT_GT(all["cut"]["requests_that_fit"], 40);
  ASSERT_EQ(all["served"].size(), 2U);
  for (const json& row : all["served"]) EXPECT_EQ(row["cache"], "tova");
  EXPECT_TRUE(all["steps"][0]["full_ms"].is_null());
}

TEST_F(PlanOnAGpu, TakesNumbersOfYourOwnAndRefusesWhatDoesNotGoTogether) {
  const Words least{"--policy", "rkv,budget=1024", "--length", "2000", "--prompt", "1000", "--requests", "20"};
  Words own = least;
  own.insert(own.end(), {"--memory", "40", "--bandwidth", "1.5", "--flops", "300", "--event-us", "1000"});
  const json all = plan(own);
  EXPECT_EQ(all["gpu"]["bytes_a_second"], 1.5e12);
  EXPECT_EQ(all["room_bytes"], 36'000'000'000 - 16'060'000'000);
  const auto refused = [&](Words more, const std::string& names, const char* shape = "llama8b") {
    more.insert(more.begin(), {"plan", "--shape", shape});
    expect_refused(more, names);
  };
  const Words tova{"--policy", "tova,budget=1024", "--length", "2000", "--prompt", "1000"};
  const auto with = [&](Words more) {
    more.insert(more.begin(), tova.begin(), tova.end());
    return more;
  };
  refused(with({"--gpu", "h10"}), "--gpu: 'h10'");
  refused(with({"--gpu", "h10"}), "(did you mean \"h100\"?)");
  refused(with({"--gpu"}), "--gpu has no value; allowed one after it");
  for (const char* option : {"--rate", "--requests", "--seed", "--utilisation", "--event-us", "--parameters"})
    refused(with({option, "1"}), text(option, ": what a GPU serves was not asked; allowed with --gpu"));
  refused(with({"--bandwidth", "2"}), "--bandwidth: a GPU of your own has all three of");
  for (const char* number : {"nan", "0", "-1", "1x", "inf"})
    refused(with({"--gpu", "h100", text("--rate=", number)}), "is no number in the range; allowed 0.001 to");
  refused(with({"--gpu", "h100", "--batch", "2"}), "--batch: 2, but the GPU's memory says how many run");
  refused(with({"--gpu", "h100", "--dtype", "q8_0"}), "--dtype: events were measured with numbers of two bytes");
  refused(with({"--gpu", "h100", "--memory", "10"}), "--gpu: the weights take 14.96 GiB");
  refused(with({"--gpu", "h100", "--memory", "18"}), "--length: one request holds");
  refused(with({"--gpu", "h100"}), "--parameters: how many qwen3-30b-a3b has", "qwen3-30b-a3b");
  refused({"--policy", "tova,budget=1024", "--length", "2000", "--gpu", "h100"}, "--prompt: 0 of 2000 tokens");
  refused({"--policy", "tova,budget=1024", "--length", "2000000", "--prompt", "9", "--gpu", "h100"},
          "--length: 2000000");
  refused({"--policy", "tova,budget=1024", "--length", "1000000", "--prompt", "9", "--gpu", "h100"},
          "--requests: 10000");
  for (const auto& [policy, why] : {std::pair("rkv,budget=1024", "--policy: no event of rkv was measured on a GPU"),
                                    {"snapkv,budget=1024,window=16", "measured with 64 queries, this one reads 16"},
                                    {"sekv,budget=1024", "--policy: the text decides what sekv holds"},
                                    {"tova,budget=1024,trigger=named", "under trigger=named the program says when"}})
    refused({"--policy", policy, "--length", "2000", "--prompt", "1000", "--gpu", "h100"}, why);
}

// The page shows one whole answer, and one row of each of some others.
TEST_F(PlanOnAGpu, IsWhatThePageOfPerformanceShows) {
  const std::string page = content(root() / "docs/inside/performance.md");
  const Words shown{
      "plan",     "--gpu", "h100",     "--shape", "llama8b", "--policy", "ams-tova,budget=4096,prefill=cut",
      "--length", "32768", "--prompt", "31744"};
  std::string command = "    kvkeep";
  for (const std::string& word : shown) command += " " + word;
  const std::string answer = run(shown).out;
  EXPECT_NE(page.find(command + "\n\n<!-- predicted: begin -->\n" + answer + "<!-- predicted: end -->\n"),
            std::string::npos)
      << command << "\n"
      << answer;
  struct Case {
    const char *length, *prompt, *policy;
  };
  for (const Case& of : std::vector<Case>{{"32768", "31744", "ams-tova,budget=4096,prefill=cut"},
                                          {"32768", "1024", "ams-tova,budget=4096"},
                                          {"131072", "130048", "ams-tova,budget=16384,prefill=cut"},
                                          {"131072", "1024", "ams-tova,budget=16384"},
                                          {"4096", "3072", "ams-tova,budget=512,prefill=cut"},
                                          {"1024", "512", "ams-tova,budget=512,interval=128"},
                                          {"1024", "512", "ams-expected,budget=256,interval=16,prefill=cut"}}) {
    const json all = plan(
        {"--gpu", "h100", "--requests", "300", "--length", of.length, "--prompt", of.prompt, "--policy", of.policy});
    const auto both = [&](const char* what, std::size_t from) {
      return text(all["served"][from][what].dump(), " / ", all["served"][from + 1][what].dump());
    };
    const double gain = all["served"][3]["tokens_s"].get<double>() / all["served"][2]["tokens_s"].get<double>();
    const std::string row =
        text("\n| ", of.length, " | ", of.prompt, " | `", of.policy, "` | ", all["full"]["requests_that_fit"].dump(),
             " / ", all["cut"]["requests_that_fit"].dump(), " | ", both("tokens_s", 2), " | ", real_cell(gain, 2).shown,
             " | ", both("between_ms_50", 0), " | ", both("first_s_90", 0), " | ",
             std::llround(all["break_even_tokens"]["one"].get<double>()), " / ",
             std::llround(all["break_even_tokens"]["most_of_full"].get<double>()), " |\n");
    EXPECT_NE(page.find(row), std::string::npos) << row;
  }
}

}  // namespace
}  // namespace kvkeep::cli_serving_test

#endif  // KVKEEP_CLI_PATH
