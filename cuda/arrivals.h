// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What the engine gives for one layer goes to its place, for all sequences of a step in one launch: new queries to the
/// rings of their sequences, in the layout of kvkeep::QueryRing, and scores to the columns of their rows, as f32. No
/// LibTorch in here.

#include "evidence.h"
#include "kvkeep/core/query_view.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Per launch: they travel with it, so that nothing is copied before it.
inline constexpr std::int32_t kQueryArrivals = 64, kGivenArrivals = 96;

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

struct PushGivenArguments {
  GivenArrival arrivals[kGivenArrivals];
  std::int32_t count = 0;
  Element element = Element::f32;  ///< f32, f16 or bf16
  std::int64_t token_stride = 0;   ///< bytes
};

/// One launch, one thread per score. Cost: every score read once, a number at a time, and written once.
void launch_push_given(const PushGivenArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
