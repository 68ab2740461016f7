// SPDX-License-Identifier: Apache-2.0
#include "triattention_oracle.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>

namespace oracle {
namespace {

double raw_score(const ScorerInput& in, const TriHead& q, const float* key, int position, const TriOptions& o) {
  const auto F = static_cast<int>(in.inv_freq.size());
  const double a = in.attention_scaling;
  std::vector<std::complex<double>> unturned;
  double norm = 0;
  for (int f = 0; f < F; ++f) {
    const double w = in.inv_freq[static_cast<std::size_t>(f)];
    const std::complex<double> cached(static_cast<double>(key[in.interleaved ? 2 * f : f]),
                                      static_cast<double>(key[in.interleaved ? 2 * f + 1 : f + F]));
    unturned.push_back(cached * std::polar(1.0 / a, -w * position));
    const std::complex<double> mean(q.real[static_cast<std::size_t>(f)], q.imaginary[static_cast<std::size_t>(f)]);
    norm += a * a * (q.modulus[static_cast<std::size_t>(f)] - std::abs(mean)) * std::abs(unturned.back());
  }
  double sum = 0, best = -std::numeric_limits<double>::infinity();
  int count = 0;
  for (long offset = 1; offset <= o.offset_max; offset *= 2, ++count) {
    double trig = 0;
    for (int f = 0; f < F; ++f) {
      const std::complex<double> mean(q.real[static_cast<std::size_t>(f)], q.imaginary[static_cast<std::size_t>(f)]),
          k = unturned[static_cast<std::size_t>(f)];
      const double distance = static_cast<double>(in.P + offset - position);
      trig += a * a * std::abs(mean) * std::abs(k) *
              std::cos(in.inv_freq[static_cast<std::size_t>(f)] * distance + std::arg(mean * std::conj(k)));
    }
    sum += trig;
    best = std::max(best, trig);
  }
  return (o.take_max ? best : sum / count) + norm;
}

void normalise(std::vector<double>& x, const ScorerHead& head, bool sample) {
  double mean = 0, square = 0;
  int n = 0;
  for (int t = 0; t < head.T; ++t)
    if (sample || !head.guarded(t)) mean += x[static_cast<std::size_t>(t)], ++n;
  if (n == 0) return;
  mean /= n;
  for (int t = 0; t < head.T; ++t)
    if (sample || !head.guarded(t))
      square += (x[static_cast<std::size_t>(t)] - mean) * (x[static_cast<std::size_t>(t)] - mean);
  double deviation = sample ? (n > 1 ? std::sqrt(square / (n - 1)) : 1) : std::max(std::sqrt(square / n), 1e-6);
  if (sample && deviation < 1e-8) deviation = 1;
  for (double& v : x) v = (v - mean) / deviation;
}

}  // namespace

ScorerOutput triattention(const ScorerInput& in, const std::function<TriHead(int, int)>& statistics,
                          const TriOptions& o) {
  ScorerOutput out;
  for (int h = 0; h < in.Hkv; ++h) {
    const ScorerHead& head = in.heads[static_cast<std::size_t>(h)];
    std::vector<double>& g =
        out.emplace_back(static_cast<std::size_t>(head.T), o.group_mean ? 0 : -std::numeric_limits<double>::infinity());
    for (int q = h * in.group(); q < (h + 1) * in.group(); ++q) {
      const TriHead given = statistics(in.layer, q);
      std::vector<double> x;
      for (int t = 0; t < head.T; ++t)
        x.push_back(raw_score(in, given, head.key(t, in.D), head.positions[static_cast<std::size_t>(t)], o));
      if (o.normalize) normalise(x, head, o.sample);
      for (std::size_t t = 0; t < x.size(); ++t) g[t] = o.group_mean ? g[t] + x[t] / in.group() : std::max(g[t], x[t]);
    }
  }
  return out;
}

}  // namespace oracle
