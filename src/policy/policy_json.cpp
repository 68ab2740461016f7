// SPDX-License-Identifier: Apache-2.0
// Policies from JSON and from files.

#include <utility>

#include "known_policies.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep {
namespace {

OptionValue value_of(const nlohmann::json& json) {
  if (json.is_object()) {
    OptionValue made = OptionValue::object();
    for (const auto& [name, value] : json.items()) made[name] = value_of(value);
    return made;
  }
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_string()) return json.get<std::string>();
  if (const auto whole = io::whole_number(json, INT64_MIN, INT64_MAX)) return *whole;
  if (json.is_number()) return json.get<double>();
  return OptionValue::Json{io::written(json)};
}

}  // namespace

std::unique_ptr<KVPolicy> make_policy_from_json(std::string_view text, const std::filesystem::path& folder) {
  const io::ParsedJson parsed = io::parse_json(text, io::RepeatedNames::refused);
  KVKEEP_REQUIRE(parsed.problem.empty(), "policy: this ", parsed.problem,
                 ", an object such as {\"policy\": \"ams-tova\", \"budget\": 1024}");
  return policy_of(value_of(parsed.value), folder);
}

std::vector<PolicyFile> files_of_policy_json(std::string_view text, const std::filesystem::path& folder) {
  return files_of(value_of(io::parse_json(text, io::RepeatedNames::refused).value), folder);
}

std::unique_ptr<KVPolicy> load_policy(const std::filesystem::path& file) {
  const std::string text = io::read_file(file, "policy");
  try {
    return make_policy_from_json(text, file.parent_path());
  } catch (const InvalidArgument& e) {
    refuse(file.string(), ": ", e.what());
  }
}

}  // namespace kvkeep
