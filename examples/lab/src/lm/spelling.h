// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How a text is written before tokens are looked for in it.

#include <cstdint>
#include <string>
#include <string_view>

namespace kvkeep::lm::detail {

/// What stands before a part of a text.
enum class Before : std::uint8_t {
  nothing,  ///< the text begins here
  token,    ///< an added token
  text,     ///< text of an earlier call
};

/// Where a blank is put in front. Never behind text.
enum class Prefix : std::uint8_t {
  none,
  always,        ///< at the beginning, and after each added token
  unless_blank,  ///< the same, where there is none
  first,         ///< at the beginning alone, where there is none
};

/// SentencePiece writes blanks as U+2581 and does not tell the two apart. Here both are blanks.
struct Spelling {
  static constexpr std::string_view kBlank = "\xe2\x96\x81";  // U+2581

  bool nfc = false;
  bool blanks = false;  ///< U+2581 is a blank
  Prefix prefix = Prefix::none;

  /// `text`, which is UTF-8 and not empty, or what it becomes, kept in `room`. Cost: O(n), with NFC O(n log n).
  [[nodiscard]] std::string_view of(std::string_view text, Before before, std::string& room) const;
};

/// U+2581 as blanks.
[[nodiscard]] std::string with_blanks(std::string_view text);

}  // namespace kvkeep::lm::detail
