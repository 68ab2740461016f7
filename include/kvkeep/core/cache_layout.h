#pragma once
/// Where the slots of a cache are in memory: no two of those that move may share a byte.

#include <array>
#include <cstdint>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/model_spec.h"

namespace kvkeep {

/// Whether every vector of `part` is a piece of the vector of `whole` at the same place, such as the values of latent
/// attention (MLA), which are the first numbers of its keys. `part` and `whole`: keys or values of DenseKv or PagedKv,
/// or their scales.
[[nodiscard]] bool lies_within(const Tensor& part, const Tensor& whole);

/// The memory of the layers of a view, once it has been checked.
class CacheLayout {
 public:
  /// Throws InvalidArgument, with both sides by name, if keys, values or scales of a full layer overlap each other,
  /// those of another layer that is not LayerKind::shared, or themselves (strides of heads, slots, places or pages that
  /// are less than what they step over). Values may lie within the keys of their layer. One scale for all slots, and
  /// one vector for all places and slots (strides of 0), may be anywhere: nothing of them moves. make_rows() checks
  /// the rest of the view, such as that it has as many layers as the model. Cost: one comparison per tensor if they are
  /// those of the last call, and no allocation then; else O(n log n) of n sides, and one test for every two that are
  /// interleaved.
  void check(const ModelSpec& spec, const CacheView& view);

 private:
  /// One of keys, values, key scales and value scales of a layer.
  struct Side {
    std::int32_t layer = 0;
    std::int32_t side = 0;
    bool stays = false;  ///< one vector for all slots, which may be anywhere
    bool moves = false;  ///< its slots, unless it stays
    Device device = {};
    std::intptr_t base = 0;
    std::int64_t width = 0;                    ///< bytes of the vector of one slot
    std::array<std::int64_t, 3> sizes = {};    ///< places or pages, then as in the tensor
    std::array<std::int64_t, 3> strides = {};  ///< bytes
  };
  /// A tensor of the last view that was checked, without its owner.
  struct Known {
    std::size_t layer = 0;
    std::int32_t form = 0;  ///< 0: dense, else the dimension of slots in pages
    Tensor tensor;
  };
  struct Reach;
  static std::vector<Side> list(const ModelSpec& spec, const CacheView& view);
  static Reach reach_of(const Side& side);
  static bool overlap(const Side& a, const Side& b);
  [[nodiscard]] bool is_known(const CacheView& view) const;

  std::vector<Known> known_;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/core/cache_layout-inl.h"
#endif
