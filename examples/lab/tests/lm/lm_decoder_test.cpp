// SPDX-License-Identifier: Apache-2.0
#include "kvlab/decoder.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <random>

#include "kvkeep/core/error.h"
#include "kvkeep/io/safetensors.h"

namespace kvkeep::lm::lm_decoder_test {
namespace {

namespace fs = std::filesystem;
using Ints = std::vector<std::int32_t>;

// A model folder that lives as long as the test.
class Folder {
 public:
  Folder() {
    static int count = 0;
    path = fs::temp_directory_path() / text("kvkeep_decoder_", ::getpid(), "_", count++);
    fs::create_directories(path);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  fs::path path;
};

Ints random_ids(std::int32_t n, std::int32_t vocab, std::uint32_t seed) {
  std::mt19937 bits(seed);
  Ints ids(static_cast<std::size_t>(n));
  for (auto& id : ids) id = static_cast<std::int32_t>(bits() % static_cast<std::uint32_t>(vocab));
  return ids;
}

Ints counted(std::int32_t first, std::int32_t n) {
  Ints numbers(static_cast<std::size_t>(n));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// One sequence's tokens in one step, at cache row `row`, behind `length` slots, at logical position `position`.
at::Tensor feed(Decoder& decoder, std::span<const LayerCache> cache, const Ints& ids, std::int32_t row,
                std::int32_t length, std::int32_t position, const StepOptions& options = {}) {
  const auto n = static_cast<std::int32_t>(ids.size());
  const Ints indptr{0, n}, positions = counted(position, n), rows{row}, lengths{length};
  return decoder.forward({ids, indptr, positions, rows, lengths}, cache, options);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

float worst_difference(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  float worst = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i)
    worst = std::max(worst, std::abs(a.const_data_ptr<float>()[i] - b.const_data_ptr<float>()[i]));
  return worst;
}

bool all_equal(const at::Tensor& t, float value) {
  return std::all_of(t.const_data_ptr<float>(), t.const_data_ptr<float>() + t.numel(),
                     [&](float x) { return x == value; });
}

// ---- A plain second decoder: one sequence, no cache, everything in double, loops as in the textbook ----------------

class PlainDecoder {
 public:
  using Matrix = std::vector<std::vector<double>>;

  PlainDecoder(const fs::path& folder, io::ModelConfig config)
      : config_(std::move(config)), file_(io::SafetensorsFile::open(folder / "model.safetensors")) {}

  // logits [n][vocab]
  Matrix run(const Ints& ids) const {
    const Matrix embedding = matrix("model.embed_tokens.weight");
    Matrix x;
    for (const auto id : ids) x.push_back(embedding[static_cast<std::size_t>(id)]);
    if (gemma())
      for (auto& row : x)
        for (double& number : row) number *= std::sqrt(static_cast<double>(config_.hidden));
    for (std::int32_t l = 0; l < config_.num_layers(); ++l) {
      const std::string prefix = text("model.layers.", l, ".");
      const Matrix a = attention(prefix + "self_attn.", l, normed(x, prefix + "input_layernorm.weight"));
      Matrix added = linear(prefix + "self_attn.o_proj", a);
      if (gemma()) added = normed(added, prefix + "post_attention_layernorm.weight");
      add(x, added);
      const Matrix h =
          normed(x, prefix + (gemma() ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight"));
      Matrix gate = linear(prefix + "mlp.gate_proj", h);
      const Matrix up = linear(prefix + "mlp.up_proj", h);
      for (std::size_t i = 0; i < gate.size(); ++i)
        for (std::size_t j = 0; j < gate[i].size(); ++j) gate[i][j] = activated(gate[i][j]) * up[i][j];
      added = linear(prefix + "mlp.down_proj", gate);
      if (gemma()) added = normed(added, prefix + "post_feedforward_layernorm.weight");
      add(x, added);
    }
    return times(matrix(config_.tied ? "model.embed_tokens.weight" : "lm_head.weight"), normed(x, "model.norm.weight"));
  }

 private:
  // As transformers' modeling_gemma3.py has it: norms stored less one, four of them a layer, embeddings scaled, GeGLU.
  [[nodiscard]] bool gemma() const { return config_.architecture == io::Architecture::gemma3; }
  [[nodiscard]] double activated(double x) const {
    if (!gemma()) return x / (1 + std::exp(-x));
    return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
  }
  std::vector<double> vector(const std::string& name) const {
    const at::Tensor t = torch_tensor(file_.tensor(name)).to(at::kDouble).contiguous();
    return {t.const_data_ptr<double>(), t.const_data_ptr<double>() + t.numel()};
  }
  Matrix matrix(const std::string& name) const {
    const std::vector<double> flat = vector(name);
    const auto rows = static_cast<std::size_t>(file_.tensor(name).size(0)), columns = flat.size() / rows;
    Matrix m;
    for (std::size_t r = 0; r < rows; ++r)
      m.emplace_back(flat.begin() + static_cast<std::ptrdiff_t>(r * columns),
                     flat.begin() + static_cast<std::ptrdiff_t>((r + 1) * columns));
    return m;
  }
  static Matrix times(const Matrix& w, const Matrix& x) {
    Matrix y(x.size(), std::vector<double>(w.size()));
    for (std::size_t i = 0; i < x.size(); ++i)
      for (std::size_t r = 0; r < w.size(); ++r)
        for (std::size_t k = 0; k < w[r].size(); ++k) y[i][r] += w[r][k] * x[i][k];
    return y;
  }
  Matrix linear(const std::string& name, const Matrix& x) const {
    Matrix y = times(matrix(name + ".weight"), x);
    if (!file_.has(name + ".bias")) return y;
    const std::vector<double> bias = vector(name + ".bias");
    for (auto& row : y)
      for (std::size_t r = 0; r < row.size(); ++r) row[r] += bias[r];
    return y;
  }
  static void add(Matrix& x, const Matrix& y) {
    for (std::size_t i = 0; i < x.size(); ++i)
      for (std::size_t j = 0; j < x[i].size(); ++j) x[i][j] += y[i][j];
  }
  void norm(double* x, const std::vector<double>& weight) const {
    double squares = 0;
    for (std::size_t j = 0; j < weight.size(); ++j) squares += x[j] * x[j];
    const double root = std::sqrt(squares / static_cast<double>(weight.size()) + config_.rms_eps);
    for (std::size_t j = 0; j < weight.size(); ++j) x[j] = x[j] / root * (weight[j] + (gemma() ? 1 : 0));
  }
  Matrix normed(Matrix x, const std::string& name) const {
    const std::vector<double> weight = vector(name);
    for (auto& row : x) norm(row.data(), weight);
    return x;
  }
  void rotate(std::int32_t layer, double* head, std::size_t position) const {
    const RopeSpec& rope = config_.spec.rope_of(layer);
    const std::size_t pairs = rope.inv_freq.size();
    for (std::size_t f = 0; f < pairs; ++f) {
      const double angle = static_cast<double>(position) * rope.inv_freq[f];
      const double c = std::cos(angle) * rope.attention_scaling, s = std::sin(angle) * rope.attention_scaling,
                   a = head[f], b = head[f + pairs];
      head[f] = a * c - b * s;
      head[f + pairs] = b * c + a * s;
    }
  }
  Matrix attention(const std::string& prefix, std::int32_t layer, const Matrix& x) const {
    const auto dim = static_cast<std::size_t>(config_.spec.key_dim),
               heads = static_cast<std::size_t>(config_.spec.query_heads);
    const std::size_t kv_heads = static_cast<std::size_t>(config_.spec.kv_heads), group = heads / kv_heads;
    Matrix q = linear(prefix + "q_proj", x), k = linear(prefix + "k_proj", x);
    const Matrix v = linear(prefix + "v_proj", x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      for (std::size_t h = 0; h < heads; ++h) {
        if (config_.qk_norm) norm(&q[i][h * dim], vector(prefix + "q_norm.weight"));
        rotate(layer, &q[i][h * dim], i);
      }
      for (std::size_t h = 0; h < kv_heads; ++h) {
        if (config_.qk_norm) norm(&k[i][h * dim], vector(prefix + "k_norm.weight"));
        rotate(layer, &k[i][h * dim], i);
      }
    }
    const LayerSpec& kind = config_.spec.layers[static_cast<std::size_t>(layer)];
    Matrix out(x.size(), std::vector<double>(heads * dim));
    for (std::size_t i = 0; i < x.size(); ++i)
      for (std::size_t h = 0; h < heads; ++h) {
        std::vector<double> p(i + 1);
        double sum = 0;
        for (std::size_t t = 0; t <= i; ++t) {
          double dot = 0;
          for (std::size_t d = 0; d < dim; ++d) dot += q[i][h * dim + d] * k[t][h / group * dim + d];
          const bool in_window = kind.kind == LayerKind::full || i - t < static_cast<std::size_t>(kind.window);
          p[t] = in_window ? std::exp(dot * config_.spec.scale()) : 0;
          sum += p[t];
        }
        for (std::size_t t = 0; t <= i; ++t)
          for (std::size_t d = 0; d < dim; ++d) out[i][h * dim + d] += p[t] / sum * v[t][h / group * dim + d];
      }
    return out;
  }

  io::ModelConfig config_;
  io::SafetensorsFile file_;
};

std::vector<double> flat(const PlainDecoder::Matrix& m) {
  std::vector<double> all;
  for (const auto& row : m) all.insert(all.end(), row.begin(), row.end());
  return all;
}

// ---- Against the plain decoder --------------------------------------------------------------------------------------

// The model, and 19 tokens of it in steps of 1, 7, 1, 2, 8 against the whole sequence at once.
void expect_as_plain(const io::ModelConfig& config, Dtype dtype = Dtype::f32) {
  const Folder folder;
  write_random_checkpoint(folder.path, config, 11, dtype);
  Decoder decoder = Decoder::open(folder.path);
  const Ints ids = random_ids(19, config.vocab, 3);
  const std::vector<double> expected = flat(PlainDecoder(folder.path, decoder.config()).run(ids));
  const auto cache = decoder.make_cache(1, 19);
  StepOptions all;
  all.logits = Logits::all;
  std::vector<at::Tensor> logits;
  std::int32_t done = 0;
  std::vector<double> got;
  for (const std::int32_t step : {1, 7, 1, 2, 8}) {
    const at::Tensor part = feed(decoder, cache, {ids.begin() + done, ids.begin() + done + step}, 0, done, done, all);
    got.insert(got.end(), part.const_data_ptr<float>(), part.const_data_ptr<float>() + part.numel());
    done += step;
  }
  double worst = 0, largest = 1;
  for (std::size_t i = 0; i < expected.size(); ++i)
    worst = std::max(worst, std::abs(got[i] - expected[i])), largest = std::max(largest, std::abs(expected[i]));
  EXPECT_LE(worst / largest, 2e-5);
}

TEST(Decoder, ReadsTheRightKvHeadForEveryGroupSize) {  // B15
  for (const std::int32_t group : {1, 2, 3, 4, 7, 8}) {
    SCOPED_TRACE(group);
    expect_as_plain(io::ModelConfig::shape(io::Architecture::llama, 2, 40, 56, 2 * group, 2, 12, 50));
  }
}

TEST(Decoder, AddsEveryBiasThatTheConfigNames) {
  io::ModelConfig llama = io::ModelConfig::shape(io::Architecture::llama, 2, 33, 47, 3, 1, 10, 41);
  llama.qkv_bias = llama.output_bias = llama.mlp_bias = true;
  expect_as_plain(llama);
  expect_as_plain(io::ModelConfig::shape(io::Architecture::qwen2, 2, 32, 48, 4, 2, 16, 64));
}

TEST(Decoder, LeavesLayersWithoutRopeAsTheyAre) {
  io::ModelConfig smollm3 = io::ModelConfig::shape(io::Architecture::smollm3, 3, 40, 56, 4, 2, 12, 50);
  smollm3.spec.layers[0].rope = smollm3.spec.layers[2].rope = RopeSpec::absent();
  smollm3.qkv_bias = smollm3.output_bias = smollm3.mlp_bias = true;
  expect_as_plain(smollm3);
}

// Layers 0 and 2 slide with a RoPE of their own, layer 1 is full; queries are not scaled by the head's size.
TEST(Decoder, ReadsGemma3WithBothKindsOfLayersAndAllOfItsNorms) {
  io::ModelConfig gemma = io::ModelConfig::shape(io::Architecture::gemma3, 3, 40, 56, 4, 2, 12, 50, {.theta = 1e6});
  ASSERT_TRUE(gemma.qk_norm && gemma.post_norms && gemma.tied);
  gemma.spec.softmax_scale = 0.25;
  for (LayerSpec& layer : gemma.spec.layers) layer.window = 5;
  gemma.spec.layers[1] = {};
  expect_as_plain(gemma);
  expect_as_plain(gemma, Dtype::bf16);
  gemma.rope = {.type = io::RopeConfig::Type::linear, .theta = 1e6, .factor = 8};
  expect_as_plain(gemma);
}

TEST(Decoder, NormalisesQueryAndKeyHeads) {  // B16
  io::ModelConfig qwen3 = io::ModelConfig::shape(io::Architecture::qwen3, 2, 32, 48, 4, 2, 24, 64);
  qwen3.tied = true;
  expect_as_plain(qwen3);
}

TEST(Decoder, WidensHalfPrecisionWeights) {
  expect_as_plain(io::ModelConfig::shape(io::Architecture::llama, 2, 37, 51, 4, 2, 14, 50), Dtype::f16);
  expect_as_plain(io::ModelConfig::shape(io::Architecture::qwen3, 2, 37, 51, 4, 2, 14, 50), Dtype::bf16);
}

TEST(Decoder, SlidingLayersSeeTheirWindowOnly) {
  for (const std::int32_t window : {1, 3, 8, 100}) {
    SCOPED_TRACE(window);
    io::ModelConfig config = io::ModelConfig::shape(io::Architecture::qwen2, 3, 32, 48, 4, 2, 16, 64);
    config.spec.layers[1] = config.spec.layers[2] = {LayerKind::sliding, window, -1};
    expect_as_plain(config);
  }
}

TEST(Decoder, ScalesRopeByYarnAndLlama3) {
  expect_as_plain(io::ModelConfig::shape(io::Architecture::llama, 2, 32, 48, 4, 2, 16, 64,
                                         {.type = io::RopeConfig::Type::yarn, .factor = 4.0, .original_max = 8}));
  expect_as_plain(io::ModelConfig::shape(io::Architecture::llama, 2, 32, 48, 4, 2, 16, 64,
                                         {.type = io::RopeConfig::Type::llama3, .factor = 8.0, .original_max = 8}));
}

TEST(Decoder, ReadsShardsAsItReadsOneFile) {
  const io::ModelConfig config = io::ModelConfig::shape(io::Architecture::llama, 2, 32, 48, 4, 2, 8, 64);
  const Folder whole, parts;
  write_random_checkpoint(whole.path, config, 5);
  write_random_checkpoint(parts.path, config, 5, Dtype::f32, 3);
  Decoder a = Decoder::open(whole.path), b = Decoder::open(parts.path);
  const auto x = a.make_cache(1, 8), y = b.make_cache(1, 8);
  EXPECT_TRUE(same_bits(feed(a, x, {1, 2, 3}, 0, 0, 0), feed(b, y, {1, 2, 3}, 0, 0, 0)));
}

// ---- The law: a sequence's bits depend on itself alone --------------------------------------------------------------

class DecoderLaw : public ::testing::TestWithParam<Dtype> {
 protected:
  DecoderLaw() {
    io::ModelConfig config = io::ModelConfig::shape(io::Architecture::qwen2, 3, 72, 104, 6, 2, 20, 90);
    config.spec.layers[1] = {LayerKind::sliding, 11, -1};
    write_random_checkpoint(folder_.path, config, 21, GetParam());
    decoder_ = std::make_unique<Decoder>(Decoder::open(folder_.path));
  }
  Folder folder_;
  std::unique_ptr<Decoder> decoder_;
};
INSTANTIATE_TEST_SUITE_P(Dtypes, DecoderLaw, ::testing::Values(Dtype::f32, Dtype::f16, Dtype::bf16),
                         [](const auto& one) { return std::string(name_of(one.param)); });

TEST_P(DecoderLaw, NoSequenceEntersAnothersResult) {  // B4, B14
  constexpr std::int32_t kSequences = 4, kCapacity = 64;
  const Ints parts[kSequences] = {{1, 1, 1}, {17, 1, 3}, {5, 9, 1}, {2, 2, 30}};  // new tokens per step
  std::vector<Ints> ids;
  for (std::int32_t s = 0; s < kSequences; ++s) ids.push_back(random_ids(kCapacity, 90, static_cast<std::uint32_t>(s)));

  const auto together = decoder_->make_cache(kSequences, kCapacity, GetParam()),
             alone = decoder_->make_cache(kSequences, kCapacity, GetParam());
  const Ints rows{2, 0, 3, 1};
  Ints done(kSequences, 0);
  for (std::size_t step = 0; step < 3; ++step) {
    Ints tokens, positions, indptr{0};
    for (std::size_t s = 0; s < kSequences; ++s) {
      const std::int32_t n = parts[s][step];
      tokens.insert(tokens.end(), ids[s].begin() + done[s], ids[s].begin() + done[s] + n);
      const Ints at = counted(done[s], n);
      positions.insert(positions.end(), at.begin(), at.end());
      indptr.push_back(static_cast<std::int32_t>(tokens.size()));
    }
    std::vector<at::Tensor> queries_together(3), queries_alone(3);
    StepOptions options;
    options.on_layer = [&](const LayerSight& sight) {
      queries_together[static_cast<std::size_t>(sight.layer)] = sight.queries.clone();
    };
    const at::Tensor batch = decoder_->forward({tokens, indptr, positions, rows, done}, together, options);
    for (std::int32_t s = 0; s < kSequences; ++s) {
      const auto i = static_cast<std::size_t>(s);
      options.on_layer = [&](const LayerSight& sight) {
        queries_alone[static_cast<std::size_t>(sight.layer)] = sight.queries.clone();
      };
      const at::Tensor single =
          feed(*decoder_, alone, {ids[i].begin() + done[i], ids[i].begin() + done[i] + parts[i][step]}, rows[i],
               done[i], done[i], options);
      EXPECT_TRUE(same_bits(batch.narrow(0, s, 1), single)) << "step " << step << " sequence " << s;
      for (std::size_t l = 0; l < 3; ++l)
        EXPECT_TRUE(same_bits(queries_together[l].narrow(0, indptr[i], parts[i][step]), queries_alone[l]))
            << "step " << step << " sequence " << s;
      done[i] += parts[i][step];
    }
  }
  for (std::size_t l = 0; l < together.size(); ++l)
    EXPECT_TRUE(same_bits(together[l].keys, alone[l].keys) && same_bits(together[l].values, alone[l].values)) << l;
}

TEST_P(DecoderLaw, APromptGivesTheSameBitsHoweverItIsCutIntoSteps) {  // B19
  constexpr std::int32_t kTokens = 70;
  const Ints ids = random_ids(kTokens, 90, 8);
  StepOptions all;
  all.logits = Logits::all;
  const auto whole = decoder_->make_cache(1, kTokens, GetParam());
  const at::Tensor expected = feed(*decoder_, whole, ids, 0, 0, 0, all);
  for (const std::int32_t chunk : {1, 2, 3, 16, 64}) {
    const auto cache = decoder_->make_cache(1, kTokens, GetParam());
    for (std::int32_t done = 0; done < kTokens; done += chunk) {
      const std::int32_t n = std::min(chunk, kTokens - done);
      const at::Tensor part = feed(*decoder_, cache, {ids.begin() + done, ids.begin() + done + n}, 0, done, done, all);
      ASSERT_TRUE(same_bits(part, expected.narrow(0, done, n))) << "chunk " << chunk << " at " << done;
    }
  }
}

// The feed-forward takes 256 tokens at a time.
TEST_P(DecoderLaw, PromptsAroundABlockOfTheFeedForwardGiveTheBitsOfOneTokenAtATime) {
  constexpr std::int32_t kTokens = 513;
  const Ints ids = random_ids(kTokens, 90, 10);
  StepOptions all;
  all.logits = Logits::all;
  const auto cache = decoder_->make_cache(1, kTokens, GetParam());
  std::vector<at::Tensor> one_by_one;
  for (std::int32_t t = 0; t < kTokens; ++t)
    one_by_one.push_back(feed(*decoder_, cache, {ids[static_cast<std::size_t>(t)]}, 0, t, t, all));
  const at::Tensor expected = at::cat(one_by_one);
  for (const std::int32_t first : {255, 256, 257, 513}) {
    const auto other = decoder_->make_cache(1, kTokens, GetParam());
    EXPECT_TRUE(same_bits(feed(*decoder_, other, {ids.begin(), ids.begin() + first}, 0, 0, 0, all),
                          expected.narrow(0, 0, first)))
        << first;
    if (first == kTokens) continue;
    EXPECT_TRUE(same_bits(feed(*decoder_, other, {ids.begin() + first, ids.end()}, 0, first, first, all),
                          expected.narrow(0, first, kTokens - first)))
        << first;
  }
}

// Large enough that every stage is really shared out.
TEST_P(DecoderLaw, TheNumberOfThreadsChangesNoBit) {
  const Folder folder;
  io::ModelConfig config = io::ModelConfig::shape(io::Architecture::qwen3, 2, 256, 704, 8, 2, 32, 2000);
  config.spec.layers[1] = {LayerKind::sliding, 50, -1};
  write_random_checkpoint(folder.path, config, 22, GetParam());
  Decoder decoder = Decoder::open(folder.path);
  const Ints ids = random_ids(200, 2000, 9);
  constexpr std::int32_t kLong = 3500;
  const auto noise = decoder.make_cache(1, kLong + 1, GetParam());
  for (const LayerCache& layer : noise)
    for (const at::Tensor side : {layer.keys, layer.values})
      side.copy_(at::randn(side.sizes(), at::TensorOptions(at::kFloat)));
  const int before = at::get_num_threads();
  std::vector<at::Tensor> results;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    const auto cache = decoder.make_cache(1, 256, GetParam());
    results.push_back(feed(decoder, cache, ids, 0, 0, 0));
    results.push_back(feed(decoder, cache, {5}, 0, 200, 200));
    results.push_back(feed(decoder, noise, {5}, 0, kLong, kLong));  // threads share a row
  }
  at::set_num_threads(before);
  for (std::size_t i = 3; i < results.size(); ++i) EXPECT_TRUE(same_bits(results[i], results[i % 3])) << i;
}

// ---- Cut caches -----------------------------------------------------------------------------------------------------

// Keeps `slots` of every layer and head of a cache row, in order, as an eviction would.
void keep_slots(std::span<const LayerCache> cache, std::int64_t row, std::int64_t layer, std::int64_t head,
                const Ints& slots) {
  for (const at::Tensor side :
       {cache[static_cast<std::size_t>(layer)].keys, cache[static_cast<std::size_t>(layer)].values})
    for (std::size_t to = 0; to < slots.size(); ++to)
      side[row][head][static_cast<std::int64_t>(to)].copy_(side[row][head][slots[to]].clone());
}

class CutCache : public ::testing::Test {
 protected:
  CutCache() {
    write_random_checkpoint(folder_.path, io::ModelConfig::shape(io::Architecture::llama, 3, 64, 96, 4, 2, 16, 80), 4);
    decoder_ = std::make_unique<Decoder>(Decoder::open(folder_.path));
  }
  Folder folder_;
  std::unique_ptr<Decoder> decoder_;
};

TEST_F(CutCache, GivesWhatTheFullCacheGivesUnderAMaskTokenByToken) {  // B1, B28
  constexpr std::int32_t kPrompt = 30, kEvents = 5, kBetween = 6, kCapacity = 80;
  const auto cut = decoder_->make_cache(1, kCapacity), full = decoder_->make_cache(1, kCapacity);
  std::vector<at::Tensor> visible(3);
  for (auto& mask : visible) mask = at::ones({1, 2, kCapacity}, at::TensorOptions(at::ScalarType::Byte));
  StepOptions masked;
  masked.visible = visible;
  const Ints prompt = random_ids(kPrompt, 80, 1);
  Ints next = lm::argmax(feed(*decoder_, cut, prompt, 0, 0, 0));
  ASSERT_EQ(lm::argmax(feed(*decoder_, full, prompt, 0, 0, 0)), next);
  Ints positions = counted(0, kPrompt);  // of the slots kept, the same in every row here
  std::int32_t seen = kPrompt;
  std::mt19937 bits(7);
  for (int event = 0; event < kEvents; ++event) {
    Ints slots;
    for (std::int32_t slot = 0; slot < static_cast<std::int32_t>(positions.size()); ++slot)
      if (slot < 2 || bits() % 3 != 0) slots.push_back(slot);
    for (std::int64_t layer = 0; layer < 3; ++layer)
      for (std::int64_t head = 0; head < 2; ++head) keep_slots(cut, 0, layer, head, slots);
    Ints kept;
    for (const auto slot : slots) kept.push_back(positions[static_cast<std::size_t>(slot)]);
    positions = kept;
    for (auto& mask : visible) {
      mask.narrow(2, 0, seen).zero_();
      for (const auto position : positions) mask.select(2, position).fill_(1);
    }
    for (std::int32_t i = 0; i < kBetween; ++i, ++seen) {
      const at::Tensor a = feed(*decoder_, cut, next, 0, static_cast<std::int32_t>(positions.size()), seen);
      const at::Tensor b = feed(*decoder_, full, next, 0, seen, seen, masked);
      EXPECT_LE(worst_difference(a, b), 2e-5F) << "event " << event;
      ASSERT_EQ(lm::argmax(a), lm::argmax(b)) << "event " << event;
      next = lm::argmax(a);
      positions.push_back(seen);
    }
  }
}

TEST_F(CutCache,
       TakesAChunkLongerThanWhatIsLeft) {  // B28: more queries than slots, so a square causal mask would be wrong
  constexpr std::int32_t kPrompt = 30, kCapacity = 80, kChunk = 20;
  const auto cut = decoder_->make_cache(1, kCapacity), full = decoder_->make_cache(1, kCapacity);
  const Ints prompt = random_ids(kPrompt, 80, 3), chunk = random_ids(kChunk, 80, 4), slots{0, 1, 9, 29};
  feed(*decoder_, cut, prompt, 0, 0, 0);
  feed(*decoder_, full, prompt, 0, 0, 0);
  std::vector<at::Tensor> visible(3);
  for (auto& mask : visible) {
    mask = at::ones({1, 2, kCapacity}, at::TensorOptions(at::ScalarType::Byte));
    mask.narrow(2, 0, kPrompt).zero_();
    for (const auto slot : slots) mask.select(2, slot).fill_(1);
  }
  for (std::int64_t layer = 0; layer < 3; ++layer)
    for (std::int64_t head = 0; head < 2; ++head) keep_slots(cut, 0, layer, head, slots);
  StepOptions masked;
  masked.visible = visible;
  EXPECT_LE(worst_difference(feed(*decoder_, cut, chunk, 0, 4, kPrompt),
                             feed(*decoder_, full, chunk, 0, kPrompt, kPrompt, masked)),
            2e-5F);
}

TEST_F(CutCache, HoldsRowsOfDifferentLength) {
  constexpr std::int32_t kPrompt = 24, kCapacity = 40;
  const auto cut = decoder_->make_cache(1, kCapacity), full = decoder_->make_cache(1, kCapacity);
  const Ints prompt = random_ids(kPrompt, 80, 2);
  feed(*decoder_, cut, prompt, 0, 0, 0);
  feed(*decoder_, full, prompt, 0, 0, 0);
  std::vector<at::Tensor> visible;
  Ints lengths;  // by layer and head
  for (std::int32_t layer = 0; layer < 3; ++layer) {
    visible.push_back(at::zeros({1, 2, kCapacity}, at::TensorOptions(at::ScalarType::Byte)));
    for (std::int32_t head = 0; head < 2; ++head) {
      Ints slots;
      for (std::int32_t slot = head; slot < kPrompt; slot += 1 + layer + head) slots.push_back(slot);
      keep_slots(cut, 0, layer, head, slots);
      for (const auto slot : slots) visible.back()[0][head][slot] = 1;
      lengths.push_back(static_cast<std::int32_t>(slots.size()));
    }
  }
  StepOptions masked;
  masked.visible = visible;
  const Ints ids{3, 9}, indptr{0, 2}, positions{kPrompt, kPrompt + 1}, row{0};
  const at::Tensor a = decoder_->forward({ids, indptr, positions, row, SlotCounts({lengths, 6}, 2)}, cut);
  const at::Tensor b = feed(*decoder_, full, ids, 0, kPrompt, kPrompt, masked);
  EXPECT_LE(worst_difference(a, b), 2e-5F);
}

TEST_F(CutCache, RotatesAtTheLogicalPositionNotAtTheSlot) {  // B1
  const auto at_slot = decoder_->make_cache(1, 16), far = decoder_->make_cache(1, 16);
  feed(*decoder_, at_slot, {1, 2, 3}, 0, 0, 0);
  feed(*decoder_, far, {1, 2, 3}, 0, 0, 1000);
  EXPECT_TRUE(same_bits(at_slot[0].values, far[0].values));
  EXPECT_FALSE(same_bits(at_slot[0].keys, far[0].keys));
  // Attention depends on distances alone, so a shifted sequence says the same.
  const at::Tensor a = feed(*decoder_, at_slot, {4}, 0, 3, 3), b = feed(*decoder_, far, {4}, 0, 3, 1003);
  EXPECT_LE(worst_difference(a, b), 1e-3F);
  const at::Tensor c = feed(*decoder_, far, {4}, 0, 3, 1010);
  EXPECT_GT(worst_difference(a, c), 1e-2F);
}

TEST_F(CutCache, HonoursTheStridesOfTheCallersCache) {  // B25
  auto plain = decoder_->make_cache(2, 16);
  std::vector<LayerCache> strided;
  for (int l = 0; l < 3; ++l) {
    const at::Tensor storage =
        at::zeros({16, 2, 2, 40}, at::TensorOptions(at::kFloat));  // [slot, B, head, K and V side by side, padded]
    const at::Tensor rows = storage.permute({1, 2, 0, 3});
    strided.push_back({rows.narrow(3, 0, 16), rows.narrow(3, 20, 16)});
  }
  const Ints ids = random_ids(9, 80, 3);
  EXPECT_TRUE(same_bits(feed(*decoder_, plain, ids, 1, 0, 0), feed(*decoder_, strided, ids, 1, 0, 0)));
  EXPECT_TRUE(same_bits(feed(*decoder_, plain, {7}, 1, 9, 9), feed(*decoder_, strided, {7}, 1, 9, 9)));
  for (std::size_t l = 0; l < 3; ++l)
    EXPECT_TRUE(same_bits(plain[l].keys, strided[l].keys) && same_bits(plain[l].values, strided[l].values));
}

TEST_F(CutCache, DoesNotReadWhatLiesBehindItsLength) {  // B20, B24
  const auto clean = decoder_->make_cache(1, 16), dirty = decoder_->make_cache(1, 16);
  for (const LayerCache& layer : dirty)
    for (const at::Tensor side : {layer.keys, layer.values}) side.fill_(NAN);
  const Ints ids = random_ids(5, 80, 4);
  EXPECT_TRUE(same_bits(feed(*decoder_, clean, ids, 0, 0, 0), feed(*decoder_, dirty, ids, 0, 0, 0)));
  EXPECT_TRUE(std::isnan(torch_tensor(dirty[0].keys)[0][0][5][0].item<float>()));
}

// ---- What is refused ------------------------------------------------------------------------------------------------

TEST_F(CutCache, RefusesABadStepBeforeAnythingIsWritten) {
  const auto cache = decoder_->make_cache(2, 8);
  for (const LayerCache& layer : cache) torch_tensor(layer.keys).fill_(7), torch_tensor(layer.values).fill_(7);
  const auto refused = [&](const Ints& ids, const Ints& indptr, const Ints& positions, const Ints& rows,
                           const Ints& lengths, const char* named) {
    try {
      (void)decoder_->forward({ids, indptr, positions, rows, lengths}, cache);
      ADD_FAILURE() << "accepted, should name " << named;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  };
  refused({80}, {0, 1}, {0}, {0}, {0}, "token id 80");
  refused({-1}, {0, 1}, {0}, {0}, {0}, "token id -1");
  refused({}, {0, 0}, {}, {0}, {0}, "no tokens");
  refused({}, {0}, {}, {}, {}, "no sequences");
  refused({1}, {0, 2}, {0}, {0}, {0}, "indptr");
  refused({1}, {0, 1, 1}, {0}, {0}, {0}, "indptr");
  refused({1, 2}, {0, 2}, {0}, {0}, {0}, "positions");
  refused({1, 2}, {0, 2}, {3, 3}, {0}, {0}, "ascend");
  refused({1}, {0, 1}, {2}, {0}, {3}, "position 2");
  refused({1}, {0, 1}, {8}, {0}, {8}, "full");
  refused({1}, {0, 1}, {0}, {0}, {-1}, "-1");
  refused({1}, {0, 1}, {0}, {2}, {0}, "cache row 2");
  refused({1, 2}, {0, 1, 2}, {0, 0}, {1, 1}, {0, 0}, "two sequences");
  refused({1, 2}, {0, 1, 2}, {0, 0}, {0, 1}, {0}, "lengths");
  for (const LayerCache& layer : cache) EXPECT_TRUE(all_equal(layer.keys, 7) && all_equal(layer.values, 7));
}

TEST_F(CutCache, RefusesACacheThatDoesNotFitTheModel) {
  const auto good = decoder_->make_cache(1, 8);
  const auto refused = [&](const std::function<void(std::vector<LayerCache>&)>& damage, const char* named) {
    std::vector<LayerCache> cache = good;
    damage(cache);
    try {
      feed(*decoder_, cache, {1}, 0, 0, 0);
      ADD_FAILURE() << "accepted, should name " << named;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  };
  refused([](auto& cache) { cache.pop_back(); }, "2 layers");
  refused([](auto& cache) { cache[1].keys = torch_tensor(cache[1].keys).to(at::kDouble); }, "f64");
  refused([](auto& cache) { cache[1].values = cache[1].values.narrow(1, 0, 1); }, "values of layer 1");
  refused([](auto& cache) { cache[2].keys = at::Tensor(); }, "keys of layer 2");
  refused([](auto& cache) { cache[2].keys = cache[2].keys.narrow(2, 0, 4); }, "capacity");
  refused(
      [](auto& cache) {
        cache[0].keys = at::zeros({1, 2, 16, 8}, at::TensorOptions(at::kFloat)).permute({0, 1, 3, 2});
      },
      "stride");
  StepOptions masked;
  const std::vector<at::Tensor> wrong(3, at::ones({1, 2, 7}, at::TensorOptions(at::ScalarType::Byte)));
  masked.visible = wrong;
  EXPECT_THROW(feed(*decoder_, good, {1}, 0, 0, 0, masked), InvalidArgument);
}

TEST(DecoderFolder, RefusesWeightsThatDoNotFitTheConfig) {
  const io::ModelConfig config = io::ModelConfig::shape(io::Architecture::llama, 2, 32, 48, 4, 2, 8, 64);
  const Folder folder;
  write_random_checkpoint(folder.path, config, 5);
  const io::SafetensorsFile good = io::SafetensorsFile::open(folder.path / "model.safetensors");
  const auto refused = [&](const std::string& damaged, const std::function<at::Tensor(const at::Tensor&)>& damage,
                           std::initializer_list<const char*> named) {
    const Folder other;
    fs::copy(folder.path / "config.json", other.path / "config.json");
    std::vector<std::pair<std::string, kvkeep::Tensor>> tensors;
    for (const std::string& name : good.names()) {
      const kvkeep::Tensor tensor = name == damaged ? kvkeep::Tensor(damage(good.tensor(name))) : good.tensor(name);
      if (tensor.defined()) tensors.emplace_back(name, tensor);
    }
    io::write_safetensors(other.path / "model.safetensors", tensors);
    try {
      (void)Decoder::open(other.path);
      ADD_FAILURE() << "accepted";
    } catch (const InvalidArgument& error) {
      for (const char* word : named) EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(damaged), std::string::npos) << error.what();
    }
  };
  refused("model.layers.1.mlp.up_proj.weight", [](const at::Tensor&) { return at::Tensor(); },
          {"missing", "model.safetensors"});
  refused("lm_head.weight", [](const at::Tensor& t) { return t.narrow(0, 0, 63).clone(); },
          {"[63, 32]", "[64, 32]", "model.safetensors"});
  refused("model.norm.weight", [](const at::Tensor& t) { return t.to(at::ScalarType::Int); }, {"i32", "bf16"});
}

TEST(DecoderFolder, RefusesAnIndexThatLeavesItsFolderOrLies) {
  const Folder folder;
  write_random_checkpoint(folder.path, io::ModelConfig::shape(io::Architecture::llama, 1, 32, 48, 4, 2, 8, 64), 5,
                          Dtype::f32, 2);
  const auto refused = [&](const std::string& index, const char* named) {
    std::ofstream(folder.path / "model.safetensors.index.json") << index;
    try {
      (void)Decoder::open(folder.path);
      ADD_FAILURE() << "accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  };
  refused("{", "is not JSON");
  refused("[]", "weight_map");
  refused(R"({"weight_map": {"a": 3}})", "'a'");
  refused(R"({"weight_map": {"a": "../other.safetensors"}})", "same folder");
  refused(R"({"weight_map": {"a": "model-00001-of-00002.safetensors"}})", "'a' is missing");
  refused(R"({"weight_map": {"a": "absent.safetensors"}})", "absent.safetensors");
  refused(R"({"weight_map": {}})", "model.embed_tokens.weight");
  fs::remove(folder.path / "model.safetensors.index.json");
  EXPECT_THROW((void)Decoder::open(folder.path), InvalidArgument);
}

TEST(Argmax, TakesTheLowestOfEqualsAndRefusesNaN) {
  at::Tensor logits = at::zeros({2, 4}, at::TensorOptions(at::kFloat));
  logits[0][2] = 1;
  logits[0][3] = 1;
  EXPECT_EQ(lm::argmax(logits), (Ints{2, 0}));
  EXPECT_EQ(lm::argmax(at::full({1, 3}, -INFINITY, at::TensorOptions(at::kFloat))), (Ints{0}));
  logits[1][3] = NAN;
  EXPECT_THROW((void)lm::argmax(logits), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::lm::lm_decoder_test
