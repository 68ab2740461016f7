// SPDX-License-Identifier: Apache-2.0
// Compiled twice into one program: as the library is, and with -march=native and fused multiply-adds, as kvkeep_native
// (-Dkvkeep=kvkeep_native), so that the linker keeps both copies of what is inline.

#include "bodies.h"

#include "kvkeep/allot/divide.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/memory/opening.h"
#include "kvkeep/score/rkv.h"

namespace kvkeep {

contraction::Divided divide(const contraction::Row& row) {
  const auto length = static_cast<std::int32_t>(row.mass.size());
  const auto slots = row.mass.size();
  const Variant variant = row.official ? Variant::official : Variant::strict;
  contraction::Divided out{row.credit, std::vector<float>(slots), std::vector<std::int32_t>(slots), {}};
  out.credit.resize(slots);
  update_credit(row.mass.data(), length, static_cast<std::int32_t>(row.credit.size()), {row.decay, row.mix},
                kMassEpsilon, false, out.credit.data(), out.used.data());

  std::vector<std::uint64_t> prefix(slots);
  prefix_mass(out.used.data(), length, prefix.data());
  std::vector<std::int32_t> scratch(slots);
  const SegmentOptions segments{variant, Segmentation::mass, 0, row.segment_mass, row.min_segment, row.max_segment};
  const std::int32_t count = segment_ends(prefix.data(), length, segments, out.ends.data(), scratch.data());
  out.ends.resize(static_cast<std::size_t>(count));

  MassSegmentedOptions options;
  options.coverage = row.coverage;
  const Protected guarded = protect(length, row.budget, 4, 8, variant);
  std::vector<Share> shares;
  for (std::int32_t i = 0; i < count; ++i)
    shares.push_back(segment_share(QuotaWeight::mass, prefix.data(), out.ends.data(), i, length, guarded));
  if (row.official)
    official_quotas(shares.data(), count, row.budget, row.min_quota);
  else
    strict_quotas(shares.data(), count, covered(options, shares.data(), count, row.budget, guarded), row.min_quota);
  for (const Share& share : shares) out.quotas.push_back(share.quota);
  return out;
}

contraction::Mixed mix(const std::vector<float>& x) {
  contraction::Mixed out{x, {}};
  const auto pairs = static_cast<std::int64_t>(x.size() / 4);
  rope_rotate(RopeStyle::half, pairs, x.data() + 2 * pairs, x.data() + 3 * pairs, out.single.data());
  for (std::size_t i = 0; i + 3 < x.size(); ++i) {
    out.wide.push_back(rope_angle(static_cast<std::int64_t>(i) * 104729, static_cast<double>(x[i])));
    out.single.push_back(Rkv::mix(0.1F, x[i], x[i + 1]));
    out.single.push_back(share_factor(x[i], static_cast<double>(x[i + 1]) + 3, x[i + 2]));
  }
  return out;
}

}  // namespace kvkeep
