#pragma once
/// Scores that the engine gives for one layer go to the columns of their rows, as f32. No LibTorch in here.

#include "evidence.h"
#include "kvkeep/core/query_view.h"
#include "stream.h"

namespace kvkeep::cuda {

inline constexpr std::int32_t kGivenArrivals =
    96;  ///< per launch: they travel with it, so that nothing is copied before it

struct PushGivenArguments {
  GivenArrival arrivals[kGivenArrivals];
  std::int32_t count = 0;
  Element element = Element::f32;  ///< f32, f16 or bf16
  std::int64_t token_stride = 0;   ///< bytes
};

/// One launch, one thread per score. Cost: every score read once, a number at a time, and written once.
void launch_push_given(const PushGivenArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
