// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Requests for the engines of examples/serving.

#include <cstdint>
#include <random>
#include <vector>

#include "request.h"

namespace serving {

/// Prompts that share beginnings of any length.
class Prompts {
 public:
  explicit Prompts(std::uint32_t seed) : bits_(seed) {
    for (auto& text : texts_)
      for (int t = 0; t < 48; ++t) text.push_back(token());
  }
  std::int32_t between(std::int32_t least, std::int32_t most) {
    return least + static_cast<std::int32_t>(bits_() % static_cast<std::uint32_t>(most - least + 1));
  }
  bool chance(double p) { return bits_() < p * 4294967296.0; }
  Request request(SequenceId id) {
    const auto& text = texts_[static_cast<std::size_t>(between(0, 3))];
    Request request{.id = id,
                    .prompt = {text.begin(), text.begin() + between(chance(0.3) ? 0 : 16, 44)},
                    .new_tokens = between(1, 30),
                    .samples = chance(0.25) ? between(2, 3) : 1,
                    .drafts = chance(0.4) ? between(1, 3) : 0};
    for (int t = between(1, 6); t > 0; --t) request.prompt.push_back(token());
    return request;
  }

 private:
  Token token() { return static_cast<Token>(bits_() % static_cast<std::uint32_t>(Model::kVocabulary)); }
  std::mt19937 bits_;
  std::vector<Token> texts_[4];
};

}  // namespace serving
