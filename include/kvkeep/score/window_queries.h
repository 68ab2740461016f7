#pragma once
/// Not part of the interface. Queries of a window as the reductions of window attention read them: f32, rotated at
/// their own positions, times the softmax scale.

#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/core/evidence.h"
#include "kvkeep/core/window.h"

namespace kvkeep::cpu {

/// True when both hold queries at the same positions, as the layers of one sequence do.
[[nodiscard]] bool same_positions(const QueryView& a, const QueryView& b);

/// cos and sin of every window query of one sequence, in layers of one RoPE.
struct Turns {
  const RopeSpec* rope = nullptr;
  std::int32_t window = 0;
  std::vector<float> cosines = {}, sines = {};  ///< [window, F], newest query last
};

/// Turns of all groups, each as wide as the widest window of its rows. Layers of a sequence that turn alike share
/// them, because its queries are at the same positions in each.
class WindowTurns {
 public:
  WindowTurns(const Evidence& evidence, std::span<const RowWindow> windows);
  [[nodiscard]] const Turns& of(std::size_t group) const { return turns_[index_[group]]; }

 private:
  std::vector<Turns> turns_;
  std::vector<std::size_t> index_;  ///< [groups] into turns_
};

/// Queries of the group of `head`, [G * window, D] f32, newest `window` of the view, query head by query head.
/// Throws InvalidArgument for a query that is not finite or of a dtype that cannot be read.
void gather_queries(const Evidence& evidence, const QueryView& view, std::int32_t head, std::int32_t window,
                    const Turns& turns, float* out);

}  // namespace kvkeep::cpu

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/score/window_queries-inl.h"
#endif
