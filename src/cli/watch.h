#pragma once
// eval --diagnostics: what the events of a run kept, and what attention of the full cache would have read.

#include <cstdint>
#include <map>
#include <vector>

#include "kvkeep/lm/generation.h"
#include "kvkeep/lm/tasks.h"
#include "kvkeep/report/diagnostics.h"

namespace kvkeep::cli {

// What every row of a sequence held behind an event.
struct KeptRows {
  std::int32_t next_position = 0;
  std::vector<std::vector<std::int32_t>> rows = {};  // [full layers * Hkv] logical positions
};

// Collects events of the sequences 0, 1, 2, ... of one run.
class Watch {
 public:
  // Of the first `traced` sequences, what they kept is remembered too.
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

// A sample's own tokens through the model, nothing dropped: keys, values and queries of every full layer, f32.
// Memory: (Hq * D + Hkv * (D + Dv)) * 4 bytes a token and layer.
class FullRun {
 public:
  FullRun(lm::Decoder& decoder, const lm::TaskSample& sample);

  // Every query behind an event, against what that event kept and what came since; up to the next event.
  void compare(const std::vector<KeptRows>& events, report::Diagnostics& to) const;

 private:
  ModelSpec spec_;
  std::int32_t tokens_;
  std::vector<lm::LayerCache> cache_;
  std::vector<std::vector<float>> queries_;  // [full layers] [tokens, Hq, D] after RoPE
};

}  // namespace kvkeep::cli
