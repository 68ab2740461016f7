// SPDX-License-Identifier: Apache-2.0
#pragma once
// A policy for evaluation only: it is told which positions a task will need. No policy could keep what it loses.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/cli/options.h"
#include "kvkeep/core/cache_view.h"
#include "kvkeep/policy/policy.h"
#include "kvlab/tasks.h"

namespace kvkeep::cli {

inline constexpr std::string_view kOracle = "oracle";

// Keeps the sinks, then the positions that are still needed (the newest of them if they do not fit), then the newest
// slots, up to the budget.
class Oracle final : public KVPolicy {
 public:
  Oracle(std::int32_t budget, std::int32_t interval, std::int32_t sink, std::string json)
      : budget_(budget), interval_(interval), sink_(sink), json_(std::move(json)) {}

  // Tells what sequence `id` will need, and until when. decide() throws InvalidArgument for a sequence that was never
  // told.
  void tell(SequenceId id, const lm::TaskSample& sample);
  // Tells which sequences the next decision is about, in the order of the view.
  void face(std::span<const SequenceId> sequences) { facing_.assign(sequences.begin(), sequences.end()); }

  [[nodiscard]] std::string_view name() const override { return kOracle; }
  [[nodiscard]] Needs needs() const override { return {}; }
  [[nodiscard]] Trigger trigger() const override { return {.budget = {.slots = budget_}, .interval = interval_}; }
  [[nodiscard]] Decision decide(Machine&, const Evidence& evidence) const override;
  [[nodiscard]] std::string to_json() const override { return json_; }

 private:
  [[nodiscard]] std::vector<std::int32_t> keep(const Row& row) const;
  std::int32_t budget_, interval_, sink_;
  std::string json_;
  std::map<SequenceId, std::map<std::int32_t, std::int32_t>>
      needed_until_;  // position -> the look-up that reads it last
  std::vector<SequenceId> facing_;
};

// Makes "oracle,budget=96,interval=32,sink=4" a policy like any other of this program. Call it once.
void register_oracle();

// For callers that cannot tell the oracle what a task needs. Throws InvalidArgument for the oracle, otherwise as
// PolicyText::make.
std::unique_ptr<KVPolicy> make_untold(const PolicyText& policy);

}  // namespace kvkeep::cli
