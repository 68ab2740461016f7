// SPDX-License-Identifier: Apache-2.0
#pragma once
/// UTF-8 and the classes of Unicode, as tokenizers need them. Classes and normal forms are those of utf8proc's Unicode
/// version.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvkeep/core/error.h"

namespace kvkeep::lm::detail {

using kvkeep::detail::first_step;
using kvkeep::detail::Utf8State;
using kvkeep::detail::Utf8Step;

[[nodiscard]] bool is_utf8(std::string_view text);

/// U+FFFD for each step that is not a character: Python's bytes.decode("utf-8", errors="replace").
[[nodiscard]] std::string replaced_utf8(std::string_view text);

struct Character {
  char32_t code;
  std::uint32_t bytes;
};

/// The character that begins at byte `at` of text that is_utf8.
[[nodiscard]] inline Character character_at(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) -> char32_t { return static_cast<unsigned char>(text[at + i]); };
  const char32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  const auto rest = [&](std::size_t i) { return byte(i) & 0x3fU; };
  if (first < 0xe0) return {(first & 0x1fU) << 6U | rest(1), 2};
  if (first < 0xf0) return {(first & 0x0fU) << 12U | rest(1) << 6U | rest(2), 3};
  return {(first & 0x07U) << 18U | rest(1) << 12U | rest(2) << 6U | rest(3), 4};
}

/// Where the character before byte `at` > 0 begins.
[[nodiscard]] inline std::size_t character_before(std::string_view text, std::size_t at) {
  do --at;
  while ((static_cast<unsigned char>(text[at]) & 0xc0U) == 0x80U);
  return at;
}

void append_utf8(std::string& out, char32_t code);

/// The three classes that pre-tokenizers know, disjoint: \p{L}, \p{N}, \s; and the rest.
enum class CharClass : std::uint8_t { letter, number, space, other };

[[nodiscard]] CharClass class_beyond_ascii(char32_t code);

[[nodiscard]] inline CharClass class_of(char32_t code) {
  static constexpr auto kAscii = [] {
    std::array<CharClass, 128> classes{};
    for (std::size_t c = 0; c < classes.size(); ++c) {
      const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
      const bool space = c == ' ' || (c >= '\t' && c <= '\r');
      classes[c] = letter                 ? CharClass::letter
                   : c >= '0' && c <= '9' ? CharClass::number
                   : space                ? CharClass::space
                                          : CharClass::other;
    }
    return classes;
  }();
  return code < 128 ? kAscii[code] : class_beyond_ascii(code);
}

/// \w of Unicode: letters, marks, decimal digits, letter numbers, connectors, joiners.
[[nodiscard]] bool is_word_character(char32_t code);

/// Normal form C of text that is_utf8. Cost: O(n log n), one pass over bytes if all characters are below U+0300.
[[nodiscard]] std::string nfc(std::string_view text);

}  // namespace kvkeep::lm::detail
