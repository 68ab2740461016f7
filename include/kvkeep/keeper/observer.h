// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Takes in what the engine shows of each step: checks it, counts tokens, files queries.

#include <cstdint>
#include <optional>
#include <vector>

#include "kvkeep/core/machine_memory.h"
#include "kvkeep/parts/part.h"

namespace kvkeep {

/// The observing half of a keeper. All that it is made from must outlive it.
class Observer {
 public:
  Observer(Sequences& sequences, const KVPolicy& policy, Machine& machine);

  /// As Keeper::observe(), begin_step() and record().
  void observe(const Observation& observation);
  void begin_step(const StepTokens& tokens);
  void record(std::int32_t layer, const Tensor& queries, const Tensor& log_sum_exp);

  /// Throws StateError if a layer whose queries are read has shown less than all tokens of the sequence.
  void require_shown(const char* operation, SequenceId id, const SequenceState& s) const;
  /// The same for the step that began last, if the sequence is in it. What a graph replays is unknown here.
  void require_recorded(const char* operation, SequenceId id, const SequenceState& s) const;

  /// Of all queries; absent before the first.
  [[nodiscard]] std::optional<QueryBasis> basis() const { return basis_; }
  void set_basis(QueryBasis basis) { basis_ = basis; }

 private:
  [[nodiscard]] const ModelSpec& spec() const { return sequences_->spec(); }
  void check(const char* operation, const Observation& observation) const;
  void check(const StepTokens& tokens, const Observation& first) const;
  void require_one_basis(const char* operation, QueryBasis basis) const;
  void require_shown(const char* operation, SequenceId id, const SequenceState& s, std::int32_t layer,
                     std::int64_t shown) const;
  [[nodiscard]] bool first_to_show(const SequenceState& s, std::int32_t layer, std::int32_t tokens) const;
  [[nodiscard]] std::span<const std::int32_t> already_shown(const SequenceState& s, std::int32_t layer,
                                                            std::int32_t tokens) const;
  void find_positions(const Observation& observation, std::size_t i, const SequenceState& s);
  void count(SequenceId id, SequenceState& s);
  void make_room(const Observation& observation);

  Sequences* sequences_;
  const KVPolicy* policy_;
  Machine* machine_;
  std::int32_t queries_;  ///< newest ones of every full layer that events read
  std::optional<QueryBasis> basis_;
  std::vector<std::int32_t> positions_;  ///< scratch
  std::vector<QueryArrival> arrivals_;   ///< scratch, on a device
  std::vector<QueryPlace> step_places_;  ///< scratch of begin_step()
  DeviceMemory step_table_;              ///< QueryPlace [step_room_] of the step that began
  std::int32_t step_room_ = 0, step_tokens_ = 0;
  std::uint64_t step_ = 0;      ///< counts begin_step()
  std::vector<char> recorded_;  ///< [full layers] record() came in the step that began, or a graph may bring it
  Dtype step_dtype_ = Dtype::f32;
  bool step_normalised_ = false;  ///< its queries come with their log-sum-exps
  bool step_captured_ = false;    ///< a graph knows the table's address
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/keeper/observer-inl.h"
#endif
