#pragma once
/// Tokens that are found in text before anything else: control tokens, and those that users added.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvkeep::lm::detail {

struct AddedToken {
  std::int32_t id = 0;
  std::string text;          ///< what it is found by
  bool special = false;      ///< a control token
  bool single_word = false;  ///< found only where no word character stands beside it
  bool lstrip = false;       ///< takes the blanks before it
  bool rstrip = false;       ///< takes the blanks behind it
};

/// A longer text is refused: finding costs that many steps for a byte, at worst.
inline constexpr std::size_t kLongestAddedToken = 256;

/// Finds tokens in text: the leftmost first, of those that begin there the longest, as the package does.
class AddedTokens {
 public:
  AddedTokens() = default;

  /// Of several with one text the first counts. No text is empty.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  struct Part {
    std::size_t begin, end;  ///< bytes of the text
    std::int32_t id;         ///< negative: text between tokens
  };

  /// A text of UTF-8 in parts. Without `specials` control tokens are text. Cost: O(n times the longest token that
  /// nearly fits).
  [[nodiscard]] std::vector<Part> split(std::string_view text, bool specials) const;

 private:
  /// The longest token that stands at `at`; null where there is none.
  [[nodiscard]] const AddedToken* longest_at(std::string_view text, std::size_t at) const;

  std::vector<AddedToken> tokens_;  ///< by text
  std::array<std::uint32_t, 257> first_byte_ =
      {};  ///< tokens that begin with byte b: first_byte_[b] to first_byte_[b + 1]
};

}  // namespace kvkeep::lm::detail
