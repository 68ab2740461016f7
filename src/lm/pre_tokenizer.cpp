#include "pre_tokenizer.h"

#include <algorithm>

#include "utf8.h"

namespace kvkeep::lm::detail {
namespace {

enum class Case : std::uint8_t { matters, ignored };

bool is_line_end(char32_t code) { return code == '\r' || code == '\n'; }

/// Reads one text.
class Words {
 public:
  Words(std::string_view text, bool numbers_end_it) : text_(text), numbers_end_it_(numbers_end_it) {}

  struct Seen {
    char32_t code;
    CharClass kind;
    std::size_t next;
    bool end;  ///< of the text that the regular expression is given
  };

  [[nodiscard]] Seen look(std::size_t at) const {
    if (at == text_.size()) return {0, CharClass::other, at, true};
    const Character c = character_at(text_, at);
    const CharClass kind = class_of(c.code);
    return {c.code, kind, at + c.bytes, numbers_end_it_ && kind == CharClass::number};
  }

  [[nodiscard]] std::size_t end_of_run(CharClass kind, std::size_t at) const {
    for (Seen seen = look(at); !seen.end && seen.kind == kind; seen = look(at)) at = seen.next;
    return at;
  }

  /// 's|'t|'re|'ve|'m|'ll|'d at `begin`; `begin` if there is none.
  [[nodiscard]] std::size_t end_of_contraction(std::size_t begin, Case letters) const {
    const auto letter = [&](std::size_t i) -> char {
      if (begin + i >= text_.size()) return 0;
      const char c = text_[begin + i];
      return letters == Case::ignored && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    };
    if (letter(0) != '\'') return begin;
    const char first = letter(1), second = letter(2);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return begin + 2;
    if ((first == 'r' || first == 'v') && second == 'e') return begin + 3;
    if (first == 'l' && second == 'l') return begin + 3;
    // If case is ignored, the long s is an s.
    return letters == Case::ignored && text_.substr(begin + 1, 2) == "\xc5\xbf" ? begin + 3 : begin;
  }

  /// \s+(?!\S)|\s+ at `begin`, which is a blank: without the last blank if something follows.
  [[nodiscard]] std::size_t end_of_blanks(std::size_t begin) const {
    std::size_t last = begin, at = begin;
    Seen seen = look(at);
    for (; !seen.end && seen.kind == CharClass::space; seen = look(at)) {
      last = at;
      at = seen.next;
    }
    return seen.end || last == begin ? at : last;
  }

  /// \s*[\r\n]+ at `begin`; `begin` if there is no line end among the blanks.
  [[nodiscard]] std::size_t end_of_lines(std::size_t begin) const {
    std::size_t end = begin;
    for (Seen seen = look(begin); !seen.end && seen.kind == CharClass::space; seen = look(seen.next))
      if (is_line_end(seen.code)) end = seen.next;
    return end;
  }

  [[nodiscard]] std::size_t end_of_line_ends(std::size_t at) const {
    while (at < text_.size() && is_line_end(static_cast<unsigned char>(text_[at]))) ++at;
    return at;
  }

 private:
  std::string_view text_;
  bool numbers_end_it_;
};

std::size_t gpt2_end(const Words& words, std::size_t begin) {
  const Words::Seen first = words.look(begin);
  if (first.end) return first.next;  // smollm: a number by itself
  if (const std::size_t end = words.end_of_contraction(begin, Case::matters); end != begin) return end;
  const std::size_t body = first.code == ' ' ? first.next : begin;
  const Words::Seen seen = words.look(body);
  return seen.end || seen.kind == CharClass::space ? words.end_of_blanks(begin) : words.end_of_run(seen.kind, body);
}

std::size_t llama3_end(const Words& words, std::size_t begin, int most_digits) {
  if (const std::size_t end = words.end_of_contraction(begin, Case::ignored); end != begin) return end;
  const Words::Seen first = words.look(begin), second = words.look(first.next);
  if (first.kind == CharClass::letter) return words.end_of_run(CharClass::letter, begin);
  if (first.kind == CharClass::number) {
    std::size_t end = first.next;
    for (int digits = 1; digits < most_digits && words.look(end).kind == CharClass::number; ++digits)
      end = words.look(end).next;
    return end;
  }
  if (!is_line_end(first.code) && second.kind == CharClass::letter)
    return words.end_of_run(CharClass::letter, first.next);
  const std::size_t body = first.code == ' ' ? first.next : begin;
  if (const Words::Seen seen = words.look(body); !seen.end && seen.kind == CharClass::other)
    return words.end_of_line_ends(words.end_of_run(CharClass::other, body));
  const std::size_t lines = words.end_of_lines(begin);
  return lines != begin ? lines : words.end_of_blanks(begin);
}

}  // namespace

std::optional<PreTokenizer> pre_tokenizer_called(std::string_view name) {
  if (name == "gpt-2") return PreTokenizer::gpt2;
  if (name == "smollm") return PreTokenizer::smollm;
  if (name == "llama-bpe") return PreTokenizer::llama_bpe;
  if (name == "qwen2") return PreTokenizer::qwen2;
  return std::nullopt;
}

std::size_t word_end(PreTokenizer pre, std::string_view text, std::size_t begin) {
  switch (pre) {
    case PreTokenizer::llama_bpe:
      return llama3_end(Words(text, false), begin, 3);
    case PreTokenizer::qwen2:
      return llama3_end(Words(text, false), begin, 1);
    case PreTokenizer::none:
      return text.size();
    case PreTokenizer::blanks:
      return std::min(text.find(' ', begin + 1), text.size());
    default:
      return gpt2_end(Words(text, pre == PreTokenizer::smollm), begin);
  }
}

}  // namespace kvkeep::lm::detail
