// SPDX-License-Identifier: Apache-2.0
// Samples as RULER, LongBench, InfiniteBench, GSM8K and MATH publish them.

#include <algorithm>
#include <array>
#include <utility>

#include "kvkeep/core/error.h"
#include "math_answer.h"
#include "sample_line.h"
#include "text_templates.h"

namespace kvkeep::lm {
namespace {

// ---- Prompts. {name} is a string of the line; what follows {context} comes after the cut.

// Our own words, where the data has no question of its own.
constexpr std::string_view kPlain = "{context}\n\n{input}", kSummary = "{context}\n\nSummarise the text above.",
                           kCount =
                               "{context}\n\nHow many of the paragraphs above differ from all others? Answer with "
                               "the number alone.",
                           kRetrieval =
                               "{context}\n\nWhich of the paragraphs above is summarised here? Answer with its "
                               "number alone.\n\n{input}",
                           kOptions = "{context}\n\n{input}\n\n{options}\n\nAnswer with the letter alone.",
                           kWordProblem = "{question}\n\nEnd with the answer as one number.",
                           kExpression = "{problem}\n\nEnd with the answer in \\boxed{{}}.";

/// Fills in a template. Python's str.format, as far as templates of prompts need it.
void fill(std::string_view pattern, const SampleLine& line, TextSample& sample) {
  std::string* part = &sample.context;
  while (!pattern.empty()) {
    const std::size_t mark = std::min(pattern.find_first_of("{}"), pattern.size());
    *part += pattern.substr(0, mark);
    pattern.remove_prefix(mark);
    if (pattern.empty()) break;
    if (pattern.size() > 1 && pattern[0] == pattern[1]) {
      *part += pattern[0];
      pattern.remove_prefix(2);
      continue;
    }
    const std::size_t end = pattern[0] == '{' ? pattern.find('}') : std::string_view::npos;
    line.require(end != std::string_view::npos, "the template has a brace without the other; given '",
                 shortened(std::string(pattern)), "'; allowed {name}, {{ and }}");
    const std::string_view name = pattern.substr(1, end - 1);
    if (name == "options") {
      std::string all;
      for (std::size_t i = 0; i < sample.choices.size(); ++i)
        all += text(i == 0 ? "" : "\n", static_cast<char>('A' + i), ". ", sample.choices[i]);
      *part += all;
    } else {
      *part += line.string(name, true);
    }
    if (name == "context") part = &sample.question;
    pattern.remove_prefix(end + 1);
  }
  line.require(!sample.context.empty(),
               "its prompt is empty; given a template without text; allowed {context} or others");
}

/// The caller's template, or ours if there are none at all.
std::string_view template_of(const SampleLine& line, const PromptTemplates& templates, const std::string& name,
                             std::string_view ours) {
  if (templates.empty()) return ours;
  const auto at = templates.find(name);
  line.require(at != templates.end(), "there is no template for this; given \"", shortened(name),
               "\"; allowed a name that the templates have");
  return at->second;
}

// ---- RULER

/// A family of tasks by the words that its question begins with, which end where a {name} does.
struct RulerFamily {
  std::string_view question;
  std::int32_t answer_tokens;
  TextScoring scoring = TextScoring::all;
};

constexpr std::array<RulerFamily, 6> kRulerFamilies{{{kNiahOneQuestion, 128},
                                                     {kNiahQuestion, 128},
                                                     {kVtQuestion, 30},
                                                     {kCweQuestion, 120},
                                                     {kFweQuestion, 50},
                                                     {kQaQuestion, 32, TextScoring::part}}};

Sample ruler(const SampleLine& line, const std::string& name) {
  const std::string input = line.string("input");
  std::size_t begin = std::string::npos;
  const RulerFamily* family = nullptr;
  for (const RulerFamily& one : kRulerFamilies) {
    const std::size_t at = input.rfind(one.question.substr(0, one.question.find('{')));
    if (at != std::string::npos && (family == nullptr || at > begin)) begin = at, family = &one;
  }
  line.require(family != nullptr, "input asks none of RULER's questions; given '",
               shortened(input.substr(input.size() - std::min<std::size_t>(input.size(), 80))),
               "' at its end; allowed niah, vt, cwe, fwe and qa. Other prompts: prompt, references, scoring, "
               "max_new_tokens");
  Sample sample;
  sample.task = name;
  if (line.has("index")) sample.id = line.word("index");
  sample.text.context = input.substr(0, begin);
  sample.text.question = input.substr(begin);
  line.require(begin > 0, "input is a question alone; given '", shortened(input), "'; allowed a text before it");
  sample.text.answer_prefix = line.string_or("answer_prefix", line.string_or("gen_prefix", ""));
  sample.text.answers = line.strings("outputs");
  sample.text.scoring = family->scoring;
  sample.text.answer_tokens = family->answer_tokens;
  return sample;
}

Sample ruler_parts(const SampleLine& line) {
  Sample sample;
  sample.task = line.string("task");
  sample.text.context = line.string("context");
  sample.text.question = line.string("question");
  sample.text.answer_prefix = line.string("answer_prefix", true);
  sample.text.answers = line.strings("answer");
  sample.text.scoring = sample.task.starts_with("qa") ? TextScoring::part : TextScoring::all;
  sample.text.answer_tokens = line.new_tokens();
  return sample;
}

// ---- LongBench and InfiniteBench

/// How a dataset is asked and judged; without tokens, by a metric that is not here.
struct Dataset {
  std::string_view name;
  TextScoring scoring = TextScoring::f1;
  std::int32_t answer_tokens = 0;
  std::string_view prompt = kPlain;
  bool few_shot = false;  // LongBench: no chat template, and the first line is the answer
  std::string_view lacks = {};
};

constexpr std::string_view kChineseWords = "words of Chinese, which need a dictionary",
                           kEdits = "an edit distance of lines of code";

// config/dataset2maxlen.json and dataset2metric of eval.py.
constexpr std::array<Dataset, 21> kLongBench{{
    {"narrativeqa", TextScoring::f1, 128},
    {"qasper", TextScoring::f1, 128},
    {"multifieldqa_en", TextScoring::f1, 64},
    {"multifieldqa_zh", {}, 0, {}, false, kChineseWords},
    {"hotpotqa", TextScoring::f1, 32},
    {"2wikimqa", TextScoring::f1, 32},
    {"musique", TextScoring::f1, 32},
    {"dureader", {}, 0, {}, false, kChineseWords},
    {"gov_report", TextScoring::rouge_l, 512, kSummary},
    {"qmsum", TextScoring::rouge_l, 512},
    {"multi_news", TextScoring::rouge_l, 512, kSummary},
    {"vcsum", {}, 0, {}, false, kChineseWords},
    {"trec", TextScoring::classes, 64, kPlain, true},
    {"triviaqa", TextScoring::f1, 32, kPlain, true},
    {"samsum", TextScoring::rouge_l, 128, kPlain, true},
    {"lsht", TextScoring::classes, 64, kPlain, true},
    {"passage_count", TextScoring::numbers, 32, kCount},
    {"passage_retrieval_en", TextScoring::numbers, 32, kRetrieval},
    {"passage_retrieval_zh", TextScoring::numbers, 32, kRetrieval},
    {"lcc", {}, 0, {}, false, kEdits},
    {"repobench-p", {}, 0, {}, false, kEdits},
}};

// DATA_NAME_TO_MAX_NEW_TOKENS and compute_scores.py.
constexpr std::array<Dataset, 12> kInfiniteBench{{
    {"passkey", TextScoring::all, 6},
    {"number_string", TextScoring::all, 12},
    {"kv_retrieval", TextScoring::all, 50},
    {"longbook_sum_eng", TextScoring::rouge_l, 1200, kSummary},
    {"longbook_choice_eng", TextScoring::choice, 40, kOptions},
    {"longbook_qa_eng", TextScoring::f1, 40},
    {"longbook_qa_chn", {}, 0, {}, false, "characters of Chinese"},
    {"longdialogue_qa_eng", TextScoring::part, 40},
    {"math_find", TextScoring::number, 3},
    {"math_calc", {}, 0, {}, false, "a list of intermediate results"},
    {"code_run", TextScoring::number, 5},
    {"code_debug", TextScoring::choice, 5, kOptions},
}};

template <class Datasets>
const Dataset& dataset_of(const SampleLine& line, const std::string& name, const Datasets& datasets,
                          std::string_view what) {
  const auto at = std::ranges::find(datasets, name, &Dataset::name);
  line.require(at != datasets.end(), "no dataset of ", what, " has this name; given \"", shortened(name), "\"",
               did_you_mean(name, datasets, &Dataset::name), "; allowed ", joined(datasets, &Dataset::name));
  KVKEEP_REQUIRE_AS(Unsupported, at->answer_tokens > 0, line.where(), ": ", what, " scores ", at->name, " by ",
                    at->lacks, ", which is not here; given ", at->name,
                    "; allowed other datasets, or the same lines "
                    "with prompt, references, scoring and max_new_tokens");
  return *at;
}

void set(Sample& sample, const Dataset& dataset) {
  sample.task = dataset.name;
  sample.text.scoring = dataset.scoring;
  sample.text.answer_tokens = dataset.answer_tokens;
  sample.text.first_line = sample.raw = dataset.few_shot;
}

/// The number in "Paragraph 12".
std::string first_number(std::string_view said) {
  const std::size_t begin = std::min(said.find_first_of("0123456789"), said.size());
  const std::string_view rest = said.substr(begin);
  return std::string(rest.substr(0, rest.find_first_not_of("0123456789")));
}

Sample longbench(const SampleLine& line, const PromptTemplates& templates) {
  std::string name = line.string("dataset");
  if (name.ends_with("_e")) name.resize(name.size() - 2);  // LongBench-E
  const Dataset& dataset = dataset_of(line, name, kLongBench, "LongBench");
  Sample sample;
  set(sample, dataset);
  if (line.has("_id")) sample.id = line.word("_id");
  static_cast<void>(line.string("context"));
  static_cast<void>(line.string("input", true));
  sample.text.answers = line.strings("answers");
  if (dataset.scoring == TextScoring::classes) sample.text.choices = line.strings("all_classes");
  if (dataset.scoring == TextScoring::numbers)
    for (std::string& one : sample.text.answers) one = first_number(one);
  fill(template_of(line, templates, name, dataset.prompt), line, sample.text);
  return sample;
}

Sample infinitebench(const SampleLine& line, const std::string& file, const PromptTemplates& templates) {
  const std::string name = line.has("task") ? line.string("task") : file;
  const Dataset& dataset = dataset_of(line, name, kInfiniteBench, "InfiniteBench");
  Sample sample;
  set(sample, dataset);
  if (line.has("id")) sample.id = line.word("id");
  static_cast<void>(line.string("context"));
  static_cast<void>(line.string("input", true));
  sample.text.answers = line.strings("answer");
  if (dataset.scoring == TextScoring::choice) {
    sample.text.choices = line.strings("options");
    // [option, letter]: one answer, said twice.
    if (sample.text.answers.size() == 2 && sample.text.answers[1].size() == 1) sample.text.answers.resize(1);
  }
  fill(template_of(line, templates, name, dataset.prompt), line, sample.text);
  return sample;
}

// ---- Mathematics

constexpr std::int32_t kWordProblemTokens = 512, kExpressionTokens = 2048;

Sample gsm8k(const SampleLine& line, const std::string& name, const PromptTemplates& templates) {
  const std::string answer = line.string("answer");
  static_cast<void>(line.string("question"));
  const std::size_t mark = answer.rfind("####");
  const std::string number = mark == std::string::npos ? "" : final_answer(std::string_view(answer).substr(mark));
  line.require(!number.empty(), "answer has no number after ####; given '", shortened(answer),
               "'; allowed a solution that ends in \"#### 12\"");
  Sample sample;
  sample.task = name;
  sample.text.answers = {number};
  sample.text.scoring = TextScoring::number;
  sample.text.answer_tokens = kWordProblemTokens;
  fill(template_of(line, templates, "gsm8k", kWordProblem), line, sample.text);
  return sample;
}

Sample math(const SampleLine& line, const std::string& name, const PromptTemplates& templates) {
  static_cast<void>(line.string("problem"));
  const std::string solution = line.string("solution");
  std::string answer = line.has("answer") ? line.word("answer") : std::string();
  if (answer.empty() && solution.find("\\boxed") != std::string::npos) answer = final_answer(solution);
  line.require(!answer.empty(), "solution has no \\boxed{} answer; given '", shortened(solution),
               "'; allowed one, or a field answer");
  Sample sample;
  sample.task = name;
  if (line.has("unique_id")) sample.id = line.word("unique_id");
  sample.text.answers = {answer};
  sample.text.scoring = TextScoring::number;
  sample.text.answer_tokens = kExpressionTokens;
  fill(template_of(line, templates, "math", kExpression), line, sample.text);
  return sample;
}

}  // namespace

Sample published_sample(SampleForm form, const SampleLine& line, const std::string& name,
                        const PromptTemplates& templates) {
  switch (form) {
    case SampleForm::ruler:
      return ruler(line, name);
    case SampleForm::ruler_parts:
      return ruler_parts(line);
    case SampleForm::longbench:
      return longbench(line, templates);
    case SampleForm::infinitebench:
      return infinitebench(line, name, templates);
    case SampleForm::gsm8k:
      return gsm8k(line, name, templates);
    default:
      return math(line, name, templates);
  }
}

}  // namespace kvkeep::lm
