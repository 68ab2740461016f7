// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What the rows of other ranks hold, where each rank has a part of the KV heads and heads may keep unequal numbers of
/// slots.

#include "kvkeep/core/header_only.h"
#include "kvkeep/parts/part.h"

namespace kvkeep::parts {

/// Of keepers that hold a part of the heads (ModelSpec::model_heads).
class Ranks final : public Part {
 public:
  using Part::Part;

  void fork(SequenceId child, SequenceId parent) override { extra_slots_.copy(child, parent); }
  void leave(SequenceId sequence) noexcept override { extra_slots_.remove(sequence); }
  [[nodiscard]] std::int64_t slots_elsewhere(const SequenceState& s, SequenceId sequence) const override {
    const std::int32_t here = spec().kv_heads, heads = spec().whole_heads(), first = spec().first_head;
    const std::vector<std::int32_t>* const extra = extra_slots_.find(sequence);
    std::int64_t slots = 0;
    for (std::int32_t l = 0; l < std::ssize(sequences().full_layers()); ++l)
      for (std::int32_t h = 0; h < heads; ++h)
        if (h < first || h >= first + here)
          slots +=
              s.columns.length(l * here) + (extra == nullptr ? 0 : (*extra)[static_cast<std::size_t>(l * heads + h)]);
    return slots;
  }
  void describe(SequenceId sequence, RowGroup& group) const override {
    const auto heads = static_cast<std::size_t>(spec().whole_heads());
    if (const std::vector<std::int32_t>* extra = extra_slots_.find(sequence))
      group.extra_slots =
          std::span(*extra).subspan(static_cast<std::size_t>(sequences().index_of(group.layer)) * heads, heads);
  }
  void reserve(const PartEvent& event) override {
    if (event.decision.kept_per_head.empty()) return;
    for (const RowGroup& group : event.table.groups)
      extra_slots_[event.ids[static_cast<std::size_t>(group.sequence)]].resize(
          sequences().full_layers().size() * static_cast<std::size_t>(spec().whole_heads()));
  }
  /// Takes in how many slots the rows of every KV head of the model keep.
  void settle(const PartEvent& event, std::size_t g) noexcept override {
    if (event.decision.kept_per_head.empty()) return;
    const auto heads = static_cast<std::size_t>(spec().whole_heads());
    const RowGroup& group = event.table.groups[g];
    const std::int32_t* const counts = event.decision.kept_per_head.data() + g * heads;
    std::int32_t* const extra = extra_slots_.find(event.ids[static_cast<std::size_t>(group.sequence)])->data() +
                                static_cast<std::size_t>(sequences().index_of(group.layer)) * heads;
    for (std::size_t h = 0; h < heads; ++h) extra[h] = counts[h] - counts[spec().first_head];
  }
#if KVKEEP_FILES
  void save(SequenceId sequence, StateTensors& to) const override;
  void restore(SequenceId sequence, const SequenceState& s, const StateFile& state) override;
#endif

 private:
  PerSequence<std::vector<std::int32_t>> extra_slots_;  ///< [full layers, whole_heads] RowGroup::extra_slots
};

}  // namespace kvkeep::parts
