// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How far a training run has come.

#include <chrono>
#include <cstdint>
#include <string>

#include "mixture.h"

namespace train {

/// A bar that redraws itself on a terminal, a line at a time elsewhere. On stderr.
class ProgressLine {
 public:
  /// first_step: steps that an earlier run has done, in `seconds_before` seconds.
  ProgressLine(const std::vector<Stage>& schedule, int64_t first_step, double seconds_before);

  void advance(const Stage& stage) { tokens_done_ += int64_t{stage.length} * stage.batch; }

  /// "step 40/300 T 512", then `what`, tokens, speed and time.
  void show(int64_t step, const Stage& stage, const std::string& what) const;

  /// A line that stays.
  void say(const std::string& what) const;

  void finish() const;

  /// Of this run and the earlier one.
  double seconds() const { return seconds_before_ + elapsed(); }

 private:
  double elapsed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

  int64_t steps_, tokens_, tokens_done_ = 0, tokens_at_start_ = 0;
  double seconds_before_;
  bool terminal_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace train
