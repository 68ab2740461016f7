// SPDX-License-Identifier: Apache-2.0
#pragma once
// Samples over text as tokens, in the model's markup.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvlab/samples.h"
#include "kvlab/sampling.h"
#include "kvlab/text_model.h"

namespace kvkeep::cli {

// A sample as tokens: what is cut, and what comes after the cut.
struct Asked {
  lm::Sample sample;
  std::vector<std::int32_t> prompt = {}, question = {};  // the answer's prefix ends the last one that is not empty
  std::vector<std::int32_t> answer = {};                 // the reference, if it is fed
  bool truncated = false;
  bool streamed = false;  // the question comes token by token, with events on the way
  lm::Sampling sampling = {};

  [[nodiscard]] std::vector<std::int32_t> forced() const {
    std::vector<std::int32_t> all = question;
    all.insert(all.end(), answer.begin(), answer.end());
    return all;
  }
  [[nodiscard]] std::int32_t new_tokens() const {
    return static_cast<std::int32_t>(question.size()) +
           (answer.empty() ? sample.text.answer_tokens : static_cast<std::int32_t>(answer.size()));
  }
  [[nodiscard]] std::int64_t tokens() const { return static_cast<std::int64_t>(prompt.size()) + new_tokens(); }

  // Drops these tokens, counted over prompt and question.
  void drop(std::int64_t begin, std::int64_t count);

  // Moves what the prompt has after this many tokens to the front of the question, to come token by token.
  void stream(std::int64_t after);
};

// Tokens of samples: a user's message, or the next one of a conversation, in the model's chat template, or as they are.
class Layout {
 public:
  // most_answer: tokens of an answer; 0: what each sample says.
  Layout(const lm::TextModel& text, bool raw, std::int32_t most_answer);

  // Of a user's message.
  [[nodiscard]] std::int64_t count(std::string_view said) const;

  // Context and question are tokenised separately, so that one may be cut without the other. `fed`: the reference is
  // too. `cut_before`: the question stands after the cut.
  [[nodiscard]] Asked asked(lm::Sample sample, bool fed, bool cut_before) const;

  // Drops the middle of a sample's text, so that all of it has at most this many tokens; markup and the answer's prefix
  // stay. Of a conversation, the middle of all of it. False if too little would be left.
  [[nodiscard]] bool truncate(Asked& made, std::int64_t most) const;

 private:
  [[nodiscard]] std::string rendered(const lm::Sample& sample, const std::string& said) const;
  // The beginning of a prompt, `whole` of which is rendered: a template may write the first token itself.
  [[nodiscard]] std::vector<std::int32_t> first_ids(const std::string& said, std::string_view whole) const;
  [[nodiscard]] std::vector<std::int32_t> next_ids(const std::string& said) const;
  [[nodiscard]] std::vector<std::int32_t> answer(Asked& to) const;

  const lm::TextModel& text_;
  bool raw_;
  std::int32_t most_answer_;
  std::optional<lm::ChatTemplate> template_;  // none: texts are written as they are
};

}  // namespace kvkeep::cli
