#pragma once
/// The one place where numbers become text: the same characters under every locale, because files contain them too.

#include <charconv>
#include <concepts>
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

/// For messages: the first 80 bytes.
[[nodiscard]] inline std::string shortened(std::string_view text) {
  constexpr std::size_t kLongest = 80;
  if (text.size() <= kLongest) return std::string(text);
  std::size_t end = kLongest;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U)
    --end;  // not in the middle of a character
  return std::string(text.substr(0, end)) + "...";
}

}  // namespace kvkeep
