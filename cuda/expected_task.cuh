// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What the two parts of Expected Attention share on a device: mean and factor of every query head
/// (expected_moments.cu), and the scores made of them (expected.cu).

#include "element.cuh"
#include "expected.h"
#include "team.cuh"

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
  bool triangular;    ///< row i is 0 before component i
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
