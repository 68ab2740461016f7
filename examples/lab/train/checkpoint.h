// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Everything that training needs to continue: weights, optimizer state, the next step. Data and order follow from seed
/// and step.

#include <torch/torch.h>

#include <cstdint>
#include <string>

namespace train {

struct Progress {
  uint64_t seed = 0;
  int64_t step = 0;           ///< steps done
  double seconds = 0;         ///< training time so far
  std::string settings = {};  ///< whatever else must be the same to continue; empty: nothing
};

/// Writes a file beside `path` and renames it, so that a crash leaves the old checkpoint intact.
void save_checkpoint(const std::string& path, const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                     const Progress& progress);

/// Throws kvkeep::InvalidArgument if the file is missing or belongs to another model.
Progress load_checkpoint(const std::string& path, torch::nn::Module& model, torch::optim::Optimizer& optimizer);

}  // namespace train
