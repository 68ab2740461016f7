// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Cuts text into words before merges, by published regular expressions.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "expression.h"
#include "utf8.h"

namespace kvkeep::lm::detail {

/// A published way to cut words, by the names that GGUF has for it ("tokenizer.ggml.pre"), and what else these imply.
struct WordCut {
  std::vector<std::string_view> names;
  std::vector<std::string_view>
      expressions;             ///< each cuts what the one before it left: its matches, and what is between
  bool nfc = false;            ///< text is normalised first
  bool ignore_merges = false;  ///< a word that is a token is not merged
  bool adds_bos = false;       ///< unless the file says otherwise
};

inline constexpr std::string_view kDigit = R"(\p{N})", kBlankLed = " ?[^ ]+| ";
inline constexpr std::string_view kGpt2Words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// Null if there is none of this name.
[[nodiscard]] const WordCut* word_cut_called(std::string_view name);

/// True if the expressions are those of one with a name.
[[nodiscard]] bool is_word_cut(std::span<const std::string_view> expressions);

/// For messages.
[[nodiscard]] std::string word_cut_names();

class PreTokenizer {
 public:
  /// None: a text is one word. `expressions` are those of a WordCut, or kBlankLed: a blank begins a word.
  explicit PreTokenizer(std::span<const std::string_view> expressions)
      : expressions_(expressions.begin(), expressions.end()) {}

  /// Calls take(word) with each word of UTF-8 text, in order. Cost: O(n).
  template <class Take>
  void cut(std::string_view text, const Take& take) const {
    cut(expressions_, text, take);
  }

 private:
  template <class Take>
  static void cut(std::span<const Expression> expressions, std::string_view text, const Take& take) {
    if (expressions.empty()) return take(text);
    const Expression& first = expressions.front();
    const auto rest = expressions.subspan(1);
    std::size_t done = 0;
    for (std::size_t at = first.earliest(text); at < text.size();) {
      const std::size_t end = first.end_of_match(text, at);
      if (end == at) {
        at += character_at(text, at).bytes;
        continue;
      }
      if (done < at) cut(rest, text.substr(done, at - done), take);
      cut(rest, text.substr(at, end - at), take);
      done = at = end;
    }
    if (done < text.size()) cut(rest, text.substr(done), take);
  }

  std::vector<Expression> expressions_;
};

}  // namespace kvkeep::lm::detail
