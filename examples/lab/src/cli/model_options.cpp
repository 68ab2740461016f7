// SPDX-License-Identifier: Apache-2.0
#include "model_options.h"

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>

#include "commands.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvlab/memory_left.h"
#include "kvlab/text_tasks.h"

namespace kvkeep::cli {

void add_model(CLI::App& app, std::string& folder, const std::string& what) {
  as_input(app.add_option("--model", folder, what), io::Source::file_or_folder)->required()->option_text("FILE|DIR");
  app.footer([] { return std::string(kModelsAtHand); });  // stands before the footer that is a text
}

void ModelOptions::add(CLI::App& app) {
  add_model(app, folder,
            "a Llama, Qwen2, Qwen3, SmolLM3 or Gemma 3 model: a GGUF file, or a folder with config.json and "
            "*.safetensors");
  app.add_option("--threads", threads, "CPU threads; 0: one for a model below 8 MiB, else LibTorch's default")
      ->check(CLI::Range(0, kMostThreads))
      ->option_text("N [0]");
  app.add_option("--weights", weights, "data type that weights are widened or rounded to when they are read")
      ->check(one_of({"f32", "f16", "bf16"}))
      ->option_text("f32|f16|bf16 [as stored; f32 if quantised]");
  app.add_option(
         "--cache-dtype", cache_dtype,
         "data type of the KV cache; i8 has a scale for each slot and head, q8_0 and q4_0 are llama.cpp's blocks "
         "of 32 numbers")
      ->check(one_of({"f32", "f16", "bf16", "i8", "q8_0", "q4_0"}))
      ->option_text("f32|f16|bf16|i8|q8_0|q4_0 [f32]");
}

Dtype dtype_called(const std::string& name) {
  for (const Dtype dtype : {Dtype::f16, Dtype::bf16, Dtype::i8, Dtype::q8_0, Dtype::q4_0})
    if (name == name_of(dtype)) return dtype;
  return Dtype::f32;
}

lm::Decoder ModelOptions::open() const {
  const std::shared_ptr<Machine> accelerator =
      device.accelerator();  // a wrong one is refused before the weights are read
  set_threads(threads);
  lm::Decoder decoder =
      lm::Decoder::open(folder, weights.empty() ? std::nullopt : std::optional(dtype_called(weights)));
  // A step of a model that fits in a core's cache is over before a second thread wakes up.
  constexpr std::int64_t kSmall = std::int64_t{8} << 20;
  if (threads == 0 && decoder.bytes_per_step() < kSmall) set_threads(1);
  if (accelerator != nullptr) decoder.to(accelerator->device());
  return decoder;
}

void require_memory_of_samples(std::size_t tasks, std::int64_t samples, std::int64_t length) {
  constexpr double kBytes = 16;  // of a token: its id, what is asked, and text
  lm::require_memory("eval", text(samples, samples == 1 ? " sample" : " samples", " of each task"),
                     kBytes * static_cast<double>(tasks) * static_cast<double>(samples) *
                         static_cast<double>(std::max<std::int64_t>(length, 1)),
                     "a smaller --samples or --length");
}

std::vector<std::string> small_tasks() {
  std::vector<std::string> names;
  for (const lm::TaskInfo& one : lm::tasks()) names.emplace_back(one.name);
  return names;
}

std::vector<std::string> tasks_over_text() {
  std::vector<std::string> names;
  for (const lm::TextTaskInfo& one : lm::text_tasks()) names.emplace_back(one.name);
  return names;
}

void require_task(const std::string& task, bool over_text) {
  const std::vector<std::string> small = small_tasks(), text = tasks_over_text();
  std::vector<std::string> all = small;
  if (over_text) append(all, text);
  KVKEEP_REQUIRE(std::ranges::find(all, task) != all.end(), "--task: there is no task \"", shortened(task), "\"",
                 did_you_mean(task, all), "; allowed ", joined(small),
                 over_text ? "; over text " + joined(text) : std::string());
}

void refuse_task(const std::string& task, const InvalidArgument& error) {
  const std::string_view what = error.what();
  if (!what.starts_with("make_")) throw error;
  refuse("--task ", task, what.substr(std::min(what.find(": "), what.size())));
}

CLI::Validator not_empty() {
  return CLI::Validator(
      [](const std::string& given) { return given.empty() ? "the text is empty; allowed one token or more" : ""; }, "");
}

Dtype ModelOptions::dtype() const { return dtype_called(cache_dtype); }

std::vector<std::int32_t> parse_ids(const std::string& text, const std::string& where) {
  std::vector<std::int32_t> ids;
  const char *at = text.data(), *end = text.data() + text.size();
  while (true) {
    at = std::find_if(at, end, [](char c) { return std::string_view(", \t\r\n").find(c) == std::string_view::npos; });
    if (at == end) break;
    std::int32_t id = 0;
    const auto [next, error] = std::from_chars(at, end, id);
    const bool whole = next == end || std::string_view(", \t\r\n").find(*next) != std::string_view::npos;
    const char* stop =
        std::find_if(at, end, [](char c) { return std::string_view(", \t\r\n").find(c) != std::string_view::npos; });
    KVKEEP_REQUIRE(error == std::errc() && whole && id >= 0, where, ": '",
                   std::string(at, std::min<std::ptrdiff_t>(stop - at, 40)), "' at place ", ids.size(),
                   " is not a token id; allowed integers from 0, separated by white space or commas");
    ids.push_back(id);
    at = next;
  }
  KVKEEP_REQUIRE(!ids.empty(), where, ": there are no token ids; allowed one or more");
  return ids;
}

std::vector<std::int32_t> read_ids(const std::string& file) {
  return parse_ids(io::read_file(file, "--ids-file"), file);
}

void SamplingOptions::add(CLI::App& app) {
  CLI::Option* temperature = app.add_option("--temperature", sampling.temperature,
                                            "draw tokens from softmax(logits / T); 0: the likeliest one")
                                 ->option_text("T [0]");
  app.add_option("--top-p", sampling.top_p, "draw from the fewest likeliest tokens whose probabilities sum to P")
      ->option_text("P [1]")
      ->needs(temperature);
  app.add_option("--sampling-seed", sampling.seed, "seed of the draws; the same seed draws the same tokens everywhere")
      ->option_text("N [0]")
      ->needs(temperature);
}

std::string SamplingOptions::said(const std::string& what) const {
  if (sampling.greedy()) return "";
  return text(what, " drawn at temperature ", sampling.temperature, ", top-p ", sampling.top_p, ", seed ",
              sampling.seed, ".\n");
}

void TextReading::add(CLI::App& app) {
  CLI::Option* chatting =
      app.add_flag("--chat", chat, "the text is a user's message: put it into the model's chat template");
  app.add_flag("--raw", raw, "the text contains the model's own markup: <|im_start|> is a control token, not text")
      ->excludes(chatting);
  app.add_option("--system", system, "with --chat: the system message [the template's own]")
      ->option_text("TEXT")
      ->needs(chatting);
  app.add_option("--date", date, "with --chat: today, for templates that write it")
      ->option_text("YYYY-MM-DD [2024-07-26]")
      ->needs(chatting);
}

namespace {

std::chrono::year_month_day date_of(std::string_view given) {
  const auto part = [&](std::size_t at, std::size_t digits) {
    unsigned number = 0;
    const char* end = given.data() + at + digits;
    const bool whole = given.size() == 10 && std::from_chars(given.data() + at, end, number).ptr == end;
    KVKEEP_REQUIRE(whole, "--date: '", shortened(given), "' is not a date; allowed YYYY-MM-DD");
    return number;
  };
  const std::chrono::year_month_day date(std::chrono::year(static_cast<int>(part(0, 4))),
                                         std::chrono::month(part(5, 2)), std::chrono::day(part(8, 2)));
  KVKEEP_REQUIRE(given[4] == '-' && given[7] == '-' && date.ok(), "--date: '", given,
                 "' is not in the calendar; allowed YYYY-MM-DD");
  return date;
}

}  // namespace

std::vector<std::int32_t> TextReading::ids(const lm::TextModel& model, const std::string& said) const {
  std::vector<std::int32_t> tokens;
  if (chat) {
    std::vector<lm::ChatMessage> messages{{"user", said}};
    if (!system.empty()) messages.insert(messages.begin(), {"system", system});
    lm::TextModel dated = model;
    if (!date.empty()) dated.context.date = date_of(date);
    tokens = dated.chat(messages);
  } else {
    tokens = model.tokenizer.encode(said, raw ? lm::SpecialTokens::parsed : lm::SpecialTokens::plain);
  }
  KVKEEP_REQUIRE(!tokens.empty(), "prompt: the text is empty; allowed one token or more");
  return tokens;
}

void PromptOptions::add(CLI::App& app) {
  CLI::Option_group* source = app.add_option_group("prompt");
  source->add_option("--prompt", prompt, "text")->check(not_empty())->option_text("TEXT");
  as_input(source->add_option("--prompt-file", prompt_file, "text in a file, taken verbatim"))->option_text("FILE");
  source->add_option("--ids", ids, "token ids")->option_text("1,2,3");
  as_input(source->add_option("--ids-file", ids_file, "token ids in a file, separated by white space or commas"))
      ->option_text("FILE");
  as_names(source->add_option("--task", task, text("one of kvkeep's tasks: ", joined(small_tasks()))), small_tasks())
      ->option_text("NAME");
  source->require_option(1);
  reading.add(app);
  app.add_option("--seed", seed, "seed of the task's sample")->option_text("N [0]");
  app.add_option("--length", shape.length, "tokens of the task's prompt and trace")->option_text("N [512]");
}

PromptOptions::Prompt PromptOptions::read(const std::string& model) const {
  KVKEEP_REQUIRE(is_text() || !(reading.chat || reading.raw), reading.chat ? "--chat" : "--raw",
                 " says how text is read; allowed with --prompt and --prompt-file");
  if (!task.empty()) {
    require_task(task, false);
    lm::TaskSample sample = sample_of(task, [&] { return lm::make_task(task, seed, shape); });
    std::vector<std::int32_t> tokens(sample.ids.begin(), sample.ids.begin() + sample.prompt_length);
    return {.ids = std::move(tokens), .sample = std::move(sample)};
  }
  if (!is_text()) return {.ids = ids_file.empty() ? parse_ids(ids, "--ids") : read_ids(ids_file)};
  const std::string said = prompt_file.empty() ? prompt : io::read_file(prompt_file, "--prompt-file");
  Prompt read{.ids = {}, .text = lm::TextModel::open(model)};
  read.ids = reading.ids(*read.text, said);
  return read;
}

}  // namespace kvkeep::cli
