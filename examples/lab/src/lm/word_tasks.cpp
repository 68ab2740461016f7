// SPDX-License-Identifier: Apache-2.0
// Chains of variables, most frequent words: ruler/vt, ruler/cwe, ruler/fwe.

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "kvkeep/core/error.h"
#include "text_recipe.h"
#include "text_templates.h"
#include "words.h"

namespace kvkeep::lm {
namespace {

std::string letters(Dice& dice, char first, int count) {
  std::string result;
  for (int i = 0; i < count; ++i) result += static_cast<char>(first + dice.below(26));
  return result;
}

/// `sample` after a solved one.
TextSample with_example(const std::string& example, TextSample sample) {
  sample.context = example + sample.context;
  for (TextNeedle& needle : sample.needles) needle.offset += example.size();
  return sample;
}

/// One text of vt, with names of `name_letters` letters.
TextSample assignments(Dice& dice, std::int64_t lines, int name_letters, std::string_view value) {
  Deck deck(dice, lines);
  std::vector<std::int64_t> places;
  for (std::int64_t i = 0; i < kChain; ++i) places.push_back(deck.deal());
  std::sort(places.begin(), places.end());

  TextSample sample;
  std::set<std::string> seen;
  std::vector<Insertion> steps;
  for (const std::int64_t place : places) {
    const std::string name = fresh(seen, [&] { return letters(dice, 'A', name_letters); });
    const std::string source = sample.answers.empty() ? std::string(value) : text("VAR ", sample.answers.back(), " ");
    steps.push_back({place, text("VAR ", name, " = ", source), true});
    sample.answers.push_back(name);
  }
  sample.context = kVtText;
  append_haystack(sample, std::vector<std::string_view>(static_cast<std::size_t>(lines), kNoise), std::move(steps),
                  "\n");
  sample.context += '\n';
  sample.question = filled(kVtQuestion, {{"query", value}});
  sample.answer_prefix = filled(kVtAnswer, {{"count", text(kChain)}, {"query", value}});
  return sample;
}

/// The values of a text of vt and of its example.
std::pair<std::string, std::string> values_of(Dice& dice) {
  Deck values(dice, 89999);  // 10000 to 99998: numpy's randint(10000, 99999) leaves out the last
  const std::int64_t own = values.deal(), example = values.deal();
  return {text(10000 + own), text(10000 + example)};
}

struct Repeats {
  int common, uncommon;
};

/// Ten words and `others` more as a shuffled, numbered list.
TextSample word_list(Dice& dice, std::int64_t others, Repeats repeats, const std::function<std::string()>& word) {
  TextSample sample;
  std::vector<std::string> list;
  for (std::int64_t i = 0; i < 10 + others; ++i) {
    std::string one = word();
    list.insert(list.end(), static_cast<std::size_t>(i < 10 ? repeats.common : repeats.uncommon), one);
    if (i < 10) sample.answers.push_back(std::move(one));
  }
  dice.shuffle(list);
  sample.context = kCweText;
  for (std::size_t i = 0; i < list.size(); ++i) sample.context += text(i == 0 ? "" : " ", i + 1, ". ", list[i]);
  sample.context += '\n';
  sample.question = kCweQuestion;
  sample.answer_prefix = kCweAnswer;
  return sample;
}

}  // namespace

TextSample chain_example(const Recipe& recipe, std::int64_t lines) {
  Dice values = recipe.dice(), dice("example of ruler/vt", recipe.seed);
  return assignments(dice, lines, 3, values_of(values).second);
}

TextSample chain(const Recipe& recipe, std::int64_t lines, const TextSample& example) {
  Dice dice = recipe.dice();
  const std::string value = values_of(dice).first;
  std::string solved = example.prompt();
  for (const std::string& name : example.answers) solved += " " + name;
  return with_example(solved + "\n\n", assignments(dice, lines, 5, value));
}

TextSample common_words(const Recipe& recipe, std::int64_t others) {
  Dice dice = recipe.dice();
  std::vector<std::string_view> all(adjectives().begin(), adjectives().end());
  all.insert(all.end(), nouns().begin(), nouns().end());
  all.insert(all.end(), verbs().begin(), verbs().end());
  Deck deck(dice, static_cast<std::int64_t>(all.size()));
  Pairs pairs(dice);
  const auto word = [&] {
    return deck.left() > 0 ? std::string(all[static_cast<std::size_t>(deck.deal())]) : pairs.next();
  };

  const bool is_short = recipe.options.length < 4096;
  const TextSample example = is_short ? word_list(dice, 10, {3, 1}, word) : word_list(dice, 30, {10, 3}, word);
  std::string solved = example.prompt();
  for (std::size_t i = 0; i < example.answers.size(); ++i) solved += text(" ", i + 1, ". ", example.answers[i]);
  return with_example(solved + "\n", word_list(dice, others, is_short ? Repeats{6, 1} : Repeats{30, 3}, word));
}

TextSample coded_words(const Recipe& recipe, std::int64_t words) {
  Dice dice = recipe.dice();
  std::set<std::string> seen;
  TextSample sample;
  std::vector<std::string> list;
  const std::int64_t share =
      words * 607927101854 / 1000000000000;  // words / zeta(2) = words * 6 / pi^2: those of rank 1
  for (std::int64_t rank = 1; rank <= std::max<std::int64_t>(8, recipe.options.length / 50) && rank * rank <= share;
       ++rank) {
    const std::string word = rank == 1 ? "..." : fresh(seen, [&] { return letters(dice, 'a', 6); });
    if (2 <= rank && rank <= 4) sample.answers.push_back(word);
    list.insert(list.end(), static_cast<std::size_t>(share / (rank * rank)), word);
  }
  dice.shuffle(list);
  sample.context = kFweText;
  for (std::size_t i = 0; i < list.size(); ++i) sample.context += text(i == 0 ? "" : " ", list[i]);
  sample.context += '\n';
  sample.question = kFweQuestion;
  sample.answer_prefix = kFweAnswer;
  return sample;
}

}  // namespace kvkeep::lm
