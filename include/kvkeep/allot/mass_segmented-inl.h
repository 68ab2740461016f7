// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of mass_segmented.h: compiled by src/allot, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <string_view>
#include <utility>

#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/select.h"

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
namespace mass_segmented_detail {

/// Buffers of one thread, sized by its longest row.
struct Scratch {
  std::vector<float> fed;
  std::vector<std::uint64_t> prefix, keys;
  std::vector<std::int32_t> ends, cuts;
  std::vector<Share> shares;

  void fit(const MassSegmentedOptions& options, std::int32_t length) {
    const auto n = static_cast<std::size_t>(length);
    if (fed.size() >= n) return;
    fed.resize(n);
    prefix.resize(n);
    const auto most = static_cast<std::size_t>(most_segments(options, length));
    ends.resize(most);
    cuts.resize(most);
  }
};

/// Writes the segments of one row and their quotas to scratch.ends and scratch.shares. Returns the sum of the quotas.
inline std::int32_t divide(const MassSegmentedOptions& options, Variant variant, const float* used, std::int32_t length,
                           std::int32_t budget, Protected guarded, Scratch& scratch) {
  prefix_mass(used, length, scratch.prefix.data(), OneThread{}, left_out(options, guarded));
  const std::int32_t count = segment_ends(scratch.prefix.data(), length, segments_of(options, variant),
                                          scratch.ends.data(), scratch.cuts.data());
  scratch.shares.clear();
  for (std::int32_t i = 0; i < count; ++i)
    scratch.shares.push_back(
        segment_share(options.quotas, scratch.prefix.data(), scratch.ends.data(), i, length, guarded));
  if (variant == Variant::official) {
    official_quotas(scratch.shares.data(), count, budget, options.min_quota);
    return budget;
  }
  const std::int32_t through = covered(options, scratch.shares.data(), count, budget, guarded);
  strict_quotas(scratch.shares.data(), count, through, options.min_quota);
  return through;
}

/// Pools the history of every due row of `usage` in place. Returns [rows] the largest that each then holds.
inline std::vector<float> pool_rows(const MassSegmentedOptions& options, const RowTable& table, const Limits& limits,
                                    std::span<const RowWindow> windows, float* usage) {
  std::vector<float> tops(table.rows.size());
  const auto make = [] { return std::vector<float>(); };
  each_due_row(table, limits, make, [&](std::size_t r, const Row& row, std::vector<float>& scratch) {
    scratch.resize(static_cast<std::size_t>(row.length));
    tops[r] = pool_history(options, usage + row.first, windows[r].history, scratch.data(), OneThread{});
  });
  return tops;
}

}  // namespace mass_segmented_detail

KVKEEP_INLINE std::vector<float> MassSegmented::tops(const Evidence& evidence, const Limits& limits,
                                                     const WindowAttention& seen) const {
  require_host("mass_segmented", evidence.table.device);
  const Tensor usage = clone(seen.usage);
  return mass_segmented_detail::pool_rows(options_, evidence.table, limits, seen.windows, usage.data<float>());
}

KVKEEP_INLINE void MassSegmented::allot(const Evidence& evidence, const Limits& limits, const Scores& scores,
                                        WindowAttention seen, Decision& decision) const {
  require_host("mass_segmented", evidence.table.device);
  const RowTable& table = evidence.table;
  const std::int32_t heads = evidence.spec.kv_heads;
  const bool official = limits.variant == Variant::official;

  decision.keep = empty_keep_set(table, limits);
  decision.allotment.emplace();
  Allotment& allotment = *decision.allotment;
  allotment.mass.data = std::move(seen.usage);
  if (evidence.explain) allotment.mass_used.data = empty({table.slots}, Dtype::f32);
  allotment.ends.resize(table.rows.size());
  allotment.quotas.resize(table.rows.size());
  if (options_.credit) decision.credit = empty({table.slots}, Dtype::f32);

  float* mass = allotment.mass.data.data<float>();
  float* used = evidence.explain ? allotment.mass_used.data.data<float>() : mass;
  const float* g = scores.data.data<float>();
  float* credit = options_.credit ? decision.credit->data<float>() : nullptr;

  std::vector<float> tops = mass_segmented_detail::pool_rows(options_, table, limits, seen.windows, mass);
  if (!seen.tops.empty())
    tops = std::move(seen.tops);
  else if (options_.suffix_fill == SuffixFill::max_global)
    for (const RowGroup& group : table.groups) {
      const auto first = tops.begin() + group.first_row;
      std::fill_n(first, heads, *std::max_element(first, first + heads));
    }

  const auto make_scratch = [] { return mass_segmented_detail::Scratch(); };
  each_row(table, make_scratch, [&](std::size_t r, const Row& row, mass_segmented_detail::Scratch& scratch) {
    float *row_mass = mass + row.first, *row_used = used + row.first,
          *row_credit = credit == nullptr ? nullptr : credit + row.first;
    const RowLimit& limit = limits.rows[r];
    const std::span<std::int32_t> kept = decision.keep->room(r);
    if (!limit.due) {
      std::iota(kept.begin(), kept.end(), 0);
      return pass_row(row.credit, row.credit_length, row.length, row_mass, row_credit, row_used, OneThread{});
    }
    scratch.fit(options_, row.length);
    if (seen.windows[r].queries > 0) {
      const QueryView& queries = table.groups[r / static_cast<std::size_t>(heads)].queries;
      fill_suffix(options_.suffix_fill, row.positions, row.length, queries.position(queries.count - 1),
                  seen.windows[r].history, tops[r], row_mass, OneThread{});
    }
    weigh_row(options_, row.credit, row.credit_length, row.length, row_mass, scratch.fed.data(), row_credit, row_used,
              OneThread{});

    const Protected guarded = limit.guarded;
    const std::int32_t share =
        mass_segmented_detail::divide(options_, limits.variant, row_used, row.length, limit.budget, guarded, scratch);
    allotment.ends[r].assign(scratch.ends.begin(),
                             scratch.ends.begin() + static_cast<std::ptrdiff_t>(scratch.shares.size()));
    for (const Share& s : scratch.shares) allotment.quotas[r].push_back(s.quota);

    const std::span row_scores{g + row.first, static_cast<std::size_t>(row.length)};
    if (official) {
      select_official(row_scores, allotment.ends[r], allotment.quotas[r], guarded, limits.padding, scratch.keys, kept);
    } else {
      select_in_segments(row_scores, allotment.ends[r], allotment.quotas[r], guarded, scratch.keys,
                         kept.first(static_cast<std::size_t>(share)));
      select_rest(row_scores, share, scratch.keys, kept);
    }
  });
}

}  // namespace kvkeep
