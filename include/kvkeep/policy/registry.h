#pragma once
/// Policies by name: from JSON, from a file, or from `name,key=value,...`.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {

/// One option of a policy, for display.
struct OptionInfo {
  std::string name;      ///< as in JSON, with its sub-object: "allocator.window"
  std::string fallback;  ///< default; "required" if there is none
  std::string allowed;   ///< range or choices
  std::string what;      ///< one line
  bool file = false;     ///< it names a file
};

struct PolicyInfo {
  std::string name;
  std::string what;    ///< one line
  std::string source;  ///< paper
  std::vector<OptionInfo> options;
  std::string scorer = {};     ///< the name after "ams-" and similar prefixes, or the policy's own name; empty: `full`
  std::string allocator = {};  ///< "ams" and similar; empty: top-k
  std::string needs = {};      ///< what the engine must supply besides keys and values, with default options
  bool narrows = false;        ///< acts on prompts while they run
  std::string chooses = {};    ///< how many slots of some budgets the scorer chooses, with default options; empty if
                               ///< the policy has no scorer
};

/// Every policy that this build knows, with all its options.
[[nodiscard]] std::vector<PolicyInfo> policies();

/// Makes a policy from a JSON object: {"policy": "ams-tova", "budget": 1024, "allocator": {"window": 64}}. Strict: an
/// unknown key, a wrong type, a value out of range, or options that contradict each other throw InvalidArgument naming
/// the field, the value and what is allowed. Well-known aliases of other projects are accepted
/// (docs/reference/policies.md lists them). Relative file names in it are resolved against `folder` (empty: the current
/// one).
[[nodiscard]] std::unique_ptr<KVPolicy> make_policy_from_json(std::string_view json,
                                                              const std::filesystem::path& folder = {});

/// Makes a policy from "name,key=value,...": "ams-tova,budget=1024,window=64,preset=paper". Keys of sub-objects need no
/// prefix if only one option has the name. A policy that narrows prompts may be followed by the policy that decides
/// after them: "asl,budget=2048+ams-tova,budget=1024". Errors as above.
[[nodiscard]] std::unique_ptr<KVPolicy> make_policy(std::string_view text);

/// The part before the + of "prefill+decode"; all of `text` if no policy follows a +.
[[nodiscard]] std::string_view prefill_part(std::string_view text);

/// A file that an option of a policy names, which is read.
struct PolicyFile {
  std::string option;  ///< as in OptionInfo
  std::filesystem::path path;
};

/// The files that a policy names, which is not made: none of them is opened. None for a text that make_policy() or
/// make_policy_from_json() refuses before it comes to them.
[[nodiscard]] std::vector<PolicyFile> files_of_policy(std::string_view text);
[[nodiscard]] std::vector<PolicyFile> files_of_policy_json(std::string_view json,
                                                           const std::filesystem::path& folder = {});

/// Reads a policy file. Throws InvalidArgument if it cannot be read.
[[nodiscard]] std::unique_ptr<KVPolicy> load_policy(const std::filesystem::path& file);

}  // namespace kvkeep
