#include "eval_text.h"

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <optional>

#include "files.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/lm/generation.h"
#include "kvkeep/lm/text_tasks.h"
#include "oracle.h"
#include "progress.h"
#include "read_file.h"
#include "run_cost.h"
#include "untrusted_json.h"

namespace kvkeep::cli {
namespace {

// A sample as tokens: what is cut, and what comes after the cut.
struct Asked {
  lm::TextSample sample;
  std::vector<std::int32_t> prompt, question;  // the answer's prefix ends the last one that is not empty
  std::vector<std::int32_t> answer = {};       // the reference, if it is fed

  [[nodiscard]] std::vector<std::int32_t> forced() const {
    std::vector<std::int32_t> all = question;
    all.insert(all.end(), answer.begin(), answer.end());
    return all;
  }
  [[nodiscard]] std::int32_t new_tokens() const {
    return static_cast<std::int32_t>(question.size()) +
           (answer.empty() ? sample.answer_tokens : static_cast<std::int32_t>(answer.size()));
  }
};

// What a policy wrote, for --samples-out.
struct Writing {
  std::vector<std::int32_t> tokens;  // up to the first end token
  std::string text;
  double score = 0;
  double cut_seconds = std::nan("");  // of the decision at the prompt's end; NaN if the prompt was narrowed as it ran
};

// What a policy answered.
struct Answered {
  std::map<std::string, std::vector<Writing>> writings;  // [samples]
  std::map<std::string, std::vector<report::Answers>>
      by_task;                                // [samples] references found, of all; or right tokens of the reference
  std::map<std::string, std::int64_t> whole;  // samples in which all was right
  RunCost cost;

  [[nodiscard]] Strata strata(const std::string& task = "") const {
    Strata all;
    for (const auto& [name, samples] : by_task)
      if (task.empty() || name == task) all.push_back(samples);
    return all;
  }
};

// Samples as the tokens of a user's message in the model's markup.
class Layout {
 public:
  Layout(const lm::TextModel& text, bool raw) : text_(text) {
    if (!raw && !text.chat_template.empty()) template_ = text.layout();
  }

  [[nodiscard]] std::int64_t count(std::string_view said) const {
    const std::string whole = rendered(std::string(said));
    return std::ssize(first_ids(whole, whole));
  }

  // Context and question are tokenised separately, so that one may be cut without the other. A mark between them shows
  // where that is in the markup.
  [[nodiscard]] Asked asked(lm::TextSample sample, const TextOptions& options) const {
    Asked made{.sample = std::move(sample), .prompt = {}, .question = {}};
    const std::string mark = "\x01kvkeep\x01";
    const std::string whole = rendered(made.sample.context + mark + made.sample.question);
    const std::size_t at = whole.find(mark);
    KVKEEP_REQUIRE_AS(Unsupported, at != std::string::npos && whole.find(mark, at + 1) == std::string::npos,
                      "chat: the template does not write a user's message once and as it is; allowed --raw");
    made.prompt = first_ids(whole.substr(0, at), whole);
    made.question = next_ids(whole.substr(at + mark.size()) + made.sample.answer_prefix);
    if (options.score_tokens) made.answer = answer(made);
    if (options.question_after) return made;
    made.prompt.insert(made.prompt.end(), made.question.begin(), made.question.end());
    made.question.clear();
    return made;
  }

 private:
  // The tokens of the only reference. A leading blank that is a token of its own moves to the question: it could never
  // be wrong.
  [[nodiscard]] std::vector<std::int32_t> answer(Asked& to) const {
    KVKEEP_REQUIRE(to.sample.answers.size() == 1, "--score tokens: the task has ", to.sample.answers.size(),
                   " references in no set order; allowed tasks with one");
    const bool blank = !to.sample.answer_prefix.ends_with(' ');
    std::vector<std::int32_t> tokens = next_ids((blank ? " " : "") + to.sample.answers.front());
    if (blank && text_.tokenizer.piece(tokens.front()) == " ") {
      to.question.push_back(tokens.front());
      tokens.erase(tokens.begin());
    }
    return tokens;
  }

  [[nodiscard]] std::string rendered(const std::string& said) const {
    const std::vector<lm::ChatMessage> messages{{"user", said}};
    return template_ ? template_->render(messages) : said;
  }

  // The beginning of a prompt, `whole` of which is rendered: a template may write the first token itself.
  [[nodiscard]] std::vector<std::int32_t> first_ids(const std::string& said, std::string_view whole) const {
    const bool add_bos = !template_ || !template_->begins_with_bos(whole);
    return text_.tokenizer.encode(said, lm::SpecialTokens::parsed, add_bos);
  }

  [[nodiscard]] std::vector<std::int32_t> next_ids(const std::string& said) const {
    return text_.tokenizer.encode_continuation(said);
  }

  const lm::TextModel& text_;
  std::optional<lm::ChatTemplate> template_;
};

lm::Request request_of(const Asked& asked) {
  return {.prompt = asked.prompt,
          .new_tokens = asked.new_tokens(),
          .forced = asked.forced(),
          .forced_at_once = true,
          .stop_at_end = true};
}

Writing writing_of(const lm::TextModel& text, const Asked& asked, const std::vector<std::int32_t>& tokens) {
  const std::span<const std::int32_t> written =
      std::span(tokens).subspan(std::min(tokens.size(), asked.question.size()));
  const auto end = std::ranges::find_first_of(written, text.tokenizer.end_tokens());
  Writing writing{.tokens = {written.begin(), end}, .text = {}};
  writing.text = text.tokenizer.decode_continuation(writing.tokens);
  writing.score = asked.sample.score(writing.text);
  return writing;
}

// Tokens of the reference that the model would have written, each after the right ones before it.
report::Answers tokens_foretold(const Asked& asked, const std::vector<std::int32_t>& tokens) {
  report::Answers answers{.right = 0, .asked = static_cast<std::int64_t>(asked.answer.size())};
  for (std::size_t i = 0; i < asked.answer.size(); ++i)
    answers.right += tokens.at(asked.question.size() + i) == asked.answer[i] ? 1 : 0;
  return answers;
}

void add_answer(const lm::TextModel& text, const std::string& task, const Asked& asked, const lm::Completion& done,
                double cut_seconds, Answered& to) {
  const auto references = static_cast<std::int64_t>(asked.sample.answers.size());
  Writing& writing = to.writings[task].emplace_back(writing_of(text, asked, done.tokens));
  writing.cut_seconds = cut_seconds;
  const report::Answers answers =
      asked.answer.empty() ? report::Answers{std::llround(writing.score * static_cast<double>(references)), references}
                           : tokens_foretold(asked, done.tokens);
  if (!asked.answer.empty()) writing.score = share(answers.right, answers.asked);
  to.by_task[task].push_back(answers);
  to.whole[task] += answers.right == answers.asked ? 1 : 0;
  to.cost.add(done);
}

// Runs some samples under every policy. Their prompts run once for all policies but those that narrow them.
void answer(lm::Decoder& decoder, const lm::TextModel& text, const TextEvaluation& e,
            const std::vector<Contest>& contests, const std::string& task, std::span<const Asked> asked,
            Progress& progress, std::vector<Answered>& to) {
  std::int64_t capacity = 0;
  for (const Asked& one : asked)
    capacity = std::max(capacity, static_cast<std::int64_t>(one.prompt.size()) + one.new_tokens());
  const auto places = static_cast<std::int64_t>(asked.size());
  using Clock = std::chrono::steady_clock;
  Clock::time_point deciding;
  const lm::GenerationHooks hooks{.before_decision = [&](const lm::DecisionSight&) { deciding = Clock::now(); }};
  const std::vector<lm::LayerCache> dense = decoder.make_cache(places, capacity, e.model.dtype());
  std::vector<std::unique_ptr<lm::Generator>> generators;
  std::vector<lm::Generator*> sharing;
  std::vector<std::size_t> place(contests.size());  // among those that share
  for (std::size_t c = 0; c < contests.size(); ++c) {
    generators.push_back(
        std::make_unique<lm::Generator>(decoder, contests[c].policy.make_untold(),
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
  progress.label("prompts, " + task);
  for (std::size_t i = 0; !sharing.empty() && i < asked.size(); ++i)
    prompts.push_back(lm::Generator::run_prompt(sharing, request_of(asked[i])));
  for (std::size_t c = 0; c < contests.size(); ++c) {
    progress.label(contests[c].shown() + ", " + task);
    lm::Generator& generator = *generators[c];
    std::vector<SequenceId> ids;
    std::vector<double> cut_seconds(asked.size(), std::nan(""));
    for (std::size_t i = 0; i < asked.size(); ++i) {
      if (contests[c].narrows) {
        ids.push_back(generator.join(request_of(asked[i])));
        static_cast<void>(generator.step());  // alone, so that the time to its first token is its own
      } else {
        ids.push_back(prompts[i].sequences[place[c]]);
        generator.begin(ids.back(), prompts[i]);  // the decision is the last thing it does
        cut_seconds[i] = std::chrono::duration<double>(Clock::now() - deciding).count();
      }
    }
    while (generator.step()) {
    }
    for (std::size_t i = 0; i < asked.size(); ++i)
      add_answer(text, task, asked[i], generator.leave(ids[i]), cut_seconds[i], to[c]);
    const FactorCache* near = generator.keeper().factor_cache();
    to[c].cost.add(generator.pace(), generator.keeper().totals(),
                   near == nullptr ? FactorCache::Totals{} : near->totals());
    generators[c].reset();
    progress.advance(places);
  }
}

double share_of(const Answered& answered, const std::string& task = "") { return report::share(answered.strata(task)); }

// Tasks that the full cache does not solve say nothing about what policies lose.
std::string hopeless(const TextEvaluation& e, const std::vector<Contest>& contests,
                     const std::vector<Answered>& answered) {
  std::string out;
  for (std::size_t c = 0; c < contests.size(); ++c)
    if (contests[c].keeps_all())
      for (const std::string& task : e.tasks)
        if (const double whole = share_of(answered[c], task); whole < 0.5)
          out += text("\n", task, ": the full cache itself answers ", real_cell(100 * whole, 0).shown,
                      " %; below 50 the row says nothing about policies.\n");
  return out;
}

Table wide_table(const TextEvaluation& e, const std::vector<Contest>& contests, const std::vector<Answered>& answered) {
  std::vector<Column> columns = contest_columns(e.contests);
  for (const std::string& task : e.tasks) columns.push_back({task, task + " % (95 %)"});
  if (e.tasks.size() > 1) columns.push_back({"all", "all % (95 %)"});
  append(columns, {{"peak_bytes", "cache peak"},
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
    append(row, {bytes_cell(a.cost.peak_bytes), bytes_cell(a.cost.kept_bytes),
                 real_cell(a.cost.median_first_token_ms(), 0), real_cell(a.cost.tokens_per_second(), 1)});
    append(row, a.cost.counts.cells());
    if (narrowing) append(row, a.cost.narrowing_cells());
    if (folding) append(row, a.cost.folding_cells());
    table.add(std::move(row));
  }
  return table;
}

// One row per policy, budget and task: for programs.
Table long_table(const TextEvaluation& e, const std::vector<Contest>& contests, const std::vector<Answered>& answered) {
  std::vector<Column> columns = contest_columns(e.contests);
  for (const char* key :
       {"task", "length", "question", "samples", "references", "found", "share", "share_low", "share_high", "whole",
        "peak_bytes", "kept_bytes", "first_token_ms", "tokens_per_second", "events", "chosen"})
    columns.push_back({key, key});
  append(columns, RunCost::narrowing_columns());
  append(columns, RunCost::folding_columns());
  for (const char* key : {"against", "difference", "difference_low", "difference_high", "resolved"})
    columns.push_back({key, key});
  Table table(std::move(columns));
  for (std::size_t c = 0; c < contests.size(); ++c)
    for (const std::string& task : e.tasks) {
      const Answered& a = answered[c];
      report::Answers all;
      for (const report::Answers& one : a.by_task.at(task)) all = {all.right + one.right, all.asked + one.asked};
      const report::Interval interval = report::bootstrap(a.strata(task));
      const Difference d =
          contests[c].against ? difference(a.strata(task), answered[*contests[c].against].strata(task)) : Difference{};
      std::vector<Cell> row =
          contest_cells(e.contests, contests[c],
                        {task, e.length, e.text.question_after ? "after" : "before", e.samples, all.asked, all.right,
                         share_cell(share_of(a, task)), share_cell(interval.low), share_cell(interval.high),
                         a.whole.at(task), bytes_cell(a.cost.peak_bytes), bytes_cell(a.cost.kept_bytes),
                         real_cell(a.cost.median_first_token_ms(), 3), real_cell(a.cost.tokens_per_second(), 2)});
      append(row, a.cost.counts.cells());
      append(row, a.cost.narrowing_cells(1));
      append(row, a.cost.folding_cells(3));
      append(row, {contests[c].against ? Cell(contests[*contests[c].against].policy.label()) : Cell(nullptr, "-"),
                   share_cell(d.value), share_cell(d.interval.low), share_cell(d.interval.high), contests[c].resolved});
      table.add(std::move(row));
    }
  return table;
}

// One line per sample: the tokens of the question, and every policy's answer. For programs that ask other systems the
// same.
std::string sample_lines(const TextEvaluation& e, const std::vector<Contest>& contests,
                         const std::map<std::string, std::vector<Asked>>& asked, const std::vector<Answered>& answered,
                         const std::vector<std::int32_t>& end_tokens) {
  std::string lines;
  for (const std::string& task : e.tasks)
    for (std::size_t i = 0; i < asked.at(task).size(); ++i) {
      const Asked& one = asked.at(task)[i];
      nlohmann::ordered_json answers = nlohmann::ordered_json::array();
      for (std::size_t c = 0; c < contests.size(); ++c) {
        const Writing& writing = answered[c].writings.at(task)[i];
        answers.push_back({{"policy", contests[c].policy.label()},
                           {"budget", contests[c].budget.value},
                           {"prompt_kept", contests[c].keeps_prompt},
                           {"tokens", writing.tokens},
                           {"text", writing.text},
                           {"score", writing.score},
                           {"cut_seconds", writing.cut_seconds}});
      }
      const nlohmann::ordered_json line{{"task", task},
                                        {"seed", e.seed + i},
                                        {"prompt", one.prompt},
                                        {"question", one.question},
                                        {"max_new_tokens", one.sample.answer_tokens},
                                        {"end_tokens", end_tokens},
                                        {"references", one.sample.answers},
                                        {"answers", std::move(answers)}};
      lines += io::written(line) + "\n";
    }
  return lines;
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
                 "tasks over text: text: references found in the answer (RULER's score); tokens: the reference is fed, "
                 "and those of its tokens count that the model would have written")
      ->transform(CLI::CheckedTransformer(std::map<std::string, bool>{{"text", false}, {"tokens", true}}))
      ->transform(one_of({"text", "tokens"}))
      ->option_text("text|tokens [text]");
  as_input(app.add_option("--haystack", haystack,
                          "tasks over text: prose that hides the answer, for tasks that need an essay"))
      ->option_text("FILE");
  app.add_flag("--raw", raw, "tasks over text: do not use the model's chat template");
  as_output(
      app.add_option("--samples-out", samples_out,
                     "tasks over text: write each sample as a line of JSON: its token ids, its references, and every "
                     "policy's answer"))
      ->option_text("FILE");
}

void evaluate_text(const TextEvaluation& e) {
  const std::vector<Contest> all = contests(e.contests, {"full", "streaming", "tova", "ams-tova", "snapkv"},
                                            {static_cast<std::int32_t>(e.length / 4)});
  for (const Contest& contest : all) static_cast<void>(contest.policy.make_untold());  // before samples are drawn
  const std::string haystack = e.text.haystack.empty() ? std::string() : io::read_file(e.text.haystack, "--haystack");
  const lm::TextModel model = lm::TextModel::open(e.model.folder);
  const Layout layout(model, e.text.raw);
  const lm::TokenCounter count = [&](std::string_view said) { return layout.count(said); };
  const std::span<const lm::TextTaskInfo> known = lm::text_tasks();
  require_memory_of_samples(e.tasks.size(), e.samples, e.length);
  std::map<std::string, std::vector<Asked>> asked;
  for (const std::string& task : e.tasks) {
    const auto info = std::ranges::find(known, task, &lm::TextTaskInfo::name);
    const bool essay = info != known.end() && info->needs_haystack;
    constexpr std::size_t kApart = 8;  // tokens that tokenising context and question separately may add
    for (std::int32_t i = 0; i < e.samples; ++i) {
      // Samples begin at different words; otherwise each would hide its needle in the same text.
      const std::size_t begin = essay && !haystack.empty() ? haystack.size() * static_cast<std::size_t>(i) /
                                                                 static_cast<std::size_t>(e.samples)
                                                           : 0;
      const std::size_t word = begin == 0 ? 0 : std::min(haystack.find_first_of(" \n", begin), haystack.size() - 1);
      const std::string turned = essay ? haystack.substr(word) + " " + haystack.substr(0, word) : std::string();
      lm::TextSample sample = lm::make_text_task(task, e.seed + static_cast<std::uint64_t>(i), count,
                                                 {.length = e.length, .reserved_tokens = kApart, .haystack = turned});
      asked[task].push_back(layout.asked(std::move(sample), e.text));
    }
  }
  lm::Decoder decoder = e.model.open();
  warn(all, e.output.quiet);
  Progress progress(static_cast<std::int64_t>(all.size() * e.tasks.size()) * e.samples, e.output.quiet);
  std::vector<Answered> answered(all.size());
  for (const std::string& task : e.tasks)
    for (std::size_t i = 0; i < asked[task].size(); i += static_cast<std::size_t>(e.batch))
      answer(decoder, model, e, all, task,
             std::span(asked[task])
                 .subspan(i, std::min<std::size_t>(static_cast<std::size_t>(e.batch), asked[task].size() - i)),
             progress, answered);
  progress.clear();
  for (std::size_t c = 0; c < all.size(); ++c) note_events(all[c], answered[c].cost.counts, "samples", e.output.quiet);
  if (!e.text.samples_out.empty())
    io::write_text_atomically(e.text.samples_out, sample_lines(e, all, asked, answered, model.tokenizer.end_tokens()));
  if (e.output.format != Format::md) {
    print(long_table(e, all, answered).text(e.output.format));
    return;
  }
  std::string out = wide_table(e, all, answered).markdown();
  out += text("\n", e.samples, " samples per task, prompts of ", e.length, " tokens cut ",
              e.text.question_after ? "before their question comes" : "with their question in sight",
              "; 95 %: bootstrap over samples.\n");
  out += differences(e.contests, all, e.tasks,
                     [&](std::size_t c, const std::string& task) { return answered[c].strata(task); });
  print(out + hopeless(e, all, answered));
}

}  // namespace kvkeep::cli
