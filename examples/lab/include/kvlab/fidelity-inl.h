// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of fidelity.h: compiled by src/report, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "kvkeep/core/error.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvlab/fidelity.h"

namespace kvkeep::report {
namespace fidelity_detail {

/// A row of logits as a distribution.
struct Normalised {
  std::size_t likeliest;  // the lowest index of equals
  double top;             // its logit
  double log_sum;         // ln of the sum of exp(logit - top)

  /// ln p of a token with this logit.
  [[nodiscard]] double log_share(float logit) const { return (static_cast<double>(logit) - top) - log_sum; }
};

inline Normalised normalised(std::string_view operation, std::span<const float> logits) {
  KVKEEP_REQUIRE(!logits.empty(), operation, ": a row of logits is empty; given 0; allowed 1 or more");
  std::size_t likeliest = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    KVKEEP_REQUIRE(logits[i] < std::numeric_limits<float>::infinity(), operation,
                   ": a logit cannot be compared; given ", logits[i], " at ", i, "; allowed finite ones and -inf");
    if (logits[i] > logits[likeliest]) likeliest = i;
  }
  const double top = logits[likeliest];
  KVKEEP_REQUIRE(std::isfinite(top), operation,
                 ": no token is possible; given only logits of -inf; allowed one or more finite logits");
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - top);
  return {likeliest, top, std::log(sum)};
}

inline void require_counting(std::string_view operation, std::int64_t first_counted, std::int64_t bin_tokens) {
  KVKEEP_REQUIRE(first_counted >= 0, operation, ": first_counted is ", first_counted, "; allowed 0 or more");
  KVKEEP_REQUIRE(bin_tokens >= 1, operation, ": bin_tokens is ", bin_tokens, "; allowed 1 or more");
}

inline void require_same(std::string_view operation, std::int64_t first, std::int64_t other_first, std::int64_t bin,
                         std::int64_t other_bin) {
  KVKEEP_REQUIRE(first == other_first && bin == other_bin, operation,
                 ": the texts were counted differently; given first_counted ", first, " and ", other_first,
                 ", bin_tokens ", bin, " and ", other_bin, "; allowed the same");
}

/// The bin of token `at`, added if it is the next one.
template <class T>
T& bin_of(std::vector<T>& bins, std::int64_t at, std::int64_t bin_tokens) {
  const auto bin = static_cast<std::size_t>(at / bin_tokens);
  if (bin == bins.size()) bins.emplace_back();
  return bins[bin];
}

template <class T>
void add_bins(std::vector<T>& bins, const std::vector<T>& others) {
  bins.resize(std::max(bins.size(), others.size()));
  for (std::size_t i = 0; i < others.size(); ++i) bins[i].add(others[i]);
}

}  // namespace fidelity_detail

KVKEEP_INLINE double negative_log_likelihood(std::span<const float> logits, std::int32_t token) {
  const fidelity_detail::Normalised row = fidelity_detail::normalised("negative_log_likelihood", logits);
  KVKEEP_REQUIRE(token >= 0 && static_cast<std::size_t>(token) < logits.size(),
                 "negative_log_likelihood: token is out of range; given ", token, "; allowed 0 to ", logits.size() - 1);
  return -row.log_share(logits[static_cast<std::size_t>(token)]);
}

KVKEEP_INLINE Departure departure(std::span<const float> full, std::span<const float> cut) {
  KVKEEP_REQUIRE(full.size() == cut.size(), "departure: the rows differ in length; given ", full.size(), " and ",
                 cut.size(), "; allowed the same vocabulary");
  const fidelity_detail::Normalised p = fidelity_detail::normalised("departure", full),
                                    q = fidelity_detail::normalised("departure", cut);
  double divergence = 0;
  for (std::size_t i = 0; i < full.size(); ++i) {
    const double log_p = p.log_share(full[i]);
    if (const double share = std::exp(log_p); share > 0) divergence += product(share, log_p - q.log_share(cut[i]));
  }
  return {std::max(divergence, 0.0), p.likeliest == q.likeliest};  // rounding may leave a trace below 0
}

KVKEEP_INLINE double perplexity(const Ratio& negative_log_likelihoods) {
  return std::exp(negative_log_likelihoods.value());
}

KVKEEP_INLINE StreamingPerplexity::StreamingPerplexity(std::int64_t first_counted, std::int64_t bin_tokens)
    : first_counted_(first_counted), bin_tokens_(bin_tokens) {
  fidelity_detail::require_counting("StreamingPerplexity", first_counted, bin_tokens);
}

KVKEEP_INLINE void StreamingPerplexity::add(double negative_log_likelihood) {
  KVKEEP_REQUIRE(!std::isnan(negative_log_likelihood),
                 "StreamingPerplexity: a likelihood is not a number; given NaN at token ", tokens_,
                 "; allowed numbers");
  fidelity_detail::bin_of(curve_, tokens_, bin_tokens_).add(negative_log_likelihood, 1);
  if (tokens_ >= first_counted_) total_.add(negative_log_likelihood, 1);
  ++tokens_;
}

KVKEEP_INLINE void StreamingPerplexity::merge(const StreamingPerplexity& other) {
  fidelity_detail::require_same("StreamingPerplexity", first_counted_, other.first_counted_, bin_tokens_,
                                other.bin_tokens_);
  total_.add(other.total_);
  fidelity_detail::add_bins(curve_, other.curve_);
}

KVKEEP_INLINE void FidelitySums::add(const FidelitySums& other) {
  divergence.add(other.divergence);
  same_token.right += other.same_token.right;
  same_token.asked += other.same_token.asked;
}

KVKEEP_INLINE DecodeFidelity::DecodeFidelity(std::int64_t first_counted, std::int64_t bin_tokens)
    : first_counted_(first_counted), bin_tokens_(bin_tokens) {
  fidelity_detail::require_counting("DecodeFidelity", first_counted, bin_tokens);
}

KVKEEP_INLINE void DecodeFidelity::add(const Departure& departure) {
  KVKEEP_REQUIRE(departure.divergence >= 0, "DecodeFidelity: a divergence is out of range; given ",
                 departure.divergence, "; allowed 0 or more");
  const FidelitySums one{{departure.divergence, 1}, {departure.same_token ? 1 : 0, 1}};
  fidelity_detail::bin_of(bins_, tokens_, bin_tokens_).add(one);
  if (tokens_ >= first_counted_) total_.add(one);
  ++tokens_;
}

KVKEEP_INLINE void DecodeFidelity::merge(const DecodeFidelity& other) {
  fidelity_detail::require_same("DecodeFidelity", first_counted_, other.first_counted_, bin_tokens_, other.bin_tokens_);
  total_.add(other.total_);
  fidelity_detail::add_bins(bins_, other.bins_);
}

}  // namespace kvkeep::report
