// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The regular expressions by which tokenizers cut words.

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace kvkeep::lm::detail {

/// A set of characters.
class CharSet {
 public:
  /// Takes a set off the front of an expression: a character, an escape (\s, \S, \r, \n, \p{L}), or [...] of these and
  /// of ranges, [^...] the others.
  static CharSet taken_from(std::string_view& expression);

  [[nodiscard]] bool has(char32_t code) const { return code < 128 ? ascii_[code] : contains(code) != negated_; }

 private:
  void add_one(std::string_view& expression);
  [[nodiscard]] bool contains(char32_t code) const;

  std::vector<std::pair<char32_t, char32_t>> ranges_;
  std::uint32_t categories_ = 0;  ///< a bit for each of utf8proc's
  bool spaces_ = false, negated_ = false;
  std::bitset<128> ascii_;
};

/// Alternatives, each a row of sets with a quantifier (?, *, +, {1,3}), in which (?i:'s|'t|'re|'ve|'m|'ll|'d) and,
/// last,
/// (?!\S) may stand; or one set and $. Leftmost, then the first alternative that matches, greedy: as Oniguruma
/// does. Only for expressions of our own: nothing is refused, and another one might cost more than O(n).
class Expression {
 public:
  explicit Expression(std::string_view expression);

  /// The end of the match that begins at byte `begin`, `begin` if there is none. `text` is UTF-8. Cost: O(match), and
  /// one look at the run of characters after it.
  [[nodiscard]] std::size_t end_of_match(std::string_view text, std::size_t begin) const;

  /// Where matches may begin: with $, where the run that ends the text does.
  [[nodiscard]] std::size_t earliest(std::string_view text) const;

 private:
  enum class Kind : std::uint8_t { characters, contraction, no_word_behind };
  struct Item {
    Kind kind;
    CharSet set;
    std::uint32_t least = 1, most = 1;
  };

  static Item taken_from(std::string_view& expression);
  static constexpr std::size_t kNone = SIZE_MAX;
  /// Calls itself once per item.
  static std::size_t match(std::span<const Item> items, std::string_view text, std::size_t at);

  std::vector<std::vector<Item>> alternatives_;
  bool ends_text_ = false;  ///< $
};

}  // namespace kvkeep::lm::detail
