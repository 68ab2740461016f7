// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The files of one run of a program: nothing is written over what the run reads or writes besides. And its streams.

#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"

namespace kvkeep::io {

/// Every file is declared before any is written; inputs and outputs in any order. Files are compared by what they are:
/// links, hard links, `..` and /dev/fd lead to the same one. Names are those of options, for messages.
class RunFiles {
 public:
  /// An input that need not exist. A folder counts with every file in it. Throws: InvalidArgument if it is an output.
  void reads(std::string_view name, const std::filesystem::path& path);

  /// An output, a file or a new name, also one in a folder that is read. Throws: InvalidArgument if it is an input or
  /// another output.
  void writes(std::string_view name, const std::filesystem::path& path);

  /// What a policy that `name` holds reads (files_of_policy). Throws: as above.
  template <class PolicyFiles>
  void declare(std::string_view name, const PolicyFiles& files) {
    for (const auto& file : files) reads(text(file.option, " of ", name), file.path);
  }

  /// stdout and stderr as outputs, where they lead to regular files; they may share one. One that is empty so far, as
  /// the shell makes it, is new in a folder that is read. Throws: as above.
  void writes_streams();

 private:
  /// Of what exists its inode; else the folder's, and the name in it.
  struct Identity {
    dev_t device = 0;
    ino_t inode = 0;
    std::string name = {};
    bool operator==(const Identity&) const = default;
  };
  struct File {
    std::string name;
    std::filesystem::path path;  ///< empty: a stream
    Identity identity;
    bool fresh = false;  ///< a stream to a file that is empty so far
  };

  [[nodiscard]] static std::pair<bool, Identity> inode(const std::filesystem::path& path);
  [[nodiscard]] static Identity identity(const std::filesystem::path& path);
  [[nodiscard]] static bool is_read(const File& input, const File& output);
  static void require_apart(const File& input, const File& output);
  void add_output(File output);

  std::vector<File> inputs_, outputs_;
};

inline std::pair<bool, RunFiles::Identity> RunFiles::inode(const std::filesystem::path& path) {
  struct stat found{};
  if (::stat(path.c_str(), &found) != 0) return {false, {}};
  return {true, {found.st_dev, found.st_ino}};
}

inline RunFiles::Identity RunFiles::identity(const std::filesystem::path& path) {
  if (const auto [there, own] = inode(path); there) return own;
  std::filesystem::path target = path;
  try {
    target = through_links(path);
  } catch (const InvalidArgument&) {  // a link without an end: whoever opens it says so
  }
  const std::filesystem::path folder = target.parent_path();
  if (auto [there, own] = inode(folder.empty() ? "." : folder); there) {
    own.name = target.filename().string();
    return own;
  }
  std::error_code none;
  return {0, 0, std::filesystem::absolute(target, none).lexically_normal().string()};
}

inline bool RunFiles::is_read(const File& input, const File& output) {
  if (input.identity == output.identity) return true;
  std::error_code none;
  if (!std::filesystem::is_directory(input.path, none) || !output.identity.name.empty() || output.fresh) return false;
  const std::filesystem::path file = std::filesystem::weakly_canonical(output.path, none);
  for (std::filesystem::path above = file; !output.path.empty() && above.has_relative_path();) {
    above = above.parent_path();
    if (inode(above) == std::pair(true, input.identity)) return true;
  }
  for (const auto& entry : std::filesystem::directory_iterator(input.path, none))  // through links, and hard links
    if (inode(entry.path()) == std::pair(true, output.identity)) return true;
  return false;
}

inline void RunFiles::require_apart(const File& input, const File& output) {
  KVKEEP_REQUIRE(!is_read(input, output), output.name, " names '", (output.path.empty() ? input : output).path.string(),
                 "', which ", input.name, " reads; allowed another file");
}

inline void RunFiles::reads(std::string_view name, const std::filesystem::path& path) {
  if (path.empty()) return;
  File input{std::string(name), path, identity(path)};
  for (const File& output : outputs_) require_apart(input, output);
  inputs_.push_back(std::move(input));
}

inline void RunFiles::add_output(File output) {
  for (const File& input : inputs_) require_apart(input, output);
  for (const File& other : outputs_)
    KVKEEP_REQUIRE(other.identity != output.identity || (other.path.empty() && output.path.empty()), other.name,
                   " and ", output.name, " both name '", (output.path.empty() ? other : output).path.string(),
                   "'; allowed two files");
  outputs_.push_back(std::move(output));
}

inline void RunFiles::writes(std::string_view name, const std::filesystem::path& path) {
  if (!path.empty()) add_output({std::string(name), path, identity(path)});
}

inline void RunFiles::writes_streams() {
  for (const auto& [name, descriptor] : {std::pair("stdout", STDOUT_FILENO), std::pair("stderr", STDERR_FILENO)}) {
    struct stat found{};
    if (::fstat(descriptor, &found) == 0 && S_ISREG(found.st_mode))
      add_output({name, {}, {found.st_dev, found.st_ino}, found.st_size == 0});
  }
}

// What a stream of this process leads to.

/// A terminal that moves its cursor when it is told to. One of TERM=dumb, or of no TERM, does not.
[[nodiscard]] inline bool moves_cursor(int stream) {
  const char* const kind = std::getenv("TERM");
  return kind != nullptr && *kind != '\0' && std::string_view(kind) != "dumb" && ::isatty(stream) == 1;
}

/// The same, and whoever sits there has not asked for plain text (NO_COLOR, https://no-color.org).
[[nodiscard]] inline bool shows_colour(int stream) {
  const char* const plain = std::getenv("NO_COLOR");
  return (plain == nullptr || *plain == '\0') && moves_cursor(stream);
}

/// Characters in a line of a terminal; 0: it is none, or does not say.
[[nodiscard]] inline std::size_t terminal_width(int stream) {
  winsize size{};
  return ::isatty(stream) == 1 && ::ioctl(stream, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

// What a program leaves behind when a signal ends it: no unfinished file.
namespace detail {

#ifdef SIGRTMAX
inline constexpr int kMostSignals = 65;
#else
inline constexpr int kMostSignals = NSIG;
#endif
inline std::array<struct sigaction, kMostSignals> handlers_before{};
inline void (*last_act)(int signal) = nullptr;

inline void end(int signal) {
  remove_unfinished_files();
  if (last_act != nullptr) last_act(signal);
  ::sigaction(signal, &handlers_before[static_cast<std::size_t>(signal)], nullptr);
  ::raise(signal);  // comes once this has returned
}

}  // namespace detail

/// True for signals that leave a core file by default: those of crashes, Ctrl-\\ and a limit of CPU time.
[[nodiscard]] inline bool leaves_core(int signal) {
  for (const int one : {SIGQUIT, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP, SIGXCPU, SIGXFSZ})
    if (signal == one) return true;
  return false;
}

/// For main(): from here on every signal that ends a process removes what remove_unfinished_files() removes, calls
/// `last` (which must be async-signal-safe, and need not return) and then ends it as it would have. Signals that are
/// ignored stay so, as under nohup.
inline void leave_no_unfinished_files(void (*last)(int signal) = nullptr) {
  detail::last_act = last;
  for (int signal = 1; signal < detail::kMostSignals; ++signal) {
    bool ends = true;
    for (const int other : {SIGKILL, SIGSTOP, SIGCHLD, SIGCONT, SIGURG, SIGWINCH, SIGTSTP, SIGTTIN, SIGTTOU})
      ends = ends && signal != other;
    struct sigaction before{}, own{};
    if (!ends || ::sigaction(signal, nullptr, &before) != 0) continue;  // some numbers are the C library's own
    if ((before.sa_flags & SA_SIGINFO) == 0 && before.sa_handler == SIG_IGN) continue;
    own.sa_handler = detail::end;
    own.sa_flags = SA_RESTART;
    detail::handlers_before[static_cast<std::size_t>(signal)] = before;
    ::sigaction(signal, &own, nullptr);
  }
}

}  // namespace kvkeep::io
