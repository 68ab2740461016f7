#pragma once
// Policies under budgets: the rows of a table of kvkeep eval, and how their shares of right answers compare.

#include <CLI/App.hpp>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvkeep/report/intervals.h"
#include "options.h"
#include "table.h"

namespace kvkeep::cli {

// --policy, --budgets, --interval, --recent, --against
struct ContestOptions {
  std::vector<std::string> policies;
  std::vector<std::int32_t> budgets;
  std::int32_t interval = 32, recent = -1;
  std::string against;
  bool cut_prompts = false;  // policies that do not say otherwise cut a prompt at its end
  void add(CLI::App& app, const std::string& without);  // `without`: what runs where no policy is given
};

// One policy with what it may keep: a row of the table.
struct Contest {
  PolicyText policy;
  bool never = false, narrows = false, folds = false;
  Cell budget = {nullptr, "-"};
  std::string resolved = {}, warning = {};
  std::optional<std::size_t> against = {};  // the contest that it is compared to
};

// Every policy under every budget. A policy is made once here, so that a wrong option is refused before the model is opened. Without --policy: `policies`
// under `budgets`, or under those that were given.
std::vector<Contest> contests(ContestOptions options, const std::vector<std::string>& policies, std::vector<std::int32_t> budgets);

using Strata = std::vector<std::vector<report::Answers>>;

// NaN where nothing was asked.
double share(std::int64_t right, std::int64_t asked);
// Per cent, with the interval in parentheses.
std::string with_interval(double value, const report::Interval& interval);

struct Difference {
  double value = std::nan("");
  report::Interval interval = {std::nan(""), std::nan("")};
  // Percentage points.
  [[nodiscard]] std::string shown() const;
};

// Of the shares; both answered the same samples.
Difference difference(const Strata& ours, const Strata& theirs);

}  // namespace kvkeep::cli
