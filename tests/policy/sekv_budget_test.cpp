// SPDX-License-Identifier: Apache-2.0
// A budget of folded spans opens one, or is refused with the numbers: when the policy is made, or, where it depends on
// the model's heads, when a model is known.

#include <gtest/gtest.h>

#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "arrays.h"
#include "folded_prompt.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/policy/sekv.h"
#include "message_of.h"
#include "plain_memory.h"

namespace kvkeep::sekv_budget_test {
namespace {

using namespace testing;

constexpr std::int32_t kDim = 64;

ModelSpec model(std::int32_t dim = kDim) {
  return {.query_heads = 1, .kv_heads = 1, .key_dim = dim, .value_dim = dim, .layers = {{}}};
}

const SekvOptions& options_of(const KVPolicy& policy) { return dynamic_cast<const Sekv&>(policy).options(); }

/// Why the policy cannot run on the model, from whoever says so first; empty if it can.
std::string refusal(const std::string& policy, std::int32_t dim = kDim) {
  try {
    const std::unique_ptr<KVPolicy> made = make_policy(policy);
    const std::vector<std::string> found = made->problems(model(dim));
    return found.empty() ? std::string() : found.front();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
}

/// The budget that a refusal allows.
std::int32_t allowed_by(const std::string& refusal) {
  const std::string words = "; allowed ";
  std::int32_t number = 0;
  const std::size_t at = refusal.find(words);
  if (at == std::string::npos) return 0;
  std::from_chars(refusal.data() + at + words.size(), refusal.data() + refusal.size(), number);
  return number;
}

TEST(SekvBudget, SetsWhatIsNotStated) {
  struct Case {
    const char* policy;
    std::int32_t recent, interval;
    std::int64_t tokens;
    std::int32_t max_span;
  };
  for (const Case& c : std::vector<Case>{{"sekv", 32, 128, 1000, 32},
                                         {"sekv,budget=8192", 32, 128, 1000, 32},
                                         {"sekv,budget=128", 32, 32, 60, 32},
                                         {"sekv,budget=128", 32, 32, 1000, 32},
                                         {"sekv,budget=128,zoom_share=0.25", 32, 32, 60, 32},
                                         {"sekv,budget=128,zoom_share=0.1", 32, 32, 60, 12},
                                         // 28 stay until the next event, 3 coarse entries, 16 and 44 tokens' sketches.
                                         {"sekv,budget=48", 12, 12, 60, 16},
                                         {"sekv,budget=128,recent=80", 80, 32, 60, 10},
                                         {"sekv,budget=128,max_span=20,interval=9", 32, 9, 60, 20},
                                         {"sekv,budget=64,min_span=40,recent=1,zoom_share=0.1", 1, 40, 60, 40},
                                         {"sekv,budget_share=0.1", 32, 128, 1000, 32},
                                         {"sekv,budget_share=0.1,max_span=90", 32, 128, 1000, 90},
                                         {"sekv,variant=official,budget=128", 0, 128, 1000, 0}}) {
    SCOPED_TRACE(c.policy);
    const std::unique_ptr<KVPolicy> made = make_policy(c.policy);
    EXPECT_EQ(options_of(*made).segmenter.recent, c.recent);
    EXPECT_EQ(options_of(*made).interval, c.interval);
    EXPECT_EQ(dynamic_cast<const Sekv&>(*made).cut(c.tokens, 1, kDim).max_span, c.max_span);
    EXPECT_EQ(make_policy_from_json(made->to_json())->to_json(), made->to_json());
  }
}

TEST(SekvBudget, IsRefusedWithTheNumbersIfNoSpanCouldOpen) {
  // 4 sinks, 512 recent tokens, a coarse entry and min_span 4.
  const std::string stated =
      message_of<InvalidArgument>([] { static_cast<void>(make_policy("sekv,budget=128,recent=512")); });
  for (const char* words : {"budget: 128", "516 tokens", "max_span 4", "may take 5", "allowed 521"})
    EXPECT_NE(stated.find(words), std::string::npos) << stated;
  EXPECT_NO_THROW(static_cast<void>(make_policy("sekv,budget=521,recent=512")));
  EXPECT_NO_THROW(static_cast<void>(make_policy("sekv,budget=20,variant=official,sink=40"))) << "as published";
  // 32 slots, a coarse entry, and one for each of 32 components, the least that a span of 64 tokens may need.
  const std::string folding =
      message_of<InvalidArgument>([] { static_cast<void>(make_policy("tova,budget=32,rest=fold,reach=64")); });
  for (const char* words : {"reach: 64", "32 tokens", "max_span 64", "may take 33", "allowed 65"})
    EXPECT_NE(folding.find(words), std::string::npos) << folding;
  EXPECT_NO_THROW(static_cast<void>(make_policy("tova,budget=32,rest=fold,reach=65")));
  EXPECT_NO_THROW(static_cast<void>(make_policy("adakv-tova,budget=32,rest=fold,reach=30")))
      << "a head may hold fewer slots than its share of the budget";
}

TEST(SekvBudget, DependsOnTheModelsHeads) {
  // Opened: 32 components of 128 + D numbers on either side; a sketch of D / 8 + 2 bytes per token; f32.
  const std::string sekv = "sekv,budget=128,recent=32,max_span=128", rest = "tova,budget=32,rest=fold,reach=65";
  EXPECT_EQ(allowed_by(refusal(sekv, 64)), 36 + 1 + std::ceil(128 * 10 / 512.0 + 96)) << refusal(sekv, 64);
  EXPECT_EQ(refusal(sekv, 128), "");
  EXPECT_EQ(allowed_by(refusal(rest, 64)), 32 + 1 + std::ceil(64 * 10 / 512.0 + 64)) << refusal(rest, 64);
  EXPECT_EQ(refusal("tova,budget=32,rest=fold,reach=99", 64), "");
  EXPECT_NE(refusal("tova,budget=32,rest=fold,reach=98", 64), "");
}

TEST(SekvBudget, IsTheLeastThatARefusalNames) {
  oracle::Random random(7);
  for (int i = 0; i < 200; ++i) {
    const std::string rest =
        text(",sink=", random.between(0, 8), ",recent=", random.between(0, 300), ",max_span=", random.between(4, 200),
             ",max_rank=", random.between(1, 64), random.chance(0.5) ? ",store=bf16" : "");
    const std::int32_t dim = random.one_of({16, 64, 128});
    // The first refusal may know no model; the one that it allows may then be refused for these heads.
    std::int32_t budget = 1;
    for (int told = 0; told < 2; ++told)
      if (const std::string said = refusal(text("sekv,budget=", budget, rest), dim); !said.empty()) {
        ASSERT_GT(allowed_by(said), budget) << said;
        budget = allowed_by(said);
      }
    EXPECT_EQ(refusal(text("sekv,budget=", budget, rest), dim), "") << rest;
    EXPECT_NE(refusal(text("sekv,budget=", budget - 1, rest), dim), "") << rest;
  }
}

/// A prompt whose keys have nothing to do with each other, so that spans stay raw or take every component.
struct Prompt {
  Prompt(std::uint64_t seed, std::int32_t all, const KVPolicy& policy) : random(seed), tokens(all) {
    keys = normals(random, {1, tokens, kDim}), values = normals(random, {1, tokens, kDim});
    std::vector<float> surprisal;
    for (std::int32_t t = 0; t < tokens; ++t)
      surprisal.push_back(static_cast<float>(-std::log(1 - random.unit()) * (random.chance(0.1) ? 9 : 1)));
    const MemoryOptions& memory = options_of(policy).memory;
    const SegmenterOptions cut = dynamic_cast<const Sekv&>(policy).cut(tokens, 1, kDim);
    const Segments segments = segment(surprisal, cut);
    folded = FoldedHeads(keys, values, surprisal, segments.spans, memory.fold_options());
    dense_keys = gather(keys, 1, segments.dense()), dense_values = gather(values, 1, segments.dense());
    resident = segments.entries(1, cut.entries_per_token);
    allowed = cut.most_entries, longest = cut.max_span;
  }

  /// What a query reads that equals twice the key of one folded token, and whether the span of that token opened.
  std::pair<ReadCounts, bool> ask(const KVPolicy& policy) {
    const SpanRow& row = folded.row(0);
    const auto s = static_cast<std::size_t>(random.between(0, static_cast<int>(row.size()) - 1));
    const Span& span = folded.spans[s];
    const std::int64_t token = random.between(span.begin, span.end - 1);
    const Array query = keys.narrow(1, token, 1).clone().mul_(2);
    OpenAttention open = plain_attention(dense_keys, dense_values, query, 1 / std::sqrt(static_cast<double>(kDim)));
    const MemoryOptions& memory = options_of(policy).memory;
    const MemoryRow read{.spans = &row, .dense = dense_keys.size(1)};
    std::vector<std::vector<std::int32_t>> opened;
    const ReadCounts counts = read_memory(open, {&read, 1}, query, 1 / std::sqrt(static_cast<double>(kDim)),
                                          {.zoom = memory.zoom,
                                           .entries = memory.entries_after(tokens),
                                           .entries_per_token = memory.entries_per_token(kDim)},
                                          &opened);
    return {counts, std::ranges::count(opened.front(), static_cast<std::int32_t>(s)) > 0};
  }

  oracle::Random random;
  std::int32_t tokens;
  Array keys, values;
  Tensor dense_keys, dense_values;
  FoldedHeads folded;
  double resident = 0, allowed = 0;
  std::int32_t longest = 0;
};

/// Whether spans of any one length leave room for one of them to open, with no anchors but sinks.
bool some_length_fits(const SekvOptions& o, std::int32_t tokens) {
  const double folded = tokens - o.segmenter.sink - o.segmenter.recent,
               number = o.memory.factors.store == Dtype::f32 ? 4 : 2;
  for (double length = 4; folded >= 4 && length <= 128; ++length) {
    const double opened = std::min(length, 32 * (length + kDim) / kDim);
    if (opened <= o.zoom_share * o.budget && o.segmenter.sink + o.segmenter.recent + std::ceil(folded / length) +
                                                     folded * 10 / (2 * kDim * number) + opened <=
                                                 o.budget)
      return true;
  }
  return false;
}

TEST(SekvBudget, OpensTheSpanOfAKeyThatIsAskedForWhereverTheTextLeavesRoom) {
  int roomy = 0, full = 0;
  std::int32_t least = 1;
  while (!refusal(text("sekv,budget=", least)).empty()) ++least;
  EXPECT_LE(least, 16);
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    oracle::Random random(seed);
    const auto budget = static_cast<std::int32_t>(least * std::pow(2.0, random.unit() * 7.5));
    const std::string policy =
        text("sekv,budget=", seed <= 4 ? least : budget, ",alpha=", random.between(0, 30) / 10.0,
             ",zoom_share=", random.between(30, 70) / 100.0, random.chance(0.3) ? ",store=bf16" : "");
    SCOPED_TRACE(policy);
    if (const std::string said = refusal(policy); !said.empty()) {
      EXPECT_GT(allowed_by(said), 0) << said;
      continue;
    }
    const std::unique_ptr<KVPolicy> made = make_policy(policy);
    Prompt prompt(seed, random.between(1, 64) * random.one_of({4, 64}), *made);
    SCOPED_TRACE(prompt.tokens);
    if (prompt.folded.size() == 0) continue;
    const double most = options_of(*made).memory.most_opened(prompt.longest, kDim),
                 room = options_of(*made).budget - prompt.resident;
    if (prompt.resident <= prompt.allowed && prompt.longest > options_of(*made).segmenter.min_span)
      EXPECT_GE(room, most) << "what zoom_share keeps free is enough for any span";
    if (some_length_fits(options_of(*made), prompt.tokens)) EXPECT_GE(room, most) << "there is a length that fits";
    for (int i = 0; i < 4; ++i) {
      const auto [counts, opened] = prompt.ask(*made);
      if (room >= most) {
        EXPECT_TRUE(opened);
        ++roomy;
      }
      EXPECT_EQ(counts.resident, static_cast<std::int64_t>(std::ceil(prompt.resident)));
      if (room < 0) {
        EXPECT_EQ(counts.zooms, 0);
        EXPECT_GT(counts.unmet, 0) << "and it is told";
        ++full;
      }
    }
  }
  EXPECT_GT(roomy, 60);
  EXPECT_GT(full, 20);
}

}  // namespace
}  // namespace kvkeep::sekv_budget_test
