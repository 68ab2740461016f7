// SPDX-License-Identifier: Apache-2.0
#include "kvlab/sampling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "dice.h"
#include "kvkeep/core/error.h"

namespace kvkeep::lm {
namespace {

/// exp(x) for x <= 0, the same bits everywhere, which the standard library does not promise. Relative error below
/// 1e-15; 0 below -40.
double exponential(double x) {
  if (!(x > -40)) return 0;
  const double twos = std::floor(x * 1.4426950408889634 + 0.5);
  // ln 2 in two parts; the product with the first is exact.
  const double rest = (x - twos * 0x1.62e42fee00000p-1) - twos * 0x1.a39ef35793c76p-33;
  double sum = 1;
  for (int n = 13; n >= 1; --n) sum = 1 + sum * rest / n;  // Taylor; |rest| is at most ln 2 / 2
  return std::ldexp(sum, static_cast<int>(twos));
}

struct Candidate {
  double weight;  // a whole number: multiples of 2^-32 of the largest
  std::int32_t token;
};

bool comes_later(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight < b.weight : a.token > b.token;
}

std::vector<Candidate> candidates(std::span<const float> logits, double temperature) {
  float top = -std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    KVKEEP_REQUIRE(logits[i] < std::numeric_limits<float>::infinity(), "sampling: logit ", i, " is ", logits[i],
                   "; allowed finite numbers and -inf");
    top = std::max(top, logits[i]);
  }
  KVKEEP_REQUIRE(std::isfinite(top), "sampling: none of ", logits.size(),
                 " logits is above -inf; allowed one token or more");
  std::vector<Candidate> all;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double below = (static_cast<double>(logits[i]) - static_cast<double>(top)) / temperature;
    const double weight = std::floor(exponential(below) * 0x1p32 + 0.5);
    if (weight > 0) all.push_back({weight, static_cast<std::int32_t>(i)});
  }
  return all;
}

/// Candidates by falling weight, sorted only as far as they are asked for.
class Ranking {
 public:
  explicit Ranking(std::vector<Candidate> all) : heap_(std::move(all)) { std::ranges::make_heap(heap_, comes_later); }

  const Candidate& at(std::size_t rank) {
    for (; sorted_ <= rank; ++sorted_)
      std::pop_heap(heap_.begin(), heap_.end() - static_cast<std::ptrdiff_t>(sorted_), comes_later);
    return heap_[heap_.size() - 1 - rank];
  }

 private:
  std::vector<Candidate> heap_;  // the sorted ones at its end
  std::size_t sorted_ = 0;
};

}  // namespace

void check_sampling(const Sampling& sampling) {
  KVKEEP_REQUIRE(sampling.temperature >= 0 && std::isfinite(sampling.temperature), "sampling: temperature is ",
                 sampling.temperature, "; allowed 0 (greedy) or more");
  KVKEEP_REQUIRE(sampling.top_p > 0 && sampling.top_p <= 1, "sampling: top_p is ", sampling.top_p,
                 "; allowed above 0 up to 1");
}

std::int32_t draw(std::span<const float> logits, const Sampling& sampling, std::int64_t step) {
  check_sampling(sampling);
  KVKEEP_REQUIRE(!sampling.greedy(), "sampling: temperature is 0, which draws nothing; allowed above 0");
  constexpr std::size_t kMost = std::size_t{1} << 20;  // sums of weights stay below 2^53
  KVKEEP_REQUIRE(logits.size() <= kMost, "sampling: ", logits.size(), " logits; allowed ", kMost);
  std::vector<Candidate> all = candidates(logits, sampling.temperature);
  double inside = 0;
  for (const Candidate& one : all) inside += one.weight;
  Ranking ranking(std::move(all));
  if (sampling.top_p < 1) {
    const double wanted = sampling.top_p * inside;
    inside = 0;
    for (std::size_t rank = 0; inside < wanted; ++rank) inside += ranking.at(rank).weight;
  }
  // 52 bits: the product stays below `inside` after rounding.
  const double target =
      inside * (static_cast<double>(Dice(text("sampling ", step), sampling.seed).bits() >> 12) * 0x1p-52);
  double sum = 0;
  for (std::size_t rank = 0;; ++rank)
    if (sum += ranking.at(rank).weight; sum > target) return ranking.at(rank).token;
}

}  // namespace kvkeep::lm
