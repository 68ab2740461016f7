// SPDX-License-Identifier: Apache-2.0
#include "lesson.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kvkeep/core/error.h"

namespace train {
namespace {

using torch::Tensor;

struct Pass {
  std::vector<TeacherLayer> layers;
  std::vector<Tensor> queries;  // [layers] f32 [Hq, T, D]
  Tensor logits;                // f32 [T, vocabulary]
};

Pass run_teacher(const Llama& model, const Tensor& ids) {
  Pass pass;
  const int64_t group = model.shape().query_heads / model.shape().kv_heads;
  const Tensor hidden =
      model.hidden(ids.unsqueeze(0), torch::arange(ids.size(0), torch::kInt64),
                   [&](int64_t, const Tensor& q, const Tensor& k, const Tensor& v) {
                     pass.layers.push_back({k.squeeze(0).contiguous(), v.squeeze(0).contiguous()});
                     pass.queries.push_back(q.squeeze(0).contiguous());
                     return at::scaled_dot_product_attention(
                         q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), {}, 0.0, /*is_causal=*/true);
                   });
  pass.logits = model.logits(hidden.squeeze(0)).contiguous();
  return pass;
}

double scale_of(const Llama& model) { return 1 / std::sqrt(static_cast<double>(model.shape().head_width)); }

/// The share of attention, over all layers and heads, that goes farther back than `recent`: f64 [positions].
Tensor far_share(const Llama& model, const Pass& pass, const Tensor& positions, int32_t recent) {
  const int64_t group = model.shape().query_heads / model.shape().kv_heads;
  const Tensor slots = torch::arange(pass.logits.size(0), torch::kInt64).unsqueeze(0), own = positions.unsqueeze(1);
  const Tensor hidden = slots > own, far = (slots <= own - recent).to(torch::kFloat32);
  Tensor share = torch::zeros({positions.size(0)}, torch::kFloat64);
  for (size_t l = 0; l < pass.layers.size(); ++l) {
    const Tensor q = pass.queries[l].index_select(1, positions), k = pass.layers[l].keys.repeat_interleave(group, 0);
    const Tensor logits = (torch::matmul(q, k.transpose(1, 2)) * scale_of(model))
                              .masked_fill(hidden, -std::numeric_limits<float>::infinity());
    share += (torch::softmax(logits, -1) * far).sum(-1).sum(0).to(torch::kFloat64);
  }
  return share;
}

/// Of evenly spaced candidates, those that look farthest back; at equal shares the earlier first. Ascending.
std::vector<int32_t> mined_positions(const Llama& model, const Pass& pass, int32_t first,
                                     const LessonOptions& options) {
  const auto last = static_cast<int32_t>(pass.logits.size(0)) - 1;
  const int32_t count = std::min(options.candidates, last - first + 1);
  std::vector<int64_t> candidates;
  for (int32_t i = 0; i < count; ++i)
    candidates.push_back(count == 1 ? last : first + int64_t{i} * (last - first) / (count - 1));
  const Tensor share = far_share(model, pass, torch::tensor(candidates), options.segmenter.recent);
  std::vector<size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(
      order, [&](size_t a, size_t b) { return share.const_data_ptr<double>()[a] > share.const_data_ptr<double>()[b]; });
  order.resize(std::min(order.size(), static_cast<size_t>(options.positions)));
  std::vector<int32_t> mined;
  for (const size_t i : order) mined.push_back(static_cast<int32_t>(candidates[i]));
  std::ranges::sort(mined);
  return mined;
}

Tensor look_ups(const kvkeep::lm::TaskSample& sample, const std::vector<int32_t>& positions) {
  std::vector<int64_t> next;
  for (const int32_t p : positions) {
    const auto i = static_cast<size_t>(p) + 1;
    next.push_back(i < sample.ids.size() && sample.target[i] == kvkeep::lm::kLookUp ? sample.ids[i] : -1);
  }
  return torch::tensor(next);
}

}  // namespace

std::vector<std::string> LessonOptions::problems() const {
  std::vector<std::string> found = segmenter.problems();
  const auto at_least = [&](const char* name, int32_t value, int32_t least) {
    if (value < least) found.push_back(kvkeep::text(name, ": ", value, "; allowed ", least, " or more"));
  };
  at_least("candidates", candidates, 1), at_least("positions", positions, 1), at_least("max_rank", max_rank, 1);
  return found;
}

Lesson make_lesson(const Llama& model, const kvkeep::lm::TaskSample& sample, const LessonOptions& options,
                   double coverage) {
  torch::NoGradGuard no_grad;
  const Tensor ids = torch::tensor(sample.ids, torch::kInt64);
  Pass pass = run_teacher(model, ids);

  Lesson lesson;
  kvkeep::PromptSurprisal surprisal(sample.ids);
  surprisal.see(pass.logits);
  lesson.surprisal.assign(surprisal.values().begin(), surprisal.values().end());
  // Spans form as the window passes them, so each query has its own window, and the segmenter has none.
  kvkeep::SegmenterOptions cut = options.segmenter;
  cut.recent = 0;
  const size_t folded = options.fold_all ? sample.ids.size() : static_cast<size_t>(sample.prompt_length);
  lesson.spans = kvkeep::segment(std::span(lesson.surprisal).first(folded), cut).spans;
  lesson.positions = mined_positions(model, pass, options.fold_all ? 0 : sample.prompt_length, options);

  const Tensor at = torch::tensor(lesson.positions, torch::kInt64);
  lesson.ids = ids.index_select(0, at);
  lesson.next = look_ups(sample, lesson.positions);
  lesson.teacher_logits = pass.logits.index_select(0, at).to(torch::kFloat64);
  for (size_t l = 0; l < pass.layers.size(); ++l) {
    const kvkeep::lm::TrainingPrompt prompt{pass.layers[l].keys, pass.layers[l].values, lesson.positions,
                                            lesson.surprisal,    lesson.spans,          options.segmenter.recent,
                                            scale_of(model)};
    lesson.memories.emplace_back(prompt, options.max_rank);
    lesson.queries.push_back(pass.queries[l].index_select(1, at).transpose(0, 1).to(torch::kFloat64).contiguous());
    const kvkeep::lm::TrainingMemory::Exact exact = lesson.memories.back().exact(lesson.queries.back(), coverage);
    lesson.mass.push_back(exact.mass), lesson.targets.push_back(exact.targets);
  }
  lesson.teacher = std::move(pass.layers);
  return lesson;
}

Tensor stack_logits(const Llama& model, const Lesson& lesson,
                    const std::function<Tensor(size_t layer, const Tensor& queries)>& answer) {
  const Tensor positions = torch::tensor(lesson.positions, torch::kInt64);
  const Tensor hidden = model.hidden(
      lesson.ids.unsqueeze(0), positions, [&](int64_t layer, const Tensor& q, const Tensor&, const Tensor&) {
        return answer(static_cast<size_t>(layer), q.squeeze(0).transpose(0, 1).contiguous())
            .to(torch::kFloat32)
            .transpose(0, 1)
            .unsqueeze(0);
      });
  return model.logits(hidden.squeeze(0)).to(torch::kFloat64);
}

kvkeep::lm::TrainingLosses::Sum student_losses(const Llama& model, const Lesson& lesson,
                                               const kvkeep::lm::TrainedParameters& parameters,
                                               const kvkeep::TrainingOptions& options) {
  const auto doubles = [](const std::array<Tensor, 3>& of) {
    return std::array<Tensor, 3>{of[0].to(torch::kFloat64), of[1].to(torch::kFloat64), of[2].to(torch::kFloat64)};
  };
  const kvkeep::lm::SoftGates rank_gates(doubles(parameters.gate_weights), doubles(parameters.gate_biases));
  const Tensor projections = parameters.projections.to(torch::kFloat64),
               thresholds = parameters.thresholds.to(torch::kFloat64);
  kvkeep::lm::TrainingLosses losses(options);
  const Tensor logits = stack_logits(model, lesson, [&](size_t layer, const Tensor& queries) {
    const kvkeep::lm::TrainingMemory& memory = lesson.memories[layer];
    const Tensor gates = memory.gates(rank_gates);
    const auto l = static_cast<int64_t>(layer);
    const kvkeep::lm::TrainingMemory::Answer answer =
        memory.answer(queries, projections.select(0, l), thresholds.select(0, l), gates, options.temperature);
    losses.add(memory, answer, lesson.targets[layer], gates);
    return answer.outputs;
  });
  return losses.sum(logits, lesson.teacher_logits);
}

}  // namespace train
