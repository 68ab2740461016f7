#include "options.h"

#include <ATen/Parallel.h>

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/policy/registry.h"
#include "oracle.h"
#include "read_file.h"
#include "untrusted_json.h"

namespace kvkeep::cli {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = text.find(by, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

// A top-level option and the other names that policies accept for it.
const std::vector<std::string>& names_of(const std::string& option) {
  static const std::map<std::string, std::vector<std::string>> kNames{
      {"budget", {"budget", "kv_budget", "target_size", "max_cache_size", "max_capacity_prompt"}},
      {"ratio", {"ratio", "compression_ratio"}},
      {"bytes", {"bytes"}},
      {"budget_share", {"budget_share"}},
      {"prefill", {"prefill"}},
      {"protect_prompt", {"protect_prompt"}},
      {"interval", {"interval", "compression_interval", "divide_length", "prune_interval"}},
      {"recent", {"recent", "n_last", "recent_size"}}};
  return kNames.at(option);
}

// Whether an item of name,key=value,... gives this option.
bool gives(const std::string& item, const std::string& option) {
  const std::vector<std::string>& names = names_of(option);
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return item.starts_with(name + "="); });
}

// The items of name,key=value,... without interval and limits. A policy that narrows prompts loses only its own items:
// the policy after its + keeps all of its items.
std::string without_budget(const std::string& text) {
  const std::string_view first = prefill_part(text);
  if (first.size() < text.size()) return without_budget(std::string(first)) + text.substr(first.size());
  std::string kept;
  for (const std::string& item : split(text, ','))
    if (!gives(item, "budget") && !gives(item, "ratio") && !gives(item, "bytes") && !gives(item, "budget_share") &&
        !gives(item, "interval"))
      kept += (kept.empty() ? "" : ",") + item;
  return kept;
}

std::string first_name(const std::string& text) {
  const std::string_view first = prefill_part(text);
  return std::string(first.substr(0, first.find(',')));
}

bool is_name(const std::string& text) {
  const std::string name = first_name(text);
  const std::vector<PolicyInfo> known = policies();
  return name == kOracle ||
         std::any_of(known.begin(), known.end(), [&](const PolicyInfo& p) { return p.name == name; });
}

}  // namespace

void require_decimal_integers(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    const bool is_signed = type.starts_with("INT");
    if (!is_signed && !type.starts_with("UINT")) continue;
    option->check([is_signed](const std::string& given) {
      const std::string_view digits = std::string_view(given).substr(is_signed && given.starts_with('-') ? 1 : 0);
      std::uint64_t value = 0;
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
      const bool whole =
          error == std::errc() && end == digits.data() + digits.size() && (digits == "0" || !digits.starts_with('0'));
      const std::uint64_t most = is_signed ? INT64_MAX : UINT64_MAX;
      return whole && value <= most ? std::string()
                                    : text("'", given, "' is not a whole number; allowed decimal digits",
                                           is_signed ? "" : ", 0 to 18446744073709551615");
    });
  }
  for (CLI::App* below : app.get_subcommands([](const CLI::App*) { return true; })) require_decimal_integers(*below);
}

std::vector<std::string> items_of(const std::vector<std::string>& lists, const char* option) {
  std::vector<std::string> all;
  for (const std::string& list : lists)
    for (std::string& item : split(list, ',')) {
      KVKEEP_REQUIRE(!item.empty(), option, ": an item of '", list,
                     "' is empty; allowed items separated by single commas");
      all.push_back(std::move(item));
    }
  return all;
}

void OutputOptions::add(CLI::App& app) {
  static const std::map<std::string, Format> kFormats{{"md", Format::md}, {"csv", Format::csv}, {"json", Format::json}};
  app.add_option("-o,--output", format, "format of the results on stdout")
      ->transform(CLI::CheckedTransformer(kFormats).description("md|csv|json"))
      ->option_text("md|csv|json [md]");
  app.add_flag("--quiet", quiet, "no progress, no warnings");
}

void ModelOptions::add(CLI::App& app) {
  app.add_option("--model", folder,
                 "a Llama, Qwen2 or Qwen3 model: a GGUF file, or a folder with config.json and *.safetensors")
      ->required()
      ->option_text("FILE|DIR");
  app.add_option("--threads", threads, "CPU threads; 0: one for a model below 8 MiB, else LibTorch's default")
      ->check(CLI::Range(0, 4096))
      ->option_text("N [0]");
  app.add_option("--weights", weights, "data type that weights are widened or rounded to when they are read")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->option_text("f32|f16|bf16 [as stored; f32 if quantised]");
  app.add_option("--cache-dtype", cache_dtype, "data type of the KV cache")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->option_text("f32|f16|bf16 [f32]");
}

void set_threads(int threads) {
  if (threads > 0) at::set_num_threads(threads);
}

Dtype dtype_called(const std::string& name) {
  return name == "f16" ? Dtype::f16 : name == "bf16" ? Dtype::bf16 : Dtype::f32;
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

Dtype ModelOptions::dtype() const { return dtype_called(cache_dtype); }

PolicyText::PolicyText(std::string text) : text_(std::move(text)) {
  KVKEEP_REQUIRE(!text_.empty(), "policy: the option is empty; allowed a JSON file, or name,key=value,...");
  std::error_code none;  // a text too long for a file name is not a file
  if (is_name(text_) || (!fs::exists(text_, none) && !text_.ends_with(".json"))) {
    label_ = without_budget(text_);
    return;
  }
  json_ = io::read_file(text_, "policy");
  label_ = fs::path(text_).filename().string();
}

std::unique_ptr<KVPolicy> PolicyText::make() const {
  if (name() == kOracle) return make_oracle(text_);
  if (json_.empty()) return make_policy(text_);
  try {
    return make_policy_from_json(json_, fs::path(text_).parent_path());
  } catch (const InvalidArgument& error) {
    refuse(text_, ": ", error.what());
  }
}

std::unique_ptr<KVPolicy> PolicyText::make_untold() const {
  KVKEEP_REQUIRE(name() != kOracle,
                 "policy: oracle must be told what a task will need; allowed in eval on the small model's tasks, and "
                 "in generate with --task");
  return make();
}

PolicyText PolicyText::with(const std::vector<std::pair<std::string, std::string>>& options) const {
  PolicyText changed = *this;
  if (json_.empty() && prefill_part(text_).size() < text_.size()) {
    const std::string_view first = prefill_part(text_);
    changed.text_ = PolicyText(std::string(first)).with(options).text_ + text_.substr(first.size());
    return changed;
  }
  if (json_.empty()) {
    const auto replaced = [&](const std::string& item) {
      return std::any_of(options.begin(), options.end(), [&](const auto& o) { return gives(item, o.first); });
    };
    changed.text_.clear();
    for (const std::string& item : split(text_, ','))
      if (!replaced(item)) changed.text_ += (changed.text_.empty() ? "" : ",") + item;
    for (const auto& [key, value] : options) changed.text_ += kvkeep::text(",", key, "=", value);
    return changed;
  }
  nlohmann::json object = io::parse_json(json_, io::RepeatedNames::refused).value;
  KVKEEP_REQUIRE(object.is_object(), "policy: ", text_, " does not hold a JSON object");
  for (const auto& [key, value] : options) {
    for (const std::string& name : names_of(key)) object.erase(name);
    object[key] = nlohmann::json::accept(value) ? nlohmann::json::parse(value) : nlohmann::json(value);
  }
  changed.json_ = io::written(object);
  return changed;
}

std::string PolicyText::name() const {
  if (json_.empty()) return first_name(text_);
  const nlohmann::json object = io::parse_json(json_, io::RepeatedNames::refused).value;
  return object.is_object() && object.contains("policy") && object["policy"].is_string()
             ? object["policy"].get<std::string>()
             : std::string();
}

bool PolicyText::states(const std::string& option) const {
  if (json_.empty()) {
    const std::vector<std::string> items = split(std::string(prefill_part(text_)), ',');
    return std::any_of(items.begin(), items.end(), [&](const std::string& item) { return gives(item, option); });
  }
  const nlohmann::json object = io::parse_json(json_, io::RepeatedNames::refused).value;
  const std::vector<std::string>& names = names_of(option);
  return object.is_object() &&
         std::any_of(names.begin(), names.end(), [&](const std::string& name) { return object.contains(name); });
}

bool PolicyText::takes(const std::string& option) const {
  if (name() == kOracle) return option == "budget" || option == "interval";
  const std::vector<PolicyInfo> known = policies();
  const auto own = std::find_if(known.begin(), known.end(), [&](const PolicyInfo& p) { return p.name == name(); });
  return own == known.end() ||
         std::any_of(own->options.begin(), own->options.end(), [&](const OptionInfo& o) { return o.name == option; });
}

std::string PolicyText::label() const { return label_; }

Cell budget_cell(const KVPolicy& policy) {
  const nlohmann::json options = nlohmann::json::parse(policy.to_json());
  if (policy.trigger().never && !(policy.narrows() && options.contains("budget"))) return {nullptr, "-"};
  for (const char* other : {"ratio", "bytes", "budget_share"})
    if (options.contains(other)) return text(other, "=", options[other].dump());
  if (!options.contains("budget")) return {nullptr, "-"};  // a policy that folds may have no limit
  return options["budget"].get<std::int32_t>();
}

std::string warning_about(const KVPolicy& policy) {
  const nlohmann::json options = nlohmann::json::parse(policy.to_json());
  const std::int64_t sink = options.value("sink", 0), recent = options.value("recent", 0),
                     budget = options.value("budget", 0);
  if (budget == 0 || sink + recent <= budget / 2) return {};
  return text("warning: sink + recent = ", sink + recent, " of ", policy.name(),
              " protect more than half of the budget of ", budget, "; little is left to choose from");
}

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

void TextReading::add(CLI::App& app) {
  CLI::Option* chatting =
      app.add_flag("--chat", chat, "the text is a user's message: put it into the model's chat template");
  app.add_flag("--raw", raw, "the text contains the model's own markup: <|im_start|> is a control token, not text")
      ->excludes(chatting);
  app.add_option("--system", system, "with --chat: the system message [the template's own]")
      ->option_text("TEXT")
      ->needs(chatting);
}

std::vector<std::int32_t> TextReading::ids(const lm::TextModel& model, const std::string& said) const {
  std::vector<std::int32_t> tokens;
  if (chat) {
    std::vector<lm::ChatMessage> messages{{"user", said}};
    if (!system.empty()) messages.insert(messages.begin(), {"system", system});
    tokens = model.chat(messages);
  } else {
    tokens = model.tokenizer.encode(said, raw ? lm::SpecialTokens::parsed : lm::SpecialTokens::plain);
  }
  KVKEEP_REQUIRE(!tokens.empty(), "prompt: the text is empty; allowed one token or more");
  return tokens;
}

void PromptOptions::add(CLI::App& app) {
  CLI::Option_group* source = app.add_option_group("prompt (one of)");
  source->add_option("--prompt", prompt, "text")->option_text("TEXT");
  source->add_option("--prompt-file", prompt_file, "text in a file, taken verbatim")->option_text("FILE");
  source->add_option("--ids", ids, "token ids")->option_text("1,2,3");
  source->add_option("--ids-file", ids_file, "token ids in a file, separated by white space or commas")
      ->option_text("FILE");
  source->add_option("--task", task, "one of kvkeep's tasks: chain, ask, needle, updates, copies")->option_text("NAME");
  source->require_option(1);
  reading.add(app);
  app.add_option("--seed", seed, "seed of the task's sample")->option_text("N [0]");
  app.add_option("--length", shape.length, "tokens of the task's prompt and trace")->option_text("N [512]");
}

PromptOptions::Prompt PromptOptions::read(const std::string& model) const {
  KVKEEP_REQUIRE(is_text() || !(reading.chat || reading.raw), reading.chat ? "--chat" : "--raw",
                 " says how text is read; allowed with --prompt and --prompt-file");
  if (!task.empty()) {
    lm::TaskSample sample = lm::make_task(task, seed, shape);
    std::vector<std::int32_t> tokens(sample.ids.begin(), sample.ids.begin() + sample.prompt_length);
    return {.ids = std::move(tokens), .sample = std::move(sample)};
  }
  if (!is_text()) return {.ids = ids_file.empty() ? parse_ids(ids, "--ids") : read_ids(ids_file)};
  const std::string said = prompt_file.empty() ? prompt : io::read_file(prompt_file, "--prompt-file");
  Prompt read{.ids = {}, .text = lm::TextModel::open(model)};
  read.ids = reading.ids(*read.text, said);
  return read;
}

bool is_same_file(const std::string& one, const std::string& other) {
  std::error_code error;  // names that cannot be looked up are compared as written
  const auto place = [&error](const std::string& name) {
    const fs::path found = fs::weakly_canonical(fs::absolute(io::through_links(name), error), error);
    return error ? fs::path(name).lexically_normal() : found;
  };
  return fs::equivalent(one, other, error) || place(one) == place(other);
}

void require_folder_of(const std::string& file, const char* option) {
  const fs::path folder = fs::path(file).parent_path();
  std::error_code none;
  KVKEEP_REQUIRE(folder.empty() || fs::is_directory(folder, none), option, ": the folder of '", file,
                 "' does not exist; allowed a file in an existing folder");
  KVKEEP_REQUIRE(!fs::is_directory(file, none), option, ": '", file, "' is a folder; allowed a file");
  const io::AtomicFile tried(file);  // removed again: whatever would prevent the result shows up now
}

}  // namespace kvkeep::cli
