// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sub-commands that run a model. Each adds itself to the command line and returns the function to run if it is
// chosen.

#include <CLI/App.hpp>

#include "kvkeep/cli/program.h"

namespace kvkeep::cli {

Run add_generate(CLI::App& app);
Run add_chat(CLI::App& app);
Run add_tokens(CLI::App& app);
Run add_eval(CLI::App& app);
Run add_perplexity(CLI::App& app);
Run add_fidelity(CLI::App& app);
Run add_record(CLI::App& app);
Run add_calibrate(CLI::App& app);

// Threads of LibTorch and of our own loops; 0 leaves the choice. More than 16 for each processor are not made: a note
// says so.
void set_threads(int threads);

}  // namespace kvkeep::cli
