// SPDX-License-Identifier: Apache-2.0
#pragma once
// Texts that are fed token by token under every policy, beside the full cache: how each predicted the next token.

#include <cstdint>
#include <span>
#include <vector>

#include "contests.h"
#include "kvkeep/cli/program.h"
#include "kvlab/decoder.h"
#include "kvlab/fidelity.h"
#include "model_options.h"
#include "watch.h"

namespace kvkeep::cli {

struct FedText {
  std::vector<std::int32_t> prompt;  // runs as one prompt
  std::vector<std::int32_t> tokens;  // follow it, one by one
};

// The prediction of one of these tokens.
struct Foretold {
  double negative_log_likelihood = 0;  // of the token, in nats
  report::Departure departure;         // from the full cache
};

// A policy over all texts.
struct Followed {
  std::vector<std::vector<Foretold>> texts;  // [texts][tokens]
  EventCounts counts;                        // over all texts
  ReadCounts reads;                          // the same
  std::int64_t kept_bytes = 0;               // most of one text
  std::int64_t before_events = 0;  // tokens of a text before its first event, most over the texts; 0 if there was none
  std::optional<Diagnosed> diagnosed = {};  // with --diagnostics
};

// Policies whose prompts are cut at their end, and `full`, which they are compared with. Without --policy: a few, with
// a quarter and an eighth of `tokens`. All are made once, so that a wrong option is refused before any work.
std::vector<Contest> fed_contests(ContestOptions& options, std::int32_t tokens);

// --diagnostics, --diagnostics-samples
struct FedDiagnostics {
  bool wanted = false;
  std::int32_t traced = 1;  // texts that are compared with a full run
  void add(CLI::App& app);
};

// Runs every text under every policy, `batch` texts at once and all policies in step with the full cache, which is one
// of `contests`. A prompt runs once for all policies that do not narrow it. Memory: a cache of each policy for each
// text of a batch, and a few rows of logits per text.
std::vector<Followed> follow(lm::Decoder& decoder, const ModelOptions& model, const std::vector<Contest>& contests,
                             std::span<const FedText> texts, std::int32_t batch, Progress& progress,
                             const FedDiagnostics& diagnostics);

}  // namespace kvkeep::cli
