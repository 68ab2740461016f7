// SPDX-License-Identifier: Apache-2.0
#include "comparison.h"

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <utility>

#include "kvkeep/memory/factors.h"
#include "kvkeep/torch.h"
#include "kvlab/span_memory.h"
#include "parallel.h"

namespace train {
namespace {

namespace lm = kvkeep::lm;
using torch::Tensor;

struct Result {
  double opened = 0;  ///< entries, summed over positions, layers and KV heads
  double places = 0;  ///< how many those are
  double divergence = 0;
  int64_t positions = 0, same = 0, look_ups = 0, right = 0;

  void add(const Result& r) {
    opened += r.opened, places += r.places, divergence += r.divergence;
    positions += r.positions, same += r.same, look_ups += r.look_ups, right += r.right;
  }
  double mean_opened() const { return places == 0 ? 0 : opened / places; }
};

/// u8 [1, Hq, spans]: what one query asks for.
using Rule = std::function<Tensor(size_t layer, const lm::SpanStore& spans, const Tensor& query, const Tensor& mass,
                                  const Tensor& targets)>;

/// A lesson as the library folds it.
class Exam {
 public:
  Exam(const Llama& model, const Lesson& lesson)
      : lesson_(lesson), scale_(1 / std::sqrt(static_cast<double>(model.shape().head_width))) {
    for (const TeacherLayer& layer : lesson.teacher)
      stores_.emplace_back(layer.keys, layer.values, lesson.surprisal, lesson.spans, kvkeep::FactorOptions{});
    const Tensor admitted = lesson.memories.front().admitted();
    for (size_t i = 0; i < lesson.positions.size(); ++i) {
      std::vector<int64_t> dense;
      const int64_t count = admitted.select(0, static_cast<int64_t>(i)).sum().item<int64_t>();
      for (int32_t t = 0, s = 0; t <= lesson.positions[i]; ++t) {
        while (s < count && lesson.spans[static_cast<size_t>(s)].end <= t) ++s;
        if (s >= count || t < lesson.spans[static_cast<size_t>(s)].begin) dense.push_back(t);
      }
      dense_.push_back(torch::tensor(dense, torch::kInt64));
    }
  }

  Result sit(const Llama& model, const Rule& rule) const {
    torch::NoGradGuard no_grad;
    Result result;
    const Tensor logits = stack_logits(model, lesson_, [&](size_t layer, const Tensor& queries) {
      std::vector<Tensor> out;
      for (int64_t i = 0; i < queries.size(0); ++i)
        out.push_back(answer(layer, i, queries.narrow(0, i, 1), rule, result));
      return torch::cat(out);
    });
    const Tensor wanted = torch::log_softmax(lesson_.teacher_logits, 1), guess = logits.argmax(1),
                 asked = lesson_.next >= 0;
    result.divergence = (wanted.exp() * (wanted - torch::log_softmax(logits, 1))).sum().item<double>();
    result.positions = guess.size(0);
    result.same = guess.eq(wanted.argmax(1)).sum().item<int64_t>();
    result.look_ups = asked.sum().item<int64_t>();
    result.right = guess.eq(lesson_.next).logical_and(asked).sum().item<int64_t>();
    return result;
  }

 private:
  Tensor answer(size_t layer, int64_t position, const Tensor& query, const Rule& rule, Result& result) const {
    const lm::SpanStore& spans = stores_[layer];
    const TeacherLayer& rows = lesson_.teacher[layer];
    const Tensor& dense = dense_[static_cast<size_t>(position)];
    const Tensor admitted = lesson_.memories[layer].admitted().narrow(0, position, 1).unsqueeze(1);
    kvkeep::OpenAttention open =
        lm::attend_rows(rows.keys.index_select(1, dense), rows.values.index_select(1, dense), query, scale_);
    const Tensor coarse = kvkeep::torch_tensor(lm::coarse_logits(spans, query, scale_))
                              .masked_fill(admitted.logical_not(), -std::numeric_limits<float>::infinity());
    const Tensor asked =
        rule(layer, spans, query, lm::estimated_mass(coarse, open), lesson_.targets[layer].narrow(0, position, 1)) *
        admitted;
    count(spans, asked, result);
    lm::merge_spans(open, spans, query, scale_, coarse, asked);
    return lm::closed(open);
  }

  static void count(const lm::SpanStore& spans, const Tensor& asked, Result& result) {
    const Tensor groups = asked.view({spans.kv_heads(), -1, spans.size()}).amax({1}).contiguous();
    for (int64_t kv = 0; kv < spans.kv_heads(); ++kv)
      for (int64_t s = 0; s < spans.size(); ++s)
        if (const auto& [keys, values] = spans.row(kv).span(s).factors;
            groups.const_data_ptr<uint8_t>()[kv * spans.size() + s] != 0)
          result.opened +=
              kvkeep::OpeningCost{spans.dim()}.entries(keys, values, spans.spans()[static_cast<size_t>(s)].length());
    result.places += static_cast<double>(spans.kv_heads());
  }

  const Lesson& lesson_;
  double scale_;
  std::vector<lm::SpanStore> stores_;
  std::vector<Tensor> dense_;  // i64, of each position: tokens that it sees unfolded
};

Result of_all(const Llama& model, const std::vector<Exam>& exams, const Rule& rule, int threads) {
  std::vector<Result> each(exams.size());
  each_in_parallel(exams.size(), threads, [&](size_t i) { each[i] = exams[i].sit(model, rule); });
  Result all;
  for (const Result& one : each) all.add(one);
  return all;
}

void print(const std::string& rule, const std::string& setting, const Result& r) {
  const auto share = [](int64_t part, int64_t whole) {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
  };
  std::printf("| %s | %s | %.2f | %.4f | %.4f | %.4f |\n", rule.c_str(), setting.c_str(), r.mean_opened(),
              r.divergence / static_cast<double>(r.positions), share(r.same, r.positions), share(r.right, r.look_ups));
  std::fflush(stdout);
}

std::string number(const char* format, double x) {
  char text[32];
  std::snprintf(text, sizeof text, format, x);
  return text;
}

Rule fixed(uint8_t what) {
  return [what](size_t, const lm::SpanStore& spans, const Tensor& query, const Tensor&, const Tensor&) {
    return torch::full({1, query.size(1), spans.size()}, what, torch::kUInt8);
  };
}

/// Thresholds moved up by `shift` on the scale of logits: above 0 opens less.
Rule learned(const kvkeep::Routing& routing, double shift) {
  return
      [&routing, shift](size_t layer, const lm::SpanStore& spans, const Tensor& query, const Tensor&, const Tensor&) {
        const kvkeep::Router& router = routing.layers[layer];
        const Tensor relevance = lm::relevance(router, spans, lm::router_norms(router, spans), query);
        return lm::wanted(router, shift == 0 ? relevance : (relevance.logit(1e-7) - shift).sigmoid());
      };
}

Rule without_training(const kvkeep::ZoomOptions& options) {
  return [options](size_t, const lm::SpanStore&, const Tensor&, const Tensor& mass, const Tensor&) {
    return lm::wanted_by_mass(mass, options);
  };
}

/// The setting between two with which a rule opens about `entries`; at `most` it opens most.
std::pair<double, Result> opening(double entries, double most, double least,
                                  const std::function<Result(double)>& measured) {
  constexpr int kSteps = 8;
  std::pair<double, Result> found{most, {}};
  for (int i = 0; i < kSteps; ++i) {
    const double middle = (most + least) / 2;
    found = {middle, measured(middle)};
    (found.second.mean_opened() > entries ? most : least) = middle;
  }
  return found;
}

}  // namespace

void print_comparison(const Llama& model, const std::vector<Lesson>& lessons, const kvkeep::Routing& routing,
                      const std::vector<double>& entries, int threads) {
  std::vector<Exam> exams;
  for (const Lesson& lesson : lessons) exams.emplace_back(model, lesson);
  const auto measured = [&](const Rule& rule) { return of_all(model, exams, rule, threads); };
  std::printf("| opens | setting | entries opened | KL | same argmax | look-ups right |\n|---|---|---|---|---|---|\n");
  print("nothing", "", measured(fixed(0)));
  print("everything", "", measured(fixed(1)));
  print("what the teacher needs", "",
        measured(
            [](size_t, const lm::SpanStore&, const Tensor&, const Tensor&, const Tensor& targets) { return targets; }));
  print("router as trained", "", measured(learned(routing, 0)));
  for (const double wanted : entries) {
    const auto routed = opening(wanted, -16, 16, [&](double shift) { return measured(learned(routing, shift)); });
    print("router", number("shift %+.2f", routed.first), routed.second);
    const auto by_mass = [](double x) {
      return kvkeep::ZoomOptions{.rule = kvkeep::ZoomOptions::Rule::mass, .mass = std::pow(10.0, x)};
    };
    const auto mass = opening(wanted, -9, 0, [&](double x) { return measured(without_training(by_mass(x))); });
    print("mass", number("mass=%.2e", by_mass(mass.first).mass), mass.second);
    const auto by_coverage = [](double x) {
      return kvkeep::ZoomOptions{.rule = kvkeep::ZoomOptions::Rule::coverage, .coverage = 1 - std::pow(10.0, x)};
    };
    const auto coverage = opening(wanted, -6, 0, [&](double x) { return measured(without_training(by_coverage(x))); });
    print("coverage", number("coverage=%.6f", by_coverage(coverage.first).coverage), coverage.second);
  }
}

}  // namespace train
