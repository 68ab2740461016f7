// SPDX-License-Identifier: Apache-2.0
#include "router_training.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numbers>
#include <string_view>

#include "checkpoint.h"
#include "interrupt.h"
#include "kvkeep/core/error.h"
#include "parallel.h"
#include "progress_line.h"
#include "thresholds.h"

namespace train {
namespace {

using torch::Tensor;

constexpr uint64_t kHeldOutSeed = 1u << 30, kThresholdSeed = (1u << 30) + 1;  // training has seeds of its own
constexpr int32_t kThresholdSamples = 32;

/// Losses as numbers, added up.
struct Told {
  double loss = 0, distill = 0, zoom = 0, recon = 0, budget = 0;

  void add(const Told& other, double weight) {
    loss += weight * other.loss, distill += weight * other.distill, zoom += weight * other.zoom;
    recon += weight * other.recon, budget += weight * other.budget;
  }
  std::string text() const {
    char line[160];
    std::snprintf(line, sizeof line, "loss %.4f distill %.4f zoom %.4f recon %.4f budget %.1f", loss, distill, zoom,
                  recon, budget);
    return line;
  }
};

Told told(const kvkeep::lm::TrainingLosses::Sum& s) {
  return {s.loss.item<double>(), s.distill.item<double>(), s.zoom.item<double>(), s.recon.item<double>(),
          s.budget.item<double>()};
}

/// Everything that a checkpoint holds beside the optimizer.
class State : public torch::nn::Module {
 public:
  State(RouterParameters& parameters, const LlamaShape& shape, const kvkeep::lm::TrainedParameters& like) {
    const auto alias = [](RouterParameters& p) {
      return std::shared_ptr<RouterParameters>(std::shared_ptr<void>(), &p);
    };  // owned by the caller
    now = register_module("now", alias(parameters));
    best = register_module(
        "best", std::make_shared<RouterParameters>(shape, like.projections.size(2), like.gate_weights[2].size(0), 0));
    best->copy_from(parameters);
    best_loss =
        register_buffer("best_loss", torch::full({1}, std::numeric_limits<double>::infinity(), torch::kFloat64));
    stale = register_buffer("stale", torch::zeros({1}, torch::kInt64));
  }

  /// Records the held-out loss of the current parameters.
  void see(double loss) {
    if (loss < best_loss.item<double>()) {
      best_loss.fill_(loss), stale.fill_(0);
      best->copy_from(*now);
    } else {
      stale += 1;
    }
  }

  std::shared_ptr<RouterParameters> now, best;
  Tensor best_loss, stale;  ///< f64 [1]; i64 [1] checks since then
};

torch::optim::AdamW make_optimizer(const RouterParameters& parameters, const RouterTrainingOptions& options) {
  std::vector<Tensor> matrices, vectors;
  for (const auto& p : parameters.named_parameters())
    (p.key() != "tau" && p.value().dim() > 1 ? matrices : vectors).push_back(p.value());
  const auto group = [&](std::vector<Tensor> of, double decay) {
    return torch::optim::OptimizerParamGroup(
        std::move(of), std::make_unique<torch::optim::AdamWOptions>(
                           torch::optim::AdamWOptions(options.learning_rate).weight_decay(decay)));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups{group(matrices, options.weight_decay), group(vectors, 0.0)};
  return torch::optim::AdamW(groups, torch::optim::AdamWOptions(options.learning_rate));
}

/// One step on a batch; each sequence by itself, gradients added up in their order.
Told one_step(const Llama& model, RouterParameters& parameters, torch::optim::AdamW& optimizer,
              const std::vector<TrainingSample>& batch, const RouterTrainingOptions& options,
              const kvkeep::TrainingOptions& losses) {
  const std::vector<Tensor> trained = parameters.parameters();
  std::vector<std::vector<Tensor>> gradients(batch.size());
  std::vector<Told> each(batch.size());
  each_in_parallel(batch.size(), options.threads, [&](size_t i) {
    const Lesson lesson = make_lesson(model, batch[i].sample, options.lesson, losses.coverage);
    const kvkeep::lm::TrainingLosses::Sum sum = student_losses(model, lesson, parameters.arrays(), losses);
    each[i] = told(sum);
    gradients[i] = torch::autograd::grad({sum.loss / static_cast<double>(batch.size())}, trained, {}, {}, false,
                                         /*allow_unused=*/true);
    for (size_t p = 0; p < trained.size(); ++p)
      if (!gradients[i][p].defined()) gradients[i][p] = torch::zeros_like(trained[p]);
  });
  sum_gradients(gradients, trained);
  torch::nn::utils::clip_grad_norm_(trained, 1.0);
  optimizer.step();
  Told all;
  for (const Told& one : each) all.add(one, 1 / static_cast<double>(batch.size()));
  return all;
}

Told look(const Llama& model, const std::vector<Lesson>& lessons, const RouterParameters& parameters,
          const RouterTrainingOptions& options) {
  std::vector<Told> each(lessons.size());
  each_in_parallel(lessons.size(), options.threads, [&](size_t i) {
    torch::NoGradGuard no_grad;
    each[i] = told(student_losses(model, lessons[i], parameters.arrays(), options.losses));
  });
  Told all;
  for (const Told& one : each) all.add(one, 1 / static_cast<double>(lessons.size()));
  return all;
}

/// Samples that training does not see, at the longest length of the schedule.
std::vector<Lesson> lessons_of(const Llama& model, const RouterTrainingOptions& options, uint64_t seed, int32_t count) {
  if (count == 0) return {};
  int32_t longest = 0;
  for (const Stage& stage : options.schedule) longest = std::max(longest, stage.length);
  const std::vector<TrainingSample> samples = training_batch(seed, 0, {longest, count, 1});
  std::vector<Lesson> lessons(samples.size());
  each_in_parallel(samples.size(), options.threads, [&](size_t i) {
    lessons[i] = make_lesson(model, samples[i].sample, options.lesson, options.losses.coverage);
  });
  return lessons;
}

}  // namespace

std::vector<std::string> RouterTrainingOptions::problems() const {
  std::vector<std::string> found = lesson.problems();
  for (std::string& one : losses.problems()) found.push_back(std::move(one));
  for (const Stage& stage : schedule)
    if (stage.length < 128)
      found.push_back(kvkeep::text("schedule: a stage of length ", stage.length,
                                   "; allowed 128 or more, shorter samples fold nothing"));
  if (!(warmup >= 0 && warmup <= 1)) found.push_back(kvkeep::text("warmup: ", warmup, "; allowed 0 to 1"));
  if (!(price >= 0)) found.push_back(kvkeep::text("price: ", price, "; allowed 0 or more"));
  if (patience > 0 && (check_every == 0 || held_out == 0))
    found.push_back("patience: it needs checks on held-out samples; allowed with check_every and held_out above 0");
  return found;
}

std::string RouterTrainingOptions::settings() const {
  std::string stages;
  for (const Stage& s : schedule)
    stages += kvkeep::text(stages.empty() ? "" : ",", s.length, ":", s.batch, ":", s.steps);
  const kvkeep::SegmenterOptions& cut = lesson.segmenter;
  return kvkeep::text("schedule ", stages, ", fold ", lesson.fold_all ? "all" : "prompt", ", alpha ", cut.alpha,
                      ", sink ", cut.sink, ", recent ", cut.recent, ", min_span ", cut.min_span, ", max_span ",
                      cut.max_span, ", candidates ", lesson.candidates, ", positions ", lesson.positions, ", max_rank ",
                      lesson.max_rank, ", zoom_weight ", losses.zoom_weight, ", recon_weight ", losses.recon_weight,
                      ", budget_weight ", losses.budget_weight, ", rank_weight ", losses.rank_weight,
                      ", positive_weight ", losses.positive_weight, ", coverage ", losses.coverage, ", temperature ",
                      losses.temperature, ", lr ", learning_rate, ", weight_decay ", weight_decay, ", warmup ", warmup,
                      ", check_every ", check_every, ", held_out ", held_out, ", patience ", patience, ", price ",
                      price);
}

double router_learning_rate_at(int64_t step, int64_t steps, const RouterTrainingOptions& options) {
  const double warm = options.warmup * static_cast<double>(steps), at = static_cast<double>(step);
  if (at < warm) return options.learning_rate * (at + 1) / std::max(1.0, std::ceil(warm));
  return options.learning_rate * 0.5 *
         (1 + std::cos(std::numbers::pi * (at - warm) / std::max(1.0, static_cast<double>(steps) - warm)));
}

std::vector<Lesson> held_out_lessons(const Llama& model, const RouterTrainingOptions& options, int32_t count) {
  return lessons_of(model, options, kHeldOutSeed, count);
}

bool train_router(const Llama& model, RouterParameters& parameters, const RouterTrainingOptions& options) {
  torch::optim::AdamW optimizer = make_optimizer(parameters, options);
  State state(parameters, model.shape(), parameters.arrays());
  Progress progress{.seed = options.seed, .settings = options.settings()};
  if (options.resume) {
    progress = load_checkpoint(options.checkpoint, state, optimizer);
    KVKEEP_REQUIRE(progress.seed == options.seed, "--resume: the checkpoint has another seed; given ", options.seed,
                   "; allowed ", progress.seed);
    KVKEEP_REQUIRE(progress.settings == options.settings(),
                   "--resume: the checkpoint was made with other options; given ", options.settings(), "; allowed ",
                   progress.settings);
  }

  const StopOnInterrupt interrupt;
  const int64_t steps = total_steps(options.schedule);
  const std::vector<Lesson> lessons =
      options.check_every > 0 ? held_out_lessons(model, options, options.held_out) : std::vector<Lesson>();
  ProgressLine line(options.schedule, progress.step, progress.seconds);
  const auto save = [&] {
    progress.seconds = line.seconds();
    save_checkpoint(options.checkpoint, state, optimizer, progress);
  };
  const auto done = [&] {
    return progress.step >= steps || (options.patience > 0 && state.stale.item<int64_t>() >= options.patience);
  };
  Told window;
  int64_t in_window = 0;
  const int64_t last = options.stop_after > 0 ? progress.step + options.stop_after : steps;
  while (!done() && progress.step < last && !interrupt.requested()) {
    const Stage& stage = stage_of(options.schedule, progress.step);
    const double rate = router_learning_rate_at(progress.step, steps, options);
    for (auto& group : optimizer.param_groups()) static_cast<torch::optim::AdamWOptions&>(group.options()).lr(rate);
    kvkeep::TrainingOptions losses = options.losses;
    losses.budget_weight *= std::min(1.0, 2 * static_cast<double>(progress.step) / static_cast<double>(steps));
    window.add(
        one_step(model, parameters, optimizer, training_batch(options.seed, progress.step, stage), options, losses), 1);
    in_window += 1;
    progress.step += 1;
    line.advance(stage);
    if (progress.step % options.log_every == 0 || progress.step == steps) {
      Told mean;
      mean.add(window, 1 / static_cast<double>(in_window));
      line.show(progress.step, stage, mean.text());
      window = {}, in_window = 0;
    }
    if (!lessons.empty() && (progress.step % options.check_every == 0 || progress.step == steps)) {
      const Told seen = look(model, lessons, parameters, options);
      state.see(seen.loss);
      line.say(kvkeep::text("step ", progress.step, " held out: ", seen.text()));
    }
    if (progress.step % options.checkpoint_every == 0) save();
  }
  line.finish();
  save();
  if (!done()) return false;
  if (!lessons.empty()) parameters.copy_from(*state.best);
  if (options.price > 0)
    set_thresholds(lessons_of(model, options, kThresholdSeed, kThresholdSamples), options.price, parameters);
  return true;
}

}  // namespace train
