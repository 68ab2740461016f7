// SPDX-License-Identifier: Apache-2.0
// An engine that knows one integer of what kvkeep does to a request, under anything that a day brings. After every step
// each slot of each request and each cached block is compared with the text that it stands for.

#include "one_integer.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "prompts_alike.h"

namespace serving::one_integer_test {
namespace {

// 120,000 operations in all.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || defined(KVKEEP_SANITIZED)
constexpr std::int64_t kOperations = 150, kRequests = 20;
#else
constexpr std::int64_t kOperations = 3200, kRequests = 60;
#endif

struct Case {
  const char* name;
  const char* policy;
  bool within_prompts = false;  ///< it cuts there, so hits and chunks move its cuts
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

const Case kCases[] = {
    {"full", "full"},
    {"union", "tova,budget=24,interval=6,recent=4,share=union"},
    {"unioncut", "snapkv,budget=24,interval=4,window=8,share=union_mean,prefill=cut"},
    {"unionh2o", "h2o,budget=24,interval=4,recent=4,share=union,prefill=cut"},
    {"unionkeys", "knorm,budget=26,interval=5,sink=9,recent=4,share=union"},
    {"streaming", "streaming,budget=20,interval=1,sink=8"},
    {"perrow", "ams-tova,budget=24,interval=4,recent=4,window=4,min_segment=2,credit=true"},
    {"pieces", "tova,budget=24,interval=6,recent=4,share=union,prefill=pieces", true},
    {"piecessinks", "streaming,budget=16,interval=4,sink=9,prefill=pieces", true},
    {"prompt", "keydiff,budget=8,interval=4,recent=2,share=union,protect_prompt=true"},
};

/// Looks at everything that an engine holds.
class Auditor {
 public:
  void look(const OneIntegerEngine& engine, std::int32_t size) {
    holders_.assign(static_cast<std::size_t>(engine.blocks().count()), 0);
    for (const auto& [id, s] : engine.running()) look(engine, size, id, s);
    engine.tree().for_each([&](std::span<const Token> text, std::int32_t block) {
      hold(block);
      ++cached;
      const std::int32_t first = static_cast<std::int32_t>(text.size()) - size;
      const Chains chains(text);
      for (std::int32_t slot = 0; slot < size; ++slot)
        for (std::int32_t l = 0; l < Model::kLayers; ++l)
          for (std::int32_t h = 0; h < Model::kHeads; ++h)
            expect_token(engine, l, h, block, slot, chains, first + slot);
    });
    std::int32_t free = 0;
    for (std::int32_t block = 0; block < engine.blocks().count(); ++block) {
      ASSERT_EQ(engine.blocks().references(block), holders_[static_cast<std::size_t>(block)]) << "block " << block;
      free += holders_[static_cast<std::size_t>(block)] == 0 ? 1 : 0;
    }
    ASSERT_EQ(engine.blocks().free(), free);
  }

  std::int64_t slots = 0, cached = 0;

 private:
  /// A text, and the chain of hashes up to each of its tokens.
  struct Chains {
    explicit Chains(std::span<const Token> of_text) : text(of_text) {
      for (const Token token : text) of.push_back(chained(of.empty() ? 0 : of.back(), token));
    }
    std::span<const Token> text;
    std::vector<std::uint64_t> of = {};
  };
  void hold(std::int32_t block) { ++holders_.at(static_cast<std::size_t>(block)); }

  void look(const OneIntegerEngine& engine, std::int32_t size, SequenceId id, const OneIntegerEngine::Served& s) {
    ASSERT_EQ(engine.keeper().logical_length(id), s.computed);
    ASSERT_EQ(engine.keeper().evicted(id), s.evicted);
    ASSERT_EQ(std::ssize(s.blocks), (s.cached() + size - 1) / size) << "as many blocks as its slots need, no more";
    for (const std::int32_t block : s.blocks) hold(block);
    const Chains chains(s.text);
    for (std::int32_t l = 0; l < Model::kLayers; ++l)
      for (std::int32_t h = 0; h < Model::kHeads; ++h) {
        const auto positions = engine.keeper().positions(id, l, h);
        ASSERT_EQ(std::ssize(positions), s.cached()) << "layer " << l << ", head " << h;
        for (std::int32_t slot = 0; slot < s.cached(); ++slot, ++slots)
          expect_token(engine, l, h, s.blocks[static_cast<std::size_t>(slot / size)], slot % size, chains,
                       positions[static_cast<std::size_t>(slot)]);
      }
  }

  /// Keys and values of a token in the first layer, which sees nothing but the token and its position.
  struct Sides {
    std::array<float, static_cast<std::size_t>(Model::kHeads* Model::kDim)> keys, values;
  };
  const Sides& sides_of(const OneIntegerEngine& engine, std::uint64_t chain, Token token, std::size_t position) {
    const auto [known, is_new] = sides_.try_emplace(chain);
    std::array<float, static_cast<std::size_t>(Model::kQueryHeads * Model::kDim)> queries;
    if (is_new)
      engine.model().project(0, engine.model().embed(token, static_cast<std::int64_t>(position)), chain, queries.data(),
                             known->second.keys.data(), known->second.values.data());
    return known->second;
  }

  /// A slot holds the token at a place of a text: the name of the text up to it and, in the first layer, every bit.
  void expect_token(const OneIntegerEngine& engine, std::int32_t l, std::int32_t h, std::int32_t block,
                    std::int32_t slot, const Chains& chains, std::int32_t place) {
    const auto at = static_cast<std::size_t>(place);
    const Sides& sides = sides_of(engine, chains.of.at(at), chains.text[at], at);
    const auto first = static_cast<std::size_t>(h * Model::kDim);
    for (const bool values : {false, true})
      ASSERT_EQ(
          std::memcmp(engine.slot(l, values, block, slot) + first, (values ? sides.values : sides.keys).data() + first,
                      sizeof(float) * static_cast<std::size_t>(l == 0 ? Model::kDim : Model::kName)),
          0)
          << (values ? "value" : "key") << " of slot " << slot << " of block " << block << ", layer " << l << ": token "
          << place;
  }

  std::map<std::uint64_t, Sides> sides_;
  std::vector<std::int32_t> holders_;
};

class OneIntegerServing : public ::testing::TestWithParam<Case> {};

/// Any operations in any order.
TEST_P(OneIntegerServing, NoBlockEverHoldsAnythingButItsText) {
  const std::string name = GetParam().name;
  OneIntegerEngine::Numbers all;
  std::int64_t slots = 0, cached = 0, answers = 0;
  for (std::uint32_t run = 0; run < 4; ++run) {
    const OneIntegerSettings settings{.policy = GetParam().policy,
                                      .blocks = run < 2 ? 48 : 24,
                                      .block_size = run % 2 == 0 ? 8 : 4,
                                      .chunk = run % 2 == 0 ? 16 : 11};
    Auditor auditor;
    Prompts random(31 + run);
    OneIntegerEngine engine(settings);
    std::vector<SequenceId> known;
    for (SequenceId i = 0; i < kOperations; ++i) {
      const std::int32_t what = random.between(0, 99);
      const auto some = [&] {
        return known[static_cast<std::size_t>(random.between(0, static_cast<std::int32_t>(known.size()) - 1))];
      };
      if (what < 12 && engine.waiting() < 6) {
        const Request request = random.request(8 * i);
        for (std::int32_t s = 0; s < request.samples; ++s) known.push_back(request.id + s);
        engine.submit(request);
      } else if (what < 15 && !known.empty()) {
        engine.cancel(some());
      } else if (what < 19 && !known.empty()) {
        engine.preempt(some(), what < 17 ? OneIntegerEngine::Leave::swap : OneIntegerEngine::Leave::recompute);
      } else {
        engine.step();
        answers += std::ssize(engine.take_answers());
      }
      auditor.look(engine, settings.block_size);
      if (HasFatalFailure()) return;
      if (known.size() > 24) known.erase(known.begin(), known.begin() + 12);
    }
    while (engine.step()) continue;
    auditor.look(engine, settings.block_size);
    const OneIntegerEngine::Numbers& n = engine.numbers();
    all.hits += n.hits, all.swapped += n.swapped, all.recomputed += n.recomputed, all.accepted += n.accepted;
    all.rejected += n.rejected, all.forks += n.forks, all.cuts += n.cuts, all.published_cut += n.published_cut;
    slots += auditor.slots, cached += auditor.cached;
    if (!GetParam().within_prompts) EXPECT_EQ(n.said_otherwise, 0);
  }
  for (const std::int64_t count :
       {all.hits, all.swapped, all.recomputed, all.accepted, all.rejected, all.forks, answers})
    EXPECT_GT(count, kOperations / 80);
  if (name != "full") EXPECT_GT(all.cuts, kOperations / 20);
  if (name == "streaming" || name == "unionkeys") EXPECT_GT(all.published_cut, 0);
  std::printf(
      "%lld operations: %lld slots and %lld cached blocks compared, %lld tokens hit, %lld swapped, %lld computed "
      "again, "
      "%lld drafts stood, %lld did not, %lld forks, %lld cuts, %lld blocks published after one, %lld answers\n",
      static_cast<long long>(4 * kOperations), static_cast<long long>(slots), static_cast<long long>(cached),
      static_cast<long long>(all.hits), static_cast<long long>(all.swapped), static_cast<long long>(all.recomputed),
      static_cast<long long>(all.accepted), static_cast<long long>(all.rejected), static_cast<long long>(all.forks),
      static_cast<long long>(all.cuts), static_cast<long long>(all.published_cut), static_cast<long long>(answers));
}

/// What a request says does not depend on hits, chunks, block sizes, preemption, or who else is served.
TEST_P(OneIntegerServing, SaysWhatAnEngineWithoutACacheSays) {
  const bool within = GetParam().within_prompts;  // then only as long as steps are the same
  const auto answers_of = [](const OneIntegerSettings& settings, bool preempts, OneIntegerEngine::Numbers& numbers) {
    OneIntegerEngine engine(settings);
    Prompts random(5);
    std::mt19937 bits(9);
    std::map<SequenceId, std::vector<Token>> all;
    SequenceId next = 0;
    while (next < 8 * kRequests || !engine.running().empty() || engine.waiting() > 0) {
      if (next < 8 * kRequests && engine.waiting() < 4) engine.submit(random.request(next)), next += 8;
      if (preempts && bits() % 8 == 0 && !engine.running().empty())
        engine.preempt(engine.running().begin()->first,
                       bits() % 2 == 0 ? OneIntegerEngine::Leave::swap : OneIntegerEngine::Leave::recompute);
      engine.step();
      all.merge(engine.take_answers());
    }
    numbers = engine.numbers();
    return all;
  };
  OneIntegerEngine::Numbers plain, numbers;
  const auto expected =
      answers_of({.policy = GetParam().policy, .blocks = 900, .step_tokens = 900, .prefix_cache = false}, false, plain);
  ASSERT_GE(std::ssize(expected), kRequests);
  EXPECT_EQ(plain.hits + plain.swapped + plain.recomputed, 0);
  for (const std::int32_t size : {1, 4, 8})
    for (const bool preempts : {false, true}) {
      SCOPED_TRACE("blocks of " + std::to_string(size) + (preempts ? ", preempted" : ""));
      ASSERT_EQ(answers_of({.policy = GetParam().policy,
                            .blocks = (preempts ? 176 : 400) / size,
                            .block_size = size,
                            .chunk = preempts && !within ? 7 : 16,
                            .step_tokens = within ? 900 : 64,
                            .prefix_cache = !within},
                           preempts, numbers),
                expected);
      if (!within) EXPECT_GT(numbers.hits, kRequests);
      if (preempts) EXPECT_GT(std::min(numbers.swapped, numbers.recomputed), kRequests / 10);
    }
}

INSTANTIATE_TEST_SUITE_P(Policies, OneIntegerServing, ::testing::ValuesIn(kCases),
                         [](const auto& p) { return std::string(p.param.name); });

/// Where all rows keep the same tokens, blocks of one slot only get other places in the block table.
TEST(OneIntegerEngine, MovesNoByteInBlocksOfOneSlotUnderUnion) {
  for (const std::string share : {"union", "per_layer_per_head"}) {
    OneIntegerEngine engine(
        {.policy = "tova,budget=24,interval=6,recent=4,share=" + share, .blocks = 300, .block_size = 1});
    Prompts random(3);
    for (SequenceId id = 0; id < 40; id += 8) engine.submit(random.request(id));
    while (engine.step()) continue;
    EXPECT_GT(engine.keeper().totals().events, 10);
    EXPECT_EQ(engine.keeper().totals().bytes_moved == 0, share == "union") << share;
  }
}

TEST(OneIntegerEngine, RefusesWhatOneIntegerCannotSay) {
  OneIntegerEngine ragged({.policy = "pyramidkv-knorm,budget=16,interval=4,recent=4"});
  ragged.submit({.id = 0, .prompt = std::vector<Token>(30, 1), .new_tokens = 9});
  EXPECT_THROW(while (ragged.step()) continue, kvkeep::InvalidArgument) << "the view has one length per sequence";
  OneIntegerEngine small({.blocks = 4});
  EXPECT_THROW(small.submit({.id = 0, .prompt = std::vector<Token>(30, 1), .new_tokens = 9}), kvkeep::InvalidArgument);
  EXPECT_THROW(small.submit({.id = 0, .prompt = {}, .new_tokens = 1}), kvkeep::InvalidArgument);
}

}  // namespace
}  // namespace serving::one_integer_test
