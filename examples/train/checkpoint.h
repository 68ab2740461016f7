#pragma once
/// Everything that training needs to go on: weights, optimizer state, the next step. Data and order follow from seed
/// and step.

#include <torch/torch.h>

#include <cstdint>
#include <string>

namespace train {

struct Progress {
  uint64_t seed = 0;
  int64_t step = 0;           ///< steps done
  double seconds = 0;         ///< training time so far
  std::string settings = {};  ///< whatever else must be the same to go on; empty: nothing
};

/// Writes beside `path` and renames, so that a crash leaves the old checkpoint whole.
void save_checkpoint(const std::string& path, const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                     const Progress& progress);

/// Throws kvkeep::InvalidArgument when the file is missing or of another model.
Progress load_checkpoint(const std::string& path, torch::nn::Module& model, torch::optim::Optimizer& optimizer);

}  // namespace train
