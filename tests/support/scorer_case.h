// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Random events for scorers, as the library sees them and as plain numbers for a second implementation, and the laws
/// that hold for every scorer.
///
/// A test of a scorer is three lines:
///   expect_scores_agree(KeyDiff(), oracle::keydiff, 200, {.absolute = 1e-6, .relative = 1e-5});
///   expect_scorer_laws(KeyDiff(), 40);
///   for_every_instruction_set([] { expect_scores_agree(KeyDiff(), oracle::keydiff, 20, {}); });

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvkeep/kvkeep.h"
#include "oracle/random_case.h"
#include "oracle/scorer_input.h"

namespace kvkeep::testing {

struct ScorerCaseOptions {
  std::int32_t longest = 200;      ///< slots of a row
  std::int32_t most_queries = 70;  ///< queries seen of a sequence; often fewer, sometimes none
  std::int32_t least_dim = 1;      ///< head size of keys
  bool ragged = true;              ///< heads of a sequence may hold different numbers of slots
  bool caps = true;                ///< logits may be capped
  oracle::Ropes ropes = oracle::Ropes::any;
};

class ScorerArrangement;

/// One event: 1-3 full layers (sometimes with layers without a cache between), 1-4 sequences of different lengths, GQA
/// groups of 1 to 8, head sizes from 1 to 256 with Dk != Dv, every dtype, gaps in positions that differ by head, equal
/// keys, zero keys, similar keys, one token, windows longer than the cache, queries before or after RoPE of both
/// styles, partial RoPE, attention scaling. Everything follows from the seed.
class ScorerCase {
 public:
  explicit ScorerCase(std::uint64_t seed, const ScorerCaseOptions& options = {});

  /// How the same content lies in memory.
  struct Layout {
    std::vector<std::int32_t> order =
        {};                      ///< sequences of the event, by their number in the case; empty: all, ascending
    bool transposed = false;     ///< cache [B, slots, heads, D] seen as [B, heads, slots, D]
    std::int32_t poisoned = -1;  ///< sequence with NaN and infinity among its keys; -1: none
    bool tight = false;          ///< no left padding, no places to spare
  };
  [[nodiscard]] ScorerArrangement arranged(const Layout& layout) const;
  [[nodiscard]] ScorerArrangement arranged() const;

  [[nodiscard]] std::int32_t sequences() const { return static_cast<std::int32_t>(inputs_.size()); }
  /// Sequence s in full layer number l.
  [[nodiscard]] const oracle::ScorerInput& input(std::int32_t s, std::int32_t l) const {
    return inputs_[static_cast<std::size_t>(s)][static_cast<std::size_t>(l)];
  }
  [[nodiscard]] std::int32_t layers() const { return static_cast<std::int32_t>(inputs_.front().size()); }
  [[nodiscard]] const ModelSpec& spec() const { return spec_; }
  [[nodiscard]] const std::string& description() const { return description_; }  ///< one line, enough to read a failure

 private:
  friend class ScorerArrangement;
  std::uint64_t seed_;
  ModelSpec spec_;
  QueryBasis basis_ = QueryBasis::pre_rope;
  Dtype key_dtype_ = Dtype::f32, value_dtype_ = Dtype::f32, query_dtype_ = Dtype::f32;
  std::vector<std::vector<oracle::ScorerInput>> inputs_;  ///< [sequences][full layers]
  std::vector<Tensor> projections_;                       ///< [num_layers]
  std::string description_;
};

/// A case in memory, ready to be scored. Lives no longer than its case.
class ScorerArrangement {
 public:
  ScorerArrangement(const ScorerCase& from, const ScorerCase::Layout& layout);
  ScorerArrangement(ScorerArrangement&&) = default;

  [[nodiscard]] Evidence evidence() const {
    return {from_->spec_, table_, from_->basis_, Moment::step_end, false, from_->projections_};
  }
  [[nodiscard]] const Limits& limits() const { return limits_; }
  [[nodiscard]] const RowTable& table() const { return table_; }
  [[nodiscard]] std::int32_t sequence_of(const Row& row) const {
    return order_[static_cast<std::size_t>(row.sequence)];
  }  ///< its number in the case
  /// The plain numbers of a row's layer and sequence; its head is row.head.
  [[nodiscard]] const oracle::ScorerInput& input(const Row& row) const;

 private:
  struct Ring {
    std::vector<std::byte> data;
    std::vector<std::int32_t> positions;
  };
  const ScorerCase* from_;
  std::vector<std::int32_t> order_;
  std::vector<LayerKv> cache_;
  std::vector<Ring> rings_;  ///< [groups]
  RowTable table_;
  Limits limits_;
};

/// Scores as a policy would get them, flat over the rows.
[[nodiscard]] Scores scores_of(const Scorer& scorer, const ScorerArrangement& arrangement);

struct Tolerance {
  double absolute = 1e-6;
  double relative = 1e-4;
};

using ScorerOracle = std::function<oracle::ScorerOutput(const oracle::ScorerInput&)>;

/// Every unguarded slot of every due row, on `cases` random events (KVKEEP_RANDOM_CASES overrides the number). A NaN of
/// one must be a NaN of the other.
void expect_scores_agree(const Scorer& scorer, const ScorerOracle& oracle, int cases, Tolerance tolerance,
                         const ScorerCaseOptions& options = {});

/// A row's bits do not depend on its batch mates, their order, the number of threads, or the strides of the cache; NaN
/// and infinity in the keys of one sequence neither crash nor reach another.
void expect_scorer_laws(const Scorer& scorer, int cases, const ScorerCaseOptions& options = {});

/// Slots of a row with the same key and the same value score equal bits (where a scorer reads queries: in sequences
/// that have some). Not for scorers that pool over neighbours or look at positions.
void expect_equal_slots_score_equal_bits(const Scorer& scorer, int cases, const ScorerCaseOptions& options = {});

/// Runs `body` once for every instruction set of this machine that the vector loops are built for.
void for_every_instruction_set(const std::function<void()>& body);

}  // namespace kvkeep::testing
