// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The haystacks that hide the needles of the text tasks.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvlab/text_tasks.h"

namespace kvkeep::lm {

/// A text as words and sentences.
class Essay {
 public:
  /// Reads the first `most_words` words; more are never asked for. Blanks are those of ASCII. Cost: O(text read).
  Essay(std::string_view text, std::int64_t most_words);

  [[nodiscard]] bool empty() const { return words_.empty(); }

  /// The sentences of the first `words` words, the last of which may be cut short; starts again from the first word
  /// after the last. Views into this object. Cost: O(words).
  [[nodiscard]] std::vector<std::string_view> sentences(std::int64_t words) const;

 private:
  struct Word {
    std::size_t begin, end;  // bytes of text_
    bool ends_sentence;
  };

  std::string text_;  // one blank between words
  std::vector<Word> words_;
};

/// The unit of `units` that `percent` of them are before.
[[nodiscard]] inline std::int64_t unit_at(std::size_t units, std::int64_t percent) {
  return static_cast<std::int64_t>(units) * percent / 100;
}

/// A sentence that goes in front of unit `before`, or after the last unit.
struct Insertion {
  std::int64_t before = 0;
  std::string text;
  bool asked = false;
};

/// Appends units and insertions to the context of `sample`, with `between` between any two, and notes the needles.
/// Insertions at the same place keep their order.
void append_haystack(TextSample& sample, std::span<const std::string_view> units, std::vector<Insertion> insertions,
                     std::string_view between);

}  // namespace kvkeep::lm
