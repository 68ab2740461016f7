// SPDX-License-Identifier: Apache-2.0
#pragma once
/// R-KV, a second time: the whole matrix of cosines, plain loops in double.

#include "scorer_input.h"

namespace oracle {

struct RkvQuestion {
  int window = 8;
  int pool = 7;
  double lambda = 0.07;
  double similarity = 0.5;
  bool max_logit = true;  ///< else softmax per query head, then mean
  bool all = true;        ///< redundancy among all slots; else among the history
  bool first = false;     ///< a key that resembles no other spares slot 0
};

/// Column means of the cosines among the first n keys of a head, without the diagonal and what each key spares.
std::vector<double> redundancy(const ScorerHead& head, int D, int n, double similarity, bool first);

ScorerOutput rkv(const ScorerInput& in, const RkvQuestion& question);

}  // namespace oracle
