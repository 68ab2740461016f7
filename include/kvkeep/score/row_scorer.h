#pragma once
/// Scorers that score every row alone, from its keys, values and positions: one body for the CPU and a GPU.

#include <string>
#include <string_view>

#include "kvkeep/core/each_row.h"
#include "kvkeep/core/require_host.h"
#include "kvkeep/core/team.h"
#include "kvkeep/score/scorer.h"

namespace kvkeep {

/// Sum of squares of `count` stored numbers, in fp32. The order is the same on both machines and lets a CPU use
/// vectors.
template <class T>
[[nodiscard]] KVKEEP_HD float sum_of_squares(const T* numbers, std::int32_t count) {
  constexpr std::int32_t kLanes = 8;
  float lanes[kLanes] = {};
  std::int32_t d = 0;
  for (; d + kLanes <= count; d += kLanes)
    for (std::int32_t lane = 0; lane < kLanes; ++lane) {
      const float x = static_cast<float>(numbers[d + lane]);
      lanes[lane] += x * x;
    }
  for (std::int32_t lane = 0; d < count; ++d, ++lane) {
    const float x = static_cast<float>(numbers[d]);
    lanes[lane] += x * x;
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

/// A row as a body reads it. Key, Value: how its numbers are stored.
template <class Key, class Value>
class ScoredRow {
 public:
  KVKEEP_HD ScoredRow(const Row& row, std::int32_t key_dim, std::int32_t value_dim, std::int32_t first_head)
      : row_(row), key_dim_(key_dim), value_dim_(value_dim), first_head_(first_head) {}

  [[nodiscard]] KVKEEP_HD std::int32_t length() const { return row_.length; }
  [[nodiscard]] KVKEEP_HD std::int32_t layer() const { return row_.layer; }
  /// KV head of the model.
  [[nodiscard]] KVKEEP_HD std::int32_t head() const { return first_head_ + row_.head; }
  [[nodiscard]] KVKEEP_HD std::int32_t position(std::int32_t t) const { return row_.positions[t]; }
  [[nodiscard]] KVKEEP_HD float given(std::int32_t t) const { return row_.given[t]; }
  [[nodiscard]] KVKEEP_HD const Key* key(std::int32_t t) const { return reinterpret_cast<const Key*>(row_.keys.at(t)); }
  [[nodiscard]] KVKEEP_HD const Value* value(std::int32_t t) const {
    return reinterpret_cast<const Value*>(row_.values.at(t));
  }
  [[nodiscard]] KVKEEP_HD std::int32_t key_dim() const { return key_dim_; }
  [[nodiscard]] KVKEEP_HD std::int32_t value_dim() const { return value_dim_; }

 private:
  const Row& row_;
  std::int32_t key_dim_, value_dim_, first_head_;
};

/// Throws InvalidArgument if a slot of a due row has no given score.
inline void require_given(std::string_view operation, const Evidence& evidence, const Limits& limits) {
  for (std::size_t r = 0; r < evidence.table.rows.size(); ++r) {
    const Row& row = evidence.table.rows[r];
    KVKEEP_REQUIRE(!limits.rows[r].due || row.given_length == row.length, operation, ": ", row.given_length, " of the ",
                   row.length, " slots of layer ", row.layer, ", head ", row.head,
                   " have a given score; allowed all (Keeper::give, or the tensor \"given\" of a trace)");
  }
}

/// `Self` derives from this, has `traits` and needs() without queries. `Body` is its options, trivially copyable, with
///
///     template <class Row, class Team>
///     KVKEEP_HD void score(const Row& row, float* g, Team team) const;
///
/// which writes g[t] for every slot of a ScoredRow, split over the team (core/team.h). The CPU runs it with one thread
/// per row, CUDA with one block per row if cuda/row_bodies.cu names the body. A body that reads neither keys nor values
/// says `static constexpr bool kReadsColumnsAlone = true`, so that it is compiled once, not for every dtype.
template <class Self, class Body>
class RowScorer : public Scorer {
 public:
  using Options = Body;
  explicit RowScorer(Body body = {}) : body_(body) {}

  [[nodiscard]] std::string_view name() const override { return Self::traits.name; }
  [[nodiscard]] const Body& options() const { return body_; }
  [[nodiscard]] bool averages_heads() const final { return false; }  ///< its body sees one row

  /// Throws InvalidArgument for keys or values that needs() names and that are not f32, f16 or bf16, and for given
  /// scores that it names and that are missing. Workspace: none.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const override {
    const std::string operation(name());
    require_host(operation.c_str(), evidence.table.device);
    const RowTable& table = evidence.table;
    const Needs needs = this->needs();
    if (needs.given_scores) require_given(operation, evidence, limits);
    Scores scores{empty({table.slots}, Dtype::f32)};
    float* const out = scores.data.template data<float>();
    with_dtype(operation.c_str(), needs.keys ? table.key_dtype : Dtype::f32, [&](auto key) {
      with_dtype(operation.c_str(), needs.values ? table.value_dtype : Dtype::f32, [&](auto value) {
        each_due_row(table, limits, [&](std::size_t, const Row& row) {
          body_.score(ScoredRow<decltype(key), decltype(value)>(row, evidence.spec.key_dim, evidence.spec.value_dim,
                                                                evidence.spec.first_head),
                      out + row.first, OneThread{});
        });
      });
    });
    return scores;
  }

 private:
  Body body_;
};

}  // namespace kvkeep
