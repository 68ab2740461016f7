#pragma once
/// Rows that share one selection: which they are, and what becomes of their scores. The same on every machine; no
/// LibTorch in here.

#include <cstdint>

#include "kvkeep/core/hd.h"

namespace kvkeep {

/// Which rows share one selection.
enum class Sharing : std::uint8_t {
  per_layer_per_head,  ///< none
  layer,               ///< a layer's rows of a sequence, ranked by their mean score
  per_head,            ///< a KV head's rows in all layers
  all,                 ///< all rows of a sequence, ranked by their largest score ("union")
  all_mean,            ///< all rows of a sequence, ranked by their mean score ("union_mean")
};

/// What the heads of a layer must know of each other, if ranks hold a part of them each (across_ranks()).
enum class AcrossHeads : std::uint8_t {
  nothing,  ///< each row is scored and allotted by itself, and all heads of a layer keep as many slots
  counts,   ///< each row is allotted by itself; how many slots it keeps follows from its scores
  tops,  ///< each row is allotted by itself, once it knows the largest of Allocator::tops() over the heads of its layer
  scores,  ///< the rows of a layer are scored or allotted together
};

/// Rows of an event, in the order layer, sequence, head, in sets that share one selection.
struct SharedRows {
  Sharing share = Sharing::all;
  std::int64_t layers = 0, sequences = 0, heads = 0;

  [[nodiscard]] KVKEEP_HD bool across_heads() const { return share != Sharing::per_head; }
  [[nodiscard]] KVKEEP_HD bool across_layers() const { return share != Sharing::layer; }
  [[nodiscard]] KVKEEP_HD std::int64_t sets() const {
    return sequences * (across_heads() ? 1 : heads) * (across_layers() ? 1 : layers);
  }
  /// Rows of one set.
  [[nodiscard]] KVKEEP_HD std::int64_t members() const {
    return (across_layers() ? layers : 1) * (across_heads() ? heads : 1);
  }
  [[nodiscard]] KVKEEP_HD std::int64_t row(std::int64_t set, std::int64_t member) const {
    if (!across_heads()) return member * sequences * heads + set;
    const auto m = static_cast<std::uint32_t>(member), of_layer = static_cast<std::uint32_t>(heads);
    return (m / of_layer * sequences + set) * heads + m % of_layer;
  }

  /// A member's score joins those before it; NaN gives way to a number where the largest counts.
  [[nodiscard]] KVKEEP_HD float join(float score, float before) const {
    if (share != Sharing::all) return score + before;
    return score > before || before != before ? score : before;
  }
  /// The score of the set, after its last member has joined.
  [[nodiscard]] KVKEEP_HD float settle(float joined) const {
    const auto count = static_cast<float>(members());
    return share == Sharing::all ? joined : share == Sharing::layer ? joined * (1.0F / count) : joined / count;
  }
};

}  // namespace kvkeep
