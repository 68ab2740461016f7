// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What a policy decided: which slots stay, and what happens to the rest.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/slot.h"
#include "kvkeep/core/tensor.h"

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

/// Importance of every slot: any real number, higher stays, NaN is lowest. Flat over the rows of an event, row r at
/// [row.first, row.first + row.length). Rows that no event cuts are not scored: 0 on the CPU, undefined on a device.
struct Scores {
  Tensor data;  ///< f32 [slots]
};

/// Share of attention that every slot draws: not negative, and each row sums to 1. A separate type, so that it cannot
/// be mistaken for Scores.
struct Mass {
  Tensor data;  ///< f32 [slots]
};

/// Which slots stay, per row: ascending, unique, inside [0, length).
struct KeepSet {
  Tensor slots;                      ///< i32 [nnz]
  std::vector<std::int64_t> indptr;  ///< host [rows + 1]; where only a device knows how many slots stay
                                     ///< (EventTables::counts), room for as many as may
  std::vector<std::int32_t> in_place =
      {};  ///< [rows] number of oldest slots that certainly stay where they are, if `slots` is on a device; else empty

  [[nodiscard]] std::int64_t count(std::size_t row) const { return indptr[row + 1] - indptr[row]; }
  /// Slots of one row; CPU only.
  [[nodiscard]] std::span<const std::int32_t> row(std::size_t r) const { return room(r); }
  /// Where they are written.
  [[nodiscard]] std::span<std::int32_t> room(std::size_t r) const {
    return {slots.data<std::int32_t>() + indptr[r], static_cast<std::size_t>(count(r))};
  }
};

/// Throws InvalidArgument unless the kept slots of a row ascend, from 0 to below its length. keeps(): who keeps them of
/// which row, for the message.
template <class Keeps>
void require_ascending(std::span<const std::int32_t> kept, std::int32_t length, const Keeps& keeps) {
  std::int32_t before = -1;
  bool ascend = true;
  for (const std::int32_t slot : kept) ascend = ascend && slot > std::exchange(before, slot);
  KVKEEP_REQUIRE(ascend && before < length, keeps(), " that ", ascend ? "are beyond it" : "do not ascend",
                 "; allowed ascending ones from 0 to ", length - 1);
}

/// Token rows that continue to deeper layers (prefill selection).
struct TokenSet {
  Tensor tokens;                     ///< i32 [nnz] places among the tokens present in the layer, ascending
  std::vector<std::int64_t> indptr;  ///< host [sequences + 1]
  bool restart =
      false;  ///< they form a new prompt that starts again at the first layer, at positions from 0 (two passes)
};

/// Counts of what attention read of folded spans.
struct ReadCounts {
  std::int64_t queries = 0;   ///< tokens x KV heads
  std::int64_t zooms = 0;     ///< spans opened, by token and KV head
  std::int64_t tokens = 0;    ///< tokens in them
  std::int64_t bytes = 0;     ///< of their factors, each time that they are read
  std::int64_t unmet = 0;     ///< spans asked for that the budget had no room for
  std::int64_t resident = 0;  ///< entries in reach if nothing opens, rounded up, over all queries

  /// One of these counts per query; NaN if there were no queries.
  [[nodiscard]] double a_query(std::int64_t count) const {
    return queries == 0 ? std::numeric_limits<double>::quiet_NaN()
                        : static_cast<double>(count) / static_cast<double>(queries);
  }

  ReadCounts& operator+=(const ReadCounts& other);
  friend ReadCounts operator+(ReadCounts a, const ReadCounts& b) { return a += b; }
};

/// Dropped slots that fold into spans instead of vanishing.
struct Fold {
  bool listed = true;  ///< false, on a device: `slots` and `weights` are empty, and the spans of a row are those of all
                       ///< slots that it drops, in their order
  std::vector<std::int32_t> slots = {};    ///< [nnz] span after span, ascending within each; all of them dropped
  std::vector<std::int64_t> spans = {0};   ///< [spans + 1] start of each span in `slots`
  std::vector<std::int64_t> indptr = {0};  ///< [rows + 1] spans of each row
  std::vector<float> weights =
      {};  ///< [nnz] weight of a slot in the coarse entry of its span, 0 or more; empty: equal weights
  std::int32_t joined_from = 0, cut_above = 0;  ///< on a device, if only that knows where spans end: spans of fewer
                                                ///< slots join, longer ones are cut (SpanCut). `spans` are then as many
                                                ///< as there may be, and the first of a row has all of its slots
  bool by_mass = false;                         ///< and then: mass weights the slots
  std::vector<std::int32_t> settled =
      {};  ///< [groups] logical position below which every decision is final; empty: the policy does not use it

  /// True if `spans` are as many as there may be.
  [[nodiscard]] bool bounded() const { return cut_above > 0; }
};

/// How AMS divided each row. For reports and replays only: no later stage reads it.
struct Allotment {
  Mass mass;       ///< normalised usage; mixed with credit unless Evidence::explain is set
  Mass mass_used;  ///< only with Evidence::explain: after mixing with credit; segments and quotas follow it
  std::vector<std::vector<std::int32_t>> ends;    ///< [rows][segments] one past each segment's last slot
  std::vector<std::vector<std::int32_t>> quotas;  ///< [rows][segments]
};

/// The reason for a decision.
enum class Reason : std::uint8_t {
  nothing_due,   ///< no row is over its budget
  over_budget,   ///< rows were cut
  left_window,   ///< tokens left the local window: anchors stay, the rest folds
  select_layer,  ///< prefill: this layer selects the tokens that continue
  last_layer,    ///< prefill: no layer selected, so the last one does
};

/// On a device: the tables of the event that a decision belongs to. The machine's memory holds those of the newest
/// event only.
struct EventTables {
  const Row* rows = nullptr;             ///< [rows]
  const std::int64_t* indptr = nullptr;  ///< [rows + 1] where each row's kept slots are
  std::uint64_t serial = 0;              ///< number of the event
  const std::int32_t* counts =
      nullptr;  ///< [rows] slots that stay, if that follows from the scores; null: as many as KeepSet::indptr says
  const std::int32_t* ends = nullptr;  ///< [rows, most_ends] one past each segment's last slot, then the row's length,
                                       ///< if spans end there; else null
  std::int64_t most_ends = 0;
  const float* mass = nullptr;  ///< then: f32 [slots] Allotment::mass
};

/// The outcome of one event. Indexes the rows of the event's RowTable. Optional members are absent unless the policy
/// uses them.
struct Decision {
  Reason reason = Reason::nothing_due;
  std::optional<KeepSet> keep;
  std::optional<Fold> fold;
  std::optional<TokenSet> narrow;
  std::optional<double>
      relative_variance;  ///< prefill: variance of the ranks around this layer, as a share of the first one measured
  std::optional<Tensor> credit;  ///< f32 [slots] new EMA credit of every slot, before compaction
  Scores scores;                 ///< the scores that ranked the slots; empty if the policy ranks by position only
  std::optional<Tensor> tally;   ///< f32 [slots] what an accumulating scorer gave every slot, before compaction; for
                                 ///< slots that stay it is Row::tally at the next event
  Sharing share =
      Sharing::per_layer_per_head;  ///< which rows share one selection; `scores` are then the same in each of them
  std::optional<Allotment> allotment;
  EventTables tables = {};  ///< on a device
  std::vector<std::int32_t> kept_per_head =
      {};  ///< [groups, whole_heads] slots that the row of each KV head of the
           ///< model keeps, where ranks hold a part each; empty: as many as rows here

  /// [rows] Slots that stay whatever they score; empty: none. An upper bound on a device where some are pinned.
  std::vector<std::int32_t> guarded = {};

  /// Slots of a row that stay because of their scores.
  [[nodiscard]] std::int64_t chosen(std::size_t row) const {
    return std::max<std::int64_t>(0, keep->count(row) - (guarded.empty() ? 0 : guarded[row]));
  }
};

inline TokenSet tokens_of(std::span<const std::int32_t> places) {
  TokenSet set{empty({static_cast<std::int64_t>(places.size())}, Dtype::i32),
               {0, static_cast<std::int64_t>(places.size())}};
  std::ranges::copy(places, set.tokens.data<std::int32_t>());
  return set;
}

}  // namespace kvkeep
