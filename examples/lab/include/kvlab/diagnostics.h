// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What a policy does to a cache over time, in numbers that any engine can collect. Plain data on the host, no tensors.
/// examples/lab/docs/diagnostics.md explains each number. Positions are logical throughout. E is the set that a row
/// keeps at an event, F the set that it held just before, P the position of the next token.

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/compiled_only.h"
#include "kvlab/ratio.h"

namespace kvkeep::report {

/// |a and b| / |a or b| of two ascending sets; 1 if both are empty. For |a| = |b| = k with a share x in common it is
/// x*k / (2*k - x*k). Cost: O(|a| + |b|).
[[nodiscard]] double iou(std::span<const std::int32_t> a, std::span<const std::int32_t> b);

/// How many elements two ascending sets have in common.
[[nodiscard]] std::int64_t common(std::span<const std::int32_t> a, std::span<const std::int32_t> b);

/// 1 - distinct n-grams / all n-grams; 0 if there are fewer than n tokens. Cost: O(tokens * log(tokens) * n). Throws
/// InvalidArgument for n below 1.
[[nodiscard]] double ngram_repetition(std::span<const std::int32_t> tokens, std::int32_t n);

/// One row (layer, KV head) at one event.
struct RowEvent {
  std::int32_t layer = 0;
  std::int32_t head = 0;
  std::int32_t next_position = 0;        ///< P: above every position
  std::span<const std::int32_t> before;  ///< F: ascending, unique
  std::span<const std::int32_t> kept;    ///< E: ascending, subset of F
  std::span<const std::int32_t> segment_ends =
      {};  ///< AMS: [segments] one past each segment's last slot; empty: the policy has no segments
  std::span<const std::int32_t> quotas = {};  ///< AMS: [segments]
  std::span<const float> mass = {};           ///< AMS: [before] the mass that segments follow; sums to 1
};

/// What one query of a run with the full cache would lose if it saw only part of it.
struct QueryLoss {
  double held = 0;  ///< probability on held slots: kept at the last event, or written since; NaN if others are read
                    ///< too, through folded spans
  double past = 0;  ///< probability on positions before that event, held or not
  double past_held = 0;       ///< of that, the part on kept positions
  double error_squared = 0;   ///< |o_full - o_held|^2
  double output_squared = 0;  ///< |o_full|^2
};

/// Keys (after RoPE) and values of one row of a full cache: slot = position. f32.
struct FullRow {
  const float* keys = nullptr;
  std::int64_t key_stride = 0;  ///< elements from slot to slot
  const float* values = nullptr;
  std::int64_t value_stride = 0;
  std::int32_t key_dim = 0;
  std::int32_t value_dim = 0;
};

/// Attention of one query (f32 [key_dim], after RoPE) over slots [0, slots) of the full row, and over the held ones
/// among them: `kept` (ascending, below `next_position`) and [next_position, slots). o_held is attention over the held
/// slots alone, with the full run's query, keys and values: it measures the loss of this row, not of earlier layers.
/// Sums in double. Cost: O(slots * (key_dim + value_dim)). Workspace: slots + 2 * value_dim doubles in `scratch`.
[[nodiscard]] QueryLoss query_loss(const FullRow& row, const float* query, std::int32_t slots,
                                   std::span<const std::int32_t> kept, std::int32_t next_position, double scale,
                                   std::vector<double>& scratch);

struct DiagnosticsOptions {
  std::int32_t layers = 1;                         ///< layers of the model, to divide its depth into thirds
  std::vector<std::int32_t> regions{64, 32, 128};  ///< positions per region, each 1 or more
  std::vector<std::int32_t> ngrams{4, 3, 8, 16};   ///< the first one decides whether a sample has collapsed
  std::int32_t window =
      32;  ///< W: newest positions, which wipe-out ignores, and whose share of budget and mass is reported
  std::int32_t sink = 4;  ///< oldest positions; wipe-out ignores their region
};

inline constexpr std::int32_t kCoverageBins = 20;
inline constexpr double kCollapsed = 0.5;  ///< a sample with more repetition than this has collapsed
inline constexpr double kSoftWipeOut = 0.05;

/// Regions [k*R, (k+1)*R) that an event leaves without a slot.
struct WipeOut {
  std::int32_t region = 0;  ///< R
  Ratio wiped;   ///< regions with none of F left / live regions. Live: at least R/2 positions in F, no sinks, entirely
                 ///< below P - W
  Ratio nearly;  ///< the same with less than 5 % of its slots left
  Ratio cumulative;  ///< whole regions of [0, P) with no survivor, whenever they lost the last / all whole regions of
                     ///< [0, P)
};

struct Repetition {
  std::int32_t n = 0;
  Ratio rate;  ///< mean of ngram_repetition over samples
};

/// Attention of one query head, over the queries after events.
struct HeadLoss {
  Ratio held;                                 ///< mean of QueryLoss::held
  Ratio past;                                 ///< kept share of the probability on positions before the event
  Ratio error_squared;                        ///< sums of |o_full - o_held|^2 and |o_full|^2
  [[nodiscard]] double output_error() const;  ///< root of their ratio
  void add(const HeadLoss& other);
};

/// Everything as sums, so that results can be added. Ratios without any observation are NaN.
struct DiagnosticsResult {
  std::int64_t events = 0;            ///< one per sequence and event
  std::int64_t row_events = 0;        ///< one per row and event
  Ratio iou;                          ///< mean over pairs of consecutive events of a row
  Ratio survival;                     ///< mean of |E_e and E_(e+1)| / |E_e|
  std::array<Ratio, 3> iou_by_depth;  ///< layers in thirds: floor(3 * layer / layers)
  std::array<Ratio, 3> survival_by_depth;
  std::vector<WipeOut> wipe_out;              ///< [regions]
  Ratio longest_dropped;                      ///< longest run of consecutive dropped slots of F per row and event, mean
  std::int64_t most_dropped = 0;              ///< the longest such run of all
  std::array<Ratio, kCoverageBins> coverage;  ///< bin floor(20 * position / P): slots of E / slots of F
  std::array<Ratio, kCoverageBins> coverage_cumulative;  ///< slots of E / positions of [0, P)
  Ratio middle;                                          ///< the same over P/3 <= position < 2P/3
  Ratio middle_cumulative;
  Ratio newest_share;                  ///< kept slots at positions P - W and above / kept slots
  Ratio segments;                      ///< per row
  Ratio segment_slots;                 ///< slots per segment
  Ratio quota_share;                   ///< quota / length, mean over segments
  Ratio suffix_mass;                   ///< mass on positions P - W and above, mean over rows
  std::vector<Repetition> repetition;  ///< [ngrams]
  Ratio collapsed;                     ///< samples whose repetition at the first n is above 0.5 / samples
  HeadLoss attention;                  ///< all layers and heads
  std::map<std::pair<std::int32_t, std::int32_t>, HeadLoss> attention_by_head;  ///< (layer, query head)

  /// Throws InvalidArgument if `other` has another number of regions or n-grams.
  void add(const DiagnosticsResult& other);
};

/// One JSON object with every number above by name; NaN is null.
[[nodiscard]] std::string to_json(const DiagnosticsResult& result);

/// Collects diagnostics. Not thread safe: give each thread its own, then merge.
class Diagnostics {
 public:
  /// Throws InvalidArgument for a region, n-gram or layer count below 1, or a negative window or sink.
  explicit Diagnostics(DiagnosticsOptions options);

  /// Adds what an event did to the rows of one sequence. Call it for every event of the sequence, in order. Throws
  /// InvalidArgument, before anything is counted, for positions that do not ascend or are not below P, for a kept
  /// position that was not held before, and for segments, quotas or mass that do not fit. Cost: O(slots before) per
  /// row. Stores the kept positions until the next event.
  void add_event(std::int64_t sequence, std::span<const RowEvent> rows);

  /// The sequence has ended; its number may be used again.
  void end(std::int64_t sequence);

  /// Adds the tokens that one sample generated, without its prompt.
  void add_generated(std::span<const std::int32_t> tokens);

  void add_query(std::int32_t layer, std::int32_t query_head, const QueryLoss& loss);

  /// Adds everything that `other` saw, including its open sequences. Throws InvalidArgument for other options, or if a
  /// sequence is open in both.
  void merge(const Diagnostics& other);

  [[nodiscard]] const DiagnosticsResult& result() const { return result_; }

 private:
  void check(const RowEvent& row) const;
  void add_pair(const RowEvent& row, std::span<const std::int32_t> last);
  void add_wipe_out(const RowEvent& row);
  void add_coverage(const RowEvent& row);
  void add_segments(const RowEvent& row);

  DiagnosticsOptions options_;
  DiagnosticsResult result_;
  std::map<std::int64_t, std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::int32_t>>>
      last_;  ///< sequence -> (layer, head) -> E
};

}  // namespace kvkeep::report
