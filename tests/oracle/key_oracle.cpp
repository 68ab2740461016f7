// SPDX-License-Identifier: Apache-2.0
#include "key_oracle.h"

#include <algorithm>
#include <cmath>

namespace oracle {
namespace {

double dot(const double* a, const double* b, int D) {
  double sum = 0;
  for (int d = 0; d < D; ++d) sum += a[d] * b[d];
  return sum;
}

std::vector<double> key(const ScorerHead& head, int t, int D) { return {head.key(t, D), head.key(t, D) + D}; }

}  // namespace

ScorerOutput knorm(const ScorerInput& in) {
  ScorerOutput out;
  for (const ScorerHead& head : in.heads) {
    out.emplace_back();
    for (int t = 0; t < head.T; ++t) {
      const std::vector<double> k = key(head, t, in.D);
      out.back().push_back(-std::sqrt(dot(k.data(), k.data(), in.D)));
    }
  }
  return out;
}

ScorerOutput cur(const ScorerInput& in, int window) {
  ScorerOutput out;
  for (const ScorerHead& head : in.heads) {
    std::vector<double> keys, values, &g = out.emplace_back();
    for (int t = 0; t < head.T; ++t) {
      keys.push_back(0), values.push_back(0);
      for (int d = 0; d < in.D; ++d) keys.back() += std::pow(static_cast<double>(head.key(t, in.D)[d]), 2);
      for (int d = 0; d < in.Dv; ++d) values.back() += std::pow(static_cast<double>(head.value(t, in.Dv)[d]), 2);
    }
    for (int t = 0; t < head.T; ++t) {
      const int first = window == 0 ? 0 : t / window * window, end = window == 0 ? head.T : first + window;
      double all_keys = 0, all_values = 0;
      for (int n = first; n < end && n < head.T; ++n) {
        all_keys += keys[static_cast<size_t>(n)];
        all_values += values[static_cast<size_t>(n)];
      }
      const double both = keys[static_cast<size_t>(t)] * values[static_cast<size_t>(t)];
      g.push_back(both == 0 ? 0 : both / all_keys / all_values);
    }
  }
  return out;
}

ScorerOutput keydiff(const ScorerInput& in) {
  ScorerOutput out;
  for (const ScorerHead& head : in.heads) {
    std::vector<double> anchor(static_cast<std::size_t>(in.D), 0.0);
    for (int t = 0; t < head.T; ++t) {
      const std::vector<double> k = key(head, t, in.D);
      const double norm = std::max(std::sqrt(dot(k.data(), k.data(), in.D)), 1e-12);
      for (std::size_t d = 0; d < anchor.size(); ++d) anchor[d] += k[d] / norm / head.T;
    }
    const double anchor_norm = std::max(std::sqrt(dot(anchor.data(), anchor.data(), in.D)), 1e-8);
    out.emplace_back();
    for (int t = 0; t < head.T; ++t) {
      const std::vector<double> k = key(head, t, in.D);
      const double norm = std::max(std::sqrt(dot(k.data(), k.data(), in.D)), 1e-8);
      out.back().push_back(-dot(k.data(), anchor.data(), in.D) / (norm * anchor_norm));
    }
  }
  return out;
}

}  // namespace oracle
