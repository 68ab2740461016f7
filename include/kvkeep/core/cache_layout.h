#pragma once
/// Where the slots of a cache are in memory: no two of those that move may share a byte.

#include <span>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/model_spec.h"

namespace kvkeep {

/// Whether every vector of `part` is a piece of the vector of `whole` at the same place, such as the values of latent
/// attention (MLA), which are the first numbers of its keys. `part` and `whole`: keys or values of DenseKv or PagedKv,
/// or their scales.
[[nodiscard]] bool lies_within(const Tensor& part, const Tensor& whole);

/// Throws InvalidArgument, with both sides by name, if keys, values or scales of a full layer overlap each other, those
/// of another layer that is not LayerKind::shared, or themselves (strides of heads, slots, places or pages that are
/// less than what they step over). Values may lie within the keys of their layer. One scale for all slots, and one
/// vector for all places and slots (strides of 0), may be anywhere: nothing of them moves. cache: [num_layers];
/// common_form() checks the rest of it. Cost: O(n log n) of n tensors, and one test for every two that are interleaved.
void check_layout(const ModelSpec& spec, std::span<const LayerKv> cache);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/core/cache_layout-inl.h"
#endif
