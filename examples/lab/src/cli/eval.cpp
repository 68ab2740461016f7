// SPDX-License-Identifier: Apache-2.0
// kvkeep eval: how often the model still finds what it needs, under each policy and budget.

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "commands.h"
#include "contests.h"
#include "diagnostics_table.h"
#include "eval_text.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvlab/diagnostics.h"
#include "kvlab/generation.h"
#include "kvlab/intervals.h"
#include "model_options.h"
#include "oracle.h"
#include "retention.h"
#include "run_cost.h"
#include "watch.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kEvalExamples = R"(
Examples:
  kvkeep eval --model examples/model --task ask --budgets 64 --policy full --policy tova --policy tova,rest=fold
  kvkeep eval --model examples/model --task ask,chain --length 1024 --budgets 256,128 --policy full --policy tova
  kvkeep eval --model examples/model --task ask --policy ams-tova,variant=official,budget=128 --samples 100 -o csv
  kvkeep eval --model examples/model --policy tova --policy ams-tova --budgets 128 --samples 100 --against tova
  kvkeep eval --model examples/model --policy tova,ratio=0.5 --policy ams-tova,bytes=200000 --diagnostics
  kvkeep eval --model examples/model --task ask,chain --policy full --policy tova,budget=32,interval=32,rest=fold
  kvkeep eval --model examples/model --task needle --length 1024 --retrieval 4 --batch 1 --budgets 96 \
      --policy fastkv,layer=1
  kvkeep eval --model SmolLM2.gguf --task ruler/niah-single-1,ruler/vt --length 1024 --budgets 512,256 --policy tova
  kvkeep eval --model SmolLM2.gguf --task text/needle --haystack prose.txt --budgets 256 --question after --batch 4
  kvkeep eval --model SmolLM2.gguf --samples-in mine.jsonl --policy full --policy tova --budgets 512,256
  kvkeep eval --model SmolLM2.gguf --samples-in hotpotqa.jsonl --templates dataset2prompt.json --truncate middle
  kvkeep eval --model SmolLM2.gguf --task ruler/niah-single-1 --length 1024 --depth 0,50,100 --samples-out 1k.jsonl

Tasks over text (those with a / in their names) need a model with a tokenizer. The question is asked in the model's
chat template unless --raw is given; the answer is generated and scored by the references that it contains. A prompt
is cut at its end, with the question in sight or, with --question after, before it comes. Each prompt runs once for
all policies. The table has the mean score, and as `whole %` the share of samples with full score. The tasks:
  ruler/niah-single-1 to -3, ruler/niah-multikey-1 to -3, ruler/niah-multivalue, ruler/niah-multiquery,
  ruler/vt, ruler/cwe, ruler/fwe, ruler/qa-1 and -2 (with --passages), text/needle
--depth says where the needle is, for tasks that ask for one; several depths have --samples samples each, of the same
seeds.

--samples-in FILE asks what you want to know: one JSON object per line, such as
  {"turns": ["<a long report>", "Which year?"], "references": "2023", "scoring": "contains", "max_new_tokens": 16}
with `prompt` (a string), `messages` ([{"role", "content"}]) or `turns` (strings; the cut is before the last one);
`references`; `scoring`: contains, any, exact, f1, rouge-l, number, choice, class or numbers; `max_new_tokens`; and, if
you like, choices, answer_prefix, first_line, raw, task, id. Lines of RULER, LongBench, InfiniteBench, GSM8K and MATH
are read as published. --samples-out FILE writes the samples in that form, with seed, length, depth, token ids and, per
policy and budget, tokens, text and score of the answer. examples/lab/docs/text.md describes both.

--temperature draws the answers, the same random numbers for every policy: answer r to sample i has the seed
--sampling-seed + r * samples + i, which --samples-out names. --repeats N draws N answers to each sample and shows their
mean (pass@1); every repeat runs the prompts again.

--score tokens feeds the reference and counts tokens of it that the model would have written. Fed tokens give each
other away, so the policy `random` runs too, under every budget: what it gets is the floor.

Tasks of the small model are teacher-forced: the trace of each sample is fed, and a look-up is right if the argmax of
the logits before it is the value that was asked for. "late" is the last third of the trace. Cache bytes are those of
one sequence: the most at any time, and what is left after the last event. tokens/s counts steps that only decode,
including events and eviction.
Policies that narrow prompts (asl and its relatives) are tested with --retrieval N: the prompt is 7/8 of --length,
extended to the first question, and N look-ups are predicted. Three more columns: the time to the first token (median;
--batch 1 for a prompt by itself), the layer that selected (mean over the samples that have one), and the tokens that
continued to the end of the model or to a second pass (mean). --budgets applies to the policy before a +, as in
asl,window=16+ams-tova,budget=128.

Policies that fold (sekv, rest=fold) count coarse entries and sketches as cache bytes: `kept` is what they hold near.
Four more columns: bytes of factors at the end of a sample (mean); spans that a query opens per KV head
and layer, and tokens in them (means over queries that find spans); bytes of factors read per decoded token.

The policy `oracle` is told which positions the sample will need, so it shows what a perfect choice of the same size
achieves.

Intervals are at 95 %. The look-ups of one sample share a prompt and a cache, so they are not independent: the table
shows a bootstrap over whole samples (1000 resamples within each task, seeded). --intervals wilson treats each
look-up as independent. CSV and JSON hold both: sample_low and sample_high, accuracy_low and accuracy_high.
--against adds the difference to another policy at the same budget (or at its only one), with the interval of the
paired bootstrap: both policies answer the same resampled samples. An interval that contains 0 shows no difference.
A policy that states a ratio or bytes ignores --budgets; it takes --interval and --recent unless it states its own.

--diagnostics adds how kept sets change (IoU, survival), which regions of 32 positions lose everything, how much of
the middle third is kept, segments, and, from --diagnostics-samples samples of each task, what a full cache's
attention would have read (recall, output error) and how much a free run repeats itself; over text, how much the
answers do. examples/lab/docs/diagnostics.md defines each; JSON has them all.
)";

struct EvalOptions {
  ModelOptions model;
  OutputOptions output;
  ContestOptions contests;
  std::vector<std::string> tasks{"ask"};
  std::int32_t samples = 20, batch = 8;
  std::uint64_t seed = 1000000;
  lm::TaskOptions shape;
  bool wilson = false, diagnostics = false;
  std::int32_t diagnostics_samples = 4, retrieval = 0;
  TextOptions text;
  SamplingOptions sampling;
  std::int32_t repeats = 1;
  const CLI::Option *task = nullptr, *samples_option = nullptr, *length_option = nullptr;
};

struct Measured {
  std::map<std::string, LookUps> by_task;
  std::map<std::string, std::vector<report::Answers>> samples;  // [samples] of each task
  std::map<std::string, report::Diagnostics> diagnostics;       // by task
  LookUps all;
  RunCost cost;
};

// Samples of one task, or of all tasks.
Strata strata(const Measured& measured, const std::string& task = "") {
  Strata all;
  for (const auto& [name, samples] : measured.samples)
    if (task.empty() || name == task) all.push_back(samples);
  return all;
}

std::string accuracy(const EvalOptions& o, const Measured& measured, const LookUps& count,
                     const std::string& task = "") {
  return with_interval(share(count.right, count.asked),
                       o.wilson ? report::wilson(count.right, count.asked) : report::bootstrap(strata(measured, task)));
}

Difference difference_of(const Contest& contest, const Measured& own, const std::vector<Measured>& measured,
                         const std::string& task) {
  if (!contest.against) return {};
  return difference(strata(own, task), strata(measured[*contest.against], task));
}

std::vector<std::string> default_policies() {
  return {"full", "streaming", "tova", "tova,rest=fold", "ams-tova", "ams-tova,variant=official", std::string(kOracle)};
}

// A repeated task would count its look-ups twice and make intervals too narrow.
std::vector<std::string> tasks_of(const std::vector<std::string>& lists) {
  std::vector<std::string> tasks;
  for (std::string& item : items_of(lists, "--task")) {
    KVKEEP_REQUIRE(std::ranges::find(tasks, item) == tasks.end(), "--task: '", item,
                   "' is given twice; allowed each task once");
    require_task(item, true);
    tasks.push_back(std::move(item));
  }
  return tasks;
}

using Samples = std::map<std::string, std::vector<lm::TaskSample>>;

Samples draw_samples(const EvalOptions& o) {
  require_memory_of_samples(o.tasks.size(), o.samples, o.shape.length);
  Samples samples;
  lm::TaskOptions shape = o.shape;
  if (o.retrieval > 0) shape.prompt_length = o.shape.length * 7 / 8;
  for (const std::string& task : o.tasks)
    for (std::int32_t i = 0; i < o.samples; ++i) {
      samples[task].push_back(
          sample_of(task, [&] { return lm::make_task(task, o.seed + static_cast<std::uint64_t>(i), shape); }));
      if (o.retrieval > 0) samples[task].back() = asked_in_the_prompt(std::move(samples[task].back()), o.retrieval);
    }
  return samples;
}

// What --diagnostics compares every run with, by task: the first samples with a full cache.
using FullRuns = std::map<std::string, std::vector<FullRun>>;

FullRuns run_full(lm::Decoder& decoder, const EvalOptions& o, const Samples& samples) {
  FullRuns runs;
  for (const auto& [task, drawn] : samples)
    for (std::size_t i = 0; o.diagnostics && i < drawn.size() && i < static_cast<std::size_t>(o.diagnostics_samples);
         ++i)
      runs[task].emplace_back(decoder, drawn[i].ids);
  return runs;
}

// Runs a contest's policy over samples. Each is fed its own trace if `forced`, else it decodes freely.
lm::GenerationRun run_policy(lm::Decoder& decoder, const EvalOptions& o, const Contest& contest,
                             std::span<const lm::TaskSample> samples, bool forced, lm::GenerationHooks hooks) {
  std::unique_ptr<KVPolicy> policy = contest.policy.make();
  if (auto* oracle = dynamic_cast<Oracle*>(policy.get())) {
    for (std::size_t i = 0; i < samples.size(); ++i) oracle->tell(static_cast<SequenceId>(i), samples[i]);
    hooks.before_decision = [oracle](const lm::DecisionSight& sight) { oracle->face(sight.view.sequences); };
  }
  std::vector<lm::Request> requests;
  for (const lm::TaskSample& sample : samples) {
    requests.push_back(forced_request(sample));
    if (forced) continue;
    requests.back().forced.clear();
    requests.back().sampling = o.sampling.of(requests.size() - 1);
  }
  return lm::generate(decoder, std::move(policy), std::move(requests),
                      {.places = std::min<std::int64_t>(o.batch, static_cast<std::int64_t>(samples.size())),
                       .cache_dtype = o.model.dtype(),
                       .hooks = std::move(hooks),
                       .accelerator = o.model.device.accelerator()});
}

// Measures what attention loses when spans fold. Skips policies that narrow prompts: the full run has other queries.
void compare_outputs(lm::Decoder& decoder, const EvalOptions& o, const Contest& contest,
                     std::span<const lm::TaskSample> samples, std::span<const FullRun> full, report::Diagnostics& to) {
  if (samples.empty() || contest.narrows) return;
  OutputWatch watch(decoder.spec(), full, to);
  static_cast<void>(run_policy(decoder, o, contest, samples, true,
                               {.on_attention = [&](const lm::AttentionSight& sight) { watch.see(sight); },
                                .on_event = [&](const lm::EventSight& sight) { watch.see(sight); }}));
}

void measure_task(lm::Decoder& decoder, const EvalOptions& o, const Contest& contest, const std::string& task,
                  const std::vector<lm::TaskSample>& samples, const FullRuns& full, Progress& progress, Measured& sum) {
  lm::GenerationHooks hooks{.on_step = [&](std::int64_t predicted) { progress.advance(predicted); }};
  std::optional<Watch> watch;
  if (o.diagnostics) {
    watch.emplace(decoder.spec(), o.diagnostics_samples);
    hooks.on_event = [&](const lm::EventSight& sight) { watch->see(sight); };
  }
  const lm::GenerationRun run = run_policy(decoder, o, contest, samples, true, std::move(hooks));
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const lm::Completion& done = run.completions[i];
    const LookUps count = count_look_ups(samples[i], done.tokens);
    sum.by_task[task].add(count);
    sum.samples[task].push_back({count.right, count.asked});
    sum.all.add(count);
    sum.cost.add(done);
  }
  sum.cost.add(run.pace, run.totals);
  if (!watch) return;
  watch->end();
  const auto found = full.find(task);
  const std::size_t compared = found == full.end() ? 0 : found->second.size();
  if (contest.folds)
    compare_outputs(decoder, o, contest, std::span(samples).first(compared),
                    compared > 0 ? std::span(found->second) : std::span<const FullRun>(), watch->diagnostics());
  for (std::size_t i = 0; !contest.folds && i < compared; ++i)
    found->second[i].compare(watch->kept(static_cast<SequenceId>(i)), watch->diagnostics());
  if (compared > 0)
    for (const lm::Completion& free :
         run_policy(decoder, o, contest, std::span(samples).first(compared), false, {}).completions)
      watch->diagnostics().add_generated(free.tokens);
  sum.diagnostics.emplace(task, watch->diagnostics());
}

// One row per policy and budget, one column per task.
Table wide_table(const EvalOptions& o, const std::vector<Contest>& all, const std::vector<Measured>& measured) {
  std::vector<Column> columns = contest_columns(o.contests);
  for (const std::string& task : o.tasks) columns.push_back({task, task + " % (95 %)"});
  if (o.tasks.size() > 1) columns.push_back({"all", "all % (95 %)"});
  for (const Column& column : std::vector<Column>{
           {"late", "late %"}, {"peak_bytes", "cache peak"}, {"kept_bytes", "kept"}, {"tokens_per_second", "tokens/s"}})
    columns.push_back(column);
  append(columns, EventCounts::columns());
  const bool narrowing =
      o.retrieval > 0 || std::any_of(all.begin(), all.end(), [](const Contest& c) { return c.narrows; });
  if (narrowing) append(columns, {{"first_token_ms", "first token ms"}});
  if (narrowing) append(columns, RunCost::narrowing_columns());
  const bool folding = std::any_of(all.begin(), all.end(), [](const Contest& c) { return c.folds; });
  if (folding) append(columns, RunCost::folding_columns());
  Table table(std::move(columns));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Measured& m = measured[i];
    std::vector<Cell> row = contest_cells(o.contests, all[i]);
    for (const std::string& task : o.tasks) row.emplace_back(accuracy(o, m, m.by_task.at(task), task));
    if (o.tasks.size() > 1) row.emplace_back(accuracy(o, m, m.all));
    row.push_back(real_cell(100 * share(m.all.late_right, m.all.late_asked), 1));
    append(row,
           {bytes_cell(m.cost.peak_bytes), bytes_cell(m.cost.kept_bytes), real_cell(m.cost.tokens_per_second(), 0)});
    append(row, m.cost.counts.cells());
    if (narrowing) row.push_back(real_cell(m.cost.median_first_token_ms(), 1));
    if (narrowing) append(row, m.cost.narrowing_cells());
    if (folding) append(row, m.cost.folding_cells());
    table.add(std::move(row));
  }
  return table;
}

// The same rows, all tasks together.
std::vector<report::DiagnosticsResult> all_diagnostics(const std::vector<Measured>& measured) {
  std::vector<report::DiagnosticsResult> all;
  for (const Measured& one : measured) {
    report::DiagnosticsResult& together = all.emplace_back(one.diagnostics.begin()->second.result());
    for (auto task = std::next(one.diagnostics.begin()); task != one.diagnostics.end(); ++task)
      together.add(task->second.result());
  }
  return all;
}

// One row per policy, budget and task: for programs.
Table long_table(const EvalOptions& o, const std::vector<Contest>& all, const std::vector<Measured>& measured) {
  std::vector<Column> columns = contest_columns(o.contests);
  for (const char* key : {"task",          "length",        "samples",        "look_ups",        "right",
                          "accuracy",      "accuracy_low",  "accuracy_high",  "sample_low",      "sample_high",
                          "late_look_ups", "late_accuracy", "peak_bytes",     "kept_bytes",      "tokens_per_second",
                          "events",        "chosen",        "first_token_ms", "selection_layer", "going_on",
                          "far_bytes",     "opened",        "tokens_opened",  "moved_bytes"})
    columns.push_back({key, key});
  if (!o.contests.against.empty())
    for (const char* key : {"against", "against_budget", "difference", "difference_low", "difference_high"})
      columns.push_back({key, key});
  if (o.diagnostics) append(columns, diagnostics_columns(o.output.format));
  columns.push_back({"resolved", "resolved"});
  Table table(std::move(columns));
  for (std::size_t i = 0; i < all.size(); ++i)
    for (const std::string& task : o.tasks) {
      const Measured& m = measured[i];
      const LookUps& count = m.by_task.at(task);
      const report::Interval independent = report::wilson(count.right, count.asked),
                             sampled = report::bootstrap(strata(m, task));
      std::vector<Cell> row = contest_cells(
          o.contests, all[i],
          {task, o.shape.length, o.samples, count.asked, count.right, share_cell(share(count.right, count.asked)),
           share_cell(independent.low), share_cell(independent.high), share_cell(sampled.low), share_cell(sampled.high),
           count.late_asked, share_cell(share(count.late_right, count.late_asked)), bytes_cell(m.cost.peak_bytes),
           bytes_cell(m.cost.kept_bytes), real_cell(m.cost.tokens_per_second(), 1)});
      append(row, m.cost.counts.cells());
      row.push_back(real_cell(m.cost.median_first_token_ms(), 3));
      append(row, m.cost.narrowing_cells(1));
      append(row, m.cost.folding_cells(3));
      if (!o.contests.against.empty()) {
        const Difference d = difference_of(all[i], m, measured, task);
        const Contest* reference = all[i].against ? &all[*all[i].against] : nullptr;
        const Cell none(nullptr, "-");
        for (const Cell& cell : {reference == nullptr ? none : Cell(reference->policy.label()),
                                 reference == nullptr ? none : reference->budget, share_cell(d.value),
                                 share_cell(d.interval.low), share_cell(d.interval.high)})
          row.push_back(cell);
      }
      if (o.diagnostics) append(row, diagnostics_cells(&m.diagnostics.at(task).result(), o.output.format));
      row.emplace_back(all[i].resolved);
      table.add(std::move(row));
    }
  return table;
}

std::string markdown(const EvalOptions& o, const std::vector<Contest>& all, const std::vector<Measured>& measured) {
  std::string out = wide_table(o, all, measured).markdown();
  out += o.wilson ? "\n95 %: Wilson's interval, each look-up taken as independent.\n"
                  : text("\n95 %: bootstrap over whole samples (", o.samples, " per task).\n");
  out += differences(o.contests, all, o.tasks, [&](std::size_t c, std::size_t against, const std::string& task) {
    return difference(strata(measured[c], task), strata(measured[against], task));
  });
  if (o.diagnostics)
    out += "\nDiagnostics, all tasks:\n\n" + diagnostics_table(o.contests, all, all_diagnostics(measured)).markdown();
  return out;
}

// Runs tasks over text, if --task or --samples-in names them.
bool run_text(const EvalOptions& o) {
  const bool read = !o.text.samples_in.empty();
  if (!read && std::ranges::none_of(o.tasks, is_text_task)) {
    KVKEEP_REQUIRE(!o.text.any(),
                   "eval: --haystack, --passages, --question, --score, --raw, --depth, --truncate, --templates, "
                   "--answer-tokens and --samples-out are for tasks over text; allowed with --task ruler/..., --task "
                   "text/needle and --samples-in");
    KVKEEP_REQUIRE(o.sampling.sampling.greedy() || o.diagnostics,
                   "eval: --temperature where the model writes nothing: the traces of the small model's tasks are fed; "
                   "allowed with tasks over text, and with --diagnostics for the free runs");
    return false;
  }
  const std::vector<std::string> tasks = o.task->count() == 0 ? std::vector<std::string>{} : o.tasks;
  KVKEEP_REQUIRE(std::ranges::all_of(tasks, is_text_task),
                 "--task: tasks over text and tasks of the small model cannot share a table; allowed one kind");
  KVKEEP_REQUIRE(o.retrieval == 0 && !o.wilson, "eval: --retrieval and --intervals wilson are not for tasks over text");
  ContestOptions contests = o.contests;
  contests.cut_prompts = true;
  evaluate_text({.model = o.model,
                 .output = o.output,
                 .text = o.text,
                 .tasks = tasks,
                 .length = o.shape.length,
                 .samples = o.samples,
                 .batch = o.batch,
                 .length_given = o.length_option->count() > 0,
                 .samples_given = o.samples_option->count() > 0,
                 .seed = o.seed,
                 .sampling = o.sampling,
                 .repeats = o.repeats,
                 .diagnostics = o.diagnostics ? std::optional(o.diagnostics_samples) : std::nullopt,
                 .contests = std::move(contests)});
  return true;
}

void run(const EvalOptions& o) {
  lm::check_sampling(o.sampling.sampling);
  const bool text_alone =
      o.task->count() == 0 ? !o.text.samples_in.empty() : std::ranges::all_of(o.tasks, is_text_task);
  KVKEEP_REQUIRE(o.repeats == 1 || (!o.sampling.sampling.greedy() && text_alone), "eval: --repeats ", o.repeats,
                 " of answers that are all the same; allowed with --temperature above 0 and tasks over text");
  KVKEEP_REQUIRE(o.sampling.sampling.greedy() || !o.text.score_tokens,
                 "eval: --score tokens feeds the reference, so nothing is drawn; allowed without --temperature");
  if (o.diagnostics) require_host_memory(o.model, "eval");
  if (run_text(o)) return;
  const std::vector<Contest> all = contests(o.contests, default_policies(), {o.shape.length / 4, o.shape.length / 8});
  const Samples samples = draw_samples(o);
  lm::Decoder decoder = o.model.open();
  warn(all, o.output.quiet);
  std::int64_t steps = 0;
  for (const auto& [task, drawn] : samples)
    for (const lm::TaskSample& sample : drawn)
      steps += static_cast<std::int64_t>(sample.ids.size()) - sample.prompt_length;
  Progress progress(steps * static_cast<std::int64_t>(all.size()), o.output.quiet);
  progress.label("full runs to compare with");
  const FullRuns full = run_full(decoder, o, samples);
  std::vector<Measured> measured(all.size());
  for (std::size_t i = 0; i < all.size(); ++i)
    for (const std::string& task : o.tasks) {
      progress.label(all[i].shown() + ", " + task);
      measure_task(decoder, o, all[i], task, samples.at(task), full, progress, measured[i]);
    }
  progress.clear();
  for (std::size_t i = 0; i < all.size(); ++i)
    note_events(all[i], measured[i].cost.counts, measured[i].cost.reads, "samples", o.output.quiet);
  print(o.output.format == Format::md ? markdown(o, all, measured)
                                      : long_table(o, all, measured).text(o.output.format));
}

}  // namespace

Run add_eval(CLI::App& app) {
  CLI::App* sub =
      app.add_subcommand("eval", "measure policies on tasks whose answers are known: accuracy, cache bytes, speed");
  auto o = std::make_shared<EvalOptions>();
  o->model.add(*sub);
  o->model.device.add(*sub);
  using Lists = std::vector<std::string>;
  std::vector<std::string> tasks = small_tasks();
  append(tasks, tasks_over_text());
  o->task = as_names(sub->add_option_function<Lists>(
                         "--task", [o](const Lists& lists) { o->tasks = tasks_of(lists); },
                         text("tasks of the small model: ", joined(small_tasks()),
                              "; over text: ruler/niah-single-1 and others, text/needle")),
                     tasks)
                ->option_text("NAME,... [ask]");
  o->contests.add(
      *sub,
      "full, streaming, tova, tova,rest=fold, ams-tova strict and official, oracle; over text snapkv instead "
      "of the last two");
  o->samples_option = sub->add_option("--samples", o->samples, "samples of each task; of --samples-in: the first N")
                          ->check(CLI::Range(1, 1 << 24))
                          ->option_text("N [20]");
  o->length_option = sub->add_option("--length", o->shape.length,
                                     "tokens of a sample's prompt and trace; of --samples-in: the most, without it "
                                     "the model's positions")
                         ->option_text("N [512]");
  sub->add_option("--retrieval", o->retrieval,
                  "ask inside the prompt; number of look-ups to predict (0: every one in the trace)")
      ->check(CLI::Range(0, 1 << 20))
      ->option_text("N [0]");
  sub->add_option("--seed", o->seed, "seed of the first sample; the others follow")->option_text("N [1000000]");
  sub->add_option("--intervals", o->wilson, "intervals in the table: over whole samples, or Wilson's over look-ups")
      ->transform(CLI::CheckedTransformer(std::map<std::string, bool>{{"samples", false}, {"wilson", true}}))
      ->transform(one_of({"samples", "wilson"}))
      ->option_text("samples|wilson [samples]");
  o->text.add(*sub);
  o->sampling.add(*sub);
  sub->add_option("--repeats", o->repeats,
                  "tasks over text: answers to each sample, each with the next seeds; the mean")
      ->check(CLI::Range(1, 1 << 16))
      ->option_text("N [1]");
  sub->add_flag("--diagnostics", o->diagnostics, "show how kept sets change over time, and what attention loses");
  sub->add_option("--diagnostics-samples", o->diagnostics_samples,
                  "samples of each task for recall, output error and repetition; 0: none")
      ->check(CLI::Range(0, 1 << 24))
      ->option_text("N [4]");
  sub->add_option("--batch", o->batch, "sequences decoded at once")->check(CLI::Range(1, 4096))->option_text("N [8]");
  o->output.add(*sub);
  sub->footer(kEvalExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
