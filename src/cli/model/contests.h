#pragma once
// Policies under budgets: the rows of a table of kvkeep eval, and how their shares of right answers compare.

#include <CLI/App.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kvkeep/report/intervals.h"
#include "options.h"
#include "table.h"

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
// Prints a note if a policy that cuts never did, unless quiet. `what` names what it ran over: samples, texts.
void note_idle(const Contest& contest, std::int64_t events, const char* what, bool quiet);

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

// NaN if nothing was asked.
double share(std::int64_t right, std::int64_t asked);
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
// Empty without --against. strata(contest, task): the answers; task "": of all.
std::string differences(const ContestOptions& options, const std::vector<Contest>& contests,
                        const std::vector<std::string>& tasks,
                        const std::function<Strata(std::size_t contest, const std::string& task)>& strata);

}  // namespace kvkeep::cli
