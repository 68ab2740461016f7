// SPDX-License-Identifier: Apache-2.0

#include <CLI/Option.hpp>
#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvkeep/cli/options.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"
#include "shapes.h"

namespace kvkeep::cli {
namespace {

// As the option's type, which no help shows: option_text() replaces it.
constexpr const char *kInput = "READS FILE", *kInputOrFolder = "READS FILE OR FOLDER", *kOutput = "WRITES FILE",
                     *kPolicy = "HOLDS POLICY", *kShape = "HOLDS SHAPE", *kPolicyName = "NAMES POLICY",
                     *kOneOf = "ONE OF ";

void each_option(const CLI::App& app, const std::function<void(const CLI::Option&)>& visit) {
  for (const CLI::Option* option : app.get_options()) visit(*option);
  for (const CLI::App* below : app.get_subcommands([](const CLI::App*) { return true; })) each_option(*below, visit);
}

// What options of one kind were given.
void each_given(const CLI::App& command, const std::string& kind,
                const std::function<void(const std::string& option, const std::string& given)>& visit) {
  each_option(command, [&](const CLI::Option& option) {
    if (option.get_type_name() != kind) return;
    for (const std::string& given : option.results()) visit(option.get_name(), given);
  });
}

void require_writable(const std::string& option, const std::string& file) {
  KVKEEP_REQUIRE(!file.empty(), option, ": the path is empty; allowed a file");
  const std::filesystem::path folder = std::filesystem::path(file).parent_path();
  std::error_code none;
  KVKEEP_REQUIRE(folder.empty() || std::filesystem::is_directory(folder, none), option, ": the folder of '", file,
                 "' does not exist; allowed a file in an existing folder");
  KVKEEP_REQUIRE(!std::filesystem::is_directory(file, none), option, ": '", file, "' is a folder; allowed a file");
  const io::AtomicFile tried(file);  // removed again: whatever would prevent the result shows up now
}

void require_content(const std::string& option, const std::string& file, io::Source source) {
  io::require_readable(file, option, source);
  std::error_code none;
  KVKEEP_REQUIRE(!std::filesystem::is_regular_file(file, none) || std::filesystem::file_size(file, none) > 0, option,
                 ": '", file, "' is empty; allowed a file that is not");
}

// What an item of a policy may become: the name of an option, or behind its = the words that the option takes.
std::vector<std::string> items_begun(const PolicyInfo& policy, const std::string& item) {
  std::vector<std::string> all;
  const std::size_t equals = item.find('=');
  for (const OptionInfo& option : policy.options) {
    if (equals == std::string::npos) {
      all.push_back(option.name + "=");
      continue;
    }
    const std::string name = item.substr(0, equals);
    if (name != option.name && !option.name.ends_with("." + name)) continue;
    const std::vector<std::string> parts = split(option.allowed, ',');  // "keep, cut, only", or "an integer, 1 or more"
    const bool lists = std::ranges::all_of(parts, [](const std::string& p) { return p.find(' ', 1) == p.npos; });
    for (const std::string& part : parts)
      if (lists && parts.size() > 1 && part.find('<') == std::string::npos)
        all.push_back(name + "=" + part.substr(part.starts_with(' ') ? 1 : 0));
  }
  return all;
}

}  // namespace

CLI::Option* as_input(CLI::Option* option, io::Source source) {
  return option->type_name(source == io::Source::file ? kInput : kInputOrFolder);
}
CLI::Option* as_output(CLI::Option* option) { return option->type_name(kOutput); }
CLI::Option* as_policy(CLI::Option* option) { return option->type_name(kPolicy); }
CLI::Option* as_shape(CLI::Option* option) { return option->type_name(kShape); }
CLI::Option* as_policy_name(CLI::Option* option) { return option->type_name(kPolicyName); }
CLI::Option* as_names(CLI::Option* option, const std::vector<std::string>& names) {
  std::string all = kOneOf;
  for (const std::string& name : names) all += (all == kOneOf ? "" : " ") + name;
  return option->type_name(all);
}

std::vector<std::string> values_of(const CLI::Option& option, const std::string& begun) {
  const std::string &kind = option.get_type_name(), &shown = option.get_option_text();
  std::size_t items = begun.find_last_of(",+") + 1;  // after the last comma
  std::vector<std::string> values;
  if (kind == kPolicyName || (kind == kPolicy && (items == 0 || begun[items - 1] == '+'))) {
    for (const PolicyInfo& policy : policies()) values.push_back(policy.name);
  } else if (kind == kPolicy) {
    const std::string policy = begun.substr(begun.rfind('+') + 1);
    for (const PolicyInfo& known : policies())
      if (policy.starts_with(known.name + ",")) append(values, items_begun(known, begun.substr(items)));
  } else if (kind == kShape) {
    values = names_of_shapes();
  } else if (kind.starts_with(kOneOf)) {
    values = split(kind.substr(std::string_view(kOneOf).size()), ' ');
  } else {
    items = 0;
    for (const std::string& word : split(shown.substr(0, shown.find(' ')), '|'))
      if (!word.empty() && std::ranges::none_of(word, [](char c) { return c == ',' || (c >= 'A' && c <= 'Z'); }))
        values.push_back(word);
  }
  for (std::string& value : values) value.insert(0, begun, 0, items);
  return values;
}

void require_marked_files(const CLI::App& app) {
  each_option(app, [](const CLI::Option& option) {
    const std::string &shown = option.get_option_text(), kind = option.get_type_name();
    const bool names_files =
        std::ranges::any_of(std::vector{"FILE", "DIR", "PATH", "TRACE", "POLICY"},
                            [&](const char* word) { return shown.find(word) != std::string::npos; });
    const bool marked =
        kind == kInput || kind == kInputOrFolder || kind == kOutput || kind == kPolicy || kind == kShape;
    if (names_files != marked) throw std::logic_error(option.get_name() + " is not marked with what it does to files");
  });
}

bool writes_files(const CLI::App& command) {
  bool any = false;
  each_option(command, [&](const CLI::Option& option) { any = any || option.get_type_name() == kOutput; });
  return any;
}

void check_files(const CLI::App& command) {
  io::RunFiles& files = run_files();
  for (const char* kind : {kInput, kInputOrFolder})
    each_given(command, kind, [&](const std::string& option, const std::string& file) { files.reads(option, file); });
  each_given(command, kPolicy, [&](const std::string& option, const std::string& given) {
    const PolicyText policy(given);
    if (policy.is_file()) files.reads(option, given);
    files.declare(option, policy.files());
  });
  each_given(command, kShape, [&](const std::string& option, const std::string& given) {
    if (is_shape(given)) return;
    files.reads(option, given);
    require_content(option, given, io::Source::file_or_folder);
  });
  each_given(command, kOutput, [&](const std::string& option, const std::string& file) { files.writes(option, file); });
  files.writes_streams();

  each_given(command, kOutput, require_writable);
  each_given(command, kInput, [](const std::string& option, const std::string& file) {
    require_content(option, file, io::Source::file);
  });
  each_given(command, kInputOrFolder, [](const std::string& option, const std::string& file) {
    require_content(option, file, io::Source::file_or_folder);
  });
}

io::RunFiles& run_files() {
  static io::RunFiles files;
  return files;
}

}  // namespace kvkeep::cli
