// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Turns: the engine says where the newest turn of a conversation begins; what came since stays.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/parts/part.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/state/state_file.h"

namespace kvkeep {

/// Where the newest turn of a sequence begins.
struct Turn {
  std::int32_t begin = 0;  ///< logical position
};

class Turns final : public Part {
 public:
  using Part::Part;

  /// A turn begins with the next token. Throws StateError for an unknown sequence.
  void begin(SequenceId sequence) {
    turns_[sequence] = {sequences().at(sequence).next_position};
    sequences().changed();  // plans made before are out of date
  }
  [[nodiscard]] std::int32_t of(SequenceId sequence) const {
    const Turn* turn = turns_.find(sequence);
    return turn == nullptr ? 0 : turn->begin;
  }

  void leave(SequenceId sequence) noexcept override { turns_.remove(sequence); }
  void describe(SequenceId sequence, RowGroup& group) const override {
    if (const Turn* turn = turns_.find(sequence)) group.attach(*turn);
  }
  void truncate(SequenceId sequence, const SequenceState& s) noexcept override {
    if (Turn* turn = turns_.find(sequence)) turn->begin = std::min(turn->begin, s.next_position);
  }
  void save(SequenceId sequence, StateTensors& to) const override { to.emplace_back("turns", full({1}, of(sequence))); }
  void restore(SequenceId sequence, const SequenceState& s, const StateFile& state) override {
    const std::int32_t begin = *state.tensor("turns", Dtype::i32, {1}).data<std::int32_t>();
    KVKEEP_REQUIRE(begin >= 0 && begin <= s.next_position, "restore: tensor \"turns\" in ", state.where(), " is ",
                   begin, "; allowed 0 to ", s.next_position);
    turns_[sequence] = {begin};
  }

 private:
  PerSequence<Turn> turns_;
};

/// Keeps the newest turn, and the newest slots before it up to the budget.
class ByTurn final : public KVPolicy {
 public:
  explicit ByTurn(std::int32_t budget) : budget_(budget) {}

  [[nodiscard]] std::string_view name() const override { return "by-turn"; }
  [[nodiscard]] Needs needs() const override { return {}; }
  [[nodiscard]] Trigger trigger() const override { return {.budget = {.slots = budget_}, .interval = 1}; }
  [[nodiscard]] std::string to_json() const override {
    return text("{\"policy\":\"by-turn\",\"budget\":", budget_, "}");
  }
  [[nodiscard]] std::vector<MakePart> parts() const override {
    return {[](const PartContext& context) -> std::unique_ptr<Part> { return std::make_unique<Turns>(context); }};
  }
  [[nodiscard]] Decision decide(Machine&, const Evidence& evidence) const override {
    std::vector<std::int32_t> kept;
    KeepSet keep{.slots = {}, .indptr = {0}};
    for (std::size_t r = 0; r < evidence.table.rows.size(); ++r) {
      const Row& row = evidence.table.rows[r];
      const Turn* turn = evidence.table.groups[r / static_cast<std::size_t>(evidence.spec.kv_heads)].find<Turn>();
      const std::span<const std::int32_t> positions(row.positions, static_cast<std::size_t>(row.length));
      const auto since =
          turn == nullptr ? row.length : std::ranges::lower_bound(positions, turn->begin) - positions.begin();
      for (std::int64_t t = std::max<std::int64_t>(0, std::min<std::int64_t>(since, row.length - budget_));
           t < row.length; ++t)
        kept.push_back(static_cast<std::int32_t>(t));
      keep.indptr.push_back(std::ssize(kept));
    }
    keep.slots = empty({std::ssize(kept)}, Dtype::i32);
    std::ranges::copy(kept, keep.slots.data<std::int32_t>());
    Decision decision;
    decision.reason = Reason::over_budget;
    decision.keep = std::move(keep);
    return decision;
  }
  using KVPolicy::decide;

 private:
  std::int32_t budget_;
};

}  // namespace kvkeep
