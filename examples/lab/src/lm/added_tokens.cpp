// SPDX-License-Identifier: Apache-2.0
#include "added_tokens.h"

#include <algorithm>

#include "utf8.h"

namespace kvkeep::lm::detail {
namespace {

bool is_space(std::string_view text, std::size_t at) {
  return class_of(character_at(text, at).code) == CharClass::space;
}

bool stands_alone(std::string_view text, std::size_t begin, std::size_t end) {
  const bool word_before = begin > 0 && is_word_character(character_at(text, character_before(text, begin)).code);
  const bool word_behind = end < text.size() && is_word_character(character_at(text, end).code);
  return !word_before && !word_behind;
}

/// Ends of runs of blanks. Remembers the last run: otherwise every one-blank token in a long run would read all of it
/// again.
class Blanks {
 public:
  explicit Blanks(std::string_view text) : text_(text) {}

  std::size_t end_from(std::size_t at) {
    if (at >= begin_ && at < end_) return end_;
    begin_ = end_ = at;
    while (end_ < text_.size() && is_space(text_, end_)) end_ += character_at(text_, end_).bytes;
    return end_;
  }

  /// The first of the blanks that end at `at`, not before `least`.
  [[nodiscard]] std::size_t begin_of(std::size_t at, std::size_t least) const {
    while (at > least && is_space(text_, character_before(text_, at))) at = character_before(text_, at);
    return at;
  }

 private:
  std::string_view text_;
  std::size_t begin_ = 0, end_ = 0;
};

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::stable_sort(tokens_.begin(), tokens_.end(), [](const auto& a, const auto& b) { return a.text < b.text; });
  const auto rest =
      std::unique(tokens_.begin(), tokens_.end(), [](const auto& a, const auto& b) { return a.text == b.text; });
  tokens_.erase(rest, tokens_.end());
  for (const AddedToken& token : tokens_) ++first_byte_[static_cast<unsigned char>(token.text[0]) + std::size_t{1}];
  for (std::size_t b = 0; b < 256; ++b) first_byte_[b + 1] += first_byte_[b];
}

const AddedToken* AddedTokens::longest_at(std::string_view text, std::size_t at) const {
  const std::size_t first = static_cast<unsigned char>(text[at]);
  auto low = tokens_.begin() + first_byte_[first], high = tokens_.begin() + first_byte_[first + 1];
  const AddedToken* longest = nullptr;
  for (std::size_t length = 1; low != high; ++length) {  // [low, high) agree with the text in `length` bytes
    if (low->text.size() == length) longest = &*low++;
    if (at + length == text.size()) break;
    const auto byte = static_cast<unsigned char>(text[at + length]);
    low = std::partition_point(
        low, high, [&](const auto& token) { return static_cast<unsigned char>(token.text[length]) < byte; });
    high = std::partition_point(
        low, high, [&](const auto& token) { return static_cast<unsigned char>(token.text[length]) == byte; });
  }
  return longest;
}

std::vector<AddedTokens::Part> AddedTokens::split(std::string_view text, bool specials) const {
  std::vector<Part> parts;
  Blanks blanks(text);
  std::size_t done = 0;
  for (std::size_t at = 0; !tokens_.empty() && at < text.size();) {
    const AddedToken* token = longest_at(text, at);
    if (token == nullptr) {
      ++at;
      continue;
    }
    std::size_t begin = at, end = at + token->text.size();
    at = end;  // a token that is found but rejected is skipped all the same
    if (token->special && !specials) continue;
    if (token->single_word && !stands_alone(text, begin, end)) continue;
    if (token->lstrip) begin = std::max(done, blanks.begin_of(begin, done));
    if (token->rstrip) end = blanks.end_from(end);
    if (done < begin) parts.push_back({done, begin, -1});
    parts.push_back({begin, end, token->id});
    done = end;  // the next token may be in blanks that this one took: the package goes back then, too
  }
  if (done < text.size()) parts.push_back({done, text.size(), -1});
  return parts;
}

}  // namespace kvkeep::lm::detail
