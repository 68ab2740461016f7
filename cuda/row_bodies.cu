#include "kvkeep/score/cur.h"
#include "kvkeep/score/given.h"
#include "kvkeep/score/random.h"
#include "kvkeep/score/recency.h"
#include "row_body.cuh"

namespace kvkeep::cuda {

template void launch_row_body(const RowBodyArguments<CurOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<GivenOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<RandomAttentionOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<RandomOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<RecencyOptions>&, Stream);

}  // namespace kvkeep::cuda
