#pragma once
// Bodies of mass_segmented.h: compiled by src/allot, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/require_host.h"
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
  const SegmentOptions segments{
      variant, options.segments, options.fixed, options.segment_mass, options.min_segment, options.max_segment};
  const std::int32_t count =
      segment_ends(scratch.prefix.data(), length, segments, scratch.ends.data(), scratch.cuts.data());
  scratch.shares.clear();
  for (std::int32_t i = 0; i < count; ++i)
    scratch.shares.push_back(share_of(options.quotas, scratch.prefix.data(), scratch.ends.data(), i, length, guarded));
  if (variant == Variant::official) {
    official_quotas(scratch.shares.data(), count, budget, options.min_quota);
    return budget;
  }
  const std::int32_t through = covered(options, scratch.shares.data(), count, budget, guarded);
  strict_quotas(scratch.shares.data(), count, through, options.min_quota);
  return through;
}

}  // namespace mass_segmented_detail

KVKEEP_INLINE void MassSegmented::allot(const Evidence& evidence, const Limits& limits, const Scores& scores,
                                        WindowAttention seen, Decision& decision) const {
  require_host("mass_segmented", evidence.table.device);
  const RowTable& table = evidence.table;
  const auto count = static_cast<std::int64_t>(table.rows.size());
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
  auto* slots = decision.keep->slots.data<std::int32_t>();

  std::vector<float> tops(table.rows.size());
  parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch;
    for (std::int64_t r = begin; r < end; ++r) {
      const Row& row = table.rows[static_cast<std::size_t>(r)];
      if (!limits.rows[static_cast<std::size_t>(r)].due) continue;
      scratch.resize(static_cast<std::size_t>(row.length));
      const std::int32_t history = seen.windows[static_cast<std::size_t>(r)].history;
      pool_history(options_, mass + row.first, history, scratch.data(), OneThread{});
      tops[static_cast<std::size_t>(r)] = largest(mass + row.first, history);
    }
  });
  if (options_.suffix_fill == SuffixFill::max_global)
    for (const RowGroup& group : table.groups) {
      const auto first = tops.begin() + group.first_row;
      std::fill_n(first, heads, *std::max_element(first, first + heads));
    }

  parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
    mass_segmented_detail::Scratch scratch;
    for (std::int64_t n = begin; n < end; ++n) {
      const auto r = static_cast<std::size_t>(n);
      const Row& row = table.rows[r];
      float *row_mass = mass + row.first, *row_used = used + row.first,
            *row_credit = credit == nullptr ? nullptr : credit + row.first;
      const RowLimit& limit = limits.rows[r];
      const std::span kept{slots + decision.keep->indptr[r], static_cast<std::size_t>(decision.keep->count(r))};
      if (!limit.due) {
        std::iota(kept.begin(), kept.end(), 0);
        std::fill_n(row_mass, row.length, 0.0F);
        std::fill_n(row_used, row.length, 0.0F);
        if (row_credit != nullptr) {
          const std::int32_t known = row.credit_length <= row.length ? row.credit_length : 0;
          std::copy_n(row.credit, known, row_credit);
          std::fill_n(row_credit + known, row.length - known, 0.0F);
        }
        continue;
      }
      scratch.fit(options_, row.length);
      if (seen.windows[r].queries > 0) {
        const QueryView& queries = table.groups[static_cast<std::size_t>(n / heads)].queries;
        const std::int32_t newest = queries.count > 0 ? queries.position(queries.count - 1) : -1;
        fill_suffix(options_.suffix_fill, row.positions, row.length, newest, seen.windows[r].history, tops[r], row_mass,
                    OneThread{});
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
        select_official(row_scores, allotment.ends[r], allotment.quotas[r], guarded, limits.padding, scratch.keys,
                        kept);
      } else {
        select_in_segments(row_scores, allotment.ends[r], allotment.quotas[r], guarded, scratch.keys,
                           kept.first(static_cast<std::size_t>(share)));
        select_rest(row_scores, share, scratch.keys, kept);
      }
    }
  });
}

}  // namespace kvkeep
