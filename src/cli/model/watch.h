#pragma once
// eval --diagnostics: what the events of a run kept, and what attention of the full cache would have read.

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "kvkeep/lm/generation.h"
#include "kvkeep/lm/tasks.h"
#include "kvkeep/report/diagnostics.h"

namespace kvkeep::cli {

// What every row of a sequence held after an event.
struct KeptRows {
  std::int32_t next_position = 0;
  std::vector<std::vector<std::int32_t>> rows = {};  // [full layers * Hkv] logical positions
};

// Collects events of the sequences 0, 1, 2, ... of one run.
class Watch {
 public:
  // Also remembers what the first `traced` sequences kept.
  Watch(const ModelSpec& spec, std::int64_t traced);

  void see(const lm::EventSight& sight);
  // Every sequence has ended.
  void end();

  [[nodiscard]] report::Diagnostics& diagnostics() { return diagnostics_; }
  [[nodiscard]] const std::vector<KeptRows>& kept(SequenceId sequence) { return kept_[sequence]; }

 private:
  const ModelSpec& spec_;
  std::int64_t traced_;
  report::Diagnostics diagnostics_;
  std::map<SequenceId, std::vector<KeptRows>> kept_;
  std::map<SequenceId, bool> open_;
};

// A sample's own tokens through the model, nothing dropped: keys, values, queries and attention outputs of every full
// layer, f32. Memory: (Hq + Hkv) * (D + Dv) * 4 bytes per token and layer.
class FullRun {
 public:
  FullRun(lm::Decoder& decoder, const lm::TaskSample& sample);

  // Compares every query after an event, up to the next one, with what that event kept and what came since.
  void compare(const std::vector<KeptRows>& events, report::Diagnostics& to) const;

  // f32 [Hq, Dv] that attention gave a token in one full layer, the `index`th of them.
  [[nodiscard]] std::span<const float> output(std::size_t index, std::int32_t token) const {
    const std::int64_t numbers = std::int64_t{spec_.query_heads} * spec_.value_dim;
    return {outputs_[index].data() + token * numbers, static_cast<std::size_t>(numbers)};
  }

 private:
  ModelSpec spec_;
  std::int32_t tokens_;
  std::vector<lm::LayerCache> cache_;
  std::vector<std::vector<float>> queries_;  // [full layers] [tokens, Hq, D] after RoPE
  std::vector<std::vector<float>> outputs_;  // [full layers] [tokens, Hq, Dv]
};

// What attention loses when spans fold: each layer of a run that is fed the samples' own tokens, against the full runs.
// Once a layer is compared, its output is replaced by the full run's, so that later layers have the full run's query,
// keys and values. The result is the loss of single rows, as FullRun::compare gives it for kept slots.
class OutputWatch {
 public:
  // Compares sequence i with runs[i]. All three must outlive the watch.
  OutputWatch(const ModelSpec& spec, std::span<const FullRun> runs, report::Diagnostics& to)
      : full_layers_(spec.full_layers()), runs_(runs), to_(to) {}

  void see(const lm::EventSight& sight);
  void see(const lm::AttentionSight& sight);

 private:
  std::vector<std::int32_t> full_layers_;
  std::span<const FullRun> runs_;
  report::Diagnostics& to_;
  std::set<SequenceId> cut_;  // sequences that had an event: their later queries count
};

}  // namespace kvkeep::cli
