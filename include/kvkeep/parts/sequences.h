#pragma once
/// The living sequences of a keeper: how long each is, its columns and its newest queries.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvkeep/core/columns.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/observe/query_ring.h"
#include "kvkeep/policy/folded_memory.h"
#include "kvkeep/policy/prompt_pass.h"

namespace kvkeep {

/// One sequence. What a feature keeps of it is in its part (parts/part.h).
struct SequenceState {
  std::unique_ptr<Columns> columns;
  QueryRing ring;
  std::int32_t prefix = 0;          ///< tokens that were cached before the sequence joined
  std::int64_t logical = 0;         ///< tokens seen, prefix included
  std::int64_t last_event = 0;      ///< logical length at the last event
  std::int64_t prompt = -1;         ///< tokens of the prompt; -1 until known
  std::int32_t prompt_end = 0;      ///< once it has ended: logical position below which its tokens are
  std::int32_t event_position = 0;  ///< next position at the last event, or after the prefix
  std::int64_t asked = 0;           ///< logical length when the policy was last asked
  std::int32_t next_position = 0;
  std::vector<std::int32_t> prompt_slots = {};  ///< [full layers] on a device: of the prompt, once cut; -1 before
  std::unique_ptr<PromptPass> pass = nullptr;   ///< while a prompt narrows
  std::vector<std::int32_t> present = {};       ///< then: logical positions of the remaining tokens
  std::int32_t tail = 0;                        ///< then: how many of them are the newest of the prompt, without a gap
  std::int32_t next_layer = 0;                  ///< then: the layer whose narrow() comes next
  std::optional<PromptReport> report = {};
  std::int32_t settled = 0;                      ///< logical position below which every decision is final
  std::unique_ptr<FoldedRows> folded = nullptr;  ///< if the policy folds
  std::vector<std::int64_t> viewed = {};  ///< [full layers] logical length when the layer last read its folded spans
  bool pending = false;                   ///< an event cuts it that finish() has yet to complete
  std::uint64_t step = 0;                 ///< the last begin_step() that named it
  std::int32_t step_tokens = 0;           ///< and the tokens it brought

  mutable std::uint64_t mark = 0;  ///< of the last call that named it: Sequences::once()
};

/// All sequences of one keeper. Keeper and parts share them.
class Sequences {
 public:
  explicit Sequences(ModelSpec spec);

  [[nodiscard]] const ModelSpec& spec() const { return spec_; }
  [[nodiscard]] std::span<const std::int32_t> full_layers() const { return full_layers_; }
  /// Index of a layer of the model among its full layers; -1: it is none.
  [[nodiscard]] std::int32_t index_of(std::int32_t layer) const {
    return layer_index_[static_cast<std::size_t>(layer)];
  }
  /// Rows of a sequence: full layers times KV heads.
  [[nodiscard]] std::int32_t rows() const { return static_cast<std::int32_t>(full_layers_.size()) * spec_.kv_heads; }
  /// Index of a row among them. Throws InvalidArgument for a layer that is not full, and for a head out of range.
  [[nodiscard]] std::int32_t row_of(std::int32_t layer, std::int32_t head) const;

  [[nodiscard]] bool contains(SequenceId id) const { return all_.contains(id); }
  /// Throws StateError for an unknown sequence.
  [[nodiscard]] const SequenceState& at(SequenceId id) const;
  [[nodiscard]] SequenceState& at(SequenceId id) { return const_cast<SequenceState&>(std::as_const(*this).at(id)); }
  /// The same; throws StateError also while an event of it is pending, so that its rows are not as counted.
  [[nodiscard]] const SequenceState& ready(const char* operation, SequenceId id) const;
  [[nodiscard]] SequenceState& ready(const char* operation, SequenceId id) {
    return const_cast<SequenceState&>(std::as_const(*this).ready(operation, id));
  }
  /// ready() for every sequence that a call names, in its order; valid until the next call of a method. Throws
  /// InvalidArgument if one is named twice.
  std::span<SequenceState* const> meet(const char* operation, std::span<const SequenceId> ids) const;
  /// The same; throws InvalidArgument also unless indptr has a range for every sequence.
  std::span<SequenceState* const> meet(const char* operation, std::span<const SequenceId> ids,
                                       std::span<const std::int32_t> indptr) const;
  /// What meet() returned last.
  [[nodiscard]] std::span<SequenceState* const> met() const { return met_; }

  SequenceState& add(SequenceId id, SequenceState fresh) { return all_.emplace(id, std::move(fresh)).first->second; }
  void remove(SequenceId id) { all_.erase(id); }
  [[nodiscard]] auto begin() const { return all_.begin(); }
  [[nodiscard]] auto end() const { return all_.end(); }

  /// Changes with everything that makes a plan out of date.
  [[nodiscard]] std::uint64_t version() const { return version_; }
  void changed() { ++version_; }

 private:
  ModelSpec spec_;
  std::vector<std::int32_t> full_layers_;
  std::vector<std::int32_t> layer_index_;  ///< [num_layers]
  std::map<SequenceId, SequenceState> all_;
  std::uint64_t version_ = 0;
  mutable std::uint64_t mark_ = 0;  ///< of the current call: whatever carries it was already named
  mutable std::vector<SequenceState*> met_;
};

inline Sequences::Sequences(ModelSpec spec) : spec_(std::move(spec)), full_layers_(spec_.full_layers()) {
  layer_index_.assign(spec_.layers.size(), -1);
  for (std::size_t i = 0; i < full_layers_.size(); ++i)
    layer_index_[static_cast<std::size_t>(full_layers_[i])] = static_cast<std::int32_t>(i);
}

inline std::int32_t Sequences::row_of(std::int32_t layer, std::int32_t head) const {
  KVKEEP_REQUIRE(layer >= 0 && layer < spec_.num_layers() && index_of(layer) >= 0, "kvkeep: layer ", layer,
                 " is not a full-attention layer of the model");
  KVKEEP_REQUIRE(head >= 0 && head < spec_.kv_heads, "kvkeep: KV head ", head, " is out of range; allowed 0 to ",
                 spec_.kv_heads - 1);
  return index_of(layer) * spec_.kv_heads + head;
}

inline const SequenceState& Sequences::at(SequenceId id) const {
  const auto found = all_.find(id);
  KVKEEP_REQUIRE_AS(StateError, found != all_.end(), "kvkeep: sequence ", id,
                    " is not known; allowed after join() and before leave()");
  return found->second;
}

inline const SequenceState& Sequences::ready(const char* operation, SequenceId id) const {
  const SequenceState& s = at(id);
  KVKEEP_REQUIRE_AS(StateError, !s.pending, operation, ": the event that cuts sequence ", id,
                    " is pending; allowed after finish()");
  return s;
}

inline std::span<SequenceState* const> Sequences::meet(const char* operation, std::span<const SequenceId> ids) const {
  ++mark_;
  met_.clear();
  for (const SequenceId id : ids) {
    const SequenceState& s = ready(operation, id);
    KVKEEP_REQUIRE(s.mark != mark_, operation, ": sequence ", id, " is named twice in one step; allowed once");
    s.mark = mark_;
    met_.push_back(const_cast<SequenceState*>(&s));
  }
  return met_;
}

inline std::span<SequenceState* const> Sequences::meet(const char* operation, std::span<const SequenceId> ids,
                                                       std::span<const std::int32_t> indptr) const {
  KVKEEP_REQUIRE(indptr.size() == ids.size() + 1 && indptr.front() == 0, operation, ": indptr has ", indptr.size(),
                 " entries for ", ids.size(), " sequences; allowed one entry more than sequences, the first one 0");
  for (std::size_t i = 0; i < ids.size(); ++i)
    KVKEEP_REQUIRE(indptr[i] <= indptr[i + 1], operation, ": indptr falls from ", indptr[i], " to ", indptr[i + 1],
                   " at sequence ", ids[i], "; allowed ascending");
  return meet(operation, ids);
}

}  // namespace kvkeep
