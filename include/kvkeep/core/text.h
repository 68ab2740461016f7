#pragma once
/// The one place where numbers become text: the same characters under every locale, because files contain them too.

#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <locale>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace kvkeep {
namespace detail {

template <class T>
concept Number = std::is_arithmetic_v<T> && !std::same_as<T, bool> && !std::same_as<T, char> &&
                 !std::same_as<T, signed char> && !std::same_as<T, unsigned char>;

/// Appends one part: text unchanged, integers in decimal, floating point with six digits as %g does, anything else by
/// its operator<<.
template <class T>
void append(std::string& out, const T& part) {
  if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    out += std::string_view(part);
  } else if constexpr (std::same_as<T, char>) {
    out += part;
  } else if constexpr (Number<T>) {
    char digits[48];
    if constexpr (std::is_integral_v<T>)
      out.append(digits, std::to_chars(digits, digits + sizeof digits, part).ptr);
    else
      out.append(digits, std::to_chars(digits, digits + sizeof digits, part, std::chars_format::general, 6).ptr);
  } else {
    std::ostringstream stream;
    stream.imbue(std::locale::classic());
    stream << part;
    out += std::move(stream).str();
  }
}

}  // namespace detail

/// Joins its arguments.
template <class... Parts>
[[nodiscard]] std::string text(const Parts&... parts) {
  std::string out;
  (detail::append(out, parts), ...);
  return out;
}

namespace detail {

enum class Utf8State : std::uint8_t {
  good,  ///< a character
  bad,   ///< the longest beginning of one that cannot continue
  cut,   ///< the text ends within one
};

struct Utf8Step {
  Utf8State state;
  std::uint32_t bytes;  ///< 1 to 4
};

/// The first step of a text that is not empty.
[[nodiscard]] inline Utf8Step first_step(std::string_view text) {
  const auto byte = [&](std::size_t i) -> unsigned { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return {Utf8State::good, 1};
  const std::uint32_t length = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (length == 0) return {Utf8State::bad, 1};
  // The second byte has a range of its own if characters could be written shorter, be surrogates, or be beyond
  // U+10FFFF.
  unsigned low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  unsigned high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  for (std::uint32_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8State::cut, i};
    if (byte(i) < low || byte(i) > high) return {Utf8State::bad, i};
    low = 0x80;
    high = 0xbf;
  }
  return {Utf8State::good, length};
}

}  // namespace detail

/// For people and their terminals: control characters (C0, DEL, C1) and bytes that are no UTF-8 as `\n`, `\x1b` or
/// `\u009b`, but those of `kept`, which are in ASCII. Twice is the same as once. Cost: one pass.
[[nodiscard]] inline std::string escaped(std::string_view text, std::string_view kept = {}) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const detail::Utf8Step step = detail::first_step(text);
    const bool whole = step.state == detail::Utf8State::good;
    const std::size_t bytes = whole ? step.bytes : 1;
    const auto last = static_cast<unsigned char>(text[bytes == 2 ? 1 : 0]);
    const bool control = !whole       ? true
                         : bytes == 1 ? (last < 0x20 || last == 0x7F) && kept.find(text[0]) == std::string_view::npos
                                      : bytes == 2 && static_cast<unsigned char>(text[0]) == 0xC2 && last < 0xA0;
    if (!control)
      out += text.substr(0, bytes);
    else if (bytes == 1 && (last == '\n' || last == '\r' || last == '\t'))
      out += last == '\n' ? "\\n" : last == '\r' ? "\\r" : "\\t";
    else
      ((out += bytes == 2 ? "\\u00" : "\\x") += kDigits[last >> 4U]) += kDigits[last & 15U];
    text.remove_prefix(bytes);
  }
  return out;
}

/// For messages: the first 80 bytes, escaped.
[[nodiscard]] inline std::string shortened(std::string_view given) {
  constexpr std::size_t kLongest = 80;
  const std::string text = escaped(given.substr(0, 2 * kLongest));
  if (text.size() <= kLongest) return text;
  std::size_t end = kLongest;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U)
    --end;  // not in the middle of a character
  return text.substr(0, end) + "...";
}

}  // namespace kvkeep
