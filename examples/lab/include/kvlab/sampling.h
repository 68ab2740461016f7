// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Drawing the next token from its probabilities: temperature and nucleus.

#include <cstdint>
#include <span>

namespace kvkeep::lm {

/// How the next token is chosen.
struct Sampling {
  double temperature = 0;  ///< logits are divided by it; finite, 0 or more. 0: the likeliest token, nothing is drawn
  double top_p = 1;        ///< above 0 up to 1: the nucleus is the smallest set of likeliest tokens whose probabilities
                           ///< sum to this or more; among equal logits the lower token comes first
  std::uint64_t seed = 0;  ///< a sequence's draw depends on this and on its step alone

  [[nodiscard]] bool greedy() const { return temperature == 0; }
};

/// Throws InvalidArgument for a temperature or top_p out of range.
void check_sampling(const Sampling& sampling);

/// A token drawn from softmax(logits / temperature), cut to its nucleus. logits: f32 [vocab], 2^20 tokens at most; -inf
/// is probability 0. Throws InvalidArgument for what check_sampling() refuses, a temperature of 0, NaN, +inf, and
/// logits that are all -inf.
///
/// The same logits, Sampling and step give the same token on every machine: weights are computed in f64 from additions
/// and multiplications alone, as multiples of 2^-32 of the largest, so that sums of them are exact in any order. Tokens
/// below half of that are never drawn. The random number is an integer of (seed, step), which picks a place in the
/// nucleus in order of falling probability: two policies with nearly the same logits mostly draw the same token.
///
/// Source: transformers' TemperatureLogitsWarper and TopPLogitsWarper (Holtzman et al., The Curious Case of Neural Text
/// Degeneration), whose nucleus is the same set. Differs: they sum in the dtype of the logits, leave the order of equal
/// logits open, and draw from the state of torch's generator, so the same seed gives other tokens there.
/// Cost: O(vocab + n log vocab) for a nucleus of n tokens; without one, n is the rank of the drawn token.
[[nodiscard]] std::int32_t draw(std::span<const float> logits, const Sampling& sampling, std::int64_t step);

}  // namespace kvkeep::lm
