// SPDX-License-Identifier: Apache-2.0
// An allocator of one's own, in a plug-in: a share of the budget goes to the newest slots, the rest to the best scores.

#include <kvkeep/allot/allocator.h>
#include <kvkeep/core/rank_key.h>
#include <kvkeep/policy/plugin.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace {

struct HalvesOptions {
  double newest = 0.5;

  void describe(kvkeep::Fields& f) {
    f.real("newest", newest, kvkeep::Range{0, 1}, "share of what scores decide that goes to the newest slots instead");
  }
};

class Halves final : public kvkeep::AllocatorOf<HalvesOptions> {
 public:
  static constexpr kvkeep::AllocatorTraits traits{
      .name = "halves", .what = "a share for the newest slots, the rest for the best", .source = "none"};
  using AllocatorOf::AllocatorOf;
  [[nodiscard]] std::string_view name() const override { return traits.name; }
  void check(kvkeep::AllocatorContext& policy) const override { kvkeep::require_own_form(traits.name, policy, true); }
  [[nodiscard]] kvkeep::AcrossHeads across_heads() const override { return kvkeep::AcrossHeads::nothing; }

  /// Cost: O(slots) on average.
  void allot(const kvkeep::Evidence& evidence, const kvkeep::Limits& limits, const kvkeep::Scores& scores,
             kvkeep::WindowAttention, kvkeep::Decision& decision) const override {
    kvkeep::require_host("halves", evidence.table.device);
    decision.keep = kvkeep::empty_keep_set(evidence.table, limits);  // room for what each row keeps
    kvkeep::each_row(evidence.table, [&](std::size_t r, const kvkeep::Row& row) {
      const std::span<std::int32_t> kept = decision.keep->room(r);
      if (!limits.rows[r].due) return std::iota(kept.begin(), kept.end(), 0);  // it keeps every slot

      const float* g = scores.data.data<float>() + row.first;
      const kvkeep::Protected always = kvkeep::stays(limits, r, row.length);  // sinks, recents, pins
      std::vector<std::int32_t> open;
      std::size_t taken = 0;
      for (std::int32_t t = row.length - 1; t >= 0; --t)
        if (always.holds(t, row.length))
          kept[taken++] = t;
        else
          open.push_back(t);  // newest first
      const std::size_t wanted = kept.size() - taken;
      const auto of_age = open.begin() + static_cast<std::ptrdiff_t>(options_.newest * static_cast<double>(wanted));
      const auto end = open.begin() + static_cast<std::ptrdiff_t>(wanted);
      if (end != open.end())
        std::nth_element(of_age, end, open.end(), [g](std::int32_t a, std::int32_t b) {
          return kvkeep::rank_key(g[a], a) > kvkeep::rank_key(g[b], b);  // NaN is lowest; of equal ones the newer stays
        });
      std::copy(open.begin(), end, kept.begin() + static_cast<std::ptrdiff_t>(taken));
      std::sort(kept.begin(), kept.end());
    });
  }
};

}  // namespace

KVKEEP_PLUGIN() { kvkeep::register_allocator<Halves>(); }
