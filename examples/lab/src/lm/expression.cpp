// SPDX-License-Identifier: Apache-2.0
#include "expression.h"

#include <utf8proc.h>

#include <algorithm>
#include <initializer_list>

#include "utf8.h"

namespace kvkeep::lm::detail {
namespace {

constexpr std::string_view kContraction = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", kNoWordBehind = R"((?!\S))";

bool take(std::string_view& from, std::string_view what) {
  if (!from.starts_with(what)) return false;
  from.remove_prefix(what.size());
  return true;
}

char32_t take_character(std::string_view& from) {
  const Character c = character_at(from, 0);
  from.remove_prefix(c.bytes);
  return c.code;
}

std::uint32_t bits(std::initializer_list<utf8proc_category_t> categories) {
  std::uint32_t bits = 0;
  for (const utf8proc_category_t category : categories) bits |= 1U << category;
  return bits;
}

std::uint32_t categories_called(std::string_view name) {
  constexpr auto Lu = UTF8PROC_CATEGORY_LU, Ll = UTF8PROC_CATEGORY_LL, Lt = UTF8PROC_CATEGORY_LT,
                 Lm = UTF8PROC_CATEGORY_LM, Lo = UTF8PROC_CATEGORY_LO;
  if (name == "Lu") return bits({Lu});
  if (name == "Ll") return bits({Ll});
  if (name == "Lt") return bits({Lt});
  if (name == "Lm") return bits({Lm});
  if (name == "Lo") return bits({Lo});
  if (name == "L") return bits({Lu, Ll, Lt, Lm, Lo});
  if (name == "M") return bits({UTF8PROC_CATEGORY_MN, UTF8PROC_CATEGORY_MC, UTF8PROC_CATEGORY_ME});
  if (name == "N") return bits({UTF8PROC_CATEGORY_ND, UTF8PROC_CATEGORY_NL, UTF8PROC_CATEGORY_NO});
  if (name == "S")
    return bits({UTF8PROC_CATEGORY_SM, UTF8PROC_CATEGORY_SC, UTF8PROC_CATEGORY_SK, UTF8PROC_CATEGORY_SO});
  return bits({UTF8PROC_CATEGORY_PC, UTF8PROC_CATEGORY_PD, UTF8PROC_CATEGORY_PS, UTF8PROC_CATEGORY_PE,
               UTF8PROC_CATEGORY_PI, UTF8PROC_CATEGORY_PF, UTF8PROC_CATEGORY_PO});  // P
}

// kContraction at `at`; `at` if there is none.
std::size_t end_of_contraction(std::string_view text, std::size_t at) {
  const auto letter = [&](std::size_t i) -> char {
    if (at + i >= text.size()) return 0;
    const char c = text[at + i];
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  if (letter(0) != '\'') return at;
  const char first = letter(1), second = letter(2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
  if ((first == 'r' || first == 'v') && second == 'e') return at + 3;
  if (first == 'l' && second == 'l') return at + 3;
  return text.substr(at + 1, 2) == "\xc5\xbf" ? at + 3 : at;  // where case is ignored, the long s is an s
}

}  // namespace

void CharSet::add_one(std::string_view& expression) {
  if (take(expression, R"(\p{)")) {
    const std::size_t end = expression.find('}');
    categories_ |= categories_called(expression.substr(0, end));
    expression.remove_prefix(end + 1);
    return;
  }
  if (take(expression, R"(\s)")) {
    spaces_ = true;
    return;
  }
  const auto one = [&]() -> char32_t {
    if (take(expression, R"(\r)")) return '\r';
    if (take(expression, R"(\n)")) return '\n';
    take(expression, R"(\)");
    return take_character(expression);
  };
  const char32_t first = one();
  const bool range = expression.starts_with('-') && !expression.starts_with("-]");
  if (range) expression.remove_prefix(1);
  ranges_.emplace_back(first, range ? one() : first);
}

CharSet CharSet::taken_from(std::string_view& expression) {
  CharSet set;
  if (take(expression, "[")) {
    set.negated_ = take(expression, "^");
    while (!take(expression, "]")) set.add_one(expression);
  } else {
    set.add_one(expression);
  }
  for (char32_t code = 0; code < set.ascii_.size(); ++code) set.ascii_[code] = set.contains(code) != set.negated_;
  return set;
}

bool CharSet::contains(char32_t code) const {
  if ((categories_ >> utf8proc_category(static_cast<utf8proc_int32_t>(code)) & 1U) != 0) return true;
  if (spaces_ && class_of(code) == CharClass::space) return true;
  return std::ranges::any_of(ranges_, [=](const auto& range) { return code >= range.first && code <= range.second; });
}

Expression::Item Expression::taken_from(std::string_view& expression) {
  Item item{};
  if (take(expression, kNoWordBehind)) return {.kind = Kind::no_word_behind, .set = {}};
  if (take(expression, kContraction))
    item.kind = Kind::contraction;
  else
    item.set = CharSet::taken_from(expression);
  if (take(expression, "?")) {
    item.least = 0;
  } else if (take(expression, "*")) {
    item.least = 0;
    item.most = UINT32_MAX;
  } else if (take(expression, "+")) {
    item.most = UINT32_MAX;
  } else if (take(expression, "{1,3}")) {
    item.most = 3;
  }
  return item;
}

Expression::Expression(std::string_view expression) : ends_text_(expression.ends_with('$')) {
  if (ends_text_) expression.remove_suffix(1);
  do {
    alternatives_.emplace_back();
    while (!expression.empty() && !expression.starts_with('|')) alternatives_.back().push_back(taken_from(expression));
  } while (take(expression, "|"));
}

std::size_t Expression::end_of_match(std::string_view text, std::size_t begin) const {
  for (const auto& items : alternatives_)
    if (const std::size_t end = match(items, text, begin); end != kNone) return end;
  return begin;
}

std::size_t Expression::match(std::span<const Item> items, std::string_view text, std::size_t at) {
  if (items.empty()) return at;
  const Item& item = items.front();
  const auto rest = items.subspan(1);
  if (item.kind == Kind::no_word_behind) {
    const bool word = at < text.size() && class_of(character_at(text, at).code) != CharClass::space;
    return word ? kNone : match(rest, text, at);
  }
  std::uint32_t count = 0;
  std::size_t end = at;
  if (item.kind == Kind::contraction) {
    end = end_of_contraction(text, at);
    count = end != at ? 1 : 0;
  } else {
    for (; count < item.most && end < text.size(); ++count) {
      const Character c = character_at(text, end);
      if (!item.set.has(c.code)) break;
      end += c.bytes;
    }
  }
  for (;; --count) {
    if (count < item.least) return kNone;
    if (const std::size_t found = match(rest, text, end); found != kNone) return found;
    if (count == 0) return kNone;
    end = item.kind == Kind::contraction ? at : character_before(text, end);
  }
}

std::size_t Expression::earliest(std::string_view text) const {
  if (!ends_text_) return 0;
  const CharSet& set = alternatives_.front().front().set;
  std::size_t at = text.size();
  while (at > 0 && set.has(character_at(text, character_before(text, at)).code)) at = character_before(text, at);
  return at;
}

}  // namespace kvkeep::lm::detail
