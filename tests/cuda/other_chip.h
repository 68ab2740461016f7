// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The execution model as another chip.

#if defined(KVKEEP_CUDA_MODEL)
#include "cuda_model.h"

namespace kvkeep::cuda {

/// A chip other than the model's own while it lives.
class OtherChip {
 public:
  explicit OtherChip(model::Chip chip) : before_(model::chip()) { model::chip() = chip; }
  ~OtherChip() { model::chip() = before_; }
  OtherChip(const OtherChip&) = delete;
  OtherChip& operator=(const OtherChip&) = delete;

 private:
  model::Chip before_;
};

}  // namespace kvkeep::cuda
#endif
