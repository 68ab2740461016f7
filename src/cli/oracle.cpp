#include "oracle.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

#include "kvkeep/core/error.h"
#include "kvkeep/core/nearest.h"
#include "untrusted_json.h"

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

std::string Oracle::to_json() const {
  return nlohmann::ordered_json{{"policy", kOracle}, {"budget", budget_}, {"interval", interval_}, {"sink", sink_}}
      .dump();
}

std::unique_ptr<Oracle> make_oracle(std::string_view text) {
  std::map<std::string, std::int32_t> options{{"budget", 0}, {"interval", 128}, {"sink", 4}};
  while (text.find(',') != std::string_view::npos) {
    text.remove_prefix(text.find(',') + 1);
    const std::string_view item = text.substr(0, text.find(','));
    const std::size_t equals = std::min(item.find('='), item.size());
    const auto found = options.find(std::string(item.substr(0, equals)));
    KVKEEP_REQUIRE(found != options.end() && equals < item.size(), "policy: oracle has no option \"", shortened(item),
                   "\"", did_you_mean(item.substr(0, equals), std::array{"budget", "interval", "sink"}),
                   "; allowed budget=, interval=, sink=");
    const std::string_view value = item.substr(equals + 1);
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), found->second);
    KVKEEP_REQUIRE(error == std::errc() && end == value.data() + value.size() && found->second >= 0,
                   "policy: ", found->first, " of oracle is \"", shortened(value), "\"; allowed an integer, 0 or more");
  }
  KVKEEP_REQUIRE(options["budget"] >= options["sink"] + 1, "policy: budget of oracle is ", options["budget"],
                 "; allowed at least sink + 1 = ", options["sink"] + 1);
  return std::make_unique<Oracle>(options["budget"], options["interval"], options["sink"]);
}

}  // namespace kvkeep::cli
