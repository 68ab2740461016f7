#pragma once
/// New queries of one layer go to the rings of their sequences, all sequences of a step in one launch. Same layout as
/// kvkeep::QueryRing. No LibTorch in here.

#include "kvkeep/core/query_view.h"
#include "stream.h"

namespace kvkeep::cuda {

inline constexpr std::int32_t kQueryArrivals =
    64;  ///< per launch: they travel with it, so that nothing is copied before it

struct PushQueriesArguments {
  QueryArrival arrivals[kQueryArrivals];
  std::int32_t count = 0;
  QueryLayout layout;
};

/// One launch, one block per token. Cost: the bytes of the queries, read and written once in words of up to 16 bytes.
void launch_push_queries(const PushQueriesArguments& arguments, Stream stream);

struct PushStepArguments {
  const QueryPlace* places = nullptr;  ///< [tokens] on the device
  std::int32_t tokens = 0;
  QueryLayout layout;
  LayerOffset offset;
};

/// The same by a table: its arguments stay the same from step to step, so a graph may repeat it. One launch, one block
/// per token. Cost: as above.
void launch_push_step(const PushStepArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
