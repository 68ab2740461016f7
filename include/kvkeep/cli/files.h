#pragma once
// The files that options name. Every option whose help says FILE, DIR, PATH, TRACE or POLICY is marked with what it
// does; what a run needs of them is then checked in one place, before it begins.

#include <CLI/App.hpp>

#include "kvkeep/io/read_file.h"
#include "kvkeep/io/run_files.h"

namespace kvkeep::cli {

CLI::Option* as_input(CLI::Option* option, io::Source source = io::Source::file);
CLI::Option* as_output(CLI::Option* option);
CLI::Option* as_policy(CLI::Option* option);

// Throws std::logic_error for an option of `app` and its sub-commands that names files and has no mark.
void require_marked_files(const CLI::App& app);

// Throws InvalidArgument unless inputs are there and can be read, outputs can be written, and no output is an input or
// another output, stdout and stderr included.
void check_files(const CLI::App& command);

// The files of this run, for inputs that other files name.
io::RunFiles& run_files();

}  // namespace kvkeep::cli
