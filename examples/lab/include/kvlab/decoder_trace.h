// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Traces that name a checkpoint instead of carrying K and V: kinds `decoder` and `generate` of
/// docs/reference/trace-format.md.

#include <filesystem>
#include <memory>

#include "kvkeep/io/safetensors.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/trace/trace.h"

namespace kvkeep::lm {

/// One forward pass over `input_ids`, and the argmax continuation. Result: `logits`, `layer.<l>.keys`,
/// `layer.<l>.values`, `queries`, `greedy`. `folder` is the trace's folder; its metadata `model` is relative to it.
/// Throws: InvalidArgument for a trace that does not fit the format, a policy other than `full`, an id outside the
/// vocabulary, and as Decoder::open does.
[[nodiscard]] trace::Result replay_decoder(const io::SafetensorsFile& file, const std::filesystem::path& folder,
                                           const KVPolicy& policy);

/// Greedy decoding of `prompt` under `policy`. Result: `tokens`, `logits`, `events`, `event.<i>.positions`.
/// Throws as above. Cost: `new_tokens` steps.
[[nodiscard]] trace::Result replay_generate(const io::SafetensorsFile& file, const std::filesystem::path& folder,
                                            std::unique_ptr<KVPolicy> policy);

}  // namespace kvkeep::lm
