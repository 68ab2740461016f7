// SPDX-License-Identifier: Apache-2.0
// The engine of examples/serving under anything that a day brings: prefix caches, forks, drafts, preemption,
// cancellation, a full pool, two steps in flight. After every step each page is compared with the text that it stands
// for, and each holder is counted.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "engine.h"
#include "prompts_alike.h"

namespace serving {
namespace {

// Every policy has eight runs of as many operations: 100,000 in all. The same requests are served in twelve ways.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || defined(KVKEEP_SANITIZED)
constexpr std::int64_t kOperations = 100, kRequests = 20;
#else
constexpr std::int64_t kOperations = 1600, kRequests = 60;
#endif

/// Looks at everything that a worker holds.
class Auditor {
 public:
  void look(const Worker& worker) {
    holders_.assign(static_cast<std::size_t>(worker.pool().capacity()), 0);
    for (const auto& [id, s] : worker.living()) look(worker, id, s);
    if (worker.cache() != nullptr)
      worker.cache()->for_each([&](std::span<const Token> text, std::int32_t page) { look(worker, text, page); });
    std::int32_t free = 0;
    for (std::int32_t page = 0; page < worker.pool().capacity(); ++page) {
      ASSERT_EQ(worker.pool().references(page), holders_[static_cast<std::size_t>(page)]) << "page " << page;
      free += holders_[static_cast<std::size_t>(page)] == 0 ? 1 : 0;
    }
    ASSERT_EQ(worker.pool().free_pages(), free);
    ++looks;
  }

  std::int64_t looks = 0, slots = 0, cached_pages = 0;

 private:
  /// Every slot of every row holds the token whose position kvkeep says, with the text before it.
  void look(const Worker& worker, SequenceId id, const Worker::Living& s) {
    const auto pages = worker.sequences().pages(id);
    for (const std::int32_t page : pages) ++holders_[static_cast<std::size_t>(page)];
    std::vector<std::uint64_t> chains;
    for (std::int32_t t = 0; t < s.computed; ++t)
      chains.push_back(chained(t == 0 ? 0 : chains.back(), s.text[static_cast<std::size_t>(t)]));
    ASSERT_EQ(worker.keeper().logical_length(id), s.computed);
    for (std::int32_t l = 0; l < Model::kLayers; ++l)
      for (std::int32_t h = 0; h < Model::kHeads; ++h) {
        const auto positions = worker.keeper().positions(id, l, h);
        ASSERT_EQ(std::ssize(positions), s.lengths[static_cast<std::size_t>(l * Model::kHeads + h)]);
        for (std::size_t slot = 0; slot < positions.size(); ++slot) {
          const auto size = static_cast<std::size_t>(worker.pool().page_size());
          expect_named(worker, l, pages[slot / size], static_cast<std::int32_t>(slot % size), h,
                       chains.at(static_cast<std::size_t>(positions[slot])));
          ++slots;
        }
      }
  }

  /// A cached page holds its text, to the last bit as when this text was first seen.
  void look(const Worker& worker, std::span<const Token> text, std::int32_t page) {
    ++holders_[static_cast<std::size_t>(page)];
    ++cached_pages;
    const std::int32_t size = worker.pool().page_size(), first = static_cast<std::int32_t>(text.size()) - size;
    std::uint64_t chain = 0;
    for (std::int32_t t = 0; t < std::ssize(text); ++t) {
      chain = chained(chain, text[static_cast<std::size_t>(t)]);
      for (std::int32_t l = 0; t >= first && l < Model::kLayers; ++l)
        for (std::int32_t h = 0; h < Model::kHeads; ++h) expect_named(worker, l, page, t - first, h, chain);
    }
    std::vector<float> content;
    for (std::int32_t l = 0; l < Model::kLayers; ++l)
      for (const bool values : {false, true}) {
        const float* const from = worker.page(l, values, page);
        content.insert(content.end(), from, from + std::int64_t{size} * Model::kHeads * Model::kDim);
      }
    const auto [known, is_new] = contents_.try_emplace(chain, content);
    ASSERT_EQ(known->second, content) << "page " << page;
  }

  static void expect_named(const Worker& worker, std::int32_t l, std::int32_t page, std::int32_t slot, std::int32_t h,
                           std::uint64_t chain) {
    for (const bool values : {false, true})
      for (std::int32_t i = 0; i < Model::kName; ++i)
        ASSERT_EQ(worker.page(l, values, page)[(slot * Model::kHeads + h) * Model::kDim + i], Model::name(chain, i))
            << (values ? "values" : "keys") << " of slot " << slot << " of page " << page;
  }

  std::vector<std::int32_t> holders_;
  std::map<std::uint64_t, std::vector<float>> contents_;
};

struct Case {
  const char* name;
  const char* policy;
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

const Case kCases[] = {
    {"full", "full"},
    {"amstova", "ams-tova,budget=24,interval=4,recent=4,window=4,min_segment=2,credit=true"},
    {"snapkv", "snapkv,budget=24,interval=6,window=8,prefill=cut"},
    {"adakv", "adakv-snapkv,budget=16,interval=4,window=6,sink=2"},
    {"pyramidkv", "pyramidkv-knorm,budget=16,interval=4,recent=4"},
    {"prompt", "tova,budget=8,interval=4,recent=2,protect_prompt=true"},
    {"streaming", "streaming,budget=20,interval=1"},
    {"h2o", "h2o,budget=24,interval=4,recent=4,prefill=cut"},
};

class Serving : public ::testing::TestWithParam<Case> {};

/// Any operations in any order.
TEST_P(Serving, NoPageEverHoldsAnythingButItsText) {
  std::int64_t operations = 0, cached = 0, preempted = 0, drafts = 0, events = 0, answers = 0, looks = 0, slots = 0;
  for (std::uint32_t run = 0; run < 8; ++run) {
    const std::string cache = run % 2 == 0 ? "hash" : "radix";
    const std::int32_t in_flight = run / 2 % 2 == 0 ? 1 : 2, pages = run < 4 ? 40 : 18;
    SCOPED_TRACE(cache + ", in flight " + std::to_string(in_flight) + ", pages " + std::to_string(pages));
    {
      Auditor auditor;
      Prompts random(17 + run);
      Engine engine({.policy = GetParam().policy, .pages = pages, .page_size = 8, .cache = cache},
                    {.in_flight = in_flight, .chunk = 16, .step_tokens = 48},
                    [&](const Worker& worker) { auditor.look(worker); });
      SequenceId next = 0;
      std::vector<SequenceId> known;
      for (int i = 0; i < kOperations; ++i, ++operations) {
        const std::int32_t what = random.between(0, 99);
        if (what < 12 && engine.waiting() < 6) {
          const Request request = random.request(next);
          for (std::int32_t s = 0; s < request.samples; ++s) known.push_back(next + s);
          next += 8;
          engine.submit(request);
        } else if (what < 15 && !known.empty()) {
          engine.cancel(
              known[static_cast<std::size_t>(random.between(0, static_cast<std::int32_t>(known.size()) - 1))]);
        } else if (what < 19 && !engine.order().empty()) {
          engine.preempt(engine.order()[static_cast<std::size_t>(
              random.between(0, static_cast<std::int32_t>(engine.order().size()) - 1))]);
        } else {
          engine.step();
          answers += std::ssize(engine.take_answers());
        }
        if (known.size() > 40) known.erase(known.begin(), known.begin() + 20);
        if (HasFatalFailure()) return;
      }
      while (engine.step()) continue;
      EXPECT_EQ(engine.running() + engine.waiting(), 0);
      cached += engine.numbers().cached_tokens, preempted += engine.numbers().preempted;
      drafts += engine.numbers().accepted_drafts, events += engine.totals().events;
      looks += auditor.looks, slots += auditor.slots;
      EXPECT_EQ(engine.numbers().most_in_flight, in_flight);
    }
  }
  EXPECT_GT(cached, kOperations);
  EXPECT_GT(preempted, kOperations / 8);
  EXPECT_GT(drafts, kOperations / 4);
  EXPECT_GT(answers, kOperations / 4);
  if (std::string(GetParam().policy) != "full") EXPECT_GT(events, kOperations / 4);
  std::printf(
      "%lld operations, %lld steps looked at, %lld slots compared, %lld cached tokens, %lld preempted, %lld "
      "drafts stood, %lld events, %lld answers\n",
      static_cast<long long>(operations), static_cast<long long>(looks), static_cast<long long>(slots),
      static_cast<long long>(cached), static_cast<long long>(preempted), static_cast<long long>(drafts),
      static_cast<long long>(events), static_cast<long long>(answers));
}

/// The answers to the same requests.
std::map<SequenceId, std::vector<Token>> answers_of(const Settings& settings, Limits limits, bool with_preemption,
                                                    Engine::Numbers& numbers) {
  Auditor auditor;
  Engine engine(settings, limits, [&](const Worker& worker) { auditor.look(worker); });
  Prompts random(5);
  std::mt19937 bits(9);
  std::map<SequenceId, std::vector<Token>> all;
  SequenceId next = 0;
  while (next < 8 * kRequests || engine.running() + engine.waiting() > 0) {
    if (next < 8 * kRequests && engine.waiting() < 4) engine.submit(random.request(next)), next += 8;
    if (with_preemption && bits() % 8 == 0 && !engine.order().empty())
      engine.preempt(engine.order()[bits() % engine.order().size()]);
    engine.step();
    all.merge(engine.take_answers());
  }
  while (engine.step()) all.merge(engine.take_answers());
  all.merge(engine.take_answers());
  numbers = engine.numbers();
  return all;
}

/// What a sequence writes does not depend on who else is served: not on hits, forks, preemption, or steps in flight.
TEST_P(Serving, TokensAreThoseOfOneStepInFlightWithoutACache) {
  Engine::Numbers plain, numbers;
  const auto expected = answers_of({.policy = GetParam().policy, .pages = 400, .cache = "none"}, {}, false, plain);
  ASSERT_GE(std::ssize(expected), kRequests);
  EXPECT_EQ(plain.cached_tokens + plain.preempted, 0);
  for (const std::string cache : {"none", "hash", "radix"})
    for (const std::int32_t in_flight : {1, 2})
      for (const std::int32_t pages : {400, 36}) {
        SCOPED_TRACE(cache + ", in flight " + std::to_string(in_flight) + ", pages " + std::to_string(pages));
        const auto answers = answers_of({.policy = GetParam().policy, .pages = pages, .cache = cache},
                                        {.in_flight = in_flight, .chunk = pages == 36 ? 8 : 16}, pages == 36, numbers);
        ASSERT_EQ(answers, expected);
        if (cache != "none") EXPECT_GT(numbers.cached_tokens, kRequests);
        if (pages == 36) EXPECT_GT(numbers.preempted, kRequests / 6);
      }
}

INSTANTIATE_TEST_SUITE_P(Policies, Serving, ::testing::ValuesIn(kCases),
                         [](const auto& p) { return std::string(p.param.name); });

/// Prompts of 200 to 500 tokens, which begin alike, in a pool of 160 slots.
TEST(ServingEngine, RunsPromptsThatAreLongerThanThePool) {
  std::int64_t cached = 0, preempted = 0, answers = 0;
  for (const char* policy : {"snapkv,budget=24,interval=6,window=6,prefill=pieces",
                             "ams-tova,budget=24,interval=4,recent=4,window=4,prefill=pieces,trigger=counter"})
    for (const std::string cache : {"hash", "radix"})
      for (const std::int32_t in_flight : {1, 2}) {
        SCOPED_TRACE(std::string(policy) + ", " + cache + ", in flight " + std::to_string(in_flight));
        Auditor auditor;
        std::int32_t longest = 0;
        Engine engine({.policy = policy, .pages = 20, .page_size = 8, .cache = cache},
                      {.in_flight = in_flight, .chunk = 16, .step_tokens = 48}, [&](const Worker& worker) {
                        auditor.look(worker);
                        for (const auto& [id, s] : worker.living()) longest = std::max(longest, s.lengths.front());
                      });
        std::mt19937 bits(3);
        const auto number = [&](std::uint32_t least, std::uint32_t most) {
          return least + bits() % (most - least + 1);
        };
        std::vector<Token> text;
        for (int t = 0; t < 500; ++t) text.push_back(static_cast<Token>(bits() % Model::kVocabulary));
        for (SequenceId id = 0; id < 80; id += 8) {
          Request request{.id = id,
                          .prompt = {text.begin(), text.begin() + number(200, 480)},
                          .new_tokens = static_cast<std::int32_t>(number(1, 30)),
                          .samples = id % 3 == 0 ? 2 : 1,
                          .drafts = static_cast<std::int32_t>(number(0, 2))};
          for (int t = 0; t < 20; ++t) request.prompt.push_back(static_cast<Token>(bits() % Model::kVocabulary));
          engine.submit(request);
        }
        for (int step = 0; engine.step(); ++step) {
          answers += std::ssize(engine.take_answers());
          if (step % 7 == 6 && !engine.order().empty()) engine.preempt(engine.order().back());
          if (HasFatalFailure()) return;
        }
        answers += std::ssize(engine.take_answers());
        EXPECT_EQ(engine.running() + engine.waiting(), 0);
        EXPECT_LE(longest, 24 + 3 * 16) << "an event waits where it lacks pages";
        cached += engine.numbers().cached_tokens, preempted += engine.numbers().preempted;
      }
  EXPECT_EQ(answers, 8 * 14);
  EXPECT_GT(cached, 0);
  EXPECT_GT(preempted, 50);
}

TEST(ServingEngine, RefusesWhatNeverFits) {
  Engine engine({.pages = 8, .page_size = 8}, {});
  EXPECT_THROW(engine.submit({.id = 0, .prompt = {}, .new_tokens = 1}), kvkeep::InvalidArgument);
  EXPECT_THROW(engine.submit({.id = 0, .prompt = std::vector<Token>(40, 1), .new_tokens = 1}), kvkeep::InvalidArgument);
  Engine tight({.policy = "tova,budget=24,prefill=pieces", .pages = 9, .page_size = 8}, {.chunk = 16});
  EXPECT_THROW(tight.submit({.id = 0, .prompt = std::vector<Token>(90, 1), .new_tokens = 1}), kvkeep::InvalidArgument)
      << "24 slots and a chunk of 16, twice";
  EXPECT_THROW(Engine({.cache = "lru"}, {}), kvkeep::InvalidArgument);
  EXPECT_THROW(Engine({}, {.in_flight = 3}), kvkeep::InvalidArgument);
  EXPECT_THROW(Engine({}, {.chunk = 12}), kvkeep::InvalidArgument);
  engine.submit({.id = 0, .prompt = std::vector<Token>(20, 1), .new_tokens = 60});
  EXPECT_THROW(while (engine.step()) continue, kvkeep::StateError)
      << "under a policy that drops nothing its answer does not fit";
}

}  // namespace
}  // namespace serving
