#pragma once
/// Cuts a prompt by its surprisal: anchors that stay as they are, and the spans of low surprisal between them.
/// Source: SeKV (AmirAbaskohi/SeKV), its boundary rule. Differs: sinks and a local window always stay, long runs are
/// cut, and a budget can limit the anchors; a prompt without anchors loses nothing.

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "kvkeep/core/strict_math.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

// Equal pieces of a run of things: the arithmetic that the CPU and kernels share.

/// Pieces of at most `most` that `n` things are cut into.
[[nodiscard]] KVKEEP_HD inline std::int64_t piece_count(std::int64_t n, std::int64_t most) {
  return (n + most - 1) / most;
}

/// Where piece i of `count` begins; for i = count, n. Lengths differ by at most 1.
[[nodiscard]] KVKEEP_HD inline std::int64_t piece_begin(std::int64_t n, std::int64_t i, std::int64_t count) {
  return i * n / count;
}

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

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/segmenter-inl.h"
#endif
