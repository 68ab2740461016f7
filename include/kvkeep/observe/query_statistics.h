#pragma once
/// Running mean and covariance of every query of one layer of one sequence: what a window over all queries would tell,
/// without a growing window.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kvkeep/core/rope.h"
#include "kvkeep/core/row.h"

namespace kvkeep {

/// Count, mean and second moment about the mean of one head's queries before RoPE.
struct QueryMoments {
  std::int64_t count = 0;
  std::vector<double> mean;    ///< [D]
  std::vector<double> second;  ///< [D (D + 1) / 2] sum of (q - mean)(q - mean)^T, lower triangle row by row

  explicit QueryMoments(std::int32_t dim)
      : mean(static_cast<std::size_t>(dim)),
        second(static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim + 1) / 2) {}

  /// Adds what `other` has counted. `apart`: f64 [D] scratch. Never subtracts. Source: Chan, Golub and LeVeque,
  /// Updating formulae and a pairwise algorithm for computing sample variances.
  void merge(const QueryMoments& other, std::span<double> apart);
};

/// Queries enter the moments in blocks of kBlock tokens, counted from the first token that counts. At least the newest
/// kRollback tokens stay out of them. So the moments have the same bits however tokens are divided into steps, and the
/// newest tokens can be taken back exactly.
class QueryStatistics {
 public:
  static constexpr std::int32_t kBlock = 32;
  static constexpr std::int32_t kRollback = 32;  ///< tokens that can always be taken back

  /// Everything counted: for storing elsewhere and restoring into statistics of the same sizes.
  struct Held {
    std::vector<QueryMoments> heads = {};  ///< [Hq] of all tokens except the newest
    std::int64_t skipped = 0;              ///< tokens that did not count
    std::vector<float> newest = {};  ///< [tokens, Hq, D] queries that are not in `heads` yet, before RoPE, oldest first
  };

  /// Scratch of add(): one for all layers and sequences with the same heads. Bytes: about Hq * D * (12 D + 150).
  struct Workspace;
  [[nodiscard]] static std::shared_ptr<Workspace> workspace(std::int32_t query_heads, std::int32_t key_dim,
                                                            const RopeSpec& rope);

  /// Queries at logical positions below `from` do not count. Bytes: Hq * D * (4 (D + 3) + 4 (kBlock + kRollback)).
  QueryStatistics(std::int32_t query_heads, std::int32_t key_dim, std::int32_t from);

  /// Adds new tokens, oldest first. data: f32, f16 or bf16 [tokens, Hq, D], strides in bytes. Queries given after RoPE
  /// are rotated back from their positions. Throws only InvalidArgument, before anything is counted, for a query that
  /// is not finite or is beyond kLargestQuery. Cost: Hq * D * (D + 1) flop per token.
  void add(const std::byte* data, Dtype dtype, std::int64_t token_stride, std::int64_t head_stride,
           std::span<const std::int32_t> positions, QueryBasis basis, const RopeSpec& rope, Workspace& workspace);
  /// Whether add() accepts these queries. Cost: one read of them.
  [[nodiscard]] bool finite(const std::byte* data, Dtype dtype, std::int64_t token_stride, std::int64_t head_stride,
                            std::span<const std::int32_t> positions) const;
  /// Throws InvalidArgument that names the first query that add() does not accept. `where`: whose queries they are.
  void check(std::string_view where, const std::byte* data, Dtype dtype, std::int64_t token_stride,
             std::int64_t head_stride, std::span<const std::int32_t> positions) const;

  /// True if the newest `tokens` can be taken back.
  [[nodiscard]] bool can_forget(std::int64_t tokens) const;
  void forget(std::int64_t tokens);

  /// Moments of one query head over everything added.
  [[nodiscard]] QueryMoments moments(std::int32_t head) const;

  [[nodiscard]] std::int64_t count() const { return heads_.front().count + pending_; }  ///< queries that count
  [[nodiscard]] std::int64_t bytes() const;

  [[nodiscard]] Held held() const;
  /// Throws InvalidArgument, leaving these statistics unchanged, for contents that no statistics of these sizes can
  /// hold.
  void take(Held held);

 private:
  struct HeadWorkspace;
  void take_in(QueryMoments& to, std::int32_t head, std::int64_t first, std::int64_t rows, HeadWorkspace& in) const;

  std::int32_t dim_, from_;
  std::vector<QueryMoments> heads_;  ///< [Hq] of all tokens except the pending ones
  std::int64_t skipped_ = 0;         ///< tokens that did not count
  std::int64_t pending_ = 0;         ///< newest tokens that are not in the moments yet
  std::vector<float> newest_;        ///< [kBlock + kRollback, Hq, D] before RoPE, oldest first
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/observe/query_block.h"  // and, after it, the bodies of this file
#endif
