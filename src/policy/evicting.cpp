// SPDX-License-Identifier: Apache-2.0
// What lists say of the evicting policies.

#include <utility>

#include "known_policies.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/evict_options.h"
#include "kvkeep/policy/option_fields.h"

namespace kvkeep {
namespace {

std::string in_words(const Needs& needs) {
  std::string words;
  const auto add = [&](bool is, const std::string& what) {
    if (is) words += (words.empty() ? "" : ", ") + what;
  };
  add(needs.queries > 0,
      needs.queries == 1 ? "the newest query" : "the newest " + std::to_string(needs.queries) + " queries");
  add(needs.calibration, "calibration");
  add(needs.output_projection, "W_o");
  add(needs.given_scores, "scores that the engine gives");
  return words.empty() ? "nothing" : words;
}

std::string choices_of(const Evict& policy) {
  std::string words;
  for (const std::int32_t slots : {24, 128, 1024})
    words += text(words.empty() ? "" : ", ", slots - policy.guarded(slots).count(), " of ", slots);
  return words;
}

std::string pieces_of(const EvictParts& parts) {
  const Needs needs = needs_of(parts.retention, *parts.scorer, *parts.allocator);
  std::string words = needs.queries > 0 ? in_words({.queries = needs.queries}) : "the slots that are held";
  if (needs.given_scores) words += ", with the scores that the engine gave them";
  if (parts.scorer->accumulates()) words += ", added to what pieces before it gave";
  return words + (parts.retention.protect_prompt ? "; allowed with protect_prompt=false" : "");
}

}  // namespace

KnownPolicy evicting(std::string name, const ScorerEntry& scorer, const AllocatorEntry& allocator) {
  const ScorerTraits& s = scorer.traits;
  const AllocatorTraits& a = allocator.traits;
  const bool flat = a.name.empty();
  KnownPolicy known;
  known.entry.name = name;
  known.entry.what = flat ? s.what : text(a.what, ": ", s.what);
  known.entry.source = flat ? s.source : text(a.source, ", over ", s.source);
  known.scorer = s.name;
  known.allocator = a.name;
  known.entry.describe = [name, scorer, allocator](Fields& f) -> MakePolicy {
    const auto parts = std::make_shared<EvictParts>(read_parts(f, scorer, allocator));
    return [name, parts](std::string json, std::unique_ptr<KVPolicy>) {
      return evict(name, std::move(*parts), std::move(json));
    };
  };
  known.needs = [scorer, allocator] {
    OptionFields lister = OptionFields::lister();
    const EvictParts parts = read_parts(lister, scorer, allocator);
    return in_words(needs_of(parts.retention, *parts.scorer, *parts.allocator));
  };
  known.chooses = [name, scorer, allocator] {
    OptionFields lister = OptionFields::lister();
    EvictParts parts = read_parts(lister, scorer, allocator);
    return choices_of(Evict(name, std::move(parts.scorer), std::move(parts.allocator), parts.retention));
  };
  known.pieces = [scorer, allocator] {
    OptionFields lister = OptionFields::lister();
    return pieces_of(read_parts(lister, scorer, allocator));
  };
  return known;
}

}  // namespace kvkeep
