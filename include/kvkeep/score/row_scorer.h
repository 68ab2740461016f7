// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Scorers that score every row alone: one body for the CPU and a GPU. A RowScorer reads keys, values and columns of
/// the row, a WindowScorer also what its newest queries attend to.

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kvkeep/core/limits.h"
#include "kvkeep/core/rank_key.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/score/scorer.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/simd/key_lanes.h"

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

/// What a body reads of keys and values by itself: `static constexpr BodyReads kReads`. Without that it is `vectors`,
/// of a window body `columns`. A body is compiled for the dtypes of what it reads; what it does not read is Unread.
enum class BodyReads : std::uint8_t {
  columns,    ///< neither
  key_norms,  ///< ScoredRow::each_key_norm() alone
  values,     ///< values
  vectors,    ///< keys and values
};
struct Unread {};

/// What is known of a body when it is compiled.
template <class Body>
struct BodyTraits {
  static constexpr bool kWindow = requires(const Body& body) { body.reading(); };
  static constexpr BodyReads kReads = [] {
    if constexpr (requires { Body::kReads; }) return Body::kReads;
    return kWindow ? BodyReads::columns : BodyReads::vectors;
  }();
  static constexpr bool kReadsKeys = kReads == BodyReads::key_norms || kReads == BodyReads::vectors,
                        kReadsValues = kReads == BodyReads::values || kReads == BodyReads::vectors;
  static constexpr bool kAsRead = requires { requires Body::kAsRead; };
  static constexpr bool kInPlace = kAsRead || requires { requires Body::kInPlace; };
  static constexpr bool kEachSlot = kInPlace || requires { requires Body::kEachSlot; };
};

/// A row as a body reads it. Key, Value: how its numbers are stored.
template <class Key, class Value>
class ScoredRow {
 public:
  /// What is the same for all rows of an event, or of a (layer, sequence).
  struct Around {
    std::int32_t key_dim = 0, value_dim = 0, first_head = 0, next_position = 0;
  };
  KVKEEP_HD ScoredRow(const Row& row, const RowLimit* limit, Around around, SlotRange slots)
      : row_(row), limit_(limit), around_(around), slots_(slots) {}

  [[nodiscard]] KVKEEP_HD std::int32_t length() const { return row_.length; }
  [[nodiscard]] KVKEEP_HD std::int32_t layer() const { return row_.layer; }
  /// KV head of the model.
  [[nodiscard]] KVKEEP_HD std::int32_t head() const { return around_.first_head + row_.head; }
  /// Logical position of a slot, and of the sequence's next token.
  [[nodiscard]] KVKEEP_HD std::int32_t position(std::int32_t t) const { return row_.positions[t]; }
  [[nodiscard]] KVKEEP_HD std::int32_t next_position() const { return around_.next_position; }
  /// NaN of slots that have none, and where needs() does not name them.
  [[nodiscard]] KVKEEP_HD float given(std::int32_t t) const { return t < row_.given_length ? row_.given[t] : kNoScore; }
  /// What an accumulating scorer gave the slot at the last event; 0 of slots that came since, and of other scorers.
  [[nodiscard]] KVKEEP_HD float tally(std::int32_t t) const { return t < row_.tally_length ? row_.tally[t] : 0.0F; }
  /// An accumulating scorer also sees rows that are not due.
  [[nodiscard]] KVKEEP_HD const RowLimit& limit() const { return *limit_; }
  [[nodiscard]] KVKEEP_HD const Key* key(std::int32_t t) const { return reinterpret_cast<const Key*>(row_.keys.at(t)); }
  [[nodiscard]] KVKEEP_HD const Value* value(std::int32_t t) const {
    return reinterpret_cast<const Value*>(row_.values.at(t));
  }
  [[nodiscard]] KVKEEP_HD std::int32_t key_dim() const { return around_.key_dim; }
  [[nodiscard]] KVKEEP_HD std::int32_t value_dim() const { return around_.value_dim; }

  /// Calls body(t) for every slot that this team scores, split over its members: all slots of the row, or, where
  /// kEachSlot lets several teams share it, some of them.
  template <class Team, class Body>
  KVKEEP_HD void each_slot(Team team, const Body& body) const {
    for (std::int32_t t = slots_.from + team.thread(); t < slots_.to; t += team.size()) body(t);
  }

  // What machines do in their own way; this is the CPU's, cuda/row_body.cuh has the GPU's.

  /// each_slot() with the norm of the slot's key: body(t, |k_t|), in fp32.
  template <class Team, class Body>
  void each_key_norm(Team, const Body& body) const {
    constexpr Dtype kDtype = std::is_same_v<Key, Half>       ? Dtype::f16
                             : std::is_same_v<Key, BFloat16> ? Dtype::bf16
                                                             : Dtype::f32;
    constexpr std::int32_t kAtOnce = 256;
    float norms[kAtOnce];
    for (std::int32_t from = slots_.from; from < slots_.to; from += kAtOnce) {
      const std::int32_t to = std::min(from + kAtOnce, slots_.to);
      cpu::key_norms({row_.keys, kDtype, around_.key_dim}, from, to, norms);
      for (std::int32_t t = from; t < to; ++t) body(t, norms[t - from]);
    }
  }

  /// The least of the `wanted` largest of key_of(t), t in [0, length()), all of which differ; low bits may be 0 if no
  /// other key is in between. A key of 0 does not count; 1 if there are no more than `wanted` that do. Every member
  /// calls, and gets it. wanted: 1 or more. Not under kEachSlot.
  template <class Team, class KeyOf>
  [[nodiscard]] std::uint64_t least_of_largest(Team, std::int64_t wanted, const KeyOf& key_of) const {
    std::vector<std::uint64_t> keys;
    keys.reserve(static_cast<std::size_t>(row_.length));
    for (std::int32_t t = 0; t < row_.length; ++t)
      if (const std::uint64_t key = key_of(t); key != 0) keys.push_back(key);
    if (wanted >= std::ssize(keys)) return 1;
    const auto last = keys.begin() + (wanted - 1);
    std::nth_element(keys.begin(), last, keys.end(), std::greater<>());
    return *last;
  }

 protected:
  static constexpr float kNoScore = std::numeric_limits<float>::quiet_NaN();

  const Row& row_;
  const RowLimit* limit_;
  Around around_;
  SlotRange slots_;
};

/// Throws InvalidArgument if a slot of a due row has no given score.
inline void require_given(std::string_view operation, const Evidence& evidence, const Limits& limits) {
  for (std::size_t r = 0; r < evidence.table.rows.size(); ++r) {
    const Row& row = evidence.table.rows[r];
    KVKEEP_REQUIRE(!limits.rows[r].due || row.given_length == row.length, operation, ": ", row.given_length, " of the ",
                   row.length, " slots of layer ", row.layer, ", head ", row.head,
                   " have a given score; allowed all (parts::Given::give, or the tensor \"given\" of a trace)");
  }
}

/// Calls score(r, row, at) with the ScoredRow of every row that is due, or of all; rows run in parallel. Throws
/// InvalidArgument for keys or values that scorer.needs() names, `Body` reads, and that are not f32, f16 or bf16.
template <class Body, class Score>
void each_scored_row(const Scorer& scorer, const Evidence& evidence, const Limits& limits, bool all,
                     const Score& score) {
  using Traits = BodyTraits<Body>;
  const std::string operation(scorer.name());
  const Needs needs = scorer.needs();
  const RowTable& table = evidence.table;
  // What needs() does not name was not widened: numbers that a body could not read are no numbers.
  const bool no_keys = !needs.keys && !is_scorable(table.key_dtype),
             no_values = !needs.values && !is_scorable(table.value_dtype);
  const std::vector<float> none(static_cast<std::size_t>(std::max(evidence.spec.key_dim, evidence.spec.value_dim)),
                                std::numeric_limits<float>::quiet_NaN());
  const SlotAddress nowhere{.base = reinterpret_cast<std::byte*>(const_cast<float*>(none.data()))};
  const auto run = [&](auto key, auto value) {
    each_row(table, [&](std::size_t r, const Row& stored) {
      if (!all && !limits.rows[r].due) return;
      Row row = stored;
      if (no_keys) row.keys = nowhere;
      if (no_values) row.values = nowhere;
      const RowGroup& group = table.groups[r / static_cast<std::size_t>(evidence.spec.kv_heads)];
      score(r,
            ScoredRow<decltype(key), decltype(value)>(row, &limits.rows[r],
                                                      {.key_dim = evidence.spec.key_dim,
                                                       .value_dim = evidence.spec.value_dim,
                                                       .first_head = evidence.spec.first_head,
                                                       .next_position = group.next_position},
                                                      {0, row.length}),
            row);
    });
  };
  const auto with_value = [&](auto key) {
    if constexpr (Traits::kReadsValues)
      with_dtype(operation.c_str(), no_values ? Dtype::f32 : table.value_dtype, [&](auto value) { run(key, value); });
    else
      run(key, Unread{});
  };
  if constexpr (Traits::kReadsKeys)
    with_dtype(operation.c_str(), no_keys ? Dtype::f32 : table.key_dtype, with_value);
  else
    with_value(Unread{});
}

/// `Self` derives from this, has `traits` and needs() without queries. `Body` is its options, trivially copyable, with
///
///     template <class Row, class Team>
///     KVKEEP_HD void score(const Row& row, float* g, Team team) const;
///
/// which writes g[t] for every slot of a ScoredRow, split over the team (core/hd.h). It is called for rows that are
/// due; if accumulates(), for all. The CPU runs it with one thread per row, CUDA with one block per row if
/// cuda/row_bodies.cu names the body; with `static constexpr bool kEachSlot = true` with as many blocks as the row is
/// long, of which each writes the slots of ScoredRow::each_slot() and reads g of no other. `kReads`: see BodyReads.
template <class Self, class Body>
class RowScorer : public Scorer {
 public:
  using Options = Body;
  explicit RowScorer(Body body = {}) : body_(body) {}

  [[nodiscard]] std::string_view name() const override { return Self::traits.name; }
  [[nodiscard]] const Body& options() const { return body_; }
  [[nodiscard]] AcrossHeads across_heads() const final { return AcrossHeads::nothing; }  ///< its body sees one row

  /// Throws InvalidArgument for keys or values that the body reads and that are not f32, f16 or bf16, and for given
  /// scores that needs() names and that are missing. Workspace: none.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const override {
    require_host(std::string(name()).c_str(), evidence.table.device);
    if (this->needs().given_scores) require_given(name(), evidence, limits);
    Scores scores{empty({evidence.table.slots}, Dtype::f32)};
    float* const out = scores.data.template data<float>();
    each_scored_row<Body>(
        *this, evidence, limits, this->accumulates(),
        [&](std::size_t, const auto& row, const Row& at) { body_.score(row, out + at.first, OneThread{}); });
    return scores;
  }

 private:
  Body body_;
};

// Scorers that finish one reduction of the attention of a row's newest queries: one body for the CPU and a GPU.

/// One row of a window scorer. Without a query slots rank by age, the oldest leave first; under a scorer that
/// accumulates they keep their tally.
template <class Body, class Row, class Team>
KVKEEP_HD void finish_row(const Body& body, bool sum, bool accumulates, const Row& row, RowWindow window,
                          float* attention, float* g, Team team) {
  if (window.queries == 0 && !sum)
    row.each_slot(team, [&](std::int32_t t) { g[t] = accumulates ? row.tally(t) : static_cast<float>(t); });
  else if constexpr (!BodyTraits<Body>::kAsRead)
    body.finish(row, window, attention, g, team);
}

/// `Self` derives from this and has `traits`. `Body` is its options, trivially copyable, with
///
///     WindowReading reading() const;
///     template <class Row, class Team>
///     KVKEEP_HD void finish(const Row& row, RowWindow window, const float* attention, float* g, Team team) const;
///
/// finish() writes g[t] for every slot of a ScoredRow, split over the team, from what reading() names: `attention` of
/// the row's slots. It is called for rows that are due and have queries; slots of others score by age, or keep their
/// tally if accumulates(). Under
/// WindowReading::Kind::sum it is called for all. It may take `float* attention` and overwrite it, unless that is
/// usage.
///
/// The CPU runs it with one thread per row, CUDA with one block per row if cuda/row_bodies.cu names the body; with
/// `static constexpr bool kEachSlot = true` as a RowScorer. `kInPlace = true` says more: it reads no slot of
/// `attention` but its own, and g holds that already. `kAsRead = true` says that this is the score, and there is no
/// finish().
template <class Self, class Body>
class WindowScorer : public Scorer {
 public:
  using Options = Body;
  explicit WindowScorer(Body body = {}) : body_(body) {}

  [[nodiscard]] std::string_view name() const override { return Self::traits.name; }
  [[nodiscard]] const Body& options() const { return body_; }
  [[nodiscard]] Needs needs() const override { return {.queries = body_.reading().window, .keys = true}; }
  [[nodiscard]] WindowNeeds shares() const final {
    return {.newest = body_.reading().kind == WindowReading::Kind::newest};
  }
  [[nodiscard]] AcrossHeads across_heads() const final { return AcrossHeads::nothing; }  ///< its body sees one row
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec&) const override {
    const std::int32_t asked = this->needs().queries, window = body_.reading().window;
    if (window >= 1 && asked >= window) return {};
    return {text("scorer ", name(), ": its body reads the newest ", window, " queries, and needs() names ", asked,
                 "; allowed a window of 1 or more, and needs() with as many queries or more")};
  }

  /// Throws as read_window(), and InvalidArgument for values that the body reads and that are not f32, f16 or bf16.
  /// Cost and workspace: those of read_window(), and 4 bytes per slot; of finish() beyond.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override {
    require_host(std::string(name()).c_str(), evidence.table.device);
    const WindowReading reading = body_.reading();
    const bool sum = reading.kind == WindowReading::Kind::sum;
    const ReadWindow read = read_window(evidence, limits, seen, reading);
    Scores scores{BodyTraits<Body>::kInPlace ? read.attention : empty({evidence.table.slots}, Dtype::f32)};
    float *const attention = read.attention.template data<float>(), *const out = scores.data.template data<float>();
    const bool accumulates = this->accumulates();
    each_scored_row<Body>(
        *this, evidence, limits, sum || accumulates, [&](std::size_t r, const auto& row, const Row& at) {
          finish_row(body_, sum, accumulates, row, read.windows[r], attention + at.first, out + at.first, OneThread{});
        });
    return scores;
  }

 private:
  Body body_;
};

}  // namespace kvkeep
