// SPDX-License-Identifier: Apache-2.0
#include "text_recipe.h"

#include <algorithm>

#include "kvkeep/core/error.h"
#include "words.h"

namespace kvkeep::lm {

Pairs::Pairs(Dice& dice) : deck_(dice, static_cast<std::int64_t>(adjectives().size() * nouns().size())) {}

std::string Pairs::next() {
  KVKEEP_REQUIRE(deck_.left() > 0, "make_text_task: the text needs more adjective-noun pairs than there are; given ",
                 adjectives().size() * nouns().size(), "; allowed a shorter length");
  const auto card = static_cast<std::size_t>(deck_.deal());
  return text(adjectives()[card / nouns().size()], "-", nouns()[card % nouns().size()]);
}

std::string filled(std::string_view pattern,
                   std::initializer_list<std::pair<std::string_view, std::string_view>> values) {
  std::string result;
  while (true) {
    const std::size_t open = pattern.find('{');
    result += pattern.substr(0, open);
    if (open == std::string_view::npos) return result;
    const std::size_t close = pattern.find('}', open);
    const std::string_view name = pattern.substr(open + 1, close - open - 1);
    result += std::find_if(values.begin(), values.end(), [&](const auto& one) { return one.first == name; })->second;
    pattern.remove_prefix(close + 1);
  }
}

}  // namespace kvkeep::lm
