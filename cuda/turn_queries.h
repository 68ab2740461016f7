#pragma once
/// Window queries as the attention kernels read them. Same contract as the CPU's: f32, turned at their own positions, times the softmax scale.

#include "evidence.h"
#include "kvkeep/core/rope.h"
#include "stream.h"

namespace kvkeep::cuda {

struct TurnQueriesArguments {
  EvidenceArguments evidence;                ///< reads queries, count, kv_heads, group, dim, query and scale
  std::int32_t window = 0;                   ///< W newest queries of every group
  const double* inv_freq = nullptr;          ///< f64 [pairs] on the device
  std::int32_t pairs = 0;                    ///< 0: queries come after RoPE, or nothing turns
  RopeStyle style = RopeStyle::half;
  double attention_scaling = 1.0;
  Element element = Element::f32;            ///< of `out`: f32 or bf16
  void* out = nullptr;                       ///< [groups, Hq, W, D], newest query last; zeros where a group holds fewer
};

/// Phases in double, one sine-cosine pair for every (group, query, pair). A query that is not finite stays so: the host cannot be told from here.
/// Throws InvalidArgument for a head size outside 1 to 256, pairs beyond half of it, and elements that cannot be read or written.
void launch_turn_queries(const TurnQueriesArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
