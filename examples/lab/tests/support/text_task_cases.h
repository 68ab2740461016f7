// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What the tests of the text tasks share: an essay, two counters, samples of many shapes.

#include <gtest/gtest.h>

#include <cctype>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "kvlab/passages.h"
#include "kvlab/text_tasks.h"

namespace kvkeep::lm {

inline constexpr std::string_view kEssay =
    "Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse, I "
    "thought I would sail about "
    "a little!  It is a way\n"
    "I have of \"driving off the spleen.\" Whenever it is damp, I go to sea?";
inline const std::string kNoiseLine =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

inline std::vector<std::string> words_of(std::string_view text) {
  std::istringstream stream{std::string(text)};
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

inline std::vector<std::string> lines_of(std::string_view text) {
  std::istringstream stream{std::string(text)};
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

inline std::int64_t count_words(std::string_view text) { return static_cast<std::int64_t>(words_of(text).size()); }

/// Up to five letters, or any other mark: about what a tokenizer says.
inline std::int64_t count_pieces(std::string_view text) {
  std::int64_t pieces = 0, run = 0;
  for (const char letter : text) {
    const bool in_word = std::isalpha(static_cast<unsigned char>(letter)) != 0;
    if (in_word ? run++ % 5 == 0 : letter != ' ') ++pieces;
    if (!in_word) run = 0;
  }
  return pieces;
}

inline std::string replaced(std::string text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

inline std::size_t times(std::string_view text, std::string_view part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

inline std::string in_quotes(std::string_view text, std::size_t from, std::size_t to) {
  return std::string(text.substr(from, to - from));
}

/// 1,200 documents of about 40 pieces, five to an article; question i is about document i, or about ten from there on.
inline const Passages& passages_of(std::string_view task) {
  static const auto make = [](PassageForm form) {
    Passages made{.form = form, .documents = {}, .questions = {}};
    for (std::size_t i = 0; i < 1200; ++i) {
      const std::string number = std::to_string(i);
      made.documents.push_back("Town " + number + " lies on the river " + number +
                               "x and has a bridge, a mill and a market that opens early.");
      PassageQuestion& asked = made.questions.emplace_back();
      asked.question = "Where does town " + number + " lie?";
      asked.answers = {"on the river " + number + "x", "river " + number + "x"};
      for (std::size_t own = 0; own < (form == PassageForm::squad ? 1U : 10U); ++own)
        asked.own.push_back((i + own) % 1200);
      for (std::size_t near = i / 5 * 5; form == PassageForm::squad && near < i / 5 * 5 + 5; ++near)
        if (near != i) asked.near.push_back(near);
    }
    return made;
  };
  static const Passages squad = make(PassageForm::squad), hotpotqa = make(PassageForm::hotpotqa);
  return task == "ruler/qa-2" ? hotpotqa : squad;
}

inline TextSample sample_of(std::string_view name, std::uint64_t seed, std::int64_t length = 1024) {
  return make_text_task(name, seed, count_pieces,
                        {.length = length, .haystack = kEssay, .passages = &passages_of(name)});
}

inline bool is_niah(std::string_view name) { return name.starts_with("ruler/niah"); }
inline bool is_essay(const TextTaskInfo& task) { return task.needs_haystack; }

/// Calls `check(task, sample, length)` for every task, several lengths, `seeds` seeds each.
template <class Check>
void for_each_sample(std::uint64_t seeds, Check check) {
  for (const TextTaskInfo& task : text_tasks())
    for (const std::int64_t length : {800, 1024, 2048, 4095, 4096, 5000})
      for (std::uint64_t seed = 0; seed < seeds; ++seed) {
        SCOPED_TRACE(std::string(task.name) + " seed " + std::to_string(seed) + " length " + std::to_string(length));
        check(task, sample_of(task.name, seed, length), length);
      }
}

}  // namespace kvkeep::lm
