// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Policies by name: from JSON, from a file, or from `name,key=value,...`; and how a program adds names of its own.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/policy/entries.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {

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
  std::string pieces = {};  ///< what it reads when a piece of a prompt has run (prefill=pieces), with default options;
                            ///< empty if it cuts none
};

/// Every policy that this build knows, with all its options.
[[nodiscard]] std::vector<PolicyInfo> policies();

/// The one of this name. Throws InvalidArgument with the nearest name, or else all, if there is none; Unsupported if
/// this build leaves it out.
[[nodiscard]] PolicyInfo policy_called(std::string_view name);

/// Makes a policy from "name,key=value,...": "ams-tova,budget=1024,window=64,preset=paper". Keys of sub-objects need no
/// prefix if only one option has the name. A policy that narrows prompts may be followed by the policy that decides
/// after them: "asl,budget=2048+ams-tova,budget=1024". Strict: an unknown key, a wrong type, a value out of range, or
/// options that contradict each other throw InvalidArgument naming the field, the value and what is allowed; so does
/// what a program registered and makes null. Well-known aliases of other projects are accepted
/// (docs/reference/policies.md lists them). Throws Unsupported for what this build leaves out, with the option of CMake
/// that has it.
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

#if KVKEEP_FILES
/// Makes a policy from a JSON object: {"policy": "ams-tova", "budget": 1024, "allocator": {"window": 64}}. Relative
/// file names in it are resolved against `folder` (empty: the current one). Errors as make_policy().
[[nodiscard]] std::unique_ptr<KVPolicy> make_policy_from_json(std::string_view json,
                                                              const std::filesystem::path& folder = {});
[[nodiscard]] std::vector<PolicyFile> files_of_policy_json(std::string_view json,
                                                           const std::filesystem::path& folder = {});

/// Reads a policy file. Throws InvalidArgument if it cannot be read.
[[nodiscard]] std::unique_ptr<KVPolicy> load_policy(const std::filesystem::path& file);
#endif

// Scorers, allocators and policies by name: how the library lists its own, and how a program adds more. What is added
// can be made, saved, restored and listed like the library's own.

/// Makes a policy from the options that were read. `json`: the policy in full, for KVPolicy::to_json. `decoding`: the
/// policy that decides once a prompt has ended; null for a policy that does not narrow.
using MakePolicy = std::function<std::unique_ptr<KVPolicy>(std::string json, std::unique_ptr<KVPolicy> decoding)>;

/// A policy that is not a scorer with an allocator.
struct PolicyEntry {
  std::string name;        ///< lower-case letters, digits and hyphens
  std::string what;        ///< one line
  std::string source;      ///< paper
  std::string needs = {};  ///< what the engine must supply besides keys and values; empty: nothing
  bool narrows = false;    ///< acts on prompts while they run, so another policy may follow after a +. If it leaves the
                           ///< rows of a layer unequal, its description sets Fields::uneven_heads
  std::function<MakePolicy(Fields&)> describe = {};  ///< reads the options
};

/// Adds a scorer: "name" is top-k by it, and "ams-name" and the like follow for every allocator that it fits. Throws
/// InvalidArgument, and adds nothing, for a name that is empty, has other characters than a-z, 0-9 and hyphens, or
/// makes a policy that exists; for an option whose name is empty, has other characters than letters, digits,
/// underscores and hyphens, is described twice, or is that of an option of every policy; and for a `make` that is empty
/// or makes null of the defaults. Any thread may add at any time; a policy can be made once this has returned. Nothing
/// is ever removed.
void register_scorer(ScorerEntry entry);
template <class S>
void register_scorer() {
  register_scorer(scorer_entry<S>());
}

/// Adds an allocator over every scorer that it fits, those added later included. The scorer that its bare name stands
/// for must exist and fit. Otherwise as above.
void register_allocator(AllocatorEntry entry);
template <class A>
void register_allocator() {
  register_allocator(allocator_entry<A>());
}

/// Adds a policy. Otherwise as above.
void register_policy(PolicyEntry entry);

}  // namespace kvkeep
