// SPDX-License-Identifier: Apache-2.0
// Query statistics against queries that are worked out from the weights by hand.

#include "kvlab/calibrate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <numeric>

#include "kvkeep/io/safetensors.h"

namespace kvkeep::lm::lm_calibrate_test {
namespace {

namespace fs = std::filesystem;
using Ints = std::vector<std::int32_t>;

fs::path checkpoint(const std::string& name) { return fs::path(KVKEEP_TEST_GOLDEN_DIR) / "decoder" / name; }

Ints ids_of(std::int32_t n, std::int32_t first) {
  Ints ids;
  for (std::int32_t i = 0; i < n; ++i) ids.push_back((first + 37 * i + i * i) % 256);
  return ids;
}

std::vector<double> numbers(const io::SafetensorsFile& file, const std::string& name) {
  const at::Tensor t = torch_tensor(file.tensor(name)).to(at::kDouble).contiguous();
  return {t.const_data_ptr<double>(), t.const_data_ptr<double>() + t.numel()};
}

std::vector<double> rms_norm(const double* x, std::size_t n, const std::vector<double>& weight, double eps) {
  double square = 0;
  for (std::size_t i = 0; i < n; ++i) square += x[i] * x[i];
  std::vector<double> out(x, x + n);
  for (std::size_t i = 0; i < n; ++i) out[i] *= weight[i] / std::sqrt(square / static_cast<double>(n) + eps);
  return out;
}

/// Sums of one head of layer 0 over the tokens, pair by pair: real, imaginary, modulus.
using Sums = std::vector<std::array<double, 3>>;

/// Layer 0 needs the embedding, one norm, one projection, its bias and the query norm; no attention.
Sums first_layer(const fs::path& folder, const io::ModelConfig& config, const Ints& ids, std::size_t skip,
                 std::int32_t head, bool query_norm) {
  const auto file = io::SafetensorsFile::open(folder / "model.safetensors");
  const std::vector<double> embedding = numbers(file, "model.embed_tokens.weight"),
                            before = numbers(file, "model.layers.0.input_layernorm.weight"),
                            matrix = numbers(file, "model.layers.0.self_attn.q_proj.weight");
  const bool biased = file.has("model.layers.0.self_attn.q_proj.bias");
  const std::vector<double> bias =
      biased ? numbers(file, "model.layers.0.self_attn.q_proj.bias") : std::vector<double>();
  const auto hidden = static_cast<std::size_t>(config.hidden), dim = static_cast<std::size_t>(config.spec.key_dim);
  Sums sums(dim / 2);
  for (std::size_t t = skip; t < ids.size(); ++t) {
    const std::vector<double> x =
        rms_norm(embedding.data() + static_cast<std::size_t>(ids[t]) * hidden, hidden, before, config.rms_eps);
    std::vector<double> q(dim);
    for (std::size_t d = 0; d < dim; ++d) {
      const std::size_t row = static_cast<std::size_t>(head) * dim + d;
      q[d] = biased ? bias[row] : 0;
      for (std::size_t i = 0; i < hidden; ++i) q[d] += matrix[row * hidden + i] * x[i];
    }
    if (query_norm)
      q = rms_norm(q.data(), dim, numbers(file, "model.layers.0.self_attn.q_norm.weight"), config.rms_eps);
    for (std::size_t f = 0; f < dim / 2; ++f) {
      sums[f][0] += q[f];
      sums[f][1] += q[f + dim / 2];
      sums[f][2] += std::hypot(q[f], q[f + dim / 2]);
    }
  }
  return sums;
}

void expect_mean(const Calibration::Head& got, const Sums& sums, std::size_t tokens) {
  const auto n = static_cast<double>(tokens);
  ASSERT_EQ(got.q_mean.size(), sums.size());
  for (std::size_t f = 0; f < sums.size(); ++f) {
    const double scale = sums[f][2] / n;
    EXPECT_NEAR(got.q_mean[f].real(), sums[f][0] / n, 1e-5 * scale) << f;
    EXPECT_NEAR(got.q_mean[f].imag(), sums[f][1] / n, 1e-5 * scale) << f;
    EXPECT_NEAR(got.q_abs_mean[f], scale, 1e-5 * scale) << f;
  }
}

TEST(Calibrate, AveragesTheQueriesBeforeRopeWithQueryNormAndWithoutYarnsFactor) {
  for (const char* name : {"qwen3_qk_norm", "qwen2_yarn", "llama_tied_llama3"}) {
    SCOPED_TRACE(name);
    Decoder decoder = Decoder::open(checkpoint(name));
    const Ints ids = ids_of(61, 5);
    const Calibration c = calibrate(decoder, {ids}, {.skip = 4, .chunk = 16, .model_name = name});
    EXPECT_TRUE(c.problems(decoder.spec()).empty());
    EXPECT_EQ(c.model_name, name);
    EXPECT_EQ(c.attention_scaling, decoder.spec().rope.attention_scaling);
    for (std::int32_t h = 0; h < decoder.spec().query_heads; ++h)
      expect_mean(c.heads.at({0, h}),
                  first_layer(checkpoint(name), decoder.config(), ids, 4, h, decoder.config().qk_norm), ids.size() - 4);
  }
}

TEST(Calibrate, WithoutTheQueryNormAsThePublishedToolHasItTheNumbersAreOthers) {
  const fs::path folder = checkpoint("qwen3_qk_norm");
  Decoder decoder = Decoder::open(folder);
  const Ints ids = ids_of(61, 5);
  const Calibration::Head got = calibrate(decoder, {ids}, {.skip = 0}).heads.at({0, 1});
  const Sums bare = first_layer(folder, decoder.config(), ids, 0, 1, false);
  double least = 1e9, most = 0;  // their modulus over ours, by pair: no common factor
  for (std::size_t f = 0; f < bare.size(); ++f) {
    const double ratio = bare[f][2] / 61 / static_cast<double>(got.q_abs_mean[f]);
    least = std::min(least, ratio);
    most = std::max(most, ratio);
  }
  EXPECT_GT(most / least, 1.2) << least << " to " << most;
}

TEST(Calibrate, LaterLayersAreTheMeanOfWhatTheirHookSees) {
  Decoder decoder = Decoder::open(checkpoint("qwen3_qk_norm"));
  const ModelSpec& spec = decoder.spec();
  const Ints ids = ids_of(40, 9), whole{0, 40}, row{0}, none{0};
  Ints positions(40);
  std::iota(positions.begin(), positions.end(), 0);
  const Calibration c = calibrate(decoder, {ids}, {.skip = 7});
  const auto pairs = static_cast<std::int64_t>(spec.rope.inv_freq.size());
  StepOptions options{.logits = Logits::none};
  int seen = 0;
  options.on_layer = [&](const LayerSight& sight) {
    ++seen;
    for (std::int32_t h = 0; h < spec.query_heads; ++h) {
      Sums sums(static_cast<std::size_t>(pairs));
      for (std::int64_t t = 7; t < 40; ++t)
        for (std::int64_t f = 0; f < pairs; ++f) {
          const double a = sight.queries[t][h][f].item<double>(), b = sight.queries[t][h][f + pairs].item<double>();
          auto& sum = sums[static_cast<std::size_t>(f)];
          sum[0] += a, sum[1] += b, sum[2] += std::hypot(a, b);
        }
      expect_mean(c.heads.at({sight.layer, h}), sums, 33);
    }
  };
  decoder.forward({ids, whole, positions, row, none}, decoder.make_cache(1, 40), options);
  EXPECT_EQ(seen, spec.num_layers());
}

bool same(const Calibration& a, const Calibration& b) {
  for (const auto& [place, head] : a.heads)
    if (head.q_mean != b.heads.at(place).q_mean || head.q_abs_mean != b.heads.at(place).q_abs_mean) return false;
  return a.heads.size() == b.heads.size();
}

TEST(Calibrate, ChunksChangeNothingAndSequencesCountByTheirTokens) {
  Decoder decoder = Decoder::open(checkpoint("llama_gqa"));
  const Ints one = ids_of(50, 3), two = ids_of(21, 90);
  const Calibration whole = calibrate(decoder, {one, two}, {.skip = 5, .chunk = 64});
  std::int64_t told = 0;
  EXPECT_TRUE(same(whole, calibrate(decoder, {one, two},
                                    {.skip = 5, .chunk = 3, .progress = [&](std::int64_t done) { told = done; }})));
  EXPECT_EQ(told, 71);
  EXPECT_FALSE(same(whole, calibrate(decoder, {one, two}, {.skip = 6})));
  const Calibration first = calibrate(decoder, {one}, {.skip = 5}), second = calibrate(decoder, {two}, {.skip = 5});
  const float a = first.heads.at({1, 2}).q_abs_mean[3], b = second.heads.at({1, 2}).q_abs_mean[3];
  EXPECT_NEAR(whole.heads.at({1, 2}).q_abs_mean[3], (45 * a + 16 * b) / 61, 1e-6);
}

TEST(Calibrate, RefusesWhatItCannotCount) {
  Decoder decoder = Decoder::open(checkpoint("llama_gqa"));
  EXPECT_THROW(static_cast<void>(calibrate(decoder, {})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(calibrate(decoder, {{1, 2, 3, 4}})), InvalidArgument) << "all of them skipped";
  EXPECT_NO_THROW(static_cast<void>(calibrate(decoder, {{1, 2, 3, 4, 5}})));
  EXPECT_THROW(static_cast<void>(calibrate(decoder, {{1, 2, 3, 4, 256}})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(calibrate(decoder, {{1, 2, 3, 4, -1}})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(calibrate(decoder, {{1, 2, 3, 4, 5}}, {.skip = -1})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(calibrate(decoder, {{1, 2, 3, 4, 5}}, {.chunk = 0})), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::lm::lm_calibrate_test
