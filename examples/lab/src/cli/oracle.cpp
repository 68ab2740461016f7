// SPDX-License-Identifier: Apache-2.0
#include "oracle.h"

#include <algorithm>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"

namespace kvkeep::cli {

void Oracle::tell(SequenceId id, const lm::TaskSample& sample) {
  for (std::size_t i = 0; i < sample.needed.size(); ++i) needed_until_[id][sample.needed[i]] = sample.needed_until[i];
}

std::vector<std::int32_t> Oracle::keep(const Row& row) const {
  const auto place = static_cast<std::size_t>(row.sequence);
  const auto told = place < facing_.size() ? needed_until_.find(facing_[place]) : needed_until_.end();
  KVKEEP_REQUIRE(told != needed_until_.end(), "policy: oracle was not told what sequence ", row.sequence,
                 " needs; allowed with a task that says so");
  const std::map<std::int32_t, std::int32_t>& needed = told->second;
  const std::int32_t newest = row.positions[row.length - 1];
  const auto still_needed = [&](std::int32_t position) {
    const auto found = needed.find(position);
    return found != needed.end() && found->second > newest + 1;  // the token after the newest is already predicted
  };
  std::vector<bool> stays(static_cast<std::size_t>(row.length));
  std::int32_t room = budget_;
  const auto take = [&](std::int32_t slot) {
    if (room == 0 || stays[static_cast<std::size_t>(slot)]) return;
    stays[static_cast<std::size_t>(slot)] = true;
    --room;
  };
  for (std::int32_t slot = 0; slot < std::min(sink_, row.length); ++slot) take(slot);
  take(row.length - 1);
  for (std::int32_t slot = row.length - 1; slot >= 0; --slot)
    if (still_needed(row.positions[slot])) take(slot);
  for (std::int32_t slot = row.length - 1; slot >= 0; --slot) take(slot);
  std::vector<std::int32_t> kept;
  for (std::int32_t slot = 0; slot < row.length; ++slot)
    if (stays[static_cast<std::size_t>(slot)]) kept.push_back(slot);
  return kept;
}

Decision Oracle::decide(Machine&, const Evidence& evidence) const {
  std::vector<std::int32_t> slots;
  KeepSet set;
  set.indptr.push_back(0);
  for (const Row& row : evidence.table.rows) {
    const std::vector<std::int32_t> kept = keep(row);
    slots.insert(slots.end(), kept.begin(), kept.end());
    set.indptr.push_back(static_cast<std::int64_t>(slots.size()));
  }
  set.slots = empty({static_cast<std::int64_t>(slots.size())}, Dtype::i32);
  std::copy(slots.begin(), slots.end(), set.slots.data<std::int32_t>());
  Decision decision;
  decision.reason = Reason::over_budget;
  decision.keep = std::move(set);
  return decision;
}

void register_oracle() {
  register_policy({.name = std::string(kOracle),
                   .what = "keeps what a task will need; it is told, so it bounds what a policy can do",
                   .source = "none: for evaluation only",
                   .needs = "a task that says which positions it will need",
                   .describe = [](Fields& f) -> MakePolicy {
                     std::int32_t budget = 0, interval = 128, sink = 4;
                     f.integer("budget", budget, 1, INT32_MAX, "slots of a row after an event", {}, "required");
                     f.integer("interval", interval, 0, INT32_MAX, "tokens between events");
                     f.integer("sink", sink, 0, INT32_MAX, "first slots that stay");
                     if (!f.listing() && budget < sink + 1)
                       f.bad("budget", std::int64_t{budget}, text("at least sink + 1 = ", sink + 1));
                     return [budget, interval, sink](std::string json, std::unique_ptr<KVPolicy>) {
                       return std::make_unique<Oracle>(budget, interval, sink, std::move(json));
                     };
                   }});
}

std::unique_ptr<KVPolicy> make_untold(const PolicyText& policy) {
  KVKEEP_REQUIRE(policy.name() != kOracle,
                 "policy: oracle must be told what a task will need; allowed in eval on the small model's tasks, and "
                 "in generate with --task");
  return policy.make();
}

}  // namespace kvkeep::cli
