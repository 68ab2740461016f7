// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Eviction: a scorer ranks the slots, an allocator spends the budget, and the rest is dropped.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/row.h"
#include "kvkeep/policy/machine.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/score/scorer.h"

namespace kvkeep {

struct RestOptions;

/// Options that every evicting policy shares.
struct Retention {
  static constexpr std::int32_t kRecent = 32;  ///< most slots of an unstated `recent`

  Variant variant = Variant::strict;
  Trigger trigger;                          ///< the budget, and when it is enforced
  std::int32_t sink = 4;                    ///< oldest slots that always stay
  std::optional<std::int32_t> recent = {};  ///< newest slots that always stay, as far as the budget allows; unstated:
                                            ///< newest()
  bool protect_prompt = false;              ///< the prompt's slots stay, like sinks
  Sharing share = Sharing::per_layer_per_head;
  std::shared_ptr<const RestOptions> rest = nullptr;  ///< how the rest folds into spans
                                                      ///< (rest_options.h); null: it is dropped

  /// `recent`, or a quarter of the `slots` that a budget leaves beside a protected prompt, from 1 to kRecent: so that
  /// the scorer has a say.
  [[nodiscard]] std::int32_t newest(std::int32_t slots) const {
    return recent.value_or(std::clamp(slots / 4, 1, kRecent));
  }
};

/// What a policy made of these parts reads.
[[nodiscard]] Needs needs_of(const Retention& retention, const Scorer& scorer, const Allocator& allocator);

class Evict final : public KVPolicy {
 public:
  /// `name` and `json` describe the policy to people and files; the registry makes them. Keeper::save() needs `json`.
  /// Throws InvalidArgument if rows of an allocator that is ragged() and does not thin (thins()) share a selection, if
  /// prompts that are cut in pieces are protected or what they drop is folded, and if the slots of a budget leave no
  /// room for an open span within the reach of retention.rest, for heads of any size; problems() has the same for the
  /// model's.
  Evict(std::string name, std::unique_ptr<Scorer> scorer, std::unique_ptr<Allocator> allocator, Retention retention,
        std::string json = {});

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] Needs needs() const override { return needs_of(retention_, *scorer_, *allocator_); }
  [[nodiscard]] Trigger trigger() const override { return retention_.trigger; }
  [[nodiscard]] Sharing sharing() const override { return retention_.share; }
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const override;
  [[nodiscard]] std::vector<std::string> problems_on(const Machine& machine, const ModelSpec& spec) const override;
  /// Order: limits of every row, window attention, scores, sharing, allotment. With a `share` other than
  /// per_layer_per_head, slots rank by the mean of the sharing rows' scores over layers (`per_head`), or by their
  /// maximum or mean over layers and heads (`all`, `all_mean`); sharing rows hold the same tokens. Rows that the scorer
  /// ranks alike (Scorer::sharing()) are shared before. Source of both: TriAttention's modes. With retention.rest,
  /// slots that do not stay are folded: into one span for the slots that each segment drops (ours: neither AMS nor SeKV
  /// has it), or into runs of at most max_span dropped slots if there are no segments.
  [[nodiscard]] Decision decide(Machine& machine, const Evidence& evidence) const override;
  using KVPolicy::decide;
  [[nodiscard]] bool checks_kept() const override { return true; }
  [[nodiscard]] const MemoryOptions* memory() const override;
  /// Pinned slots count within the budget, like sinks. Recents shrink to the room that both leave, but not below what
  /// the scorer never drops.
  void check_pins(std::span<const PositionSpan> pins) const override;
  [[nodiscard]] std::string to_json() const override { return json_; }

  [[nodiscard]] MostKept most_kept(const Evidence& shapes) const override;

  /// How much every row of an event may keep, before anything is scored. Reads the shapes, lengths and positions of
  /// `evidence`, not the cached data. Throws InvalidArgument if pinned slots do not fit into a budget.
  [[nodiscard]] Limits limits(const Evidence& evidence) const;

  /// Newest slots of a row that always stay, as far as `slots` allow: the budget less a protected prompt. Variant
  /// strict adds those that the scorer never drops.
  [[nodiscard]] std::int32_t newest(std::int32_t slots) const;

  /// What stays of a long row under a budget of `slots` whatever it scores, where nothing is pinned and no prompt
  /// protected: sinks, recents, and what a published scorer ranks first. The scorer chooses the other slots.
  [[nodiscard]] Protected guarded(std::int32_t slots) const;

  [[nodiscard]] const Retention& retention() const { return retention_; }
  [[nodiscard]] const Scorer& scorer() const { return *scorer_; }
  [[nodiscard]] const Allocator& allocator() const { return *allocator_; }

 private:
  [[nodiscard]] std::string allocator_of() const { return text("allocator ", allocator_->name(), " of ", name_); }
  [[nodiscard]] Padding padding() const {
    return retention_.variant == Variant::official ? scorer_->padding() : Padding{};
  }
  [[nodiscard]] Demand demand(const Needs& needs) const;
  /// Rows that fold hold at least the budget's slots, so whether spans may open within RestOptions' reach is known.
  [[nodiscard]] bool fills_reach() const {
    return retention_.rest != nullptr && retention_.trigger.budget.unit == Budget::Unit::slots &&
           !retention_.trigger.ragged;
  }
  /// Decision::guarded, as `limits` say.
  [[nodiscard]] std::vector<std::int32_t> guarded_slots(const Evidence& evidence, const Limits& limits) const;
  void require_room(const RowGroup& group, std::int32_t sinks, std::int32_t pinned, std::int32_t budget) const;

  std::string name_;
  std::unique_ptr<Scorer> scorer_;
  std::unique_ptr<Allocator> allocator_;
  Retention retention_;
  std::string json_;
};

/// What an event keeps: of every row some slots, ascending and below its length, and all pinned ones. `who` chose them.
/// Of slots that a device chooses (KeepSet::in_place) only the counts are looked at. Throws InvalidArgument, and
/// Unsupported if a pinned slot goes. Cost: O(kept slots).
void check_keep(std::string_view who, const RowTable& table, const KeepSet& keep, std::string_view operation = "step");

/// The rest of a decision fits the event's rows: credit, tally and scores of every slot, Decision::guarded, and the
/// allotment, as far as there are any. `who` decided. Throws InvalidArgument. Cost: O(rows and segments).
void check_decision(std::string_view who, const RowTable& table, const Decision& decision,
                    std::string_view operation = "step");

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/evict-inl.h"
#endif
