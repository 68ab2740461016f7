// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The program `kvkeep` without its main(): what a project that adds sub-commands of its own links (kvkeep::command).

#include <CLI/App.hpp>
#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/io/run_files.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/keeper/thread_pool.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/trace/trace.h"

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

  /// Threads of the CPU kernels; 0: one for each processor.
  virtual void set_threads(int threads) const;

  /// Replays a trace of another kind than event and prefill. `folder`: where the trace lies. Throws Unsupported here.
  [[nodiscard]] virtual trace::Result replay(const std::string& kind, const io::SafetensorsFile& file,
                                             const std::filesystem::path& folder,
                                             std::unique_ptr<KVPolicy> policy) const;

  /// Rows of `kvkeep doctor` about how this program was built, and what it runs on.
  [[nodiscard]] virtual std::vector<Finding> findings() const;

  /// One sentence about what ended the command.
  [[nodiscard]] virtual std::string reason(const std::exception& error) const { return said_by(error); }

 private:
  mutable std::optional<ThreadPool> pool_;
  mutable std::optional<UsingThreads> using_;
};

/// The library's own sub-commands. Each adds itself to the command line and returns what runs it.
Run add_replay(CLI::App& app, const Program& program);
Run add_plan(CLI::App& app);
Run add_policies(CLI::App& app);
Run add_doctor(CLI::App& app, const Program& program);

/// Adds --plugin to the program and to each of its sub-commands, and returns what loads the plug-ins that were named.
Run add_plugins(CLI::App& app);

/// main(): parses the command line, runs the sub-command, reports errors on stderr. Returns the exit status.
int run(const Program& program, int argc, char** argv);

// A progress bar with the time left, on a terminal only. Everything here goes to stderr.

class Progress {
 public:
  // Draws nothing when `total` is 0, when stderr is not a terminal, or when quiet.
  Progress(std::int64_t total, bool quiet);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Shows at once what is being done.
  void label(std::string what);
  void advance(std::int64_t done);
  // Removes the bar, so that other lines can be written.
  void clear();

  // The bar at this share of the work, after this many seconds; with the time left once enough is done to tell.
  [[nodiscard]] static std::string line(double share, double elapsed, const std::string& label);

 private:
  using Clock = std::chrono::steady_clock;
  void draw();
  std::int64_t total_, done_ = 0;
  bool shown_ = false, drawn_ = false;
  std::string label_;
  Clock::time_point start_ = Clock::now(), last_ = {};
};

// One line on stderr that begins with "kvkeep: ", escaped. `pale`: less visible, for a terminal.
void note(const std::string& said, bool pale = false);

// Results on stdout: one table as Markdown, CSV or JSON.

enum class Format : std::uint8_t { md, csv, json };

// A value, and its text in Markdown.
struct Cell {
  nlohmann::ordered_json value;
  std::string shown;

  Cell(const char* text) : value(text), shown(text) {}                         // NOLINT(google-explicit-constructor)
  Cell(const std::string& text) : value(text), shown(text) {}                  // NOLINT(google-explicit-constructor)
  Cell(std::int64_t number) : value(number), shown(std::to_string(number)) {}  // NOLINT(google-explicit-constructor)
  Cell(std::int32_t number) : Cell(std::int64_t{number}) {}                    // NOLINT(google-explicit-constructor)
  Cell(nlohmann::ordered_json raw, std::string people) : value(std::move(raw)), shown(std::move(people)) {}
};

Cell bytes_cell(std::int64_t bytes);
Cell real_cell(double number, int digits);
// A share as a percentage.
Cell share_cell(double share);

struct Column {
  std::string key;    // in CSV and JSON
  std::string title;  // in Markdown
  bool number = true;
};

// Columns of words, or of a table that only becomes CSV, under their keys.
std::vector<Column> columns_of(std::initializer_list<const char*> keys);

// More columns of a header, or more cells of a row.
template <class T>
void append(std::vector<T>& to, const std::vector<T>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // Throws std::logic_error unless the row has a cell per column.
  void add(std::vector<Cell> row);
  [[nodiscard]] bool empty() const { return rows_.empty(); }
  // In lines of at most `most` characters if it is enough to break words in all columns but the first; 0: of any
  // length.
  [[nodiscard]] std::string markdown(std::size_t most = io::terminal_width(STDOUT_FILENO)) const;
  [[nodiscard]] std::string csv() const;
  [[nodiscard]] nlohmann::ordered_json json() const;  // an array of objects
  [[nodiscard]] std::string text(Format format) const;

 private:
  [[nodiscard]] std::vector<std::size_t> widths(std::size_t most) const;
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

// The program that read the results has ended, as `head` does: no more are wanted, and this is no failure.
struct NobodyReads : Error {
  NobodyReads() : Error("stdout: nobody reads the result") {}
};

// Writes to stdout, escaped but for line ends and tabs. Throws NobodyReads for a pipe that was closed, and Error if it
// cannot be written otherwise, as on a full disk.
void print(const std::string& text);

// 0-3,17,21-40 of ascending numbers.
std::string compact_ranges(const std::vector<std::int32_t>& ascending);

}  // namespace kvkeep::cli
