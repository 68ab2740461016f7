// SPDX-License-Identifier: Apache-2.0
// Losses of router and gates: gradients against finite differences, and what a query may see.

#include "kvlab/router_training.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "folded_prompt.h"
#include "kvkeep/core/error.h"

namespace kvkeep::lm::router_training_test {
namespace {

using namespace kvkeep::testing;

constexpr at::ScalarType kFloat64 = c10::ScalarType::Double;

struct Case {
  explicit Case(std::uint64_t seed) {
    FoldedPrompt p(seed, 70, 1, 2, 6, 2);
    oracle::Random random(seed + 1);
    layer.keys = p.keys, layer.values = p.values, layer.queries = p.queries;
    layer.positions = {40, 69};
    layer.head = normals(random, {5, 12});
    layer.surprisal = p.surprisal;
    p.segmenter.recent = 9;
    layer.spans = segment(p.surprisal, p.segmenter).spans;
    layer.recent = 9;
    layer.scale = 0.4;
    parameters.projections = normals(random, {2, 3, 6}).to(Dtype::f64);
    parameters.thresholds = (at::zeros({2}) + 0.85).to(kFloat64);
    const std::int64_t widths[] = {10, 7, 7, 4};  // max_rank 4
    for (std::size_t i = 0; i < 3; ++i)
      parameters.gate_weights[i] = normals(random, {widths[i + 1], widths[i]}, 0.5).to(Dtype::f64),
      parameters.gate_biases[i] = normals(random, {widths[i + 1]}, 0.5).to(Dtype::f64);
  }

  TrainingLayer layer;
  TrainedParameters parameters;
};

TEST(RouterTraining, HasTheGradientsOfFiniteDifferencesWhereNothingSteps) {
  // The count of zoomed spans and their log-gates have gradients that no finite difference sees, so the router is
  // checked by its smooth loss alone.
  Case c(100);
  TrainingOptions smooth;
  smooth.budget_weight = 0;
  const auto differ = [&](at::Tensor& parameter, const at::Tensor& gradient, const auto& loss_of, const char* name) {
    for (std::int64_t i = 0; i < parameter.numel(); i += 5) {
      double& x = parameter.data_ptr<double>()[i];
      const double before = x, step = 1e-6;
      x = before + step;
      const double up = loss_of(training_step(c.layer, c.parameters, smooth));
      x = before - step;
      const double down = loss_of(training_step(c.layer, c.parameters, smooth));
      x = before;
      EXPECT_NEAR(gradient.const_data_ptr<double>()[i], (up - down) / (2 * step), 1e-6) << name << " " << i;
    }
  };
  const TrainingStep all = training_step(c.layer, c.parameters, smooth);
  EXPECT_GT(all.zoomed.sum().item<std::int64_t>(), 0);
  EXPECT_GT(all.distill, 0);
  const auto whole = [](const TrainingStep& s) { return s.loss; };
  for (std::size_t i = 0; i < 3; ++i) {
    differ(c.parameters.gate_weights[i], all.gradients.gate_weights[i], whole, "weight");
    differ(c.parameters.gate_biases[i], all.gradients.gate_biases[i], whole, "bias");
  }
  // With tau out of reach nothing is zoomed and log-gates stay; what is left of the gradient of W is that of distill
  // through 1 - z, which is removed by an equal student and teacher.
  c.layer.head = at::zeros({5, 12});
  const TrainingStep routed = training_step(c.layer, c.parameters, smooth);
  EXPECT_NEAR(routed.distill, 0, 1e-12);
  differ(
      c.parameters.projections, routed.gradients.projections,
      [&](const TrainingStep& s) { return smooth.zoom_weight * s.zoom; }, "W");
}

TEST(RouterTraining, PullsThresholdsByTheSigmoidThatStandsForAZoom) {
  Case c(101);
  c.layer.head = at::zeros({5, 12});
  TrainingOptions o;
  o.zoom_weight = 0, o.recon_weight = 0, o.budget_weight = 1, o.rank_weight = 0;
  const TrainingStep step = training_step(c.layer, c.parameters, o);
  for (std::int64_t h = 0; h < 2; ++h) {
    double expected = 0;
    for (std::int64_t n = 0; n < 2; ++n)
      for (std::int64_t s = 0; s < step.admitted.size(1); ++s) {
        if (step.admitted.const_data_ptr<std::uint8_t>()[n * step.admitted.size(1) + s] == 0) continue;
        const double a = step.relevance.const_data_ptr<double>()[(n * 2 + h) * step.admitted.size(1) + s],
                     p = 1 / (1 + std::exp(-(a - 0.85) / 0.1));
        expected -= p * (1 - p) / 0.1 / 2;
      }
    EXPECT_NEAR(step.gradients.thresholds.const_data_ptr<double>()[h], expected, 1e-6);
  }
  EXPECT_NEAR(step.budget, static_cast<double>(step.zoomed.sum().item<std::int64_t>()) / 2, 1e-12);
  o.published = true;
  EXPECT_EQ(training_step(c.layer, c.parameters, o).gradients.thresholds.abs().max().item<double>(), 0)
      << "the published count has no gradient";
}

TEST(RouterTraining, AdmitsSpansThatEndBeforeTheWindowOfTheQuery) {
  Case c(102);
  const TrainingStep step = training_step(c.layer, c.parameters, {});
  const std::int64_t spans = static_cast<std::int64_t>(c.layer.spans.size());
  int seen = 0;
  for (std::int64_t n = 0; n < 2; ++n)
    for (std::int64_t s = 0; s < spans; ++s) {
      const bool admitted = step.admitted.const_data_ptr<std::uint8_t>()[n * spans + s] != 0;
      EXPECT_EQ(admitted, c.layer.spans[static_cast<std::size_t>(s)].end <=
                              c.layer.positions[static_cast<std::size_t>(n)] + 1 - 9);
      for (std::int64_t h = 0; h < 2 && !admitted; ++h) {
        EXPECT_EQ(step.targets.const_data_ptr<std::uint8_t>()[(n * 2 + h) * spans + s], 0);
        EXPECT_EQ(step.relevance.const_data_ptr<double>()[(n * 2 + h) * spans + s], 0);
      }
      seen += admitted;
    }
  EXPECT_GT(seen, 0);
  EXPECT_LT(seen, 2 * spans);

  c.layer.positions = {3, 8};  // inside the window: nothing is folded, student and teacher are one
  const TrainingStep early = training_step(c.layer, c.parameters, {});
  EXPECT_EQ(early.zoom, 0);
  EXPECT_NEAR(early.distill, 0, 1e-12);
  EXPECT_LT(apart(early.student_logits, early.teacher_logits), 1e-12);
}

TEST(RouterTraining, AddsUpLayersAsMeansOverDecisionsAndSumsOverZoomedSpans) {
  Case first(104), second(105);
  second.layer.recent = 30;  // fewer spans are admitted: the means are over decisions, not over layers
  const TrainingOptions o;
  const auto step_of = [&](const Case& c) { return training_step(c.layer, c.parameters, o); };
  const TrainingStep one = step_of(first), two = step_of(second);
  TrainingLosses losses(o);
  for (const Case* c : {&first, &second}) {
    const SoftGates rank_gates(c->parameters.gate_weights, c->parameters.gate_biases);
    const TrainingMemory memory(c->layer, rank_gates.max_rank());
    const at::Tensor gates = memory.gates(rank_gates);
    losses.add(
        memory,
        memory.answer(c->layer.queries, c->parameters.projections, c->parameters.thresholds, gates, o.temperature),
        memory.exact(c->layer.queries, o.coverage).targets, gates);
  }
  const TrainingLosses::Sum sum = losses.sum(two.student_logits, two.teacher_logits);
  const auto weight = [](const TrainingStep& s) { return static_cast<double>(s.admitted.sum().item<std::int64_t>()); };
  ASSERT_NE(weight(one), weight(two));
  EXPECT_NEAR(sum.zoom.item<double>(), (weight(one) * one.zoom + weight(two) * two.zoom) / (weight(one) + weight(two)),
              1e-12);
  EXPECT_NEAR(sum.budget.item<double>(), one.budget + two.budget, 1e-10);
  const auto spans = [](const TrainingStep& s) { return static_cast<double>(s.gates.size(0)); };
  EXPECT_NEAR(sum.recon.item<double>(), (spans(one) * one.recon + spans(two) * two.recon) / (spans(one) + spans(two)),
              1e-12);
  EXPECT_NEAR(sum.distill.item<double>(), two.distill, 1e-12);
}

TEST(RouterTraining, OfAPromptThatFoldsNothingHasNothingToLearn) {
  Case c(106);
  c.layer.spans.clear();
  const TrainingStep step = training_step(c.layer, c.parameters, {});
  EXPECT_EQ(step.zoom, 0);
  EXPECT_EQ(step.recon, 0);
  EXPECT_EQ(step.budget, 0);
  EXPECT_NEAR(step.distill, 0, 1e-12);
  EXPECT_EQ(step.gradients.projections.abs().max().item<double>(), 0);
}

TEST(RouterTraining, SaysWhatShareOfTheTeachersAttentionEachAdmittedSpanDraws) {
  Case c(107);
  const TrainingMemory memory(c.layer, 4);
  const TrainingMemory::Exact exact = memory.exact(c.layer.queries, 0.9);
  const auto spans = static_cast<std::int64_t>(c.layer.spans.size());
  for (std::int64_t n = 0; n < 2; ++n)
    for (std::int64_t h = 0; h < 2; ++h) {
      std::vector<double> weights;
      double all = 0;
      for (std::int32_t t = 0; t <= c.layer.positions[static_cast<std::size_t>(n)]; ++t) {
        double dot = 0;
        for (std::int64_t d = 0; d < 6; ++d)
          dot += static_cast<double>(c.layer.queries.const_data_ptr<float>()[(n * 2 + h) * 6 + d]) *
                 c.layer.keys.const_data_ptr<float>()[t * 6 + d];
        weights.push_back(std::exp(c.layer.scale * dot));
        all += weights.back();
      }
      for (std::int64_t s = 0; s < spans; ++s) {
        double expected = 0;
        const Span at = c.layer.spans[static_cast<std::size_t>(s)];
        for (std::int32_t t = at.begin;
             t < at.end && memory.admitted().const_data_ptr<std::uint8_t>()[n * spans + s] != 0; ++t)
          expected += weights[static_cast<std::size_t>(t)] / all;
        EXPECT_NEAR(exact.mass.const_data_ptr<double>()[(n * 2 + h) * spans + s], expected, 1e-6);
      }
    }
}

TEST(RouterTraining, RefusesWhatDoesNotFit) {
  Case c(103);
  TrainingOptions o;
  o.temperature = 0;
  EXPECT_THROW(static_cast<void>(training_step(c.layer, c.parameters, o)), InvalidArgument);
  c.layer.positions[1] = 70;
  EXPECT_THROW(static_cast<void>(training_step(c.layer, c.parameters, {})), InvalidArgument);
  c.layer.positions[1] = 69;
  c.parameters.thresholds = at::zeros({3});
  EXPECT_THROW(static_cast<void>(training_step(c.layer, c.parameters, {})), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::lm::router_training_test
