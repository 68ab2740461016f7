#include "kvkeep/policy/registry.h"

#include <algorithm>
#include <utility>

#include "json_fields.h"
#include "known_policies.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/untrusted_json.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {
namespace {

/// The policy that decides once a prompt has ended, as the options of policy `name` say.
std::unique_ptr<KVPolicy> decoding_of(const std::string& name, const nlohmann::json& object,
                                      const std::filesystem::path& folder, bool uneven_heads) {
  if (!object.contains("decode")) return std::make_unique<Full>();
  std::unique_ptr<KVPolicy> decoding;
  try {
    decoding = policy_of(object["decode"], folder, uneven_heads);
  } catch (const InvalidArgument& e) {
    refuse("decode of ", name, ": ", e.what());
  }
  KVKEEP_REQUIRE(!decoding->narrows(), "policy: decode of ", name, " is ", decoding->name(),
                 ", which acts on prompts itself; allowed a policy that decides after them");
  return decoding;
}

/// Reads the options. If one that is unknown is among them, this is said rather than what is missing without it.
MakePolicy described(const KnownPolicy& known, const nlohmann::json& options, JsonFields& reader) {
  try {
    MakePolicy make = known.entry.describe(reader);
    reader.finish(known.entry.name);
    return make;
  } catch (const InvalidArgument&) {
    JsonFields lister = JsonFields::lister();
    static_cast<void>(known.entry.describe(lister));
    lister.require_known(options, known.entry.name);
    throw;
  }
}

}  // namespace

PolicyInfo info_of(const KnownPolicy& known) {
  const PolicyEntry& entry = known.entry;
  JsonFields lister = JsonFields::lister();
  static_cast<void>(entry.describe(lister));
  PolicyInfo info{entry.name,
                  entry.what,
                  entry.source,
                  lister.listed(),
                  known.scorer,
                  known.allocator,
                  known.needs ? known.needs() : entry.needs,
                  entry.narrows,
                  known.chooses ? known.chooses() : std::string()};
  if (entry.narrows)
    info.options.push_back({"decode", "full", "a policy object",
                            "the policy that decides once the prompt has ended; in text, the part after a +"});
  return info;
}

std::unique_ptr<KVPolicy> policy_of(const nlohmann::json& object, const std::filesystem::path& folder,
                                    bool uneven_heads) {
  KVKEEP_REQUIRE(object.is_object(), "policy: the file holds ", object.type_name(), "; allowed a JSON object");
  KVKEEP_REQUIRE(object.contains("policy") && object["policy"].is_string(),
                 "policy: \"policy\" is missing or not a string; allowed one of ", known_policies().names());
  const auto name = object["policy"].get<std::string>();
  const KnownPolicy& known = known_policies().named(name);
  const PolicyEntry& entry = known.entry;
  nlohmann::json options = object;
  options.erase("policy");
  if (entry.narrows) options.erase("decode");
  JsonFields reader = JsonFields::reader(options, folder);
  reader.uneven_heads = uneven_heads;
  const MakePolicy make = described(known, options, reader);
  nlohmann::ordered_json resolved = {{"policy", name}};
  resolved.update(reader.resolved());
  std::unique_ptr<KVPolicy> decoding;
  if (entry.narrows) {
    decoding = decoding_of(name, object, folder, reader.uneven_heads);
    if (decoding->name() != "full") resolved["decode"] = nlohmann::ordered_json::parse(decoding->to_json());
  }
  return make(io::written(resolved), std::move(decoding));
}

std::vector<PolicyInfo> policies() {
  std::vector<PolicyInfo> all;
  for (const KnownPolicy* known : known_policies().all()) all.push_back(info_of(*known));
  return all;
}

std::unique_ptr<KVPolicy> make_policy_from_json(std::string_view text, const std::filesystem::path& folder) {
  const io::ParsedJson parsed = io::parse_json(text, io::RepeatedNames::refused);
  KVKEEP_REQUIRE(parsed.problem.empty(), "policy: this ", parsed.problem,
                 ", an object such as {\"policy\": \"ams-tova\", \"budget\": 1024}");
  return policy_of(parsed.value, folder);
}

std::vector<PolicyFile> files_of(const nlohmann::json& object, const std::filesystem::path& folder) {
  std::vector<PolicyFile> files;
  const auto text_at = [&](std::string option) {
    std::ranges::replace(option, '.', '/');
    const nlohmann::json::json_pointer place("/" + option);
    return object.contains(place) && object.at(place).is_string() ? object.at(place).get<std::string>() : std::string();
  };
  const KnownPolicy* known = known_policies().find(text_at("policy"));
  if (known == nullptr) return files;
  for (const OptionInfo& option : info_of(*known).options) {
    if (!option.file) continue;
    const std::string named = text_at(option.name);
    if (!named.empty()) files.push_back({option.name, folder / named});
  }
  if (object.contains("decode"))
    for (PolicyFile& file : files_of(object["decode"], folder)) files.push_back(std::move(file));
  return files;
}

std::vector<PolicyFile> files_of_policy_json(std::string_view text, const std::filesystem::path& folder) {
  return files_of(io::parse_json(text, io::RepeatedNames::refused).value, folder);
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
