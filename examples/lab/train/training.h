// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The training loop.

#include <cstdint>
#include <string>
#include <vector>

#include "llama.h"
#include "mixture.h"

namespace train {

struct TrainingOptions {
  std::vector<Stage> schedule;
  uint64_t seed = 1;
  double learning_rate = 3e-3;
  int64_t warmup_steps = 100;
  std::string checkpoint;          ///< path of the checkpoint file
  int64_t checkpoint_every = 200;  ///< steps
  int64_t log_every = 50;          ///< steps
  int threads = 2;
  bool resume = false;
};

/// Warm-up, then constant to half of the steps, then a cosine to 5 %.
double learning_rate_at(int64_t step, int64_t steps, const TrainingOptions& options);

/// Trains `model` to the end of the schedule. False when Ctrl-C stopped it (the checkpoint is then written).
bool train_model(Llama& model, const TrainingOptions& options);

}  // namespace train
