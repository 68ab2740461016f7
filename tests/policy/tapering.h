// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Tapering: the best slots by TOVA, and fewer of them once a text is long.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/score/tova.h"

namespace kvkeep {

struct TaperingOptions {
  std::int32_t budget = 1024;   ///< slots per row at first
  std::int32_t late = 512;      ///< from `length` tokens on
  std::int32_t length = 8192;   ///< tokens
  std::int32_t interval = 128;  ///< slots above the budget at which a sequence is due
  static constexpr std::int32_t kSinks = 4;

  void describe(Fields& f) {
    f.integer("budget", budget, kSinks + 2, INT32_MAX, "slots per row at first");
    f.integer("late", late, kSinks + 2, INT32_MAX, "slots per row once a text is long");
    f.integer("length", length, 1, INT32_MAX, "tokens from which on it is");
    f.integer("interval", interval, 1, INT32_MAX, "slots above the budget at which a sequence is due");
  }
};

class Tapering final : public KVPolicy {
 public:
  Tapering(TaperingOptions options, std::string json) : options_(options), json_(std::move(json)) {}

  [[nodiscard]] std::string_view name() const override { return "tapering"; }
  [[nodiscard]] Needs needs() const override { return scorer_.needs(); }
  [[nodiscard]] Trigger trigger() const override {
    return {.budget = {.slots = options_.budget}, .interval = options_.interval};
  }
  [[nodiscard]] std::string to_json() const override { return json_; }
  [[nodiscard]] std::vector<std::string> problems_on(const Machine& machine, const ModelSpec& spec) const override {
    const Needs needs = this->needs();
    return machine.problems(demand(needs), spec);
  }

  [[nodiscard]] Decision decide(Machine& machine, const Evidence& evidence) const override {
    const RowTable& table = evidence.table;
    Limits limits;
    limits.rows.resize(table.rows.size());
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      const RowGroup& group = table.groups[r / static_cast<std::size_t>(evidence.spec.kv_heads)];
      const std::int32_t budget = group.seen.tokens >= options_.length ? options_.late : options_.budget,
                         length = table.rows[r].length;
      limits.rows[r] = {budget, length > budget,
                        protect(length, budget, TaperingOptions::kSinks, scorer_.keeps_newest(), Variant::strict)};
    }
    const Needs needs = this->needs();
    const std::unique_ptr<Event> event = machine.begin(evidence, limits, demand(needs));
    const WindowAttention seen = event->attend(1, false, scorer_.shares());
    Decision decision;
    decision.reason = Reason::over_budget;
    decision.scores = event->share(event->score(scorer_, seen), scorer_.sharing());
    event->allot(allocator_, decision.scores, seen, decision);
    return decision;
  }
  using KVPolicy::decide;

 private:
  [[nodiscard]] Demand demand(const Needs& needs) const {
    return {name(), needs, scorer_, allocator_, Sharing::per_layer_per_head};
  }

  TaperingOptions options_;
  std::string json_;
  Tova scorer_;
  Flat allocator_;
};

inline PolicyEntry tapering() {
  return {.name = "tapering",
          .what = "the best slots, fewer of them once a text is long",
          .source = "none",
          .needs = "queries",
          .describe = [](Fields& f) -> MakePolicy {
            TaperingOptions o;
            o.describe(f);
            return [o](std::string json, std::unique_ptr<KVPolicy>) {
              return std::make_unique<Tapering>(o, std::move(json));
            };
          }};
}

}  // namespace kvkeep
