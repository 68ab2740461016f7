// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/io/model_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "kvkeep/core/error.h"
#include "message_of.h"

namespace kvkeep::io::model_config_test {
namespace {

using Json = nlohmann::json;

Json small(const std::string& model_type) {
  return {{"model_type", model_type}, {"vocab_size", 64},       {"hidden_size", 32},
          {"intermediate_size", 48},  {"num_hidden_layers", 4}, {"num_attention_heads", 4},
          {"num_key_value_heads", 2}, {"head_dim", 8},          {"max_position_embeddings", 512}};
}

ModelConfig parse(const Json& config, const std::string& generation = "") {
  return ModelConfig::parse(config.dump(), generation, "config.json");
}

template <class E>
void expect_refused(const Json& config, std::initializer_list<const char*> named) {
  try {
    (void)parse(config);
    FAIL() << "accepted " << config;
  } catch (const E& error) {
    for (const char* word : named) EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(ModelConfig, BothLayoutsOfTransformersGiveTheSameRope) {
  Json old = small("llama"), young = small("llama");
  old["rope_theta"] = 500000.0;
  old["rope_scaling"] = {{"rope_type", "llama3"},
                         {"factor", 8.0},
                         {"low_freq_factor", 1.0},
                         {"high_freq_factor", 4.0},
                         {"original_max_position_embeddings", 64}};
  young["rope_parameters"] = old["rope_scaling"];
  young["rope_parameters"]["rope_theta"] = 500000.0;
  const ModelConfig a = parse(old), b = parse(young);
  EXPECT_EQ(a.rope.theta, 500000.0);
  EXPECT_EQ(b.rope.theta, 500000.0);
  EXPECT_EQ(a.spec.rope.inv_freq, b.spec.rope.inv_freq);
}

TEST(ModelConfig, ThetaIsTenThousandOnlyWhereNoPlaceNamesIt) {
  EXPECT_EQ(parse(small("llama")).rope.theta, 10000.0);
  Json young = small("qwen3");
  young["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e6}};
  EXPECT_EQ(parse(young).rope.theta, 1e6);
  Json both = young;
  both["rope_theta"] = 1e4;
  expect_refused<InvalidArgument>(both, {"rope_theta", "rope_parameters"});
  Json inside = small("llama");
  inside["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}, {"rope_theta", 300.0}};
  EXPECT_EQ(parse(inside).rope.theta, 300.0);
}

TEST(ModelConfig, OlderFilesSayTypeInsteadOfRopeType) {
  Json config = small("qwen2");
  config["rope_theta"] = 1e6;
  config["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}};
  const ModelConfig model = parse(config);
  EXPECT_EQ(model.rope.type, RopeConfig::Type::yarn);
  EXPECT_NEAR(model.spec.rope.attention_scaling, 0.1 * std::log(4.0) + 1.0, 1e-12);
}

TEST(ModelConfig, LinearRopeDividesEveryFrequency) {
  Json config = small("llama");
  const std::vector<double> plain = parse(config).spec.rope.inv_freq;
  config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 4.0}};
  const std::vector<double> stretched = parse(config).spec.rope.inv_freq;
  for (std::size_t f = 0; f < plain.size(); ++f) EXPECT_DOUBLE_EQ(stretched[f], plain[f] / 4);
  EXPECT_DOUBLE_EQ(plain[1], std::pow(10000.0, -0.25));
}

TEST(ModelConfig, Llama3KeepsShortWavesStretchesLongOnesAndBlendsBetween) {
  RopeConfig rope{.type = RopeConfig::Type::llama3, .theta = 10000.0, .factor = 8.0, .original_max = 64};
  const RopeSpec spec = make_rope(rope, 16, 256), plain = make_rope({}, 16, 256);
  for (std::size_t f = 0; f < 8; ++f) {
    const double wave = 2 * 3.14159265358979 / plain.inv_freq[f];
    if (wave < 64 / 4.0)
      EXPECT_DOUBLE_EQ(spec.inv_freq[f], plain.inv_freq[f]);
    else if (wave > 64)
      EXPECT_DOUBLE_EQ(spec.inv_freq[f], plain.inv_freq[f] / 8);
    else
      EXPECT_TRUE(spec.inv_freq[f] > plain.inv_freq[f] / 8 && spec.inv_freq[f] < plain.inv_freq[f]);
  }
}

// Numbers of transformers 5: head_dim 64, theta 10000, factor 4, original length 2048.
TEST(ModelConfig, YarnHonoursItsOptions) {
  RopeConfig rope{.type = RopeConfig::Type::yarn, .theta = 10000.0, .factor = 4.0, .original_max = 2048};
  const RopeSpec plain = make_rope({}, 64, 8192), rounded = make_rope(rope, 64, 8192);
  // Correction range: pairs 8.06 (32 turns) and 20.1 (1 turn), rounded outwards to 8 and 21.
  EXPECT_DOUBLE_EQ(rounded.inv_freq[8], plain.inv_freq[8]);
  EXPECT_DOUBLE_EQ(rounded.inv_freq[21], plain.inv_freq[21] / 4);
  EXPECT_LT(rounded.inv_freq[9], plain.inv_freq[9]);
  rope.truncate = false;
  const RopeSpec exact = make_rope(rope, 64, 8192);
  EXPECT_NE(exact.inv_freq[9], rounded.inv_freq[9]);
  rope.mscale = 1.0;
  rope.mscale_all_dim = 0.5;
  EXPECT_NEAR(make_rope(rope, 64, 8192).attention_scaling, (0.1 * std::log(4.0) + 1) / (0.05 * std::log(4.0) + 1),
              1e-12);
  rope.attention_factor = 1.25;
  EXPECT_EQ(make_rope(rope, 64, 8192).attention_scaling, 1.25);
}

TEST(ModelConfig, YarnTakesTheLengthRatioOnlyWhereNoFactorIsWritten) {
  Json config = small("qwen2");
  config["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 2.0}, {"original_max_position_embeddings", 64}};
  EXPECT_EQ(parse(config).rope.factor, 2.0);
  config["rope_scaling"]["factor"] = nullptr;
  EXPECT_EQ(parse(config).rope.factor, 8.0);
}

TEST(ModelConfig, QwenSlidesFromItsFirstWindowLayer) {
  Json config = small("qwen2");
  config["use_sliding_window"] = true;
  config["sliding_window"] = 16;
  config["max_window_layers"] = 2;
  const ModelConfig model = parse(config);
  EXPECT_EQ(model.spec.full_layers(), (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(model.spec.layers[3].window, 16);
  config["use_sliding_window"] = false;
  EXPECT_EQ(parse(config).spec.full_layers().size(), 4U);

  Json listed = small("qwen3");
  listed["use_sliding_window"] = true;
  listed["sliding_window"] = 5;
  listed["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention", "full_attention"};
  EXPECT_EQ(parse(listed).spec.full_layers(), (std::vector<std::int32_t>{1, 3}));
  listed["use_sliding_window"] = false;
  expect_refused<InvalidArgument>(listed, {"layer 0", "sliding_window"});
  listed["layer_types"][0] = "chunked_attention";
  expect_refused<Unsupported>(listed, {"chunked_attention"});
}

TEST(ModelConfig, BiasesAndNormsFollowTheModelType) {
  EXPECT_TRUE(parse(small("qwen2")).qkv_bias);
  EXPECT_FALSE(parse(small("qwen2")).output_bias);
  EXPECT_TRUE(parse(small("qwen3")).qk_norm);
  Json llama = small("llama");
  EXPECT_FALSE(parse(llama).qkv_bias || parse(llama).output_bias || parse(llama).mlp_bias);
  llama["attention_bias"] = llama["mlp_bias"] = true;
  EXPECT_TRUE(parse(llama).qkv_bias && parse(llama).output_bias && parse(llama).mlp_bias);
}

TEST(ModelConfig, HeadSizeComesFromTheFileElseFromTheHiddenSize) {
  Json config = small("llama");
  config.erase("head_dim");
  EXPECT_EQ(parse(config).spec.key_dim, 8);
  config["hidden_size"] = 34;
  expect_refused<InvalidArgument>(config, {"head_dim", "34"});
  Json qwen3 = small("qwen3");
  qwen3.erase("head_dim");
  EXPECT_EQ(parse(qwen3).spec.key_dim, 128);  // as transformers' Qwen3
}

TEST(ModelConfig, EndTokensComeFromGenerationConfigElseFromConfig) {
  Json config = small("llama");
  EXPECT_TRUE(parse(config).end_tokens.empty());
  config["eos_token_id"] = 2;
  EXPECT_EQ(parse(config).end_tokens, (std::vector<std::int32_t>{2}));
  EXPECT_EQ(parse(config, R"({"eos_token_id": [5, 6]})").end_tokens, (std::vector<std::int32_t>{5, 6}));
  EXPECT_EQ(parse(config, R"({"top_p": 0.9})").end_tokens, (std::vector<std::int32_t>{2}));
  EXPECT_TRUE(parse(config).ends(2));
  EXPECT_FALSE(parse(config).ends(3));
}

TEST(ModelConfig, WhatHasNoCodeIsRefusedByName) {
  const auto with = [](const char* key, const Json& value) {
    Json config = small("llama");
    config[key] = value;
    return config;
  };
  expect_refused<Unsupported>(with("model_type", "mamba2"), {"mamba2", "llama, qwen2, qwen3"});
  expect_refused<Unsupported>(with("hidden_act", "gelu"), {"gelu"});
  expect_refused<Unsupported>(with("quantization_config", {{"quant_method", "awq"}}), {"quantization_config"});
  expect_refused<Unsupported>(with("rope_scaling", {{"rope_type", "longrope"}, {"factor", 2.0}}), {"longrope", "yarn"});
  expect_refused<Unsupported>(with("rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}), {"dynamic"});
  expect_refused<Unsupported>(with("partial_rotary_factor", 0.5), {"partial_rotary_factor"});
  expect_refused<Unsupported>(with("rope_parameters", {{"full_attention", {{"rope_theta", 1e4}}}}), {"full_attention"});
}

TEST(ModelConfig, MalformedFieldsAreNamed) {
  const auto with = [](const char* key, const Json& value) {
    Json config = small("llama");
    config[key] = value;
    return config;
  };
  expect_refused<InvalidArgument>(with("hidden_size", nullptr), {"hidden_size"});
  expect_refused<InvalidArgument>(with("hidden_size", "big"), {"hidden_size", "big"});
  expect_refused<InvalidArgument>(with("num_hidden_layers", 0), {"num_hidden_layers", "0"});
  expect_refused<InvalidArgument>(with("num_key_value_heads", 3), {"heads"});
  expect_refused<InvalidArgument>(with("head_dim", 7), {"head_dim", "7"});
  expect_refused<InvalidArgument>(with("rope_theta", -1.0), {"rope_theta"});
  expect_refused<InvalidArgument>(with("eos_token_id", "x"), {"eos_token_id"});
  expect_refused<InvalidArgument>(with("rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}),
                                  {"low_freq_factor", "llama3"});
  expect_refused<InvalidArgument>(with("rope_scaling", 3), {"rope_scaling"});
  expect_refused<InvalidArgument>(with("layer_types", {"full_attention"}), {"layer_types"});
  expect_refused<InvalidArgument>(Json::array(), {"config.json"});
  EXPECT_THROW((void)ModelConfig::parse("{", "", "config.json"), InvalidArgument);
  EXPECT_THROW((void)ModelConfig::read("/nowhere/at/all"), InvalidArgument);
}

TEST(ModelConfig, WhatIsWrittenReadsBack) {
  RopeConfig yarn{.type = RopeConfig::Type::yarn, .theta = 5e5, .factor = 4.0, .original_max = 128};
  ModelConfig model = ModelConfig::shape(Architecture::qwen3, 3, 32, 64, 4, 2, 8, 100, yarn);
  model.tied = true;
  model.end_tokens = {1, 7};
  model.spec.layers[1] = {LayerKind::sliding, 9, -1};
  const ModelConfig read = ModelConfig::parse(model.json("bfloat16"), "", "config.json");
  EXPECT_EQ(read.architecture, model.architecture);
  EXPECT_EQ(read.spec.rope.inv_freq, model.spec.rope.inv_freq);
  EXPECT_EQ(read.spec.rope.attention_scaling, model.spec.rope.attention_scaling);
  EXPECT_EQ(read.spec.full_layers(), model.spec.full_layers());
  EXPECT_EQ(read.end_tokens, model.end_tokens);
  EXPECT_TRUE(read.tied);
  EXPECT_EQ(read.vocab, 100);
}

TEST(ModelConfig, ReadsWhichLayersOfASmolLM3HaveNoRope) {
  const auto without = [](const Json& config) {
    const ModelConfig read = ModelConfig::parse(config.dump(), "", "config.json");
    std::vector<std::int32_t> layers;
    for (std::int32_t l = 0; l < read.num_layers(); ++l)
      if (read.spec.rope_of(l).style == RopeStyle::none) layers.push_back(l);
    return layers;
  };
  Json config = small("smollm3");
  config["num_hidden_layers"] = 9;
  EXPECT_EQ(without(config), (std::vector<std::int32_t>{3, 7}));
  config["no_rope_layer_interval"] = 3;
  EXPECT_EQ(without(config), (std::vector<std::int32_t>{2, 5, 8}));
  config["no_rope_layers"] = {1, 0, 1, 1, 1, 1, 1, 1, 0};
  EXPECT_EQ(without(config), (std::vector<std::int32_t>{1, 8}));
  const ModelConfig read = ModelConfig::parse(config.dump(), "", "config.json");
  EXPECT_EQ(without(Json::parse(read.json("float32"))), (std::vector<std::int32_t>{1, 8})) << "what is written";
  config["no_rope_layers"] = {1, 0};
  expect_refused<InvalidArgument>(config, {"no_rope_layers", "9 layers"});
  config["no_rope_layers"] = {1, 0, 1, 1, 2, 1, 1, 1, 0};
  expect_refused<InvalidArgument>(config, {"no_rope_layers", "2"});
  config.erase("no_rope_layers");
  config["no_rope_layer_interval"] = 0;
  expect_refused<InvalidArgument>(config, {"no_rope_layer_interval"});
  config["no_rope_layer_interval"] = 4;
  config["use_sliding_window"] = true;
  expect_refused<Unsupported>(config, {"use_sliding_window"});
}

// The fields of Gemma 3 270M as transformers 4.57 and 5.2 write them.
TEST(ModelConfig, ReadsGemma3InBothLayouts) {
  const Json shape{{"model_type", "gemma3_text"},
                   {"vocab_size", 262144},
                   {"hidden_size", 640},
                   {"intermediate_size", 2048},
                   {"num_hidden_layers", 18},
                   {"num_attention_heads", 4},
                   {"num_key_value_heads", 1},
                   {"head_dim", 256},
                   {"hidden_activation", "gelu_pytorch_tanh"},
                   {"query_pre_attn_scalar", 256},
                   {"max_position_embeddings", 32768},
                   {"rms_norm_eps", 1e-6},
                   {"sliding_window", 512},
                   {"final_logit_softcapping", nullptr},
                   {"attn_logit_softcapping", nullptr},
                   {"use_bidirectional_attention", false}};
  Json old = shape, young = shape;
  old["rope_theta"] = 1e6;
  old["rope_local_base_freq"] = 1e4;
  old["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8.0}};
  old["_sliding_window_pattern"] = 6;
  young["rope_parameters"] = {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 1e6}}},
                              {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}};
  for (int l = 0; l < 18; ++l)
    young["layer_types"].push_back((l + 1) % 6 == 0 ? "full_attention" : "sliding_attention");
  for (const Json& config : {old, young, Json::parse(parse(old).json("float32"))}) {
    const ModelConfig read = parse(config);
    EXPECT_EQ(read.architecture, Architecture::gemma3);
    EXPECT_EQ(read.spec.full_layers(), (std::vector<std::int32_t>{5, 11, 17}));
    EXPECT_EQ(read.spec.layers[0].window, 512);
    EXPECT_DOUBLE_EQ(read.spec.rope_of(5).inv_freq[1], std::pow(1e6, -2.0 / 256) / 8);
    EXPECT_DOUBLE_EQ(read.spec.rope_of(6).inv_freq[1], std::pow(1e4, -2.0 / 256));
    EXPECT_DOUBLE_EQ(read.spec.scale(), 1.0 / 16);
    EXPECT_DOUBLE_EQ(read.embedding_scale, std::sqrt(640.0));
    EXPECT_TRUE(read.tied && read.qk_norm && read.post_norms);
    EXPECT_EQ(read.activation, Activation::gelu_tanh);
  }
  const auto with = [&](const char* key, const Json& value) {
    Json config = old;
    config[key] = value;
    return config;
  };
  expect_refused<Unsupported>(with("final_logit_softcapping", 30.0), {"final_logit_softcapping"});
  expect_refused<Unsupported>(with("use_bidirectional_attention", true), {"use_bidirectional_attention"});
  expect_refused<Unsupported>(with("hidden_activation", "silu"), {"hidden_activation", "gelu_pytorch_tanh"});
  expect_refused<Unsupported>(with("model_type", "gemma3"), {"gemma3_text"});
  young["rope_parameters"].erase("sliding_attention");
  expect_refused<InvalidArgument>(young, {"sliding_attention"});
}

TEST(ModelConfig, RefusesFrequenciesThatAreNotFinite) {
  for (const RopeConfig& rope :
       {RopeConfig{.theta = 1e-320}, RopeConfig{.type = RopeConfig::Type::linear, .theta = 1e-200, .factor = 1e-300}}) {
    const std::string said = testing::message_of<InvalidArgument>([&] { make_rope(rope, 128, 2048); });
    EXPECT_NE(said.find("frequency of inf"), std::string::npos) << said;
  }
}

// An earlier version asked LibTorch for the room of so many layers, or looked for their tensors for minutes.
TEST(ModelConfig, RefusesMoreLayersThanAnyModelHas) {
  for (const std::int64_t layers : {std::int64_t{65537}, std::int64_t{100000000}, std::int64_t{INT32_MAX}}) {
    Json config = small("llama");
    config["num_hidden_layers"] = layers;
    expect_refused<InvalidArgument>(config, {"num_hidden_layers", "allowed 1 to 65536"});
  }
}

TEST(ModelConfig, RefusesNumbersThatWrap) {
  for (const char* name : {"vocab_size", "max_position_embeddings", "max_window_layers", "sliding_window"}) {
    Json config = small("qwen2");
    config["use_sliding_window"] = true;
    config["sliding_window"] = 16;
    config[name] = 18446744073709551615U;
    expect_refused<InvalidArgument>(config, {name, "18446744073709551615"});
  }
  Json ends = small("llama");
  ends["eos_token_id"] = 18446744073709551615U;
  expect_refused<InvalidArgument>(ends, {"eos_token_id"});
}

}  // namespace
}  // namespace kvkeep::io::model_config_test
