// SPDX-License-Identifier: Apache-2.0
#include "haystack.h"

#include <algorithm>
#include <utility>

namespace kvkeep::lm {
namespace {

constexpr std::string_view kBlanks = " \t\n\v\f\r";

/// Whether a word ends with . ! or ?, ignoring quotes and brackets after that.
bool ends_sentence(std::string_view word) {
  for (bool closing = true; closing;) {
    closing = false;
    for (const std::string_view mark : {"\"", "'", ")", "]", "\u201d", "\u2019"})
      if (word.ends_with(mark)) word.remove_suffix(mark.size()), closing = true;
  }
  return !word.empty() && std::string_view(".!?").find(word.back()) != std::string_view::npos;
}

}  // namespace

Essay::Essay(std::string_view text, std::int64_t most_words) {
  for (std::size_t at = text.find_first_not_of(kBlanks);
       at != std::string_view::npos && std::cmp_less(words_.size(), most_words);) {
    const std::size_t end = std::min(text.find_first_of(kBlanks, at), text.size());
    const std::string_view word = text.substr(at, end - at);
    if (!text_.empty()) text_ += ' ';
    words_.push_back({text_.size(), text_.size() + word.size(), ends_sentence(word)});
    text_ += word;
    at = text.find_first_not_of(kBlanks, end);
    // A blank line ends one, too: paragraphs, and blocks of source code.
    const std::string_view gap = text.substr(end, at == std::string_view::npos ? 0 : at - end);
    if (std::ranges::count(gap, '\n') > 1) words_.back().ends_sentence = true;
  }
  if (!words_.empty()) words_.back().ends_sentence = true;
}

std::vector<std::string_view> Essay::sentences(std::int64_t words) const {
  std::vector<std::string_view> result;
  std::size_t at = 0, begin = 0;
  for (std::int64_t i = 0; i < words; ++i) {
    const Word& word = words_[at];
    if (word.ends_sentence || i + 1 == words) {
      result.push_back(std::string_view(text_).substr(begin, word.end - begin));
      begin = word.end + 1;
    }
    if (++at == words_.size()) at = begin = 0;
  }
  return result;
}

void append_haystack(TextSample& sample, std::span<const std::string_view> units, std::vector<Insertion> insertions,
                     std::string_view between) {
  std::stable_sort(insertions.begin(), insertions.end(),
                   [](const Insertion& a, const Insertion& b) { return a.before < b.before; });
  std::string& context = sample.context;
  const std::size_t begin = context.size();
  const auto separate = [&] {
    if (context.size() > begin) context += between;
  };
  auto next = insertions.begin();
  for (std::size_t i = 0; i <= units.size(); ++i) {
    for (; next != insertions.end() && std::cmp_equal(next->before, i); ++next) {
      separate();
      sample.needles.push_back(
          {next->text, context.size(), static_cast<double>(i) / static_cast<double>(units.size()), next->asked});
      context += next->text;
    }
    if (i == units.size()) break;
    separate();
    context += units[i];
  }
}

}  // namespace kvkeep::lm
