#include "kvkeep/allot/mass_segmented.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "kvkeep/core/dispatch.h"
#include "kvkeep/keep/select.h"

namespace kvkeep {
namespace {

/// Buffers of one thread, sized by its longest row.
struct Scratch {
  std::vector<float> fed;
  std::vector<std::uint64_t> prefix, keys;
  std::vector<std::int32_t> ends, cuts;
  std::vector<Share> shares;

  void fit(std::int32_t length) {
    const auto n = static_cast<std::size_t>(length);
    if (fed.size() >= n) return;
    fed.resize(n);
    prefix.resize(n);
    ends.resize(n);
    cuts.resize(n);
  }
};

/// Fills the suffix of `usage` and pools its history. Returns the largest pooled history usage.
float pool_history(const MassSegmentedOptions& options, float* usage, std::int32_t history, std::vector<float>& scratch) {
  if (options.pool > 1) {
    std::copy_n(usage, history, scratch.data());
    pool_average(scratch.data(), history, options.pool, usage);
  }
  return largest(usage, history);
}

void fill_suffix(SuffixFill fill, const Row& row, const QueryView& queries, std::int32_t history, float top, float* usage) {
  const std::int32_t newest = queries.count > 0 ? queries.position(queries.count - 1) : -1;
  for (std::int32_t t = history; t < row.length; ++t) {
    if (fill == SuffixFill::exclude) usage[t] = 0;
    else if (fill != SuffixFill::causal_mean || row.positions[t] >= newest) usage[t] = top;
  }
}

/// Turns usage into mass in place; with `credit` (or null), updates it and writes the mixture that segments follow to `used`, which may be `usage`.
void weigh(const MassSegmentedOptions& options, const Row& row, float* usage, Scratch& scratch, float* credit, float* used) {
  const std::int32_t length = row.length;
  const bool raw = options.quotas == QuotaWeight::raw_mass;
  if (raw && credit != nullptr)
    for (std::int32_t t = 0; t < length; ++t) scratch.fed[static_cast<std::size_t>(t)] = std::max(usage[t], 0.0F) + static_cast<float>(kMassEpsilon);
  normalise_mass(usage, length, kMassEpsilon);
  if (credit == nullptr) {
    if (used != usage) std::copy_n(usage, length, used);
    return;
  }
  const std::int32_t known = row.credit == nullptr ? 0 : row.credit_length;
  std::copy_n(row.credit, std::min(known, length), credit);
  update_credit(raw ? scratch.fed.data() : usage, length, known, {options.credit_decay, options.credit_mix}, kMassEpsilon, raw, credit, used);
}

double weight_of(QuotaWeight quotas, double mass, std::int32_t length) {
  switch (quotas) {
    case QuotaWeight::equal: return 1;
    case QuotaWeight::length: return length;
    default: return mass;
  }
}

/// Slots of the budget that go through segments: all but (1 - coverage) of what is above the protected ones, or just the segments' floors.
std::int32_t covered(const MassSegmentedOptions& options, const std::vector<Share>& shares, std::int32_t budget, Protected guarded) {
  if (!options.coverage_auto) return guarded.count() + static_cast<std::int32_t>(std::floor(options.coverage * (budget - guarded.count()) + 0.5));
  std::int64_t floors = 0;
  for (const Share& s : shares) floors += detail::floor_of(s, options.min_quota);
  return static_cast<std::int32_t>(std::min<std::int64_t>(floors, budget));
}

/// Segments of one row with their quotas, which stand in scratch.ends and scratch.shares. Returns the sum of the quotas.
std::int32_t divide(const MassSegmentedOptions& options, Variant variant, const float* used, std::int32_t length, std::int32_t budget, Protected guarded,
                    Scratch& scratch) {
  prefix_mass(used, length, scratch.prefix.data());
  const SegmentOptions segments{variant, options.segments, options.fixed, options.segment_mass, options.min_segment, options.max_segment};
  const std::int32_t count = segment_ends(scratch.prefix.data(), length, segments, scratch.ends.data(), scratch.cuts.data());
  scratch.shares.resize(static_cast<std::size_t>(count));
  const std::uint64_t total = scratch.prefix[static_cast<std::size_t>(length - 1)];
  std::uint64_t before = 0;
  std::int32_t start = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t end = scratch.ends[static_cast<std::size_t>(i)];
    const std::uint64_t through = scratch.prefix[static_cast<std::size_t>(end - 1)];
    const double mass = total > 0 ? static_cast<double>(through - before) / static_cast<double>(total) : 0.0;
    const std::int32_t old = std::clamp(guarded.sinks, start, end) - start, recent = end - std::clamp(length - guarded.recents, start, end);
    scratch.shares[static_cast<std::size_t>(i)] = {weight_of(options.quotas, mass, end - start), end - start, std::min(old + recent, end - start), 0, false};
    before = through;
    start = end;
  }
  if (variant == Variant::official) {
    official_quotas(scratch.shares.data(), count, budget, options.min_quota);
    return budget;
  }
  const std::int32_t through = covered(options, scratch.shares, budget, guarded);
  strict_quotas(scratch.shares.data(), count, through, options.min_quota);
  return through;
}

}  // namespace

void MassSegmented::allot(const Evidence& evidence, const Limits& limits, WindowAttention& seen, Decision& decision) const {
  dispatch("mass_segmented", evidence.table.device, [&] {
    const RowTable& table = evidence.table;
    const auto count = static_cast<std::int64_t>(table.rows.size());
    const std::int32_t heads = evidence.spec.kv_heads;
    const auto f32 = at::TensorOptions().dtype(kFloat32);
    const bool official = limits.variant == Variant::official;

    decision.keep = empty_keep_set(table, limits);
    decision.allotment.emplace();
    Allotment& allotment = *decision.allotment;
    allotment.mass.data = std::exchange(seen.usage, Tensor());
    if (evidence.explain) allotment.mass_used.data = at::empty({table.slots}, f32);
    allotment.ends.resize(table.rows.size());
    allotment.quotas.resize(table.rows.size());
    if (options_.credit) decision.credit = at::empty({table.slots}, f32);

    float* mass = allotment.mass.data.data_ptr<float>();
    float* used = evidence.explain ? allotment.mass_used.data.data_ptr<float>() : mass;
    const float* scores = decision.scores.data.data_ptr<float>();
    float* credit = options_.credit ? decision.credit->data_ptr<float>() : nullptr;
    auto* slots = decision.keep->slots.data_ptr<std::int32_t>();

    std::vector<float> tops(table.rows.size());
    at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> scratch;
      for (std::int64_t r = begin; r < end; ++r) {
        const Row& row = table.rows[static_cast<std::size_t>(r)];
        if (!limits.rows[static_cast<std::size_t>(r)].due) continue;
        scratch.resize(static_cast<std::size_t>(row.length));
        tops[static_cast<std::size_t>(r)] = pool_history(options_, mass + row.first, seen.windows[static_cast<std::size_t>(r)].history, scratch);
      }
    });
    if (options_.suffix_fill == SuffixFill::max_global)
      for (const RowGroup& group : table.groups) {
        const auto first = tops.begin() + group.first_row;
        std::fill_n(first, heads, *std::max_element(first, first + heads));
      }

    at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
      Scratch scratch;
      for (std::int64_t n = begin; n < end; ++n) {
        const auto r = static_cast<std::size_t>(n);
        const Row& row = table.rows[r];
        float *row_mass = mass + row.first, *row_used = used + row.first, *row_credit = credit == nullptr ? nullptr : credit + row.first;
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
        scratch.fit(row.length);
        if (seen.windows[r].queries > 0)
          fill_suffix(options_.suffix_fill, row, table.groups[static_cast<std::size_t>(n / heads)].queries, seen.windows[r].history, tops[r], row_mass);
        weigh(options_, row, row_mass, scratch, row_credit, row_used);

        const Protected guarded = limit.guarded;
        const std::int32_t share = divide(options_, limits.variant, row_used, row.length, limit.budget, guarded, scratch);
        allotment.ends[r].assign(scratch.ends.begin(), scratch.ends.begin() + static_cast<std::ptrdiff_t>(scratch.shares.size()));
        for (const Share& s : scratch.shares) allotment.quotas[r].push_back(s.quota);

        const std::span row_scores{scores + row.first, static_cast<std::size_t>(row.length)};
        if (official) {
          select_official(row_scores, allotment.ends[r], allotment.quotas[r], guarded, limits.padding, scratch.keys, kept);
        } else {
          select_in_segments(row_scores, allotment.ends[r], allotment.quotas[r], guarded, scratch.keys, kept.first(static_cast<std::size_t>(share)));
          select_rest(row_scores, share, scratch.keys, kept);
        }
      }
    });
  });
}

}  // namespace kvkeep
