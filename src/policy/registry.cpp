// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/policy/registry.h"

#include <utility>

#include "known_policies.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/option_fields.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {
namespace {

/// The policy that decides once a prompt has ended, as the options of policy `name` say.
std::unique_ptr<KVPolicy> decoding_of(const std::string& name, const OptionValue& object,
                                      const std::filesystem::path& folder, bool uneven_heads) {
  const OptionValue* const decode = object.find("decode");
  if (decode == nullptr) return std::make_unique<Full>();
  std::unique_ptr<KVPolicy> decoding;
  try {
    decoding = policy_of(*decode, folder, uneven_heads);
  } catch (const InvalidArgument& e) {
    refuse("decode of ", name, ": ", e.what());
  }
  KVKEEP_REQUIRE(!decoding->narrows(), "policy: decode of ", name, " is ", decoding->name(),
                 ", which acts on prompts itself; allowed a policy that decides after them");
  return decoding;
}

/// Reads the options. If one that is unknown is among them, this is said rather than what is missing without it.
MakePolicy described(const KnownPolicy& known, const OptionValue& options, OptionFields& reader) {
  try {
    MakePolicy make = known.entry.describe(reader);
    reader.finish(known.entry.name);
    KVKEEP_REQUIRE(make != nullptr, "policy: describe of ", known.entry.name,
                   " returned an empty function; allowed one that makes the policy");
    return make;
  } catch (const InvalidArgument&) {
    OptionFields lister = OptionFields::lister();
    static_cast<void>(known.entry.describe(lister));
    lister.require_known(options, known.entry.name);
    throw;
  }
}

}  // namespace

PolicyInfo info_of(const KnownPolicy& known) {
  const PolicyEntry& entry = known.entry;
  OptionFields lister = OptionFields::lister();
  static_cast<void>(entry.describe(lister));
  PolicyInfo info{entry.name,
                  entry.what,
                  entry.source,
                  lister.listed(),
                  known.scorer,
                  known.allocator,
                  known.needs ? known.needs() : entry.needs,
                  entry.narrows,
                  known.chooses ? known.chooses() : std::string(),
                  known.pieces ? known.pieces() : std::string()};
  if (entry.narrows)
    info.options.push_back({"decode", "full", "a policy object",
                            "the policy that decides once the prompt has ended; in text, the part after a +"});
  return info;
}

std::unique_ptr<KVPolicy> policy_of(const OptionValue& object, const std::filesystem::path& folder, bool uneven_heads) {
  KVKEEP_REQUIRE(object.is_object(), "policy: it is ", object.shown(), "; allowed a JSON object");
  const OptionValue* const said = object.find("policy");
  KVKEEP_REQUIRE(said != nullptr && said->get<std::string>() != nullptr,
                 "policy: \"policy\" is missing or not a string; allowed one of ", known_policies().names());
  const std::string name = *said->get<std::string>();
  const KnownPolicy& known = known_policies().named(name);
  const PolicyEntry& entry = known.entry;
  OptionValue options = object;
  options.erase("policy");
  if (entry.narrows) options.erase("decode");
  OptionFields reader = OptionFields::reader(options, folder);
  reader.uneven_heads = uneven_heads;
  const MakePolicy make = described(known, options, reader);
  OptionValue resolved = reader.resolved(name);
  std::unique_ptr<KVPolicy> decoding;
  if (entry.narrows) {
    decoding = decoding_of(name, object, folder, reader.uneven_heads);
    if (decoding->name() != "full") resolved["decode"] = OptionValue::Json{decoding->to_json()};
  }
  std::unique_ptr<KVPolicy> made = make(resolved.json(), std::move(decoding));
  KVKEEP_REQUIRE(made != nullptr, "policy: what describe of ", name, " returned made null; allowed a policy");
  return made;
}

std::vector<PolicyInfo> policies() {
  std::vector<PolicyInfo> all;
  for (const KnownPolicy* known : known_policies().all()) all.push_back(info_of(*known));
  return all;
}

PolicyInfo policy_called(std::string_view name) { return info_of(known_policies().named(name)); }

std::vector<PolicyFile> files_of(const OptionValue& object, const std::filesystem::path& folder) {
  std::vector<PolicyFile> files;
  const auto text_at = [&](const std::string& option) {
    const std::size_t dot = option.find('.');
    const OptionValue* found = object.find(option.substr(0, dot));
    if (found != nullptr && dot != std::string::npos) found = found->find(option.substr(dot + 1));
    const auto* const words = found == nullptr ? nullptr : found->get<std::string>();
    return words == nullptr ? std::string() : *words;
  };
  const KnownPolicy* known = known_policies().find(text_at("policy"));
  if (known == nullptr) return files;
  for (const OptionInfo& option : info_of(*known).options) {
    if (!option.file) continue;
    const std::string named = text_at(option.name);
    if (!named.empty()) files.push_back({option.name, folder / named});
  }
  if (const OptionValue* const decode = object.find("decode"))
    for (PolicyFile& file : files_of(*decode, folder)) files.push_back(std::move(file));
  return files;
}

}  // namespace kvkeep
