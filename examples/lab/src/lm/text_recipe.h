// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How the text tasks make a sample of a given size, and what they share.

#include <cstdint>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "dice.h"
#include "haystack.h"
#include "kvlab/passages.h"
#include "kvlab/text_tasks.h"

namespace kvkeep::lm {

/// What a sample is made of, beside its size.
struct Recipe {
  const TextTaskInfo& task;
  std::uint64_t seed;
  const TextTaskOptions& options;
  const Essay& essay;

  [[nodiscard]] Dice dice() const { return Dice(task.name, seed); }
};

inline constexpr std::int64_t kChain = 5;  ///< variables of vt: the value's own, and four hops
inline constexpr std::int64_t kLeastCoded =
    74;  ///< words of fwe; from here on ranks 4 and 5 differ in count, so the answer is unique

// Samples of a number of units, without answer_tokens and prompt_tokens. The same recipe and units give the same bytes.

TextSample niah(const Recipe& recipe, std::int64_t units);           ///< 1 or more lines, or words of the essay
TextSample text_needle(const Recipe& recipe, std::int64_t words);    ///< 1 or more
TextSample chain_example(const Recipe& recipe, std::int64_t lines);  ///< of vt: kChain or more
TextSample chain(const Recipe& recipe, std::int64_t lines,
                 const TextSample& example);                         ///< vt after its example: kChain or more
TextSample common_words(const Recipe& recipe, std::int64_t others);  ///< 1 or more words beside the ten
TextSample coded_words(const Recipe& recipe, std::int64_t words);    ///< kLeastCoded or more
TextSample documents(const Recipe& recipe, std::int64_t units);      ///< those of the question, or more
const PassageQuestion& question_of(const Recipe& recipe);            ///< of ruler/qa-*

/// Keys: adjective-noun pairs, none twice.
class Pairs {
 public:
  explicit Pairs(Dice& dice);

  /// Throws InvalidArgument once all were given.
  std::string next();

 private:
  Deck deck_;
};

/// The pattern with each {name} replaced by its value.
std::string filled(std::string_view pattern,
                   std::initializer_list<std::pair<std::string_view, std::string_view>> values);

/// Calls `draw` until it returns something that is not in `seen`, and adds it.
template <class Draw>
std::string fresh(std::set<std::string>& seen, Draw draw) {
  while (true)
    if (const auto [at, is_new] = seen.insert(draw()); is_new) return *at;
}

}  // namespace kvkeep::lm
