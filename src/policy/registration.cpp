// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/policy/registry.h"

#include <algorithm>
#include <iterator>

#include "known_policies.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/evict_options.h"
#include "kvkeep/policy/option_fields.h"

namespace kvkeep {
namespace {

bool fit(const ScorerEntry& scorer, const AllocatorEntry& allocator) {
  const ScorerTraits& s = scorer.traits;
  const AllocatorTraits& a = allocator.traits;
  return s.composes && (s.probability || (!a.probability && (s.comparable || !a.comparable)));
}

constexpr auto kNameOfPolicy = [](const KnownPolicy* policy) -> const std::string& { return policy->entry.name; };

/// Names that a build without some part does not know.
struct LeftOut {
  std::string_view name;  ///< alone, and under allocators
  bool built;
  std::string_view why, option;
};
constexpr LeftOut kLeftOut[] = {{"sekv", KVKEEP_FOLDING, " folds spans", "KVKEEP_FOLDING"},
                                {"triattention", KVKEEP_FILES, " reads a calibration file", "KVKEEP_FILES"}};

KnownPolicy composed(const ScorerEntry& scorer, const AllocatorEntry& allocator) {
  return evicting(text(allocator.traits.name, "-", scorer.traits.name), scorer, allocator);
}

void require_name(std::string_view operation, std::string_view name) {
  const bool plain =
      std::ranges::all_of(name, [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-'; });
  const bool whole = !name.empty() && !name.starts_with('-') && !name.ends_with('-');  // hyphens join names
  KVKEEP_REQUIRE(whole && plain, operation, ": this is no name for a policy; given \"", shortened(name),
                 "\"; allowed lower-case letters, digits, and hyphens within");
}

/// The names of the options that `describe` describes. Throws if one has a name or a default that is not allowed, and
/// if the defaults make null.
template <class Describe>
std::vector<std::string> option_names(std::string_view operation, std::string_view name, const Describe& describe) {
  OptionFields lister = OptionFields::lister();
  bool made = false;
  try {
    made = describe(lister) != nullptr;
  } catch (const InvalidArgument& error) {
    refuse(operation, ": an option of ", name, " is not allowed: ", error.what());
  }
  KVKEEP_REQUIRE(made, operation, ": the default options of ", name,
                 " make null; allowed a scorer, an allocator, or a function that makes a policy");
  return lister.names();
}

/// Throws for an option of a scorer, or of an allocator, under a name that means one of every policy.
void require_apart(std::string_view operation, std::string_view name, const std::vector<std::string>& options) {
  OptionFields common = OptionFields::lister();
  describe_common_options(common);
  for (const std::string& option : options) {
    const std::string_view last = std::string_view(option).substr(option.rfind('.') + 1);
    KVKEEP_REQUIRE(std::ranges::find(common.names(), last) == common.names().end() && last != "policy", operation,
                   ": option \"", last, "\" of ", name, " is an option of every policy; allowed another name");
  }
}

}  // namespace

void KnownPolicies::add(std::string_view operation, std::string_view name, std::vector<KnownPolicy> more) {
  const auto require_free = [&](std::string_view made) {
    const bool taken = std::ranges::any_of(policies_, [&](const KnownPolicy& p) { return p.entry.name == made; }) ||
                       std::ranges::any_of(allocators_, [&](const AllocatorEntry& a) { return a.traits.name == made; });
    KVKEEP_REQUIRE(!taken, operation, ": there is a policy or an allocator ", made, " already; given \"", name,
                   "\"; allowed a name that is not taken");
  };
  require_free(name);
  for (const KnownPolicy& policy : more) require_free(policy.entry.name);
  std::ranges::move(more, std::back_inserter(policies_));
}

void KnownPolicies::add(PolicyEntry entry) {
  const std::string name = entry.name;
  require_name("register_policy", name);
  KVKEEP_REQUIRE(entry.describe != nullptr, "register_policy: describe of ", name, " is empty; allowed a function");
  const std::vector<std::string> options = option_names("register_policy", name, entry.describe);
  const auto has = [&](const char* option) { return std::ranges::find(options, option) != options.end(); };
  KVKEEP_REQUIRE(!has("policy") && !(entry.narrows && has("decode")), "register_policy: an option of ", name,
                 " is called policy or decode, where JSON names the policy, and what decides after it; allowed another "
                 "name");
  const std::lock_guard lock(mutex_);
  std::vector<KnownPolicy> one;
  one.push_back({std::move(entry)});
  add("register_policy", name, std::move(one));
}

void KnownPolicies::add(ScorerEntry entry) {
  const std::string_view name = entry.traits.name;
  require_name("register_scorer", name);
  KVKEEP_REQUIRE(entry.make != nullptr, "register_scorer: make of ", name, " is empty; allowed a function");
  const std::vector<std::string> options = option_names("register_scorer", name, entry.make);
  if (complete_) require_apart("register_scorer", name, options);
  const std::lock_guard lock(mutex_);
  AllocatorEntry flat = allocator_entry<Flat>({});
  std::vector<KnownPolicy> more{evicting(std::string(name), entry, flat)};
  for (const AllocatorEntry& allocator : allocators_)
    if (fit(entry, allocator)) more.push_back(composed(entry, allocator));
  add("register_scorer", name, std::move(more));
  scorers_.push_back(std::move(entry));
}

void KnownPolicies::add(AllocatorEntry entry) {
  const std::string_view name = entry.traits.name, alone = entry.traits.scorer;
  require_name("register_allocator", name);
  KVKEEP_REQUIRE(entry.make != nullptr, "register_allocator: make of ", name, " is empty; allowed a function");
  const std::vector<std::string> options =
      option_names("register_allocator", name, [&](Fields& f) { return entry.make(f, {}); });
  if (complete_) require_apart("register_allocator", name, options);
  const std::lock_guard lock(mutex_);
  std::vector<KnownPolicy> more;
  bool found = alone.empty();
  for (const ScorerEntry& scorer : scorers_) {
    if (!fit(scorer, entry)) continue;
    if (scorer.traits.name == alone) {
      more.push_back(evicting(std::string(name), scorer, entry));
      found = true;
    }
    more.push_back(composed(scorer, entry));
  }
  KVKEEP_REQUIRE(found, "register_allocator: ", name,
                 " alone stands for a scorer that does not exist or does not fit; "
                 "given \"",
                 alone, "\"; allowed one that ", name, " goes with, or none");
  add("register_allocator", name, std::move(more));
  allocators_.push_back(std::move(entry));
}

std::vector<const KnownPolicy*> KnownPolicies::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<const KnownPolicy*> out;
  std::ranges::transform(policies_, std::back_inserter(out), [](const KnownPolicy& p) { return &p; });
  return out;
}

const KnownPolicy* KnownPolicies::find(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(policies_, name, [](const KnownPolicy& p) { return p.entry.name; });
  return found == policies_.end() ? nullptr : &*found;
}

std::string KnownPolicies::names() const { return joined(all(), kNameOfPolicy); }

const KnownPolicy& KnownPolicies::named(std::string_view name) const {
  if (const KnownPolicy* known = find(name)) return *known;
  for (const LeftOut& one : kLeftOut)
    KVKEEP_REQUIRE_AS(Unsupported, one.built || !(name == one.name || name.ends_with("-" + std::string(one.name))),
                      "policy: ", name, one.why, ", which this build leaves out; allowed in a build with ", one.option,
                      "=ON");
  refuse_misfit(name);
  const std::string nearest = did_you_mean(name.substr(0, name.find_first_of(",:=")), all(), kNameOfPolicy);
  refuse("policy: there is no policy \"", shortened(name), "\"", nearest, "; kvkeep policies lists all",
         nearest.empty() ? ", and --plugin FILE adds a plug-in's" : "");
}

void KnownPolicies::refuse_misfit(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  for (const AllocatorEntry& allocator : allocators_) {
    KVKEEP_REQUIRE(name != allocator.traits.name, "policy: ", name,
                   " is an allocator, and no policy by itself; allowed ", name,
                   "-<scorer>: ", joined(policies_under(name)));
    for (const ScorerEntry& scorer : scorers_) {
      const AllocatorTraits& a = allocator.traits;
      const ScorerTraits& s = scorer.traits;
      if (name != text(a.name, "-", s.name)) continue;
      KVKEEP_REQUIRE(s.composes, "policy: there is no policy \"", name, "\", as scorer ", s.name,
                     " goes under no allocator; allowed ", s.name, " alone");
      refuse("policy: there is no policy \"", name, "\", as allocator ", a.name, " takes scores that ",
             a.probability ? "are shares of attention (ScorerTraits::probability)"
                           : "heads can compare (ScorerTraits::comparable or probability)",
             ", and scorer ", s.name, " does not say that of its own; allowed ", joined(policies_under(a.name)));
    }
  }
}

std::vector<std::string> KnownPolicies::policies_under(std::string_view allocator) const {
  std::vector<std::string> names;
  for (const KnownPolicy& policy : policies_)
    if (policy.allocator == allocator) names.push_back(policy.entry.name);
  return names;
}

KnownPolicies& known_policies() {
  static KnownPolicies all;
  return all;
}

void register_scorer(ScorerEntry entry) { known_policies().add(std::move(entry)); }
void register_allocator(AllocatorEntry entry) { known_policies().add(std::move(entry)); }
void register_policy(PolicyEntry entry) { known_policies().add(std::move(entry)); }

}  // namespace kvkeep
