// SPDX-License-Identifier: Apache-2.0
#include "eval_text.h"

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/untrusted_json.h"
#include "kvkeep/parts/folds.h"
#include "kvlab/generation.h"
#include "kvlab/passages.h"
#include "kvlab/samples.h"
#include "kvlab/text_tasks.h"
#include "oracle.h"
#include "run_cost.h"
#include "text_layout.h"
#include "watch.h"

namespace kvkeep::cli {
namespace {

// What a policy wrote, for --samples-out.
struct Writing {
  std::vector<std::int32_t> tokens;  // up to the first end token
  std::string text;
  double score = 0;
  std::int64_t kept_bytes = 0;        // Completion::kept_bytes
  double cut_seconds = std::nan("");  // of the decision at the prompt's end; NaN if the prompt was narrowed as it ran
  double first_token_seconds = 0;
  std::optional<PromptReport> prompt = {};
};

// What a policy answered.
struct Answered {
  std::map<std::string, std::vector<Writing>> writings;       // [repeats * samples]
  std::map<std::string, std::vector<report::Ratio>> by_task;  // [samples] scores; or right tokens of the reference;
                                                              // of all repeats, so that intervals are over samples
  std::map<std::string, report::Answers> found;               // references, of all; or tokens
  std::map<std::string, report::Answers> whole;               // answers in which all was right
  RunCost cost;

  [[nodiscard]] RatioStrata strata(const std::string& task = "") const {
    RatioStrata all;
    for (const auto& [name, samples] : by_task)
      if (task.empty() || name == task) all.push_back(samples);
    return all;
  }
};

lm::Request request_of(const Asked& asked) {
  return {.prompt = asked.prompt,
          .new_tokens = asked.new_tokens(),
          .forced = asked.forced(),
          .forced_at_once = !asked.streamed,
          .stop_at_end = true,
          .sampling = asked.sampling};
}

// The question and the answer that was written, or fed; `forced_at_once` as they ran.
lm::Request fed_again(const Asked& asked, const std::vector<std::int32_t>& tokens) {
  lm::Request request{
      .prompt = asked.prompt, .forced = asked.forced(), .forced_at_once = !asked.streamed && !asked.forced().empty()};
  request.forced.insert(request.forced.end(), tokens.begin() + std::ssize(request.forced), tokens.end());
  request.new_tokens = static_cast<std::int32_t>(request.forced.size());
  return request;
}

Writing writing_of(const lm::TextModel& text, const Asked& asked, const std::vector<std::int32_t>& tokens) {
  const std::span<const std::int32_t> written =
      std::span(tokens).subspan(std::min(tokens.size(), asked.question.size()));
  const auto end = std::ranges::find_first_of(written, text.tokenizer.end_tokens());
  Writing writing{.tokens = {written.begin(), end}, .text = {}};
  writing.text = text.tokenizer.decode_continuation(writing.tokens);
  writing.score = asked.sample.text.score(writing.text);
  return writing;
}

// Tokens of the reference that the model would have written, each after the right ones before it.
report::Answers tokens_foretold(const Asked& asked, const std::vector<std::int32_t>& tokens) {
  report::Answers answers{.right = 0, .asked = static_cast<std::int64_t>(asked.answer.size())};
  for (std::size_t i = 0; i < asked.answer.size(); ++i)
    answers.right += tokens.at(asked.question.size() + i) == asked.answer[i] ? 1 : 0;
  return answers;
}

// rouge-l's own formula stays a little below 1.
bool is_whole(double score) { return score > 1 - 1e-6; }

// The answer of one repeat to sample i.
Writing& add_answer(const lm::TextModel& text, const std::string& task, std::size_t repeat, std::size_t i,
                    const Asked& asked, const lm::Completion& done, double cut_seconds, Answered& to) {
  std::vector<report::Ratio>& ratios = to.by_task[task];
  Writing& writing = to.writings[task].at(repeat * ratios.size() + i) = writing_of(text, asked, done.tokens);
  writing.cut_seconds = cut_seconds;
  writing.kept_bytes = done.kept_bytes;
  writing.first_token_seconds = done.first_token_seconds;
  writing.prompt = done.prompt;
  report::Ratio ratio{writing.score, 1};
  const bool each = asked.sample.text.scoring == lm::TextScoring::all;  // counts references
  const std::int64_t references = each ? static_cast<std::int64_t>(asked.sample.text.answers.size()) : 1;
  report::Answers found{each ? std::llround(writing.score * static_cast<double>(references))
                             : static_cast<std::int64_t>(is_whole(writing.score)),
                        references};
  if (!asked.answer.empty()) {
    found = tokens_foretold(asked, done.tokens);
    ratio = {static_cast<double>(found.right), static_cast<double>(found.asked)};
    writing.score = ratio.value();
  }
  ratios.at(i).add(ratio);
  const auto add = [](report::Answers& sum, report::Answers more) {
    sum = {sum.right + more.right, sum.asked + more.asked};
  };
  add(to.found[task], found);
  add(to.whole[task], {is_whole(writing.score) ? 1 : 0, 1});
  to.cost.add(done);
  return writing;
}

// A sample and its place in its task.
struct Seat {
  const std::string* task;
  std::size_t index;
  const Asked* asked;

  [[nodiscard]] std::int64_t tokens() const { return asked->tokens(); }
};

using Batch = std::vector<Seat>;

// Which samples run together: at most `most`, the longest at most twice as long as the shortest, since each has room
// for the longest.
std::vector<Batch> batches_of(std::vector<Seat> seats, std::int32_t most) {
  std::ranges::stable_sort(seats, {}, &Seat::tokens);
  std::vector<Batch> batches;
  for (const Seat& seat : seats) {
    if (batches.empty() || batches.back().size() == static_cast<std::size_t>(most) ||
        seat.tokens() > 2 * batches.back().front().tokens())
      batches.emplace_back();
    batches.back().push_back(seat);
  }
  return batches;
}

// Samples of several tasks run together, but for diagnostics, which are of one.
std::vector<Batch> batches_of(const TextEvaluation& e, const std::map<std::string, std::vector<Asked>>& asked) {
  std::vector<Batch> batches;
  std::vector<Seat> seats;
  for (const std::string& task : e.tasks) {
    const std::vector<Asked>& group = asked.at(task);
    for (std::size_t i = 0; i < group.size(); ++i) seats.push_back({&task, i, &group[i]});
    if (!e.diagnostics && task != e.tasks.back()) continue;
    append(batches, batches_of(std::move(seats), e.batch));
    seats = {};
  }
  return batches;
}

std::string shown_tasks(const Batch& batch) {
  const bool one = std::ranges::all_of(batch, [&](const Seat& seat) { return seat.task == batch.front().task; });
  return one ? ", " + *batch.front().task : "";
}

// Runs some samples under every policy. Their prompts run once for all policies but those that narrow them.
void answer(lm::Decoder& decoder, const lm::TextModel& text, const TextEvaluation& e,
            const std::vector<Contest>& contests, const Batch& batch, std::size_t repeat, Progress& progress,
            std::vector<Answered>& to, std::vector<Diagnosed>& diagnosed) {
  std::int64_t capacity = 0;
  for (const Seat& seat : batch) capacity = std::max(capacity, seat.tokens());
  const auto places = static_cast<std::int64_t>(batch.size());
  const auto asked = [&](std::size_t i) -> const Asked& { return *batch[i].asked; };
  using Clock = std::chrono::steady_clock;
  Clock::time_point deciding;
  lm::GenerationHooks hooks{.before_decision = [&](const lm::DecisionSight&) { deciding = Clock::now(); }};
  std::optional<WatchedTexts> watched;
  if (e.diagnostics)
    watched.emplace(decoder, e.model, contests,
                    std::clamp<std::int64_t>(*e.diagnostics - to.front().whole[*batch.front().task].asked, 0, places));
  const std::vector<lm::LayerCache> dense = decoder.make_cache(places, capacity, e.model.dtype());
  std::vector<std::unique_ptr<lm::Generator>> generators;
  std::vector<lm::Generator*> sharing;
  std::vector<std::size_t> place(contests.size());  // among those that share
  for (std::size_t c = 0; c < contests.size(); ++c) {
    if (watched) hooks.on_event = watched->hook(c);
    generators.push_back(
        std::make_unique<lm::Generator>(decoder, make_untold(contests[c].policy),
                                        lm::GeneratorOptions{.places = places,
                                                             .capacity = capacity,
                                                             .cache_dtype = e.model.dtype(),
                                                             .cache = {dense.begin(), dense.end()},
                                                             .hooks = hooks,
                                                             .accelerator = e.model.device.accelerator()}));
    place[c] = sharing.size();
    if (!contests[c].narrows) sharing.push_back(generators.back().get());
  }
  std::vector<lm::PromptRun> prompts;
  progress.label("prompts" + shown_tasks(batch));
  for (std::size_t i = 0; !sharing.empty() && i < batch.size(); ++i)
    prompts.push_back(lm::Generator::run_prompt(sharing, request_of(asked(i))));
  for (std::size_t c = 0; c < contests.size(); ++c) {
    progress.label(contests[c].shown() + shown_tasks(batch));
    lm::Generator& generator = *generators[c];
    std::vector<SequenceId> ids;
    std::vector<double> cut_seconds(batch.size(), std::nan(""));
    for (std::size_t i = 0; i < batch.size(); ++i) {
      if (contests[c].narrows) {
        ids.push_back(generator.join(request_of(asked(i))));
        static_cast<void>(generator.step());  // alone, so that the time to its first token is its own
      } else {
        ids.push_back(prompts[i].sequences[place[c]]);
        generator.begin(ids.back(), prompts[i]);  // the decision is the last thing it does
        cut_seconds[i] = std::chrono::duration<double>(Clock::now() - deciding).count();
      }
    }
    while (generator.step()) {
    }
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const lm::Completion done = generator.leave(ids[i]);
      const Writing& writing =
          add_answer(text, *batch[i].task, repeat, batch[i].index, asked(i), done, cut_seconds[i], to[c]);
      if (!watched) continue;
      if (asked(i).answer.empty()) watched->wrote(c, writing.tokens);
      watched->fed(c, ids[i], fed_again(asked(i), done.tokens), done);
    }
    if (const auto* folds = generator.keeper().find<parts::Folds>())
      to[c].cost.add(folds->reads(), decoder.config().spec.kv_heads);
    to[c].cost.add(generator.pace(), generator.keeper().totals());
    generators[c].reset();
    progress.advance(places);
  }
  if (watched) watched->end(progress, diagnosed);
}

double share_of(const Answered& answered, const std::string& task = "") { return report::mean(answered.strata(task)); }

bool is_drawn(const std::vector<Asked>& group) { return group.front().sample.line == 0; }  // not read from a file

std::int64_t longest(const std::vector<Asked>& group) {
  return std::ranges::max_element(group, {}, &Asked::tokens)->tokens();
}

// The name, or "mixed".
std::string scoring_of(const TextEvaluation& e, const std::vector<Asked>& group) {
  if (e.text.score_tokens) return "tokens";
  const lm::TextScoring first = group.front().sample.text.scoring;
  const bool same = std::ranges::all_of(group, [&](const Asked& a) { return a.sample.text.scoring == first; });
  return same ? std::string(lm::name_of(first)) : "mixed";
}

// When the question comes.
const char* question_of(const TextEvaluation& e) {
  return e.text.stream_after > 0 ? "stream" : e.text.question_after ? "after" : "before";
}

using Groups = std::map<std::string, std::vector<Asked>>;  // by task

// Tasks that the full cache does not solve say nothing about what policies lose. Answers in one's own words share few
// with a reference even if they are right.
std::string hopeless(const TextEvaluation& e, const Groups& asked, const std::vector<Contest>& contests,
                     const std::vector<Answered>& answered) {
  std::string out;
  for (std::size_t c = 0; c < contests.size(); ++c)
    if (contests[c].keeps_all())
      for (const std::string& task : e.tasks) {
        const lm::TextScoring scoring = asked.at(task).front().sample.text.scoring;
        if (!e.text.score_tokens && (scoring == lm::TextScoring::f1 || scoring == lm::TextScoring::rouge_l)) continue;
        if (const double whole = share_of(answered[c], task); whole < 0.5)
          out += text("\n", task, ": the full cache itself answers ", real_cell(100 * whole, 0).shown,
                      " %; below 50 the row says nothing about policies.\n");
      }
  return out;
}

Table wide_table(const TextEvaluation& e, const std::vector<Contest>& contests, const std::vector<Answered>& answered) {
  std::vector<Column> columns = contest_columns(e.contests);
  for (const std::string& task : e.tasks) columns.push_back({task, task + " % (95 %)"});
  if (e.tasks.size() > 1) columns.push_back({"all", "all % (95 %)"});
  append(columns, {{"whole", "whole %"},
                   {"peak_bytes", "cache peak"},
                   {"kept_bytes", "kept"},
                   {"first_token_ms", "first token ms"},
                   {"tokens_per_second", "tokens/s"}});
  append(columns, EventCounts::columns());
  const bool narrowing = std::ranges::any_of(contests, &Contest::narrows),
             folding = std::ranges::any_of(contests, &Contest::folds);
  if (narrowing) append(columns, RunCost::narrowing_columns());
  if (folding) append(columns, RunCost::folding_columns());
  Table table(std::move(columns));
  for (std::size_t c = 0; c < contests.size(); ++c) {
    const Answered& a = answered[c];
    std::vector<Cell> row = contest_cells(e.contests, contests[c]);
    for (const std::string& task : e.tasks)
      row.emplace_back(with_interval(share_of(a, task), report::bootstrap(a.strata(task))));
    if (e.tasks.size() > 1) row.emplace_back(with_interval(share_of(a), report::bootstrap(a.strata())));
    report::Answers whole;
    for (const auto& [task, one] : a.whole) whole = {whole.right + one.right, whole.asked + one.asked};
    append(row, {real_cell(100 * share(whole.right, whole.asked), 1), bytes_cell(a.cost.peak_bytes),
                 bytes_cell(a.cost.kept_bytes), real_cell(a.cost.median_first_token_ms(), 0),
                 real_cell(a.cost.tokens_per_second(), 1)});
    append(row, a.cost.counts.cells());
    if (narrowing) append(row, a.cost.narrowing_cells());
    if (folding) append(row, a.cost.folding_cells());
    table.add(std::move(row));
  }
  return table;
}

// One row per policy, budget and task: for programs.
Table long_table(const TextEvaluation& e, const Groups& asked, const std::vector<Contest>& contests,
                 const std::vector<Answered>& answered,
                 const std::map<std::string, std::vector<Diagnosed>>& diagnosed) {
  std::vector<Column> columns = contest_columns(e.contests);
  for (const char* key :
       {"task", "length", "question", "samples", "references", "found", "share", "share_low", "share_high", "whole",
        "scoring", "truncated", "peak_bytes", "kept_bytes", "first_token_ms", "tokens_per_second", "events", "chosen"})
    columns.push_back({key, key});
  append(columns, RunCost::narrowing_columns());
  append(columns, RunCost::folding_columns());
  const bool by_head = e.output.format == Format::json && std::ranges::any_of(contests, &Contest::folds);
  if (by_head) columns.push_back({"opened_by_head", "opened_by_head"});
  for (const char* key : {"against", "difference", "difference_low", "difference_high"}) columns.push_back({key, key});
  if (e.diagnostics) append(columns, diagnostics_columns(e.output.format));
  columns.push_back({"resolved", "resolved"});
  Table table(std::move(columns));
  for (std::size_t c = 0; c < contests.size(); ++c)
    for (const std::string& task : e.tasks) {
      const Answered& a = answered[c];
      const std::vector<Asked>& group = asked.at(task);
      const report::Answers& found = a.found.at(task);
      const report::Interval interval = report::bootstrap(a.strata(task));
      const Difference d =
          contests[c].against ? difference(a.strata(task), answered[*contests[c].against].strata(task)) : Difference{};
      std::vector<Cell> row = contest_cells(
          e.contests, contests[c],
          {task, is_drawn(group) ? e.length : longest(group), question_of(e), static_cast<std::int64_t>(group.size()),
           found.asked, found.right, share_cell(share_of(a, task)), share_cell(interval.low), share_cell(interval.high),
           a.whole.at(task).right, scoring_of(e, group), std::ranges::count_if(group, &Asked::truncated),
           bytes_cell(a.cost.peak_bytes), bytes_cell(a.cost.kept_bytes), real_cell(a.cost.median_first_token_ms(), 3),
           real_cell(a.cost.tokens_per_second(), 2)});
      append(row, a.cost.counts.cells());
      append(row, a.cost.narrowing_cells(1));
      append(row, a.cost.folding_cells(3));
      if (by_head) row.push_back(a.cost.opened_by_head());
      append(row, {contests[c].against ? Cell(contests[*contests[c].against].policy.label()) : Cell(nullptr, "-"),
                   share_cell(d.value), share_cell(d.interval.low), share_cell(d.interval.high)});
      if (e.diagnostics) append(row, diagnostics_cells(diagnosed.at(task)[c], e.output.format));
      row.emplace_back(contests[c].resolved);
      table.add(std::move(row));
    }
  return table;
}

// Of the needles that are asked for, in percent, in the order of the text.
nlohmann::ordered_json depths_of(const lm::TextSample& sample) {
  nlohmann::ordered_json depths = nlohmann::ordered_json::array();
  for (const lm::TextNeedle& needle : sample.needles)
    if (needle.asked) depths.push_back(100 * needle.depth);
  return depths;
}

// One line per sample: what --samples-in reads, the tokens of the question, and every policy's answer. For programs
// that ask other systems the same.
std::string sample_lines(const TextEvaluation& e, const Groups& asked, const std::vector<Contest>& contests,
                         const std::vector<Answered>& answered, const std::vector<std::int32_t>& end_tokens) {
  std::string lines;
  for (const std::string& task : e.tasks)
    for (std::size_t i = 0; i < asked.at(task).size(); ++i) {
      const Asked& one = asked.at(task)[i];
      nlohmann::ordered_json answers = nlohmann::ordered_json::array();
      for (std::size_t c = 0; c < contests.size(); ++c) {
        const std::vector<Writing>& writings = answered[c].writings.at(task);
        for (std::size_t w = i; w < writings.size(); w += asked.at(task).size()) {
          answers.push_back({{"policy", contests[c].policy.label()},
                             {"budget", contests[c].budget.value},
                             {"prompt_kept", contests[c].keeps_prompt},
                             {"tokens", writings[w].tokens},
                             {"text", writings[w].text},
                             {"score", writings[w].score},
                             {"kept_bytes", writings[w].kept_bytes},
                             {"cut_seconds", writings[w].cut_seconds}});
          if (const std::optional<PromptReport>& narrowed = writings[w].prompt)
            answers.back().update(nlohmann::ordered_json{{"first_token_seconds", writings[w].first_token_seconds},
                                                         {"selection_layer", narrowed->selection_layer},
                                                         {"going_on", narrowed->going_on.size()},
                                                         {"relative_variance", narrowed->relative_variance}});
          if (!e.sampling.sampling.greedy()) answers.back()["sampling_seed"] = e.sampling.of(w).seed;
        }
      }
      nlohmann::ordered_json line = nlohmann::ordered_json::parse(lm::to_json(one.sample));
      if (is_drawn(asked.at(task))) {
        line["seed"] = e.seed + i % static_cast<std::size_t>(e.samples);
        line["length"] = e.length;
        line["depth"] = depths_of(one.sample.text);
      }
      line["cache_dtype"] = e.model.cache_dtype;
      line["prompt"] = one.prompt;
      line["question"] = one.question;
      line["end_tokens"] = end_tokens;
      line["answers"] = std::move(answers);
      lines += io::written(line) + "\n";
    }
  return lines;
}

// ---- Samples

// Samples of e.tasks.
Groups draw_samples(const TextEvaluation& e, const Layout& layout) {
  const std::string haystack = e.text.haystack.empty() ? std::string() : io::read_file(e.text.haystack, "--haystack");
  std::map<lm::PassageForm, lm::Passages> passages;
  for (const std::string& file : e.text.passages) {
    lm::Passages read = lm::read_passages(io::read_file(file, "--passages"), file);
    const lm::PassageForm form = read.form;
    KVKEEP_REQUIRE(passages.emplace(form, std::move(read)).second, "--passages: ", file,
                   " is the second file of its form; allowed one of SQuAD and one of HotpotQA");
  }
  const lm::TokenCounter count = [&](std::string_view said) { return layout.count(said); };
  const std::span<const lm::TextTaskInfo> known = lm::text_tasks();
  require_memory_of_samples(e.tasks.size(), e.all_samples(), e.length);
  Groups asked;
  for (const std::string& task : e.tasks) {
    const auto info = std::ranges::find(known, task, &lm::TextTaskInfo::name);
    const bool essay = info != known.end() && info->needs_haystack;
    KVKEEP_REQUIRE(!essay || !e.text.haystack.empty(), "--haystack: ", task,
                   " hides what it asks for in prose; given none; allowed a file of text");
    const bool hotpot = task == "ruler/qa-2";
    const auto read = passages.find(hotpot ? lm::PassageForm::hotpotqa : lm::PassageForm::squad);
    KVKEEP_REQUIRE(info == known.end() || !info->needs_passages || read != passages.end(), "--passages: ", task,
                   " asks about documents; given ",
                   passages.empty() ? "none"
                   : hotpot         ? "SQuAD's"
                                    : "HotpotQA's",
                   "; allowed ", hotpot ? "HotpotQA's" : "SQuAD's");
    constexpr std::size_t kApart = 8;  // tokens that tokenising context and question separately may add
    for (std::int32_t n = 0; n < e.all_samples(); ++n) {
      const std::int32_t i = n % e.samples;
      const auto depth =
          e.text.depths.empty() ? std::nullopt : std::optional(e.text.depths[static_cast<std::size_t>(n / e.samples)]);
      // Samples begin at different words; otherwise each would hide its needle in the same text.
      const std::size_t begin = essay && !haystack.empty() ? haystack.size() * static_cast<std::size_t>(i) /
                                                                 static_cast<std::size_t>(e.samples)
                                                           : 0;
      const std::size_t word = begin == 0 ? 0 : std::min(haystack.find_first_of(" \n", begin), haystack.size() - 1);
      const std::string turned = essay ? haystack.substr(word) + " " + haystack.substr(0, word) : std::string();
      lm::TextSample sample = sample_of(task, [&] {
        return lm::make_text_task(task, e.seed + static_cast<std::uint64_t>(i), count,
                                  {.length = e.length,
                                   .reserved_tokens = kApart,
                                   .haystack = turned,
                                   .passages = read == passages.end() ? nullptr : &read->second,
                                   .depth = depth});
      });
      asked[task].push_back(
          layout.asked({.task = task, .text = std::move(sample)}, e.text.score_tokens, e.text.question_after));
    }
  }
  return asked;
}

// Adds the samples of --samples-in, and their tasks to e.tasks.
void read_samples(TextEvaluation& e, const Layout& layout, Groups& asked) {
  constexpr std::size_t kMostTasks = 64;  // each is a column
  const std::int64_t positions = io::ModelConfig::read(e.model.folder).max_positions;
  const std::int64_t most = e.length_given ? std::min(e.length, positions) : positions;
  const lm::PromptTemplates templates =
      e.text.templates.empty() ? lm::PromptTemplates{}
                               : lm::read_templates(io::read_file(e.text.templates, "--templates"), e.text.templates);
  for (const std::string& file : e.text.samples_in) {
    std::int64_t too_long = 0, line = 0, tokens = 0, for_answer = 0;  // how many; and of the first
    for (lm::Sample& sample : lm::read_samples(io::read_file(file, "--samples-in"), file, templates).samples) {
      const std::string task = sample.task;
      std::vector<Asked>& group = asked[task];
      KVKEEP_REQUIRE(group.empty() || !is_drawn(group), "--samples-in: ", file, " has the task '", shortened(task),
                     "', which --task names too; allowed one of them");
      if (e.samples_given && group.size() >= static_cast<std::size_t>(e.samples)) continue;
      if (group.empty()) e.tasks.push_back(task);
      KVKEEP_REQUIRE(e.tasks.size() <= kMostTasks, "--samples-in: ", file, " has too many tasks; given more than ",
                     kMostTasks, "; allowed ", kMostTasks);
      Asked& one = group.emplace_back(layout.asked(std::move(sample), e.text.score_tokens, e.text.question_after));
      if (one.tokens() <= most) continue;
      if (e.text.truncate && layout.truncate(one, most)) continue;
      if (too_long++ > 0) continue;
      line = one.sample.line, tokens = one.tokens();
      for_answer = one.new_tokens() - static_cast<std::int64_t>(one.question.size());
    }
    KVKEEP_REQUIRE(too_long == 0, "--samples-in: ", file, ", line ", line, ": the sample is too long; given ", tokens,
                   " tokens, ", for_answer, " of them for the answer (", too_long, " such in the file); allowed ", most,
                   most == positions ? ", the model's positions" : ", --length",
                   e.text.truncate ? ", with some of the text left beside markup and answer"
                                   : ". --truncate middle drops the middle of longer ones");
  }
}

// What --score tokens counts needs a floor: policies that are not `random` run beside it.
ContestOptions with_random(const TextEvaluation& e, const std::vector<std::string>& policies,
                           const std::vector<Contest>& all) {
  ContestOptions options = e.contests;
  const bool cuts = std::ranges::any_of(all, [](const Contest& c) { return !c.keeps_all(); });
  if (!e.text.score_tokens || !cuts ||
      std::ranges::any_of(all, [](const Contest& c) { return c.policy.name() == "random"; }))
    return options;
  if (options.policies.empty()) options.policies = policies;
  std::vector<std::string> added;
  for (const Contest& c : all)
    if (c.budget.value.is_number_integer())
      if (const std::string one = text("random,budget=", c.budget.value.get<std::int64_t>());
          std::ranges::find(added, one) == added.end())
        added.push_back(one);
  if (!e.contests.budgets.empty() || e.contests.policies.empty()) added = {"random"};
  append(options.policies, added);
  return options;
}

std::string notes(const TextEvaluation& e, const Groups& asked, const std::vector<Contest>& contests) {
  const bool drawn = std::ranges::any_of(asked, [](const auto& one) { return is_drawn(one.second); });
  const std::string cut = e.text.stream_after > 0 ? text("fed token by token after the first ", e.text.stream_after)
                          : e.text.question_after ? "cut before their question comes"
                                                  : "cut with their question in sight";
  std::string out = "\n";
  if (drawn)
    out += text(e.samples, " samples per task", e.text.depths.empty() ? "" : " and depth", ", prompts of ", e.length,
                " tokens ", cut, ". ");
  for (const std::string& task : e.tasks) {
    const std::vector<Asked>& group = asked.at(task);
    if (is_drawn(group)) continue;
    const std::int64_t least = std::ranges::min_element(group, {}, &Asked::tokens)->tokens(), most = longest(group),
                       truncated = std::ranges::count_if(group, &Asked::truncated);
    out += text(task, ": ", group.size(), group.size() == 1 ? " sample" : " samples", " of ", least,
                least == most ? "" : text(" to ", most), " tokens, scored by ", scoring_of(e, group));
    if (truncated > 0) out += text(", the middle of ", truncated, " dropped");
    out += text("; prompts ", cut, ".\n");
  }
  out += "95 %: bootstrap over samples; whole: share of the samples with full score.\n" +
         e.sampling.said(e.repeats > 1 ? text("Means of ", e.repeats, " answers to each sample,") : "Answers are");
  if (e.text.score_tokens) {
    const bool random = std::ranges::any_of(contests, [](const Contest& c) { return c.policy.name() == "random"; });
    out +=
        "\nFed tokens: each token of the reference is predicted after the right ones before it, which gives much of it "
        "away.";
    out += random ? " The rows of `random` are the floor: what a policy gets that chooses by chance.\n"
                  : " Add --policy random to see what choosing by chance gets.\n";
  }
  return out;
}

}  // namespace

bool is_text_task(const std::string& name) { return name.find('/') != std::string::npos; }

void TextOptions::add(CLI::App& app) {
  app.add_option("--question", question_after,
                 "tasks over text: whether the question comes before or after the prompt is cut")
      ->transform(CLI::CheckedTransformer(std::map<std::string, bool>{{"before", false}, {"after", true}}))
      ->transform(one_of({"before", "after"}))
      ->option_text("before|after [before]");
  app.add_option("--score", score_tokens,
                 "tasks over text: text: the model writes, and its answer is scored; tokens: the reference is fed, and "
                 "those of its tokens count that the model would have written, beside what `random` gets")
      ->transform(CLI::CheckedTransformer(std::map<std::string, bool>{{"text", false}, {"tokens", true}}))
      ->transform(one_of({"text", "tokens"}))
      ->option_text("text|tokens [text]");
  as_input(app.add_option("--haystack", haystack,
                          "tasks over text: prose that hides the answer, for tasks that need an essay"))
      ->option_text("FILE");
  as_input(app.add_option("--passages", passages,
                          "repeatable: SQuAD's JSON for ruler/qa-1, HotpotQA's for ruler/qa-2, as published"))
      ->take_all()
      ->option_text("FILE");
  as_input(app.add_option("--samples-in", samples_in,
                          "repeatable: samples of yours, a JSON object a line: prompt, references, scoring, "
                          "max_new_tokens; or RULER's, LongBench's, InfiniteBench's, GSM8K's or MATH's lines"))
      ->take_all()
      ->option_text("FILE");
  as_input(app.add_option("--templates", templates,
                          "--samples-in: prompts by dataset, as LongBench's dataset2prompt.json; without it: our own"))
      ->option_text("FILE");
  app.add_option("--truncate", truncate, "--samples-in: what to do with samples that are too long; without it: refuse")
      ->transform(CLI::CheckedTransformer(std::map<std::string, bool>{{"middle", true}}))
      ->transform(one_of({"middle"}))
      ->option_text("middle");
  app.add_option_function<std::vector<std::string>>(
         "--depth",
         [this](const std::vector<std::string>& lists) {
           depths = integers_of(lists, "--depth", 0, 100);
           for (std::size_t i = 0; i < depths.size(); ++i)
             KVKEEP_REQUIRE(std::ranges::count(depths, depths[i]) == 1, "--depth: ", depths[i],
                            " is given twice; allowed each depth once");
         },
         "tasks that ask for one needle: percent of the text before it; several: --samples at each")
      ->option_text("PERCENT,... [drawn]");
  app.add_option("--answer-tokens", answer_tokens,
                 "tasks over text: most tokens of an answer, where its task allows more; a model that does not stop by "
                 "itself then takes less time")
      ->check(CLI::Range(1, 65536))
      ->option_text("N");
  app.add_option("--stream-after", stream_after,
                 "tasks over text: the first N tokens come at once; the rest, the question too, token by token with "
                 "events on the way, as in a long decode")
      ->check(CLI::Range(1, 1 << 22))
      ->option_text("N");
  app.add_flag("--raw", raw, "tasks over text: do not use the model's chat template");
  as_output(app.add_option(
                "--samples-out", samples_out,
                "tasks over text: write each sample as a line that --samples-in reads, with its token ids and every "
                "policy's answer"))
      ->option_text("FILE");
}

void evaluate_text(const TextEvaluation& given) {
  TextEvaluation e = given;
  KVKEEP_REQUIRE(!e.text.samples_in.empty() || (e.text.templates.empty() && !e.text.truncate),
                 "eval: --templates and --truncate are for samples of files; allowed with --samples-in");
  const std::vector<std::string> policies{"full", "streaming", "tova", "tova,rest=fold", "ams-tova", "snapkv"};
  const auto made = [&](const ContestOptions& options) {
    std::vector<Contest> all = contests(options, policies, {static_cast<std::int32_t>(e.length / 4)});
    for (const Contest& contest : all) static_cast<void>(make_untold(contest.policy));
    return all;
  };
  KVKEEP_REQUIRE(e.text.stream_after == 0 || !e.text.question_after,
                 "eval: --stream-after feeds the question behind the text; allowed without --question after");
  static_cast<void>(made(e.contests));  // a wrong one is refused before samples are drawn
  const lm::TextModel model = lm::TextModel::open(e.model.folder);
  const Layout layout(model, e.text.raw, e.text.answer_tokens);
  Groups asked = draw_samples(e, layout);
  read_samples(e, layout, asked);
  if (e.text.stream_after > 0)
    for (auto& [task, group] : asked)
      for (Asked& one : group) one.stream(e.text.stream_after);
  if (!e.length_given && given.tasks.empty())  // of --budgets' default
    for (const auto& [task, group] : asked) e.length = std::max(e.length, longest(group));
  const std::vector<Contest> all = made(with_random(e, policies, made(e.contests)));
  lm::Decoder decoder = e.model.open();
  warn(all, e.output.quiet);
  std::int64_t samples = 0;
  const auto repeats = static_cast<std::size_t>(e.repeats);
  std::vector<Answered> answered(all.size());
  for (const auto& [task, group] : asked) {
    samples += static_cast<std::int64_t>(group.size());
    for (Answered& one : answered)
      one.writings[task].resize(repeats * group.size()), one.by_task[task].resize(group.size());
  }
  Progress progress(static_cast<std::int64_t>(all.size()) * samples * e.repeats, e.output.quiet);
  std::map<std::string, std::vector<Diagnosed>> diagnosed;
  for (std::size_t repeat = 0; repeat < repeats; ++repeat) {
    for (auto& [task, group] : asked)
      for (std::size_t i = 0; i < group.size(); ++i) group[i].sampling = e.sampling.of(repeat * group.size() + i);
    for (const Batch& batch : batches_of(e, asked))
      answer(decoder, model, e, all, batch, repeat, progress, answered, diagnosed[*batch.front().task]);
  }
  if (e.text.score_tokens)
    for (auto& [task, those] : diagnosed)
      for (Diagnosed& one : those) one.gaps.repetition = "the reference was fed, so nothing was written";
  progress.clear();
  for (std::size_t c = 0; c < all.size(); ++c)
    note_events(all[c], answered[c].cost.counts, answered[c].cost.reads, "samples", e.output.quiet);
  if (!e.text.samples_out.empty())
    io::write_text_atomically(e.text.samples_out, sample_lines(e, asked, all, answered, model.tokenizer.end_tokens()));
  if (e.output.format != Format::md) {
    print(long_table(e, asked, all, answered, diagnosed).text(e.output.format));
    return;
  }
  std::string out = wide_table(e, all, answered).markdown() + notes(e, asked, all);
  out += differences(e.contests, all, e.tasks, [&](std::size_t c, std::size_t against, const std::string& task) {
    return difference(answered[c].strata(task), answered[against].strata(task));
  });
  out += hopeless(e, asked, all, answered);
  if (e.diagnostics) {
    std::vector<Diagnosed> together = diagnosed.at(e.tasks.front());
    for (std::size_t t = 1; t < e.tasks.size(); ++t)
      for (std::size_t c = 0; c < all.size(); ++c) together[c].result.add(diagnosed.at(e.tasks[t])[c].result);
    out += "\nDiagnostics, all tasks:\n\n" + diagnostics_section(e.contests, all, together);
  }
  print(out);
}

}  // namespace kvkeep::cli
