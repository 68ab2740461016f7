#pragma once
// What the command needs LibTorch for. A build with LibTorch has src/cli/model. One without has src/cli/without_model,
// which says what is missing.

#include <CLI/App.hpp>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "commands.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/trace/event_trace.h"

namespace kvkeep::cli {

// Every sub-command, in the order of the help. Those that this build lacks are in no group of the help, and refuse to
// run.
std::vector<Run> add_commands(CLI::App& app);

// What the main help ends with: examples, and what this build lacks.
const char* main_examples();

// Called once the command is known, before it runs. May restart the program.
void prepare(const CLI::App& command, char** argv);

// Threads of the CPU kernels; 0 leaves the choice. More than 16 for each processor are not made: a note says so. Throws
// Unsupported for more than this build can run on.
inline constexpr int kMostThreads = 4096;
void set_threads(int threads);

// The kinds of traces that run or train a model: decoder, generate, span_train. Throws Unsupported in a build without.
trace::Result replay_with_model(const std::string& kind, const io::SafetensorsFile& file,
                                const std::filesystem::path& folder, std::unique_ptr<KVPolicy> policy);

// A row of kvkeep doctor.
struct Finding {
  std::string what, value;
  bool fine = true;
};

// LibTorch, the C++ ABI, threads, CUDA.
std::vector<Finding> findings_of_build();

// One sentence about what ended the command.
std::string reason(const std::exception& error);

}  // namespace kvkeep::cli
