#pragma once
/// The program `kvkeep` without its main(): what a project that adds sub-commands of its own links (kvkeep::command).

#include <CLI/App.hpp>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvkeep/io/safetensors.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/trace/event_trace.h"

namespace kvkeep::cli {

/// A sub-command that was chosen.
using Run = std::function<void()>;

/// A row of `kvkeep doctor`.
struct Finding {
  std::string what, value;
  bool fine = true;
};

/// Most threads that --threads takes.
inline constexpr int kMostThreads = 4096;

/// What the program consists of. This one runs no model and needs no LibTorch.
class Program {
 public:
  Program() = default;
  virtual ~Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  /// Adds every sub-command, in the order of the help, and returns what runs each. Those that this program lacks are in
  /// no group of the help, and refuse to run.
  [[nodiscard]] virtual std::vector<Run> add_commands(CLI::App& app) const;

  /// What the main help ends with.
  [[nodiscard]] virtual std::string examples() const;

  /// Called once the command is known, before it runs. May restart the program.
  virtual void prepare(const CLI::App& /*command*/, char** /*argv*/) const {}

  /// Threads of the CPU kernels; 0 leaves the choice. Throws Unsupported for more than this program can run on.
  virtual void set_threads(int threads) const;

  /// Replays a trace of another kind than event and prefill. `folder`: where the trace lies. Throws Unsupported here.
  [[nodiscard]] virtual trace::Result replay(const std::string& kind, const io::SafetensorsFile& file,
                                             const std::filesystem::path& folder,
                                             std::unique_ptr<KVPolicy> policy) const;

  /// Rows of `kvkeep doctor` about how this program was built, and what it runs on.
  [[nodiscard]] virtual std::vector<Finding> findings() const;

  /// One sentence about what ended the command.
  [[nodiscard]] virtual std::string reason(const std::exception& error) const { return error.what(); }
};

/// The library's own sub-commands. Each adds itself to the command line and returns what runs it.
Run add_replay(CLI::App& app, const Program& program);
Run add_plan(CLI::App& app);
Run add_policies(CLI::App& app);
Run add_doctor(CLI::App& app, const Program& program);

/// main(): parses the command line, runs the sub-command, reports errors on stderr. Returns the exit status.
int run(const Program& program, int argc, char** argv);

}  // namespace kvkeep::cli
