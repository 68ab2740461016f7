// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Writes traces from a run of the decoder, so that any policy can be replayed on them.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "kvkeep/policy/policy.h"
#include "kvkeep/trace/trace.h"
#include "kvlab/decoder.h"
#include "kvlab/generation.h"

namespace kvkeep::lm {

/// Which moment of a run an event trace shows.
struct EventRecording {
  std::optional<std::int32_t> step = {};  ///< decode step, 1 or more; without it the first at which the policy is due
  std::int32_t queries = 256;             ///< newest queries kept; at least what the policy needs
  Dtype cache_dtype = Dtype::f32;
  std::function<void(std::int64_t)> progress = {};  ///< called after each step with the tokens it predicted
};

/// Everything the policy sees right before it decides after `step`: a trace of kind `event` with all full layers.
/// Earlier events have happened. Replaying the same policy on it gives the slots of the run's own event. Throws
/// InvalidArgument if the run ends before that step, or if rows of one layer hold different numbers of slots.
[[nodiscard]] trace::Result record_event(Decoder& decoder, std::unique_ptr<KVPolicy> policy, Request request,
                                         const EventRecording& options);

/// K and queries of every layer after RoPE, as prefill leaves them: a trace of kind `prefill`. `window` 0 keeps all
/// queries. `progress` is called before each layer's attention with 1.
[[nodiscard]] trace::Result record_prefill(Decoder& decoder, const std::vector<std::int32_t>& prompt,
                                           std::int32_t window, const std::function<void(std::int64_t)>& progress = {});

/// A trace of kind `decoder` (or `generate`): the ids and the path of the checkpoint, `model`, relative to the trace's
/// folder.
[[nodiscard]] trace::Result record_decoder(const std::filesystem::path& model, const std::vector<std::int32_t>& ids,
                                           std::int32_t new_tokens, std::int32_t query_tail);
[[nodiscard]] trace::Result record_generate(const std::filesystem::path& model, const std::vector<std::int32_t>& prompt,
                                            std::int32_t new_tokens);

}  // namespace kvkeep::lm
