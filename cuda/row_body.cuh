#pragma once
/// The kernel of row_body.h, for translation units that name a body.

#include "element.cuh"
#include "kvkeep/score/row_scorer.h"
#include "launch.cuh"
#include "row_body.h"
#include "team.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda {

template <class Body, class Key, class Value>
__global__ void __launch_bounds__(tuning::kRowThreads) row_body_kernel(RowBodyArguments<Body> a) {
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  const EvidenceArguments& e = a.evidence;
  for (std::int64_t r = blockIdx.x; r < e.count; r += gridDim.x) {
    if (!e.due(r)) continue;
    a.body.score(ScoredRow<Key, Value>(e.rows[r], e.dim, a.value_dim, e.first_head), a.scores + e.rows[r].first,
                 BlockTeam(scratch));
    __syncthreads();
  }
}

template <class Body>
void launch_row_body(const RowBodyArguments<Body>& arguments, Stream stream) {
  check_wide("row_body", "keys", arguments.evidence.keys);
  check_wide("row_body", "values", arguments.values);
  const auto run = [&](auto key, auto value) {
    launch("row_body", row_body_kernel<Body, decltype(key), decltype(value)>,
           {.blocks = blocks_for(arguments.evidence.count), .threads = tuning::kRowThreads}, stream, arguments);
  };
  if constexpr (requires { Body::kReadsColumnsAlone; })
    run(float{}, float{});
  else
    with_wide_element(arguments.evidence.keys,
                      [&](auto key) { with_wide_element(arguments.values, [&](auto value) { run(key, value); }); });
}

}  // namespace kvkeep::cuda
