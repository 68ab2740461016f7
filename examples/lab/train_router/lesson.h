// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What one sequence teaches: the frozen model's answers at the positions that look far back, and the folded spans that
/// a student has instead.

#include <cstdint>
#include <string_view>
#include <vector>

#include "kvkeep/memory/segmenter.h"
#include "kvlab/router_training.h"
#include "llama.h"
#include "mixture.h"

namespace train {

struct LessonOptions {
  kvkeep::SegmenterOptions segmenter;
  bool fold_all = false;     ///< the trace folds too; else it stays as it is, like tokens that a model has just written
  int32_t candidates = 512;  ///< evenly spaced positions that are examined
  int32_t positions = 64;    ///< how many of them are kept: those that look farthest back
  int32_t max_rank = 32;

  /// The options that are not allowed, one sentence each with the name of the flag.
  std::vector<std::string> problems() const;
};

/// One layer of the teacher: f32 [Hkv, T, D], keys after RoPE.
struct TeacherLayer {
  torch::Tensor keys, values;
};

struct Lesson {
  std::vector<int32_t> positions;  ///< [n] ascending
  torch::Tensor ids;               ///< i64 [n] tokens at them
  torch::Tensor next;              ///< i64 [n] tokens after them, -1 if that is not the value of a look-up
  torch::Tensor teacher_logits;    ///< f64 [n, vocabulary]
  std::vector<kvkeep::lm::TrainingMemory> memories;  ///< [layers]
  std::vector<torch::Tensor> queries;                ///< [layers] f64 [n, Hq, D] of the teacher
  std::vector<torch::Tensor> mass;                   ///< [layers] f64 [n, Hq, spans] share of the teacher's attention
  std::vector<torch::Tensor> targets;                ///< [layers] u8 [n, Hq, spans]
  std::vector<TeacherLayer> teacher;                 ///< [layers]
  std::vector<float> surprisal;                      ///< [T]
  std::vector<kvkeep::Span> spans;
};

/// Runs the model over the sample. `coverage`: of the targets.
Lesson make_lesson(const Llama& model, const kvkeep::lm::TaskSample& sample, const LessonOptions& options,
                   double coverage);

/// The whole stack at the lesson's positions, from their embeddings, with `answer` for attention: [n, Hq, D] queries
/// in, the same out. Returns f64 [n, vocabulary].
torch::Tensor stack_logits(const Llama& model, const Lesson& lesson,
                           const std::function<torch::Tensor(size_t layer, const torch::Tensor& queries)>& answer);

/// The losses of a student with these parameters.
kvkeep::lm::TrainingLosses::Sum student_losses(const Llama& model, const Lesson& lesson,
                                               const kvkeep::lm::TrainedParameters& parameters,
                                               const kvkeep::TrainingOptions& options);

}  // namespace train
