#pragma once
// Bodies of mass_segmented.h: compiled by src/allot, or where they are included under KVKEEP_HEADER_ONLY.
// The options of AMS: where their defaults come from, how they are named, and what goes together.

#include <charconv>
#include <string_view>

#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"

namespace kvkeep {
namespace mass_segmented_options_detail {

enum class Preset : std::uint8_t { kvkeep, question, registry, paper };

inline MassSegmentedOptions options_of(Preset preset, double coverage) {
  MassSegmentedOptions o;
  if (preset == Preset::kvkeep || preset == Preset::question) {  // measured, not published: docs/method/ams.md
    o.protected_mass = false;
    o.min_quota = 1;
    o.coverage = preset == Preset::question ? 1.0 : coverage;
  }
  if (preset != Preset::paper) return o;
  o.window = 128;
  o.segment_mass = 0.1;
  o.min_segment = 16;
  o.max_segment = 256;
  o.min_quota = 1;
  o.credit_decay = 0.9;
  o.credit_mix = 0.9;
  return o;
}

inline void describe_segments(Fields& f, MassSegmentedOptions& o) {
  const std::string current = o.segments == Segmentation::mass   ? "mass"
                              : o.segments == Segmentation::none ? "none"
                                                                 : "fixed:" + std::to_string(o.fixed);
  const std::string word = f.word("segments", current, "mass, fixed:<slots>, none",
                                  "how a row is cut: by mass, every fixed number of slots, or not (top-k)");
  constexpr std::string_view kFixed = "fixed:";
  if (word == "mass") {
    o.segments = Segmentation::mass;
  } else if (word == "none") {
    o.segments = Segmentation::none;
  } else {
    const char* end = word.data() + word.size();
    std::int32_t slots = 0;
    if (!word.starts_with(kFixed) || std::from_chars(word.data() + kFixed.size(), end, slots).ptr != end || slots < 1)
      f.bad("segments", word, "mass, fixed:<slots> with 1 or more slots, none");
    o.segments = Segmentation::fixed;
    o.fixed = slots;
  }
}

}  // namespace mass_segmented_options_detail

KVKEEP_INLINE void MassSegmentedOptions::describe(Fields& f) {
  f.integer("window", window, 1, kMostQueries, "newest queries whose attention is the mass");
  f.real("segment_mass", segment_mass, Range::above(0, 1), "target mass of a segment");
  f.integer("min_segment", min_segment, 1, INT32_MAX, "slots; shorter segments merge");
  f.integer("max_segment", max_segment, 1, INT32_MAX,
            "slots; longer segments are cut (strict: at least 2 * min_segment)");
  f.integer("min_quota", min_quota, 0, INT32_MAX, "slots every segment may keep, as far as the budget goes");
  f.flag("credit", credit, "mix in the mass that slots drew at earlier events");
  f.real("credit_decay", credit_decay, Range::below(0, 1), "weight of the old credit at each event (lambda)");
  f.real("credit_mix", credit_mix, {0, 1}, "weight of this event's mass against the credit (beta)");
  f.integer("pool", pool, 0, kWidestPool, "slots averaged over, odd; 0 or 1: none");
  f.choice("suffix_fill", suffix_fill,
           {{"max_head", SuffixFill::max_head},
            {"max_global", SuffixFill::max_global},
            {"causal_mean", SuffixFill::causal_mean},
            {"exclude", SuffixFill::exclude}},
           "mass of the slots that part of the window cannot see (variant official: max_global)");
  f.flag("protected_mass", protected_mass,
         "protected slots count where segments are cut and quotas poured; they stay in any case");
  mass_segmented_options_detail::describe_segments(f, *this);
  f.choice("quotas", quotas,
           {{"mass", QuotaWeight::mass},
            {"equal", QuotaWeight::equal},
            {"length", QuotaWeight::length},
            {"raw_mass", QuotaWeight::raw_mass}},
           "what a segment's quota is proportional to");
  f.real_or("coverage", coverage, {0, 1}, "auto", coverage_auto,
            "share of the budget above the protected slots that goes through segments; 0 is top-k; auto: only as much "
            "as every segment's `min_quota` takes");
}

KVKEEP_INLINE MassSegmentedOptions MassSegmented::defaults(Fields& f, const AllocatorContext& policy) {
  const bool official = policy.variant == Variant::official;
  // Naming a fill selects AMS as published in every other respect.
  mass_segmented_options_detail::Preset preset = official || f.gives("allocator", "suffix_fill")
                                                     ? mass_segmented_options_detail::Preset::registry
                                                     : mass_segmented_options_detail::Preset::kvkeep;
  f.choice(
      "preset", preset,
      {{"kvkeep", mass_segmented_options_detail::Preset::kvkeep},
       {"question", mass_segmented_options_detail::Preset::question},
       {"registry", mass_segmented_options_detail::Preset::registry},
       {"paper", mass_segmented_options_detail::Preset::paper}},
      "defaults of `allocator`: ours (registry with protected_mass false, min_quota 1, coverage by scorer), ours where "
      "the newest queries ask what will be answered (coverage 1), of the released scripts, or of the paper's Table "
      "15 (window 128, segment_mass 0.1, segments 16 to 256, min_quota 1, decay and mix 0.9)");
  MassSegmentedOptions o = mass_segmented_options_detail::options_of(preset, policy.ams_coverage);
  if (official) {
    KVKEEP_REQUIRE(preset == mass_segmented_options_detail::Preset::registry ||
                       preset == mass_segmented_options_detail::Preset::paper,
                   "policy: preset is not a published one with variant official; allowed registry, paper");
    o.suffix_fill = SuffixFill::max_global;  // as published
  }
  return o;
}

KVKEEP_INLINE void MassSegmented::check(AllocatorContext& policy) const {
  const MassSegmentedOptions& o = options_;
  KVKEEP_REQUIRE(
      policy.share == Sharing::per_layer_per_head,
      "policy: share is not per_layer_per_head with allocator ams; allowed per_layer_per_head (rows that share a "
      "selection would have to share quotas too)");
  KVKEEP_REQUIRE(o.pool <= 1 || o.pool % 2 == 1, "policy: allocator.pool is ", o.pool,
                 "; allowed an odd number, or 0 for none");
  if (policy.variant == Variant::official) {
    KVKEEP_REQUIRE(o.max_segment >= o.min_segment, "policy: allocator.max_segment is ", o.max_segment,
                   "; allowed at least min_segment = ", o.min_segment);
    KVKEEP_REQUIRE(o.protected_mass,
                   "policy: allocator.protected_mass is false with variant official; allowed true (the published code "
                   "has no such option)");
    KVKEEP_REQUIRE(!o.coverage_auto && o.coverage == 1.0, "policy: allocator.coverage is ",
                   o.coverage_auto ? std::string("auto") : text(o.coverage),
                   " with variant official; allowed 1 (the published code has no such option)");
  } else {
    KVKEEP_REQUIRE(o.max_segment >= 2 * std::int64_t{o.min_segment}, "policy: allocator.max_segment is ", o.max_segment,
                   "; allowed at least 2 * min_segment = ", 2 * std::int64_t{o.min_segment}, " (variant strict)");
  }
}

}  // namespace kvkeep
