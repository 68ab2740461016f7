// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/cli/options.h"

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/untrusted_json.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/score/recency.h"

namespace kvkeep::cli {
namespace {

namespace fs = std::filesystem;

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

// Without the blanks behind commas.
std::string unspaced(const std::string& text) {
  std::string all;
  for (const char c : text)
    if (c != ' ' || !all.ends_with(',')) all += c;
  return all;
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

// A policy file, which may be a pipe: read once, however often the run looks at it.
const std::string& policy_file(const std::string& file) {
  static std::map<std::string, std::string> known;
  const auto found = known.find(file);
  return found != known.end() ? found->second : known.emplace(file, io::read_file(file, "policy")).first->second;
}

std::string first_name(const std::string& text) {
  const std::string_view first = prefill_part(text);
  return std::string(first.substr(0, first.find(',')));
}

bool is_name(const std::string& text) {
  const std::string name = first_name(text);
  const std::vector<PolicyInfo> known = policies();
  return std::any_of(known.begin(), known.end(), [&](const PolicyInfo& p) { return p.name == name; });
}

}  // namespace

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

CLI::Validator one_of(std::vector<std::string> words) {
  return CLI::Validator(
      [words = std::move(words)](const std::string& given) {
        return std::ranges::find(words, given) != words.end()
                   ? std::string()
                   : text("'", shortened(given), "' is not known", did_you_mean(given, words), "; allowed ",
                          joined(words));
      },
      "");
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

std::vector<std::int32_t> integers_of(const std::vector<std::string>& lists, const char* option, std::int32_t low,
                                      std::int32_t high) {
  std::vector<std::int32_t> integers;
  for (const std::string& item : items_of(lists, option)) {
    std::int32_t& integer = integers.emplace_back(0);
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), integer);
    KVKEEP_REQUIRE(error == std::errc() && end == item.data() + item.size() && integer >= low && integer <= high,
                   option, ": '", item, "'; allowed integers from ", low, " to ", high);
  }
  return integers;
}

void OutputOptions::add(CLI::App& app) {
  static const std::map<std::string, Format> kFormats{{"md", Format::md}, {"csv", Format::csv}, {"json", Format::json}};
  app.add_option("-o,--output", format, "format of the results on stdout")
      ->transform(CLI::CheckedTransformer(kFormats))
      ->transform(one_of({"md", "csv", "json"}))
      ->option_text("md|csv|json [md]");
  app.add_flag("--quiet", quiet, "no progress, no warnings");
}

PolicyText::PolicyText(std::string text) : text_(std::move(text)) {
  KVKEEP_REQUIRE(!text_.empty(), "policy: the option is empty; allowed a JSON file, or name,key=value,...");
  std::error_code none;  // a text too long for a file name is not a file
  if (is_name(text_) || (!fs::exists(text_, none) && !text_.ends_with(".json"))) {
    text_ = unspaced(text_);
    label_ = without_budget(text_);
    return;
  }
  json_ = policy_file(text_);
  KVKEEP_REQUIRE(!json_.empty(), "policy: '", text_, "' is empty; allowed a JSON object");
  label_ = fs::path(text_).filename().string();
}

std::unique_ptr<KVPolicy> PolicyText::make() const {
  if (json_.empty()) return make_policy(text_);
  try {
    return make_policy_from_json(json_, fs::path(text_).parent_path());
  } catch (const InvalidArgument& error) {
    refuse(text_, ": ", error.what());
  }
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
  const std::vector<PolicyInfo> known = policies();
  const auto own = std::find_if(known.begin(), known.end(), [&](const PolicyInfo& p) { return p.name == name(); });
  return own == known.end() ||
         std::any_of(own->options.begin(), own->options.end(), [&](const OptionInfo& o) { return o.name == option; });
}

std::vector<PolicyFile> PolicyText::files() const {
  return json_.empty() ? files_of_policy(text_) : files_of_policy_json(json_, fs::path(text_).parent_path());
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
  const auto* evict = dynamic_cast<const Evict*>(&policy);
  if (evict == nullptr || evict->scorer().name() == Recency::traits.name) return {};
  const Budget& budget = evict->retention().trigger.budget;
  const Protected guarded = evict->guarded(budget.slots);
  const std::int32_t chosen = budget.slots - guarded.count();
  if (budget.unit != Budget::Unit::slots || guarded.count() <= budget.slots / 2) return {};
  const bool window = guarded.recents > evict->retention().newest(budget.slots);
  return text("warning: ", policy.name(), " chooses ", chosen == 0 ? "none" : text(chosen), " of the ", budget.slots,
              " slots: sink=", guarded.sinks, window ? " and the scorer's newest " : " and recent=", guarded.recents,
              " take the ", chosen == 0 ? "whole budget" : "others");
}

}  // namespace kvkeep::cli
