// SPDX-License-Identifier: Apache-2.0
#include "kvlab/samples.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <initializer_list>

#include "kvkeep/core/error.h"
#include "sample_line.h"
#include "utf8.h"

namespace kvkeep::lm {
namespace {

constexpr std::size_t kLongestLine = std::size_t{16} << 20;

constexpr std::array<SampleFormInfo, 7> kForms{{
    {SampleForm::own, "kvkeep", "prompt, messages or turns; references, scoring, max_new_tokens"},
    {SampleForm::ruler, "RULER, prepared", "input, outputs"},
    {SampleForm::ruler_parts, "RULER, in parts", "context, question, answer_prefix, answer, task, max_new_tokens"},
    {SampleForm::longbench, "LongBench", "input, context, answers, dataset"},
    {SampleForm::infinitebench, "InfiniteBench", "input, context, answer"},
    {SampleForm::gsm8k, "GSM8K", "question, answer"},
    {SampleForm::math, "MATH", "problem, solution"},
}};

/// The keys that decide.
std::optional<SampleForm> form_of(const SampleLine& line) {
  const auto all = [&](std::initializer_list<const char*> keys) {
    return std::ranges::all_of(keys, [&](const char* key) { return line.fields().contains(key); });
  };
  if (all({"prompt"}) || all({"messages"}) || all({"turns"})) return SampleForm::own;
  if (all({"input", "outputs"})) return SampleForm::ruler;
  if (all({"context", "question", "answer_prefix"})) return SampleForm::ruler_parts;
  if (all({"context", "input", "answers"})) return SampleForm::longbench;
  if (all({"context", "input", "answer"})) return SampleForm::infinitebench;
  if (all({"problem", "solution"})) return SampleForm::math;
  if (all({"question", "answer"}) && !all({"context"})) return SampleForm::gsm8k;
  return std::nullopt;
}

std::string known_forms() {
  std::string all;
  for (const SampleFormInfo& one : kForms) (all += all.empty() ? "" : "; ") += text(one.name, " (", one.keys, ")");
  return all;
}

// The first twelve are read; the others --samples-out writes beside them.
constexpr std::array<std::string_view, 19> kOwnKeys{
    "prompt",        "messages",    "turns",    "references", "scoring", "max_new_tokens", "choices",
    "answer_prefix", "first_line",  "raw",      "task",       "id",      "seed",           "length",
    "depth",         "cache_dtype", "question", "end_tokens", "answers"};

std::string keys_of(const SampleLine& line) {
  std::string all;
  for (const auto& [key, value] : line.fields().items()) (all += all.empty() ? "" : ", ") += key;
  return all.empty() ? "none" : shortened(all);
}

void read_messages(const SampleLine& line, Sample& sample) {
  const nlohmann::json& messages = line.fields().at("messages");
  constexpr std::string_view kAllowed =
      "; allowed [{\"role\": \"system\", \"user\" or \"assistant\", \"content\": text}]";
  line.require(messages.is_array() && !messages.empty(), "messages is no list of messages; given ", io::shown(messages),
               kAllowed);
  for (const nlohmann::json& one : messages) {
    const bool whole = one.is_object() && one.size() == 2 && one.contains("role") && one["role"].is_string() &&
                       one.contains("content") && one["content"].is_string();
    line.require(whole, "messages has one that is no message; given ", io::shown(one), kAllowed);
    const std::string role = one["role"];
    line.require(role == "system" || role == "user" || role == "assistant",
                 "messages has a role that is not known; given '", shortened(role), "'", kAllowed);
    sample.before.push_back({role, one["content"]});
  }
  const ChatMessage last = std::move(sample.before.back());
  sample.before.pop_back();
  line.require(last.role == "user", "messages does not end with the user; given '", last.role,
               "' in the last one; allowed user");
  line.require(!last.content.empty(), "the last message is empty; given \"\"; allowed text");
  // A message by itself is a prompt; after others, it is what comes after the cut.
  (sample.before.empty() ? sample.text.context : sample.text.question) = last.content;
}

void read_turns(const SampleLine& line, Sample& sample) {
  const nlohmann::json& turns = line.fields().at("turns");
  line.require(turns.is_array() && !turns.empty() &&
                   std::ranges::all_of(turns, [](const nlohmann::json& one) { return one.is_string(); }),
               "turns is no list of strings; given ", io::shown(turns), "; allowed one string or more");
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const bool asks = i + 1 == turns.size() && i > 0;
    (asks ? sample.text.question : sample.text.context) += turns[i].get_ref<const std::string&>();
  }
  line.require(!sample.text.context.empty(), "what stands before the last turn is empty; given ", io::shown(turns),
               "; allowed text");
}

Sample own_sample(const SampleLine& line, const std::string& name) {
  for (const auto& [key, value] : line.fields().items())
    line.require(std::ranges::find(kOwnKeys, key) != kOwnKeys.end(), "no key has this name; given \"", shortened(key),
                 "\"", did_you_mean(key, kOwnKeys), "; allowed ", joined(std::span(kOwnKeys).first(12)));
  Sample sample;
  const bool messages = line.has("messages"), turns = line.has("turns");
  // --samples-out writes the ids of a prompt beside its text.
  const bool prompt = line.has("prompt") && !((messages || turns) && line.fields().at("prompt").is_array());
  line.require(messages + turns + prompt == 1, "there must be one prompt; given ", messages + turns + prompt,
               " of prompt, messages and turns; allowed one of them");
  if (messages) read_messages(line, sample);
  if (turns) read_turns(line, sample);
  if (prompt) sample.text.context = line.string("prompt");
  sample.text.answers = line.strings("references");
  const std::string scoring = line.string("scoring");
  const auto known = std::ranges::find(text_scorings(), scoring, &TextScoringInfo::name);
  line.require(known != text_scorings().end(), "no scoring has this name; given \"", shortened(scoring), "\"",
               did_you_mean(scoring, text_scorings(), &TextScoringInfo::name), "; allowed ",
               joined(text_scorings(), &TextScoringInfo::name));
  sample.text.scoring = known->scoring;
  if (line.has("choices")) sample.text.choices = line.strings("choices");
  sample.text.answer_prefix = line.string_or("answer_prefix", "");
  sample.text.first_line = line.truth("first_line");
  sample.text.answer_tokens = line.new_tokens();
  sample.raw = line.truth("raw");
  line.require(!sample.raw || !messages,
               "raw samples have no chat template to render messages; given raw and messages; "
               "allowed prompt or turns");
  sample.task = line.has("task") ? line.string("task") : name;
  if (line.has("id")) sample.id = line.word("id");
  return sample;
}

/// The task of a file: its name without extension; RULER names the folder by the task.
std::string name_of_file(const std::filesystem::path& file, SampleForm form) {
  const std::string stem = file.stem().string(), folder = file.parent_path().filename().string();
  const bool part = stem == "validation" || stem == "test";
  return form == SampleForm::ruler && part && !folder.empty() ? folder : stem;
}

}  // namespace

std::span<const SampleFormInfo> sample_forms() { return kForms; }

PromptTemplates read_templates(std::string_view json, const std::string& where) {
  const nlohmann::json parsed = io::read_json(json, text("read templates: ", where), io::RepeatedNames::refused);
  const auto bad = [&](const nlohmann::json& value) { return !value.is_string(); };
  KVKEEP_REQUIRE(parsed.is_object() && std::ranges::none_of(parsed, bad), "read templates: ", where,
                 " is no object of strings; given ", io::shown(parsed),
                 "; allowed {\"dataset\": \"... {context} ...\"}");
  return parsed.get<PromptTemplates>();
}

SampleFile read_samples(std::string_view content, const std::string& where, const PromptTemplates& templates) {
  SampleFile file;
  std::string name;
  std::int64_t number = 0, first = 0;
  for (std::string_view rest = content; !rest.empty();) {
    const std::string_view written = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), written.size() + 1));
    const std::string place = text("read samples: ", where, ", line ", ++number);
    KVKEEP_REQUIRE(written.size() <= kLongestLine, place, ": the line is too long; given ", written.size(),
                   " bytes; allowed ", kLongestLine);
    if (written.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    KVKEEP_REQUIRE(detail::is_utf8(written), place, ": the line is not UTF-8; given other bytes; allowed UTF-8");
    nlohmann::json fields = io::read_json(written, place, io::RepeatedNames::refused);
    const SampleLine line(std::move(fields), place);
    line.require(line.fields().is_object(), "the line is no object; given ", io::shown(line.fields()),
                 "; allowed {\"key\": value, ...}");
    const std::optional<SampleForm> form = form_of(line);
    line.require(form.has_value(), "its keys are those of no form; given ", keys_of(line), "; allowed ", known_forms());
    if (first == 0) file.form = *form, first = number, name = name_of_file(where, *form);
    line.require(*form == file.form, "the form changes; given ", kForms[static_cast<std::size_t>(*form)].name,
                 "; allowed that of line ", first, ", ", kForms[static_cast<std::size_t>(file.form)].name);
    Sample& sample = file.samples.emplace_back(
        *form == SampleForm::own ? own_sample(line, name) : published_sample(*form, line, name, templates));
    sample.line = number;
    const auto problem = text_scoring_problem(sample.text.scoring, sample.text.answers, sample.text.choices);
    line.require(!problem, problem.value_or(""));
  }
  KVKEEP_REQUIRE(!file.samples.empty(), "read samples: ", where, " has no samples; given ", content.size(),
                 " bytes; allowed one line or more");
  return file;
}

std::string to_json(const Sample& sample) {
  nlohmann::ordered_json line{{"task", sample.task}};
  if (!sample.id.empty()) line["id"] = sample.id;
  const TextSample& t = sample.text;
  if (sample.before.empty()) {
    line["turns"] = t.question.empty() ? std::vector{t.context} : std::vector{t.context, t.question};
  } else {
    for (const ChatMessage& one : sample.before)
      line["messages"].push_back({{"role", one.role}, {"content", one.content}});
    line["messages"].push_back({{"role", "user"}, {"content", t.context + t.question}});
  }
  if (!t.answer_prefix.empty()) line["answer_prefix"] = t.answer_prefix;
  line["references"] = t.answers;
  line["scoring"] = name_of(t.scoring);
  if (!t.choices.empty()) line["choices"] = t.choices;
  if (t.first_line) line["first_line"] = true;
  if (sample.raw) line["raw"] = true;
  line["max_new_tokens"] = t.answer_tokens;
  return io::written(line);
}

}  // namespace kvkeep::lm
