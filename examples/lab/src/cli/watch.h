// SPDX-License-Identifier: Apache-2.0
#pragma once
// --diagnostics: what the events of a run kept, and what attention of the full cache would have read.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "contests.h"
#include "diagnostics_table.h"
#include "kvkeep/cli/program.h"
#include "kvlab/diagnostics.h"
#include "kvlab/generation.h"
#include "model_options.h"

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

// A text's own tokens through the model, nothing dropped: keys, values, queries and attention outputs of every full
// layer, f32. Memory: (Hq + Hkv) * (D + Dv) * 4 bytes per token and layer.
class FullRun {
 public:
  // Every token of `ids` but the last, which is not fed. Throws before it allocates if memory does not suffice.
  FullRun(lm::Decoder& decoder, const std::vector<std::int32_t>& ids);

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

// Throws unless the model runs on the CPU.
void require_host_memory(const ModelOptions& model, const char* command);

// Diagnostics of some texts that run under every policy, sequences 0, 1, 2, ... of a generator for each.
class WatchedTexts {
 public:
  // The first `traced` texts are compared with a full run of what they were fed. All must outlive it.
  WatchedTexts(lm::Decoder& decoder, const ModelOptions& model, const std::vector<Contest>& contests,
               std::int64_t traced);

  // For GenerationHooks::on_event of a policy's generator.
  [[nodiscard]] std::function<void(const lm::EventSight&)> hook(std::size_t contest);
  // What a sequence was fed, as a request that feeds the same again: its prompt, and as `forced` all that followed,
  // with one token more that was not fed.
  void fed(std::size_t contest, SequenceId sequence, lm::Request request, const lm::Completion& done);
  void wrote(std::size_t contest, std::span<const std::int32_t> tokens) {
    watches_[contest].diagnostics().add_generated(tokens);
  }
  // All texts have ended: adds each policy's result to its own in `to`, [contests] or empty. Texts of the same tokens
  // share a full run.
  void end(Progress& progress, std::vector<Diagnosed>& to);

 private:
  lm::Decoder& decoder_;
  const ModelOptions& model_;
  const std::vector<Contest>& contests_;
  std::int64_t traced_;
  std::deque<Watch> watches_;      // [contests]
  std::vector<std::string> gaps_;  // [contests] why attention is not compared, or not all of it
  std::map<SequenceId, std::map<std::vector<std::int32_t>, std::vector<std::size_t>>>
      texts_;  // of traced sequences: the contests that were fed a text
  std::map<std::pair<SequenceId, std::size_t>, lm::Request> fed_;
};

}  // namespace kvkeep::cli
