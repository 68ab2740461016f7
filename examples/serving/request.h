// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What users ask for, and texts.

#include <cstdint>
#include <span>
#include <vector>

#include "kvkeep/kvkeep.h"
#include "model.h"

namespace serving {

using kvkeep::SequenceId;

struct Request {
  SequenceId id = 0;  ///< of its first sample; the others have the ids after it
  std::vector<Token> prompt = {};
  std::int32_t new_tokens = 0;
  std::int32_t samples = 1;
  std::int32_t drafts = 0;  ///< tokens guessed in each step, verified in the next
};

[[nodiscard]] inline std::uint64_t chain_of(std::span<const Token> text) {
  std::uint64_t chain = 0;
  for (const Token token : text) chain = chained(chain, token);
  return chain;
}

/// Guesses what follows: what followed the last token where the text had it before.
[[nodiscard]] inline Token guess(std::span<const Token> text) {
  for (std::size_t i = text.size() - 1; i-- > 0;)
    if (text[i] == text.back()) return text[i + 1];
  return (text.back() + 1) % Model::kVocabulary;
}

}  // namespace serving
