// What a prompt's newest queries made of the tokens before them, against plain loops in double, and what follows for the layer that selects.

#include "kvkeep/layers/prompt_scores.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "kvkeep/layers/layer_selector.h"
#include "oracle/random_case.h"

namespace kvkeep {
namespace {

using Options = PromptScoreOptions;

/// One layer of prompts, queries after RoPE, each with all of its own: positions 0 to length - 1.
class Prompts {
 public:
  Prompts(std::int32_t group, std::int32_t kv_heads, std::int32_t dim, std::vector<std::int32_t> lengths, std::int32_t window, std::uint64_t seed, double softmax_scale = 0)
      : lengths_(std::move(lengths)), window_(window) {
    spec = {.query_heads = group * kv_heads, .kv_heads = kv_heads, .key_dim = dim, .value_dim = 1, .softmax_scale = softmax_scale, .rope = {}, .layers = std::vector<LayerSpec>(1)};
    oracle::Random random(seed);
    std::int32_t longest = 0;
    for (const std::int32_t length : lengths_) longest = std::max(longest, length);
    positions_.resize(static_cast<std::size_t>(longest));
    std::iota(positions_.begin(), positions_.end(), 0);
    for (std::size_t s = 0; s < lengths_.size(); ++s) {
      keys.emplace_back(), queries.emplace_back();
      for (std::int32_t i = 0; i < kv_heads * lengths_[s] * dim; ++i) keys.back().push_back(static_cast<float>(random.normal()));
      for (std::int32_t i = 0; i < window * spec.query_heads * dim; ++i) queries.back().push_back(static_cast<float>(random.normal()));
    }
  }

  [[nodiscard]] RowTable table() const {
    RowTable table;
    for (std::size_t s = 0; s < lengths_.size(); ++s) {
      const std::int32_t length = lengths_[s];
      RowGroup group;
      group.sequence = static_cast<std::int32_t>(s);
      group.first_row = static_cast<std::int64_t>(table.rows.size());
      group.queries = {.data = reinterpret_cast<const std::byte*>(queries[s].data()), .dtype = kFloat32, .token_stride = spec.query_heads * spec.key_dim * 4, .head_stride = spec.key_dim * 4,
                       .positions = positions_.data() + length - window_, .ring = window_, .begin = 0, .count = window_};
      group.next_position = length;
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        Row row;
        row.sequence = group.sequence, row.head = h, row.length = length, row.first = table.slots;
        const std::int64_t width = spec.key_dim * 4;
        row.keys = {reinterpret_cast<std::byte*>(const_cast<float*>(keys[s].data())) + h * length * width, width, width};
        row.positions = positions_.data();
        table.slots += length;
        table.rows.push_back(row);
      }
      table.groups.push_back(group);
    }
    return table;
  }
  [[nodiscard]] PromptScores scores(const Options& options) const {
    const RowTable rows = table();
    return prompt_scores({.spec = spec, .table = rows, .basis = QueryBasis::post_rope, .moment = Moment::prefill_layer}, options);
  }

  /// Sum over the window of a query head's softmax, for every slot before the window.
  [[nodiscard]] std::vector<double> sums(std::size_t s, std::int32_t query_head) const {
    const std::int32_t length = lengths_[s], dim = spec.key_dim, before = length - window_;
    std::vector<double> u(static_cast<std::size_t>(before));
    for (std::int32_t i = 0; i < window_; ++i) {
      std::vector<double> p;
      double top = -1e300, sum = 0;
      for (std::int32_t j = 0; j <= before + i; ++j) {
        double x = 0;
        for (std::int32_t d = 0; d < dim; ++d)
          x += static_cast<double>(queries[s][static_cast<std::size_t>((i * spec.query_heads + query_head) * dim + d)]) *
               static_cast<double>(keys[s][static_cast<std::size_t>((query_head / spec.group() * length + j) * dim + d)]);
        p.push_back(x * spec.scale());
        top = std::max(top, p.back());
      }
      for (double& x : p) sum += x = std::exp(x - top);
      for (std::int32_t j = 0; j < before; ++j) u[static_cast<std::size_t>(j)] += p[static_cast<std::size_t>(j)] / sum;
    }
    return u;
  }
  [[nodiscard]] std::vector<double> head_scores(std::size_t s, std::int32_t head, const Options& options) const {
    std::vector<double> all(static_cast<std::size_t>(lengths_[s] - window_));
    const auto n = static_cast<std::int32_t>(all.size()), reach = options.pool / 2;
    for (std::int32_t h = head * spec.group(); h < (head + 1) * spec.group(); ++h) {
      const std::vector<double> u = sums(s, h);
      for (std::int32_t j = 0; j < n; ++j) {
        double sum = 0, most = 0;
        for (std::int32_t m = std::max(0, j - reach); m <= std::min(n - 1, j + reach); ++m) {
          sum += u[static_cast<std::size_t>(m)];
          most = std::max(most, u[static_cast<std::size_t>(m)]);
        }
        all[static_cast<std::size_t>(j)] += options.kind == Options::Pool::average ? sum / options.pool : most;
      }
    }
    return all;
  }

  ModelSpec spec;
  std::vector<std::vector<float>> keys, queries;  ///< [prompts] [Hkv, T, D] and [W, Hq, D]

 private:
  std::vector<std::int32_t> lengths_, positions_;
  std::int32_t window_;
};

TEST(PromptScores, AreTheHandExamples) {
  // Queries and keys of two components, no scaling but the root of two: softmax rows .134 .366 .134 | .366 0 and .128 .128 .348 | .348 .047.
  Prompts prompt(1, 1, 2, {5}, 2, 1);
  const float root = std::sqrt(2.0F);
  prompt.queries[0] = {root, 0, 0, root};
  prompt.keys[0] = {0, 0, 1, 0, 0, 1, 1, 1, 2, -1};
  const PromptScores scores = prompt.scores({.window = 2, .pool = 1});
  const float* u = scores.tokens.const_data_ptr<float>();
  ASSERT_EQ(scores.tokens.numel(), 3);
  EXPECT_NEAR(u[0], 0.262603, 1e-6);
  EXPECT_NEAR(u[1], 0.493661, 1e-6);
  EXPECT_NEAR(u[2], 0.482770, 1e-6);
  EXPECT_EQ(scores.heads.const_data_ptr<float>()[3], 0.0F);
  EXPECT_EQ(scores.heads.const_data_ptr<float>()[4], 0.0F);
}

TEST(PromptScores, AreThoseOfPlainLoops) {
  std::uint64_t seed = 0;
  for (const std::int32_t group : {1, 2, 7})
    for (const std::int32_t kv_heads : {1, 3})
      for (const std::int32_t dim : {1, 8, 33})
        for (const Options& options : {Options{4, 1}, Options{3, 7}, Options{5, 5, Options::Pool::maximum}, Options{1, 3, Options::Pool::maximum}}) {
          const std::vector<std::int32_t> lengths{options.window + 1, 40, 23};
          const Prompts prompts(group, kv_heads, dim, lengths, options.window, ++seed);
          const PromptScores got = prompts.scores(options);
          const RowTable table = prompts.table();
          const float* tokens = got.tokens.const_data_ptr<float>();
          for (std::size_t s = 0; s < lengths.size(); ++s) {
            const std::int32_t before = lengths[s] - options.window;
            std::vector<double> sum(static_cast<std::size_t>(before));
            for (std::int32_t h = 0; h < kv_heads; ++h) {
              const std::vector<double> want = prompts.head_scores(s, h, options);
              const float* head = got.heads.const_data_ptr<float>() + table.rows[s * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(h)].first;
              for (std::int32_t t = 0; t < before; ++t) {
                ASSERT_NEAR(head[t], want[static_cast<std::size_t>(t)], 1e-5) << "prompt " << s << ", head " << h << ", token " << t << ", D " << dim;
                sum[static_cast<std::size_t>(t)] += want[static_cast<std::size_t>(t)];
              }
              for (std::int32_t t = before; t < lengths[s]; ++t) ASSERT_EQ(head[t], 0.0F);
            }
            for (std::int32_t t = 0; t < before; ++t) ASSERT_NEAR(*tokens++, sum[static_cast<std::size_t>(t)], 1e-4);
          }
        }
}

TEST(PromptScores, DoNotDependOnTheOtherPrompts) {
  const Prompts both(2, 2, 8, {30, 17}, 4, 9);
  Prompts second(2, 2, 8, {17}, 4, 10);
  second.keys[0] = both.keys[1];
  second.queries[0] = both.queries[1];
  const PromptScores a = both.scores({.window = 4}), b = second.scores({.window = 4});
  EXPECT_TRUE(a.tokens.narrow(0, 26, 13).equal(b.tokens));
}

TEST(PromptScores, LeadToTheLayerWhereTheRankingSettles) {
  // Layers whose keys come ever nearer to one another's: the ranking settles.
  constexpr std::int32_t kLayers = 10, kTokens = 60, kWindow = 4;
  LayerSelector selector({.select = 20, .window = kWindow, .min_layer = 3, .observed_layers = 3, .threshold = 0.3}, kTokens);
  Prompts base(2, 2, 8, {kTokens}, kWindow, 20);
  for (std::int32_t l = 0; l < kLayers && selector.layer() < 0; ++l) {
    Prompts layer = base;
    const Prompts noise(2, 2, 8, {kTokens}, kWindow, 100 + static_cast<std::uint64_t>(l));
    for (std::size_t i = 0; i < layer.keys[0].size(); ++i) layer.keys[0][i] += noise.keys[0][i] * (l < 5 ? 1.0F : 0.01F);
    const PromptScores scores = layer.scores({.window = kWindow});
    if (selector.wants(l)) static_cast<void>(selector.see(l, {scores.tokens.const_data_ptr<float>(), static_cast<std::size_t>(scores.tokens.numel())}));
  }
  EXPECT_EQ(selector.layer(), 7) << "the first layer whose three observed ones are all settled";
  EXPECT_EQ(selector.tokens().size(), 20U);
}

TEST(PromptScores, RefuseWhatTheyCannotScore) {
  const Prompts prompts(1, 1, 4, {6}, 3, 30);
  EXPECT_THROW(static_cast<void>(prompts.scores({.window = 4})), InvalidArgument) << "fewer queries than the window";
  EXPECT_THROW(static_cast<void>(prompts.scores({.window = 3, .pool = 4})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(prompts.scores({.window = 0})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(Prompts(1, 1, 4, {3}, 3, 31).scores({.window = 3})), InvalidArgument) << "nothing before the window";
}

}  // namespace
}  // namespace kvkeep
