// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What the two parts of Expected Attention share on a device: mean and factor of every query head
/// (expected_moments.cu), and the scores made of them (expected.cu).

#include "element.cuh"
#include "expected.h"
#include "team.cuh"
#include "tuning.cuh"

namespace kvkeep::cuda::expected {

constexpr std::int32_t kMeanHeads = 16;  ///< heads whose means are multiplied together on matrix units
constexpr std::int32_t kMeanParts = 3;

KVKEEP_HD inline std::int32_t round_up(std::int32_t n, std::int32_t to) { return (n + to - 1) / to * to; }

constexpr std::int32_t kUnseen = -1;

/// How the factor of one query head is read.
struct HeadFactor {
  float factor;       ///< of its products
  float mean_factor;  ///< of those of its mean
  std::int32_t rows;  ///< 0: no covariance; kUnseen: no query either
  bool triangular;    ///< row i is 0 before component i; until the factors are made, there are sums of products instead
  bool product;       ///< its queries were left to cuBLAS
};

/// Centred, turned queries z on their way through cuBLAS, for the heads of a turn. A number is the sum of two f16, h
/// and l / 2,048: z is below 4 and taken to 22 bits. With rows [h, l], one product of h with both gives hh^T and hl^T;
/// sum z z^T is hh^T + (hl^T + lh^T) / 2,048 but for 2^-24 of every |z z^T|. Since the mean is gone before anything is
/// rounded, nothing cancels, however large it is. A call always has the same shape, filled up with zeros, so that
/// cuBLAS multiplies a head in the same way whatever its neighbours are.
struct GramTask {
  static constexpr float kLow = 2048;

  __half* rows;          ///< [kGramItems, kGramTokens, 2 Dp]
  float* products;       ///< [kGramItems, Dp, 2 Dp]
  std::int64_t first;    ///< head of the turn
  std::int32_t pieces;   ///< of kGramTokens that a head has
  std::int32_t at_once;  ///< heads of a turn; 0: the kernel multiplies
};

struct ExpectedTask {
  ExpectedArguments a;
  double2* future;     ///< [groups, D / 2] mean turn of the coming positions
  float2* back;        ///< [groups, queries, D / 2] what undoes RoPE for the newest queries
  HeadFactor* heads;   ///< [groups * Hq]
  std::byte* means;    ///< f32 [rows of the table, G, Dp], or [rows, G rounded up to 16, parts, Dp] of 16 bits
  std::byte* factors;  ///< [groups * Hq, rows, Dp] f32, or as many high parts and then low parts of 16 bits in each row
  float2* partial;     ///< [count, chunks, G] maximum and sum of one chunk
  float* tops;         ///< [count, chunks] largest score
  float* logits;       ///< [slots * G]: of a row [G, length]
  GramTask gram;
  std::int32_t padded, rows, chunks;
  bool unit;

  [[nodiscard]] __device__ float* logits_of(std::int64_t r) const {
    return logits + a.evidence.rows[r].first * a.evidence.group;
  }
  [[nodiscard]] KVKEEP_HD bool turns() const { return a.evidence.ropes != nullptr; }
  [[nodiscard]] KVKEEP_HD std::int32_t backs() const { return a.post_rope && turns() ? a.queries : 0; }
  [[nodiscard]] KVKEEP_HD std::int32_t most_pairs() const { return a.evidence.dim / 2; }
  [[nodiscard]] __device__ RopeView rope(std::int64_t group) const {
    return turns() ? a.evidence.ropes[group] : RopeView();
  }
  [[nodiscard]] KVKEEP_HD std::int64_t mean_bytes() const {  ///< of one row
    return std::int64_t{padded} *
           (unit ? round_up(a.evidence.group, kMeanHeads) * kMeanParts * 2 : a.evidence.group * 4);
  }
  /// Whether cuBLAS multiplies the queries of a head for which `count` are counted.
  [[nodiscard]] KVKEEP_HD bool grams(std::int32_t count) const {
    return gram.at_once > 0 && count >= a.gram_queries && count > a.evidence.dim;
  }
  [[nodiscard]] KVKEEP_HD std::int64_t factor_bytes() const { return std::int64_t{rows} * padded * 4; }
};

/// True for a row that is scored by queries, after the moments were made.
__device__ inline bool is_scored(const ExpectedTask& task, std::int64_t r) {
  const EvidenceArguments& e = task.a.evidence;
  return e.due(r) && e.rows[r].length > task.a.sink && task.heads[r * e.group].rows != kUnseen;
}

/// Writes heads, means and factors of every due row, from the rows' queries.
void launch_moments(const ExpectedTask& task, Stream stream);

}  // namespace kvkeep::cuda::expected
