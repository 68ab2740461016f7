// SPDX-License-Identifier: Apache-2.0
#include "mass_segmented.h"

#include "launch.cuh"
#include "select.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kMostThreads;
using tuning::kWarpSegment;

constexpr std::int32_t kNearSegments = 128;  ///< most segments of a row that are in shared memory
constexpr std::int32_t kCachedCuts = 1024;   ///< cuts that are worked out side by side; if there are more, one by one

/// What a block has of its row beside the mass, in shared memory where the longest row fits.
struct NearSlots {
  std::size_t prefix, scores, fed, marks, bytes = 0;

  KVKEEP_HD explicit NearSlots(std::int32_t longest) {
    Parts parts;
    const auto slots = static_cast<std::size_t>(fit(longest) ? longest : 0);
    prefix = parts.take(sizeof(std::uint64_t) * slots);
    scores = parts.take(sizeof(float) * slots);
    fed = parts.take(sizeof(float) * slots);
    marks = parts.take(slots);
    bytes = parts.bytes;
  }
  [[nodiscard]] KVKEEP_HD static bool fit(std::int32_t longest) { return longest <= tuning::kNearSlots; }
};

/// The parts of the workspace. Only this defines their sizes and places.
struct Workspace {
  std::uint64_t* prefix;      ///< [slots], where they are not near
  float* fed;                 ///< the same
  std::uint8_t* marks;        ///< the same
  float* tops;                ///< [count]
  Share* shares;              ///< [count, most]
  std::int32_t *ends, *cuts;  ///< [count, most]
  std::int64_t most;          ///< segments of a row
  std::size_t bytes;

  KVKEEP_HD Workspace(const MassSegmentedOptions& options, std::int32_t count, std::int32_t longest, std::int64_t slots,
                      std::byte* base)
      : most(most_segments(options, longest)) {
    WorkspaceParts parts(base);
    if (NearSlots::fit(longest)) slots = 0;
    prefix = parts.take<std::uint64_t>(slots);
    shares = parts.take<Share>(count * most);
    ends = parts.take<std::int32_t>(count * most);
    cuts = parts.take<std::int32_t>(count * most);
    fed = parts.take<float>(slots);
    tops = parts.take<float>(count);
    marks = parts.take<std::uint8_t>(slots);
    bytes = static_cast<std::size_t>(parts.bytes());
  }
};

/// The block's team for prefix_mass(), which asks for sum() of the numbers whose sum_before() it has just asked for:
/// that is known then. Numbers go through two sets of words by turns, so that each round has one barrier.
class PrefixTeam : public BlockTeam {
 public:
  static constexpr std::int32_t kWords = 64;
  __device__ PrefixTeam(const BlockTeam& team, unsigned long long* words) : BlockTeam(team), words_(words) {}

  [[nodiscard]] __device__ std::uint64_t sum_before(std::uint64_t mine) {
    const std::int32_t lane = thread() % 32, warp = thread() / 32, warps = size() / 32;
    const std::uint64_t before = WarpTeam{}.sum_before(mine);
    unsigned long long* words = words_ + turn_ * 32;
    turn_ = 1 - turn_;
    if (lane == 31) words[warp] = before + mine;
    __syncthreads();
    const unsigned long long of_lane = lane < warps ? words[lane] : 0, before_warp = WarpTeam{}.sum_before(of_lane);
    all_ = __shfl_sync(kWholeWarp, before_warp + of_lane, warps - 1);
    return before + __shfl_sync(kWholeWarp, before_warp, warp);
  }
  [[nodiscard]] __device__ std::uint64_t sum(std::uint64_t) const { return all_; }

 private:
  unsigned long long* words_;
  unsigned long long all_ = 0;
  std::int32_t turn_ = 0;
};

/// Marks of a slot while a row's slots are selected.
enum Mark : std::uint8_t { kOut = 0, kCandidate = 1, kIn = 2 };

/// Numbers of one row while its block works on it.
struct RowNumbers {
  std::uint64_t* prefix;
  float* fed;
  std::uint8_t* marks;
  float* scores = nullptr;  ///< room for a copy of them; null: they are read where they are

  __device__ RowNumbers(std::int32_t longest, const Workspace& work, const Row& row) {
    if (!NearSlots::fit(longest)) {
      prefix = work.prefix + row.first;
      fed = work.fed + row.first;
      marks = work.marks + row.first;
      return;
    }
    const NearSlots near(longest);
    std::byte* shared = dynamic_shared();
    prefix = reinterpret_cast<std::uint64_t*>(shared + near.prefix);
    fed = reinterpret_cast<float*>(shared + near.fed);
    marks = reinterpret_cast<std::uint8_t*>(shared + near.marks);
    scores = reinterpret_cast<float*>(shared + near.scores);
  }
};

/// The pooled usage of every row, and its largest: runs first if heads look at each other.
__global__ void __launch_bounds__(kMostThreads) mass_segmented_pool_kernel(MassSegmentedArguments a) {
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const BlockTeam team(scratch);
  const Workspace work(a.options, a.count, a.longest, a.slots_in_all, a.workspace);
  for (std::int64_t r = blockIdx.x; r < a.count; r += gridDim.x) {
    if (!a.limits[r].due) {
      if (team.thread() == 0) work.tops[r] = 0;
      continue;
    }
    float* usage = a.mass + a.rows[r].first;
    pool_history(a.options, usage, a.windows[r].history, RowNumbers(a.longest, work, a.rows[r]).fed, team);
    const float top = largest(usage, a.windows[r].history, team);
    if (team.thread() == 0) work.tops[r] = top;
  }
}

/// One row's slots, selected segment by segment.
class Selection {
 public:
  __device__ Selection(const BlockTeam& team, std::int32_t* histograms, const float* scores, std::uint8_t* marks,
                       std::int32_t length, Protected guarded)
      : team_(team), histograms_(histograms), scores_(scores), marks_(marks), length_(length), guarded_(guarded) {}

  /// Calls body(team, segment, from, to) for every segment: one warp each, or the whole block if it is long.
  template <class Body>
  __device__ void each_segment(const std::int32_t* ends, std::int32_t count, const Body& body) const {
    const auto warp = static_cast<std::int32_t>(threadIdx.x / 32), warps = static_cast<std::int32_t>(blockDim.x / 32);
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int32_t from = i > 0 ? ends[i - 1] : 0;
      if (ends[i] - from > kWarpSegment) body(team_, histograms_, i, from, ends[i]);
    }
    team_.sync();
    for (std::int32_t i = warp; i < count; i += warps) {
      const std::int32_t from = i > 0 ? ends[i - 1] : 0;
      if (ends[i] - from <= kWarpSegment) body(WarpTeam{}, histograms_ + warp * kDigits, i, from, ends[i]);
    }
    team_.sync();
  }

  /// In each segment the protected slots, and the best others up to its quota.
  __device__ void strict(const std::int32_t* ends, const Share* shares, std::int32_t count) const {
    each_segment(ends, count,
                 [&](const auto& team, std::int32_t* histogram, std::int32_t i, std::int32_t from, std::int32_t to) {
                   const std::int32_t wanted = shares[i].quota - shares[i].protect;
                   const auto key_of = [&](std::int32_t t) {
                     return guarded_.holds(t, length_) ? 0 : rank_key(scores_[t], t);
                   };
                   std::uint64_t least = ~std::uint64_t{0};
                   if (wanted == to - from - shares[i].protect)
                     least = 1;
                   else if (wanted > 0)
                     least = least_kept(team, histogram, from, to, wanted, key_of);
                   for (std::int32_t t = from + team.thread(); t < to; t += team.size())
                     marks_[t] = guarded_.holds(t, length_) || key_of(t) >= least ? kIn : kOut;
                 });
  }

  /// The best `wanted` of the slots that are not in yet.
  __device__ void rest(std::int32_t wanted) const {
    if (wanted <= 0) return;
    const auto key_of = [&](std::int32_t t) { return marks_[t] == kIn ? 0 : rank_key(scores_[t], t); };
    const std::uint64_t least = least_kept(team_, histograms_, 0, length_, wanted, key_of);
    for (std::int32_t t = team_.thread(); t < length_; t += team_.size())
      if (key_of(t) >= least) marks_[t] = kIn;
    team_.sync();
  }

  /// As published: candidates by segment, protected slots among them; then the best candidates over the row.
  __device__ void official(const std::int32_t* ends, const Share* shares, std::int32_t count, std::int32_t budget,
                           Padding padding) const {
    const auto rank = [&](std::int32_t t) {
      return padding.holds(t, length_) ? first_key(t) : rank_key(scores_[t], t);
    };
    each_segment(ends, count,
                 [&](const auto& team, std::int32_t* histogram, std::int32_t i, std::int32_t from, std::int32_t to) {
                   std::uint64_t least = ~std::uint64_t{0};
                   if (shares[i].quota >= to - from)
                     least = 1;
                   else if (shares[i].quota > 0)
                     least = least_kept(team, histogram, from, to, shares[i].quota, rank);
                   for (std::int32_t t = from + team.thread(); t < to; t += team.size())
                     marks_[t] = guarded_.holds(t, length_) ? kIn : rank(t) >= least ? kCandidate : kOut;
                 });
    const std::int32_t wanted = budget - guarded_.count();
    const auto key_of = [&](std::int32_t t) { return marks_[t] == kCandidate ? rank(t) : 0; };
    const std::uint64_t least =
        wanted > 0 ? least_kept(team_, histograms_, 0, length_, wanted, key_of) : ~std::uint64_t{0};
    for (std::int32_t t = team_.thread(); t < length_; t += team_.size())
      if (marks_[t] == kCandidate && rank(t) >= least) marks_[t] = kIn;
    team_.sync();
  }

  __device__ void write(std::int32_t* slots) const {
    write_kept(team_, length_, [&](std::int32_t t) { return marks_[t] == kIn; }, slots);
  }

 private:
  const BlockTeam& team_;
  std::int32_t* histograms_;
  const float* scores_;
  std::uint8_t* marks_;
  std::int32_t length_;
  Protected guarded_;
};

/// Room for one, which has a constructor.
struct alignas(Share) ShareRoom {
  std::byte bytes[sizeof(Share)];
};

__global__ void __launch_bounds__(kMostThreads, 1) mass_segmented_kernel(MassSegmentedArguments a) {
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(unsigned long long, words, PrefixTeam::kWords);
  KVKEEP_SHARED(std::int32_t, histograms, kMostThreads / 32 * kDigits);
  KVKEEP_SHARED(std::int32_t, cached, kCachedCuts);
  KVKEEP_SHARED(std::int32_t, near_ends, kNearSegments);
  KVKEEP_SHARED(std::int32_t, near_cuts, kNearSegments);
  KVKEEP_SHARED(ShareRoom, near_shares, kNearSegments);
  const BlockTeam team(scratch);
  const Workspace work(a.options, a.count, a.longest, a.slots_in_all, a.workspace);
  for (std::int64_t r = blockIdx.x; r < a.count; r += gridDim.x) {
    const Row& row = a.rows[r];
    const RowLimit limit = a.limits[r];
    const RowWindow seen = a.windows[r];
    const std::int32_t length = row.length;
    std::int32_t* slots = a.slots + a.indptr[r];
    float* usage = a.mass + row.first;
    float* used = a.used != nullptr ? a.used + row.first : usage;
    float* credit = a.credit != nullptr ? a.credit + row.first : nullptr;
    if (!limit.due) {
      for (std::int32_t t = team.thread(); t < length; t += team.size()) slots[t] = t;
      pass_row(row.credit, row.credit_length, length, usage, credit, used, team);
      continue;
    }
    const RowNumbers own(a.longest, work, row);
    const float* scores = a.scores + row.first;
    if (own.scores != nullptr) {
      for (std::int32_t t = team.thread(); t < length; t += team.size()) own.scores[t] = scores[t];
      scores = own.scores;
    }
    float top = 0;
    if (a.options.suffix_fill == SuffixFill::max_global) {
      const std::int64_t first = r / a.heads * a.heads;
      for (std::int64_t h = first; h < first + a.heads; ++h) top = work.tops[h] > top ? work.tops[h] : top;
    } else {
      pool_history(a.options, usage, seen.history, own.fed, team);
      top = largest(usage, seen.history, team);
    }
    if (seen.queries > 0) {
      const QueryView& queries = a.queries[r / a.heads];
      fill_suffix(a.options.suffix_fill, row.positions, length, queries.position(queries.count - 1), seen.history, top,
                  usage, team);
    }
    weigh_row(a.options, row.credit, row.credit_length, length, usage, own.fed, credit, used, team);

    prefix_mass(used, length, own.prefix, PrefixTeam(team, words), left_out(a.options, limit.guarded));
    const SegmentOptions options = segments_of(a.options, a.variant);
    const std::int64_t thresholds = options.kind == Segmentation::mass ? detail::thresholds(options.segment_mass) : 0;
    if (thresholds <= kCachedCuts)
      for (std::int64_t k = 1 + team.thread(); k <= thresholds; k += team.size())
        cached[k - 1] = detail::cut_at(own.prefix, length, options, k);
    team.sync();
    const bool near = work.most <= kNearSegments;
    std::int32_t *ends = near ? near_ends : work.ends + r * work.most,
                 *cuts = near ? near_cuts : work.cuts + r * work.most, count = 0;
    Share* shares = near ? reinterpret_cast<Share*>(near_shares) : work.shares + r * work.most;
    if (team.thread() == 0)
      count = segment_ends(
          own.prefix, length, options,
          [&](std::int64_t k) {
            return thresholds <= kCachedCuts ? cached[k - 1] : detail::cut_at(own.prefix, length, options, k);
          },
          ends, cuts);
    count = team.from_first(count);
    for (std::int32_t i = team.thread(); i < count; i += team.size())
      shares[i] = segment_share(a.options.quotas, own.prefix, ends, i, length, limit.guarded);
    team.sync();

    const Selection selection(team, histograms, scores, own.marks, length, limit.guarded);
    if (a.variant == Variant::official) {
      if (team.thread() == 0) official_quotas(shares, count, limit.budget, a.options.min_quota);
      team.sync();
      selection.official(ends, shares, count, limit.budget, a.padding);
    } else {
      const std::int32_t through = covered(a.options, shares, count, limit.budget, limit.guarded);
      strict_quotas(shares, count, through, a.options.min_quota, team);
      selection.strict(ends, shares, count);
      selection.rest(limit.budget - through);
    }
    selection.write(slots);
  }
}

}  // namespace

std::size_t mass_segmented_workspace_bytes(const MassSegmentedOptions& options, std::int32_t count,
                                           std::int32_t longest, std::int64_t slots_in_all) {
  return Workspace(options, count, longest, slots_in_all, nullptr).bytes;
}

void launch_mass_segmented(const MassSegmentedArguments& arguments, Stream stream) {
  require_aligned("mass_segmented", arguments.workspace);
  const Grid grid{.blocks = blocks_for(arguments.count),
                  .threads = tuning::threads_for(arguments.longest),
                  .shared_bytes = NearSlots(arguments.longest).bytes};
  if (arguments.options.suffix_fill == SuffixFill::max_global)
    launch("mass_segmented_pool", mass_segmented_pool_kernel, grid, stream, arguments);
  launch("mass_segmented", mass_segmented_kernel, grid, stream, arguments);
}

}  // namespace kvkeep::cuda
