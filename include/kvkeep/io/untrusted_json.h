// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The only reader of JSON that others wrote: headers and metadata of files, configs, policies.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "kvkeep/core/error.h"

namespace kvkeep::io {

/// Nothing that is read here nests deeper, so code that walks a value may recurse: comparing, writing, flattening.
inline constexpr int kDeepestJson = 32;

/// Treatment of an object that repeats a name: the last one counts, as in transformers, or the text is refused.
enum class RepeatedNames : std::uint8_t { last_counts, refused };

struct ParsedJson {
  nlohmann::json value;  ///< null if there is a problem
  std::string problem;   ///< the rest of a sentence, such as "is not JSON in UTF-8; allowed ..."; empty: none
};

/// Reads one JSON value. Never throws because of the text. Cost: time and memory in proportion to the text.
[[nodiscard]] ParsedJson parse_json(std::string_view text, RepeatedNames names = RepeatedNames::last_counts);

/// The same for texts that must be valid. Throws InvalidArgument: `subject` and the problem.
[[nodiscard]] nlohmann::json read_json(std::string_view text, std::string_view subject,
                                       RepeatedNames names = RepeatedNames::last_counts);

/// A whole number from `least` to `most`; nothing if the value is anything else. get<std::int64_t>() would wrap 2^64 -
/// 1 to -1.
[[nodiscard]] std::optional<std::int64_t> whole_number(const nlohmann::json& value, std::int64_t least,
                                                       std::int64_t most);

/// JSON text with DEL and C1 written as `\u007f` and the like, as C0 is: only strings hold them.
[[nodiscard]] std::string without_controls(std::string json);

/// JSON text of a value whose strings may be file names, which need not be UTF-8: U+FFFD replaces the rest. No terminal
/// acts upon it.
template <class Json>
[[nodiscard]] std::string written(const Json& value, int indent = -1) {
  return without_controls(value.dump(indent, ' ', false, Json::error_handler_t::replace));
}

/// The text as JSON and safetensors can store it, and whether that changes nothing.
[[nodiscard]] std::string in_utf8(const std::string& bytes);
[[nodiscard]] inline bool is_utf8(const std::string& bytes) { return in_utf8(bytes) == bytes; }

[[nodiscard]] inline std::string shown(const nlohmann::json& value) { return shortened(written(value)); }

}  // namespace kvkeep::io
