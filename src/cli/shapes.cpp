// SPDX-License-Identifier: Apache-2.0
#include "shapes.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/model_config.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep::cli {
namespace {

struct ModelShape {
  const char* name = "";
  double parameters = 0;  // 1e9, of the language model; 0: not told, because a token does not need all of them
  std::int32_t layers = 0, query_heads = 0, kv_heads = 0, head_dim = 0;
  std::int32_t window = 0, step = 1;  // all layers but the last of each `step` slide
};

// As the config.json of these models says.
constexpr ModelShape kShapes[] = {
    {"llama1b", 1.236, 16, 32, 8, 64},
    {"llama3b", 3.213, 28, 24, 8, 128},
    {"llama8b", 8.03, 32, 32, 8, 128},
    {"llama70b", 70.554, 80, 64, 8, 128},
    {"llama405b", 405.853, 126, 128, 8, 128},
    {"qwen7b", 7.616, 28, 28, 4, 128},
    {"qwen14b", 14.77, 48, 40, 8, 128},
    {"qwen32b", 32.764, 64, 40, 8, 128},
    {"qwen72b", 72.706, 80, 64, 8, 128},
    {"qwen3-0.6b", 0.596, 28, 16, 8, 128},
    {"qwen3-1.7b", 1.721, 28, 16, 8, 128},
    {"qwen3-4b", 4.022, 36, 32, 8, 128},
    {"qwen3-8b", 8.191, 36, 32, 8, 128},
    {"qwen3-14b", 14.768, 40, 40, 8, 128},
    {"qwen3-32b", 32.762, 64, 64, 8, 128},
    {"qwen3-30b-a3b", 0, 48, 32, 4, 128},
    {"qwen3-235b-a22b", 0, 94, 64, 4, 128},
    {"mistral7b", 7.248, 32, 32, 8, 128},
    {"phi4", 14.66, 40, 40, 10, 128},
    {"smollm2-135m", 0.135, 30, 9, 3, 64},
    {"smollm2-360m", 0.362, 32, 15, 5, 64},
    {"smollm2-1.7b", 1.711, 24, 32, 32, 64},
    {"gemma2-2b", 2.614, 26, 8, 4, 256, 4096, 2},
    {"gemma2-9b", 9.242, 42, 16, 8, 256, 4096, 2},
    {"gemma2-27b", 27.227, 46, 32, 16, 128, 4096, 2},
    {"gemma3-270m", 0.268, 18, 4, 1, 256, 512, 6},
    {"gemma3-1b", 1, 26, 4, 1, 256, 512, 6},
    {"gemma3-4b", 3.88, 34, 8, 4, 256, 1024, 6},
    {"gemma3-12b", 11.766, 48, 16, 8, 256, 1024, 6},
    {"gemma3-27b", 27.009, 62, 32, 16, 128, 1024, 6},
};
constexpr std::int32_t kMostOfAShape = 32768;

ModelSpec spec_of(const ModelShape& shape, const std::string& where) {
  KVKEEP_REQUIRE(shape.query_heads % shape.kv_heads == 0, where, ": ", shape.query_heads,
                 " query heads do not divide evenly among ", shape.kv_heads, " KV heads; allowed a multiple");
  KVKEEP_REQUIRE(shape.head_dim % 2 == 0, where, ": the head size is ", shape.head_dim, "; allowed an even number");
  ModelSpec spec = io::ModelConfig::shape(io::Architecture::qwen2, shape.layers, shape.query_heads * shape.head_dim, 1,
                                          shape.query_heads, shape.kv_heads, shape.head_dim, 1)
                       .spec;
  for (std::int32_t l = 0; l < shape.layers; ++l)
    if (shape.window > 0 && (shape.step == 0 || (l + 1) % shape.step != 0))
      spec.layers[static_cast<std::size_t>(l)] = {.kind = LayerKind::sliding, .window = shape.window};
  return spec;
}

// The fields of a config.json that say what is cached. One field has different names in different models.
class ConfigShape {
 public:
  ConfigShape(const nlohmann::json& config, std::string where) : config_(config), where_(std::move(where)) {}

  [[nodiscard]] ModelSpec read() const {
    refuse_other_caches();
    const std::string type = type_of_model();
    const bool gemma3 = type.starts_with("gemma3"), gemma = type.starts_with("gemma");
    ModelShape shape;
    shape.layers = needed({"num_hidden_layers", "n_layer", "num_layers", "n_layers"});
    // transformers' Gemma 3 and Qwen3 need not say these.
    shape.query_heads =
        gemma3 ? number({"num_attention_heads"}).value_or(8) : needed({"num_attention_heads", "n_head", "n_heads"});
    shape.kv_heads = number({"num_key_value_heads", "num_kv_heads", "n_head_kv"})
                         .value_or(gemma3                                        ? 4
                                   : config_.value("multi_query", false) == true ? 1
                                                                                 : shape.query_heads);
    if (const auto said = number({"head_dim"}))
      shape.head_dim = *said;
    else if (gemma || type.starts_with("qwen3"))
      shape.head_dim = gemma ? 256 : 128;
    else
      shape.head_dim = needed({"hidden_size", "n_embd", "d_model"}) / shape.query_heads;
    const auto window = number({"sliding_window"});
    const nlohmann::json* types = find("layer_types");
    if (types == nullptr && slides()) {
      shape.window = window.value_or(gemma3 ? 4096 : 0);
      // Every layer, but for those that a pattern leaves out.
      shape.step = number({"sliding_window_pattern", "_sliding_window_pattern"})
                       .value_or(gemma3             ? 6
                                 : type == "gemma2" ? 2
                                                    : 0);
    }
    ModelSpec spec = spec_of(shape, where_);
    if (types != nullptr) read_types(*types, window, spec);
    if (const auto first = number({"max_window_layers"}); first && types == nullptr)
      for (std::int32_t l = 0; l < std::min(*first, shape.layers); ++l) spec.layers[static_cast<std::size_t>(l)] = {};
    return spec;
  }

 private:
  [[nodiscard]] const nlohmann::json* find(const char* name) const {
    const auto found = config_.find(name);
    return found == config_.end() || found->is_null() ? nullptr : &*found;
  }

  [[nodiscard]] std::optional<std::int32_t> number(const std::vector<const char*>& names) const {
    for (const char* name : names)
      if (const nlohmann::json* value = find(name)) {
        const auto whole = io::whole_number(*value, 1, 1 << 20);
        KVKEEP_REQUIRE(whole.has_value(), where_, ": ", name, " is ", io::shown(*value), "; allowed 1 to ", 1 << 20,
                       ", the same in all layers");
        return static_cast<std::int32_t>(*whole);
      }
    return std::nullopt;
  }

  [[nodiscard]] std::int32_t needed(const std::vector<const char*>& names) const {
    const auto found = number(names);
    KVKEEP_REQUIRE(found.has_value(), where_, ": there is no ", names.front(),
                   "; allowed the config.json of a decoder, or --shape with numbers");
    return *found;
  }

  [[nodiscard]] std::string type_of_model() const {
    const nlohmann::json* type = find("model_type");
    return type != nullptr && type->is_string() ? type->get<std::string>() : "";
  }

  [[nodiscard]] bool slides() const {
    const nlohmann::json* use = find("use_sliding_window");
    if (use != nullptr) return *use == true;
    return type_of_model().starts_with("gemma3") ||
           (find("sliding_window") != nullptr && !type_of_model().starts_with("qwen"));
  }

  void refuse_other_caches() const {
    constexpr std::array<std::array<const char*, 2>, 8> kOthers{
        {{"kv_lora_rank", "latent attention"},
         {"attn_layer_period", "layers of several kinds"},
         {"hybrid_override_pattern", "layers of several kinds"},
         {"layers_block_type", "layers of several kinds"},
         {"block_configs", "layers that differ"},
         {"global_attn_every_n_layers", "layers of several kinds"},
         {"num_kv_shared_layers", "layers that share a cache"},
         {"is_encoder_decoder", "an encoder"}}};
    for (const auto& [name, what] : kOthers)
      if (const nlohmann::json* said = find(name); said != nullptr && *said != false && *said != 0)
        refuse<Unsupported>(where_, ": ", name, " says ", what,
                            "; allowed decoders whose layers have heads of one size, and --shape with numbers");
  }

  void read_types(const nlohmann::json& types, std::optional<std::int32_t> window, ModelSpec& spec) const {
    KVKEEP_REQUIRE(types.is_array() && types.size() == spec.layers.size(), where_, ": layer_types must list ",
                   spec.layers.size(), " layers");
    constexpr std::array<std::string_view, 6> kStates{"linear_attention", "mamba", "mamba2", "conv",
                                                      "recurrent",        "ssm"};
    for (std::size_t l = 0; l < types.size(); ++l) {
      const std::string type = types[l].is_string() ? types[l].get<std::string>() : "";
      if (type == "full_attention" || type == "attention") continue;
      if (std::ranges::find(kStates, type) != kStates.end()) {
        spec.layers[l] = {.kind = LayerKind::other};
        continue;
      }
      const auto held = type == "sliding_attention"   ? window
                        : type == "chunked_attention" ? number({"attention_chunk_size"})
                                                      : std::nullopt;
      KVKEEP_REQUIRE_AS(Unsupported, held.has_value(), where_, ": layer ", l, " is of type ", io::shown(types[l]),
                        "; allowed full_attention, sliding_attention with a sliding_window, chunked_attention with an "
                        "attention_chunk_size, ",
                        joined(kStates));
      spec.layers[l] = {.kind = LayerKind::sliding, .window = *held};
    }
  }

  const nlohmann::json& config_;
  std::string where_;
};

}  // namespace

std::vector<std::string> names_of_shapes() {
  std::vector<std::string> names;
  for (const ModelShape& known : kShapes) names.emplace_back(known.name);
  return names;
}

double parameters_of(const std::string& name) {
  for (const ModelShape& known : kShapes)
    if (name == known.name) return std::round(known.parameters * 1e9);
  return 0;
}

std::string known_shapes() {
  constexpr std::size_t kWidth = 116;
  std::string all, line;
  for (const std::string& name : names_of_shapes()) {
    if (line.size() + name.size() + 2 > kWidth) all += std::exchange(line, "") + "\n";
    line += text(name, ", ");
  }
  return text(all, line.substr(0, line.size() - 2));
}

bool is_shape(const std::string& given) {
  std::error_code none;
  return given.find(':') != std::string::npos || std::ranges::count(names_of_shapes(), given) > 0 ||
         !std::filesystem::exists(given, none);
}

ModelSpec shape_called(const std::string& given) {
  for (const ModelShape& known : kShapes)
    if (given == known.name) return spec_of(known, "--shape");
  std::vector<std::int32_t> numbers;
  const char *at = given.data(), *end = given.data() + given.size();
  while (at <= end && numbers.size() < 5) {
    std::int32_t number = 0;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number < 1 || number > kMostOfAShape || (next != end && *next != ':')) break;
    numbers.push_back(number);
    at = next + 1;
  }
  const std::vector<std::string> names = names_of_shapes();
  KVKEEP_REQUIRE(numbers.size() == 4 && at == end + 1, "--shape: '", given, "' is not a shape",
                 did_you_mean(given, names), "; allowed ", joined(names),
                 ", layers:query heads:KV heads:head size such as 28:28:4:128, a config.json, its folder, or a GGUF "
                 "file");
  return spec_of({"", 0, numbers[0], numbers[1], numbers[2], numbers[3]}, "--shape");
}

ModelSpec shape_in(const std::string& path, const std::string& option) {
  std::error_code none;
  const bool folder = std::filesystem::is_directory(path, none);
  const std::filesystem::path file = folder ? std::filesystem::path(path) / "config.json" : std::filesystem::path(path);
  io::require_readable(file, option);
  std::string begin(4, '\0');
  std::ifstream(file, std::ios::binary).read(begin.data(), 4);
  if (begin == "GGUF") return io::ModelConfig::read(path).spec;
  const std::string where = text(option, ": ", file.string());
  const nlohmann::json read = io::read_json(io::read_file(file, option), where);
  KVKEEP_REQUIRE(read.is_object(), where, " is not a JSON object; allowed a config.json or a GGUF file");
  // Models that see or hear have the decoder's fields in a place of their own.
  const bool inner =
      read.contains("text_config") && read["text_config"].is_object() && !read.contains("num_hidden_layers");
  return ConfigShape(inner ? read["text_config"] : read, where).read();
}

}  // namespace kvkeep::cli
