// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Thresholds of a trained router, set by what opening is worth.

#include <vector>

#include "lesson.h"
#include "router_parameters.h"

namespace train {

/// Gives each head the threshold with the most (attention that goes to opened spans) - `price` * (opened spans) over
/// the lessons, by the teacher's queries. A head that looks into spans too little opens nothing: its threshold is 1.
void set_thresholds(const std::vector<Lesson>& lessons, double price, RouterParameters& parameters);

}  // namespace train
