// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How far a run with a cut cache departs from the run with the full one, token by token. Plain data on the host, no
/// tensors.
///
/// There are two measures, both teacher-forced, so that both runs see the same text:
/// - streaming perplexity: one long text passes through a bounded cache; how well is each token predicted?
/// - decode fidelity: the tokens generated with the full cache are fed to the cut one; how far apart are the two
///   next-token distributions, and do they agree on the likeliest token?
/// Both are kept as sums over bins of positions, so they give a curve over the text, and results of several texts can
/// be added.

#include <cstdint>
#include <span>
#include <vector>

#include "kvlab/intervals.h"
#include "kvlab/ratio.h"

namespace kvkeep::report {

/// -ln p of one token, in nats: p is the softmax over a row of logits.
/// `logits`: f32 [vocabulary], finite or -inf (an impossible token). Sums in double, in row order: the same bits as
/// long as exp and log are the same. Infinite if the token's own logit is -inf. Throws InvalidArgument for an empty
/// row, NaN, +inf, a row of only -inf, and a token outside the row. Cost: two passes over the row. Nothing is
/// allocated.
[[nodiscard]] double negative_log_likelihood(std::span<const float> logits, std::int32_t token);

/// Two next-token distributions at one place.
struct Departure {
  double divergence = 0;    ///< KL(full || cut) in nats, never below 0; infinite if cut rules out what full allows
  bool same_token = false;  ///< both have the same argmax; among equal logits the lower token counts
};

/// `full`, `cut`: f32 [vocabulary] as above. Equal rows depart by exactly 0.
/// Throws InvalidArgument as above, and if the rows differ in length. Cost: two passes over both rows. Nothing is
/// allocated.
[[nodiscard]] Departure departure(std::span<const float> full, std::span<const float> cut);

inline constexpr std::int64_t kFidelityBin = 256;  ///< tokens

/// NLL of the tokens of one text, in order. Not thread safe.
class StreamingPerplexity {
 public:
  /// `first_counted`, 0 or more: tokens before this one are in the curve but not in the total. Use the token at which
  /// the budget is first full. `bin_tokens`: 1 or more. Throws InvalidArgument for other values.
  explicit StreamingPerplexity(std::int64_t first_counted = 0, std::int64_t bin_tokens = kFidelityBin);

  /// The next token of the text. Throws InvalidArgument for NaN, before anything is counted. Cost: O(1), 16 bytes per
  /// bin.
  void add(double negative_log_likelihood);

  [[nodiscard]] std::int64_t tokens() const { return tokens_; }  ///< of this text, without other texts'

  /// Sum and number over the tokens from first_counted on: value() is the mean in nats.
  [[nodiscard]] const Ratio& total() const { return total_; }

  /// [bins] the same for tokens [bin * bin_tokens, (bin + 1) * bin_tokens), counting all tokens.
  [[nodiscard]] std::span<const Ratio> curve() const { return curve_; }

  /// Adds the sums of another text; this one may continue. Throws InvalidArgument for another first_counted or
  /// bin_tokens.
  void merge(const StreamingPerplexity& other);

 private:
  std::int64_t first_counted_, bin_tokens_, tokens_ = 0;
  Ratio total_;
  std::vector<Ratio> curve_;
};

/// exp of the mean; NaN before anything was seen.
[[nodiscard]] double perplexity(const Ratio& negative_log_likelihoods);

/// Sums of one bin, or of all.
struct FidelitySums {
  Ratio divergence;    ///< mean of Departure::divergence
  Answers same_token;  ///< tokens on which both agree, out of all. One text is one sample for bootstrap(): its tokens
                       ///< are not independent
  void add(const FidelitySums& other);
};

/// Departures along one generated text, in order. Not thread safe.
class DecodeFidelity {
 public:
  /// As for StreamingPerplexity: tokens before `first_counted` are in the bins but not in the total.
  explicit DecodeFidelity(std::int64_t first_counted = 0, std::int64_t bin_tokens = kFidelityBin);

  /// The next generated token. Throws InvalidArgument for a divergence that is NaN or negative, before anything is
  /// counted. Cost: O(1).
  void add(const Departure& departure);

  /// The same for two rows of logits. Throws as departure() does.
  void add(std::span<const float> full, std::span<const float> cut) { add(departure(full, cut)); }

  [[nodiscard]] const FidelitySums& total() const { return total_; }
  [[nodiscard]] std::span<const FidelitySums> bins() const {
    return bins_;
  }  ///< [bins] of bin_tokens each; the last may hold fewer

  /// Adds the sums of another text, bin by bin; this one may continue. Throws InvalidArgument for another first_counted
  /// or bin_tokens.
  void merge(const DecodeFidelity& other);

 private:
  std::int64_t first_counted_, bin_tokens_, tokens_ = 0;
  FidelitySums total_;
  std::vector<FidelitySums> bins_;
};

}  // namespace kvkeep::report

#ifdef KVKEEP_HEADER_ONLY
#include "kvlab/fidelity-inl.h"
#endif
