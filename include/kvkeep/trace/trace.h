// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Traces, replayed without the model: of one compression event, as an engine saw it, and of a prompt. The file format
/// is docs/reference/trace-format.md.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep::trace {

/// Named tensors and strings, as in one safetensors file.
struct Result {
  std::vector<std::pair<std::string, Tensor>> tensors;
  std::map<std::string, std::string> metadata;
};

/// Value of `kind` in a trace. Throws InvalidArgument if the file is not a trace, or has another format version.
[[nodiscard]] std::string kind_of(const io::SafetensorsFile& file);

/// Runs one event of `policy` on a trace of kind `event`. Returns slots, scores, the allotment if the policy makes one,
/// and the compacted rows. A sequence that holds at most its budget keeps everything. Throws InvalidArgument, naming
/// the tensor or metadata, for a trace that does not fit the format.
[[nodiscard]] Result replay_event(const io::SafetensorsFile& file, const KVPolicy& policy);

// Checks of a trace's tensors.

inline void want(const io::SafetensorsFile& file, const std::string& name, const Tensor& t, bool ok,
                 const std::string& allowed) {
  KVKEEP_REQUIRE(ok, file.where(), ": tensor \"", name, "\" has shape ", t.sizes(), " and dtype ", t.dtype(),
                 "; allowed ", allowed);
}

/// A metadata value. Throws InvalidArgument if it is missing; `rest` ends the sentence.
const std::string& metadata(const io::SafetensorsFile& file, const std::string& key, std::string_view rest);

/// A metadata value that is a positive number; `fallback` if it is absent.
double number(const io::SafetensorsFile& file, const std::string& key, double fallback);

/// The sink logits of a layer of `heads` query heads.
std::vector<float> sink_logits(const io::SafetensorsFile& file, const std::string& name, const Tensor& t,
                               std::int32_t heads);

// Prefill traces: keys and queries of all layers of one prompt.

/// Runs `policy` on a trace of kind `prefill`. A policy that narrows prompts sees the layers in order, and those after
/// a selection with the recorded rows of the tokens that continue. Any other policy decides at the end of the prompt,
/// for each layer separately. Result: `selection_layer` i32 [1] (-1: none), `relative_variance` f64 [num_layers] (NaN
/// if not computed), `tokens` i32 places in the prompt of the tokens that reached the end, or that form a second pass,
/// and, if there is no second pass, `layer.<l>.slots` i32 [Hkv, kept], places in the prompt, padded with -1 if heads
/// keep different counts. Throws InvalidArgument, naming the tensor or metadata, for a trace that does not fit the
/// format or holds fewer queries than the policy reads, and for a policy that reads values.
[[nodiscard]] Result replay_prefill(const io::SafetensorsFile& file, const KVPolicy& policy);

/// Ranks of the tokens of a recorded prompt in every layer, independent of any policy: [num_layers][tokens - window], 1
/// is the highest. For pictures. Throws InvalidArgument as replay_prefill() does, and for a prompt that is not longer
/// than the window or has fewer queries.
[[nodiscard]] std::vector<std::vector<std::int32_t>> prompt_ranks(const io::SafetensorsFile& file,
                                                                  const PromptScoreOptions& options);

}  // namespace kvkeep::trace
