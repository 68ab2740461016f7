// SPDX-License-Identifier: Apache-2.0
#pragma once
/// One line of a file of samples, and how its fields are read.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"
#include "kvlab/samples.h"

namespace kvkeep::lm {

inline constexpr std::int64_t kMostNewTokens = 65536;

/// A JSON object with its place in a file. Fields that are missing or of another type throw InvalidArgument.
class SampleLine {
 public:
  SampleLine(nlohmann::json fields, std::string where) : fields_(std::move(fields)), where_(std::move(where)) {}

  [[nodiscard]] bool has(std::string_view key) const {  // null counts as not there
    const auto at = fields_.find(key);
    return at != fields_.end() && !at->is_null();
  }
  [[nodiscard]] const nlohmann::json& fields() const { return fields_; }
  [[nodiscard]] const std::string& where() const { return where_; }  ///< "read samples: x.jsonl, line 3"

  /// Throws: "read samples: x.jsonl, line 3: <said>".
  template <class... Said>
  void require(bool holds, const Said&... said) const {
    KVKEEP_REQUIRE(holds, where_, ": ", said...);
  }

  /// Not empty unless `may_be_empty`.
  [[nodiscard]] std::string string(std::string_view key, bool may_be_empty = false) const {
    const nlohmann::json& value = field(key);
    require(value.is_string(), key, " is no string; given ", io::shown(value), "; allowed a string");
    require(may_be_empty || !value.get_ref<const std::string&>().empty(), key, " is empty; given \"\"; allowed text");
    return value.get<std::string>();
  }
  [[nodiscard]] std::string string_or(std::string_view key, std::string otherwise) const {
    return has(key) ? string(key, true) : otherwise;
  }
  /// A string or a number.
  [[nodiscard]] std::string word(std::string_view key) const {
    const nlohmann::json& value = field(key);
    return value.is_number() ? value.dump() : string(key);
  }
  /// Strings or numbers, or one of them; each but an empty one.
  [[nodiscard]] std::vector<std::string> strings(std::string_view key) const {
    const nlohmann::json& value = field(key);
    if (!value.is_array()) return {word(key)};
    std::vector<std::string> all;
    for (const nlohmann::json& one : value) {
      require(one.is_number() || (one.is_string() && !one.get_ref<const std::string&>().empty()), key,
              " has an item that is no text; given ", io::shown(one), "; allowed strings that are not empty");
      all.push_back(one.is_string() ? one.get<std::string>() : one.dump());
    }
    require(!all.empty(), key, " is empty; given []; allowed one string or more");
    return all;
  }
  [[nodiscard]] bool truth(std::string_view key) const {
    if (!has(key)) return false;
    require(fields_.at(std::string(key)).is_boolean(), key, " is neither true nor false; given ",
            io::shown(fields_.at(std::string(key))), "; allowed true, false");
    return fields_.at(std::string(key)).get<bool>();
  }
  [[nodiscard]] std::int32_t new_tokens() const {
    const std::optional<std::int64_t> tokens = io::whole_number(field("max_new_tokens"), 1, kMostNewTokens);
    require(tokens.has_value(), "max_new_tokens is out of range; given ", io::shown(field("max_new_tokens")),
            "; allowed 1 to ", kMostNewTokens);
    return static_cast<std::int32_t>(*tokens);
  }

 private:
  [[nodiscard]] const nlohmann::json& field(std::string_view key) const {
    require(has(key), key, " is missing; given ", fields_.contains(key) ? "null" : "nothing", "; allowed a value");
    return *fields_.find(key);
  }

  nlohmann::json fields_;
  std::string where_;
};

/// A line of a published form; `name` is the task if the line names none.
[[nodiscard]] Sample published_sample(SampleForm form, const SampleLine& line, const std::string& name,
                                      const PromptTemplates& templates);

}  // namespace kvkeep::lm
