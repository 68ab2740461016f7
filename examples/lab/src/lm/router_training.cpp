// SPDX-License-Identifier: Apache-2.0
#include "kvlab/router_training.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/memory/factorise.h"

namespace kvkeep::lm {
namespace {

constexpr at::ScalarType kFloat64 = c10::ScalarType::Double;
constexpr double kLeastNorm = 1e-8;
constexpr double kLeastSquares = 1e-300;  ///< a share of nothing is nothing
constexpr double kLeastGate =
    1e-6;  ///< as in the published log-gates, a shut entry keeps this much, so that logarithms stay finite

at::TensorOptions doubles() { return at::TensorOptions().dtype(kFloat64); }
at::TensorOptions marks() { return at::TensorOptions().dtype(c10::ScalarType::Byte); }
Tensor leaf(const Tensor& t) { return t.to(kFloat64).detach().clone().requires_grad_(true); }
Tensor zero() { return at::zeros({}, doubles()); }
Tensor log_gate(const Tensor& z) { return z.clamp(kLeastGate, 1).log(); }

/// 1 for the fewest spans, best first, that hold `coverage` of the mass of the first `counts[n]`: [n, H, spans] in, u8
/// out.
Tensor covering(const Tensor& mass, const std::vector<std::int64_t>& counts, double coverage) {
  Tensor out = at::zeros(mass.sizes(), marks());
  const Tensor m = mass.contiguous();
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < m.size(0) * m.size(1); ++i) {
    const std::int64_t k = counts[static_cast<std::size_t>(i / m.size(1))];
    const double* own = m.const_data_ptr<double>() + i * m.size(2);
    const double all = std::accumulate(own, own + k, 0.0);
    order.resize(static_cast<std::size_t>(k));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::ranges::greater(),
                             [own](std::int64_t s) { return std::isnan(own[s]) ? -HUGE_VAL : own[s]; });
    double held = 0;
    for (const std::int64_t s : order) {
      out.data_ptr<std::uint8_t>()[i * m.size(2) + s] = 1;
      held += all > 0 ? own[s] / all : 0;
      if (held >= coverage) break;
    }
  }
  return out;
}

/// 0 where `seen`, else -inf.
Tensor shut_unless(const Tensor& seen) {
  return at::zeros(seen.sizes(), doubles()).masked_fill(seen.logical_not(), -HUGE_VAL);
}

Tensor integers(const std::vector<std::int64_t>& from) {
  return at::from_blob(const_cast<std::int64_t*>(from.data()), {static_cast<std::int64_t>(from.size())},
                       at::TensorOptions().dtype(c10::ScalarType::Long))
      .clone();
}

void check(const TrainingPrompt& p) {
  KVKEEP_REQUIRE(p.keys.dim() == 3 && p.keys.sizes() == p.values.sizes() && p.keys.size(0) >= 1,
                 "training: keys or values do not fit; allowed [Hkv, T, D] twice");
  const std::int64_t tokens = p.keys.size(1);
  KVKEEP_REQUIRE(static_cast<std::int64_t>(p.surprisal.size()) == tokens, "training: ", p.surprisal.size(),
                 " surprisals; allowed one for each of ", tokens, " tokens");
  KVKEEP_REQUIRE(!p.positions.empty(), "training: positions are empty; allowed one or more");
  for (const std::int32_t q : p.positions)
    KVKEEP_REQUIRE(q >= 0 && q < tokens, "training: a query is at position ", q, "; allowed 0 to ", tokens - 1);
  for (std::size_t i = 0; i < p.spans.size(); ++i)
    KVKEEP_REQUIRE(
        p.spans[i].begin >= (i == 0 ? 0 : p.spans[i - 1].end) && p.spans[i].length() >= 1 && p.spans[i].end <= tokens,
        "training: span ", i, " is empty, overlaps the last one, or is out of range; allowed ascending spans");
}

void check(const TrainingLayer& l, const TrainedParameters& p, const TrainingOptions& options) {
  require_no_problems("training step", options.problems());
  check(static_cast<const TrainingPrompt&>(l));
  KVKEEP_REQUIRE(l.queries.dim() == 3 && l.queries.size(0) == static_cast<std::int64_t>(l.positions.size()) &&
                     l.queries.size(2) == l.keys.size(2) && l.queries.size(1) >= l.keys.size(0) &&
                     l.queries.size(1) % l.keys.size(0) == 0,
                 "training step: queries do not fit; allowed [", l.positions.size(), ", a multiple of ", l.keys.size(0),
                 ", ", l.keys.size(2), "], one for each position");
  const std::int64_t heads = l.queries.size(1), dim = l.keys.size(2);
  KVKEEP_REQUIRE(l.head.dim() == 2 && l.head.size(1) == heads * dim,
                 "training step: the readout does not fit; allowed [vocab, ", heads * dim, "]");
  KVKEEP_REQUIRE(p.projections.dim() == 3 && p.projections.size(0) == heads && p.projections.size(2) == dim &&
                     p.thresholds.dim() == 1 && p.thresholds.size(0) == heads,
                 "training step: W or tau do not fit; allowed [", heads, ", d', ", dim, "] and [", heads, "]");
}

}  // namespace

TrainingMemory::TrainingMemory(const TrainingPrompt& prompt, std::int64_t max_rank) : scale_(prompt.scale) {
  check(prompt);
  rows_ = {prompt.keys.to(kFloat64), prompt.values.to(kFloat64)};
  const auto spans = static_cast<std::int64_t>(prompt.spans.size()), heads = rows_[0].size(0), dim = rows_[0].size(2);
  for (Tensor& c : coarse_) c = at::zeros({heads, spans, dim}, doubles());
  log_length_ = at::zeros({spans}, doubles());
  spectra_ = at::zeros({spans, heads, 2, max_rank}, doubles()),
  present_ = at::zeros({spans, heads, 2, max_rank}, doubles());
  for (std::int64_t s = 0; s < spans; ++s) decompose(prompt, s);
  admit(prompt);
}

void TrainingMemory::decompose(const TrainingPrompt& prompt, std::int64_t span) {
  const Span at = prompt.spans[static_cast<std::size_t>(span)];
  std::vector<double> weights = span_weights(
      std::span(prompt.surprisal).subspan(static_cast<std::size_t>(at.begin), static_cast<std::size_t>(at.length())));
  const Tensor w = at::from_blob(weights.data(), {1, at.length()}, doubles());
  log_length_.select(0, span).fill_(std::log(static_cast<double>(at.length())));
  const Tensor rows = at::stack({rows_[0].narrow(1, at.begin, at.length()), rows_[1].narrow(1, at.begin, at.length())},
                                1);  // [Hkv, 2, L, D]
  for (std::int64_t side = 0; side < 2; ++side)
    coarse_[static_cast<std::size_t>(side)].select(1, span).copy_(at::matmul(w, rows.select(1, side)).squeeze(1));
  const std::int64_t rank = std::min({rows.size(2), rows.size(3), spectra_.size(3)});
  const auto [u, values, v] = at::linalg_svd(rows, false);
  decomposed_.push_back({u.narrow(3, 0, rank), v.narrow(2, 0, rank), values.narrow(2, 0, rank)});
  spectra_.select(0, span).narrow(2, 0, rank).copy_(decomposed_.back().values);
  present_.select(0, span).narrow(2, 0, rank).fill_(1);
}

void TrainingMemory::admit(const TrainingPrompt& prompt) {
  const auto spans = static_cast<std::int64_t>(prompt.spans.size()), tokens = rows_[0].size(1),
             n = static_cast<std::int64_t>(prompt.positions.size());
  std::vector<std::int64_t> span_of(static_cast<std::size_t>(tokens), spans);
  for (std::int64_t s = 0; s < spans; ++s)
    std::fill_n(span_of.begin() + prompt.spans[static_cast<std::size_t>(s)].begin,
                prompt.spans[static_cast<std::size_t>(s)].length(), s);
  span_of_ = integers(span_of);
  Tensor admitted = at::zeros({n, spans + 1}, marks());  // the last: tokens in no span
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t before_window = std::max(0, prompt.positions[static_cast<std::size_t>(i)] + 1 - prompt.recent);
    admitted.select(0, i)
        .narrow(0, 0, std::ranges::count_if(prompt.spans, [&](const Span& s) { return s.end <= before_window; }))
        .fill_(1);  // spans ascend: the first ones
  }
  admitted_ = admitted.narrow(1, 0, spans).contiguous();
  const Tensor positions = integers({prompt.positions.begin(), prompt.positions.end()}).unsqueeze(1);
  const Tensor seen = at::arange(tokens, at::TensorOptions().dtype(c10::ScalarType::Long)).unsqueeze(0) <= positions;
  causal_ = shut_unless(seen);
  dense_ = shut_unless(seen.logical_and(admitted.index_select(1, span_of_).logical_not()));
  folded_ = shut_unless(admitted_);
}

/// [n, Hq, X] to [Hkv, n * G, X].
Tensor TrainingMemory::by_kv_head(const Tensor& of_queries) const {
  const std::int64_t n = of_queries.size(0), kv = rows_[0].size(0), group = of_queries.size(1) / kv;
  return of_queries.view({n, kv, group, -1}).permute({1, 0, 2, 3}).reshape({kv, n * group, of_queries.size(2)});
}

/// And back.
Tensor TrainingMemory::by_query(const Tensor& of_heads) const {
  const std::int64_t kv = rows_[0].size(0), n = admitted_.size(0), group = of_heads.size(1) / n;
  return of_heads.view({kv, n, group, -1}).permute({1, 0, 2, 3}).reshape({n, kv * group, of_heads.size(2)});
}

TrainingMemory::Exact TrainingMemory::exact(const Tensor& queries, double coverage) const {
  const Tensor q = by_kv_head(queries.to(kFloat64));
  const Tensor p = at::softmax(by_query(at::matmul(q, rows_[0].transpose(1, 2)) * scale_) + causal_.unsqueeze(1), 2);
  const std::int64_t spans = admitted_.size(1);
  const Tensor mass =
      at::zeros({p.size(0), p.size(1), spans + 1}, doubles()).index_add(2, span_of_, p).narrow(2, 0, spans) *
      admitted_.unsqueeze(1);
  std::vector<std::int64_t> counts;
  for (std::int64_t i = 0; i < admitted_.size(0); ++i)
    counts.push_back(admitted_.select(0, i).sum().item<std::int64_t>());
  return {by_query(at::matmul(by_kv_head(p), rows_[1])), mass, covering(mass, counts, coverage)};
}

SoftGates::SoftGates(std::array<Tensor, 3> weights, std::array<Tensor, 3> biases)
    : weights_(std::move(weights)), biases_(std::move(biases)) {
  const auto own = [](const std::array<Tensor, 3>& from) {
    return std::array<kvkeep::Tensor, 3>{from[0].detach(), from[1].detach(), from[2].detach()};
  };
  static_cast<void>(RankGates(own(weights_), own(biases_)));  // checks them
}

Tensor SoftGates::gates(const Tensor& singular_values, const Tensor& coarse_keys) const {
  constexpr double kTiny = 1e-8;
  const Tensor shares = singular_values / (singular_values.narrow(1, 0, 1) + kTiny);
  const Tensor directions = coarse_keys / coarse_keys.norm(2, {1}, true).clamp_min(kTiny);
  Tensor x = at::cat({shares, directions}, 1);
  for (std::size_t i = 0; i < 3; ++i) {
    x = at::linear(x, weights_[i], biases_[i]);
    x = i < 2 ? at::gelu(x) : x.sigmoid();
  }
  return x;
}

Tensor TrainingMemory::gates(const SoftGates& gates) const {
  const std::int64_t spans = spectra_.size(0), heads = spectra_.size(1), max_rank = spectra_.size(3),
                     dim = coarse_[0].size(2);
  if (spans == 0) return spectra_;
  const Tensor directions =
      coarse_[0].transpose(0, 1).unsqueeze(2).expand({spans, heads, 2, dim}).reshape({-1, dim});  // keys', for values
                                                                                                  // too
  return gates.gates(spectra_.view({-1, max_rank}), directions).view({spans, heads, 2, max_rank}) * present_;
}

Tensor TrainingMemory::routing_logits(const Tensor& queries, const Tensor& projections) const {
  const std::int64_t group = queries.size(1) / rows_[0].size(0);
  const Tensor summaries =
      at::matmul(projections, coarse_[0].transpose(1, 2).repeat_interleave(group, 0));  // [Hq, d', spans]
  const Tensor directions = summaries / summaries.norm(2, {1}, true).clamp_min(kLeastNorm);
  const Tensor asked = at::matmul(projections, queries.permute({1, 2, 0}));  // [Hq, d', n]
  return at::matmul(asked.transpose(1, 2), directions).transpose(0, 1).contiguous() /
             std::sqrt(static_cast<double>(projections.size(1))) +
         log_length_;
}

TrainingMemory::Answer TrainingMemory::answer(const Tensor& queries, const Tensor& projections,
                                              const Tensor& thresholds, const Tensor& gates, double temperature) const {
  const Tensor all = queries.to(kFloat64), admitted = admitted_.unsqueeze(1).to(kFloat64);
  Answer out;
  out.logits = routing_logits(all, projections);
  out.relevance = out.logits.sigmoid();
  const Tensor tau = thresholds.view({1, -1, 1}), soft = ((out.relevance - tau) / temperature).sigmoid(),
               hard = (out.relevance > tau).to(kFloat64).detach() * admitted;
  out.zoomed = hard + (soft - soft.detach()) * admitted;

  // Dense rows, coarse entries, then the rows of every span that any query asks for. Gates are added to the logits as
  // logarithms.
  const std::int64_t n = all.size(0), kv = rows_[0].size(0), group = all.size(1) / kv, spans = admitted_.size(1);
  std::array<std::vector<Tensor>, 2> entries;
  for (std::size_t side = 0; side < 2; ++side) entries[side] = {rows_[side], coarse_[side]};
  std::vector<Tensor> bias{dense_.unsqueeze(1).expand({n, all.size(1), dense_.size(1)}),
                           folded_.unsqueeze(1) + log_length_ + log_gate(1 - out.zoomed)};
  const Tensor wanted_by_group = hard.view({n, kv, group, spans}).amax({2}),
               wanted = hard.sum(at::IntArrayRef({0, 1})).contiguous();
  std::vector<std::int64_t> span_of_row;
  for (std::int64_t s = 0; s < spans; ++s) {
    if (wanted.const_data_ptr<double>()[s] == 0) continue;
    const Decomposed& d = decomposed_[static_cast<std::size_t>(s)];
    const Tensor weights = gates.select(0, s).narrow(2, 0, d.values.size(2)) * d.values;
    const Tensor shown = at::matmul(d.left * weights.unsqueeze(2), d.right);  // [Hkv, 2, L, D]
    for (std::int64_t side = 0; side < 2; ++side)
      entries[static_cast<std::size_t>(side)].push_back(shown.select(1, side));
    span_of_row.insert(span_of_row.end(), static_cast<std::size_t>(shown.size(2)), s);
  }
  if (!span_of_row.empty()) {
    const Tensor span_of = integers(span_of_row);
    const Tensor there = shut_unless(wanted_by_group.repeat_interleave(group, 1).index_select(2, span_of) >
                                     0);  // rows are present if any head of the group asks
    bias.push_back(log_gate(out.zoomed).index_select(2, span_of) + there);
  }
  const Tensor logits =
      at::matmul(by_kv_head(all), at::cat(entries[0], 1).transpose(1, 2)) * scale_ + by_kv_head(at::cat(bias, 2));
  out.outputs = by_query(at::matmul(at::softmax(logits, 2), at::cat(entries[1], 1)));
  return out;
}

void TrainingLosses::add(const TrainingMemory& memory, const TrainingMemory::Answer& answer, const Tensor& targets,
                         const Tensor& gates) {
  const Tensor y = targets.to(kFloat64),
               own = memory.admitted_.unsqueeze(1).expand(targets.sizes()).to(c10::ScalarType::Bool);
  const Tensor each =
      -(options_.positive_weight * y * at::log_sigmoid(answer.logits) + (1 - y) * at::log_sigmoid(-answer.logits));
  zoom_.push_back(each.masked_select(own));
  const Tensor zoomed = answer.zoomed.sum() / static_cast<double>(memory.admitted_.size(0));
  zoomed_.push_back(options_.published ? zoomed.detach() : zoomed);
  const Tensor squares = memory.spectra_.square(), left_out = ((1 - gates).square() * squares).sum(-1);
  left_out_.push_back(
      (options_.published ? left_out : left_out / squares.sum(-1).clamp_min(kLeastSquares)).reshape({-1}));
  kept_.push_back(gates.sum());
}

TrainingLosses::Sum TrainingLosses::sum(const Tensor& student_logits, const Tensor& teacher_logits) const {
  const auto mean = [](const Tensor& t) { return t.numel() == 0 ? zero() : t.mean(); };
  const Tensor wanted = at::log_softmax(teacher_logits, 1), left_out = at::cat(left_out_);
  Sum s;
  s.distill = (wanted.exp() * (wanted - at::log_softmax(student_logits, 1))).sum(1).mean();
  s.zoom = mean(at::cat(zoom_));
  s.recon = options_.published ? left_out.sum() : mean(left_out);
  s.budget = at::stack(zoomed_).sum() + options_.rank_weight * at::stack(kept_).sum();
  s.loss =
      s.distill + options_.zoom_weight * s.zoom + options_.recon_weight * s.recon + options_.budget_weight * s.budget;
  return s;
}

TrainingStep training_step(const TrainingLayer& layer, const TrainedParameters& parameters,
                           const TrainingOptions& options) {
  check(layer, parameters, options);
  const c10::AutoGradMode with_gradients(true);
  TrainedParameters own{leaf(parameters.projections), leaf(parameters.thresholds), {}, {}};
  for (std::size_t i = 0; i < 3; ++i)
    own.gate_weights[i] = leaf(parameters.gate_weights[i]), own.gate_biases[i] = leaf(parameters.gate_biases[i]);
  const SoftGates rank_gates(own.gate_weights, own.gate_biases);
  KVKEEP_REQUIRE(rank_gates.key_dim() == layer.keys.size(2), "training step: gates read keys of ", rank_gates.key_dim(),
                 " numbers; allowed ", layer.keys.size(2));

  const TrainingMemory memory(layer, rank_gates.max_rank());
  const Tensor gates = memory.gates(rank_gates), head = layer.head.to(kFloat64).t();
  const TrainingMemory::Exact teacher = memory.exact(layer.queries, options.coverage);
  const TrainingMemory::Answer student =
      memory.answer(layer.queries, own.projections, own.thresholds, gates, options.temperature);
  TrainingLosses losses(options);
  losses.add(memory, student, teacher.targets, gates);
  TrainingStep step;
  const auto readout = [&head](const Tensor& outputs) {
    return at::matmul(outputs.reshape({outputs.size(0), -1}), head);
  };
  const Tensor student_logits = readout(student.outputs);
  step.teacher_logits = readout(teacher.outputs);
  const TrainingLosses::Sum sum = losses.sum(student_logits, step.teacher_logits);
  if (sum.loss.requires_grad()) sum.loss.backward();

  const auto gradient = [](const Tensor& of) {
    return of.grad().defined() ? of.grad().detach() : at::zeros(of.sizes(), doubles());
  };
  step.gradients = {gradient(own.projections), gradient(own.thresholds), {}, {}};
  for (std::size_t i = 0; i < 3; ++i)
    step.gradients.gate_weights[i] = gradient(own.gate_weights[i]),
    step.gradients.gate_biases[i] = gradient(own.gate_biases[i]);
  step.loss = sum.loss.item<double>(), step.distill = sum.distill.item<double>(), step.zoom = sum.zoom.item<double>(),
  step.recon = sum.recon.item<double>(), step.budget = sum.budget.item<double>();
  step.admitted = memory.admitted(), step.targets = teacher.targets,
  step.zoomed = student.zoomed.detach().to(c10::ScalarType::Byte).contiguous();
  step.relevance = (student.relevance.detach() * memory.admitted().unsqueeze(1)).contiguous();
  step.gates = gates.detach(), step.student_logits = student_logits.detach();
  return step;
}

}  // namespace kvkeep::lm
