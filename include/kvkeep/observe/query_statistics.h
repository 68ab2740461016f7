#pragma once
/// Running mean and covariance of every query of one layer of one sequence: what a window over all queries would tell,
/// without a growing window.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kvkeep/core/machine_memory.h"
#include "kvkeep/core/query_moments.h"
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
};

/// Queries enter the moments in blocks of kBlock tokens, counted from the first token that counts. At least the newest
/// kRollback tokens stay out of them. So the moments have the same bits however tokens are divided into steps, and the
/// newest tokens can be taken back exactly. Numbers are in the machine's memory, counts on the host.
class QueryStatistics {
 public:
  static constexpr std::int32_t kBlock = kMomentBlock;
  static constexpr std::int32_t kRollback = kMomentRollback;  ///< tokens that can always be taken back

  /// Everything counted: for storing elsewhere and restoring into statistics of the same sizes.
  struct Held {
    std::vector<QueryMoments> heads = {};  ///< [Hq] of all tokens except the newest
    std::int64_t skipped = 0;              ///< tokens that did not count
    std::vector<float> newest = {};  ///< [tokens, Hq, D] queries that are not in `heads` yet, before RoPE, oldest first
  };

  /// Scratch of add(): one for all layers and sequences with the same heads. Bytes: about Hq * D * (12 D + 150).
  struct Workspace;
  [[nodiscard]] static std::shared_ptr<Workspace> workspace(std::int32_t query_heads, std::int32_t key_dim,
                                                            const MachineMemory& memory = host_memory());

  /// Queries at logical positions below `from` do not count. `memory` must outlive the statistics. Bytes: Hq * D *
  /// (4 (D + 3) + 4 (kBlock + kRollback)).
  QueryStatistics(std::int32_t query_heads, std::int32_t key_dim, std::int32_t from,
                  MachineMemory& memory = host_memory());

  /// Adds new tokens, oldest first. data: f32, f16 or bf16 [tokens, Hq, D], strides in bytes. Queries given after RoPE
  /// are rotated back from their positions. Throws only InvalidArgument, before anything is counted, for a query that
  /// is not finite or is beyond kLargestQuery. Requires: memory that does not form moments itself. Cost: Hq * D * (D +
  /// 1) flop per token.
  void add(const std::byte* data, Dtype dtype, std::int64_t token_stride, std::int64_t head_stride,
           std::span<const std::int32_t> positions, QueryBasis basis, const RopeSpec& rope, Workspace& workspace);
  /// add() where the memory forms moments: counts the tokens, the `first` of a step and those after it, and appends to
  /// `arrivals` what MachineMemory::push_moments() must be given. One arrival for each run of consecutive positions.
  void place(std::int32_t first, std::span<const std::int32_t> positions, std::vector<MomentsArrival>& arrivals);

  /// How push_moments() reads the queries of a step. `workspace` keeps the table of this `rope`, by its address, made
  /// at the first queries after RoPE.
  [[nodiscard]] static MomentsLayout layout(MachineMemory& memory, const QueryLayout& queries, Dtype dtype,
                                            std::int32_t key_dim, QueryBasis basis, const RopeSpec& rope,
                                            Workspace& workspace);

  /// Whether add() accepts these queries. True where the memory forms moments: a query that is not finite makes the
  /// moments of its head NaN there. Cost: one read of them.
  [[nodiscard]] bool finite(const std::byte* data, Dtype dtype, std::int64_t token_stride, std::int64_t head_stride,
                            std::span<const std::int32_t> positions) const;
  /// Throws InvalidArgument that names the first query that add() does not accept. `where`: whose queries they are.
  void check(std::string_view where, const std::byte* data, Dtype dtype, std::int64_t token_stride,
             std::int64_t head_stride, std::span<const std::int32_t> positions) const;

  /// True if the newest `tokens` can be taken back.
  [[nodiscard]] bool can_forget(std::int64_t tokens) const;
  void forget(std::int64_t tokens);

  /// Moments of one query head over everything added. On a device: waits.
  [[nodiscard]] QueryMoments moments(std::int32_t head) const;

  [[nodiscard]] std::int64_t count() const { return count_ + pending_; }  ///< queries that count
  [[nodiscard]] std::int64_t bytes() const;
  /// Where the numbers are.
  [[nodiscard]] MomentsView view() const;

  /// On a device: waits.
  [[nodiscard]] Held held() const;
  /// Throws InvalidArgument, leaving these statistics unchanged, for contents that no statistics of these sizes can
  /// hold.
  void take(const Held& held);

 private:
  struct HeadWorkspace;
  /// Adds `rows` queries of a head, `stride` floats apart, to moments of `count` ones.
  void take_in(double* mean, double* second, std::int64_t count, std::int32_t head, const float* queries,
               std::int64_t stride, std::int64_t rows, HeadWorkspace& in) const;
  [[nodiscard]] std::int64_t token_numbers() const { return std::int64_t{heads_} * dim_; }
  [[nodiscard]] std::int64_t triangle() const { return std::int64_t{dim_} * (dim_ + 1) / 2; }
  /// The i-th of the newest tokens, oldest first.
  [[nodiscard]] float* newest(std::int64_t i) const {
    return view().newest + (begin_ + i) % kMomentRing * token_numbers();
  }

  std::int32_t heads_, dim_, from_;
  MachineMemory* memory_;
  std::int64_t count_ = 0;    ///< tokens in the moments
  std::int64_t skipped_ = 0;  ///< tokens that did not count
  std::int32_t begin_ = 0;    ///< place of the oldest pending token
  std::int32_t pending_ = 0;  ///< newest tokens that are not in the moments yet
  DeviceMemory held_;         ///< as MomentsView: seconds, means, newest
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/observe/query_block.h"  // and, after it, the bodies of this file
#endif
