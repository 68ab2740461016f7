// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Scorers and allocators by their names: how options make them.

#include <functional>
#include <memory>
#include <utility>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/policy/evict.h"
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

}  // namespace kvkeep
