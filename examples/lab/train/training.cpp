// SPDX-License-Identifier: Apache-2.0
#include "training.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <numbers>
#include <span>

#include "checkpoint.h"
#include "interrupt.h"
#include "kvkeep/core/error.h"
#include "parallel.h"
#include "progress_line.h"

namespace train {
namespace {

using kvkeep::lm::TargetKind;
using torch::Tensor;

constexpr double kRoutineWeight = 0.3;  // of the loss; a look-up weighs 1

constexpr int32_t kShardTokens = 2048;  // of one forward and backward: small enough to stay in the caches

/// Some samples of a step.
struct Shard {
  Tensor ids;                          // i64 [B, T]
  Tensor rows;                         // i64 [n] flat positions whose next token is a target
  Tensor expected;                     // i64 [n]
  Tensor weight;                       // f32 [n]
  std::vector<std::string_view> task;  // [n]
  std::vector<TargetKind> kind;        // [n]
};

Shard as_tensors(std::span<const TrainingSample> samples, int32_t length) {
  Shard shard;
  std::vector<int64_t> ids, rows, expected;
  std::vector<float> weight;
  for (size_t b = 0; b < samples.size(); ++b) {
    const auto& [task, sample] = samples[b];
    ids.insert(ids.end(), sample.ids.begin(), sample.ids.end());
    for (int32_t i = sample.prompt_length; i < length; ++i) {
      const auto kind = static_cast<TargetKind>(sample.target[i]);
      if (kind == kvkeep::lm::kUnpredictable) continue;
      rows.push_back(static_cast<int64_t>(b) * length + i - 1);
      expected.push_back(sample.ids[i]);
      weight.push_back(kind == kvkeep::lm::kLookUp ? 1.0F : static_cast<float>(kRoutineWeight));
      shard.task.push_back(task);
      shard.kind.push_back(kind);
    }
  }
  shard.ids = torch::tensor(ids).view({static_cast<int64_t>(samples.size()), length});
  shard.rows = torch::tensor(rows);
  shard.expected = torch::tensor(expected);
  shard.weight = torch::tensor(weight);
  return shard;
}

std::vector<Shard> in_shards(const std::vector<TrainingSample>& samples, int32_t length) {
  const size_t per_shard = static_cast<size_t>(std::max(1, kShardTokens / length));
  std::vector<Shard> shards;
  for (size_t begin = 0; begin < samples.size(); begin += per_shard)
    shards.push_back(
        as_tensors(std::span(samples).subspan(begin, std::min(per_shard, samples.size() - begin)), length));
  return shards;
}

struct Tally {
  int64_t right = 0, asked = 0;
  double accuracy() const { return asked == 0 ? 0.0 : static_cast<double>(right) / static_cast<double>(asked); }
};

/// What happened since the last progress line.
struct Window {
  double loss = 0;
  int64_t steps = 0;
  std::map<std::string_view, Tally> look_ups;
  Tally routine;

  void add(const Shard& shard, const Tensor& guess) {
    const Tensor hit = guess.eq(shard.expected).contiguous();
    const bool* right = hit.const_data_ptr<bool>();
    for (size_t i = 0; i < shard.kind.size(); ++i) {
      Tally& tally = shard.kind[i] == kvkeep::lm::kLookUp ? look_ups[shard.task[i]] : routine;
      tally.right += right[i];
      tally.asked += 1;
    }
  }
};

std::string told(double rate, const Window& window) {
  char numbers[64];
  std::snprintf(numbers, sizeof numbers, "lr %.2e loss %.4f look-ups", rate,
                window.loss / static_cast<double>(window.steps));
  std::string text = numbers;
  for (const auto& [task, tally] : window.look_ups) {
    std::snprintf(numbers, sizeof numbers, " %.*s %.3f", static_cast<int>(task.size()), task.data(), tally.accuracy());
    text += numbers;
  }
  std::snprintf(numbers, sizeof numbers, " rest %.3f", window.routine.accuracy());
  return text + numbers;
}

torch::optim::AdamW make_optimizer(Llama& model, double learning_rate) {
  std::vector<Tensor> matrices, vectors;
  for (const Tensor& parameter : model.parameters()) (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  const auto group = [&](std::vector<Tensor> parameters, double decay) {
    auto options = torch::optim::AdamWOptions(learning_rate).betas({0.9, 0.95}).eps(1e-8).weight_decay(decay);
    return torch::optim::OptimizerParamGroup(std::move(parameters),
                                             std::make_unique<torch::optim::AdamWOptions>(options));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups{group(matrices, 0.01), group(vectors, 0.0)};
  return torch::optim::AdamW(groups, torch::optim::AdamWOptions(learning_rate));
}

void set_learning_rate(torch::optim::AdamW& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) static_cast<torch::optim::AdamWOptions&>(group.options()).lr(rate);
}

struct ShardResult {
  double loss = 0;
  std::vector<Tensor> gradients;
  Tensor guess;  // i64 [n]
};

ShardResult gradients_of(const Llama& model, const std::vector<Tensor>& parameters, const Shard& shard,
                         double total_weight) {
  const Tensor hidden = model.hidden(shard.ids);
  const Tensor logits = model.logits(hidden.reshape({-1, hidden.size(-1)}).index_select(0, shard.rows));
  const Tensor losses = torch::cross_entropy_loss(logits, shard.expected, /*weight=*/{}, at::Reduction::None);
  const Tensor loss = (losses * shard.weight).sum() / total_weight;
  return {loss.item<double>(), torch::autograd::grad({loss}, parameters), logits.detach().argmax(-1)};
}

void one_step(Llama& model, torch::optim::AdamW& optimizer, const std::vector<Shard>& shards, int threads,
              Window& window) {
  std::vector<Tensor> parameters = model.parameters();
  double total_weight = 0;
  for (const Shard& shard : shards) total_weight += shard.weight.sum().item<double>();

  std::vector<ShardResult> results(shards.size());
  each_in_parallel(shards.size(), threads,
                   [&](size_t i) { results[i] = gradients_of(model, parameters, shards[i], total_weight); });
  std::vector<std::vector<Tensor>> gradients;
  for (const ShardResult& result : results) gradients.push_back(result.gradients);
  sum_gradients(gradients, parameters);
  torch::nn::utils::clip_grad_norm_(parameters, 1.0);
  optimizer.step();
  window.steps += 1;
  for (size_t i = 0; i < shards.size(); ++i) {
    window.loss += results[i].loss;
    window.add(shards[i], results[i].guess);
  }
}

}  // namespace

double learning_rate_at(int64_t step, int64_t steps, const TrainingOptions& options) {
  constexpr double kFloor = 0.05;
  const double warm = std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps));
  const double half = static_cast<double>(steps) / 2;
  const double late = std::clamp((static_cast<double>(step) - half) / half, 0.0, 1.0);
  return options.learning_rate * warm * (kFloor + (1 - kFloor) * 0.5 * (1 + std::cos(std::numbers::pi * late)));
}

bool train_model(Llama& model, const TrainingOptions& options) {
  torch::optim::AdamW optimizer = make_optimizer(model, options.learning_rate);
  Progress progress{options.seed, 0, 0};
  if (options.resume) {
    progress = load_checkpoint(options.checkpoint, model, optimizer);
    KVKEEP_REQUIRE(progress.seed == options.seed, "--resume: the checkpoint has another seed; given ", options.seed,
                   "; allowed ", progress.seed);
  }

  const StopOnInterrupt interrupt;
  const int64_t steps = total_steps(options.schedule);
  ProgressLine line(options.schedule, progress.step, progress.seconds);
  Window window;
  const auto save = [&] {
    progress.seconds = line.seconds();
    save_checkpoint(options.checkpoint, model, optimizer, progress);
  };
  while (progress.step < steps && !interrupt.requested()) {
    const Stage& stage = stage_of(options.schedule, progress.step);
    const double rate = learning_rate_at(progress.step, steps, options);
    set_learning_rate(optimizer, rate);
    one_step(model, optimizer, in_shards(training_batch(options.seed, progress.step, stage), stage.length),
             options.threads, window);
    progress.step += 1;
    line.advance(stage);
    if (progress.step % options.log_every == 0 || progress.step == steps) {
      line.show(progress.step, stage, told(rate, window));
      window = {};
    }
    if (progress.step % options.checkpoint_every == 0) save();
  }
  line.finish();
  save();
  return progress.step == steps;
}

}  // namespace train
