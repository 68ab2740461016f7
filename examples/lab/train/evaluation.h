// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Measures a trained model: look-up accuracy per task and length with the full cache and with parts of it hidden, and
/// where look-ups look.

#include <cstdint>
#include <string>
#include <vector>

#include "llama.h"

namespace train {

struct EvaluationOptions {
  std::vector<int32_t> lengths = {512, 1024};
  int32_t samples = 200;           ///< fresh samples per task and length
  uint64_t first_seed = 1u << 30;  ///< training draws its seeds from elsewhere
};

/// A Markdown table on stdout: look-ups, accuracy and 95 % interval (Wilson) for
///   full     the whole cache;
///   newest   after the prompt, only the first 4 positions and the newest quarter of the length;
///   needed   after the prompt, only the first 4 positions, what TaskSample::needed still
///            says is needed, and the newest 32.
void print_accuracy(const Llama& model, const EvaluationOptions& options);

/// A Markdown table on stdout: per layer and head, the share of a look-up's attention on each kind of token. 20 samples
/// per task.
void print_attention(const Llama& model, int32_t length, uint64_t first_seed);

}  // namespace train
