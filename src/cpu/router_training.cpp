#include "kvkeep/memory/router_training.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linalg_svd.h>
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
#include <numeric>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/memory/rank_gates.h"

namespace kvkeep {
namespace {

constexpr ScalarType kFloat64 = c10::ScalarType::Double;
constexpr double kLeastNorm = 1e-8;
constexpr double kLeastGate = 1e-6;  ///< the published log-gates: a shut entry keeps this much, so that logarithms stay finite

at::TensorOptions doubles() { return at::TensorOptions().dtype(kFloat64); }
at::TensorOptions marks() { return at::TensorOptions().dtype(c10::ScalarType::Byte); }
Tensor leaf(const Tensor& t) { return t.to(kFloat64).detach().clone().requires_grad_(true); }
Tensor zero() { return at::zeros({}, doubles()); }
Tensor log_gate(const Tensor& z) { return z.clamp(kLeastGate, 1).log(); }

/// A span's rows of one head and side, decomposed: constants of training.
struct Decomposed {
  Tensor left, right;  ///< f64 [L, R], [R, D]
  Tensor values;       ///< f64 [R]
};

/// Everything that does not change between queries.
class Memory {
 public:
  Memory(const TrainingLayer& layer, const RankGates& gates) : keys(layer.keys.to(kFloat64)), values(layer.values.to(kFloat64)), heads_(keys.size(0)), max_rank_(gates.max_rank()) {
    const auto count = static_cast<std::int64_t>(layer.spans.size()), dim = keys.size(2);
    coarse = {at::zeros({heads_, count, dim}, doubles()), at::zeros({heads_, count, dim}, doubles())};
    log_length = at::zeros({count}, doubles());
    const Tensor spectra = at::zeros({count, heads_, 2, max_rank_}, doubles()), present = at::zeros({count, heads_, 2, max_rank_}, doubles());
    for (std::int64_t s = 0; s < count; ++s) {
      const Span at = layer.spans[static_cast<std::size_t>(s)];
      std::vector<double> weights = span_weights(std::span(layer.surprisal).subspan(static_cast<std::size_t>(at.begin), static_cast<std::size_t>(at.length())));
      const Tensor w = at::from_blob(weights.data(), {1, at.length()}, doubles());
      log_length.select(0, s).fill_(std::log(static_cast<double>(at.length())));
      const std::int64_t rank = std::min({static_cast<std::int64_t>(at.length()), dim, max_rank_});
      for (std::int64_t h = 0; h < heads_; ++h)
        for (std::size_t side = 0; side < 2; ++side) {
          const Tensor rows = (side == 0 ? keys : values).select(0, h).narrow(0, at.begin, at.length());
          coarse[side].select(0, h).select(0, s).copy_(at::matmul(w, rows).squeeze(0));
          const auto [u, values_of, v] = at::linalg_svd(rows, false);
          decomposed_.push_back({u.narrow(1, 0, rank), v.narrow(0, 0, rank), values_of.narrow(0, 0, rank)});
          spectra.select(0, s).select(0, h).select(0, static_cast<std::int64_t>(side)).narrow(0, 0, rank).copy_(decomposed_.back().values);
          present.select(0, s).select(0, h).select(0, static_cast<std::int64_t>(side)).narrow(0, 0, rank).fill_(1);
        }
    }
    const Tensor directions = coarse[0].transpose(0, 1).unsqueeze(2).expand({count, heads_, 2, dim}).reshape({count * heads_ * 2, dim});  // keys', for values too
    own_gates = count == 0 ? spectra : gates.gates(spectra.view({-1, max_rank_}), directions).view({count, heads_, 2, max_rank_}) * present;
    squares_ = spectra.square();
  }

  /// What a zoom shows, with every component weighed by its gate: [L, D].
  [[nodiscard]] Tensor rows(std::int64_t span, std::int64_t head, std::int64_t side) const {
    const Decomposed& d = decomposed_[static_cast<std::size_t>((span * heads_ + head) * 2 + side)];
    const Tensor gate = own_gates.select(0, span).select(0, head).select(0, side).narrow(0, 0, d.values.size(0));
    return at::matmul(d.left * (gate * d.values), d.right);
  }

  /// Squares that gates leave out: their mean share, or as published their sum.
  [[nodiscard]] Tensor reconstruction(bool published) const {
    const Tensor out = ((1 - own_gates).square() * squares_).sum(-1);
    if (published) return out.sum();
    return out.numel() == 0 ? zero() : (out / squares_.sum(-1).clamp_min(1e-300)).mean();
  }

  Tensor keys, values;             ///< f64 [Hkv, T, D]
  std::array<Tensor, 2> coarse;    ///< f64 [Hkv, spans, D]
  Tensor log_length;               ///< f64 [spans]
  Tensor own_gates;                ///< f64 [spans, Hkv, 2, max_rank], with gradient

 private:
  std::int64_t heads_, max_rank_;
  std::vector<Decomposed> decomposed_;
  Tensor squares_;
};

/// 1 for the fewest spans, best first, that hold `coverage` of the mass of all: [G, k] in, u8 out.
Tensor covering(const Tensor& mass, double coverage) {
  Tensor out = at::zeros(mass.sizes(), marks());
  const Tensor m = mass.contiguous();
  const std::int64_t k = m.size(1);
  std::vector<std::int64_t> order(static_cast<std::size_t>(k));
  for (std::int64_t i = 0; i < m.size(0); ++i) {
    const double* own = m.const_data_ptr<double>() + i * k;
    const double all = std::accumulate(own, own + k, 0.0);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [own](std::int64_t a, std::int64_t b) { return own[a] > own[b]; });
    double held = 0;
    for (const std::int64_t s : order) {
      out.data_ptr<std::uint8_t>()[i * k + s] = 1;
      held += all > 0 ? own[s] / all : 0;
      if (held >= coverage) break;
    }
  }
  return out;
}

/// One query's share of the losses, and what it saw.
struct Position {
  std::vector<Tensor> student, teacher;  ///< [G, D] a KV head
  std::vector<Tensor> zoom_losses;       ///< [G, k]
  Tensor zoomed = zero();                ///< count, with a gradient unless published
};

/// Runs queries one after the other.
class Training {
 public:
  Training(const TrainingLayer& layer, const Memory& memory, const Tensor& projections, const Tensor& thresholds, const TrainingOptions& options, TrainingStep& step)
      : layer_(layer), memory_(memory), projections_(projections), thresholds_(thresholds), options_(options), step_(step), group_(layer.queries.size(1) / memory.keys.size(0)) {}

  [[nodiscard]] Position run(std::int64_t n) {
    Position out;
    seen_ = layer_.positions[static_cast<std::size_t>(n)] + 1;
    const std::int64_t before_window = std::max<std::int64_t>(0, seen_ - layer_.recent);
    admitted_ = std::ranges::count_if(layer_.spans, [&](const Span& s) { return s.end <= before_window; });  // spans ascend: the first ones
    step_.admitted.select(0, n).narrow(0, 0, admitted_).fill_(1);
    std::vector<std::int64_t> dense;
    std::size_t next = 0;
    for (std::int64_t t = 0; t < seen_; ++t) {
      while (next < static_cast<std::size_t>(admitted_) && layer_.spans[next].end <= t) ++next;
      if (next >= static_cast<std::size_t>(admitted_) || t < layer_.spans[next].begin) dense.push_back(t);
    }
    dense_ = at::from_blob(dense.data(), {static_cast<std::int64_t>(dense.size())}, at::TensorOptions().dtype(c10::ScalarType::Long)).clone();
    for (std::int64_t kv = 0; kv < memory_.keys.size(0); ++kv) attend(n, kv, out);
    return out;
  }

 private:
  void attend(std::int64_t n, std::int64_t kv, Position& out) {
    const Tensor q = layer_.queries.select(0, n).narrow(0, kv * group_, group_).to(kFloat64);
    const Tensor keys = memory_.keys.select(0, kv).narrow(0, 0, seen_), values = memory_.values.select(0, kv).narrow(0, 0, seen_);
    const Tensor p = at::softmax(at::matmul(q, keys.t()) * layer_.scale, 1);
    out.teacher.push_back(at::matmul(p, values));

    std::vector<Tensor> mass{at::zeros({group_, 0}, doubles())};
    for (std::int64_t s = 0; s < admitted_; ++s) {
      const Span at = layer_.spans[static_cast<std::size_t>(s)];
      mass.push_back(p.narrow(1, at.begin, at.length()).sum(1, true));
    }
    const Tensor targets = covering(at::cat(mass, 1), options_.coverage), logits = routing_logits(q, kv), relevance = logits.sigmoid();
    const Tensor tau = thresholds_.narrow(0, kv * group_, group_).unsqueeze(1), soft = ((relevance - tau) / options_.temperature).sigmoid(), hard = (relevance > tau).to(kFloat64).detach();
    const Tensor z = hard + (soft - soft.detach()), y = targets.to(kFloat64);
    out.zoom_losses.push_back(-(options_.positive_weight * y * at::log_sigmoid(logits) + (1 - y) * at::log_sigmoid(-logits)));
    out.zoomed = out.zoomed + (options_.published ? hard : z).sum();
    const auto note = [&](const Tensor& to, const Tensor& from) { to.select(0, n).narrow(0, kv * group_, group_).narrow(1, 0, admitted_).copy_(from.detach()); };
    note(step_.targets, targets), note(step_.zoomed, hard), note(step_.relevance, relevance);
    out.student.push_back(student(q, kv, hard, z));
  }

  /// [G, k] what the sigmoid of relevance is taken of.
  [[nodiscard]] Tensor routing_logits(const Tensor& q, std::int64_t kv) const {
    const Tensor w = projections_.narrow(0, kv * group_, group_);
    const Tensor summaries = at::matmul(w, memory_.coarse[0].select(0, kv).narrow(0, 0, admitted_).t());  // [G, d', k]
    const Tensor directions = summaries / summaries.norm(2, {1}, true).clamp_min(kLeastNorm);
    return (at::matmul(w, q.unsqueeze(2)) * directions).sum(1) / std::sqrt(static_cast<double>(w.size(1))) + memory_.log_length.narrow(0, 0, admitted_);
  }

  /// Attention over the memory, gates as logarithms on the logits: [G, D].
  [[nodiscard]] Tensor student(const Tensor& q, std::int64_t kv, const Tensor& hard, const Tensor& z) const {
    std::vector<Tensor> keys{memory_.keys.select(0, kv).index_select(0, dense_), memory_.coarse[0].select(0, kv).narrow(0, 0, admitted_)};
    std::vector<Tensor> values{memory_.values.select(0, kv).index_select(0, dense_), memory_.coarse[1].select(0, kv).narrow(0, 0, admitted_)};
    std::vector<Tensor> bias{at::zeros({group_, dense_.size(0)}, doubles()), memory_.log_length.narrow(0, 0, admitted_) + log_gate(1 - z)};
    for (std::int64_t s = 0; s < admitted_; ++s) {
      if (hard.select(1, s).sum().item<double>() == 0) continue;  // rows are there where any head of the group asks
      keys.push_back(memory_.rows(s, kv, 0));
      values.push_back(memory_.rows(s, kv, 1));
      bias.push_back(log_gate(z.narrow(1, s, 1)).expand({group_, keys.back().size(0)}));
    }
    return at::matmul(at::softmax(at::matmul(q, at::cat(keys).t()) * layer_.scale + at::cat(bias, 1), 1), at::cat(values));
  }

  const TrainingLayer& layer_;
  const Memory& memory_;
  const Tensor &projections_, &thresholds_;
  const TrainingOptions& options_;
  TrainingStep& step_;
  std::int64_t group_, seen_ = 0, admitted_ = 0;
  Tensor dense_;
};

void check(const TrainingLayer& l, const TrainedParameters& p, const TrainingOptions& options) {
  std::string wrong;
  for (const std::string& one : options.problems()) wrong += (wrong.empty() ? "" : "; ") + one;
  require(wrong.empty(), "training step: ", wrong);
  require(l.keys.dim() == 3 && l.keys.sizes() == l.values.sizes() && l.queries.dim() == 3 && l.queries.size(2) == l.keys.size(2) && l.queries.size(1) % l.keys.size(0) == 0 && l.queries.size(0) >= 1,
          "training step: keys, values or queries do not fit; allowed [Hkv, T, D] twice and [n, Hq, D] with Hq a multiple of Hkv and at least one query");
  const std::int64_t heads = l.queries.size(1), dim = l.keys.size(2), tokens = l.keys.size(1);
  require(static_cast<std::int64_t>(l.positions.size()) == l.queries.size(0) && static_cast<std::int64_t>(l.surprisal.size()) == tokens, "training step: ", l.positions.size(), " positions and ", l.surprisal.size(),
          " surprisals; allowed one for each query and token");
  for (const std::int32_t q : l.positions) require(q >= 0 && q < tokens, "training step: a query stands at position ", q, "; allowed 0 to ", tokens - 1);
  for (std::size_t i = 0; i < l.spans.size(); ++i)
    require(l.spans[i].begin >= (i == 0 ? 0 : l.spans[i - 1].end) && l.spans[i].length() >= 1 && l.spans[i].end <= tokens, "training step: span ", i, " does not follow the one before, or lies outside; allowed ascending spans");
  require(l.head.dim() == 2 && l.head.size(1) == heads * dim, "training step: the readout does not fit; allowed [vocab, ", heads * dim, "]");
  require(p.projections.dim() == 3 && p.projections.size(0) == heads && p.projections.size(2) == dim && p.thresholds.dim() == 1 && p.thresholds.size(0) == heads, "training step: W or tau do not fit; allowed [", heads,
          ", d', ", dim, "] and [", heads, "]");
}

}  // namespace

std::vector<std::string> TrainingOptions::problems() const {
  std::vector<std::string> found;
  const auto weight = [&](const char* name, double value) {
    if (!(value >= 0) || !std::isfinite(value)) found.push_back(text(name, ": ", value, "; allowed 0 or more"));
  };
  weight("zoom_weight", zoom_weight), weight("recon_weight", recon_weight), weight("budget_weight", budget_weight), weight("rank_weight", rank_weight), weight("positive_weight", positive_weight);
  if (!(coverage >= 0 && coverage <= 1)) found.push_back(text("coverage: ", coverage, "; allowed 0 to 1"));
  if (!(temperature > 0) || !std::isfinite(temperature)) found.push_back(text("temperature: ", temperature, "; allowed above 0"));
  return found;
}

TrainingStep training_step(const TrainingLayer& layer, const TrainedParameters& parameters, const TrainingOptions& options) {
  check(layer, parameters, options);
  const c10::AutoGradMode with_gradients(true);
  TrainedParameters own{leaf(parameters.projections), leaf(parameters.thresholds), {}, {}};
  for (std::size_t i = 0; i < 3; ++i) own.gate_weights[i] = leaf(parameters.gate_weights[i]), own.gate_biases[i] = leaf(parameters.gate_biases[i]);
  const RankGates gates(own.gate_weights, own.gate_biases);
  require(gates.key_dim() == layer.keys.size(2), "training step: gates read keys of ", gates.key_dim(), " numbers; allowed ", layer.keys.size(2));
  const Memory memory(layer, gates);

  const std::int64_t n = layer.queries.size(0), heads = layer.queries.size(1), spans = static_cast<std::int64_t>(layer.spans.size());
  TrainingStep step;
  step.admitted = at::zeros({n, spans}, marks());
  step.targets = at::zeros({n, heads, spans}, marks()), step.zoomed = at::zeros({n, heads, spans}, marks());
  step.relevance = at::zeros({n, heads, spans}, doubles());
  Training training(layer, memory, own.projections, own.thresholds, options, step);
  const Tensor head = layer.head.to(kFloat64);
  std::vector<Tensor> zoom_losses, student, teacher;
  Tensor distill = zero(), zoomed = zero();
  for (std::int64_t i = 0; i < n; ++i) {
    const Position at = training.run(i);
    student.push_back(at::matmul(head, at::cat(at.student).view({-1})));
    teacher.push_back(at::matmul(head, at::cat(at.teacher).view({-1})));
    const Tensor wanted = at::log_softmax(teacher.back(), 0);
    distill = distill + (wanted.exp() * (wanted - at::log_softmax(student.back(), 0))).sum() / static_cast<double>(n);
    zoomed = zoomed + at.zoomed / static_cast<double>(n);
    for (const Tensor& t : at.zoom_losses) zoom_losses.push_back(t.reshape({-1}));
  }
  const Tensor all_zooms = at::cat(zoom_losses), zoom = all_zooms.numel() == 0 ? zero() : all_zooms.mean(), recon = memory.reconstruction(options.published), budget = zoomed + options.rank_weight * memory.own_gates.sum();
  const Tensor loss = distill + options.zoom_weight * zoom + options.recon_weight * recon + options.budget_weight * budget;
  if (loss.requires_grad()) loss.backward();

  const auto gradient = [](const Tensor& of) { return of.grad().defined() ? of.grad().detach() : at::zeros(of.sizes(), doubles()); };
  step.gradients = {gradient(own.projections), gradient(own.thresholds), {}, {}};
  for (std::size_t i = 0; i < 3; ++i) step.gradients.gate_weights[i] = gradient(own.gate_weights[i]), step.gradients.gate_biases[i] = gradient(own.gate_biases[i]);
  step.loss = loss.item<double>(), step.distill = distill.item<double>(), step.zoom = zoom.item<double>(), step.recon = recon.item<double>(), step.budget = budget.item<double>();
  step.gates = memory.own_gates.detach();
  step.student_logits = at::stack(student).detach(), step.teacher_logits = at::stack(teacher).detach();
  return step;
}

}  // namespace kvkeep
