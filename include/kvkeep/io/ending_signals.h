#pragma once
/// What a program leaves behind when a signal ends it: no unfinished file.

#include <unistd.h>

#include <array>
#include <csignal>

#include "kvkeep/io/atomic_file.h"

namespace kvkeep::io {
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
