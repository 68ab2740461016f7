#pragma once
/// Where a prompt's numbers are while its tokens are ranked and narrowed. No LibTorch in here.

#include <cstdint>

namespace kvkeep::cuda {

/// One prompt of a launch, known on the host. Places are elements from the array's beginning, so that finished prompts
/// can be left out and the others keep their places.
struct RankedPrompt {
  std::int64_t scores = 0;  ///< its first score
  std::int64_t ranks = 0;   ///< its first rank
  std::int64_t stride = 0;  ///< from its ranks of one layer to those of the next
  std::int64_t kept = 0;    ///< where the list of its tokens that continue begins
  std::int32_t ranked = 0;  ///< its tokens before the window
  std::int32_t state = 0;   ///< its LayerSelection
};

}  // namespace kvkeep::cuda
