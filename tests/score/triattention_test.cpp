// SPDX-License-Identifier: Apache-2.0
// TriAttention against a second implementation that turns keys back before RoPE, a worked example, and the laws of
// scorers.

#include "kvkeep/score/triattention.h"
#include "arrays.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "oracle/random_case.h"
#include "oracle/triattention_oracle.h"
#include "scorer_case.h"

namespace kvkeep::triattention_test {
namespace {

using testing::Array;
using Options = TriAttentionOptions;
using testing::ScorerCaseOptions;

/// Statistics of a head that follow from its place alone.
Calibration::Head head_at(std::int32_t layer, std::int32_t head, std::int64_t pairs) {
  oracle::Random random(static_cast<std::uint64_t>(layer) * 1000 + static_cast<std::uint64_t>(head) + 1);
  Calibration::Head out;
  for (std::int64_t f = 0; f < pairs; ++f) {
    const double modulus = 0.2 + random.unit(), concentration = random.unit(), angle = 6 * random.unit();
    out.q_abs_mean.push_back(static_cast<float>(modulus));
    out.q_mean.emplace_back(std::polar(static_cast<float>(modulus * concentration), static_cast<float>(angle)));
  }
  return out;
}

Calibration calibration_of(const ModelSpec& spec) {
  Calibration c;
  c.head_dim = spec.key_dim;
  c.rope_style = spec.rope.style;
  c.inv_freq = spec.rope.inv_freq;
  for (const std::int32_t l : spec.full_layers())
    for (std::int32_t h = 0; h < spec.query_heads; ++h) c.heads[{l, h}] = head_at(l, h, c.pairs());
  return c;
}

/// TriAttention with a calibration made for whatever model it meets. Models it refuses (partial RoPE, odd heads) score
/// 0.
class Calibrated final : public Scorer {
 public:
  explicit Calibrated(Options options) : options_(options) {}
  [[nodiscard]] std::string_view name() const override { return "calibrated"; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  [[nodiscard]] Needs needs() const override { return {.keys = true}; }
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override {
    Calibration calibration = calibration_of(evidence.spec);
    calibration.inv_freq.clear();
    const TriAttention scorer(std::move(calibration), options_);
    if (scorer.problems(evidence.spec).empty()) return scorer.score(evidence, limits, seen);
    return {Array::zeros({evidence.table.slots}, Dtype::f32)};
  }

 private:
  Options options_;
};

oracle::ScorerOutput expected(const oracle::ScorerInput& in, const Options& o) {
  if (2 * in.inv_freq.size() != static_cast<std::size_t>(in.D)) {
    oracle::ScorerOutput zeros;
    for (const oracle::ScorerHead& head : in.heads) zeros.emplace_back(static_cast<std::size_t>(head.T), 0.0);
    return zeros;
  }
  const auto statistics = [&](int layer, int head) {
    oracle::TriHead out;
    const Calibration::Head given = head_at(layer, head, in.D / 2);
    for (std::size_t f = 0; f < given.q_mean.size(); ++f) {
      out.real.push_back(static_cast<double>(given.q_mean[f].real()));
      out.imaginary.push_back(static_cast<double>(given.q_mean[f].imag()));
      out.modulus.push_back(static_cast<double>(given.q_abs_mean[f]));
    }
    return out;
  };
  return oracle::triattention(in, statistics,
                              {.take_max = o.aggregate == Options::Aggregate::max,
                               .normalize = o.normalize,
                               .group_mean = o.group == Options::Group::mean,
                               .sample = o.deviation == Options::Deviation::sample,
                               .offset_max = static_cast<long>(o.offset_max)});
}

/// Without frequencies of its own, a calibration fits layers with any, as many as it has.
const ScorerCaseOptions kSamePairs{.ropes = oracle::Ropes::same_pairs};

void expect_agreement(const Options& options, int cases, testing::Tolerance tolerance) {
  testing::expect_scores_agree(
      Calibrated(options), [&](const oracle::ScorerInput& in) { return expected(in, options); }, cases, tolerance,
      kSamePairs);
}

// A z-score divides by the deviation, so what float rounding did to the raw score grows where raw scores lie close
// together.
constexpr testing::Tolerance kRaw{2e-5, 2e-5}, kNormalised{5e-4, 2e-4};

TEST(TriAttention, RawScoresAgreeWithKeysTurnedBackBeforeRope) {
  expect_agreement({.normalize = false}, 150, kRaw);
  expect_agreement({.aggregate = Options::Aggregate::max, .normalize = false, .offset_max = 1000}, 80, kRaw);
  expect_agreement({.normalize = false, .group = Options::Group::mean, .offset_max = 1}, 60, kRaw);
}

TEST(TriAttention, NormalisedScoresAgreeWithKeysTurnedBackBeforeRope) {
  expect_agreement({}, 150, kNormalised);
  expect_agreement({.group = Options::Group::mean, .deviation = Options::Deviation::sample}, 80, kNormalised);
  expect_agreement({.aggregate = Options::Aggregate::max, .deviation = Options::Deviation::sample}, 60, kNormalised);
}

TEST(TriAttention, AgreesOnEveryInstructionSet) {
  testing::for_every_instruction_set([] {
    expect_agreement({.normalize = false}, 24, kRaw);
    expect_agreement({.aggregate = Options::Aggregate::max, .offset_max = 64}, 16, kNormalised);
  });
}

TEST(TriAttention, ObeysTheLawsOfScorers) {
  testing::expect_scorer_laws(Calibrated(Options{}), 40, kSamePairs);
  testing::expect_scorer_laws(Calibrated(Options{.aggregate = Options::Aggregate::max, .offset_max = 128}), 12,
                              kSamePairs);
  testing::expect_equal_slots_score_equal_bits(Calibrated(Options{}), 60, kSamePairs);
}

/// A row of one KV head in plain memory.
struct OneRow {
  std::vector<float> keys;
  std::vector<std::int32_t> positions;
  ModelSpec spec;
  RowTable table;
  Limits limits;

  OneRow(std::vector<float> all, std::int32_t dim, std::vector<double> inv_freq, std::int32_t next,
         std::int32_t heads = 1)
      : keys(std::move(all)) {
    const auto length = static_cast<std::int32_t>(keys.size()) / dim;
    for (std::int32_t t = 0; t < length; ++t) positions.push_back(t);
    spec = {.query_heads = heads,
            .kv_heads = 1,
            .key_dim = dim,
            .value_dim = dim,
            .rope = {.inv_freq = std::move(inv_freq)},
            .layers = {LayerSpec{}}};
    table.rows.push_back({.length = length,
                          .keys = {reinterpret_cast<std::byte*>(keys.data()), dim * 4, dim * 4},
                          .values = {},
                          .positions = positions.data()});
    table.groups.push_back({.queries = {}, .next_position = next});
    table.slots = length;
    limits = even_limits(table, 1);
  }

  std::vector<float> score(const Scorer& scorer) const {
    WindowAttention seen;
    const Scores scores = scorer.score({spec, table}, limits, seen);
    return {scores.data.data<float>(), scores.data.data<float>() + scores.data.numel()};
  }
};

TEST(TriAttention, WorksOutTheExampleByHand) {
  const OneRow row({-.234287F, .493900F, .992527F, .309939F, -.187404F, -1.253015F, .367260F, .714109F}, 4, {1, .01},
                   10);
  Calibration c{.head_dim = 4, .heads = {}, .inv_freq = {}, .model_name = {}};
  c.heads[{0, 0}] = {{{.5F, .2F}, {-.3F, .4F}}, {.7F, .6F}};
  const auto mean = row.score(TriAttention(c, {.normalize = false, .offset_max = 4}));
  EXPECT_NEAR(mean[0], .091117, 2e-6);
  EXPECT_NEAR(mean[1], .855689, 2e-6);
  const auto most =
      row.score(TriAttention(c, {.aggregate = Options::Aggregate::max, .normalize = false, .offset_max = 4}));
  EXPECT_NEAR(most[0], .707635, 2e-6);
  EXPECT_NEAR(most[1], 1.122189, 2e-6);
  const auto z = row.score(TriAttention(c, {.offset_max = 4}));
  EXPECT_NEAR(z[0], -1, 1e-5);
  EXPECT_NEAR(z[1], 1, 1e-5);
  const auto sample = row.score(TriAttention(c, {.offset_max = 4, .deviation = Options::Deviation::sample}));
  EXPECT_NEAR(sample[1], std::sqrt(.5), 1e-5);
}

TEST(TriAttention, PhasesHoldAtAMillionTokens) {
  const std::int32_t next = 1'000'003;
  const OneRow row({1, 0, 0, 1, .6F, .8F}, 2, {1}, next);
  Calibration c{.head_dim = 2, .heads = {}, .inv_freq = {}, .model_name = {}};
  c.heads[{0, 0}] = {{{1, 0}}, {1}};
  const auto g = row.score(TriAttention(c, {.normalize = false, .offset_max = 1}));
  const double angle = next + 1.0;
  EXPECT_NEAR(g[0], std::cos(angle), 1e-6);
  EXPECT_NEAR(g[1], std::sin(angle), 1e-6);
  EXPECT_NEAR(g[2], .6 * std::cos(angle) + .8 * std::sin(angle), 1e-6);
}

TEST(TriAttention, KeysThatAreNotFiniteScoreNanAndDoNotMoveTheOthers) {
  std::vector<float> keys;
  oracle::Random random(5);
  for (int i = 0; i < 20 * 8; ++i) keys.push_back(static_cast<float>(random.normal()));
  const std::vector<double> frequencies{1, .3, .1, .01};
  const ModelSpec two{.query_heads = 2,
                      .kv_heads = 1,
                      .key_dim = 8,
                      .value_dim = 8,
                      .rope = {.inv_freq = frequencies},
                      .layers = {LayerSpec{}}};
  const TriAttention scorer(calibration_of(two));
  const OneRow fewer(std::vector<float>(keys.begin(), keys.end() - 8), 8, frequencies, 20, 2);
  keys[19 * 8 + 3] = std::numeric_limits<float>::quiet_NaN();
  const OneRow all(keys, 8, frequencies, 20, 2);
  const auto want = fewer.score(scorer), got = all.score(scorer);
  EXPECT_TRUE(std::isnan(got[19]));
  for (std::size_t t = 0; t < 19; ++t) EXPECT_NEAR(got[t], want[t], 1e-6) << t;
}

TEST(TriAttention, EqualKeysScoreZeroEachAndASingleSlotToo) {
  const ModelSpec one{.query_heads = 1,
                      .kv_heads = 1,
                      .key_dim = 4,
                      .value_dim = 4,
                      .rope = {.inv_freq = {1, .1}},
                      .layers = {LayerSpec{}}};
  std::vector<float> keys;
  for (int t = 0; t < 9; ++t) keys.insert(keys.end(), {1, 2, 3, 4});
  for (const auto deviation : {Options::Deviation::population, Options::Deviation::sample}) {
    const TriAttention scorer(calibration_of(one), {.deviation = deviation});
    for (const float g : OneRow(keys, 4, {1, .1}, 9).score(scorer)) EXPECT_EQ(g, 0);
    OneRow single({1, 2, 3, 4}, 4, {1, .1}, 9);
    single.limits.rows[0].due = true;
    EXPECT_EQ(single.score(scorer)[0], 0);
  }
}

TEST(TriAttention, WorkspaceGrowsWithTheRowAndNotWithItsSquare) {
  const auto bytes = [](std::int64_t length, std::int64_t offsets) {
    return TriAttention::workspace_bytes(7, length, 64, offsets);
  };
  EXPECT_EQ(bytes(2000, 1) - bytes(1000, 1), 4 * 7 * 1000) << "a raw score per slot and query head, nothing else";
  EXPECT_EQ(bytes(1000, 17) - bytes(1000, 1), 4 * 7 * 64 * 2 * 16);
  EXPECT_LE(bytes(32768, 1), 4 * (7 * 32768 + 7 * 64 * 3 + 2 * 16 * (3 * 64 + 7))) << "at most 16 lanes";
}

std::string one_problem(const Calibration& c, const ModelSpec& spec) {
  const auto found = c.problems(spec);
  EXPECT_EQ(found.size(), 1U);
  return found.empty() ? "" : found.front();
}

TEST(TriAttention, SaysWhichFieldOrHeadDoesNotFitTheModel) {
  const ModelSpec spec{.query_heads = 4,
                       .kv_heads = 2,
                       .key_dim = 8,
                       .value_dim = 8,
                       .rope = {.inv_freq = {1, .3, .1, .01}},
                       .layers = {LayerSpec{}, {.kind = LayerKind::remote}, LayerSpec{}}};
  const Calibration good = calibration_of(spec);
  EXPECT_TRUE(good.problems(spec).empty());
  EXPECT_EQ(good.heads.count({1, 0}), 0U) << "a layer that is elsewhere needs no statistics";
  ModelSpec silent = spec;
  silent.query_heads = 0;
  EXPECT_TRUE(good.problems(silent).empty()) << "the number of query heads may come from the file alone";

  const auto contains = [](const std::string& sentence, std::initializer_list<const char*> words) {
    for (const char* word : words) EXPECT_NE(sentence.find(word), std::string::npos) << sentence;
  };
  Calibration c = good;
  c.rope_style = RopeStyle::interleaved;
  contains(one_problem(c, spec), {"rope_style", "interleaved", "half"});
  c = good;
  c.inv_freq[2] *= 1.001;
  contains(one_problem(c, spec), {"inv_freq[2]"});
  c.inv_freq[2] = good.inv_freq[2] * 1.00005;
  EXPECT_TRUE(c.problems(spec).empty());
  c.inv_freq.clear();
  EXPECT_TRUE(c.problems(spec).empty());
  c = good;
  c.heads.erase({2, 1});
  contains(one_problem(c, spec), {"layer 2, head 1", "missing"});
  c.heads.erase({2, 2});
  contains(one_problem(c, spec), {"layer 2, head 1", "1 more"});
  c = good;
  c.heads[{0, 3}].q_mean[1] = {0, std::numeric_limits<float>::infinity()};
  contains(one_problem(c, spec), {"layer 0, head 3", "not finite"});
  c = good;
  c.heads[{0, 2}].q_abs_mean[0] = std::numeric_limits<float>::quiet_NaN();
  contains(one_problem(c, spec), {"layer 0, head 2", "not finite"});
  c = good;
  for (const std::int32_t l : {0, 2}) c.heads.erase({l, 3});
  contains(one_problem(c, silent), {"3 query heads", "2 KV heads"});
  ModelSpec wider = spec;
  wider.query_heads = 8;
  EXPECT_FALSE(good.problems(wider).empty());
  ModelSpec deeper = spec;
  deeper.key_dim = 16;
  contains(good.problems(deeper).front(), {"head_dim", "8", "16"});
  c = good;
  c.head_dim = 7;
  contains(one_problem(c, spec), {"head_dim is 7", "even"});
  ModelSpec partial = spec;
  partial.rope.inv_freq.resize(2);
  contains(good.problems(partial).front(), {"F", "4", "2"});
  ModelSpec other = spec;
  other.layers.assign(3, {.kind = LayerKind::remote});
  other.layers[1] = {};
  contains(one_problem(good, other), {"none of the model's layers"});
}

}  // namespace
}  // namespace kvkeep::triattention_test
