// SPDX-License-Identifier: Apache-2.0
#pragma once
// What stayed over time, as JSON for examples/lab/plots/plot_retention.py.

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "kvlab/generation.h"
#include "kvlab/tasks.h"

namespace kvkeep::cli {

struct RetentionAbout {
  std::string model, label, policy_json, task;
  std::uint64_t seed = 0;
  std::int32_t prompt_length = 0;
  bool forced = false;  // the sample's own trace was fed
  std::optional<lm::TaskSample> sample;
};

nlohmann::ordered_json retention_json(const RetentionAbout& about, const ModelSpec& spec, const lm::Completion& done);

// Look-ups of a sample, answered by the predictions of a teacher-forced run.
struct LookUps {
  std::int64_t asked = 0, right = 0;
  std::int64_t late_asked = 0, late_right = 0;  // in the last third of the trace

  void add(const LookUps& other);
};
LookUps count_look_ups(const lm::TaskSample& sample, const std::vector<std::int32_t>& predicted);

// The request that feeds a sample's own trace. Its last token is predicted, not fed.
lm::Request forced_request(const lm::TaskSample& sample);

// The sample with its first question inside the prompt: the prompt extends to the first look-up, and the sample ends
// with the `look_ups`th.
lm::TaskSample asked_in_the_prompt(lm::TaskSample sample, std::int32_t look_ups);

}  // namespace kvkeep::cli
