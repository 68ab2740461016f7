// SPDX-License-Identifier: Apache-2.0
#pragma once
// Policies under budgets: the rows of a table of kvkeep eval, and how their shares of right answers compare.

#include <CLI/App.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvlab/generation.h"
#include "kvlab/intervals.h"

namespace kvkeep::cli {

// --policy, --budgets, --interval, --recent, --against, --protect-prompt
struct ContestOptions {
  std::vector<std::string> policies;
  std::vector<std::int32_t> budgets;
  std::int32_t interval = 32, recent = -1;
  std::string against;
  bool protect_prompt = false;  // policies that can also run with their prompt protected
  bool cut_prompts = false;     // policies that do not say otherwise cut a prompt at its end
  // `without`: what runs if no policy is given; `budgets_without`: under which budgets
  void add(CLI::App& app, const std::string& without, const std::string& budgets_without = "length/4,length/8");
};

// One policy with what it may keep: a row of the table.
struct Contest {
  PolicyText policy;
  bool never = false, narrows = false, folds = false, keeps_prompt = false;
  Cell budget = {nullptr, "-"};
  std::string resolved = {}, warning = {};
  std::string reach = {};                   // reach_text()
  std::optional<std::size_t> against = {};  // the contest that it is compared to

  [[nodiscard]] bool keeps_all() const { return never && !narrows; }
  [[nodiscard]] std::string shown() const;  // in one line, for people
};

// Every policy under every budget. A policy is made once here, so that a wrong option is refused before the model is
// opened. Without --policy: `policies` under `budgets`, or under those that were given.
std::vector<Contest> contests(ContestOptions options, const std::vector<std::string>& policies,
                              std::vector<std::int32_t> budgets);

// Prints the warnings of the contests, unless quiet.
void warn(const std::vector<Contest>& contests, bool quiet);
// NaN if nothing was asked.
double share(std::int64_t right, std::int64_t asked);

// What the events of a policy kept, over all its samples or texts.
struct EventCounts {
  std::int64_t events = 0, slots_kept = 0, slots_chosen = 0;

  void add(const lm::Completion& done);
  // Where no scorer had a say, a warning that names the policy as `shown`; else empty.
  [[nodiscard]] std::string warning(const std::string& shown) const;
  // The share of the kept slots that the scorer chose.
  [[nodiscard]] Cell chosen() const { return share_cell(share(slots_chosen, slots_kept)); }
  static std::vector<Column> columns() { return {{"events", "events"}, {"chosen", "chosen"}}; }
  [[nodiscard]] std::vector<Cell> cells() const { return {events, chosen()}; }
};

// Prints a note if a policy that cuts never did, or never by its scores, or if its budget left no room for the spans
// that queries asked for, unless quiet. `what` names what it ran over: samples, texts.
void note_events(const Contest& contest, const EventCounts& counts, const ReadCounts& reads, const char* what,
                 bool quiet);
// What a policy that folds may have in reach, for people; empty without a limit.
std::string reach_text(const KVPolicy& policy);
// A note about the policy `shown` if queries asked for spans and none opened; else empty.
std::string opened_nothing(const std::string& shown, const std::string& reach, const ReadCounts& reads);

// The columns of a table: policy, budget, with --protect-prompt whether the prompt was kept, and the others.
std::vector<Column> contest_columns(const ContestOptions& options, const std::vector<Column>& others = {});
std::vector<Cell> contest_cells(const ContestOptions& options, const Contest& contest,
                                const std::vector<Cell>& others = {});

using Strata = std::vector<std::vector<report::Answers>>;

using RatioStrata = std::vector<std::vector<report::Ratio>>;

// How a number is shown to people: a share as a percentage, or as it is.
struct Scale {
  double factor = 100;
  int digits = 1;
};

// With the interval in parentheses.
std::string with_interval(double value, const report::Interval& interval, Scale scale = {});

struct Difference {
  double value = std::nan("");
  report::Interval interval = {std::nan(""), std::nan("")};
  // Of shares: percentage points.
  [[nodiscard]] std::string shown(Scale scale = {}) const;
};

// Of the shares, or of the means; both answered the same samples.
Difference difference(const Strata& ours, const Strata& theirs);
Difference difference(const RatioStrata& ours, const RatioStrata& theirs);

// What Markdown says of --against: percentage points above it, a column per task and, of several, one for all of them.
// Empty without --against. of(contest, against, task): the difference; task "": of all.
std::string differences(
    const ContestOptions& options, const std::vector<Contest>& contests, const std::vector<std::string>& tasks,
    const std::function<Difference(std::size_t contest, std::size_t against, const std::string& task)>& of);

}  // namespace kvkeep::cli
