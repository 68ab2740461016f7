// SPDX-License-Identifier: Apache-2.0
#include "kvlab/answer_score.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <vector>

#include "kvkeep/core/error.h"
#include "math_answer.h"
#include "utf8.h"

namespace kvkeep::lm {
namespace {

constexpr std::array<TextScoringInfo, 9> kScorings{{
    {TextScoring::all, "contains", "the share of the references that the answer contains"},
    {TextScoring::part, "any", "whether it contains any of them"},
    {TextScoring::exact, "exact", "whether it is one of them, as SQuAD compares"},
    {TextScoring::f1, "f1", "the words that it shares with the best of them, as SQuAD counts"},
    {TextScoring::rouge_l, "rouge-l", "the longest common subsequence with the best of them"},
    {TextScoring::number, "number", "whether its boxed answer, or else its last number, is one of them"},
    {TextScoring::choice, "choice", "whether it chooses one of them, by letter or by text"},
    {TextScoring::classes, "class", "whether it names one of them, and no other of the choices"},
    {TextScoring::numbers, "numbers", "the share of its whole numbers that are one of them"},
}};

constexpr std::size_t kMostRougeWords = 16384;  // of a reference: their square is in bits of memory

using Words = std::vector<std::string>;

char lower(char letter) { return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool contains(std::string_view text, std::string_view what) {
  return std::search(text.begin(), text.end(), what.begin(), what.end(),
                     [](char a, char b) { return lower(a) == lower(b); }) != text.end();
}

template <class Take>
void each_character(std::string_view utf8, Take take) {
  for (std::size_t at = 0; at < utf8.size();) {
    const detail::Character c = detail::character_at(utf8, at);
    take(c.code, utf8.substr(at, c.bytes));
    at += c.bytes;
  }
}

/// The words of UTF-8 between blanks, as Python's split().
Words words_of(std::string_view utf8) {
  Words words;
  bool open = false;
  each_character(utf8, [&](char32_t code, std::string_view bytes) {
    const bool blank = detail::class_of(code) == detail::CharClass::space;
    if (!blank && !open) words.emplace_back();
    if (!blank) words.back() += bytes;
    open = !blank;
  });
  return words;
}

/// The words of SQuAD's normalize_answer.
Words plain_words(std::string_view text) {
  std::string plain;
  each_character(detail::replaced_utf8(text), [&](char32_t code, std::string_view bytes) {
    const bool ascii = code < 0x80;
    if (ascii && std::string_view("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~").find(bytes) != std::string_view::npos) return;
    if (ascii)
      plain += lower(bytes.front());
    else
      detail::append_utf8(plain, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(code))));
  });
  // Articles end where a word does, which also marks and signs beyond ASCII may bring about.
  std::string kept, run;
  const auto close = [&] { kept += run == "a" || run == "an" || run == "the" ? " " : run, run.clear(); };
  each_character(plain, [&](char32_t code, std::string_view bytes) {
    if (detail::is_word_character(code)) {
      run += bytes;
      return;
    }
    close();
    kept += bytes;
  });
  close();
  return words_of(kept);
}

double f1_of(const Words& answer, const Words& reference) {
  if (answer.empty() || reference.empty()) return answer.empty() && reference.empty() ? 1 : 0;
  std::map<std::string_view, int> left;
  for (const std::string& word : reference) ++left[word];
  int common = 0;
  for (const std::string& word : answer) {
    const auto at = left.find(word);
    if (at != left.end() && at->second-- > 0) ++common;
  }
  if (common == 0) return 0;
  const double precision = common / static_cast<double>(answer.size()),
               recall = common / static_cast<double>(reference.size());
  return 2 * precision * recall / (precision + recall);
}

/// Sentences as words, as the package splits them. One of blanks alone has one empty word.
std::vector<Words> sentences_of(std::string_view text) {
  const std::string clean = detail::replaced_utf8(text);
  std::vector<Words> sentences;
  for (std::string_view rest = clean; !rest.empty();) {
    const std::string_view one = rest.substr(0, rest.find('.'));
    rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    if (one.empty()) continue;
    sentences.push_back(words_of(one));
    if (sentences.back().empty()) sentences.back().emplace_back();
  }
  return sentences;
}

/// Adds the words of the longest common subsequence. Of several, the one that the package finds.
void add_common(const Words& x, const Words& y, std::set<std::string_view>& to) {
  std::vector<std::uint32_t> above(y.size() + 1), row(y.size() + 1);
  std::vector<bool> up(x.size() * y.size());  // the way back from (i, j)
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t j = 0; j < y.size(); ++j) {
      up[i * y.size() + j] = above[j + 1] > row[j];
      row[j + 1] = x[i] == y[j] ? above[j] + 1 : std::max(above[j + 1], row[j]);
    }
    std::swap(above, row);
  }
  for (std::size_t i = x.size(), j = y.size(); i > 0 && j > 0;) {
    if (x[i - 1] == y[j - 1])
      to.insert(x[i - 1]), --i, --j;
    else if (up[(i - 1) * y.size() + j - 1])
      --i;
    else
      --j;
  }
}

std::size_t distinct(const std::vector<Words>& sentences) {
  std::set<std::string_view> words;
  for (const Words& one : sentences) words.insert(one.begin(), one.end());
  return words.size();
}

double rouge_l(const std::vector<Words>& answer, const std::vector<Words>& reference) {
  if (answer.empty() || reference.empty()) return 0;
  std::set<std::string_view> common;
  for (const Words& theirs : reference)
    for (const Words& ours : answer) add_common(theirs, ours, common);
  const auto found = static_cast<double>(common.size());
  const double precision = found / static_cast<double>(distinct(answer)),
               recall = found / static_cast<double>(distinct(reference));
  return 2 * (precision * recall / (precision + recall + 1e-8));  // the package's own summand
}

// ---- Choices

constexpr std::size_t kLetters = 26;

std::optional<std::size_t> letter(char c, std::size_t options) {
  return c >= 'A' && static_cast<std::size_t>(c - 'A') < options ? std::optional(static_cast<std::size_t>(c - 'A'))
                                                                 : std::nullopt;
}

/// The capital at `at` if it stands alone and is not the article A.
std::optional<std::size_t> lone_letter(std::string_view text, std::size_t at, std::size_t options) {
  const auto joins = [&](std::size_t i) {
    const auto c = static_cast<unsigned char>(text[i]);
    return c >= 0x80 || is_digit(text[i]) || lower(text[i]) != text[i] || (c >= 'a' && c <= 'z') || c == '\'';
  };
  if (at >= text.size() || (at > 0 && joins(at - 1)) || (at + 1 < text.size() && joins(at + 1))) return std::nullopt;
  const bool article =
      text[at] == 'A' && at + 2 < text.size() && text[at + 1] == ' ' && text[at + 2] >= 'a' && text[at + 2] <= 'z';
  return article ? std::nullopt : letter(text[at], options);
}

/// The option that a reference means.
std::optional<std::size_t> option_of(std::string_view reference, std::span<const std::string> choices) {
  const auto named = std::ranges::find(choices, reference);
  if (named != choices.end()) return static_cast<std::size_t>(named - choices.begin());
  return reference.size() == 1 ? letter(reference[0], choices.empty() ? kLetters : choices.size()) : std::nullopt;
}

/// The option that an answer chooses.
std::optional<std::size_t> chosen(std::string_view answer, std::span<const std::string> choices) {
  const std::size_t options = choices.empty() ? kLetters : std::min(choices.size(), kLetters);
  constexpr std::string_view kBefore = " \t\r\n(*\"'[";
  const auto first_from = [&](std::size_t at) {
    return lone_letter(answer, std::min(answer.find_first_not_of(kBefore, at), answer.size()), options);
  };
  if (const auto found = first_from(0)) return found;
  std::string small(answer);
  std::ranges::transform(small, small.begin(), lower);
  for (const std::string_view said : {"answer is:", "answer:", "answer is", "option is"})
    if (const std::size_t at = small.find(said); at != std::string::npos)
      if (const auto found = first_from(at + said.size())) return found;
  std::vector<std::size_t> named;
  for (std::size_t i = 0; i < choices.size(); ++i)
    if (contains(answer, choices[i])) named.push_back(i);
  if (named.size() == 1) return named.front();
  for (std::size_t at = 0; at < answer.size(); ++at)
    if (const auto found = lone_letter(answer, at, options)) return found;
  return std::nullopt;
}

// ---- Classes and counts

double class_score(std::string_view answer, const std::string& reference, std::span<const std::string> choices) {
  std::vector<std::string_view> named;
  for (const std::string& one : choices)
    if (answer.find(one) != std::string_view::npos) named.push_back(one);
  // LongBench removes from the list that it walks, and so passes over what follows a removed name.
  for (std::size_t i = 0; i < named.size(); ++i)
    if (named[i] != reference && reference.find(named[i]) != std::string::npos)
      named.erase(std::ranges::find(named, named[i]));
  const bool right = std::ranges::find(named, reference) != named.end();
  return right ? 1 / static_cast<double>(named.size()) : 0;
}

double numbers_score(std::string_view answer, const std::string& reference) {
  std::size_t all = 0, right = 0;
  for (std::size_t at = 0; at < answer.size(); ++at) {
    if (!is_digit(answer[at])) continue;
    const std::size_t begin = at;
    while (at < answer.size() && is_digit(answer[at])) ++at;
    ++all;
    right += answer.substr(begin, at - begin) == reference ? 1 : 0;
  }
  return all == 0 ? 0 : static_cast<double>(right) / static_cast<double>(all);
}

template <class Score>
double best(std::span<const std::string> references, Score score) {
  double most = 0;
  for (const std::string& one : references) most = std::max(most, static_cast<double>(score(one)));
  return most;
}

}  // namespace

std::span<const TextScoringInfo> text_scorings() { return kScorings; }

std::string_view name_of(TextScoring scoring) { return kScorings[static_cast<std::size_t>(scoring)].name; }

double text_score(std::string_view answer, std::span<const std::string> references, TextScoring scoring,
                  std::span<const std::string> choices) {
  KVKEEP_REQUIRE(!references.empty(), "text_score: nothing to look for; given no references; allowed one or more");
  const auto found = [&](const std::string& one) { return contains(answer, one); };
  switch (scoring) {
    case TextScoring::all:
      return static_cast<double>(std::ranges::count_if(references, found)) / static_cast<double>(references.size());
    case TextScoring::part:
      return std::ranges::any_of(references, found) ? 1 : 0;
    case TextScoring::exact:
      return best(references,
                  [ours = plain_words(answer)](const std::string& one) { return ours == plain_words(one); });
    case TextScoring::f1:
      return best(references,
                  [ours = plain_words(answer)](const std::string& one) { return f1_of(ours, plain_words(one)); });
    case TextScoring::rouge_l:
      return best(references,
                  [ours = sentences_of(answer)](const std::string& one) { return rouge_l(ours, sentences_of(one)); });
    case TextScoring::number:
      return best(references, [ours = final_answer(answer)](const std::string& one) {
        return same_answer(ours, one.find("\\boxed") == std::string::npos ? one : final_answer(one));
      });
    case TextScoring::choice:
      return best(references, [&, ours = chosen(answer, choices)](const std::string& one) {
        return ours && ours == option_of(one, choices);
      });
    case TextScoring::classes:
      return best(references, [&](const std::string& one) { return class_score(answer, one, choices); });
    case TextScoring::numbers:
      return best(references, [&](const std::string& one) { return numbers_score(answer, one); });
  }
  return 0;
}

std::optional<std::string> text_scoring_problem(TextScoring scoring, std::span<const std::string> references,
                                                std::span<const std::string> choices) {
  if (references.empty()) return "there is nothing to look for; given no references; allowed one or more";
  if (choices.size() > kLetters && scoring == TextScoring::choice)
    return text("there are too many choices; given ", choices.size(), "; allowed 1 to ", kLetters);
  for (const std::string& one : references) {
    const std::string given = text("; given '", shortened(one), "'; allowed ");
    if (one.empty()) return "a reference is empty; given \"\"; allowed text";
    if (scoring == TextScoring::choice && !option_of(one, choices))
      return text("a reference is no choice", given,
                  choices.empty() ? "a letter" : "a letter of a choice, or its text");
    if (scoring == TextScoring::classes && std::ranges::find(choices, one) == choices.end())
      return text("a reference is no choice", given, "one of `choices`");
    if (scoring == TextScoring::numbers && !std::ranges::all_of(one, is_digit))
      return text("a reference is no whole number", given, "digits");
    if (scoring == TextScoring::rouge_l && words_of(detail::replaced_utf8(one)).size() > kMostRougeWords)
      return text("a reference is too long for rouge-l", given, "at most ", kMostRougeWords, " words");
  }
  return std::nullopt;
}

}  // namespace kvkeep::lm
