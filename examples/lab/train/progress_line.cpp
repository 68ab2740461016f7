// SPDX-License-Identifier: Apache-2.0
#include "progress_line.h"

#include <cstdio>

#include "kvkeep/core/error.h"
#include "kvkeep/io/run_files.h"

namespace train {
namespace {

std::string minutes(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%d:%02d", static_cast<int>(seconds) / 60, static_cast<int>(seconds) % 60);
  return text;
}

}  // namespace

ProgressLine::ProgressLine(const std::vector<Stage>& schedule, int64_t first_step, double seconds_before)
    : steps_(total_steps(schedule)),
      tokens_(total_tokens(schedule)),
      seconds_before_(seconds_before),
      terminal_(kvkeep::io::moves_cursor(STDERR_FILENO)) {
  for (int64_t step = 0; step < first_step; ++step) advance(stage_of(schedule, step));
  tokens_at_start_ = tokens_done_;
}

void ProgressLine::show(int64_t step, const Stage& stage, const std::string& what) const {
  const double speed = static_cast<double>(tokens_done_ - tokens_at_start_) / elapsed();
  const double left = static_cast<double>(tokens_ - tokens_done_) / speed;
  char numbers[160];
  std::snprintf(numbers, sizeof numbers, " | %.1fM tokens %.1fk/s %s left %s", static_cast<double>(tokens_done_) / 1e6,
                speed / 1e3, minutes(seconds()).c_str(), minutes(left).c_str());
  const std::string text = kvkeep::text("step ", step, "/", steps_, " T ", stage.length, " ", what, numbers);
  if (terminal_) {
    constexpr int kCells = 24;
    const int done = static_cast<int>(kCells * tokens_done_ / tokens_);
    std::fprintf(stderr, "\r\033[K[%s%s] %s", std::string(done, '#').c_str(), std::string(kCells - done, '.').c_str(),
                 text.c_str());
  } else {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
  std::fflush(stderr);
}

void ProgressLine::say(const std::string& what) const {
  std::fprintf(stderr, "%s%s\n", terminal_ ? "\r\033[K" : "", what.c_str());
}

void ProgressLine::finish() const {
  if (terminal_) std::fputc('\n', stderr);
}

}  // namespace train
