#pragma once
/// One step of training a router and rank gates on a recorded layer: the losses and their gradients.
/// Source: SeKV (AmirAbaskohi/SeKV), its equations 10 to 15. Differs: a position sees only spans that end before its window, short spans are in no loss, the count of zoomed spans has a gradient, and the
/// reconstruction is a share of what there is.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kvkeep/memory/segmenter.h"

namespace kvkeep {

struct TrainingOptions {
  double zoom_weight = 1;
  double recon_weight = 0.5;
  double budget_weight = 0.1;     ///< as annealed at this step
  double rank_weight = 0.1;       ///< of kept components against zoomed spans, inside the budget
  double positive_weight = 10;    ///< of spans that should be zoomed
  double coverage = 0.9;          ///< share of what the teacher gives to spans that those should hold
  double temperature = 0.1;       ///< of the sigmoid whose gradient a zoom has
  bool published = false;         ///< reconstruction as a plain sum, zoomed spans counted without a gradient

  /// What is not allowed, one sentence each with the field's name; empty: nothing.
  [[nodiscard]] std::vector<std::string> problems() const;
};

/// What is trained. f32, f16, bf16 or f64 on the way in, f64 as gradients.
struct TrainedParameters {
  Tensor projections;                 ///< [Hq, d', D] W
  Tensor thresholds;                  ///< [Hq] tau
  std::array<Tensor, 3> gate_weights; ///< as RankGates
  std::array<Tensor, 3> gate_biases;
};

/// One layer of one prompt, with queries inside it.
struct TrainingLayer {
  Tensor keys, values;                        ///< [Hkv, T, D]
  Tensor queries;                             ///< [n, Hq, D]
  std::vector<std::int32_t> positions;        ///< [n] each query sees the tokens up to its own
  Tensor head;                                ///< [vocab, Hq * D] readout: logits = head * (outputs of all heads)
  std::vector<float> surprisal;               ///< [T]
  std::vector<Span> spans;
  std::int32_t recent = 0;                    ///< newest tokens of a query that are dense whatever the spans
  double scale = 0;
};

struct TrainingStep {
  double loss = 0, distill = 0, zoom = 0, recon = 0, budget = 0;
  TrainedParameters gradients;  ///< of loss
  Tensor admitted;              ///< u8 [n, spans] spans that a query may see
  Tensor targets, zoomed;       ///< u8 [n, Hq, spans]; 0 where not admitted
  Tensor relevance;             ///< f64 [n, Hq, spans]; the same
  Tensor gates;                 ///< f64 [spans, Hkv, 2, max_rank]
  Tensor student_logits, teacher_logits;  ///< f64 [n, vocab]
};

/// All in fp64, gradients by LibTorch. Throws InvalidArgument with all of options.problems(), and for shapes, positions or spans that do not fit each other.
/// Cost: for each query exact attention and attention over the memory with its gradient; meant for training programs, not for serving.
[[nodiscard]] TrainingStep training_step(const TrainingLayer& layer, const TrainedParameters& parameters, const TrainingOptions& options);

}  // namespace kvkeep
