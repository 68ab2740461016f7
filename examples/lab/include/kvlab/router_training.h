// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Losses that train a router and rank gates, and one step on a recorded layer with its gradients.
/// Source: SeKV (AmirAbaskohi/SeKV), its equations 10 to 15. Differs: a position sees only spans that end before its
/// window, short spans are in no loss, the count of zoomed spans has a gradient, and the reconstruction loss is a share
/// of the squares.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kvkeep/memory/factorise.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/policy/sekv.h"
#include "kvlab/span_trace.h"
#include "kvlab/tensor.h"

namespace kvkeep::lm {

/// As kvkeep::TrainedParameters, of one layer, in LibTorch's tensors: f32, f16, bf16 or f64 as input, f64 as gradients.
struct TrainedParameters {
  Tensor projections;                  ///< [Hq, d', D] W
  Tensor thresholds;                   ///< [Hq] tau
  std::array<Tensor, 3> gate_weights;  ///< as RankGates
  std::array<Tensor, 3> gate_biases;
};

/// Keys and values of one layer of one prompt, and the positions that query them.
struct TrainingPrompt {
  Tensor keys, values;                  ///< [Hkv, T, D]
  std::vector<std::int32_t> positions;  ///< [n] a query at each: it sees the tokens up to its own
  std::vector<float> surprisal;         ///< [T]
  std::vector<Span> spans;
  std::int32_t recent = 0;  ///< newest tokens that are dense for a query, whatever the spans
  double scale = 0;
};

/// RankGates whose results have gradients.
class SoftGates {
 public:
  /// f64, as RankGates takes them. Throws as it does.
  SoftGates(std::array<Tensor, 3> weights, std::array<Tensor, 3> biases);

  /// As RankGates::gates(), with a gradient if the weights ask for one.
  [[nodiscard]] Tensor gates(const Tensor& singular_values, const Tensor& coarse_keys) const;

  [[nodiscard]] std::int64_t max_rank() const { return biases_[2].size(0); }
  /// D.
  [[nodiscard]] std::int64_t key_dim() const { return weights_[0].size(1) - max_rank(); }

 private:
  std::array<Tensor, 3> weights_, biases_;
};

/// What stays fixed while router and gates change: coarse entries, factors, and what each position may see of them. All
/// in fp64.
class TrainingMemory {
 public:
  /// Decomposes the uncentred rows into at most `max_rank` components. Throws InvalidArgument for shapes, positions or
  /// spans that do not fit each other. Cost: an SVD per span, head and side.
  TrainingMemory(const TrainingPrompt& prompt, std::int64_t max_rank);

  /// u8 [n, spans]: spans that a position may see, those that end before its window. All other tokens up to its own are
  /// dense.
  [[nodiscard]] const Tensor& admitted() const { return admitted_; }

  /// The result for the teacher's queries, and the spans that they need for it.
  struct Exact {
    Tensor outputs;  ///< f64 [n, Hq, D]
    Tensor mass;     ///< f64 [n, Hq, spans] share of attention that goes to each span; 0 where not admitted
    Tensor targets;  ///< u8 [n, Hq, spans] equation 12: the fewest admitted spans that hold `coverage` of the attention
                     ///< to admitted spans
  };
  /// queries: [n, Hq, D] of the teacher, one for each position. Cost: attention over all tokens.
  [[nodiscard]] Exact exact(const Tensor& queries, double coverage) const;

  /// f64 [n, Hq, spans]: relevance before its sigmoid. queries: f64 [n, Hq, D]; projections: f64 of this layer. Cost:
  /// matrix products with the coarse keys.
  [[nodiscard]] Tensor routing_logits(const Tensor& queries, const Tensor& projections) const;

  /// f64 [spans, Hkv, 2, max_rank]: soft gates of every span, 0 for components that it does not have; with gradients.
  [[nodiscard]] Tensor gates(const SoftGates& gates) const;

  /// The result for a student's queries with some spans zoomed; with gradients.
  struct Answer {
    Tensor outputs;    ///< f64 [n, Hq, D]
    Tensor logits;     ///< f64 [n, Hq, spans] relevance before its sigmoid
    Tensor relevance;  ///< f64 [n, Hq, spans]
    Tensor zoomed;     ///< f64 [n, Hq, spans] 1 or 0, with the gradient of a sigmoid; 0 where not admitted
  };
  /// queries: [n, Hq, D] of the student. projections, thresholds: f64, of this layer. gates: from gates(). Cost:
  /// attention over all tokens, coarse entries and zoomed rows.
  [[nodiscard]] Answer answer(const Tensor& queries, const Tensor& projections, const Tensor& thresholds,
                              const Tensor& gates, double temperature) const;

 private:
  friend class TrainingLosses;

  /// A span's rows of all heads and both sides, decomposed.
  struct Decomposed {
    Tensor left, right;  ///< f64 [Hkv, 2, L, R], [Hkv, 2, R, D]
    Tensor values;       ///< f64 [Hkv, 2, R]
  };

  void decompose(const TrainingPrompt& prompt, std::int64_t span);
  void admit(const TrainingPrompt& prompt);
  [[nodiscard]] Tensor by_kv_head(const Tensor& queries) const;
  [[nodiscard]] Tensor by_query(const Tensor& outputs) const;

  std::array<Tensor, 2> rows_, coarse_;  ///< f64 [Hkv, T, D], [Hkv, spans, D] keys, values
  Tensor log_length_;                    ///< f64 [spans]
  Tensor spectra_, present_;  ///< f64 [spans, Hkv, 2, max_rank] singular values; 1 where there is a component
  std::vector<Decomposed> decomposed_;
  Tensor span_of_;                  ///< i64 [T], `spans` for a token in none
  Tensor admitted_;                 ///< u8 [n, spans]
  Tensor causal_, dense_, folded_;  ///< f64 [n, T], [n, T], [n, spans] 0, or -inf for what a position does not see
  double scale_;
};

/// Adds up the losses of a step: equations 10 to 15, over any number of layers.
class TrainingLosses {
 public:
  explicit TrainingLosses(const TrainingOptions& options) : options_(options) {}

  /// Adds one layer: its answer, the targets of its teacher, and the gates that the answer used.
  void add(const TrainingMemory& memory, const TrainingMemory::Answer& answer, const Tensor& targets,
           const Tensor& gates);

  /// f64 [], with gradients.
  struct Sum {
    Tensor loss, distill, zoom, recon, budget;
  };
  /// Logits: f64 [n, vocab] of student and teacher.
  [[nodiscard]] Sum sum(const Tensor& student_logits, const Tensor& teacher_logits) const;

 private:
  TrainingOptions options_;
  std::vector<Tensor> zoom_, left_out_, zoomed_, kept_;  ///< of each layer: losses of each decision, squares that gates
                                                         ///< leave out, zoomed spans per query, sum of gates
};

/// One layer of one prompt, with queries inside it.
struct TrainingLayer : TrainingPrompt {
  Tensor queries;  ///< [n, Hq, D]
  Tensor head;     ///< [vocab, Hq * D] readout: logits = head * (outputs of all heads)
};

struct TrainingStep {
  double loss = 0, distill = 0, zoom = 0, recon = 0, budget = 0;
  TrainedParameters gradients;            ///< of loss
  Tensor admitted;                        ///< u8 [n, spans] spans that a query may see
  Tensor targets, zoomed;                 ///< u8 [n, Hq, spans]; 0 where not admitted
  Tensor relevance;                       ///< f64 [n, Hq, spans]; the same
  Tensor gates;                           ///< f64 [spans, Hkv, 2, max_rank]
  Tensor student_logits, teacher_logits;  ///< f64 [n, vocab]
};

/// All in fp64, gradients by LibTorch. Throws InvalidArgument with all of options.problems(), and for shapes, positions
/// or spans that do not fit each other. Cost per query: exact attention, and attention over the memory with its
/// gradient; meant for training programs, not for serving.
[[nodiscard]] TrainingStep training_step(const TrainingLayer& layer, const TrainedParameters& parameters,
                                         const TrainingOptions& options);

}  // namespace kvkeep::lm

namespace kvkeep::trace {

/// Losses and gradients of one training step on a trace of kind `span_train`, all f64; the tensors of the result are
/// those of docs/reference/trace-format.md. Throws as replay_span().
[[nodiscard]] Result replay_span_train(const io::SafetensorsFile& file, const KVPolicy& policy);

}  // namespace kvkeep::trace
