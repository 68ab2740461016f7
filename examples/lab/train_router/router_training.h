// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The training loop of router and gates.

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "lesson.h"
#include "mixture.h"
#include "router_parameters.h"

namespace train {

struct RouterTrainingOptions {
  std::vector<Stage> schedule;
  LessonOptions lesson;
  kvkeep::TrainingOptions losses;  ///< budget_weight as it is in the second half; it grows from 0 in the first
  uint64_t seed = 1;
  double learning_rate = 1e-2;
  double weight_decay = 0.01;     ///< of matrices
  double warmup = 0.1;            ///< share of the steps
  std::string checkpoint;         ///< path of the checkpoint file
  int64_t checkpoint_every = 50;  ///< steps
  int64_t log_every = 10;         ///< steps
  int64_t check_every = 50;       ///< steps between two checks on held-out samples; 0: never
  int32_t held_out = 16;          ///< samples
  int64_t patience = 0;           ///< checks without a better loss after which it stops; 0: never
  double price =
      0.004;  ///< of an opened span, in attention, when thresholds are set at the end; 0: they stay as trained
  int64_t stop_after = 0;  ///< steps of this run, after which it stops as Ctrl-C would; 0: never
  int threads = 2;
  bool resume = false;

  /// The options that are not allowed, one sentence each with the name of the flag.
  std::vector<std::string> problems() const;
  /// All that a result depends on, except the seed.
  std::string settings() const;
};

/// Rises over the warm-up, then falls to 0 as a cosine.
double router_learning_rate_at(int64_t step, int64_t steps, const RouterTrainingOptions& options);

/// Of the samples that training does not see, at the longest length of the schedule.
std::vector<Lesson> held_out_lessons(const Llama& model, const RouterTrainingOptions& options, int32_t count);

/// Trains to the end of the schedule, or until the held-out loss stops improving; `parameters` are then the best that
/// were seen (with check_every 0: the last). False if Ctrl-C or stop_after stopped it (the checkpoint is then written,
/// and --resume continues to the same bits).
bool train_router(const Llama& model, RouterParameters& parameters, const RouterTrainingOptions& options);

}  // namespace train
