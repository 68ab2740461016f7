#pragma once
/// Running mean and covariance of every query of one layer of one sequence: what a window of queries says of all of
/// them, without a window that grows.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kvkeep/core/rope.h"
#include "kvkeep/core/row.h"

namespace kvkeep {

/// Count, mean and second moment about the mean of one query head's queries before RoPE.
struct QueryMoments {
  std::int64_t count = 0;
  std::vector<double> mean;    ///< [D]
  std::vector<double> second;  ///< [D (D + 1) / 2] sum of (q - mean)(q - mean)^T, lower triangle row after row

  explicit QueryMoments(std::int32_t dim)
      : mean(static_cast<std::size_t>(dim)),
        second(static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim + 1) / 2) {}

  /// Takes in what another has counted. `apart`: f64 [D] to work in. Never subtracts. Source: Chan, Golub and LeVeque,
  /// Updating formulae and a pairwise algorithm for computing sample variances.
  void merge(const QueryMoments& other, std::span<double> apart);
};

/// Queries are taken in by blocks of kBlock tokens that start at multiples of it, counted from the first one that
/// counts, and the newest kRollback tokens or more stay as they came. The moments are therefore the same bits however
/// the tokens were cut into steps, and the newest tokens can be taken back exactly.
class QueryStatistics {
 public:
  static constexpr std::int32_t kBlock = 32;
  static constexpr std::int32_t kRollback = 32;  ///< tokens that can always be taken back

  /// What was counted: to be kept elsewhere and given to statistics of the same sizes again.
  struct Held {
    std::vector<QueryMoments> heads = {};  ///< [Hq] of all tokens but the newest
    std::int64_t skipped = 0;              ///< tokens that did not count
    std::vector<float> newest =
        {};  ///< [tokens, Hq, D] of those that are not in `heads` yet, before RoPE, oldest first
  };

  /// What add() works in: one for all layers and sequences whose heads are alike. Bytes: about Hq * D * (12 D + 150).
  struct Workspace;
  [[nodiscard]] static std::shared_ptr<Workspace> workspace(std::int32_t query_heads, std::int32_t key_dim,
                                                            const RopeSpec& rope);

  /// Queries at logical positions below `from` do not count. Bytes: Hq * D * (4 (D + 3) + 4 (kBlock + kRollback)).
  QueryStatistics(std::int32_t query_heads, std::int32_t key_dim, std::int32_t from);

  /// Adds new tokens, oldest first. data: f32, f16 or bf16 [tokens, Hq, D], strides in bytes; queries after RoPE are
  /// turned back at their own positions. Throws InvalidArgument, before anything is counted, for a query that is not
  /// finite or beyond kLargestQuery; else nothing. Cost: Hq * D * (D + 1) flop per token.
  void add(const std::byte* data, ScalarType dtype, std::int64_t token_stride, std::int64_t head_stride,
           std::span<const std::int32_t> positions, QueryBasis basis, const RopeSpec& rope, Workspace& workspace);
  /// Whether add() takes these queries. Cost: one read of them.
  [[nodiscard]] bool finite(const std::byte* data, ScalarType dtype, std::int64_t token_stride,
                            std::int64_t head_stride, std::span<const std::int32_t> positions) const;
  /// Throws InvalidArgument that names the first query which add() does not take. `where`: whose they are.
  void check(std::string_view where, const std::byte* data, ScalarType dtype, std::int64_t token_stride,
             std::int64_t head_stride, std::span<const std::int32_t> positions) const;

  /// True when the newest `tokens` can be taken back.
  [[nodiscard]] bool can_forget(std::int64_t tokens) const;
  void forget(std::int64_t tokens);

  /// Moments of one query head over everything that was added.
  [[nodiscard]] QueryMoments moments(std::int32_t head) const;

  [[nodiscard]] std::int64_t count() const { return heads_.front().count + pending_; }  ///< queries that count
  [[nodiscard]] std::int64_t bytes() const;

  [[nodiscard]] Held held() const;
  /// Throws InvalidArgument for what no statistics of these sizes hold; as they were then.
  void take(Held held);

 private:
  struct HeadWorkspace;
  void take_in(QueryMoments& to, std::int32_t head, std::int64_t first, std::int64_t rows, HeadWorkspace& in) const;

  std::int32_t dim_, from_;
  std::vector<QueryMoments> heads_;  ///< [Hq] of all tokens but the pending ones
  std::int64_t skipped_ = 0;         ///< tokens that did not count
  std::int64_t pending_ = 0;         ///< newest tokens, not taken in yet
  std::vector<float> newest_;        ///< [kBlock + kRollback, Hq, D] before RoPE, oldest first
};

}  // namespace kvkeep
