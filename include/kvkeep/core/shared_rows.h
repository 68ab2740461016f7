#pragma once
/// Rows that share one selection: which they are, and what becomes of their scores. The same on every machine; no
/// LibTorch in here.

#include <cstdint>

#include "kvkeep/core/hd.h"

namespace kvkeep {

/// Which rows share one selection.
enum class Sharing : std::uint8_t {
  per_layer_per_head,  ///< none
  per_head,            ///< a KV head's rows in all layers
  all,                 ///< all rows of a sequence, ranked by their largest score ("union")
  all_mean,            ///< all rows of a sequence, ranked by their mean score ("union_mean")
};

/// Rows of an event, in the order layer, sequence, head, in sets that share one selection.
struct SharedRows {
  Sharing share = Sharing::all;
  std::int64_t layers = 0, sequences = 0, heads = 0;

  [[nodiscard]] KVKEEP_HD bool across_heads() const { return share != Sharing::per_head; }
  [[nodiscard]] KVKEEP_HD std::int64_t sets() const { return sequences * (across_heads() ? 1 : heads); }
  /// Rows of one set.
  [[nodiscard]] KVKEEP_HD std::int64_t members() const { return layers * (across_heads() ? heads : 1); }
  [[nodiscard]] KVKEEP_HD std::int64_t row(std::int64_t set, std::int64_t member) const {
    const std::int64_t layer = across_heads() ? member / heads : member,
                       place = across_heads() ? set * heads + member % heads : set;
    return layer * sequences * heads + place;
  }

  /// A member's score joins those before it; NaN gives way to a number where the largest counts.
  [[nodiscard]] KVKEEP_HD float join(float score, float before) const {
    if (share != Sharing::all) return score + before;
    return score > before || before != before ? score : before;
  }
  /// The score of the set, after its last member has joined.
  [[nodiscard]] KVKEEP_HD float settle(float joined) const {
    return share == Sharing::all ? joined : joined / static_cast<float>(members());
  }
};

}  // namespace kvkeep
