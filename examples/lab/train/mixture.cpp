// SPDX-License-Identifier: Apache-2.0
#include "mixture.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <sstream>

#include "kvkeep/core/error.h"

namespace train {
namespace {

using kvkeep::lm::TaskOptions;

constexpr int32_t kDenseLength = 48;   // up to here: nothing but look-ups, on which induction forms within minutes
constexpr int32_t kMixedLength = 128;  // from here on: all tasks; shorter prompts cannot hold them

class Choice {
 public:
  explicit Choice(uint64_t seed) : bits_(seed) {}
  int32_t between(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(bits_() % static_cast<uint64_t>(high - low + 1));
  }
  bool percent(int32_t p) { return between(1, 100) <= p; }
  uint64_t seed() { return bits_(); }

 private:
  std::mt19937_64 bits_;
};

std::string_view choose_task(Choice& choice, bool dense) {
  const int32_t roll = choice.between(1, 100);
  if (dense) return roll <= 50 ? "chain" : "ask";
  if (roll <= 20) return "chain";
  if (roll <= 40) return "ask";
  if (roll <= 47) return "needle";
  if (roll <= 55) return "copies";
  return "updates";
}

TaskOptions dense_options(Choice& choice, std::string_view task, int32_t length) {
  TaskOptions options{.length = length, .thinking = false};
  options.facts = choice.between(3, 5);
  options.sections = 1;
  options.prompt_length = kvkeep::lm::shortest_prompt(*options.facts, 1, 1);
  if (task == "ask") options.phase = 0;
  return options;
}

TaskOptions mixed_options(Choice& choice, std::string_view task, int32_t length) {
  TaskOptions options{.length = length};
  options.prompt_length = length * choice.between(25, 65) / 100;
  options.thinking = choice.percent(length < 256 ? 60 : 85);
  options.copies = task == "copies" ? choice.between(2, 3) : 1;
  const int32_t room = (*options.prompt_length - 9) / (3 * *options.copies);
  const int32_t most = task == "needle" ? 12 : task == "updates" ? 24 : 64;
  options.facts = choice.between(2, std::max(2, std::min(most, room * (task == "updates" ? 2 : 3) / 3)));
  options.sections = choice.between(1, std::min(8, *options.facts));
  if (task == "ask") {
    options.hops = choice.percent(60) ? 1 : choice.between(2, 3);
    options.phase = choice.percent(50) ? 0 : choice.between(3, 19);
  }
  if (task == "needle") options.gap = choice.between(4, std::min(64, length / 6));
  if (task == "updates") {
    options.late = choice.between(0, *options.facts / 3);
    options.rewrites = choice.between(0, *options.facts / 2);
    options.update_every = choice.between(1, 4);
  }
  return options;
}

}  // namespace

std::vector<Stage> parse_schedule(const std::string& text) {
  std::vector<Stage> schedule;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    long long length = 0, batch = 0, steps = 0;
    char rest = 0;
    const bool read = std::sscanf(part.c_str(), "%lld:%lld:%lld%c", &length, &batch, &steps, &rest) == 3;
    const bool fits = (24 <= length && length <= kDenseLength) || (kMixedLength <= length && length <= 65536);
    KVKEEP_REQUIRE(read && fits && 1 <= batch && batch <= 65536 && 1 <= steps && steps <= 100000000,
                   "--schedule: cannot use a stage; given \"", part, "\"; allowed length:batch:steps, length 24 to ",
                   kDenseLength, " (look-ups alone) or ", kMixedLength,
                   " to 65536 (all tasks), batch and steps at least 1");
    schedule.push_back({static_cast<int32_t>(length), static_cast<int32_t>(batch), steps});
  }
  KVKEEP_REQUIRE(!schedule.empty(), "--schedule: no stage; given \"", text, "\"; allowed length:batch:steps[,...]");
  return schedule;
}

int64_t total_steps(const std::vector<Stage>& schedule) {
  int64_t steps = 0;
  for (const Stage& stage : schedule) steps += stage.steps;
  return steps;
}

int64_t total_tokens(const std::vector<Stage>& schedule) {
  int64_t tokens = 0;
  for (const Stage& stage : schedule) tokens += stage.steps * stage.batch * stage.length;
  return tokens;
}

const Stage& stage_of(const std::vector<Stage>& schedule, int64_t step) {
  for (const Stage& stage : schedule) {
    if (step < stage.steps) return stage;
    step -= stage.steps;
  }
  return schedule.back();
}

std::vector<TrainingSample> training_batch(uint64_t seed, int64_t step, const Stage& stage) {
  std::vector<TrainingSample> batch;
  Choice choice(seed * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(step));
  const bool dense = stage.length <= kDenseLength;
  for (int32_t i = 0; i < stage.batch; ++i) {
    const std::string_view task = choose_task(choice, dense);
    const TaskOptions options =
        dense ? dense_options(choice, task, stage.length) : mixed_options(choice, task, stage.length);
    batch.push_back({task, kvkeep::lm::make_task(task, choice.seed(), options)});
  }
  return batch;
}

}  // namespace train
