#pragma once
// Bodies of part.h: compiled by src/parts, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <numeric>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/parts/part.h"
#include "kvkeep/policy/machine.h"

namespace kvkeep {

KVKEEP_INLINE Sequences::Sequences(ModelSpec spec, std::int32_t queries, Machine& machine)
    : spec_(std::move(spec)),
      queries_(queries),
      machine_(&machine),
      full_layers_(spec_.full_layers()),
      without_rope_(spec_.first_without_rope()) {
  layer_index_.assign(spec_.layers.size(), -1);
  for (std::size_t i = 0; i < full_layers_.size(); ++i)
    layer_index_[static_cast<std::size_t>(full_layers_[i])] = static_cast<std::int32_t>(i);
}

KVKEEP_INLINE void Sequences::add(std::unique_ptr<Part> part) {
  most_positions_ = std::min(most_positions_, part->most_positions());
  parts_.push_back(std::move(part));
}

KVKEEP_INLINE void Sequences::join(SequenceId id, std::int32_t tokens, std::int32_t prompt) {
  KVKEEP_REQUIRE_AS(StateError, !contains(id), "join: sequence ", id,
                    " is already here; allowed after leave(), or use reset()");
  KVKEEP_REQUIRE(tokens >= 0 && tokens <= kMostPositions, "join: sequence ", id, " begins with ", tokens,
                 " cached tokens; allowed 0 to ", kMostPositions);
  KVKEEP_REQUIRE(prompt == -1 || prompt >= tokens, "join: sequence ", id, " has a prompt of ", prompt, " tokens and ",
                 tokens, " of them cached; allowed at least the number cached, or -1 if unknown");
  const auto layers = static_cast<std::int32_t>(full_layers_.size());
  SequenceState fresh{machine_->columns(rows()),
                      QueryRing(layers, queries_, spec_.query_heads, spec_.key_dim, machine_->memory())};
  std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens));
  std::iota(positions.begin(), positions.end(), 0);
  fresh.columns->append(positions);
  fresh.prefix = fresh.next_position = fresh.event_position = fresh.prompt_end = tokens;
  fresh.logical = fresh.asked = tokens;
  fresh.prompt = prompt == -1 && tokens > 0 ? tokens : prompt;
  fresh.prompt_slots.assign(full_layers_.size(), -1);
  all_.emplace(id, std::move(fresh));
  try {
    for (const std::unique_ptr<Part>& part : parts_) part->join(id);
  } catch (...) {
    forget(id);
    throw;
  }
}

KVKEEP_INLINE void Sequences::forget(SequenceId id) noexcept {
  for (const std::unique_ptr<Part>& part : parts_) part->leave(id);
  all_.erase(id);
}

KVKEEP_INLINE void Sequences::leave(SequenceId id) {
  static_cast<void>(ready("leave", id));
  forget(id);
  changed();
}

KVKEEP_INLINE std::int32_t Sequences::index_of(const char* operation, std::int32_t layer) const {
  KVKEEP_REQUIRE(layer >= 0 && layer < spec_.num_layers(), operation, ": layer ", layer,
                 " is out of range; allowed 0 to ", spec_.num_layers() - 1);
  return index_of(layer);
}

KVKEEP_INLINE void Sequences::require_whole(const char* operation, SequenceId id, const SequenceState& s) const {
  KVKEEP_REQUIRE_AS(StateError, !s.passing, operation, ": the prompt of sequence ", id,
                    " is still running through the layers; allowed after its last layer");
}

KVKEEP_INLINE std::span<SequenceState* const> Sequences::meet(const char* operation,
                                                              std::span<const SequenceId> ids) const {
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

KVKEEP_INLINE std::span<SequenceState* const> Sequences::meet(const char* operation, std::span<const SequenceId> ids,
                                                              std::span<const std::int32_t> indptr) const {
  KVKEEP_REQUIRE(indptr.size() == ids.size() + 1 && indptr.front() == 0, operation, ": indptr has ", indptr.size(),
                 " entries for ", ids.size(), " sequences; allowed one entry more than sequences, the first one 0");
  for (std::size_t i = 0; i < ids.size(); ++i)
    KVKEEP_REQUIRE(indptr[i] <= indptr[i + 1], operation, ": indptr falls from ", indptr[i], " to ", indptr[i + 1],
                   " at sequence ", ids[i], "; allowed ascending");
  return meet(operation, ids);
}

}  // namespace kvkeep
