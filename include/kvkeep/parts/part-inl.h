#pragma once
// Bodies of part.h: compiled by src/parts, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <numeric>
#include <utility>

#include "kvkeep/core/cache_layout.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/parts/part.h"
#include "kvkeep/policy/machine.h"

namespace kvkeep {
namespace sequences_detail {

/// K and V bytes of one slot of one head, scales included.
inline std::int64_t slot_bytes(const ModelSpec& spec, const LayerKv& layer) {
  const LayerSides kv = sides_of(layer);
  const auto bytes = [](const Tensor& t, std::int64_t numbers) { return t.defined() ? numbers * t.element_size() : 0; };
  return bytes(kv.keys, spec.key_dim) + (lies_within(kv.values, kv.keys) ? 0 : bytes(kv.values, spec.value_dim)) +
         bytes(kv.key_scales, 1) + (lies_within(kv.value_scales, kv.key_scales) ? 0 : bytes(kv.value_scales, 1));
}

}  // namespace sequences_detail

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

KVKEEP_INLINE void Sequences::bind(std::vector<LayerKv> layers, bool may_move) {
  BoundCache cache{.layers = std::move(layers), .form = {}};
  cache.form = common_form(spec_, cache.layers, full_layers_);
  KVKEEP_REQUIRE(cache.form.device == machine_->device(), "cache: it is on ", cache.form.device.str(),
                 ", but the keeper works on ", machine_->device().str(),
                 "; allowed one device, named by Provided::accelerator if it is not the CPU");
  if (may_move) check_layout(spec_, cache.layers);
  for (const std::int32_t l : full_layers_)
    cache.slot_bytes.push_back(sequences_detail::slot_bytes(spec_, cache.layers[static_cast<std::size_t>(l)]));
  cache_ = std::move(cache);
  changed();
}

KVKEEP_INLINE void Sequences::add(std::unique_ptr<Part> part) {
  most_positions_ = std::min(most_positions_, part->most_positions());
  parts_.push_back(std::move(part));
}

KVKEEP_INLINE void Sequences::join(SequenceId id, std::int32_t tokens, std::optional<std::int32_t> prompt) {
  KVKEEP_REQUIRE_AS(StateError, !contains(id), "join: sequence ", id,
                    " is already here; allowed after leave(), or use reset()");
  KVKEEP_REQUIRE(tokens >= 0 && tokens <= kMostPositions, "join: sequence ", id, " begins with ", tokens,
                 " cached tokens; allowed 0 to ", kMostPositions);
  KVKEEP_REQUIRE(!prompt || *prompt >= tokens, "join: sequence ", id, " has a prompt of ", prompt.value_or(0),
                 " tokens and ", tokens, " of them cached; allowed at least the number cached, or none if unknown");
  const auto layers = static_cast<std::int32_t>(full_layers_.size());
  SequenceState fresh{Columns(rows(), machine_->memory()),
                      QueryRing(layers, queries_, spec_.query_heads, spec_.key_dim, machine_->memory())};
  std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens));
  std::iota(positions.begin(), positions.end(), 0);
  fresh.columns.append(positions);
  fresh.prefix = fresh.next_position = fresh.event_position = fresh.prompt_end = tokens;
  fresh.logical = fresh.asked = tokens;
  fresh.prompt = prompt.value_or(tokens > 0 ? tokens : -1);
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
  KVKEEP_REQUIRE_AS(StateError, !s.passing, operation, ": the prompt of sequence ", id, " has only reached layer ",
                    s.passing->next_layer, "; allowed after its last layer");
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
