#pragma once
/// Scorers, allocators and policies by name: how the library lists its own, and how a program adds more. What is added
/// can be made, saved, restored and listed like the library's own.

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/compiled_only.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/score/scorer.h"

namespace kvkeep {

struct ScorerEntry {
  ScorerTraits traits;
  std::function<std::unique_ptr<Scorer>(Fields&)> make;  ///< reads its options
  /// Other defaults of the options that every evicting policy has; they may depend on the scorer's own options.
  std::function<void(const Fields&, Retention&)> defaults = {};
};

struct AllocatorEntry {
  AllocatorTraits traits;
  std::function<std::unique_ptr<Allocator>(Fields&, const AllocatorContext&)> make;  ///< reads its options
  std::function<void(Fields&)> context = {};  ///< what scorers must know of it before their options are read
};

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

namespace detail {

template <class S>
std::unique_ptr<Scorer> read_scorer(Fields& f) {
  if constexpr (requires { &S::make; }) {
    return S::make(f);
  } else if constexpr (requires { typename S::Options; }) {
    typename S::Options options;
    options.describe(f);
    return std::make_unique<S>(options);
  } else {
    return std::make_unique<S>();
  }
}

template <class A>
std::unique_ptr<Allocator> read_allocator(Fields& f, [[maybe_unused]] const AllocatorContext& policy) {
  if constexpr (requires { typename A::Options; }) {
    typename A::Options options;
    if constexpr (requires { &A::defaults; }) options = A::defaults(f, policy);
    f.enter("allocator");
    options.describe(f);
    f.leave();
    return std::make_unique<A>(options);
  } else {
    f.enter("allocator");  // so that options in it are refused by name
    f.leave();
    return std::make_unique<A>();
  }
}

}  // namespace detail

/// The entry of a class with the members that class Scorer describes.
template <class S>
[[nodiscard]] ScorerEntry scorer_entry(ScorerTraits traits = S::traits,
                                       std::function<void(const Fields&, Retention&)> defaults = {}) {
  return {traits, detail::read_scorer<S>, std::move(defaults)};
}

/// The same for class Allocator.
template <class A>
[[nodiscard]] AllocatorEntry allocator_entry(AllocatorTraits traits = A::traits) {
  AllocatorEntry entry{.traits = traits, .make = detail::read_allocator<A>};
  if constexpr (requires { &A::context; }) entry.context = A::context;
  return entry;
}

/// Adds a scorer: "name" is top-k by it, and "ams-name" and the like follow for every allocator that it fits. Throws
/// InvalidArgument, and adds nothing, for a name that is empty, has other characters than a-z, 0-9 and hyphens, or
/// makes a policy that exists. Any thread may add at any time; a policy can be made once this has returned. Nothing is
/// ever removed.
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
