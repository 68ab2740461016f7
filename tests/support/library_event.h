// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The library, run on the events that the oracle knows: one layer, any number of sequences, f32 unless asked
/// otherwise.

#include <memory>
#include <string>
#include <vector>

#include "arrays.h"
#include "kvkeep/kvkeep.h"
#include "oracle/event_oracle.h"

namespace kvkeep::testing {

/// The policy file that says what `options` say.
std::string policy_json(const oracle::Options& options);

/// A cache of one layer that holds the given sequences, with queries and columns, ready to be decided on. Sequences
/// share Hq, Hkv, D.
class OracleCache {
 public:
  /// `padding`: slots in front of each sequence (left padding), filled with NaN. `dtype` of keys and values.
  explicit OracleCache(std::vector<oracle::Sequence> sequences, Dtype dtype = Dtype::f32, std::int32_t padding = 0);

  [[nodiscard]] const RowTable& table() const { return table_; }
  [[nodiscard]] Evidence evidence() const { return {spec_, table_, QueryBasis::post_rope, Moment::step_end, true}; }
  [[nodiscard]] const DenseKv& rows() const { return std::get<DenseKv>(cache_[0]); }
  [[nodiscard]] const ModelSpec& spec() const { return spec_; }

 private:
  std::vector<oracle::Sequence> sequences_;
  std::vector<std::vector<float>> credit_;
  std::vector<PositionSpans> pins_;
  ModelSpec spec_;
  std::vector<SequenceId> ids_;
  std::vector<std::int32_t> lengths_, starts_;
  std::vector<Array> queries_;
  std::vector<LayerKv> cache_;
  RowTable table_;
};

/// A decision in the oracle's words, [sequence][KV head].
std::vector<std::vector<oracle::Row>> in_oracle_words(const OracleCache& cache, const Decision& decision);

/// make_policy_from_json, decide, translate.
std::vector<std::vector<oracle::Row>> library_event(const oracle::Options& options,
                                                    const std::vector<oracle::Sequence>& sequences,
                                                    Dtype dtype = Dtype::f32, std::int32_t padding = 0);

}  // namespace kvkeep::testing
