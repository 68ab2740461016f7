#pragma once
// Bodies of mass_segmented.h: compiled by src/allot, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/core/device.h"
#include "kvkeep/core/each_row.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/keep/select.h"

namespace kvkeep {
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
    pool_history(options, usage + row.first, windows[r].history, scratch.data(), OneThread{});
    tops[r] = largest(usage + row.first, windows[r].history);
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
