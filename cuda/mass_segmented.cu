// SPDX-License-Identifier: Apache-2.0
#include "mass_segmented.h"

#include "launch.cuh"
#include "select.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kFarThreads;

constexpr std::int32_t kNearSegments = 128;  ///< most segments, or thresholds, of a row that are in shared memory
constexpr std::int32_t kFewSlots = 256;      ///< of a segment whose keys a warp holds in registers
constexpr std::int32_t kCachedCuts = 1024;   ///< cuts that are worked out side by side; if there are more, one by one

/// What a block has of its row in shared memory where the longest row fits.
struct NearSlots {
  std::size_t prefix, usage, orders, bytes = 0;

  KVKEEP_HD explicit NearSlots(std::size_t slots) {
    Parts parts;
    prefix = parts.take(sizeof(std::uint64_t) * slots);
    usage = parts.take(sizeof(float) * slots);
    orders = parts.take(sizeof(float) * slots);
    bytes = parts.bytes;
  }
};

/// Whether all that a block has of its row fits shared memory.
KVKEEP_HD inline bool is_near(const MassSegmentedOptions& options, std::int32_t longest) {
  return longest <= tuning::kNearSlots && most_segments(options, longest) <= kNearSegments &&
         (options.segments != Segmentation::mass || detail::thresholds(options.segment_mass) <= kNearSegments);
}

/// The parts of the workspace. Only this defines their sizes and places.
struct Workspace {
  std::uint64_t* prefix;      ///< [slots], where they are not near
  float* fed;                 ///< the same; then the slots' orders
  float* tops;                ///< [count]
  Share* shares;              ///< [count, most]
  std::int32_t *ends, *cuts;  ///< [count, most]
  std::int64_t most;          ///< segments of a row
  std::size_t bytes;

  Workspace(const MassSegmentedOptions& options, std::int32_t count, std::int32_t longest, std::int64_t slots,
            std::byte* base)
      : most(most_segments(options, longest)) {
    WorkspaceParts parts(base);
    if (is_near(options, longest)) slots = 0;
    prefix = parts.take<std::uint64_t>(slots);
    shares = parts.take<Share>(count * most);
    ends = parts.take<std::int32_t>(count * most);
    cuts = parts.take<std::int32_t>(count * most);
    fed = parts.take<float>(slots);
    tops = parts.take<float>(count);
    bytes = static_cast<std::size_t>(parts.bytes());
  }
};

/// What stands instead of order_of() of a score, which is larger.
enum Mark : std::uint32_t {
  kIn = 0,
  kOut = 1  ///< not a candidate: official only
};

/// Numbers of one row while its block works on it.
template <bool kNear>
struct RowNumbers {
  std::uint64_t* prefix;
  float* fed;
  std::uint32_t* orders;
  float *usage = nullptr, *used = nullptr, *credit = nullptr;  ///< copies, where they are near

  __device__ RowNumbers(std::int32_t longest, const Workspace& work, const Row& row) {
    if constexpr (!kNear) {
      prefix = work.prefix + row.first;
      fed = work.fed + row.first;
      orders = reinterpret_cast<std::uint32_t*>(fed);
    } else {
      const NearSlots near(static_cast<std::size_t>(longest));
      std::byte* shared = dynamic_shared();
      prefix = reinterpret_cast<std::uint64_t*>(shared + near.prefix);
      fed = reinterpret_cast<float*>(shared + near.prefix);  // both are done with before there are prefix sums
      credit = fed + longest;
      usage = reinterpret_cast<float*>(shared + near.usage);
      used = reinterpret_cast<float*>(shared + near.orders);  // done with before there are orders
      orders = reinterpret_cast<std::uint32_t*>(shared + near.orders);
    }
  }
};

/// The pooled usage of every row, and its largest: runs first if heads look at each other.
template <bool kNear>
__global__ void __launch_bounds__(kFarThreads) mass_segmented_pool_kernel(MassSegmentedArguments a, Workspace work) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const BlockTeam team(scratch);
  for (std::int64_t r = blockIdx.x; r < a.count; r += gridDim.x) {
    if (!a.limits[r].due) {
      if (team.thread() == 0) work.tops[r] = 0;
      continue;
    }
    float* usage = a.mass + a.rows[r].first;
    const float top = team.largest(
        pool_history(a.options, usage, a.windows[r].history, RowNumbers<kNear>(a.longest, work, a.rows[r]).fed, team));
    if (team.thread() == 0) work.tops[r] = top;
  }
}

/// How one warp has divided a row.
struct Division {
  std::int32_t segments, through;  ///< slots of the budget that go through segments
  bool has_long;                   ///< whether a segment has more slots than kWarpSlots
};

/// One row's slots, selected segment by segment. kNear: there is one histogram, else one for each warp.
template <bool kNear>
class Selection {
 public:
  static constexpr std::int32_t kWarpSlots = kNear ? kFewSlots : tuning::kWarpSegment;  ///< left to one warp, at most

  __device__ Selection(const BlockTeam& team, std::int32_t* histograms, std::uint32_t* orders, std::int32_t length)
      : team_(team), histograms_(histograms), orders_(orders), length_(length) {}

  /// In each segment the protected slots, which are in, and the best others up to its quota.
  __device__ void strict(const std::int32_t* ends, const Share* shares, const Division& division) const {
    each_segment(ends, division, [&](const auto& team, std::int32_t i, std::int32_t from, std::int32_t to) {
      best_of(team, from, to, shares[i].quota - shares[i].protect, to - from - shares[i].protect,
              [&](std::int32_t t, bool is_best) {
                if (is_best) orders_[t] = kIn;
              });
    });
  }

  /// The best `wanted` of the slots that are not in yet.
  __device__ void rest(std::int32_t wanted) const {
    if (wanted <= 0) return;
    const std::uint64_t least = least_by_order(team_, histograms_, orders_, kOut + 1, 0, length_, wanted);
    for (std::int32_t t = team_.thread(); t < length_; t += team_.size())
      if (key_of(t) >= least) orders_[t] = kIn;
    team_.sync();
  }

  /// As published: candidates by segment, protected slots among them; then the best candidates over the row.
  __device__ void official(const std::int32_t* ends, const Share* shares, const Division& division, std::int32_t budget,
                           const Protected& guarded) const {
    each_segment(ends, division, [&](const auto& team, std::int32_t i, std::int32_t from, std::int32_t to) {
      best_of(team, from, to, shares[i].quota, to - from, [&](std::int32_t t, bool is_best) {
        if (guarded.holds(t, length_))
          orders_[t] = kIn;
        else if (!is_best)
          orders_[t] = kOut;
      });
    });
    rest(budget - guarded.count());
  }

  __device__ void write(std::int32_t* slots) const {
    write_kept(team_, length_, [&](std::int32_t t) { return orders_[t] == kIn; }, slots);
  }

 private:
  [[nodiscard]] __device__ std::uint64_t key_of(std::int32_t t) const {
    return std::uint64_t{orders_[t]} << 32 | static_cast<std::uint32_t>(t);
  }

  /// Calls body(team, segment, from, to) for every segment: one warp each, or the whole block if it is long.
  template <class Body>
  __device__ void each_segment(const std::int32_t* ends, const Division& division, const Body& body) const {
    const auto warp = static_cast<std::int32_t>(threadIdx.x / 32), warps = static_cast<std::int32_t>(blockDim.x / 32);
    for (std::int32_t i = 0; division.has_long && i < division.segments; ++i) {
      const std::int32_t from = i > 0 ? ends[i - 1] : 0;
      if (ends[i] - from > kWarpSlots) body(team_, i, from, ends[i]);
    }
    if (division.has_long) team_.sync();
    for (std::int32_t i = warp; i < division.segments; i += warps) {
      const std::int32_t from = i > 0 ? ends[i - 1] : 0;
      if (ends[i] - from <= kWarpSlots) body(WarpTeam{}, i, from, ends[i]);
    }
    team_.sync();
  }

  /// Calls mark(t, whether it is one of the best `wanted` candidates) for every slot of a segment. No slot is out.
  template <class Team, class Mark>
  __device__ void best_of(const Team& team, std::int32_t from, std::int32_t to, std::int32_t wanted,
                          std::int32_t candidates, const Mark& mark) const {
    const auto mark_from = [&](std::uint64_t least) {
      for (std::int32_t t = from + team.thread(); t < to; t += team.size()) mark(t, key_of(t) >= least);
    };
    if (wanted <= 0 || wanted >= candidates) return mark_from(wanted <= 0 ? ~std::uint64_t{0} : 0);
    if constexpr (std::is_same_v<Team, WarpTeam>) {
      if (to - from <= 64) return mark_best_of_few<2>(orders_, from, to, wanted, mark);
      if (to - from <= kFewSlots) return mark_best_of_few<kFewSlots / 32>(orders_, from, to, wanted, mark);
      if constexpr (!kNear)
        mark_from(least_by_order(team, histograms_ + threadIdx.x / 32 * kDigits, orders_, 1, from, to, wanted));
    } else {
      mark_from(least_by_order(team, histograms_, orders_, 1, from, to, wanted));
    }
  }

  const BlockTeam& team_;
  std::int32_t* histograms_;
  std::uint32_t* orders_;
  std::int32_t length_;
};

/// Room for one, which has a constructor.
struct alignas(Share) ShareRoom {
  std::byte bytes[sizeof(Share)];
};

/// Segments of a row and their quotas, by one warp. `cached`: where each threshold cuts; null: there are too many.
template <bool kNear>
__device__ Division divide(const MassSegmentedArguments& a, const RowLimit& limit, const std::uint64_t* prefix,
                           std::int32_t length, const std::int32_t* cached, std::int32_t* ends, std::int32_t* scratch,
                           Share* shares) {
  const WarpTeam team;
  const SegmentOptions options = segments_of(a.options, a.variant);
  const auto write_cuts = [&](std::int32_t* cuts) {
    if (kNear || cached != nullptr)
      return detail::distinct_cuts(cached, detail::thresholds(options.segment_mass), length, cuts, team);
    return team.from_first(team.thread() == 0 ? detail::cut_by_mass(prefix, length, options, cuts) : 0);
  };
  const std::int32_t count = segment_ends(length, options, write_cuts, ends, scratch, team);
  bool has_long = false;
  KVKEEP_UNROLL(1) for (std::int32_t i = team.thread(); i < count; i += team.size()) {
    shares[i] = segment_share(a.options.quotas, prefix, ends, i, length, limit.guarded);
    has_long = has_long || shares[i].length > Selection<kNear>::kWarpSlots;
  }
  team.sync();
  Division out{count, limit.budget, team.count(has_long) > 0};
  if (a.variant == Variant::official && !never_fits(count, limit.budget, a.options.min_quota)) {
    if (team.thread() == 0) published_quotas(shares, count, limit.budget, a.options.min_quota);
    return out;
  }
  if (a.variant == Variant::strict) out.through = covered(a.options, shares, count, limit.budget, limit.guarded);
  strict_quotas(shares, count, out.through, a.options.min_quota, team);
  return out;
}

template <bool kNear>
__global__ void __launch_bounds__(kFarThreads) mass_segmented_kernel(MassSegmentedArguments a, Workspace work) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(std::int32_t, histograms, (kNear ? 1 : kFarThreads / 32) * kDigits);
  KVKEEP_SHARED(std::int32_t, cached, kNear ? kNearSegments : kCachedCuts);
  KVKEEP_SHARED(std::int32_t, near_ends, kNearSegments);
  KVKEEP_SHARED(std::int32_t, near_cuts, kNearSegments);
  KVKEEP_SHARED(ShareRoom, near_shares, kNearSegments);
  KVKEEP_SHARED(Division, division, 1);
  const BlockTeam team(scratch);
  const unsigned r = blockIdx.x;  // no count of rows is larger than a grid
  const Row& row = a.rows[r];
  const RowLimit& limit = a.limits[r];
  const RowWindow& seen = a.windows[r];
  const std::int32_t length = row.length;
  float* const mass_out = a.mass + row.first;
  float* const used_out = a.used != nullptr ? a.used + row.first : mass_out;
  float* const credit_out = a.credit != nullptr ? a.credit + row.first : nullptr;
  if (!limit.due) {
    for (std::int32_t t = team.thread(); t < length; t += team.size()) a.slots[a.indptr[r] + t] = t;
    pass_row(row.credit, row.credit_length, length, mass_out, credit_out, used_out, team);
    return;
  }
  const RowNumbers<kNear> own(a.longest, work, row);
  std::int32_t newest = 0;
  if (a.options.suffix_fill == SuffixFill::causal_mean && seen.queries > 0) {
    const QueryView& queries = a.queries[r / static_cast<unsigned>(a.heads)];
    newest = queries.position(queries.count - 1);
  }
  const auto bring_orders = [&](const auto& score_of) {
    const bool official = a.variant == Variant::official;
    const Protected first = official ? Protected{a.padding.oldest, a.padding.newest} : limit.guarded;
    for (std::int32_t t = team.thread(); t < length; t += team.size()) {
      const float score = score_of(t);
      own.orders[t] = !first.holds(t, length) ? order_of(score) : official ? ~0U : kIn;
    }
  };
  float *usage = mass_out, *used = used_out, *credit = credit_out;
  if constexpr (kNear) {  // all that is read is asked for at once
    usage = own.usage;
    used = a.used != nullptr ? own.used : usage;
    credit = a.credit != nullptr ? own.credit : nullptr;
    const float *given = row.credit, *scores = a.scores + row.first;
    const std::int32_t known = credit == nullptr || given == nullptr ? 0 : row.credit_length;
    KVKEEP_UNROLL(3) for (std::int32_t t = team.thread(); t < length; t += team.size()) {
      const float score = scores[t];
      usage[t] = mass_out[t];
      if (t < known) credit[t] = given[t];
      own.orders[t] = __float_as_uint(score);
    }
    if (a.used == nullptr) bring_orders([&](std::int32_t t) { return __uint_as_float(own.orders[t]); });
    team.sync();
  }
  float top = 0;
  if (a.options.suffix_fill == SuffixFill::max_global) {
    const unsigned heads = static_cast<unsigned>(a.heads), first = r / heads * heads;
    KVKEEP_UNROLL(1) for (unsigned h = first; h < first + heads; ++h) { top = work.tops[h] > top ? work.tops[h] : top; }
  } else {
    top = team.largest(pool_history(a.options, usage, seen.history, own.fed, team));
  }
  if (seen.queries > 0)
    fill_suffix(a.options.suffix_fill, row.positions, length, newest, seen.history, top, usage, team);
  weigh_row(a.options, kNear && row.credit != nullptr ? credit : row.credit, row.credit_length, length, usage, own.fed,
            credit, used, team);
  if constexpr (kNear) {
    KVKEEP_UNROLL(2) for (std::int32_t t = team.thread(); t < length; t += team.size()) {
      mass_out[t] = usage[t];
      if (a.used != nullptr) used_out[t] = used[t];
      if (a.credit != nullptr) credit_out[t] = credit[t];
    }
    team.sync();
  }

  prefix_mass(used, length, own.prefix, team, left_out(a.options, limit.guarded));
  if (!kNear || a.used != nullptr) {
    const float* const scores = a.scores + row.first;
    bring_orders([&](std::int32_t t) { return scores[t]; });
  }
  const SegmentOptions options = segments_of(a.options, a.variant);
  const std::int64_t thresholds = options.kind == Segmentation::mass ? detail::thresholds(options.segment_mass) : 0;
  const bool is_cached = kNear || thresholds <= kCachedCuts;
  if (is_cached)
    for (std::int64_t k = 1 + team.thread(); k <= thresholds; k += team.size())
      cached[k - 1] = detail::cut_at(own.prefix, length, options, k);
  team.sync();
  const bool near = kNear || work.most <= kNearSegments;
  std::int32_t *ends = near ? near_ends : work.ends + r * work.most,
               *cuts = near ? near_cuts : work.cuts + r * work.most;
  Share* shares = near ? reinterpret_cast<Share*>(near_shares) : work.shares + r * work.most;
  const Selection<kNear> selection(team, histograms, own.orders, length);
  if (team.thread() < 32) {
    const Division divided =
        divide<kNear>(a, limit, own.prefix, length, is_cached ? cached : nullptr, ends, cuts, shares);
    if (team.thread() == 0) division[0] = divided;
  }
  team.sync();
  if (a.variant == Variant::official) {
    selection.official(ends, shares, division[0], limit.budget, limit.guarded);
  } else {
    selection.strict(ends, shares, division[0]);
    selection.rest(limit.budget - division[0].through);
  }
  selection.write(a.slots + a.indptr[r]);
  if (a.ends == nullptr) return;
  for (std::int64_t i = team.thread(); i < a.most_ends; i += team.size())
    a.ends[r * a.most_ends + i] = i < division[0].segments ? ends[i] : length;
}

template <bool kNear>
void launch_rows(const MassSegmentedArguments& arguments, Stream stream) {
  const Grid grid{.blocks = blocks_for(arguments.count),
                  .threads = kNear ? tuning::near_threads_for(arguments.longest, arguments.count)
                                   : tuning::far_threads_for(arguments.longest, arguments.count),
                  .shared_bytes = kNear ? NearSlots(static_cast<std::size_t>(arguments.longest)).bytes : 0};
  const Workspace work(arguments.options, arguments.count, arguments.longest, arguments.slots_in_all,
                       arguments.workspace);
  if (arguments.options.suffix_fill == SuffixFill::max_global)
    launch("mass_segmented_pool", mass_segmented_pool_kernel<kNear>, grid, stream, arguments, work);
  launch("mass_segmented", mass_segmented_kernel<kNear>, grid, stream, arguments, work);
}

}  // namespace

std::size_t mass_segmented_workspace_bytes(const MassSegmentedOptions& options, std::int32_t count,
                                           std::int32_t longest, std::int64_t slots_in_all) {
  return Workspace(options, count, longest, slots_in_all, nullptr).bytes;
}

void launch_mass_segmented(const MassSegmentedArguments& arguments, Stream stream) {
  require_aligned("mass_segmented", arguments.workspace);
  is_near(arguments.options, arguments.longest) ? launch_rows<true>(arguments, stream)
                                                : launch_rows<false>(arguments, stream);
}

}  // namespace kvkeep::cuda
