// SPDX-License-Identifier: Apache-2.0
#pragma once
// Options that several sub-commands share, and their values.

#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/cli/program.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/run_files.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/policy/registry.h"

namespace kvkeep::cli {

// Every integer option of `app` and its sub-commands takes plain decimal digits. This refuses forms that CLI11 reads in
// its own way: -1 as 2^64 - 1, 010 as 8, too many digits as the largest number.
void require_decimal_integers(CLI::App& app);

// The parts of a text between every two of these characters; one that is empty counts.
std::vector<std::string> split(const std::string& text, char by);

// The items of a comma-separated list that may be given more than once. Throws InvalidArgument for an empty item;
// `option` names the list.
std::vector<std::string> items_of(const std::vector<std::string>& lists, const char* option);
// The same for integers from `low` to `high`.
std::vector<std::int32_t> integers_of(const std::vector<std::string>& lists, const char* option, std::int32_t low,
                                      std::int32_t high);

// Takes these words only, and offers the nearest of them.
CLI::Validator one_of(std::vector<std::string> words);

// -o, --quiet
struct OutputOptions {
  Format format = Format::md;
  bool quiet = false;
  void add(CLI::App& app);
};

// A policy as it was written: a file, or name,key=value,...
class PolicyText {
 public:
  explicit PolicyText(std::string text);

  // Throws as make_policy and load_policy do.
  [[nodiscard]] std::unique_ptr<KVPolicy> make() const;
  // A copy with other values of some top-level options: numbers or words, written as in name,key=value,...
  [[nodiscard]] PolicyText with(const std::vector<std::pair<std::string, std::string>>& options) const;

  // The registry name, without making the policy.
  [[nodiscard]] std::string name() const;
  // True if a top-level option is written, under this name or an alias.
  [[nodiscard]] bool states(const std::string& option) const;
  // True if the policy has this top-level option.
  [[nodiscard]] bool takes(const std::string& option) const;
  // For tables: as written, without the limit (budget, ratio, bytes) and the interval.
  [[nodiscard]] std::string label() const;
  [[nodiscard]] const std::string& text() const { return text_; }
  // The files that it names, and whether it is one.
  [[nodiscard]] std::vector<PolicyFile> files() const;
  [[nodiscard]] bool is_file() const { return !json_.empty(); }

 private:
  std::string text_;
  std::string json_;  // from a file, possibly changed; empty for name,key=value
  std::string label_;
};

// The text of --policy in every sub-command.
inline constexpr const char* kPolicyHelp = "a JSON file, or name,key=value,... (see kvkeep policies)";

// What a policy may keep, for tables: slots, "ratio=0.5", "bytes=65536"; null if it never cuts.
Cell budget_cell(const KVPolicy& policy);

// Warns of settings that are allowed but probably not intended: a scorer that chooses less than half of its budget.
// Empty if there is nothing to warn of.
std::string warning_about(const KVPolicy& policy);

// The files that options name. Every option whose help says FILE, DIR, PATH, TRACE or POLICY is marked with what it
// does; what a run needs of them is then checked in one place, before it begins.

CLI::Option* as_input(CLI::Option* option, io::Source source = io::Source::file);
CLI::Option* as_output(CLI::Option* option);
CLI::Option* as_policy(CLI::Option* option);
CLI::Option* as_shape(CLI::Option* option);  // a model by name or numbers, or a file or folder that is read

// For shells that complete a value: the option names a policy, or one of these.
CLI::Option* as_policy_name(CLI::Option* option);
CLI::Option* as_names(CLI::Option* option, const std::vector<std::string>& names);

// What a shell may make of `begun`, the value of an option so far: names, the words of its help, such as md|csv|json,
// and the options of a policy after its name. Of a list the items before the last stand before each.
std::vector<std::string> values_of(const CLI::Option& option, const std::string& begun);

// Throws std::logic_error for an option of `app` and its sub-commands that names files and has no mark.
void require_marked_files(const CLI::App& app);

// Throws InvalidArgument unless inputs are there and can be read, outputs can be written, and no output is an input or
// another output, stdout and stderr included.
void check_files(const CLI::App& command);

// Whether `command` has an option that names a file to write.
bool writes_files(const CLI::App& command);

// The files of this run, for inputs that other files name.
io::RunFiles& run_files();

}  // namespace kvkeep::cli
