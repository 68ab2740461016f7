// kvkeep eval: how often the model still finds what it needs, under each policy and budget.

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "commands.h"
#include "kvkeep/core/error.h"
#include "kvkeep/lm/generation.h"
#include "options.h"
#include "oracle.h"
#include "progress.h"
#include "retention.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kExamples = R"(
Examples:
  kvkeep eval --model examples/model
  kvkeep eval --model examples/model --task ask,chain --length 1024 --budgets 256,128 --policy full --policy ams-tova --policy tova
  kvkeep eval --model examples/model --task ask --policy ams-tova,variant=official,budget=128 --samples 100 -o csv

Teacher forced: the trace of each sample is fed, and a look-up is right when the argmax of the logits before it is the value that was asked
for. Intervals are Wilson's at 95 %. "late" is the last third of the trace. Cache bytes are those of one sequence: the most at any time,
and what is left behind the last event. tokens/s counts steps that only decode, events and eviction included.
The policy `oracle` is told which positions the sample will need: it shows what a perfect choice of the same size would give.
)";

struct Options {
  ModelOptions model;
  OutputOptions output;
  std::vector<std::string> tasks{"ask"}, policies;
  std::vector<std::int32_t> budgets;
  std::int32_t interval = 32, recent = -1, samples = 20, batch = 8;
  std::uint64_t seed = 1000000;
  lm::TaskOptions shape;
};

struct Contest {
  PolicyText policy;
  std::int32_t budget = 0;  // 0: never cuts
  std::string resolved = {}, warning = {};
};

struct Measured {
  std::map<std::string, LookUps> by_task;
  LookUps all;
  std::int64_t peak_bytes = 0, kept_bytes = 0, events = 0;
  double decode_seconds = 0;
  std::int64_t decoded_tokens = 0;
  [[nodiscard]] double tokens_per_second() const {
    return decode_seconds > 0 ? static_cast<double>(decoded_tokens) / decode_seconds : std::nan("");
  }
};

// Wilson's score interval at 95 %.
std::pair<double, double> wilson(std::int64_t right, std::int64_t asked) {
  constexpr double z = 1.959963984540054;
  const auto n = static_cast<double>(asked);
  const double p = static_cast<double>(right) / n;
  const double middle = (p + z * z / (2 * n)) / (1 + z * z / n);
  const double reach = z / (1 + z * z / n) * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
  return {std::max(0.0, middle - reach), std::min(1.0, middle + reach)};
}

double share(std::int64_t right, std::int64_t asked) {
  return asked == 0 ? std::nan("") : static_cast<double>(right) / static_cast<double>(asked);
}

std::string with_interval(std::int64_t right, std::int64_t asked) {
  if (asked == 0) return "-";
  const auto [low, high] = wilson(right, asked);
  return text(real_cell(100 * share(right, asked), 1).shown, " (", real_cell(100 * low, 1).shown, "-", real_cell(100 * high, 1).shown, ")");
}

std::vector<std::string> default_policies() {
  return {"full", "streaming", "tova", "ams-tova", "ams-tova,variant=official", std::string(kOracle)};
}

// Every policy under every budget. A policy is made once here, so that a wrong option is refused before the model is opened.
std::vector<Contest> contests(const Options& o) {
  const std::vector<std::string> given = o.policies.empty() ? default_policies() : o.policies;
  std::vector<std::int32_t> budgets = o.budgets;
  if (budgets.empty() && o.policies.empty()) budgets = {o.shape.length / 4, o.shape.length / 8};
  std::sort(budgets.rbegin(), budgets.rend());
  std::vector<Contest> all;
  for (const std::string& one : given) {
    const PolicyText policy(one);
    const bool fixed = policy.name() == "full";
    if (fixed || budgets.empty())
      all.push_back({policy});
    else
      for (const std::int32_t budget : budgets) {
        std::vector<std::pair<std::string, std::int32_t>> options{{"budget", budget}, {"interval", o.interval}};
        if (o.recent >= 0 && policy.name() != kOracle) options.emplace_back("recent", o.recent);
        all.push_back({policy.with(options)});
      }
  }
  for (Contest& contest : all) {
    const std::unique_ptr<KVPolicy> made = contest.policy.make();
    contest.budget = made->trigger().never ? 0 : budget_of(*made);
    contest.resolved = made->to_json();
    contest.warning = warning_about(*made);
  }
  const auto whole_first = [](std::int32_t budget) { return budget == 0 ? std::numeric_limits<std::int32_t>::max() : budget; };
  std::stable_sort(all.begin(), all.end(), [&](const Contest& a, const Contest& b) {
    if (a.policy.label() != b.policy.label()) return false;
    return whole_first(a.budget) > whole_first(b.budget);
  });
  return all;
}

using Samples = std::map<std::string, std::vector<lm::TaskSample>>;

Samples draw_samples(const Options& o) {
  Samples samples;
  for (const std::string& task : o.tasks)
    for (std::int32_t i = 0; i < o.samples; ++i)
      samples[task].push_back(lm::make_task(task, o.seed + static_cast<std::uint64_t>(i), o.shape));
  return samples;
}

void measure_task(lm::Decoder& decoder, const Options& o, const Contest& contest, const std::string& task,
                  const std::vector<lm::TaskSample>& samples, Progress& progress, Measured& sum) {
  std::unique_ptr<KVPolicy> policy = contest.policy.make();
  lm::GeneratorOptions options{.places = std::min<std::int64_t>(o.batch, static_cast<std::int64_t>(samples.size())),
                               .cache_dtype = o.model.dtype()};
  options.hooks.on_step = [&](std::int64_t predicted) { progress.advance(predicted); };
  if (auto* oracle = dynamic_cast<Oracle*>(policy.get())) {
    for (std::size_t i = 0; i < samples.size(); ++i) oracle->tell(static_cast<SequenceId>(i), samples[i]);
    options.hooks.before_decision = [oracle](const lm::DecisionSight& sight) { oracle->face(sight.view.sequences); };
  }
  std::vector<lm::Request> requests;
  for (const lm::TaskSample& sample : samples) requests.push_back(forced_request(sample));
  const lm::GenerationRun run = lm::generate(decoder, std::move(policy), std::move(requests), std::move(options));
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const lm::Completion& done = run.completions[i];
    const LookUps count = count_look_ups(samples[i], done.tokens);
    sum.by_task[task].add(count);
    sum.all.add(count);
    sum.peak_bytes = std::max(sum.peak_bytes, done.peak_bytes);
    sum.kept_bytes = std::max(sum.kept_bytes, done.kept_bytes);
    sum.events += static_cast<std::int64_t>(done.events.size());
  }
  sum.decode_seconds += run.pace.decode_seconds;
  sum.decoded_tokens += run.pace.decoded_tokens;
}

// One row a policy and budget; a column a task.
Table wide_table(const Options& o, const std::vector<Contest>& all, const std::vector<Measured>& measured) {
  std::vector<Column> columns{{"policy", "policy", false}, {"budget", "budget"}};
  for (const std::string& task : o.tasks) columns.push_back({task, task + " % (95 %)"});
  if (o.tasks.size() > 1) columns.push_back({"all", "all % (95 %)"});
  for (const Column& column : std::vector<Column>{{"late", "late %"},
                                                  {"peak_bytes", "cache peak"},
                                                  {"kept_bytes", "kept"},
                                                  {"tokens_per_second", "tokens/s"},
                                                  {"events", "events"}})
    columns.push_back(column);
  Table table(std::move(columns));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Measured& m = measured[i];
    std::vector<Cell> row{all[i].policy.label(), all[i].budget == 0 ? Cell("-") : Cell(all[i].budget)};
    for (const std::string& task : o.tasks) row.emplace_back(with_interval(m.by_task.at(task).right, m.by_task.at(task).asked));
    if (o.tasks.size() > 1) row.emplace_back(with_interval(m.all.right, m.all.asked));
    row.push_back(real_cell(100 * share(m.all.late_right, m.all.late_asked), 1));
    row.push_back(bytes_cell(m.peak_bytes));
    row.push_back(bytes_cell(m.kept_bytes));
    row.push_back(real_cell(m.tokens_per_second(), 0));
    row.emplace_back(m.events);
    table.add(std::move(row));
  }
  return table;
}

// One row a policy, budget and task: for programs.
Table long_table(const Options& o, const std::vector<Contest>& all, const std::vector<Measured>& measured) {
  std::vector<Column> columns;
  for (const char* key : {"policy", "budget", "task", "length", "samples", "look_ups", "right", "accuracy", "accuracy_low", "accuracy_high",
                          "late_look_ups", "late_accuracy", "peak_bytes", "kept_bytes", "tokens_per_second", "events", "resolved"})
    columns.push_back({key, key});
  Table table(std::move(columns));
  for (std::size_t i = 0; i < all.size(); ++i)
    for (const std::string& task : o.tasks) {
      const Measured& m = measured[i];
      const LookUps& count = m.by_task.at(task);
      const auto [low, high] = count.asked > 0 ? wilson(count.right, count.asked) : std::pair(std::nan(""), std::nan(""));
      table.add({all[i].policy.label(), all[i].budget == 0 ? Cell(nullptr, "-") : Cell(all[i].budget), task, o.shape.length, o.samples,
                 count.asked, count.right, share_cell(share(count.right, count.asked)), share_cell(low), share_cell(high), count.late_asked,
                 share_cell(share(count.late_right, count.late_asked)), bytes_cell(m.peak_bytes), bytes_cell(m.kept_bytes),
                 real_cell(m.tokens_per_second(), 1), m.events, all[i].resolved});
    }
  return table;
}

void run(const Options& o) {
  const std::vector<Contest> all = contests(o);
  const Samples samples = draw_samples(o);
  lm::Decoder decoder = o.model.open();
  for (const Contest& contest : all)
    if (!o.output.quiet && !contest.warning.empty()) note(contest.warning);
  std::int64_t steps = 0;
  for (const auto& [task, drawn] : samples)
    for (const lm::TaskSample& sample : drawn) steps += static_cast<std::int64_t>(sample.ids.size()) - sample.prompt_length;
  Progress progress(steps * static_cast<std::int64_t>(all.size()), o.output.quiet);
  std::vector<Measured> measured(all.size());
  for (std::size_t i = 0; i < all.size(); ++i)
    for (const std::string& task : o.tasks) {
      progress.label(text(all[i].policy.label(), all[i].budget > 0 ? text(" ", all[i].budget) : "", ", ", task));
      measure_task(decoder, o, all[i], task, samples.at(task), progress, measured[i]);
    }
  progress.clear();
  for (std::size_t i = 0; i < all.size(); ++i)
    if (measured[i].events == 0 && all[i].budget > 0 && !o.output.quiet)
      note(text("note: ", all[i].policy.label(), " with budget ", all[i].budget,
                " never came to an event; its samples stay below budget + interval"));
  print((o.output.format == Format::md ? wide_table(o, all, measured) : long_table(o, all, measured)).text(o.output.format));
}

}  // namespace

Run add_eval(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("eval", "measure policies on tasks whose answers are known: accuracy, cache bytes, speed");
  auto o = std::make_shared<Options>();
  o->model.add(*sub);
  sub->add_option("--task", o->tasks, "tasks: chain, ask, needle, updates, copies")->delimiter(',')->option_text("NAME,... [ask]");
  sub->add_option(
         "--policy", o->policies,
         std::string("repeatable: ") + kPolicyHelp + ", or oracle; without it: full, streaming, tova, ams-tova strict and official, oracle")
      ->take_all()
      ->option_text("POLICY");
  sub->add_option("--budgets", o->budgets, "runs every evicting policy under each of these budgets; without --policy: length/4,length/8")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 30))
      ->option_text("N,...");
  sub->add_option("--interval", o->interval, "new tokens between two events, for every policy under --budgets")
      ->check(CLI::Range(1, 1 << 30))
      ->option_text("N [32]");
  sub->add_option("--recent", o->recent, "newest slots that stay, for every policy under --budgets; without it the policy's own")
      ->check(CLI::Range(0, 1 << 30))
      ->option_text("N");
  sub->add_option("--samples", o->samples, "samples of each task")->check(CLI::Range(1, 1 << 24))->option_text("N [20]");
  sub->add_option("--length", o->shape.length, "tokens of a sample's prompt and trace")->option_text("N [512]");
  sub->add_option("--seed", o->seed, "of the first sample; the others follow")->option_text("N [1000000]");
  sub->add_option("--batch", o->batch, "sequences decoded at once")->check(CLI::Range(1, 4096))->option_text("N [8]");
  o->output.add(*sub);
  sub->footer(kExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
