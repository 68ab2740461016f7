// SPDX-License-Identifier: Apache-2.0
// Scores of prompts on a GPU against the CPU, from queries to scores of heads and tokens.

#include "prompt_scores.h"

#include "asked_queries.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/score/pool.h"
#include "window_attention.h"

namespace kvkeep::cuda::prompt_scores_test {
namespace {

using PromptScoresKernel = OnDevice;
using Pool = PromptScoreOptions::Pool;

struct Got {
  std::vector<float> heads, tokens;
};

std::size_t ranked_of(const EvidenceCase& c, std::int32_t window) {
  std::size_t ranked = 0;
  for (const std::int32_t length : c.shape.lengths) ranked += static_cast<std::size_t>(length - window);
  return ranked;
}

Got on_device(const EvidenceCase& c, const PromptScoreOptions& options, DeviceLayout layout = {}) {
  const DeviceEvidence there(c, layout);
  const AskedQueries queries(c, there, options.window);
  const DeviceArray<float> heads(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched)),
      tokens(std::vector<float>(ranked_of(c, options.window), kUntouched));
  PromptScoresArguments a{.evidence = there.arguments(),
                          .queries = queries.floats().data(),
                          .window = options.window,
                          .pool = options.pool,
                          .maximum = options.kind == Pool::maximum,
                          .slots = c.table.slots,
                          .heads = heads.data(),
                          .tokens = tokens.data()};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(prompt_scores_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_prompt_scores(a, nullptr);
  return {heads.download(), tokens.download()};
}

/// A layer of prompts whose every position is there, as a prefill has it.
EvidenceCase prompts(std::uint64_t seed, EvidenceShape shape) {
  shape.gaps = false;
  return {seed, std::move(shape)};
}

void expect_as_on_cpu(const EvidenceCase& c, const PromptScoreOptions& options, DeviceLayout layout = {}) {
  const PromptScores want = prompt_scores(c.evidence(), options);
  const double relative = c.shape.keys == Element::bf16 ? 1e-4 : 2e-5;
  in_every_order([&] {
    const Got got = on_device(c, options, layout);
    for (std::size_t i = 0; i < got.heads.size(); ++i) {
      const float w = want.heads.data<float>()[i];
      ASSERT_NEAR(got.heads[i], w, 1e-6 + relative * std::abs(static_cast<double>(w)))
          << "slot " << i << ", pool " << options.pool << "; " << c.description();
      if (w == 0) ASSERT_EQ(got.heads[i], 0.0F) << "the window's own slot " << i;
    }
    ASSERT_EQ(static_cast<std::int64_t>(got.tokens.size()), want.tokens.numel());
    for (std::size_t i = 0; i < got.tokens.size(); ++i) {
      const float w = want.tokens.data<float>()[i];
      ASSERT_NEAR(got.tokens[i], w, 1e-6 + relative * std::abs(static_cast<double>(w)))
          << "token " << i << ", pool " << options.pool << "; " << c.description();
    }
  });
}

TEST_F(PromptScoresKernel, AgreeWithTheCpuForEveryGroupElementAndPool) {
  std::uint64_t seed = 0;
  for (const std::int32_t group : {1, 2, 4, 7})
    for (const Element keys : kStored)
      for (const Pool kind : {Pool::average, Pool::maximum})
        for (const std::int32_t pool : {1, 5, 7}) {
          if (kind == Pool::maximum && pool == 1) continue;
          const std::int32_t window = ++seed % 2 == 0 ? 3 : 5;
          expect_as_on_cpu(prompts(seed, {.group = group,
                                          .kv_heads = 2,
                                          .dim = 8,
                                          .lengths = {window + 1, 37, 20},
                                          .seen = 6,
                                          .keys = keys,
                                          .query = is_8bit(keys) ? Element::f32 : keys}),
                           {window, pool, kind});
        }
}

TEST_F(PromptScoresKernel, AgreeWithTheCpuOnMatrixUnits) {  // windows of 16 queries or more in a group
  std::uint64_t seed = 100;
  for (const Element keys : {Element::f16, Element::bf16})
    for (const Pool kind : {Pool::average, Pool::maximum})
      expect_as_on_cpu(
          prompts(++seed,
                  {.group = 2, .kv_heads = 2, .dim = 16, .lengths = {67, 19}, .seen = 16, .keys = keys, .query = keys}),
          {16, 7, kind});
}

TEST_F(PromptScoresKernel, AgreeWithTheCpuForEveryLength) {
  std::uint64_t seed = 200;
  for (const std::int32_t length : {3, 31, 64, 127, 255, 256, 257, 258, 1025})
    expect_as_on_cpu(prompts(++seed, {.kv_heads = 2, .dim = 4, .lengths = {length}, .seen = 2}), {2, 7});
}

TEST_F(PromptScoresKernel, ReadPages) {
  std::uint64_t seed = 300;
  for (const Pool kind : {Pool::average, Pool::maximum})
    expect_as_on_cpu(
        prompts(++seed, {.group = 2, .kv_heads = 2, .dim = 8, .lengths = {41, 33}, .seen = 4, .keys = Element::f16}),
        {4, 5, kind}, {.gap = 4, .page = 16});
}

/// PromptScores::sums, and what the queries give tokens whose weights differ.
TEST_F(PromptScoresKernel, GiveSumsAndWeighTheQueriesAsTheCpuDoes) {
  std::uint64_t seed = 350;
  for (const bool matrix : {false, true})
    for (const Element keys : {Element::f32, Element::f16, Element::bf16, Element::i8}) {
      const std::int32_t window = matrix ? 24 : 5;
      const EvidenceCase c = prompts(++seed, {.group = 2,
                                              .kv_heads = 2,
                                              .dim = 16,
                                              .lengths = {window + 40, window + 1, 600},
                                              .seen = window,
                                              .keys = keys,
                                              .query = is_8bit(keys) ? Element::f32 : keys});
      std::vector<float> weights;
      for (std::int32_t i = 0; i < window; ++i) weights.push_back(0.5F + 0.25F * static_cast<float>(i * i % 7));
      const DeviceEvidence there(c);
      const AskedQueries queries(c, there, window);
      const DeviceArray<float> weighing(weights);
      const double relative = keys == Element::bf16 ? 1e-4 : 2e-5;
      for (const bool weighted : {false, true})
        for (const Pool kind : {Pool::average, Pool::maximum}) {
          if (weighted && kind == Pool::maximum) continue;
          const PromptScores plain = prompt_scores(c.evidence(), {window, 3, kind});
          const Tensor sums_there = weighted ? window_sums(c.evidence(), window, weights) : plain.sums;
          const Tensor tokens_there =
              weighted ? prompt_scores(
                             c.evidence(),
                             {.window = window, .by = PromptScoreOptions::By::weighted, .weights = weights, .sinks = 3})
                             .tokens
                       : token_mass(c.evidence(), sums_there, window);
          in_every_order([&] {
            const DeviceArray<float> sums(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched)),
                tokens(std::vector<float>(ranked_of(c, window), kUntouched));
            PromptScoresArguments a{.evidence = there.arguments(),
                                    .queries = queries.floats().data(),
                                    .window = window,
                                    .pool = 3,
                                    .maximum = kind == Pool::maximum,
                                    .slots = c.table.slots,
                                    .sums = sums.data(),
                                    .weights = weighted ? weighing.data() : nullptr};
            const DeviceArray<std::byte> workspace(static_cast<std::size_t>(prompt_scores_workspace_bytes(a)));
            a.workspace = workspace.data();
            launch_prompt_scores(a, nullptr);
            const float weight = weighted ? 1.0F : 1.0F / static_cast<float>(2 * window);
            launch_token_sums({.rows = a.evidence.rows,
                               .count = a.evidence.count,
                               .longest = a.evidence.longest,
                               .heads = 2,
                               .window = window,
                               .sinks = weighted ? 3 : 0,
                               .weight = weight,
                               .sums = sums.data(),
                               .tokens = tokens.data()},
                              nullptr);
            const std::vector<float> got = sums.download(), of_tokens = tokens.download();
            for (std::size_t i = 0; i < got.size(); ++i) {
              const float w = sums_there.data<float>()[i];
              ASSERT_NEAR(got[i], w, 1e-6 + relative * std::abs(static_cast<double>(w)))
                  << "slot " << i << (weighted ? ", weighted" : "") << "; " << c.description();
            }
            ASSERT_EQ(std::ssize(of_tokens), tokens_there.numel());
            for (std::size_t i = 0; i < of_tokens.size(); ++i) {
              const float w = tokens_there.data<float>()[i];
              if (std::isinf(w))
                ASSERT_EQ(of_tokens[i], w) << "sink " << i;
              else
                ASSERT_NEAR(of_tokens[i], w, 1e-6 + relative * std::abs(static_cast<double>(w)))
                    << "token " << i << (weighted ? ", weighted" : "") << "; " << c.description();
            }
            // From these sums, to the bit.
            std::size_t at = 0;
            for (std::size_t g = 0; g < c.table.groups.size(); ++g)
              for (std::int32_t t = 0; t < c.table.rows[2 * g].length - window; ++t) {
                float token = 0;
                for (const std::size_t r : {2 * g, 2 * g + 1})
                  token += weight * got[static_cast<std::size_t>(c.table.rows[r].first + t)];
                ASSERT_EQ(of_tokens[at++], weighted && t < 3 ? HUGE_VALF : token);
              }
          });
        }
    }
}

TEST_F(PromptScoresKernel, AreTheCpusBitsOfEqualSums) {
  const EvidenceCase c = prompts(400, {.group = 3, .kv_heads = 2, .dim = 8, .lengths = {50, 23}, .seen = 4});
  const DeviceEvidence there(c);
  const AskedQueries queries(c, there, 4);
  std::vector<RowWindow> all;
  for (const Row& row : c.table.rows) all.push_back({4, row.length - 4});
  const DeviceArray<RowWindow> windows(all);
  const DeviceArray<float> sums(static_cast<std::size_t>(c.table.slots));
  const DeviceArray<std::byte> workspace(
      static_cast<std::size_t>(window_attention_workspace_bytes(there.arguments(), 4)));
  launch_window_attention({.evidence = there.arguments(),
                           .windows = windows.data(),
                           .window = 4,
                           .queries = queries.floats().data(),
                           .sum = sums.data(),
                           .workspace = workspace.data()},
                          nullptr);
  const std::vector<float> u = sums.download();
  const Got got = on_device(c, {4, 7});
  std::size_t at = 0;
  for (std::size_t g = 0; g < c.table.groups.size(); ++g) {
    const Row& first = c.table.rows[2 * g];
    for (std::int32_t t = 0; t < first.length - 4; ++t) {
      float token = 0;
      for (const Row* row : {&first, &first + 1}) {
        const float head = 3.0F * pooled_average(u.data() + row->first, row->length - 4, 7, t);
        ASSERT_EQ(got.heads[static_cast<std::size_t>(row->first + t)], head);
        token += head;
      }
      ASSERT_EQ(got.tokens[at++], token);
    }
  }
}

TEST_F(PromptScoresKernel, DoNotDependOnTheOtherPrompts) {
  const EvidenceCase both = prompts(500, {.group = 2, .kv_heads = 2, .dim = 8, .lengths = {30, 17}, .seen = 4});
  EvidenceCase second = prompts(501, {.group = 2, .kv_heads = 2, .dim = 8, .lengths = {17}, .seen = 4});
  for (std::size_t h = 0; h < 2; ++h) second.keys[h] = both.keys[2 + h], second.plain[h] = both.plain[2 + h];
  second.spec = both.spec;
  second.rings[0] = both.rings[1];
  second.table.groups[0].queries = both.table.groups[1].queries;
  second.settle();
  for (const Pool kind : {Pool::average, Pool::maximum}) {
    const Got a = on_device(both, {4, 7, kind}), b = on_device(second, {4, 7, kind});
    EXPECT_TRUE(std::equal(b.tokens.begin(), b.tokens.end(), a.tokens.begin() + 26));
    EXPECT_TRUE(std::equal(b.heads.begin(), b.heads.end(), a.heads.begin() + 60));
  }
}

TEST_F(PromptScoresKernel, TakeTheLogSumOfExponentialsThatAnEngineHas) {
  const EvidenceCase c = prompts(601, {.group = 2, .kv_heads = 1, .dim = 4, .lengths = {21}, .seen = 3});
  const DeviceEvidence there(c);
  const AskedQueries queries(c, there, 3);
  const std::vector<float> q = queries.floats().download();  // [2 heads, 3, 4]
  std::vector<float> lse;
  for (std::int32_t n = 0; n < 6; ++n) {
    double sum = std::exp(static_cast<double>(c.spec.layers[0].sinks[static_cast<std::size_t>(n / 3)]));
    for (std::int32_t t = 0; t <= 18 + n % 3; ++t) {
      double x = 0;
      for (std::int32_t d = 0; d < 4; ++d)
        x += static_cast<double>(q[static_cast<std::size_t>(n * 4 + d)]) *
             static_cast<double>(c.plain[0][static_cast<std::size_t>(t * 4 + d)]);
      sum += std::exp(x * c.spec.scale());
    }
    lse.push_back(static_cast<float>(std::log(sum)));
  }
  const DeviceArray<float> given(lse);
  for (const bool maximum : {false, true}) {
    const Got want = on_device(c, {3, 5, maximum ? Pool::maximum : Pool::average});
    const DeviceArray<float> tokens(18);
    PromptScoresArguments a{.evidence = there.arguments(),
                            .queries = queries.floats().data(),
                            .log_sum_exp = given.data(),
                            .window = 3,
                            .pool = 5,
                            .maximum = maximum,
                            .slots = 21,
                            .tokens = tokens.data()};
    const DeviceArray<std::byte> workspace(static_cast<std::size_t>(prompt_scores_workspace_bytes(a)));
    a.workspace = workspace.data();
    launch_prompt_scores(a, nullptr);
    const std::vector<float> got = tokens.download();
    for (std::size_t t = 0; t < got.size(); ++t) ASSERT_NEAR(got[t], want.tokens[t], 1e-5 * (1 + want.tokens[t]));
  }
}

TEST_F(PromptScoresKernel, RefuseWhatTheyCannotScore) {
  const auto message = [](const PromptScoresArguments& a) {
    try {
      launch_prompt_scores(a, nullptr);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const EvidenceArguments rows{.count = 4, .longest = 40, .kv_heads = 2, .dim = 8};
  EXPECT_EQ(message({.evidence = rows, .window = 4, .pool = 4}),
            "prompt scores: pool; given 4; allowed odd numbers from 1 on");
  EXPECT_EQ(message({.evidence = rows, .window = 0}), "prompt scores: window; given 0; allowed 1 or more");
  EXPECT_EQ(message({.evidence = rows, .window = 40}),
            "prompt scores: the longest row holds 40 slots; allowed more than the window of 40");
  EXPECT_EQ(message({.evidence = {.count = 3, .longest = 40, .kv_heads = 2, .dim = 8}, .window = 4}),
            "prompt scores: rows; given 3; allowed whole groups of 2, one row a KV head");
  EXPECT_NE(message({.evidence = {.dim = 257}}).find("head size"), std::string::npos);
  EXPECT_EQ(message({.evidence = {.dim = 8}}), "") << "no rows, nothing to do";
  EXPECT_THROW(launch_token_sums({.count = 3, .heads = 2}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::prompt_scores_test
