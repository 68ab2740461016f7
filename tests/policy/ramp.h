// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The allocator of docs/start/extending.md that gives rows other budgets.

#include <algorithm>
#include <utility>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/policy/registry.h"

namespace kvkeep::testing {

class Ramp final : public kvkeep::Allocator {
 public:
  static constexpr kvkeep::AllocatorTraits traits{.name = "ramp", .what = "deeper layers keep more", .source = "none"};
  [[nodiscard]] std::string_view name() const override { return traits.name; }
  void check(kvkeep::AllocatorContext& policy) const override { kvkeep::require_own_form(traits.name, policy, false); }
  [[nodiscard]] bool ragged() const override { return true; }  // engines give a length per row
  [[nodiscard]] kvkeep::AcrossHeads across_heads() const override { return kvkeep::AcrossHeads::nothing; }

  void spread(const kvkeep::Evidence& evidence, std::span<const std::int32_t> least,
              std::vector<kvkeep::RowLimit>& rows) const override {
    const std::vector<std::int32_t> layers = evidence.spec.full_layers();
    const std::size_t heads = rows.size() / least.size();  // rows of a group: a layer of a sequence
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const kvkeep::Row& row = evidence.table.rows[r];
      const auto depth = std::lower_bound(layers.begin(), layers.end(), row.layer) - layers.begin();
      const double share = layers.size() < 2 ? 1 : (2.0 + 2.0 * double(depth) / double(layers.size() - 1)) / 3;
      const std::int32_t stay = std::max(1, std::min(least[r / heads], rows[r].budget));  // whatever they score
      rows[r].budget = stay + std::int32_t(share * (rows[r].budget - stay));
      rows[r].due = row.length > rows[r].budget;
    }
  }
  void allot(const kvkeep::Evidence& evidence, const kvkeep::Limits& limits, const kvkeep::Scores& scores,
             kvkeep::WindowAttention seen, kvkeep::Decision& decision) const override {
    kvkeep::Flat().allot(evidence, limits, scores, std::move(seen), decision);
  }
};

}  // namespace kvkeep::testing

namespace kvkeep::testing {

/// Once in a program.
inline void register_ramp() { [[maybe_unused]] static const bool registered = (register_allocator<Ramp>(), true); }

}  // namespace kvkeep::testing
