// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the command says of itself: help, a manual page, and what shells complete.

#include <CLI/App.hpp>
#include <memory>
#include <string>
#include <vector>

#include "kvkeep/cli/program.h"

namespace kvkeep::cli {

// Where output goes, and what the exit status says.
inline constexpr const char* kStreams = "Results go to stdout (-o md|csv|json), everything else to stderr.";
inline constexpr const char* kExitStatus =
    "0 done; 2 the input was refused; 1 any other failure; 130 Ctrl-C; 141 nobody reads stdout any more.";

// The sub-command of this name; null if there is none.
const CLI::App* subcommand(const CLI::App& app, const std::string& name);

// The sub-commands that help shows.
std::vector<std::string> subcommands_of(const CLI::App& app);

// The options of `app` and its groups, as --name.
std::vector<std::string> option_names_of(const CLI::App& app);

// The options of a group, --help apart.
std::vector<const CLI::Option*> choices_of(const CLI::App& group);

// Help in lines that fit into the terminal, and groups as "Model, exactly one:".
std::shared_ptr<CLI::FormatterBase> help_formatter();

// "there is no sub-command 'pln' (did you mean "plan"?); allowed ..."
std::string no_subcommand(const CLI::App& app, const std::string& given);

// Adds `help`, which knows the sub-commands that were added before.
Run add_help(CLI::App& app);

// What may stand for the last of these words, which follow `kvkeep`: one on each line. Nothing where it is a file or a
// number. src/cli/completion.* ask for it.
std::string completions(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace kvkeep::cli
