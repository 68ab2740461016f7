// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Scorers that are one body for both machines (kvkeep/score/row_scorer.h) on a GPU.

#include <typeindex>

#include "evidence.h"
#include "kvkeep/score/row_scorer.h"
#include "stream.h"

namespace kvkeep::cuda {

/// What a body is run over.
struct ScoredRows {
  EvidenceArguments evidence;
  Element values = Element::f32;  ///< f32, f16 or bf16, as the keys; f32 if the body does not read them
  std::int32_t value_dim = 0;
  const std::int32_t* next_positions = nullptr;  ///< i32 [count / kv_heads]; null: no body reads them
  const RowWindow* windows = nullptr;            ///< [count] of a window body
  float* attention = nullptr;                    ///< f32 [slots] what a window body finishes
  bool sum = false;                              ///< that is WindowReading::Kind::sum: rows that are not due count, too
  bool accumulates = false;                      ///< rows that are not due count, too: scores are the next tally
  float* scores = nullptr;                       ///< f32 [slots]; under kInPlace the same memory as `attention`
};

template <class Body>
struct RowBodyArguments {
  ScoredRows rows;
  Body body = {};
};

/// One launch: a block per row, or, with kEachSlot, per 1024 slots of one. Cost: that of the body. Workspace: none.
/// Throws InvalidArgument for keys or values of 8 bits that the body reads, but for norms of keys.
/// cuda/row_bodies.cu names every body that it exists for.
template <class Body>
void launch_row_body(const RowBodyArguments<Body>& arguments, Stream stream);

/// How a scorer runs on a GPU.
struct RowScorerLaunch {
  void (*run)(const Scorer& scorer, const ScoredRows& rows, Stream stream) = nullptr;
  WindowReading (*reading)(const Scorer& scorer) = nullptr;  ///< of a window scorer, else null
  bool in_place = false;                                     ///< BodyTraits::kInPlace
  bool as_read = false;                                      ///< BodyTraits::kAsRead
};

/// Any thread may call it at any time. The last launch for a class counts.
void register_row_scorer(std::type_index scorer, RowScorerLaunch launch);

/// From now on keepers on a GPU run `S`, a RowScorer or a WindowScorer. A .cu file of the program must have the kernel:
///
///     #include <kvkeep/cuda/row_body.cuh>
///     template void kvkeep::cuda::launch_row_body(const kvkeep::cuda::RowBodyArguments<S::Options>&,
///                                                 kvkeep::cuda::Stream);
template <class S>
void register_scorer() {
  using Options = typename S::Options;
  RowScorerLaunch launch{[](const Scorer& scorer, const ScoredRows& rows, Stream stream) {
    launch_row_body(RowBodyArguments<Options>{rows, static_cast<const S&>(scorer).options()}, stream);
  }};
  if constexpr (BodyTraits<Options>::kWindow)
    launch.reading = [](const Scorer& scorer) { return static_cast<const S&>(scorer).options().reading(); };
  launch.in_place = BodyTraits<Options>::kInPlace;
  launch.as_read = BodyTraits<Options>::kAsRead;
  register_row_scorer(typeid(S), launch);
}

}  // namespace kvkeep::cuda
