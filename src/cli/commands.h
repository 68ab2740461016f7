#pragma once
// The sub-commands. Each adds itself to the command line and returns the function to run if it is chosen.

#include <CLI/App.hpp>
#include <functional>

namespace kvkeep::cli {

using Run = std::function<void()>;

Run add_replay(CLI::App& app);
Run add_plan(CLI::App& app);
Run add_policies(CLI::App& app);
Run add_doctor(CLI::App& app);

// Those in src/cli/model.
Run add_generate(CLI::App& app);
Run add_tokens(CLI::App& app);
Run add_eval(CLI::App& app);
Run add_perplexity(CLI::App& app);
Run add_fidelity(CLI::App& app);
Run add_record(CLI::App& app);
Run add_calibrate(CLI::App& app);

}  // namespace kvkeep::cli
