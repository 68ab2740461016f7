// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Tokens that are found in text before anything else: control tokens, and those added by users.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvkeep::lm::detail {

struct AddedToken {
  std::int32_t id = 0;
  std::string text;          ///< what it is found as
  bool special = false;      ///< a control token
  bool single_word = false;  ///< found only with no word character beside it
  bool lstrip = false;       ///< takes the blanks before it
  bool rstrip = false;       ///< takes the blanks after it
};

/// A longer text is refused: at worst, finding costs this many steps per byte.
inline constexpr std::size_t kLongestAddedToken = 256;

/// Finds tokens in text, as the package does: the leftmost first, and the longest of those that begin there.
class AddedTokens {
 public:
  AddedTokens() = default;

  /// Of several with the same text the first counts. No text may be empty.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  struct Part {
    std::size_t begin, end;  ///< bytes of the text
    std::int32_t id;         ///< negative: text between tokens
  };

  /// Splits UTF-8 text into parts. Without `specials`, control tokens are text. Cost: O(n times the longest token that
  /// nearly matches).
  [[nodiscard]] std::vector<Part> split(std::string_view text, bool specials) const;

 private:
  /// The longest token at `at`; null if there is none.
  [[nodiscard]] const AddedToken* longest_at(std::string_view text, std::size_t at) const;

  std::vector<AddedToken> tokens_;  ///< by text
  std::array<std::uint32_t, 257> first_byte_ =
      {};  ///< tokens that begin with byte b: first_byte_[b] to first_byte_[b + 1]
};

}  // namespace kvkeep::lm::detail
