// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Policies in C++ whose options, defaults and presets are those of their texts (docs/reference/policies.md): for
/// programs over headers alone, and for those that know their policy when they are compiled.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/evict_options.h"
#include "kvkeep/policy/option_fields.h"
#include "kvkeep/score/keydiff.h"
#include "kvkeep/score/knorm.h"
#include "kvkeep/score/recency.h"
#include "kvkeep/score/snapkv.h"
#include "kvkeep/score/tova.h"

namespace kvkeep::recipes {

/// Options as texts name them: {{"interval", 128}, {"preset", "question"}, {"window", 64}}, or by their full names, as
/// "allocator.window".
using Options = std::vector<std::pair<std::string, OptionValue>>;

/// The policy that make_policy() makes of the scorer's and the allocator's names and the same options: of any scorer
/// whose header is included, alone or under an allocator. Throws as that does.
template <class S, class A = Flat>
[[nodiscard]] std::unique_ptr<Evict> evicting(const Options& options) {
  static_assert(S::traits.name != "rpc" && S::traits.name != "random-attention",
                "kvkeep: policies of this scorer have defaults of their own; allowed by name, with make_policy() of "
                "the compiled library (kvkeep::kvkeep)");
  std::string name(S::traits.name);
  AllocatorTraits traits;
  if constexpr (requires { A::traits; }) {
    traits = A::traits;
    name = text(traits.name, "-", name);
  }
  const ScorerEntry scorer = scorer_entry<S>();
  const AllocatorEntry allocator = allocator_entry<A>(traits);
  OptionFields lister = OptionFields::lister();
  static_cast<void>(read_parts(lister, scorer, allocator));
  OptionValue given = OptionValue::object();
  for (const auto& [option, value] : options) given.give(full_name_of(name, true, lister.listed(), option), value);
  OptionFields reader = OptionFields::reader(given);
  EvictParts parts = read_parts(reader, scorer, allocator);
  reader.finish(name);
  return evict(name, std::move(parts), reader.resolved(name).json());
}

// Each keeps `budget` slots in every row at an event. `more`: other options.

/// The oldest slots and the newest (StreamingLLM).
[[nodiscard]] inline std::unique_ptr<Evict> streaming(std::int32_t budget, Options more = {}) {
  more.emplace_back("budget", budget);
  return evicting<Recency>(more);
}
/// Attention of the newest query.
[[nodiscard]] inline std::unique_ptr<Evict> tova(std::int32_t budget, Options more = {}) {
  more.emplace_back("budget", budget);
  return evicting<Tova>(more);
}
/// Attention of a window of queries.
[[nodiscard]] inline std::unique_ptr<Evict> snapkv(std::int32_t budget, Options more = {}) {
  more.emplace_back("budget", budget);
  return evicting<SnapKV>(more);
}
/// Keys that differ from the others; reads no queries.
[[nodiscard]] inline std::unique_ptr<Evict> keydiff(std::int32_t budget, Options more = {}) {
  more.emplace_back("budget", budget);
  return evicting<KeyDiff>(more);
}
/// Keys of small norm; reads no queries.
[[nodiscard]] inline std::unique_ptr<Evict> knorm(std::int32_t budget, Options more = {}) {
  more.emplace_back("budget", budget);
  return evicting<Knorm>(more);
}
/// TOVA within segments of equal attention mass.
[[nodiscard]] inline std::unique_ptr<Evict> ams_tova(std::int32_t budget, Options more = {}) {
  more.emplace_back("budget", budget);
  return evicting<Tova, MassSegmented>(more);
}
/// SnapKV within segments of equal attention mass.
[[nodiscard]] inline std::unique_ptr<Evict> ams_snapkv(std::int32_t budget, Options more = {}) {
  more.emplace_back("budget", budget);
  return evicting<SnapKV, MassSegmented>(more);
}

}  // namespace kvkeep::recipes
