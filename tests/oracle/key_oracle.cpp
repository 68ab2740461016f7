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
