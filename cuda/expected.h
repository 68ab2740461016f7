// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Expected Attention on a GPU. Same contract as `kvkeep::Expected`, with keys and values of 8 bits too, except for
/// queries that are not finite: the device cannot tell the host, so their heads make every score of the row NaN.
///
/// k^T C k = |U k|^2 throughout, C = U^T U: U is the Cholesky factor (sums in double, kept as f32), or the centred
/// queries themselves if a window holds no more than D of them. It is never negative, and as exact if C is singular.
/// f32 keys, and all keys if `matrix_unit` is false, run in f32, one chain of multiply-adds over the head
/// dimension. Other keys run on matrix units in their own dtype (8 bits: f16), U as the sum of two such numbers, the
/// mean as the sum of three: for f16 and 8-bit keys as exact as f32; for bf16 keys x differs by up to 2^-15 scale^2
/// tr(C) |k|^2. Equal keys of a row score equal bits wherever they are; a row's bits depend only on the row. An
/// infinite key may score NaN on matrix units.

#include "evidence.h"
#include "gram.h"
#include "kvkeep/core/model_spec.h"
#include "stream.h"
#include "tuning.cuh"

namespace kvkeep::cuda {

struct ExpectedArguments {
  EvidenceArguments evidence;
  Element values = Element::f32;                 ///< read if value_norm
  std::int32_t value_dim = 0;                    ///< 1 to 256 if value_norm
  const std::int32_t* next_positions = nullptr;  ///< i32 [count / kv_heads] RowGroup::next_position
  bool post_rope = false;                        ///< queries come after RoPE and are turned back
  std::int32_t future = 512;                     ///< ExpectedOptions from here on
  std::int32_t sink = 4;
  bool covariance = true;
  bool value_norm = true;
  double epsilon = 0.01;
  std::int32_t queries = 256;  ///< newest queries that are read, or, if that is less, the most that any group holds:
                               ///< workspace grows with it
  bool matrix_unit = true;
  Blas* blas = nullptr;  ///< multiplies the queries of heads for which `gram_queries` or more count, and more than D;
                         ///< it is open. Null, f32 throughout, or `queries` above 65,536: the kernel multiplies
  std::int32_t gram_queries = tuning::kGramQueries;
  std::int64_t slots = 0;     ///< sum of all lengths
  float* scores = nullptr;    ///< f32 [slots] at Row::first
  void* workspace = nullptr;  ///< expected_workspace_bytes(), aligned to 32
};

/// True if heads may have so many queries that `blas` would multiply them.
[[nodiscard]] bool expected_multiplies_many(const ExpectedArguments& arguments);

/// 4 G bytes per slot; 8 G + 4 for every (row, 512 slots of the longest row). For every query head 16 bytes, its factor
/// of 4 Dp R and its mean: 4 Dp in f32, 6 Dp on matrix units, where a KV head's heads are padded to 16; Dp is D
/// rounded up to 16, R the lesser of `queries` and D rounded up to 32, without covariance 0. For
/// every group 8 D if something turns, and 4 D for each of `queries` if they come after RoPE. Where `blas` multiplies,
/// 262,144 Dp + 1,024 Dp^2 for all heads together.
[[nodiscard]] std::int64_t expected_workspace_bytes(const ExpectedArguments& arguments);

/// Five launches: turns; one block per query head for its moments and factor; logits; softmax, mean and value norm; the
/// sinks' score (not if sink is 0). Where `blas` multiplies, three for the moments of every 128 times 512 queries, and
/// one for the factors of all heads. Which way a head goes depends on its own queries alone; both have the errors of
/// sums in f32 (GramTask in expected_task.cuh). Cost: flop as on the CPU, twice that on matrix units; keys and values
/// are read once, a head's factor once for every 128 slots (in f32 64), its queries three to five times, the more the
/// larger D is. Throws InvalidArgument for head sizes outside 1 to 256, 8-bit queries, and future, sink, queries or
/// gram_queries that are not counts. Requires: no more rotary pairs than D / 2.
void launch_expected(const ExpectedArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
