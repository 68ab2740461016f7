#pragma once
/// Running mean and second moment of every query on a GPU. Same layout, blocks and order of sums as
/// kvkeep::QueryStatistics: the same bits as the CPU where its vector code fuses multiply-adds and the turns of RoPE
/// round alike, else to the last bits of f32. A query that is not finite makes the moments of its head NaN. No LibTorch
/// in here.

#include "evidence.h"
#include "kvkeep/core/query_moments.h"
#include "stream.h"

namespace kvkeep::cuda {

inline constexpr std::int32_t kMomentsArrivals =
    48;  ///< per launch: they travel with it, so that nothing is copied before it

struct PushMomentsArguments {
  MomentsArrival arrivals[kMomentsArrivals];  ///< those of one sequence follow each other
  std::int32_t count = 0;
  Element element = Element::f32;  ///< f32, f16 or bf16
  MomentsLayout layout;            ///< its dtype is `element`
};

/// One launch, one block per sequence and query head. Cost: Hq * D * (D + 1) flop in f32 per token, and per block of
/// kMomentBlock tokens 3 Hq D (D + 1) / 2 in f64; moments are read and written once in a launch in which such a block
/// is full, else only the queries are copied. Throws InvalidArgument for head sizes outside 1 to 256, rotary pairs
/// beyond half of them, and 8-bit queries.
void launch_push_moments(const PushMomentsArguments& arguments, Stream stream);

struct SumMomentsArguments {
  const MomentsView* views = nullptr;  ///< [groups] on the device
  std::int32_t groups = 0;
  std::int32_t query_heads = 0;
  std::int32_t dim = 0;      ///< 1 to 256
  double* mean = nullptr;    ///< [groups, Hq, D]
  double* second = nullptr;  ///< [groups, Hq, D (D + 1) / 2]
};

/// Moments of everything counted, the newest queries included, as QueryStatistics::moments(): what ExpectedArguments
/// takes. Nothing is written for a group without queries. One launch, one block per group and query head. Cost: moments
/// read and written once, and those of up to kMomentRing queries.
void launch_sum_moments(const SumMomentsArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
