// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Folded spans of some KV heads, and what reading them means, told plainly in fp64.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "kvkeep/core/row.h"
#include "kvkeep/memory/read_memory.h"
#include "kvkeep/memory/segmenter.h"

namespace kvkeep::testing {

/// The same spans of every KV head of a layer, folded.
struct FoldedHeads {
  FoldedHeads() = default;
  /// keys, values: f32, f16 or bf16 [Hkv, T, D]; surprisal: [T].
  FoldedHeads(const Tensor& keys, const Tensor& values, std::span<const float> surprisal, std::vector<Span> of,
              const FactorOptions& options = {}, const RankGates* gates = nullptr)
      : spans(std::move(of)), max_rank(options.max_rank) {
    std::vector<std::int32_t> slots;
    std::vector<std::int64_t> indptr{0};
    std::vector<float> weights;
    for (const Span& s : spans) {
      for (std::int32_t t = s.begin; t < s.end; ++t)
        slots.push_back(t), weights.push_back(surprisal[static_cast<std::size_t>(t)]);
      indptr.push_back(static_cast<std::int64_t>(slots.size()));
    }
    const auto alone = [](const Tensor& t) {
      return contiguous(t).reshaped({1, t.size(0), t.size(1), t.size(2)});
    };  // a batch of one
    const Tensor k = alone(keys), v = alone(values);
    std::vector<RowFold> folds;
    for (std::int64_t h = 0; h < keys.size(0); ++h)
      folds.push_back({.keys = dense_address(k, 0, h),
                       .values = dense_address(v, 0, h),
                       .key_dtype = k.dtype(),
                       .value_dtype = v.dtype(),
                       .slots = slots,
                       .indptr = indptr,
                       .weights = weights});
    rows = fold(folds, keys.size(2), options, gates, &trace);
  }

  [[nodiscard]] std::int64_t size() const { return std::ssize(spans); }
  [[nodiscard]] const Span& span(std::int64_t s) const { return spans[static_cast<std::size_t>(s)]; }
  [[nodiscard]] const SpanRow& row(std::int64_t head) const { return rows[static_cast<std::size_t>(head)]; }
  [[nodiscard]] const SpanFactors& factors(std::int64_t s, std::int64_t head, KvSide side) const {
    return row(head).span(s).factors[static_cast<std::size_t>(side)];
  }
  /// [max_rank] of FoldTrace::singular_values or gates.
  [[nodiscard]] std::span<const double> of_span(const std::vector<double>& traced, std::int64_t s, std::int64_t head,
                                                KvSide side) const {
    return std::span(traced).subspan(
        static_cast<std::size_t>(((head * size() + s) * 2 + static_cast<int>(side)) * max_rank),
        static_cast<std::size_t>(max_rank));
  }

  std::vector<Span> spans;
  std::vector<SpanRow> rows;  ///< [Hkv]
  FoldTrace trace;
  std::int64_t max_rank = 0;
};

/// Coarse entries of a row: f32 [spans, D].
inline Tensor coarse_of(const SpanRow& row, KvSide side) {
  return clone(as<float>(Tensor(const_cast<std::byte*>(row.coarse(side)), row.dtype(), {row.size(), row.dim()})));
}

/// The softmax of one query over the entries that are added.
class PlainSoftmax {
 public:
  PlainSoftmax(const float* query, std::int64_t dim, double scale) : query_(query), dim_(dim), scale_(scale) {}

  [[nodiscard]] double logit(const float* key) const {
    double dot = 0;
    for (std::int64_t d = 0; d < dim_; ++d) dot += static_cast<double>(query_[d]) * key[d];
    return scale_ * dot;
  }
  /// bias: added to the logit.
  void add(const float* key, const float* value, double bias = 0) {
    logits_.push_back(logit(key) + bias);
    values_.insert(values_.end(), value, value + dim_);
  }
  /// keys, values: f32 [n, D].
  void add_rows(const Tensor& keys, const Tensor& values) {
    for (std::int64_t t = 0; t < keys.size(0); ++t) add(keys.data<float>() + t * dim_, values.data<float>() + t * dim_);
  }

  /// The log of the sum of exp(logit); -inf: nothing was added.
  [[nodiscard]] double log_mass() const {
    if (logits_.empty()) return -HUGE_VAL;
    const double top = std::ranges::max(logits_);
    double sum = 0;
    for (const double x : logits_) sum += std::exp(x - top);
    return top + std::log(sum);
  }
  /// [D]; 0: nothing was added.
  [[nodiscard]] std::vector<double> answer() const {
    std::vector<double> out(static_cast<std::size_t>(dim_));
    const double all = log_mass();
    for (std::size_t i = 0; i < logits_.size(); ++i) {
      const double share = std::exp(logits_[i] - all);
      for (std::size_t d = 0; d < out.size(); ++d) out[d] += share * values_[i * out.size() + d];
    }
    return out;
  }

 private:
  const float* query_;
  std::int64_t dim_;
  double scale_;
  std::vector<double> logits_;
  std::vector<float> values_;
};

/// Attention of every query over all rows of its KV head, as an engine hands it to read_memory(). keys, values: f32,
/// f16 or bf16 [Hkv, T, D]; queries: the same [n, Hq, D].
inline OpenAttention plain_attention(const Tensor& keys, const Tensor& values, const Tensor& queries, double scale) {
  const Tensor k = as<float>(keys), v = as<float>(values), q = as<float>(queries);
  const std::int64_t n = q.size(0), heads = q.size(1), dim = q.size(2), group = heads / k.size(0);
  OpenAttention open{empty({n, heads}, Dtype::f32), full({n, heads}, k.size(1) > 0 ? 1.0F : 0.0F),
                     empty({n, heads, dim}, Dtype::f32)};
  for (std::int64_t i = 0; i < n * heads; ++i) {
    PlainSoftmax softmax(q.data<float>() + i * dim, dim, scale);
    softmax.add_rows(k.select(0, i % heads / group), v.select(0, i % heads / group));
    open.top.data<float>()[i] = static_cast<float>(softmax.log_mass());
    std::ranges::transform(softmax.answer(), open.out.data<float>() + i * dim,
                           [](double x) { return static_cast<float>(x); });
  }
  return open;
}

/// f32 [n, Hq, D] of softmaxes to which nothing more is added; 0 where there was no entry.
inline Tensor closed(const OpenAttention& open) {
  Tensor out = clone(open.out);
  const std::int64_t dim = out.size(2);
  for (std::int64_t i = 0; i < out.numel(); ++i)
    if (const float sum = open.sum.data<float>()[i / dim]; sum > 0) out.data<float>()[i] /= sum;
  return out;
}

/// f32 [n, Hq] logs of the sums of exp(logit).
inline Tensor log_mass(const OpenAttention& open) {
  Tensor mass = clone(open.top);
  for (std::int64_t i = 0; i < mass.numel(); ++i) mass.data<float>()[i] += std::log(open.sum.data<float>()[i]);
  return mass;
}

/// read_memory() of one query and KV head, of spans without sketches.
class PlainReading {
 public:
  /// keys, values: f32 [T, D] of the rows that stayed; queries: [group, D] of the heads from `first_head` on.
  PlainReading(const SpanRow& row, const Tensor& keys, const Tensor& values, const float* queries, std::int64_t group,
               std::int64_t first_head, double scale, const Reading& reading)
      : row_(row), marks_(static_cast<std::size_t>(group * row.size())) {
    const Tensor coarse_keys = coarse_of(row, KvSide::keys), coarse_values = coarse_of(row, KvSide::values);
    const std::int64_t dim = row.dim();
    std::vector<PlainSoftmax> softmaxes;
    std::vector<std::vector<double>> relevance;
    for (std::int64_t h = 0; h < group; ++h) {
      PlainSoftmax& softmax = softmaxes.emplace_back(queries + h * dim, dim, scale);
      softmax.add_rows(keys, values);
      relevance.push_back(reading.zoom.learned(reading.router != nullptr)
                              ? gate(*reading.router, first_head + h, queries + h * dim, coarse_keys)
                              : shares(softmax, coarse_keys));
    }
    std::vector<std::vector<bool>> wanted;
    for (std::int64_t h = 0; h < group; ++h)
      wanted.push_back(wanted_by(reading, first_head + h, relevance[static_cast<std::size_t>(h)]));
    const double resident = static_cast<double>(keys.size(0)) +
                            reading.entries_per_span * static_cast<double>(row.size()) +
                            reading.entries_per_token * static_cast<double>(row.tokens());
    for (std::int64_t h = 0; h < group; h += reading.per_head ? 1 : group)
      walk(reading, resident, h, reading.per_head ? 1 : group, relevance, wanted);
    for (std::int64_t s = 0; s < row.size(); ++s) {
      const Tensor shown_keys = row.rows(s, KvSide::keys), shown_values = row.rows(s, KvSide::values);
      bool any = false;
      for (std::int64_t h = 0; h < group; ++h) {
        any = any || marked(h, s);
        if (marked(h, s))
          softmaxes[static_cast<std::size_t>(h)].add_rows(shown_keys, shown_values);
        else
          softmaxes[static_cast<std::size_t>(h)].add(coarse_keys.data<float>() + s * dim,
                                                     coarse_values.data<float>() + s * dim, log_length(s));
      }
      if (any) opened.push_back(static_cast<std::int32_t>(s));
    }
    for (const PlainSoftmax& softmax : softmaxes)
      answers.push_back(softmax.answer()), log_masses.push_back(softmax.log_mass());
  }

  /// Whether a head of the group reads a span token by token.
  [[nodiscard]] bool marked(std::int64_t head, std::int64_t s) const {
    return marks_[static_cast<std::size_t>(head * row_.size() + s)];
  }

  std::vector<std::int32_t> opened;          ///< by any head, ascending
  std::int64_t unmet = 0;                    ///< spans that did not fit
  std::vector<std::vector<double>> answers;  ///< [group, D]
  std::vector<double> log_masses;            ///< [group]

 private:
  [[nodiscard]] double log_length(std::int64_t s) const { return std::log(static_cast<double>(row_.span(s).length)); }

  /// Shares of attention that coarse entries draw while nothing is open.
  [[nodiscard]] std::vector<double> shares(const PlainSoftmax& dense, const Tensor& coarse_keys) const {
    std::vector<double> logits{dense.log_mass()};
    for (std::int64_t s = 0; s < row_.size(); ++s)
      logits.push_back(dense.logit(coarse_keys.data<float>() + s * row_.dim()) + log_length(s));
    const double top = std::ranges::max(logits);
    double all = 0;
    for (double& x : logits) all += x = std::exp(x - top);
    for (double& x : logits) x /= all;
    return {logits.begin() + 1, logits.end()};
  }

  /// sigmoid((W q) . (W kmean) / (|W kmean| sqrt(d')) + log L).
  [[nodiscard]] std::vector<double> gate(const Router& router, std::int64_t head, const float* query,
                                         const Tensor& coarse_keys) const {
    std::vector<double> relevance;
    for (std::int64_t s = 0; s < row_.size(); ++s) {
      double dot = 0, squares = 0;
      for (std::int64_t i = 0; i < router.inner(); ++i) {
        double of_query = 0, of_key = 0;
        for (std::int64_t d = 0; d < row_.dim(); ++d) {
          const double weight = router.projection(head)[i * row_.dim() + d];
          of_query += weight * query[d], of_key += weight * coarse_keys.data<float>()[s * row_.dim() + d];
        }
        dot += of_query * of_key, squares += of_key * of_key;
      }
      const double direction = squares > 0 ? dot / std::sqrt(squares * static_cast<double>(router.inner())) : 0;
      relevance.push_back(1 / (1 + std::exp(-direction - log_length(s))));
    }
    return relevance;
  }

  static std::vector<bool> wanted_by(const Reading& reading, std::int64_t head, const std::vector<double>& relevance) {
    const ZoomOptions& zoom = reading.zoom;
    std::vector<bool> wanted(relevance.size());
    if (zoom.rule == ZoomOptions::Rule::coverage) {
      double held = 0;
      const double all = std::accumulate(relevance.begin(), relevance.end(), 0.0);
      for (const std::size_t s : best_first(relevance)) {
        wanted[s] = relevance[s] >= zoom.coverage_floor && (zoom.coverage == 1 || held < zoom.coverage * all);
        held += relevance[s];
      }
      return wanted;
    }
    const double above =
        zoom.learned(reading.router != nullptr) ? static_cast<double>(reading.router->threshold(head)) : zoom.mass;
    std::transform(relevance.begin(), relevance.end(), wanted.begin(), [above](double x) { return x > above; });
    return wanted;
  }

  /// Of equals the one with the lower index.
  static std::vector<std::size_t> best_first(const std::vector<double>& relevance) {
    std::vector<std::size_t> order(relevance.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return relevance[a] > relevance[b]; });
    return order;
  }

  /// Opens what `count` heads from `first` on want together and what fits, most relevant first.
  void walk(const Reading& reading, double resident, std::int64_t first, std::int64_t count,
            const std::vector<std::vector<double>>& relevance, const std::vector<std::vector<bool>>& wanted) {
    const auto n = static_cast<std::size_t>(row_.size());
    std::vector<double> most(n, -1);
    for (std::size_t s = 0; s < n; ++s)
      for (auto h = static_cast<std::size_t>(first); h < static_cast<std::size_t>(first + count); ++h)
        if (wanted[h][s]) most[s] = std::max(most[s], relevance[h][s]);
    double used = resident;
    for (const std::size_t s : best_first(most)) {
      if (most[s] < 0) continue;
      const FoldedSpan& span = row_.span(static_cast<std::int64_t>(s));
      double numbers = 0;
      for (const SpanFactors& f : span.factors)
        numbers += static_cast<double>(f.raw ? span.length * row_.dim() : f.rank * (span.length + row_.dim()));
      const double cost = reading.per_head ? span.length - 1 : numbers / (2 * static_cast<double>(row_.dim()));
      if (used + cost > reading.entries) {
        ++unmet;
        continue;
      }
      used += cost;
      for (std::int64_t h = first; h < first + count; ++h)
        marks_[static_cast<std::size_t>(h) * n + s] =
            reading.zoom.heads == ZoomOptions::Heads::group || wanted[static_cast<std::size_t>(h)][s];
    }
  }

  const SpanRow& row_;
  std::vector<bool> marks_;  ///< [group, spans]
};

}  // namespace kvkeep::testing
