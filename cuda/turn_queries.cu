#include "turn_queries.h"

#include "element.cuh"
#include "launch.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {
namespace {

/// A block turns one token of a group: all its heads stand at the same position.
template <class From, class To>
__global__ void __launch_bounds__(tuning::kTurnThreads) turn_kernel(TurnQueriesArguments a) {
  __shared__ RopeTurn turns[128];
  const EvidenceArguments& e = a.evidence;
  const std::int64_t tokens = std::int64_t{e.count} / e.kv_heads * a.window;
  const std::int32_t heads = e.query_heads();
  for (std::int64_t n = blockIdx.x; n < tokens; n += gridDim.x) {
    const std::int64_t group = n / a.window;
    const auto i = static_cast<std::int32_t>(n - group * a.window);
    const QueryWindow& view = e.queries[group];
    const std::int32_t token = view.count - a.window + i;
    __syncthreads();
    if (token >= 0)
      for (auto f = static_cast<std::int32_t>(threadIdx.x); f < a.pairs; f += tuning::kTurnThreads) turns[f] = rope_turn(view.position(token), a.inv_freq[f], a.attention_scaling);
    __syncthreads();
    for (auto at = static_cast<std::int32_t>(threadIdx.x); at < heads * e.dim; at += tuning::kTurnThreads) {
      const std::int32_t head = at / e.dim, d = at - head * e.dim;
      float x = 0;
      if (token >= 0) {
        const auto* q = reinterpret_cast<const From*>(view.at(token, head));
        x = to_float(q[d]);
        if (d < 2 * a.pairs) {
          const std::int32_t f = a.style == RopeStyle::half ? d % a.pairs : d / 2;
          const auto [first, second] = rope_pair(a.style, f, a.pairs);
          const float p = to_float(q[first]), s = to_float(q[second]);
          x = d == first ? p * turns[f].cosine - s * turns[f].sine : s * turns[f].cosine + p * turns[f].sine;
        }
        x *= e.scale;
      }
      from_float(x, reinterpret_cast<To*>(a.out)[((group * heads + head) * a.window + i) * e.dim + d]);
    }
  }
}

}  // namespace

void launch_turn_queries(const TurnQueriesArguments& arguments, Stream stream) {
  const EvidenceArguments& e = arguments.evidence;
  check_dim("turn_queries", e.dim);
  require(arguments.pairs >= 0 && 2 * arguments.pairs <= e.dim, "turn_queries: rotary pairs; given ", arguments.pairs, "; allowed 0 to half of ", e.dim);
  require(arguments.element == Element::f32 || arguments.element == Element::bf16, "turn_queries: queries can be written as f32 or bf16");
  with_element(e.query, [&](auto from) {
    using From = decltype(from);
    if constexpr (std::is_same_v<From, Fp8>) {
      refuse("turn_queries: queries can be read as f32, f16 or bf16; given fp8");
    } else {
      const Grid grid{.blocks = blocks_for(std::int64_t{e.count} / e.kv_heads * arguments.window), .threads = tuning::kTurnThreads};
      if (arguments.element == Element::f32) launch("turn_queries", turn_kernel<From, float>, grid, stream, arguments);
      else launch("turn_queries", turn_kernel<From, __nv_bfloat16>, grid, stream, arguments);
    }
  });
}

}  // namespace kvkeep::cuda
