// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Cuts a prompt by its surprisal: anchors that stay as they are, and the spans of low surprisal between them.
/// Source: SeKV (AmirAbaskohi/SeKV), its boundary rule. Differs: sinks and a local window always stay, long runs are
/// cut, and a budget can limit the anchors; a prompt without anchors loses nothing.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/memory/factors.h"
#include "kvkeep/simd/attention_lanes.h"
#include "kvkeep/simd/memory_lanes.h"

namespace kvkeep {

/// Surprisal of a prompt's tokens, from logits that arrive in blocks of rows: nothing of size [T, vocab] is kept.
class PromptSurprisal {
 public:
  /// ids: the prompt's tokens, in order.
  explicit PromptSurprisal(std::vector<std::int32_t> ids);

  /// logits: f32, f16 or bf16 [rows, vocab] of the next tokens in order. Row t gives the surprisal of token t + 1; the
  /// row of the last token is not used. Throws InvalidArgument, and takes nothing, for more rows than there are tokens
  /// left, another dtype or device, and an id outside the vocabulary. Cost: one pass over the logits, rows in parallel;
  /// a block of 4096 floats per thread.
  void see(const Tensor& logits);

  /// Tokens whose logits were seen.
  [[nodiscard]] std::int64_t seen() const { return seen_; }

  /// f32 [T] nats: log-sum-exp of the logits before a token minus the token's own logit, in [0, 50]; 0 for the first
  /// token, for tokens not reached yet and for NaN logits.
  [[nodiscard]] std::span<const float> values() const { return values_; }

 private:
  std::vector<std::int32_t> ids_;
  std::vector<float> values_;
  std::int64_t seen_ = 0;
};

/// Surprisal of one token, nats in [0, 50]: logits f32, f16 or bf16 [vocab] of the token before it. Throws
/// InvalidArgument for another dtype or device, and an id outside the vocabulary.
[[nodiscard]] float token_surprisal(const Tensor& logits, std::int32_t id);

/// Tokens begin to end - 1.
struct Span {
  std::int32_t begin = 0, end = 0;

  [[nodiscard]] std::int32_t length() const { return end - begin; }
  bool operator==(const Span&) const = default;
};

class Fields;

struct SegmenterOptions {
  double alpha = 1;             ///< a token is an anchor if its surprisal is above mean + alpha * deviation
  std::int32_t sink = 4;        ///< oldest tokens that are always anchors
  std::int32_t recent = 512;    ///< newest tokens, the local window: neither anchors nor in spans
  std::int32_t min_span = 4;    ///< shorter runs stay as they are
  std::int32_t max_span = 128;  ///< longer runs are cut into equal pieces; 0: never
  double most_entries = std::numeric_limits<double>::infinity();  ///< if entries() would exceed it, only the most
                                                                  ///< surprising anchors stay; sinks always do
  double entries_per_span = 1;                                    ///< what a folded span counts as
  double entries_per_token = 0;                                   ///< what every token in it adds

  /// Options that are not allowed, one sentence each with the field's name; empty if there are none.
  [[nodiscard]] std::vector<std::string> problems() const;
  struct Stated {
    bool alpha = false, max_span = false;
  };
  /// Without `sink` and `recent`. What was given; `span` is what lists say of max_span if it was not, which is then not
  /// written.
  Stated describe(Fields& f, const char* span);
};

/// A prompt in pieces. Anchors, short spans, spans and window together hold every token once. The same pieces serve all
/// layers and heads.
struct Segments {
  std::int32_t tokens = 0;
  std::int32_t window = 0;            ///< where the local window begins
  std::vector<std::int32_t> anchors;  ///< ascending, sinks included
  std::vector<Span> spans;            ///< to be folded
  std::vector<Span> short_spans;      ///< stay as they are
  double threshold = 0;               ///< surprisal above which a token is an anchor
  double kept_above =
      0;  ///< if fewer anchors stay than the rule names: surprisal of the first that does not; else threshold

  /// Tokens that stay as they are: anchors, short spans and window, ascending.
  [[nodiscard]] std::vector<std::int32_t> dense() const;
  /// Entries in memory while no span is zoomed: dense tokens, `per_span` for each span and `per_token` for each token
  /// in one.
  [[nodiscard]] double entries(double per_span, double per_token = 0) const;
};

/// Cuts a prompt by its surprisal, [T] nats; mean and deviation (of the population) over all T in fp64, after a clamp
/// to [0, 50], NaN as 0. Throws InvalidArgument with all of options.problems(). Cost: one pass; with most_entries a
/// sort of the anchors and log2(anchors) passes.
[[nodiscard]] Segments segment(std::span<const float> surprisal, const SegmenterOptions& options = {});

/// Cuts tokens by a known threshold: those above it are anchors, and the oldest options.sink. options.alpha and
/// most_entries are ignored. Throws as segment().
[[nodiscard]] Segments segment_above(std::span<const float> surprisal, double threshold,
                                     const SegmenterOptions& options = {});

/// Weights of a span's tokens: surprisal divided by its sum, or equal if the sum is 0. Clamped as in segment().
[[nodiscard]] std::vector<double> span_weights(std::span<const float> surprisal);

namespace segmenter_detail {

inline constexpr double kMostSurprising = 50;  ///< nats
inline constexpr std::int64_t kLogitsAtOnce = 4096;
inline constexpr std::int32_t kNoAnchor = INT32_MAX;

inline double clamped(double nats) { return std::isnan(nats) ? 0.0 : std::clamp(nats, 0.0, kMostSurprising); }

/// NaN if a logit is NaN.
inline double log_sum_exp(const std::byte* row, Dtype dtype, std::int64_t vocabulary) {
  float block[kLogitsAtOnce];
  const auto bytes = element_size(dtype);
  float top = -HUGE_VALF;
  double sum = 0;
  for (std::int64_t first = 0; first < vocabulary; first += kLogitsAtOnce) {
    const std::int64_t n = std::min(kLogitsAtOnce, vocabulary - first);
    cpu::widen(row + first * bytes, dtype, n, block);
    if (cpu::any_nan(block, n)) return std::nan("");
    const float most = cpu::largest(block, n);
    if (most == HUGE_VALF) return most;
    if (most == -HUGE_VALF) continue;
    if (most > top) sum *= std::exp(static_cast<double>(top) - most), top = most;
    sum += cpu::exponentials(block, n, top);
  }
  return top + std::log(sum);
}

inline double logit(const std::byte* row, Dtype dtype, std::int64_t id) {
  float value = 0;
  cpu::widen(row + id * element_size(dtype), dtype, 1, &value);
  return value;
}

/// -log p(id) of a row of logits, clamped.
inline float surprisal_of(const std::byte* row, Dtype dtype, std::int64_t vocabulary, std::int64_t id) {
  return static_cast<float>(clamped(log_sum_exp(row, dtype, vocabulary) - logit(row, dtype, id)));
}

/// The tokens before the window: those that may be anchors, and the runs between those that are.
class Runs {
 public:
  Runs(std::span<const float> surprisal, const SegmenterOptions& options, double threshold)
      : options_(options),
        end_(std::max<std::int32_t>(0, static_cast<std::int32_t>(surprisal.size()) - options.recent)),
        sinks_(std::min(options.sink, end_)) {
    std::vector<std::int32_t> above;
    for (std::int32_t t = sinks_; t < end_; ++t)
      if (clamped(surprisal[static_cast<std::size_t>(t)]) > threshold) above.push_back(t);
    candidates_ = static_cast<std::int32_t>(above.size());
    std::ranges::stable_sort(above, [&](std::int32_t a, std::int32_t b) {
      return clamped(surprisal[static_cast<std::size_t>(a)]) > clamped(surprisal[static_cast<std::size_t>(b)]);
    });
    order_.assign(static_cast<std::size_t>(end_), kNoAnchor);
    std::fill_n(order_.begin(), sinks_, -1);
    for (std::int32_t i = 0; i < candidates_; ++i)
      order_[static_cast<std::size_t>(above[static_cast<std::size_t>(i)])] = i;
  }

  [[nodiscard]] std::int32_t candidates() const { return candidates_; }
  /// Place of the i-th most surprising candidate.
  [[nodiscard]] std::int32_t candidate(std::int32_t i) const {
    return static_cast<std::int32_t>(std::ranges::find(order_, i) - order_.begin());
  }
  [[nodiscard]] std::int32_t end() const { return end_; }

  /// The pieces when the `kept` most surprising candidates are anchors.
  [[nodiscard]] Segments pieces(std::int32_t tokens, std::int32_t kept) const {
    Segments out;
    out.tokens = tokens;
    out.window = end_;
    std::int32_t begin = 0;
    for (std::int32_t t = 0; t < end_; ++t) {
      if (order_[static_cast<std::size_t>(t)] >= kept) continue;
      cut({begin, t}, out);
      out.anchors.push_back(t);
      begin = t + 1;
    }
    cut({begin, end_}, out);
    return out;
  }

 private:
  void cut(Span run, Segments& out) const {
    const std::int64_t length = run.length(),
                       most = options_.max_span > 0 ? options_.max_span : std::max<std::int64_t>(length, 1),
                       pieces = (length + most - 1) / most;
    for (std::int64_t i = 0; i < pieces; ++i) {
      const Span piece{run.begin + static_cast<std::int32_t>(i * length / pieces),
                       run.begin + static_cast<std::int32_t>((i + 1) * length / pieces)};
      (piece.length() < options_.min_span ? out.short_spans : out.spans).push_back(piece);
    }
  }

  SegmenterOptions options_;
  std::int32_t end_, sinks_, candidates_ = 0;
  std::vector<std::int32_t> order_;  ///< [end] 0 for the most surprising candidate, and so on; -1 for sinks
};

/// Mean and deviation of the population, two passes in fp64: equal values then have a deviation of 0.
inline std::pair<double, double> statistics(std::span<const float> surprisal) {
  if (surprisal.empty()) return {0, 0};
  const auto n = static_cast<double>(surprisal.size());
  double sum = 0, squares = 0;
  for (const float h : surprisal) sum += clamped(h);
  const double mean = sum / n;
  for (const float h : surprisal) squares += product(clamped(h) - mean, clamped(h) - mean);
  return {mean, std::sqrt(squares / n)};
}

}  // namespace segmenter_detail

inline PromptSurprisal::PromptSurprisal(std::vector<std::int32_t> ids)
    : ids_(std::move(ids)), values_(ids_.size(), 0.0F) {}

inline void PromptSurprisal::see(const Tensor& logits) {
  KVKEEP_REQUIRE(logits.dim() == 2 && logits.device().is_cpu() && is_scorable(logits.dtype()) && logits.size(1) > 0,
                 "surprisal: logits have ", logits.dim(), " dimensions of dtype ", logits.dtype(), " on ",
                 logits.device().str(), "; allowed f32, f16 or bf16 [rows, vocab] on the CPU");
  const std::int64_t rows = logits.size(0), vocabulary = logits.size(1),
                     tokens = static_cast<std::int64_t>(ids_.size());
  KVKEEP_REQUIRE(rows <= tokens - seen_, "surprisal: logits of ", rows, " tokens; allowed at most ", tokens - seen_,
                 ", the rest of the prompt");
  for (std::int64_t i = seen_; i < seen_ + rows && i + 1 < tokens; ++i) {
    const std::int32_t id = ids_[static_cast<std::size_t>(i + 1)];
    KVKEEP_REQUIRE(id >= 0 && id < vocabulary, "surprisal: token ", i + 1, " has id ", id, "; allowed 0 to ",
                   vocabulary - 1);
  }
  const Tensor block = contiguous(logits);
  const auto* data = static_cast<const std::byte*>(block.bytes());
  const std::int64_t stride = vocabulary * block.element_size();
  parallel_for(0, rows, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t next = seen_ + i + 1;
      if (next >= tokens) continue;
      values_[static_cast<std::size_t>(next)] = segmenter_detail::surprisal_of(
          data + i * stride, block.dtype(), vocabulary, ids_[static_cast<std::size_t>(next)]);
    }
  });
  seen_ += rows;
}

inline float token_surprisal(const Tensor& logits, std::int32_t id) {
  KVKEEP_REQUIRE(logits.dim() == 1 && logits.device().is_cpu() && is_scorable(logits.dtype()),
                 "surprisal: logits have ", logits.dim(), " dimensions of dtype ", logits.dtype(), " on ",
                 logits.device().str(), "; allowed f32, f16 or bf16 [vocab] on the CPU");
  KVKEEP_REQUIRE(id >= 0 && id < logits.size(0), "surprisal: the token has id ", id, "; allowed 0 to ",
                 logits.size(0) - 1);
  const Tensor row = contiguous(logits);
  return segmenter_detail::surprisal_of(static_cast<const std::byte*>(row.bytes()), row.dtype(), row.size(0), id);
}

inline SegmenterOptions::Stated SegmenterOptions::describe(Fields& f, const char* span) {
  constexpr double kAnyAlpha = 1e9;
  Stated stated;
  stated.alpha = f.real("alpha", alpha, {-kAnyAlpha, kAnyAlpha},
                        "a token is an anchor if its surprisal is above mean + alpha * deviation");
  f.integer("min_span", min_span, 1, INT32_MAX, "shorter runs between anchors stay as they are");
  stated.max_span = f.integer("max_span", max_span, 1, INT32_MAX, "longer runs are cut into equal pieces", {}, span);
  return stated;
}

inline std::vector<std::string> SegmenterOptions::problems() const {
  std::vector<std::string> found;
  if (!std::isfinite(alpha)) found.push_back(text("alpha: ", alpha, "; allowed a finite number"));
  if (sink < 0) found.push_back(text("sink: ", sink, "; allowed 0 or more"));
  if (recent < 0) found.push_back(text("recent: ", recent, "; allowed 0 or more"));
  if (min_span < 1) found.push_back(text("min_span: ", min_span, "; allowed 1 or more"));
  if (max_span < 0) found.push_back(text("max_span: ", max_span, "; allowed 1 or more, or 0 for none"));
  if (!(entries_per_span > 0)) found.push_back(text("entries_per_span: ", entries_per_span, "; allowed above 0"));
  if (!(entries_per_token >= 0)) found.push_back(text("entries_per_token: ", entries_per_token, "; allowed 0 or more"));
  if (std::isnan(most_entries)) found.push_back(text("most_entries: ", most_entries, "; allowed a number"));
  return found;
}

inline std::vector<std::int32_t> Segments::dense() const {
  std::vector<std::int32_t> out = anchors;
  for (const Span& s : short_spans)
    for (std::int32_t t = s.begin; t < s.end; ++t) out.push_back(t);
  for (std::int32_t t = window; t < tokens; ++t) out.push_back(t);
  std::ranges::sort(out);
  return out;
}

inline double Segments::entries(double per_span, double per_token) const {
  std::int64_t dense = static_cast<std::int64_t>(anchors.size()) + tokens - window;
  for (const Span& s : short_spans) dense += s.length();
  return static_cast<double>(dense) + product(per_span, static_cast<double>(spans.size())) +
         product(per_token, static_cast<double>(tokens - dense));
}

namespace segmenter_detail {

inline void check_options(std::span<const float> surprisal, const SegmenterOptions& options) {
  require_no_problems("segment", options.problems());
  KVKEEP_REQUIRE(surprisal.size() < INT32_MAX, "segment: ", surprisal.size(), " tokens; allowed fewer than 2^31");
}

}  // namespace segmenter_detail

inline Segments segment(std::span<const float> surprisal, const SegmenterOptions& options) {
  segmenter_detail::check_options(surprisal, options);
  const auto tokens = static_cast<std::int32_t>(surprisal.size());
  const auto [mean, deviation] = segmenter_detail::statistics(surprisal);
  const double threshold = mean + product(options.alpha, deviation);
  const segmenter_detail::Runs runs(surprisal, options, threshold);
  const auto fits = [&](std::int32_t kept) {
    return runs.pieces(tokens, kept).entries(options.entries_per_span, options.entries_per_token) <=
           options.most_entries;
  };
  std::int32_t kept = runs.candidates();
  if (!fits(kept)) {
    // The largest count that bisection finds: entries grow with the count, though not at every step.
    std::int32_t low = 0, high = kept;
    while (low < high) {
      const std::int32_t middle = high - (high - low) / 2;
      if (fits(middle))
        low = middle;
      else
        high = middle - 1;
    }
    kept = low;
  }
  Segments out = runs.pieces(tokens, kept);
  out.threshold = threshold;
  out.kept_above = kept < runs.candidates()
                       ? segmenter_detail::clamped(surprisal[static_cast<std::size_t>(runs.candidate(kept))])
                       : threshold;
  return out;
}

inline Segments segment_above(std::span<const float> surprisal, double threshold, const SegmenterOptions& options) {
  segmenter_detail::check_options(surprisal, options);
  const segmenter_detail::Runs runs(surprisal, options, threshold);
  Segments out = runs.pieces(static_cast<std::int32_t>(surprisal.size()), runs.candidates());
  out.threshold = out.kept_above = threshold;
  return out;
}

inline std::vector<double> span_weights(std::span<const float> surprisal) {
  std::vector<double> weights(surprisal.size());
  std::ranges::transform(surprisal, weights.begin(), [](float h) { return segmenter_detail::clamped(h); });
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& w : weights) w = sum > 0 ? w / sum : 1.0 / static_cast<double>(weights.size());
  return weights;
}

}  // namespace kvkeep
