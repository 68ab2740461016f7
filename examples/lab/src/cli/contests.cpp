// SPDX-License-Identifier: Apache-2.0
#include "contests.h"

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/score/recency.h"

namespace kvkeep::cli {
namespace {

// Fills in what follows from the policy itself.
void resolve(Contest& contest) {
  const std::unique_ptr<KVPolicy> made = contest.policy.make();
  contest.never = made->trigger().never;
  contest.narrows = made->narrows();
  contest.folds = made->memory() != nullptr;
  contest.budget = budget_cell(*made);
  contest.resolved = made->to_json();
  contest.keeps_prompt = nlohmann::json::parse(contest.resolved).value("protect_prompt", false);
  contest.warning = warning_about(*made);
  contest.reach = reach_text(*made);
}

// One policy under every budget, or as it is written if it states its own limit.
std::vector<Contest> contests_of(const ContestOptions& o, const std::string& written,
                                 const std::vector<std::int32_t>& budgets) {
  const PolicyText policy(written);
  const bool says_itself =
      policy.name() != "full" && (policy.states("ratio") || policy.states("bytes") || policy.states("budget_share"));
  const bool every_budget = !says_itself && policy.takes("budget") && !budgets.empty();
  std::vector<std::pair<std::string, std::string>> options;
  const auto add = [&](const char* name, const std::string& value, bool even_stated) {
    if ((says_itself || policy.takes(name)) && (even_stated || !policy.states(name))) options.emplace_back(name, value);
  };
  if (says_itself || every_budget) {
    add("interval", text(o.interval), every_budget);
    if (o.recent >= 0) add("recent", text(o.recent), every_budget);
  }
  if (o.cut_prompts && policy.takes("prefill") && !policy.states("prefill")) options.emplace_back("prefill", "cut");
  std::vector<Contest> all;
  if (!every_budget) all.push_back({.policy = options.empty() ? policy : policy.with(options)});
  for (std::size_t i = 0; every_budget && i < budgets.size(); ++i) {
    std::vector<std::pair<std::string, std::string>> with_budget{{"budget", text(budgets[i])}};
    with_budget.insert(with_budget.end(), options.begin(), options.end());
    all.push_back({.policy = policy.with(with_budget)});
  }
  std::vector<Contest> resolved;
  for (Contest& contest : all) {
    try {
      resolve(contest);
    } catch (const InvalidArgument& error) {
      if (std::string_view(error.what()).find("budget is missing") == std::string_view::npos) throw;
      refuse(error.what(), ", or --budgets N,...");
    }
    resolved.push_back(contest);
    if (!o.protect_prompt || contest.keeps_all() || contest.keeps_prompt) continue;
    if (contest.policy.takes("protect_prompt")) {
      contest.policy = contest.policy.with({{"protect_prompt", "true"}});
      resolve(contest);
      resolved.push_back(contest);
    } else {
      resolved.back().warning =
          text("note: ", contest.shown(), " has no protect_prompt; allowed for policies that drop slots");
    }
  }
  return resolved;
}

// Finds for every contest its reference of --against: the one at the same budget (of two, the one that treats the
// prompt alike), or else the only one. References that do not run yet are added.
void compare_against(const ContestOptions& o, const std::vector<std::int32_t>& budgets, std::vector<Contest>& all) {
  std::vector<std::size_t> references;
  for (const Contest& wanted : contests_of(o, o.against, budgets)) {
    const auto known =
        std::find_if(all.begin(), all.end(), [&](const Contest& c) { return c.resolved == wanted.resolved; });
    references.push_back(static_cast<std::size_t>(known - all.begin()));
    if (known == all.end()) all.push_back(wanted);
  }
  for (Contest& contest : all) {
    for (const std::size_t r : references) {
      if (all[r].budget.value != contest.budget.value) continue;
      if (!contest.against || all[r].keeps_prompt == contest.keeps_prompt) contest.against = r;
    }
    if (!contest.against && references.size() == 1) contest.against = references.front();
  }
}

}  // namespace

void ContestOptions::add(CLI::App& app, const std::string& without, const std::string& budgets_without) {
  as_policy(
      app.add_option("--policy", policies, std::string("repeatable: ") + kPolicyHelp + "; without it: " + without))
      ->take_all()
      ->option_text("POLICY");
  app.add_option_function<std::vector<std::string>>(
         "--budgets",
         [this](const std::vector<std::string>& lists) { this->budgets = integers_of(lists, "--budgets", 1, 1 << 30); },
         "run every evicting policy under each of these budgets; without --policy: " + budgets_without)
      ->option_text("N,...");
  app.add_option("--interval", interval,
                 "new tokens between two events, for every policy under --budgets, ratio or bytes")
      ->check(CLI::Range(1, 1 << 30))
      ->option_text("N [32]");
  app.add_option("--recent", recent,
                 "newest slots that always stay, for every policy under --budgets; without it: the policy's own")
      ->check(CLI::Range(0, 1 << 30))
      ->option_text("N");
  as_policy(app.add_option("--against", against,
                           "policy that every row is compared to; it runs too if it is not among the others"))
      ->option_text("POLICY");
  app.add_flag("--protect-prompt", protect_prompt,
               "also run every policy with protect_prompt=true, in a row of its own; sekv and policies that narrow "
               "prompts do not have this option");
}

std::vector<Contest> contests(ContestOptions o, const std::vector<std::string>& policies,
                              std::vector<std::int32_t> budgets) {
  const std::vector<std::string> given = o.policies.empty() ? policies : o.policies;
  if (!o.budgets.empty() || !o.policies.empty()) budgets = std::move(o.budgets);
  std::sort(budgets.rbegin(), budgets.rend());
  std::vector<Contest> all;
  for (const std::string& one : given)
    for (Contest& contest : contests_of(o, one, budgets)) all.push_back(std::move(contest));
  const auto slots = [](const Contest& c) {  // most first; policies that never cut come before, other limits after
    return c.keeps_all()                ? std::numeric_limits<std::int64_t>::max()
           : c.budget.value.is_number() ? c.budget.value.get<std::int64_t>()
                                        : 0;
  };
  std::map<std::string, std::size_t> place;  // labels in the order given
  for (const Contest& contest : all) place.try_emplace(contest.policy.label(), place.size());
  std::stable_sort(all.begin(), all.end(), [&](const Contest& a, const Contest& b) {
    return std::pair(place[a.policy.label()], slots(b)) < std::pair(place[b.policy.label()], slots(a));
  });
  if (!o.against.empty()) compare_against(o, budgets, all);
  return all;
}

double share(std::int64_t right, std::int64_t asked) {
  return asked == 0 ? std::nan("") : static_cast<double>(right) / static_cast<double>(asked);
}

std::string Contest::shown() const {
  return text(policy.label(), never ? "" : " " + budget.shown, keeps_prompt ? ", prompt kept" : "");
}

void warn(const std::vector<Contest>& contests, bool quiet) {
  for (const Contest& contest : contests)
    if (!quiet && !contest.warning.empty()) note(contest.warning);
}

void EventCounts::add(const lm::Completion& done) {
  for (const lm::SequenceEvent& event : done.events) {
    ++events;
    slots_kept += event.slots_kept;
    slots_chosen += event.slots_chosen;
  }
}

std::string EventCounts::warning(const std::string& shown) const {
  if (slots_kept == 0 || slots_chosen > 0 || shown.starts_with(Recency::traits.name)) return {};
  return text("warning: ", shown,
              " chose none of the slots that its events kept: sinks, recents and, if it is "
              "protected, the prompt took the whole budget");
}

std::string reach_text(const KVPolicy& policy) {
  const MemoryOptions* memory = policy.memory();
  if (memory == nullptr) return {};
  if (memory->entries_share > 0) return text(memory->entries_share, " of the tokens seen");
  return std::isinf(memory->entries) ? std::string() : text(memory->entries);
}

std::string opened_nothing(const std::string& shown, const std::string& reach, const ReadCounts& reads) {
  if (reads.zooms > 0 || reads.unmet == 0) return {};
  return text("note: ", shown, " opened nothing: ", real_cell(reads.a_query(reads.resident), 0).shown,
              " entries are always there, of a budget of ", reach, "; ", reads.unmet,
              " spans that queries asked for did not fit (docs/method/memory.md: Zoom)");
}

void note_events(const Contest& contest, const EventCounts& counts, const ReadCounts& reads, const char* what,
                 bool quiet) {
  if (contest.never || quiet) return;
  if (counts.events == 0)
    note(text("note: ", contest.shown(), " never reached an event; its ", what, " stay below budget + interval"));
  else if (const std::string warning = counts.warning(contest.shown()); contest.warning.empty() && !warning.empty())
    note(warning);
  if (const std::string none = opened_nothing(contest.shown(), contest.reach, reads); !none.empty()) note(none);
}

std::vector<Column> contest_columns(const ContestOptions& options, const std::vector<Column>& others) {
  std::vector<Column> columns{{"policy", "policy", false}, {"budget", "budget"}};
  if (options.protect_prompt) columns.push_back({"prompt", "prompt", false});
  append(columns, others);
  return columns;
}

std::vector<Cell> contest_cells(const ContestOptions& options, const Contest& contest,
                                const std::vector<Cell>& others) {
  std::vector<Cell> cells{contest.policy.label(), contest.budget};
  if (options.protect_prompt) cells.emplace_back(contest.keeps_prompt || contest.keeps_all() ? "kept" : "cut");
  append(cells, others);
  return cells;
}

std::string with_interval(double value, const report::Interval& interval, Scale scale) {
  const auto shown = [&](double x) { return real_cell(scale.factor * x, scale.digits).shown; };
  if (std::isnan(value)) return "-";
  const std::string reach =
      std::isnan(interval.low) ? "no interval" : text(shown(interval.low), "-", shown(interval.high));
  return text(shown(value), " (", reach, ")");
}

std::string Difference::shown(Scale scale) const {
  if (std::isnan(value)) return "-";
  const auto with_sign = [&](double x) {
    return text(x < 0 ? "" : "+", real_cell(scale.factor * x, scale.digits).shown);
  };
  const std::string reach =
      std::isnan(interval.low) ? "no interval" : text(with_sign(interval.low), " to ", with_sign(interval.high));
  return text(with_sign(value), " (", reach, ")");
}

Difference difference(const Strata& ours, const Strata& theirs) {
  return {report::share(ours) - report::share(theirs), report::bootstrap_difference(ours, theirs)};
}

Difference difference(const RatioStrata& ours, const RatioStrata& theirs) {
  return {report::mean(ours) - report::mean(theirs), report::bootstrap_difference(ours, theirs)};
}

std::string differences(
    const ContestOptions& options, const std::vector<Contest>& contests, const std::vector<std::string>& tasks,
    const std::function<Difference(std::size_t contest, std::size_t against, const std::string& task)>& of) {
  if (options.against.empty()) return "";
  std::vector<Column> columns = contest_columns(options, {{"against", "against", false}});
  for (const std::string& task : tasks) columns.push_back({task, task + " (95 %)"});
  if (tasks.size() > 1) columns.push_back({"all", "all (95 %)"});
  Table table(std::move(columns));
  for (std::size_t c = 0; c < contests.size(); ++c) {
    const std::optional<std::size_t> against = contests[c].against;
    if (against == c) continue;
    std::vector<Cell> row = contest_cells(options, contests[c], {against ? contests[*against].shown() : "-"});
    const auto add = [&](const std::string& task) {
      row.emplace_back((against ? of(c, *against, task) : Difference{}).shown());
    };
    for (const std::string& task : tasks) add(task);
    if (tasks.size() > 1) add("");
    table.add(std::move(row));
  }
  return text("\nPercentage points above ", PolicyText(options.against).label(), ", paired bootstrap over samples:\n\n",
              table.markdown());
}

}  // namespace kvkeep::cli
