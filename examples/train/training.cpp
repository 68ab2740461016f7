#include "training.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <future>
#include <map>
#include <numbers>
#include <span>

#include "checkpoint.h"
#include "kvkeep/core/error.h"

namespace train {
namespace {

using kvkeep::lm::TargetKind;
using torch::Tensor;

constexpr double kRoutineWeight = 0.3;  // of the loss; a look-up weighs 1

volatile std::sig_atomic_t stop_requested = 0;

/// Ctrl-C asks the loop to stop after the step in progress; a second one ends the program as usual.
class StopOnInterrupt {
 public:
  StopOnInterrupt() { std::signal(SIGINT, request), std::signal(SIGTERM, request); }
  ~StopOnInterrupt() { std::signal(SIGINT, SIG_DFL), std::signal(SIGTERM, SIG_DFL); }

 private:
  static void request(int signal_number) {
    stop_requested = 1;
    std::signal(signal_number, SIG_DFL);
  }
};

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
    shards.push_back(as_tensors(std::span(samples).subspan(begin, std::min(per_shard, samples.size() - begin)), length));
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

std::string minutes(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%d:%02d", static_cast<int>(seconds) / 60, static_cast<int>(seconds) % 60);
  return text;
}

/// A bar that redraws itself on a terminal, a line per window elsewhere.
class ProgressLine {
 public:
  ProgressLine(const std::vector<Stage>& schedule, int64_t first_step) : steps_(total_steps(schedule)), tokens_(total_tokens(schedule)) {
    for (int64_t step = 0; step < first_step; ++step) tokens_done_ += tokens_at(schedule, step);
    tokens_at_start_ = tokens_done_;
  }

  static int64_t tokens_at(const std::vector<Stage>& schedule, int64_t step) {
    const Stage& stage = stage_of(schedule, step);
    return int64_t{stage.length} * stage.batch;
  }

  void advance(int64_t tokens) { tokens_done_ += tokens; }

  void show(int64_t step, const Stage& stage, double rate, const Window& window, double seconds_before) {
    const double elapsed = seconds();
    const double speed = static_cast<double>(tokens_done_ - tokens_at_start_) / elapsed;
    const double left = static_cast<double>(tokens_ - tokens_done_) / speed;
    std::string text = kvkeep::text("step ", step, "/", steps_, " T ", stage.length);
    char numbers[160];
    std::snprintf(numbers, sizeof numbers, " lr %.2e loss %.4f look-ups", rate, window.loss / static_cast<double>(window.steps));
    text += numbers;
    for (const auto& [task, tally] : window.look_ups) {
      std::snprintf(numbers, sizeof numbers, " %.*s %.3f", static_cast<int>(task.size()), task.data(), tally.accuracy());
      text += numbers;
    }
    std::snprintf(numbers, sizeof numbers, " rest %.3f | %.1fM tokens %.1fk/s %s left %s", window.routine.accuracy(),
                  static_cast<double>(tokens_done_) / 1e6, speed / 1e3, minutes(seconds_before + elapsed).c_str(), minutes(left).c_str());
    text += numbers;
    if (terminal_) {
      constexpr int kCells = 24;
      const int done = static_cast<int>(kCells * tokens_done_ / tokens_);
      std::fprintf(stderr, "\r\033[K[%s%s] %s", std::string(done, '#').c_str(), std::string(kCells - done, '.').c_str(), text.c_str());
    } else {
      std::fprintf(stderr, "%s\n", text.c_str());
    }
    std::fflush(stderr);
  }

  void finish() const {
    if (terminal_) std::fputc('\n', stderr);
  }

  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  int64_t steps_, tokens_, tokens_done_ = 0, tokens_at_start_ = 0;
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

torch::optim::AdamW make_optimizer(Llama& model, double learning_rate) {
  std::vector<Tensor> matrices, vectors;
  for (const Tensor& parameter : model.parameters()) (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  const auto group = [&](std::vector<Tensor> parameters, double decay) {
    auto options = torch::optim::AdamWOptions(learning_rate).betas({0.9, 0.95}).eps(1e-8).weight_decay(decay);
    return torch::optim::OptimizerParamGroup(std::move(parameters), std::make_unique<torch::optim::AdamWOptions>(options));
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

ShardResult gradients_of(const Llama& model, const std::vector<Tensor>& parameters, const Shard& shard, double total_weight) {
  const Tensor hidden = model.hidden(shard.ids);
  const Tensor logits = model.logits(hidden.reshape({-1, hidden.size(-1)}).index_select(0, shard.rows));
  const Tensor losses = torch::cross_entropy_loss(logits, shard.expected, /*weight=*/{}, at::Reduction::None);
  const Tensor loss = (losses * shard.weight).sum() / total_weight;
  return {loss.item<double>(), torch::autograd::grad({loss}, parameters), logits.detach().argmax(-1)};
}

/// Each thread takes the next shard; sums run in the order of the shards, so the number of threads changes nothing.
void one_step(Llama& model, torch::optim::AdamW& optimizer, const std::vector<Shard>& shards, int threads, Window& window) {
  std::vector<Tensor> parameters = model.parameters();
  double total_weight = 0;
  for (const Shard& shard : shards) total_weight += shard.weight.sum().item<double>();

  std::vector<ShardResult> results(shards.size());
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    torch::set_num_threads(1);
    for (size_t i = next++; i < shards.size(); i = next++) results[i] = gradients_of(model, parameters, shards[i], total_weight);
  };
  std::vector<std::future<void>> workers;  // a future hands an exception on
  for (int i = 1; i < threads; ++i) workers.push_back(std::async(std::launch::async, work));
  work();
  for (auto& worker : workers) worker.get();

  for (size_t p = 0; p < parameters.size(); ++p) {
    Tensor sum = results[0].gradients[p];
    for (size_t i = 1; i < results.size(); ++i) sum = sum + results[i].gradients[p];
    parameters[p].mutable_grad() = sum;
  }
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
    kvkeep::require(progress.seed == options.seed, "--resume: the checkpoint has another seed; given ", options.seed, "; allowed ",
                    progress.seed);
  }

  const StopOnInterrupt interrupt;
  const int64_t steps = total_steps(options.schedule);
  const double seconds_before = progress.seconds;
  ProgressLine line(options.schedule, progress.step);
  Window window;
  const auto save = [&] {
    progress.seconds = seconds_before + line.seconds();
    save_checkpoint(options.checkpoint, model, optimizer, progress);
  };
  while (progress.step < steps && stop_requested == 0) {
    const Stage& stage = stage_of(options.schedule, progress.step);
    const double rate = learning_rate_at(progress.step, steps, options);
    set_learning_rate(optimizer, rate);
    one_step(model, optimizer, in_shards(training_batch(options.seed, progress.step, stage), stage.length), options.threads, window);
    progress.step += 1;
    line.advance(int64_t{stage.length} * stage.batch);
    if (progress.step % options.log_every == 0 || progress.step == steps) {
      line.show(progress.step, stage, rate, window, seconds_before);
      window = {};
    }
    if (progress.step % options.checkpoint_every == 0) save();
  }
  line.finish();
  save();
  return progress.step == steps;
}

}  // namespace train
