// SPDX-License-Identifier: Apache-2.0
/// A model's config from the metadata of its GGUF file.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config_fields.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/gguf.h"

namespace kvkeep::io {
namespace {

/// Keys of the file's architecture, by what follows its name.
class GgufFields {
 public:
  GgufFields(const GgufFile& file, std::string_view architecture) : file_(file), prefix_(text(architecture, ".")) {}

  [[nodiscard]] std::string key(std::string_view name) const { return prefix_ + std::string(name); }
  [[nodiscard]] bool has(std::string_view name) const { return file_.has_key(key(name)); }

  /// 1 to `most`. Required.
  [[nodiscard]] std::int32_t size(std::string_view name, std::int32_t most = INT32_MAX) const {
    const std::uint64_t value = file_.whole_number(key(name));
    KVKEEP_REQUIRE(value >= 1 && value <= static_cast<std::uint64_t>(most), "read config: ", file_.where(), " has ",
                   key(name), " = ", value, "; allowed 1 to ", most);
    return static_cast<std::int32_t>(value);
  }
  [[nodiscard]] std::int32_t size_or(std::string_view name, std::int32_t fallback) const {
    return has(name) ? size(name) : fallback;
  }

  [[nodiscard]] double number_or(std::string_view name, double fallback) const {
    return has(name) ? file_.number(key(name)) : fallback;
  }

  /// The decoder has no code for the key, unless its value is `neutral`.
  void refuse_unless(std::string_view name, double neutral, std::string_view reason) const {
    KVKEEP_REQUIRE_AS(Unsupported, number_or(name, neutral) == neutral, "read config: ", file_.where(), " has ",
                      key(name), " = ", file_.number(key(name)), "; ", reason);
  }
  void refuse_any(std::string_view name, std::string_view reason) const {
    KVKEEP_REQUIRE_AS(Unsupported, !has(name) || file_.whole_number(key(name)) == 0, "read config: ", file_.where(),
                      " has ", key(name), "; ", reason);
  }

 private:
  const GgufFile& file_;
  std::string prefix_;
};

/// The shape of a tensor that states a size. It must have `dimensions` dimensions.
const std::vector<std::int64_t>& shape_of(const GgufFile& file, std::string_view name, std::size_t dimensions) {
  KVKEEP_REQUIRE(file.has(name), "read config: ", file.where(), " has no tensor '", name, "'; a decoder needs it");
  const auto& shape = file.described(name).shape;
  KVKEEP_REQUIRE(shape.size() == dimensions &&
                     std::all_of(shape.begin(), shape.end(), [](std::int64_t n) { return n >= 1 && n <= INT32_MAX; }),
                 "read config: tensor '", name, "' in ", file.where(), " has shape ", Shape(shape), "; allowed ",
                 dimensions, " sizes from 1 to ", INT32_MAX);
  return shape;
}

std::vector<double> read_divisors(const GgufFile& file, std::int32_t head_dim) {
  constexpr std::string_view kName = "rope_freqs.weight";
  if (!file.has(kName)) return {};
  const auto& shape = shape_of(file, kName, 1);
  KVKEEP_REQUIRE(shape[0] == head_dim / 2, "read config: tensor '", kName, "' in ", file.where(), " has ", shape[0],
                 " divisors; allowed ", head_dim / 2, ", half of the head size");
  const kvkeep::Tensor divisors = file.tensor(kName);
  const float* data = divisors.data<float>();
  return {data, data + divisors.numel()};
}

// Source of what Gemma 3 files leave out: llama.cpp, src/models/gemma3.cpp.
void read_gemma3(const GgufFields& fields, ModelConfig& model) {
  fields.refuse_unless("final_logit_softcapping", 0.0, "the decoder caps no logits");
  const std::int32_t window = fields.size("attention.sliding_window"),
                     step = fields.size_or("attention.sliding_window_pattern", kGemma3Step);
  ModelSpec& spec = model.spec;
  for (std::int32_t l = 0; l < spec.num_layers(); ++l)
    if (!is_last_of(l, step)) spec.layers[static_cast<std::size_t>(l)] = {LayerKind::sliding, window, -1};
  model.sliding_rope = RopeConfig{.theta = fields.number_or("rope.freq_base_swa", 10000.0)};
  constexpr std::int32_t kLayersOf27B = 62;  // its queries are scaled by the width of the model by heads
  if (spec.num_layers() == kLayersOf27B)
    spec.softmax_scale = 1 / std::sqrt(static_cast<double>(model.hidden / spec.query_heads));
}

RopeConfig read_rope(const GgufFile& file, const GgufFields& fields, std::int32_t head_dim) {
  const std::int32_t rotated = fields.size_or("rope.dimension_count", head_dim);
  KVKEEP_REQUIRE_AS(Unsupported, rotated == head_dim, "read config: ", file.where(), " rotates ", rotated, " of ",
                    head_dim, " numbers of a head; the decoder rotates whole heads only");
  RopeConfig rope;
  rope.theta = fields.number_or("rope.freq_base", 10000.0);
  rope.divisors = read_divisors(file, head_dim);
  // Older files have only a factor, which is linear; 0 means none.
  const double factor = fields.number_or("rope.scaling.factor", fields.number_or("rope.scale_linear", 0.0));
  const std::string type(fields.has("rope.scaling.type") ? file.string(fields.key("rope.scaling.type")) : "linear");
  if (type == "none" || (factor == 0.0 && type == "linear")) return rope;
  KVKEEP_REQUIRE_AS(Unsupported, type == "linear" || type == "yarn", "read config: ", file.where(), " has ",
                    fields.key("rope.scaling.type"), " '", shortened(type),
                    "'; the decoder has code for none, linear, yarn");
  rope.factor = factor == 0.0 ? 1.0 : factor;
  rope.type = type == "linear" ? RopeConfig::Type::linear : RopeConfig::Type::yarn;
  if (rope.type == RopeConfig::Type::linear) return rope;
  rope.original_max = fields.size_or("rope.scaling.original_context_length", 0);
  rope.beta_fast = fields.number_or("rope.scaling.yarn_beta_fast", 32.0);
  rope.beta_slow = fields.number_or("rope.scaling.yarn_beta_slow", 1.0);
  constexpr std::string_view kReason = "the decoder has code for YaRN as transformers has it";
  fields.refuse_unless("rope.scaling.attn_factor", 1.0, kReason);
  fields.refuse_unless("rope.scaling.yarn_attn_factor", 1.0, kReason);
  fields.refuse_unless("rope.scaling.yarn_ext_factor", 1.0, kReason);
  fields.refuse_unless("rope.scaling.yarn_log_multiplier", 0.0, kReason);
  return rope;
}

// The tokens that end a text or a turn.
std::vector<std::int32_t> read_end_tokens(const GgufFile& file) {
  std::vector<std::int32_t> tokens;
  for (const std::string_view key :
       {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (!file.has_key(key)) continue;
    const std::uint64_t token = file.whole_number(key);
    KVKEEP_REQUIRE(token <= INT32_MAX, "read config: ", file.where(), " has ", key, " = ", token, "; allowed 0 to ",
                   INT32_MAX);
    if (std::find(tokens.begin(), tokens.end(), token) == tokens.end())
      tokens.push_back(static_cast<std::int32_t>(token));
  }
  return tokens;
}

void refuse_what_has_no_code(const GgufFile& file, const GgufFields& fields) {
  KVKEEP_REQUIRE_AS(
      Unsupported, !file.has_key("split.count") || file.whole_number("split.count") <= 1, "read config: ", file.where(),
      " is one of several files of its model; allowed a model in one file (llama-gguf-split --merge makes it)");
  fields.refuse_any("expert_count", "the decoder has no code for mixtures of experts");
  fields.refuse_unless("attention.scale", 0.0, "the decoder scales by 1 / sqrt(head size)");
}

}  // namespace

ModelConfig ModelConfig::read(const GgufFile& file) {
  const std::string_view architecture = file.string("general.architecture");
  ModelConfig model;
  model.architecture = architecture_called(architecture, file.where(), "general.architecture", name_of);
  const GgufFields fields(file, architecture);
  refuse_what_has_no_code(file, fields);
  const bool gemma = model.architecture == Architecture::gemma3;
  if (!gemma) fields.refuse_any("attention.sliding_window", "the decoder cannot tell which layers slide");

  const auto& embedding = shape_of(file, "token_embd.weight", 2);
  model.vocab = static_cast<std::int32_t>(embedding[0]);
  model.hidden = fields.size("embedding_length");
  KVKEEP_REQUIRE(embedding[1] == model.hidden, "read config: tensor 'token_embd.weight' in ", file.where(),
                 " has rows of ", embedding[1], " numbers; ", fields.key("embedding_length"), " says ", model.hidden);
  model.intermediate = fields.size("feed_forward_length");
  model.max_positions = fields.size("context_length");
  model.rms_eps = file.number(fields.key("attention.layer_norm_rms_epsilon"));
  model.tied = !file.has("output.weight");
  set_habits(model, file.has("blk.0.attn_q.bias"), file.has("blk.0.ffn_gate.bias"));
  model.output_bias = file.has("blk.0.attn_output.bias");

  ModelSpec& spec = model.spec;
  spec.query_heads = fields.size("attention.head_count");
  spec.kv_heads = fields.size_or("attention.head_count_kv", spec.query_heads);
  KVKEEP_REQUIRE(fields.has("attention.key_length") || model.hidden % spec.query_heads == 0,
                 "read config: ", file.where(), " has no ", fields.key("attention.key_length"), ", and ",
                 fields.key("embedding_length"), " ", model.hidden, " is not a multiple of ",
                 fields.key("attention.head_count"), " ", spec.query_heads);
  const std::int32_t derived = std::max(model.hidden / spec.query_heads, 1);
  spec.key_dim = fields.size_or("attention.key_length", derived);
  spec.value_dim = fields.size_or("attention.value_length", derived);
  // The file's head size must agree with its tensors before anything of that size is made.
  const std::int64_t rows = shape_of(file, "blk.0.attn_q.weight", 2)[0];
  KVKEEP_REQUIRE(rows == std::int64_t{spec.query_heads} * spec.key_dim, "read config: tensor 'blk.0.attn_q.weight' in ",
                 file.where(), " has ", rows, " rows; its metadata ask for ", spec.query_heads, " heads of ",
                 spec.key_dim);
  KVKEEP_REQUIRE_AS(Unsupported, spec.key_dim == spec.value_dim, "read config: ", file.where(), " has keys of ",
                    spec.key_dim, " numbers and values of ", spec.value_dim,
                    "; the decoder has code for heads of one size");
  spec.layers.resize(static_cast<std::size_t>(fields.size("block_count", kMostLayers)));
  for (std::int32_t l = 0; model.architecture == Architecture::smollm3 && l < spec.num_layers(); ++l)
    if (is_last_of(l, kSmollm3Step)) spec.layers[static_cast<std::size_t>(l)].rope = RopeSpec::absent();
  if (gemma) read_gemma3(fields, model);
  model.rope = read_rope(file, fields, spec.key_dim);
  make_ropes(model);
  model.end_tokens = read_end_tokens(file);
  model.check();
  return model;
}

}  // namespace kvkeep::io
