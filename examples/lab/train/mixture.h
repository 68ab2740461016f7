// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What the model is trained on: stages of growing length, each a random mixture of the tasks.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvlab/tasks.h"

namespace train {

/// `steps` steps of `batch` samples of `length` tokens.
struct Stage {
  int32_t length, batch;
  int64_t steps;
};

/// "length:batch:steps,..." Throws kvkeep::InvalidArgument.
std::vector<Stage> parse_schedule(const std::string& text);

int64_t total_steps(const std::vector<Stage>& schedule);
int64_t total_tokens(const std::vector<Stage>& schedule);

/// The stage that step `step` (counted from 0) belongs to.
const Stage& stage_of(const std::vector<Stage>& schedule, int64_t step);

struct TrainingSample {
  std::string_view task;
  kvkeep::lm::TaskSample sample;
};

/// The batch of one step: a pure function of its arguments, so training resumes anywhere with the same data.
std::vector<TrainingSample> training_batch(uint64_t seed, int64_t step, const Stage& stage);

}  // namespace train
