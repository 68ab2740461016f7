// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A policy, an allocator and a policy that narrows, which decide as they are told.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engines.h"
#include "kvkeep/allot/allocator.h"
#include "kvkeep/policy/policy.h"
#include "message_of.h"

namespace kvkeep::testing {

class ToldPolicy final : public KVPolicy {
 public:
  explicit ToldPolicy(Trigger trigger, std::function<Decision(const Evidence&)> decide = {})
      : trigger_(trigger), decide_(std::move(decide)) {}
  [[nodiscard]] std::string_view name() const override { return "told"; }
  [[nodiscard]] Needs needs() const override { return {}; }
  [[nodiscard]] Trigger trigger() const override { return trigger_; }
  [[nodiscard]] std::string to_json() const override { return "{}"; }
  [[nodiscard]] Decision decide(Machine&, const Evidence& evidence) const override { return decide_(evidence); }

 private:
  Trigger trigger_;
  std::function<Decision(const Evidence&)> decide_;
};

/// What an event of a sequence of 61 tokens says of a decision that `change` has changed.
inline std::string refused_decision(const std::function<void(const Evidence&, Decision&)>& change) {
  engines::DenseEngine engine(std::make_unique<ToldPolicy>(Trigger{.budget = {.slots = 24}, .interval = 8},
                                                           [change](const Evidence& evidence) {
                                                             Decision decision;
                                                             decision.reason = Reason::over_budget;
                                                             decision.keep = keep_everything(evidence.table);
                                                             change(evidence, decision);
                                                             return decision;
                                                           }),
                              false, Dtype::f32);
  oracle::Random random(5);
  engine.join(1);
  static_cast<void>(engine.step(engines::numbers_of(random, {{1, 60}})));
  return message_of<InvalidArgument>([&] { static_cast<void>(engine.step(engines::numbers_of(random, {{1, 1}}))); });
}

/// Top-k, then what it is told.
class ToldAllocator final : public Allocator {
 public:
  using Tell = std::function<void(const Evidence&, Decision&)>;
  using Spread = std::function<void(const Evidence&, std::vector<RowLimit>&)>;
  explicit ToldAllocator(Tell tell, Spread spread = {}) : tell_(std::move(tell)), spread_(std::move(spread)) {}
  [[nodiscard]] std::string_view name() const override { return "told"; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  void spread(const Evidence& evidence, std::span<const std::int32_t>, std::vector<RowLimit>& rows) const override {
    if (spread_) spread_(evidence, rows);
  }
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override {
    Flat().allot(evidence, limits, scores, std::move(seen), decision);
    tell_(evidence, decision);
  }

 private:
  Tell tell_;
  Spread spread_;
};

/// Every second token continues after the first layer, and the last one; all slots stay. Then it does what it is told.
class ToldPrompts final : public KVPolicy {
 public:
  using Tell = std::function<void(const Evidence&, LayerDecision&)>;
  explicit ToldPrompts(Tell tell, std::int32_t wants = 4) : tell_(std::move(tell)), wants_(wants) {}
  [[nodiscard]] std::string_view name() const override { return "told"; }
  [[nodiscard]] Needs needs() const override { return {.queries = 4, .keys = true}; }
  [[nodiscard]] Trigger trigger() const override { return {.budget = {.slots = 1000}, .interval = 8, .ragged = true}; }
  [[nodiscard]] std::string to_json() const override { return "{}"; }
  [[nodiscard]] Decision decide(Machine&, const Evidence&) const override { return {}; }
  [[nodiscard]] bool narrows() const override { return true; }
  /// Without anything to tell, none.
  [[nodiscard]] std::unique_ptr<PromptPass> begin_prompt(Machine&, const ModelSpec&, std::int32_t) const override {
    return tell_ ? std::make_unique<Pass>(wants_) : nullptr;
  }
  [[nodiscard]] LayerDecision decide_layer(Machine&, const Evidence& evidence,
                                           std::span<PromptPass* const>) const override {
    LayerDecision layer;
    layer.rows.keep = keep_everything(evidence.table);
    for (const RowGroup& group : evidence.table.groups) {
      const std::int32_t present = evidence.table.rows[static_cast<std::size_t>(group.first_row)].length;
      std::vector<std::int32_t> places;
      for (std::int32_t t = (present - 1) % 2; t < present; t += 2) places.push_back(t);
      layer.prompts.push_back({.reason = Reason::select_layer, .narrow = tokens_of(places)});
    }
    tell_(evidence, layer);
    return layer;
  }

 private:
  class Pass final : public PromptPass {
   public:
    explicit Pass(std::int32_t wants) : wants_(wants) {}
    [[nodiscard]] std::int32_t wants(std::int32_t layer, std::int32_t) const override {
      return layer == 0 ? wants_ : 0;
    }

   private:
    std::int32_t wants_;
  };

  Tell tell_;
  std::int32_t wants_;
};

}  // namespace kvkeep::testing
