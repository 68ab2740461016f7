// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/cli/program.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "kvkeep/core/error.h"
#include "kvkeep/io/run_files.h"

namespace kvkeep::cli {

Progress::Progress(std::int64_t total, bool quiet)
    : total_(total), shown_(total > 0 && !quiet && io::moves_cursor(STDERR_FILENO)) {}

void Progress::label(std::string what) {
  label_ = std::move(what);
  if (shown_) draw();
}

void Progress::advance(std::int64_t done) {
  done_ += done;
  constexpr auto kBetween = std::chrono::milliseconds(100);
  if (!shown_ || Clock::now() - last_ < kBetween) return;
  last_ = Clock::now();
  draw();
}

void Progress::draw() {
  const std::chrono::duration<double> elapsed = Clock::now() - start_;
  const double share = static_cast<double>(done_) / static_cast<double>(total_);
  std::fputs(("\r\033[K" + line(std::min(1.0, share), elapsed.count(), label_)).c_str(), stderr);
  std::fflush(stderr);
  drawn_ = true;
}

std::string Progress::line(double share, double elapsed, const std::string& label) {
  constexpr int kWidth = 30;
  constexpr double kTells = 0.02;  // what came before is mostly the start, not the pace
  const int full = static_cast<int>(share * kWidth);
  const std::string bar =
      std::string(static_cast<std::size_t>(full), '#') + std::string(static_cast<std::size_t>(kWidth - full), '.');
  char percent[16], time[32] = "";
  std::snprintf(percent, sizeof percent, "] %3.0f %%  ", 100 * share);
  if (share >= kTells) {
    const int left = static_cast<int>(elapsed / share - elapsed + 0.5);
    std::snprintf(time, sizeof time, "%d:%02d left  ", left / 60, left % 60);
  }
  return text("[", bar, percent, time, escaped(label));
}

void Progress::clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  drawn_ = false;
}

void note(const std::string& said, bool pale) {
  const std::string line = text(pale ? "\033[2m" : "", "kvkeep: ", escaped(said), pale ? "\033[0m\n" : "\n");
  static_cast<void>(
      !::write(STDERR_FILENO, line.data(), line.size()));  // at once: a signal's line comes before or after
}

}  // namespace kvkeep::cli
