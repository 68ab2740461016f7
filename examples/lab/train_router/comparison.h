// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What a trained router is worth: the answers of the library's own span memory on held-out samples, by rule and by
/// what is opened.

#include <string>
#include <vector>

#include "kvkeep/memory/router.h"
#include "lesson.h"

namespace train {

/// A Markdown table on stdout. Each row: a rule and its setting; entries that are opened, mean over positions, layers
/// and KV heads (entries that heads of a group share count once); KL of the final logits from those of the whole cache;
/// share of positions with the same argmax; share of look-ups answered right. Rules: nothing, everything, what the
/// teacher needs (the targets of training), the router as it is; then, for each of `entries`, router, mass and coverage
/// with the settings that open about as many.
void print_comparison(const Llama& model, const std::vector<Lesson>& lessons, const kvkeep::Routing& routing,
                      const std::vector<double>& entries, int threads);

}  // namespace train
