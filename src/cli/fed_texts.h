#pragma once
// Texts that are fed token by token under every policy, beside the full cache: what each made of the token that came.

#include <cstdint>
#include <span>
#include <vector>

#include "contests.h"
#include "kvkeep/lm/decoder.h"
#include "kvkeep/report/fidelity.h"
#include "progress.h"

namespace kvkeep::cli {

struct FedText {
  std::vector<std::int32_t> prompt;  // runs as one prompt
  std::vector<std::int32_t> tokens;  // come behind it, one by one
};

// What stood before one of these tokens.
struct Foretold {
  double negative_log_likelihood = 0;  // of the token, in nats
  report::Departure departure;         // from the full cache
};

// A policy over all texts.
struct Followed {
  std::vector<std::vector<Foretold>> texts;  // [texts][tokens]
  std::int64_t events = 0, kept_bytes = 0;   // in sum; most of one text
  std::int64_t before_events =
      0;  // tokens of a text that no event had come before, most of all texts; 0 where none came at all
};

// Policies whose prompts are cut at their end, `full` among them: it is what they are held against. Without --policy: a
// few, with a quarter and an eighth of `tokens`. All are made once, so that a wrong option is refused before any work.
std::vector<Contest> fed_contests(ContestOptions& options, std::int32_t tokens);

// Every text under every policy, `batch` texts at once and all policies in step with the full cache, which is one of
// `contests`. A prompt runs once for all policies that do not narrow it. Memory: a cache of each policy for each text
// of a batch, and a few rows of logits a text.
std::vector<Followed> follow(lm::Decoder& decoder, ScalarType cache_dtype, const std::vector<Contest>& contests,
                             std::span<const FedText> texts, std::int32_t batch, Progress& progress);

}  // namespace kvkeep::cli
