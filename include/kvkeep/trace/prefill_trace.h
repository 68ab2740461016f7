#pragma once
/// Prefill traces: keys and queries of all layers of one prompt, replayed without the model. The file format is
/// docs/trace-format.md.

#include <cstdint>
#include <vector>

#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/trace/event_trace.h"

namespace kvkeep::trace {

/// Runs `policy` on a trace of kind `prefill`. One that narrows prompts sees the layers one after the other, those
/// behind a selection on the recorded rows of the tokens that go on; any other decides at the end of the prompt, each
/// layer by itself. Result: `selection_layer` i32 [1] (-1: none), `relative_variance` f64 [num_layers] (NaN where it
/// was not computed), `tokens` i32 places in the prompt of the tokens that reached the end, or that make up a second
/// pass, and, where there is no second pass, `layer.<l>.slots` i32 [Hkv, kept], places in the prompt, padded with -1
/// where heads keep different counts. Throws InvalidArgument, naming tensor or metadata, for a trace that does not fit
/// the format or holds fewer queries than the policy reads, and for a policy that reads values.
[[nodiscard]] Result replay_prefill(const io::SafetensorsFile& file, const KVPolicy& policy);

/// Ranks of the tokens of a recorded prompt in every layer, whatever a policy would do: [num_layers][tokens - window],
/// 1 the highest. For pictures. Throws InvalidArgument as replay_prefill(), and for a prompt that is no longer than the
/// window or holds fewer queries.
[[nodiscard]] std::vector<std::vector<std::int32_t>> prompt_ranks(const io::SafetensorsFile& file,
                                                                  const PromptScoreOptions& options);

}  // namespace kvkeep::trace
