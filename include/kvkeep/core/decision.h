#pragma once
/// What a policy decided: who stays, and what becomes of the rest.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Importance of every slot: any real, higher stays, NaN is lowest. Flat over the rows of an event, row r at
/// [row.first, row.first + row.length).
struct Scores {
  Tensor data;  ///< f32 [slots]
};

/// Share of attention that every slot draws: not negative, each row sums to 1. A type of its own, so that it cannot be
/// taken for Scores.
struct Mass {
  Tensor data;  ///< f32 [slots]
};

/// Which slots stay, per row: ascending, unique, inside [0, length).
struct KeepSet {
  Tensor slots;                      ///< i32 [nnz]
  std::vector<std::int64_t> indptr;  ///< host [rows + 1]
  std::vector<std::int32_t> firm =
      {};  ///< [rows] oldest slots that stay where they are for certain, where `slots` lie on a device; else empty

  [[nodiscard]] std::int64_t count(std::size_t row) const { return indptr[row + 1] - indptr[row]; }
  /// Slots of one row; CPU only.
  [[nodiscard]] std::span<const std::int32_t> row(std::size_t r) const {
    return {slots.data_ptr<std::int32_t>() + indptr[r], static_cast<std::size_t>(count(r))};
  }
};

/// Token rows that go on to deeper layers (prefill selection).
struct TokenSet {
  Tensor tokens;                     ///< i32 [nnz] places among the tokens that are present in the layer, ascending
  std::vector<std::int64_t> indptr;  ///< host [sequences + 1]
  bool afresh = false;  ///< they make up a prompt of their own that begins again at the first layer, at positions from
                        ///< 0 (two passes)
};

/// Dropped slots that fold into spans instead of vanishing.
struct Fold {
  std::vector<std::int32_t> slots = {};  ///< [nnz] of one span after the other, ascending in each; each of them dropped
  std::vector<std::int64_t> spans = {0};   ///< [spans + 1] where each begins in `slots`
  std::vector<std::int64_t> indptr = {0};  ///< [rows + 1] spans of each row
  std::vector<float> weights =
      {};  ///< [nnz] how much a slot counts in the coarse entry of its span, 0 or more; empty: all alike
  std::vector<std::int32_t> settled =
      {};  ///< [groups] logical position below which everything is decided for good; empty: the policy does not ask
};

/// How AMS divided each row: for reports and replays, read by no later stage.
struct Allotment {
  Mass mass;       ///< usage, normalised; mixed with credit unless the evidence asks for explanations
  Mass mass_used;  ///< only with explanations: after mixing with credit, what segments and quotas follow
  std::vector<std::vector<std::int32_t>> ends;    ///< [rows][segments] one past each segment's last slot
  std::vector<std::vector<std::int32_t>> quotas;  ///< [rows][segments]
};

/// Which rows share one selection.
enum class Sharing : std::uint8_t {
  per_layer_per_head,  ///< none
  per_head,            ///< a KV head's rows in all layers
  all,                 ///< all rows of a sequence ("union")
};

/// Why a decision says what it says.
enum class Reason : std::uint8_t {
  nothing_due,   ///< no row is over its budget
  over_budget,   ///< rows were cut
  left_window,   ///< tokens left the local window: anchors stay, the rest is folded
  select_layer,  ///< prefill: this layer selects the tokens that go on
  last_layer,    ///< prefill: no layer selected, the last one chooses
};

/// The outcome of one event. Indexes the rows of the event's RowTable. Everything optional is absent unless the policy
/// uses it.
struct Decision {
  Reason reason = Reason::nothing_due;
  std::optional<KeepSet> keep;
  std::optional<Fold> fold;
  std::optional<TokenSet> narrow;
  std::optional<double>
      relative_variance;  ///< prefill: variance of the ranks around this layer, as a share of the first that was taken
  std::optional<Tensor> credit;  ///< f32 [slots] new EMA credit of every slot, before compaction
  Scores scores;                 ///< what the ranking followed; empty where the policy ranks by position only
  std::optional<Tensor> tally;   ///< f32 [slots] what an accumulating scorer gave every slot, before compaction; what
                                 ///< stays is Row::tally at the next event
  Sharing share =
      Sharing::per_layer_per_head;  ///< who got one selection; `scores` then repeat in every row that shares
  std::optional<Allotment> allotment;
  std::uint64_t serial =
      0;  ///< on a device: counts decisions of the accelerator, whose memory holds only the newest one's slots
};

}  // namespace kvkeep
