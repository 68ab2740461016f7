// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/score/cur.h"
#include "kvkeep/score/defensive.h"
#include "kvkeep/score/given.h"
#include "kvkeep/score/h2o.h"
#include "kvkeep/score/knorm.h"
#include "kvkeep/score/random.h"
#include "kvkeep/score/recency.h"
#include "kvkeep/score/rpc.h"
#include "kvkeep/score/snapkv.h"
#include "kvkeep/score/tova.h"
#include "kvkeep/score/vase.h"
#include "row_body.cuh"

namespace kvkeep::cuda {

template void launch_row_body(const RowBodyArguments<CurOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<DefensiveOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<GivenOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<H2OOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<KnormOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<RandomAttentionOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<RandomOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<RecencyOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<RpcOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<SnapKVOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<TovaOptions>&, Stream);
template void launch_row_body(const RowBodyArguments<VaseOptions>&, Stream);

}  // namespace kvkeep::cuda
