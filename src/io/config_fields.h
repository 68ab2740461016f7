// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Typed reading of one JSON object. Errors name the file and the field.

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "kvkeep/core/error.h"
#include "kvkeep/io/model_config.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep::io {

inline constexpr std::int32_t kMostLayers = 1 << 16;

inline constexpr std::array<std::string_view, 5> kArchitectures{"llama", "qwen2", "qwen3", "smollm3", "gemma3"};
inline std::string_view name_of(Architecture architecture) {
  return kArchitectures[static_cast<std::size_t>(architecture)];
}

/// `model_type` of config.json. Gemma 3's text models have one of their own: `gemma3` names those that see images.
inline std::string_view model_type_of(Architecture architecture) {
  return architecture == Architecture::gemma3 ? "gemma3_text" : name_of(architecture);
}

/// The architecture that `field` of a file names in the words of `name_of`. Throws Unsupported, naming it, for one that
/// the decoder has no code for.
inline Architecture architecture_called(std::string_view name, const std::string& where, std::string_view field,
                                        std::string_view (*name_of)(Architecture)) {
  std::string known;
  for (std::size_t i = 0; i < kArchitectures.size(); ++i) {
    const auto one = static_cast<Architecture>(i);
    if (name == name_of(one)) return one;
    known += text(known.empty() ? "" : ", ", name_of(one));
  }
  refuse<Unsupported>("read config: ", where, " has ", field, " '", shortened(name), "'; the decoder has code for ",
                      known);
}

/// Gemma 3: every `kGemma3Step`-th layer is full, unless a file says otherwise; the others slide.
inline constexpr std::int32_t kGemma3Step = 6;

/// SmolLM3: every `kSmollm3Step`-th layer has no RoPE, unless config.json lists others. GGUF files do not say it.
inline constexpr std::int32_t kSmollm3Step = 4;

/// The last of each `step` layers.
inline bool is_last_of(std::int32_t layer, std::int32_t step) { return (layer + 1) % step == 0; }

/// What follows from the architecture alone.
void set_habits(ModelConfig& model, bool attention_bias, bool mlp_bias);

/// RoPE of `model.spec`, and of its sliding layers where it differs, from `rope` and `sliding_rope`.
void make_ropes(ModelConfig& model);

class ConfigFields {
 public:
  ConfigFields(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {
    KVKEEP_REQUIRE(object_.is_object(), "read config: ", where_, " is not a JSON object");
  }

  [[nodiscard]] const std::string& where() const { return where_; }
  [[nodiscard]] const nlohmann::json& object() const { return object_; }

  /// The value, or null if it is missing or null: transformers writes null for "not set".
  [[nodiscard]] const nlohmann::json* find(const char* name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  [[nodiscard]] std::optional<std::int64_t> whole(const char* name) const {
    const nlohmann::json* value = find(name);
    if (value == nullptr) return std::nullopt;
    const std::optional<std::int64_t> number = whole_number(*value, INT64_MIN, INT64_MAX);
    KVKEEP_REQUIRE(number.has_value(), complaint(name, *value), "a whole number below 2^63");
    return number;
  }

  [[nodiscard]] std::optional<double> number(const char* name) const {
    return typed<double>(name, &nlohmann::json::is_number, "a number");
  }
  [[nodiscard]] std::optional<bool> truth(const char* name) const {
    return typed<bool>(name, &nlohmann::json::is_boolean, "true or false");
  }
  [[nodiscard]] std::optional<std::string> word(const char* name) const {
    return typed<std::string>(name, &nlohmann::json::is_string, "a string");
  }

  /// A size of the model: required, 1 to 2^31 - 1 or `most`.
  [[nodiscard]] std::int32_t size_up_to(const char* name, std::int32_t most) const {
    KVKEEP_REQUIRE(find(name) != nullptr, "read config: ", where_, " has no ", name, "; a decoder needs it");
    return checked_size(name, *whole(name), most);
  }
  [[nodiscard]] std::int32_t size(const char* name) const { return size_up_to(name, INT32_MAX); }

  [[nodiscard]] std::int32_t size(const char* name, std::int32_t fallback) const {
    const std::optional<std::int64_t> value = whole(name);
    return value ? checked_size(name, *value, INT32_MAX) : fallback;
  }

 private:
  template <class T>
  [[nodiscard]] std::optional<T> typed(const char* name, bool (nlohmann::json::*is)() const,
                                       const char* allowed) const {
    const nlohmann::json* value = find(name);
    if (value == nullptr) return std::nullopt;
    KVKEEP_REQUIRE((value->*is)(), complaint(name, *value), allowed);
    return value->get<T>();
  }
  [[nodiscard]] std::string complaint(const char* name, const nlohmann::json& value) const {
    return text("read config: ", where_, " has ", name, " = ", shown(value), "; allowed ");
  }
  [[nodiscard]] std::int32_t checked_size(const char* name, std::int64_t value, std::int32_t most) const {
    KVKEEP_REQUIRE(value >= 1 && value <= most, "read config: ", where_, " has ", name, " = ", value, "; allowed 1 to ",
                   most);
    return static_cast<std::int32_t>(value);
  }

  const nlohmann::json& object_;
  std::string where_;
};

}  // namespace kvkeep::io
