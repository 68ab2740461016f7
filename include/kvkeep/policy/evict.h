#pragma once
/// Eviction: a scorer ranks, an allocator spends the budget, the rest is dropped.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/score/scorer.h"

namespace kvkeep {

/// What becomes of slots that do not stay.
struct RestOptions {
  enum class Weights : std::uint8_t {
    mass,  ///< a slot counts in the coarse entry of its span by its attention mass; equal where the allocator has none
    equal,
  };
  std::int32_t min_span = 8;   ///< dropped slots of neighbouring segments share a span until it has so many
  std::int32_t max_span = 64;  ///< longer ones are cut into equal pieces
  Weights weights = Weights::equal;
  MemoryOptions memory;

  /// What is not allowed, one sentence each with the field's name; empty: nothing.
  [[nodiscard]] std::vector<std::string> problems() const;
};

/// What every evicting policy shares.
struct Retention {
  Variant variant = Variant::strict;
  Trigger trigger;              ///< budget and when it is enforced
  std::int32_t sink = 4;        ///< oldest slots that always stay
  std::int32_t recent = 32;     ///< newest slots that always stay, as far as the budget allows
  bool protect_prompt = false;  ///< the prompt's slots stay like sinks
  Sharing share = Sharing::per_layer_per_head;
  std::shared_ptr<const RestOptions> rest = nullptr;  ///< the rest folds into spans; null: it is dropped
};

/// What a policy of these parts reads.
[[nodiscard]] Needs needs_of(const Retention& retention, const Scorer& scorer, const Allocator& allocator);

class Evict final : public KVPolicy {
 public:
  /// `name` and `json` describe the policy to people and files; the registry makes them.
  Evict(std::string name, std::unique_ptr<Scorer> scorer, std::unique_ptr<Allocator> allocator, Retention retention,
        std::string json);

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] Needs needs() const override { return needs_of(retention_, *scorer_, *allocator_); }
  [[nodiscard]] Trigger trigger() const override { return retention_.trigger; }
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const override;
  /// Order: limits of every row, window attention, scores, sharing, allotment.
  /// `share` other than per_layer_per_head ranks by the mean of the sharing rows' scores over layers (`per_head`) or by
  /// their maximum over layers and heads
  /// (`all`), slot by slot; sharing rows hold the same tokens. Source of both: TriAttention's modes.
  /// With retention.rest what does not stay is folded: a span for what each segment drops (ours: neither AMS nor SeKV
  /// has it), or for runs of max_span dropped slots where there are no segments.
  [[nodiscard]] Decision decide(const Evidence& evidence) const override;
  [[nodiscard]] const MemoryOptions* memory() const override {
    return retention_.rest == nullptr ? nullptr : &retention_.rest->memory;
  }
  [[nodiscard]] std::string to_json() const override { return json_; }

  /// What every row of an event may keep, before anything is scored: reads shapes, lengths and positions of `evidence`,
  /// not what is cached.
  [[nodiscard]] Limits limits(const Evidence& evidence) const;

  [[nodiscard]] const Retention& retention() const { return retention_; }
  [[nodiscard]] const Scorer& scorer() const { return *scorer_; }
  [[nodiscard]] const Allocator& allocator() const { return *allocator_; }

 private:
  std::string name_;
  std::unique_ptr<Scorer> scorer_;
  std::unique_ptr<Allocator> allocator_;
  Retention retention_;
  std::string json_;
};

}  // namespace kvkeep
