// SPDX-License-Identifier: Apache-2.0
#include "jinja_lexer.h"

#include <algorithm>
#include <utility>

#include "jinja_value.h"
#include "utf8.h"

namespace kvkeep::lm::jinja {
namespace {

constexpr std::size_t kLongestTemplate = std::size_t{1} << 20U;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  std::vector<Token> tokens() && {
    while (at_ < source_.size()) {
      std::size_t tag = at_;
      do {
        tag = source_.find('{', tag);
      } while (tag != std::string::npos && std::string_view("{%#").find(peek(tag + 1)) == std::string_view::npos &&
               ++tag);
      push_data(tag);
      if (tag == std::string::npos) break;
      read_tag(tag);
    }
    push(Token::Kind::last, {});
    return std::move(tokens_);
  }

 private:
  [[nodiscard]] char peek(std::size_t at) const { return at < source_.size() ? source_[at] : '\0'; }

  void push(Token::Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }

  void advance_to(std::size_t at) {
    at = std::min(at, source_.size());
    line_ += static_cast<std::uint32_t>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                                   source_.begin() + static_cast<std::ptrdiff_t>(at), '\n'));
    at_ = at;
  }

  void skip_blanks() {
    const std::string_view rest = std::string_view(source_).substr(at_);
    std::size_t blanks = 0;
    while (blanks < rest.size()) {
      const std::string_view one = rest.substr(blanks, detail::first_step(rest.substr(blanks)).bytes);
      if (!is_blank(one)) break;
      blanks += one.size();
    }
    advance_to(at_ + blanks);
  }

  // The text up to a tag, without the blanks that the tag cuts.
  void push_data(std::size_t tag) {
    std::string_view data = std::string_view(source_).substr(at_, tag == std::string::npos ? tag : tag - at_);
    if (tag != std::string::npos && peek(tag + 2) == '-') {
      data = stripped(data, false, true);
    } else if (tag != std::string::npos && peek(tag + 2) != '+' && peek(tag + 1) != '{') {
      const std::size_t begin = data.rfind('\n') + 1;
      if ((begin > 0 || line_begins_) && stripped(data.substr(begin)).empty()) data = data.substr(0, begin);
    }
    if (!data.empty()) push(Token::Kind::data, std::string(data));
    advance_to(tag);
  }

  // Past the end of a tag, which may cut blanks after it.
  void end_tag(std::size_t end, bool trims_line) {
    const bool cuts = peek(end) == '-';
    const std::size_t next = end + (cuts || peek(end) == '+' ? 3 : 2);
    advance_to(next);
    if (cuts)
      skip_blanks();
    else if (trims_line && peek(end) != '+' && peek(next) == '\n')
      advance_to(next + 1);
    line_begins_ = source_[at_ - 1] == '\n';
  }

  void read_tag(std::size_t tag) {
    const char kind = source_[tag + 1];
    const std::size_t inside = tag + (peek(tag + 2) == '-' || peek(tag + 2) == '+' ? 3 : 2);
    if (kind == '#') {
      std::size_t end = source_.find("#}", inside);
      if (end == std::string::npos) refuse_template(line_, "a comment does not end");
      if (end > inside && (source_[end - 1] == '-' || source_[end - 1] == '+')) --end;
      return end_tag(end, true);
    }
    const bool output = kind == '{';
    push(output ? Token::Kind::output_begin : Token::Kind::begin, {});
    advance_to(inside);
    std::string open;  // brackets
    while (true) {
      skip_blanks();
      if (at_ >= source_.size()) refuse_template(line_, "a tag does not end");
      const std::size_t sign = peek(at_) == '-' || (!output && peek(at_) == '+') ? 1 : 0;
      if (open.empty() && source_.compare(at_ + sign, 2, output ? "}}" : "%}") == 0) {
        push(output ? Token::Kind::output_end : Token::Kind::end, {});
        return end_tag(at_, !output);
      }
      read_token(open);
    }
  }

  void read_token(std::string& open) {
    const char c = source_[at_];
    if (c == '\'' || c == '"') return read_string(c);
    if (is_letter(c) || is_digit(c)) {
      std::size_t end = at_;
      while (is_letter(peek(end)) || is_digit(peek(end))) ++end;
      std::string word = source_.substr(at_, end - at_);
      const bool decimal =
          std::ranges::all_of(word, is_digit) && word.size() < 19 && (word[0] != '0' || word.size() == 1);
      if (is_digit(c) && (!decimal || (peek(end) == '.' && is_digit(peek(end + 1)))))
        refuse_template(line_, "the number '", shortened(word), "' is not a decimal integer");
      if (word == "raw" && tokens_.back().kind == Token::Kind::begin)
        refuse_template(line_, "the tag {% raw %} is not known here");
      push(is_digit(c) ? Token::Kind::integer : Token::Kind::name, std::move(word));
      return advance_to(end);
    }
    for (const std::string_view operation : {"==", "!=", "<=", ">=", "//", "**"})
      if (source_.compare(at_, 2, operation) == 0) {
        push(Token::Kind::operation, std::string(operation));
        return advance_to(at_ + 2);
      }
    if (std::string_view("+-*/%~()[]{}<>=.:|,").find(c) == std::string_view::npos)
      refuse_template(line_, "'",
                      shortened(source_.substr(at_, detail::first_step(std::string_view(source_).substr(at_)).bytes)),
                      "' is not expected");
    if (const std::size_t bracket = std::string_view("([{").find(c); bracket != std::string_view::npos)
      open.push_back(")]}"[bracket]);
    if (std::string_view(")]}").find(c) != std::string_view::npos) {
      if (open.empty() || open.back() != c) refuse_template(line_, "'", c, "' is not expected");
      open.pop_back();
    }
    push(Token::Kind::operation, std::string(1, c));
    advance_to(at_ + 1);
  }

  void read_string(char quote) {
    std::string text;
    std::size_t at = at_ + 1;
    for (; peek(at) != quote; ++at) {
      if (at >= source_.size()) refuse_template(line_, "a string does not end");
      if (source_[at] == '\\')
        at = read_escape(at + 1, text);
      else
        text += source_[at];
    }
    push(Token::Kind::string, std::move(text));
    advance_to(at + 1);
  }

  // What stands after a backslash, as Python reads it; returns its last byte.
  std::size_t read_escape(std::size_t at, std::string& text) const {
    constexpr std::string_view kNamed = "abfnrtv\\'\"", kMeant = "\a\b\f\n\r\t\v\\'\"";
    const char c = peek(at);
    if (const std::size_t named = kNamed.find(c); named != std::string_view::npos) {
      text += kMeant[named];
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const std::size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      std::uint32_t code = 0;
      for (std::size_t i = 1; i <= digits; ++i) {
        const char digit = peek(at + i);
        const bool letter = (digit >= 'a' && digit <= 'f') || (digit >= 'A' && digit <= 'F');
        if (!letter && !is_digit(digit)) refuse_template(line_, "an escape lacks digits");
        code = code * 16 + static_cast<std::uint32_t>(letter ? (digit | 0x20) - 'a' + 10 : digit - '0');
      }
      if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) refuse_template(line_, "an escape is no character");
      detail::append_utf8(text, static_cast<char32_t>(code));
      return at + digits;
    } else if (is_digit(c) || c == 'N' || static_cast<unsigned char>(c) >= 0x80 || at >= source_.size()) {
      refuse_template(line_, "the escape '\\", c, "' is not read");
    } else if (c != '\n') {
      (text += '\\') += c;
    }
    return at;
  }

  std::string source_;
  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  std::uint32_t line_ = 1;
  bool line_begins_ = true;
};

// jinja2 reads every line break as \n and drops one at the end.
std::string with_line_breaks(std::string_view jinja) {
  std::string source;
  for (std::size_t at = 0; at < jinja.size(); ++at) {
    source += jinja[at] == '\r' ? '\n' : jinja[at];
    if (jinja.substr(at, 2) == "\r\n") ++at;
  }
  if (source.ends_with('\n')) source.pop_back();
  return source;
}

}  // namespace

std::vector<Token> tokens_of(std::string_view jinja) {
  if (jinja.size() > kLongestTemplate) refuse_template(1, "it has ", jinja.size(), " bytes, more than 1 MiB");
  return Lexer(with_line_breaks(jinja)).tokens();
}

}  // namespace kvkeep::lm::jinja
