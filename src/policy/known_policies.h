// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Every policy by its name: the library's own, and those that were added.

#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/policy/option_value.h"
#include "kvkeep/policy/registry.h"

namespace kvkeep {

struct KnownPolicy {
  PolicyEntry entry;
  std::string scorer = {}, allocator = {};    ///< as PolicyInfo
  std::function<std::string()> needs = {};    ///< in words, instead of entry.needs
  std::function<std::string()> chooses = {};  ///< as PolicyInfo
  std::function<std::string()> pieces = {};   ///< the same
};

/// Policies are never removed, so pointers to them stay valid. Thread-safe.
class KnownPolicies {
 public:
  KnownPolicies();  ///< the library's own
  void add(PolicyEntry entry);
  void add(ScorerEntry entry);
  void add(AllocatorEntry entry);
  [[nodiscard]] std::vector<const KnownPolicy*> all() const;
  [[nodiscard]] std::string names() const;
  /// Throws InvalidArgument with the nearest name, or else all, if there is none of this name; Unsupported if this
  /// build leaves it out.
  [[nodiscard]] const KnownPolicy& named(std::string_view name) const;
  [[nodiscard]] const KnownPolicy* find(std::string_view name) const;

 private:
  /// Throws InvalidArgument if `name` is an allocator's over a scorer's that it does not go with.
  void refuse_misfit(std::string_view name) const;
  [[nodiscard]] std::vector<std::string> policies_under(std::string_view allocator) const;
  /// Adds what `name` makes, or throws if `name` or a name that it makes is taken.
  void add(std::string_view operation, std::string_view name, std::vector<KnownPolicy> more);

  bool complete_ = false;  ///< the library's own are all there
  mutable std::mutex mutex_;
  std::vector<ScorerEntry> scorers_;
  std::vector<AllocatorEntry> allocators_;
  std::deque<KnownPolicy> policies_;
};

/// All of this process.
[[nodiscard]] KnownPolicies& known_policies();

/// `scorer` under `allocator` as a policy of this name. An allocator without a name is top-k.
[[nodiscard]] KnownPolicy evicting(std::string name, const ScorerEntry& scorer, const AllocatorEntry& allocator);

/// What lists say of a policy, with its options.
[[nodiscard]] PolicyInfo info_of(const KnownPolicy& known);

/// The policy that an object describes. `uneven_heads`: rows of a layer differ in length before it first decides.
[[nodiscard]] std::unique_ptr<KVPolicy> policy_of(const OptionValue& object, const std::filesystem::path& folder = {},
                                                  bool uneven_heads = false);

/// The files that it names.
[[nodiscard]] std::vector<PolicyFile> files_of(const OptionValue& object, const std::filesystem::path& folder);

}  // namespace kvkeep
