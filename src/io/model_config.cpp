// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/io/model_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "config_fields.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/gguf.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep::io {
namespace {

using Json = nlohmann::json;

/// Qwen2 and Qwen3 have sliding layers, Llama and SmolLM3 a bias on the MLP.
bool is_qwen(Architecture architecture) {
  return architecture == Architecture::qwen2 || architecture == Architecture::qwen3;
}

constexpr std::array<std::string_view, 4> kRopeTypes{"default", "linear", "llama3", "yarn"};

RopeConfig::Type rope_type_called(const std::string& name, const std::string& where) {
  const auto found = std::ranges::find(kRopeTypes, name);
  KVKEEP_REQUIRE_AS(Unsupported, found != kRopeTypes.end(), "read config: ", where, " has rope_type '", shortened(name),
                    "'; the decoder has code for default, linear, llama3, yarn");
  return static_cast<RopeConfig::Type>(found - kRopeTypes.begin());
}

std::string_view name_of(RopeConfig::Type type) { return kRopeTypes[static_cast<std::size_t>(type)]; }

// The base of the frequencies may be in `rope_parameters` (transformers 5), at the top level (4), or, rarely, in
// `rope_scaling`. Reading one place only would silently fall back to 10000 on a file of the other release.
double rope_theta(const ConfigFields& config, const ConfigFields& scaling, double usual) {
  const std::optional<double> outer = config.number("rope_theta"), inner = scaling.number("rope_theta");
  KVKEEP_REQUIRE(!outer || !inner || *outer == *inner, "read config: ", config.where(), " has rope_theta ",
                 outer.value_or(0), " at the top and ", inner.value_or(0), " in ", scaling.where(),
                 "; allowed one value");
  return inner ? *inner : outer.value_or(usual);
}

void refuse_partial_rotation(const ConfigFields& fields) {
  KVKEEP_REQUIRE_AS(Unsupported, fields.number("partial_rotary_factor").value_or(1.0) == 1.0,
                    "read config: ", fields.where(),
                    " has a partial_rotary_factor; the decoder rotates whole heads only");
}

// One set of parameters, `scaling`, whose base may stand in `config`, and is `usual` if it stands nowhere.
RopeConfig read_rope(const ConfigFields& config, const ConfigFields& scaling, double usual) {
  for (const auto& [key, value] : scaling.object().items())
    KVKEEP_REQUIRE_AS(Unsupported, !value.is_object(), "read config: ", scaling.where(),
                      " holds parameters by layer type ('", shortened(key),
                      "'); the decoder has one RoPE for all layers of this model type");
  refuse_partial_rotation(scaling);
  RopeConfig rope;
  rope.theta = rope_theta(config, scaling, usual);
  const std::optional<std::string> type = scaling.word("rope_type");
  rope.type = rope_type_called(type ? *type : scaling.word("type").value_or("default"), config.where());
  if (rope.type == RopeConfig::Type::standard) return rope;

  const auto needed = [&](const char* name) {
    const std::optional<double> value = scaling.number(name);
    KVKEEP_REQUIRE(value.has_value(), "read config: ", scaling.where(), " has no ", name, "; rope_type '",
                   name_of(rope.type), "' needs it");
    return *value;
  };
  rope.original_max = scaling.whole("original_max_position_embeddings").value_or(0);
  const std::int64_t longest = config.whole("max_position_embeddings").value_or(2048);
  const bool ratio_stands_in =
      rope.type == RopeConfig::Type::yarn && rope.original_max > 0 && scaling.find("factor") == nullptr;
  rope.factor =
      ratio_stands_in ? static_cast<double>(longest) / static_cast<double>(rope.original_max) : needed("factor");
  if (rope.type == RopeConfig::Type::llama3) {
    rope.low_freq_factor = needed("low_freq_factor");
    rope.high_freq_factor = needed("high_freq_factor");
    const double original = needed("original_max_position_embeddings");
    KVKEEP_REQUIRE(original >= 1 && original <= INT32_MAX, "read config: ", scaling.where(),
                   " has original_max_position_embeddings = ", original, "; allowed 1 to ", INT32_MAX);
    rope.original_max = static_cast<std::int64_t>(original);
  }
  if (rope.type == RopeConfig::Type::yarn) {
    // transformers takes 0 for "not set" in these three.
    const auto set = [&](const char* name) {
      return scaling.number(name).value_or(0.0) != 0.0 ? scaling.number(name) : std::nullopt;
    };
    rope.beta_fast = set("beta_fast").value_or(32.0);
    rope.beta_slow = set("beta_slow").value_or(1.0);
    rope.truncate = scaling.truth("truncate").value_or(true);
    rope.attention_factor = scaling.number("attention_factor");
    rope.mscale = set("mscale");
    rope.mscale_all_dim = set("mscale_all_dim");
  }
  return rope;
}

void read_ropes(const ConfigFields& config, ModelConfig& model) {
  refuse_partial_rotation(config);
  const Json* new_place = config.find("rope_parameters");
  const Json* old_place = config.find("rope_scaling");
  KVKEEP_REQUIRE(new_place == nullptr || old_place == nullptr || *new_place == *old_place,
                 "read config: ", config.where(), " has rope_parameters and another rope_scaling; allowed one of them");
  const Json* place = new_place != nullptr ? new_place : old_place;
  const bool gemma = model.architecture == Architecture::gemma3;
  // Gemma 3 in transformers 4: the bases of full and sliding layers at the top, scaling for full ones alone.
  if (gemma) model.sliding_rope = RopeConfig{.theta = config.number("rope_local_base_freq").value_or(10000.0)};
  constexpr double kUsual = 10000.0, kGemma = 1e6;
  if (place == nullptr) {
    model.rope.theta = config.number("rope_theta").value_or(gemma ? kGemma : kUsual);
    return;
  }
  const ConfigFields scaling(*place,
                             text(new_place != nullptr ? "rope_parameters" : "rope_scaling", " of ", config.where()));
  if (!gemma || scaling.find("full_attention") == nullptr) {
    model.rope = read_rope(config, scaling, gemma ? kGemma : kUsual);
    return;
  }
  const auto of = [&](const char* type, double usual) {
    const Json* own = scaling.find(type);
    KVKEEP_REQUIRE(own != nullptr, "read config: ", scaling.where(), " has no ", type,
                   "; allowed parameters for full_attention and for sliding_attention");
    const ConfigFields fields(*own, text(type, " of ", scaling.where()));
    return read_rope(fields, fields, usual);
  };
  model.rope = of("full_attention", kGemma);
  model.sliding_rope = of("sliding_attention", kUsual);
}

// transformers' SmolLM3Config: 1 in `no_rope_layers` is a layer that has RoPE.
void read_layers_without_rope(const ConfigFields& config, std::vector<LayerSpec>& layers) {
  KVKEEP_REQUIRE_AS(Unsupported, !config.truth("use_sliding_window").value_or(false), "read config: ", config.where(),
                    " has use_sliding_window; the decoder has code for a SmolLM3 without it");
  const auto count = static_cast<std::int32_t>(layers.size());
  const Json* list = config.find("no_rope_layers");
  const std::int32_t step = config.size("no_rope_layer_interval", kSmollm3Step);
  KVKEEP_REQUIRE(list == nullptr || (list->is_array() && list->size() == layers.size()),
                 "read config: no_rope_layers of ", config.where(), " must list ", count, " layers");
  for (std::int32_t l = 0; l < count; ++l) {
    const auto at = static_cast<std::size_t>(l);
    const std::optional<std::int64_t> given =
        list == nullptr ? std::optional<std::int64_t>(!is_last_of(l, step)) : whole_number((*list)[at], 0, 1);
    KVKEEP_REQUIRE(given.has_value(), "read config: no_rope_layers of ", config.where(), " holds ", shown((*list)[at]),
                   "; allowed 1 (RoPE) and 0 (none)");
    if (*given == 0) layers[at].rope = RopeSpec::absent();
  }
}

// Qwen's layers slide from `max_window_layers` up if `use_sliding_window` is set, Gemma's all but the last of each
// `sliding_window_pattern`; newer configs list `layer_types`.
std::vector<LayerSpec> read_layers(const ConfigFields& config, Architecture architecture, std::int32_t count) {
  std::vector<LayerSpec> layers(static_cast<std::size_t>(count));
  const Json* types = config.find("layer_types");
  const bool gemma = architecture == Architecture::gemma3;
  const bool slides = gemma || (is_qwen(architecture) && config.truth("use_sliding_window").value_or(false));
  const std::int32_t window = slides ? config.size("sliding_window", 4096) : 0;
  const bool has_window = gemma || (slides && config.find("sliding_window") != nullptr);
  if (types == nullptr) {
    const std::int64_t first_sliding = config.whole("max_window_layers").value_or(28);
    const std::int32_t step =
        config.size("sliding_window_pattern", config.size("_sliding_window_pattern", kGemma3Step));
    for (std::int32_t l = 0; l < count; ++l)
      if (has_window && (gemma ? !is_last_of(l, step) : l >= first_sliding))
        layers[static_cast<std::size_t>(l)] = {LayerKind::sliding, window, -1};
    return layers;
  }
  KVKEEP_REQUIRE(types->is_array() && types->size() == layers.size(), "read config: layer_types of ", config.where(),
                 " must list ", count, " layers");
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const Json& type = (*types)[l];
    if (type == "full_attention") continue;
    KVKEEP_REQUIRE_AS(Unsupported, type == "sliding_attention", "read config: layer ", l, " of ", config.where(),
                      " is of type ", shown(type), "; the decoder has code for full_attention and sliding_attention");
    KVKEEP_REQUIRE(has_window, "read config: layer ", l, " of ", config.where(),
                   " slides, but the file sets no use_sliding_window and sliding_window");
    layers[l] = {LayerKind::sliding, window, -1};
  }
  return layers;
}

void refuse_what_has_no_code(const ConfigFields& config, Architecture architecture) {
  KVKEEP_REQUIRE_AS(Unsupported, config.find("quantization_config") == nullptr, "read config: ", config.where(),
                    " has a quantization_config; the decoder reads f32, f16 and bf16 weights");
  const bool gemma = architecture == Architecture::gemma3;
  const char* field = gemma ? "hidden_activation" : "hidden_act";
  const std::string own = gemma ? "gelu_pytorch_tanh" : "silu", activation = config.word(field).value_or(own);
  KVKEEP_REQUIRE_AS(Unsupported, activation == own || (!gemma && activation == "swish"),
                    "read config: ", config.where(), " has ", field, " '", shortened(activation),
                    "'; the decoder has code for ", own);
  for (const char* cap : {"final_logit_softcapping", "attn_logit_softcapping"})
    KVKEEP_REQUIRE_AS(Unsupported, config.find(cap) == nullptr, "read config: ", config.where(), " has ", cap,
                      "; the decoder caps no logits");
  KVKEEP_REQUIRE_AS(Unsupported, !config.truth("use_bidirectional_attention").value_or(false),
                    "read config: ", config.where(),
                    " has use_bidirectional_attention; the decoder's attention is causal");
}

std::vector<std::int32_t> read_end_tokens(const ConfigFields& fields) {
  const Json* value = fields.find("eos_token_id");
  if (value == nullptr) return {};
  const Json list = value->is_array() ? *value : Json::array({*value});
  std::vector<std::int32_t> tokens;
  for (const Json& token : list) {
    const std::optional<std::int64_t> id = whole_number(token, 0, INT32_MAX);
    KVKEEP_REQUIRE(id.has_value(), "read config: ", fields.where(), " has eos_token_id ", shown(*value),
                   "; allowed a token or a list of tokens");
    tokens.push_back(static_cast<std::int32_t>(*id));
  }
  return tokens;
}

}  // namespace

void make_ropes(ModelConfig& model) {
  model.spec.rope = make_rope(model.rope, model.spec.key_dim, model.max_positions);
  if (!model.sliding_rope) return;
  const RopeSpec sliding = make_rope(*model.sliding_rope, model.spec.key_dim, model.max_positions);
  for (LayerSpec& layer : model.spec.layers)
    if (layer.kind == LayerKind::sliding) layer.rope = sliding;
}

void set_habits(ModelConfig& model, bool attention_bias, bool mlp_bias) {
  const bool qwen2 = model.architecture == Architecture::qwen2, gemma = model.architecture == Architecture::gemma3;
  model.qkv_bias = qwen2 || attention_bias;
  model.output_bias = !qwen2 && attention_bias;
  model.mlp_bias = !is_qwen(model.architecture) && !gemma && mlp_bias;
  model.qk_norm = gemma || model.architecture == Architecture::qwen3;
  model.post_norms = gemma;
  model.activation = gemma ? Activation::gelu_tanh : Activation::silu;
  model.embedding_scale = gemma ? std::sqrt(static_cast<double>(model.hidden)) : 1.0;
}

bool ModelConfig::ends(std::int32_t token) const {
  return std::find(end_tokens.begin(), end_tokens.end(), token) != end_tokens.end();
}

void ModelConfig::check() const {
  KVKEEP_REQUIRE(vocab >= 1 && hidden >= 1 && intermediate >= 1,
                 "model config: vocab, hidden and intermediate must be positive; given ", vocab, ", ", hidden, ", ",
                 intermediate);
  KVKEEP_REQUIRE(std::isfinite(rms_eps) && rms_eps >= 0,
                 "model config: rms_norm_eps must be finite and not negative; given ", rms_eps);
  KVKEEP_REQUIRE(max_positions >= 1, "model config: max_position_embeddings must be positive; given ", max_positions);
  KVKEEP_REQUIRE(spec.key_dim == spec.value_dim && spec.key_dim % 2 == 0,
                 "model config: head_dim must be even and the same for keys and values; given ", spec.key_dim, " and ",
                 spec.value_dim);
  spec.check();
}

ModelConfig ModelConfig::read(const std::filesystem::path& path) {
  require_readable(path, "read config", Source::file_or_folder);
  std::error_code none;
  if (std::filesystem::is_regular_file(path, none)) return read(GgufFile::open(path));
  const std::filesystem::path config = path / "config.json", generation = path / "generation_config.json";
  KVKEEP_REQUIRE(std::filesystem::is_directory(path, none), "read config: ", path.string(),
                 " is neither a folder nor a file; allowed a Hugging Face model folder or a GGUF file");
  return parse(read_file(config, "read config"),
               std::filesystem::exists(generation, none) ? read_file(generation, "read config") : "", config.string());
}

ModelConfig ModelConfig::parse(std::string_view config_text, std::string_view generation_text,
                               const std::string& where) {
  const Json parsed = read_json(config_text, "read config: " + where);
  const ConfigFields config(parsed, where);
  ModelConfig model;
  const std::optional<std::string> model_type = config.word("model_type");
  KVKEEP_REQUIRE(model_type.has_value(), "read config: ", where,
                 " has no model_type; the decoder has code for llama, qwen2, qwen3, smollm3");
  model.architecture = architecture_called(*model_type, where, "model_type", model_type_of);
  refuse_what_has_no_code(config, model.architecture);

  model.vocab = config.size("vocab_size");
  model.hidden = config.size("hidden_size");
  model.intermediate = config.size("intermediate_size");
  model.rms_eps = config.number("rms_norm_eps").value_or(1e-6);
  model.max_positions = config.whole("max_position_embeddings").value_or(2048);
  const bool gemma = model.architecture == Architecture::gemma3;
  model.tied = config.truth("tie_word_embeddings").value_or(gemma);
  set_habits(model, config.truth("attention_bias").value_or(false), config.truth("mlp_bias").value_or(false));

  ModelSpec& spec = model.spec;
  spec.query_heads = config.size("num_attention_heads");
  spec.kv_heads = config.size("num_key_value_heads", spec.query_heads);
  // transformers' Qwen3 and Gemma 3 do not derive head_dim: it is 128 and 256 unless the file says otherwise.
  const std::int32_t usual = model.architecture == Architecture::qwen3 ? 128 : gemma ? 256 : 0;
  KVKEEP_REQUIRE(config.find("head_dim") != nullptr || usual > 0 || model.hidden % spec.query_heads == 0,
                 "read config: ", where, " has no head_dim, and hidden_size ", model.hidden,
                 " is not a multiple of num_attention_heads ", spec.query_heads);
  spec.key_dim = config.size("head_dim", usual > 0 ? usual : model.hidden / spec.query_heads);
  spec.value_dim = spec.key_dim;
  if (gemma) spec.softmax_scale = 1 / std::sqrt(static_cast<double>(config.size("query_pre_attn_scalar", 256)));
  spec.layers = read_layers(config, model.architecture, config.size_up_to("num_hidden_layers", kMostLayers));
  if (model.architecture == Architecture::smollm3) read_layers_without_rope(config, spec.layers);
  read_ropes(config, model);
  make_ropes(model);

  if (!generation_text.empty()) {
    const std::string generation_where =
        (std::filesystem::path(where).parent_path() / "generation_config.json").string();
    const Json generation = read_json(generation_text, "read config: " + generation_where);
    model.end_tokens = read_end_tokens(ConfigFields(generation, generation_where));
  }
  if (model.end_tokens.empty()) model.end_tokens = read_end_tokens(config);
  model.check();
  return model;
}

ModelConfig ModelConfig::shape(Architecture architecture, std::int32_t layers, std::int32_t hidden,
                               std::int32_t intermediate, std::int32_t query_heads, std::int32_t kv_heads,
                               std::int32_t head_dim, std::int32_t vocab, RopeConfig rope) {
  ModelConfig model;
  model.architecture = architecture;
  model.vocab = vocab;
  model.hidden = hidden;
  model.intermediate = intermediate;
  model.rope = std::move(rope);
  set_habits(model, false, false);
  model.spec.query_heads = query_heads;
  model.spec.kv_heads = kv_heads;
  model.spec.key_dim = model.spec.value_dim = head_dim;
  model.spec.layers.resize(static_cast<std::size_t>(layers));
  if (architecture == Architecture::gemma3) {
    model.tied = true;
    model.sliding_rope = RopeConfig{};
    for (std::int32_t l = 0; l < layers; ++l)
      if (!is_last_of(l, kGemma3Step)) model.spec.layers[static_cast<std::size_t>(l)] = {LayerKind::sliding, 512, -1};
  }
  make_ropes(model);
  model.check();
  return model;
}

namespace {

constexpr std::array<const char*, kArchitectures.size()> kClasses{
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM", "Gemma3ForCausalLM"};

Json json_of(const RopeConfig& rope) {
  Json scaling{{"rope_type", name_of(rope.type)}, {"factor", rope.factor}};
  if (rope.original_max > 0) scaling["original_max_position_embeddings"] = rope.original_max;
  if (rope.type == RopeConfig::Type::llama3) {
    scaling["low_freq_factor"] = rope.low_freq_factor;
    scaling["high_freq_factor"] = rope.high_freq_factor;
  }
  if (rope.type == RopeConfig::Type::yarn) {
    scaling["beta_fast"] = rope.beta_fast;
    scaling["beta_slow"] = rope.beta_slow;
    scaling["truncate"] = rope.truncate;
    if (rope.attention_factor) scaling["attention_factor"] = *rope.attention_factor;
    if (rope.mscale) scaling["mscale"] = *rope.mscale;
    if (rope.mscale_all_dim) scaling["mscale_all_dim"] = *rope.mscale_all_dim;
  }
  return scaling;
}

}  // namespace

std::string ModelConfig::json(std::string_view dtype) const {
  KVKEEP_REQUIRE(rope.divisors.empty(),
                 "write config: RoPE has divisors of a GGUF file; config.json cannot express them");
  const bool qwen = is_qwen(architecture), gemma = architecture == Architecture::gemma3;
  Json config{{"architectures", {kClasses[static_cast<std::size_t>(architecture)]}},
              {"model_type", model_type_of(architecture)},
              {"vocab_size", vocab},
              {"hidden_size", hidden},
              {"intermediate_size", intermediate},
              {"num_hidden_layers", num_layers()},
              {"num_attention_heads", spec.query_heads},
              {"num_key_value_heads", spec.kv_heads},
              {"head_dim", spec.key_dim},
              {gemma ? "hidden_activation" : "hidden_act", gemma ? "gelu_pytorch_tanh" : "silu"},
              {"rms_norm_eps", rms_eps},
              {"max_position_embeddings", max_positions},
              {"tie_word_embeddings", tied},
              {"torch_dtype", dtype},
              {"rope_theta", rope.theta},
              {"rope_scaling", rope.type == RopeConfig::Type::standard ? Json() : json_of(rope)}};
  if (sliding_rope) config["rope_local_base_freq"] = sliding_rope->theta;
  if (architecture != Architecture::qwen2) config["attention_bias"] = qkv_bias;
  if (!qwen && !gemma) config["mlp_bias"] = mlp_bias;
  if (end_tokens.size() == 1) config["eos_token_id"] = end_tokens[0];
  if (end_tokens.size() > 1) config["eos_token_id"] = end_tokens;

  if (qwen || gemma) {
    const auto slides = [](const LayerSpec& layer) { return layer.kind == LayerKind::sliding; };
    const auto first = std::find_if(spec.layers.begin(), spec.layers.end(), slides);
    if (qwen) config["use_sliding_window"] = first != spec.layers.end();
    config["sliding_window"] = first != spec.layers.end() ? Json(first->window) : Json();
    for (const LayerSpec& layer : spec.layers)
      config["layer_types"].push_back(slides(layer) ? "sliding_attention" : "full_attention");
  }

  if (architecture == Architecture::smollm3)
    for (std::int32_t l = 0; l < num_layers(); ++l)
      config["no_rope_layers"].push_back(spec.rope_of(l).style == RopeStyle::none ? 0 : 1);

  // transformers' Gemma 3 divides by the root of this number, whatever the head's size.
  if (gemma) config["query_pre_attn_scalar"] = std::llround(1 / (spec.scale() * spec.scale()));
  return config.dump(1) + "\n";
}

}  // namespace kvkeep::io
