// SPDX-License-Identifier: Apache-2.0
// Needles in a haystack: ruler/niah-* and text/needle.

#include <algorithm>
#include <set>
#include <utility>

#include "kvkeep/core/error.h"
#include "text_recipe.h"
#include "text_templates.h"
#include "words.h"

namespace kvkeep::lm {
namespace {

enum class Haystack : std::uint8_t { noise, essay, needles };

struct NeedleShape {
  Haystack haystack = Haystack::essay;
  bool uuid_keys = false, uuid_values = false;
  int keys = 1, values = 1, queries = 1;
};

NeedleShape needle_shape(std::string_view name) {
  if (name == "ruler/niah-single-1") return {.haystack = Haystack::noise};
  if (name == "ruler/niah-single-3") return {.uuid_values = true};
  if (name == "ruler/niah-multikey-1") return {.keys = 4};
  if (name == "ruler/niah-multikey-2") return {.haystack = Haystack::needles};
  if (name == "ruler/niah-multikey-3") return {.haystack = Haystack::needles, .uuid_keys = true, .uuid_values = true};
  if (name == "ruler/niah-multivalue") return {.values = 4};
  if (name == "ruler/niah-multiquery") return {.keys = 4, .queries = 4};
  return {};  // niah-single-2
}

std::string uuid4(Dice& dice) {
  const std::uint64_t high = (dice.bits() & ~0xF000ULL) | 0x4000ULL;     // version 4
  const std::uint64_t low = (dice.bits() >> 2) | 0x8000000000000000ULL;  // variant 1
  std::string result;
  for (const std::uint64_t half : {high, low})
    for (int digit = 15; digit >= 0; --digit) {
      if (result.size() == 8 || result.size() == 13 || result.size() == 18 || result.size() == 23) result += '-';
      result += "0123456789abcdef"[(half >> (4 * digit)) & 15];
    }
  return result;
}

/// Keys, values and sentences of one sample; none of them twice.
class Needles {
 public:
  Needles(Dice& dice, const NeedleShape& shape) : dice_(dice), pairs_(dice), shape_(shape) {}

  std::string key() {
    return shape_.uuid_keys ? fresh(seen_, [&] { return uuid4(dice_); }) : pairs_.next();
  }

  std::string value() {
    return fresh(seen_, [&] { return shape_.uuid_values ? uuid4(dice_) : text(dice_.between(1000000, 9999999)); });
  }

  [[nodiscard]] std::string sentence(std::string_view key, std::string_view value) const {
    return filled(kNeedle, {{"kind", kinds()}, {"key", key}, {"value", value}});
  }

  [[nodiscard]] std::string_view kinds() const { return shape_.uuid_values ? "uuids" : "numbers"; }

 private:
  Dice& dice_;
  Pairs pairs_;
  NeedleShape shape_;
  std::set<std::string> seen_;
};

/// "a", "a, and b", "a, b, and c".
std::string listed(const std::vector<std::string>& items) {
  std::string result = items[0];
  for (std::size_t i = 1; i < items.size(); ++i) result += (i + 1 == items.size() ? ", and " : ", ") + items[i];
  return result;
}

/// Draws the needles that are asked for and those that are not. Returns them in random order.
std::vector<Insertion> ask(Dice& dice, const NeedleShape& shape, Needles& needles, std::vector<std::string>& queries,
                           std::vector<std::string>& answers) {
  std::vector<Insertion> result;
  for (int k = 0; k < shape.keys; ++k) {
    const std::string key = needles.key();
    const bool is_asked = k < shape.queries;  // keys are random, so it may as well be the first ones
    if (is_asked) queries.push_back(key);
    for (int v = 0; v < shape.values; ++v) {
      const std::string value = needles.value();
      if (is_asked) answers.push_back(value);
      result.push_back({0, needles.sentence(key, value), is_asked});
    }
  }
  dice.shuffle(result);
  return result;
}

/// Gives each needle its place, in their order. Lines: all different. Sentences of an essay: some of 40 depths from 0
/// to 100 percent, no depth twice.
void place(Dice& dice, bool essay, std::size_t units, std::vector<Insertion>& needles) {
  const auto size = static_cast<std::int64_t>(units);
  Deck deck(dice, essay ? 40 : size);
  std::vector<std::int64_t> places;
  while (places.size() < needles.size()) {
    const std::int64_t card = deck.deal();
    const std::int64_t percent = (200 * card + 39) / 78;  // 100 * card / 39, rounded
    places.push_back(essay ? unit_at(units, percent) : card);
  }
  std::sort(places.begin(), places.end());
  for (std::size_t i = 0; i < needles.size(); ++i) needles[i].before = places[i];
}

}  // namespace

TextSample niah(const Recipe& recipe, std::int64_t units) {
  const NeedleShape shape = needle_shape(recipe.task.name);
  const bool is_essay = shape.haystack == Haystack::essay;
  Dice dice = recipe.dice();
  Needles needles(dice, shape);
  TextSample sample;
  std::vector<std::string> queries;
  std::vector<Insertion> insertions = ask(dice, shape, needles, queries, sample.answers);

  std::vector<std::string> lines;
  std::vector<std::string_view> hay;
  if (is_essay) {
    hay = recipe.essay.sentences(units);
  } else if (shape.haystack == Haystack::noise) {
    hay.assign(static_cast<std::size_t>(units), kNoise);
  } else {
    for (std::int64_t i = 0; i < units; ++i) {
      const std::string key = needles.key();
      lines.push_back(needles.sentence(key, needles.value()));
    }
    hay.assign(lines.begin(), lines.end());
  }
  place(dice, is_essay, hay.size(), insertions);  // in any case, so that a given depth changes nothing else
  if (recipe.options.depth)
    std::ranges::find(insertions, true, &Insertion::asked)->before = unit_at(hay.size(), *recipe.options.depth);

  const bool one = sample.answers.size() == 1;
  const std::string_view kind = needles.kinds().substr(0, needles.kinds().size() - (one ? 1 : 0));
  const std::string query = listed(queries);
  sample.context = filled(one ? kNiahOneText : kNiahText, {{"kind", kind}});
  append_haystack(sample, hay, std::move(insertions), is_essay ? " " : "\n");
  sample.context += '\n';
  sample.question = filled(one ? kNiahOneQuestion : kNiahQuestion, {{"kind", kind}, {"query", query}});
  sample.answer_prefix = filled(one ? kNiahOneAnswer : kNiahAnswer, {{"kind", kind}, {"query", query}});
  return sample;
}

TextSample text_needle(const Recipe& recipe, std::int64_t words) {
  Dice dice = recipe.dice();
  Deck keys(dice, static_cast<std::int64_t>(nouns().size()));
  std::set<std::string> seen;
  const std::vector<std::string_view> hay = recipe.essay.sentences(words);
  TextSample sample;
  std::vector<Insertion> insertions;
  std::string_view query;
  for (std::int32_t i = 0; i < recipe.options.numbers.value_or(1); ++i) {
    const std::string_view key = nouns()[static_cast<std::size_t>(keys.deal())];
    const std::string value = fresh(seen, [&] { return text(dice.between(10000, 99999)); });
    std::int64_t percent = dice.below(101);  // drawn in any case, so that a given depth changes nothing else
    if (i == 0) {
      percent = recipe.options.depth.value_or(static_cast<std::int32_t>(percent));
      query = key;
      sample.answers.push_back(value);
    }
    insertions.push_back(
        {unit_at(hay.size(), percent), filled(kProseNeedle, {{"key", key}, {"value", value}}), i == 0});
  }
  append_haystack(sample, hay, std::move(insertions), " ");
  sample.context += '\n';
  sample.question = filled(kProseQuestion, {{"query", query}});
  sample.answer_prefix = filled(kProseAnswer, {{"query", query}});
  return sample;
}

}  // namespace kvkeep::lm
