// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Errors and their sentences. Every message reads "operation: what is wrong; given X; allowed Y" and is thrown before
/// anything is written.

#if !defined(__cpp_exceptions) && !defined(__CUDA_ARCH__)
#error "kvkeep: errors are C++ exceptions, which -fno-exceptions turns off; allowed sources that are compiled with them"
#endif

#include <algorithm>
#include <array>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvkeep/core/hd.h"

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

/// Letters to insert, remove or replace, or neighbours to swap, to make one name of the other; capitals are as good as
/// small letters. Only the first 64 bytes count. Cost: the product of their lengths.
[[nodiscard]] inline std::size_t edit_distance(std::string_view one, std::string_view other) {
  constexpr std::size_t kLongest = 64;
  one = one.substr(0, kLongest);
  other = other.substr(0, kLongest);
  const auto same = [](char a, char b) {
    const auto small = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
    return small(a) == small(b);
  };
  std::array<std::array<std::size_t, kLongest + 1>, 3> rows{};  // of the last three letters of `one`
  for (std::size_t j = 0; j <= other.size(); ++j) rows[0][j] = j;
  for (std::size_t i = 1; i <= one.size(); ++i) {
    auto &row = rows[i % 3], &above = rows[(i + 2) % 3], &before = rows[(i + 1) % 3];
    row[0] = i;
    for (std::size_t j = 1; j <= other.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (same(one[i - 1], other[j - 1]) ? 0 : 1)});
      if (i > 1 && j > 1 && same(one[i - 1], other[j - 2]) && same(one[i - 2], other[j - 1]))
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return rows[one.size() % 3][other.size()];
}

/// "budget, ratio, bytes": what `name` is of each of `known`.
template <class Known, class Name = std::identity>
[[nodiscard]] std::string joined(const Known& known, Name name = {}) {
  std::string all;
  for (const auto& one : known) (all += all.empty() ? "" : ", ") += std::invoke(name, one);
  return all;
}

/// The name of one of `known` that is nearest to `given`, as in ` (did you mean "budget"?)`; empty if more than a third
/// of its letters differ. "memory.rest" is also called "rest".
template <class Known, class Name = std::identity>
[[nodiscard]] std::string did_you_mean(std::string_view given, const Known& known, Name name_of = {}) {
  std::size_t least = std::max<std::size_t>(1, given.size() / 3) + 1;
  std::string_view nearest;
  for (const auto& one : known) {
    const std::string_view name = std::invoke(name_of, one),
                           last = name.substr(name.rfind('.') + 1);  // all of it without a dot
    const std::size_t distance = std::min(edit_distance(given, name), edit_distance(given, last));
    if (distance < std::exchange(least, std::min(least, distance))) nearest = name;
  }
  return nearest.empty() ? "" : text(" (did you mean \"", nearest, "\"?)");
}

/// What kind of error, as a number; C's statuses (kvkeep/c.h) are the same.
enum class ErrorCode : std::int32_t {
  invalid_argument = 1,
  state = 2,
  unsupported = 3,
  device = 4,
  other = 6,  ///< a full disk, a closed pipe
  rank = 7,
};

/// Base of everything kvkeep throws.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what) : Error(ErrorCode::other, what) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 protected:
  Error(ErrorCode code, const std::string& what) : std::runtime_error(what), code_(code) {}

 private:
  ErrorCode code_;
};

/// What an exception says of itself, if it says anything.
[[nodiscard]] inline const char* said_by(const std::exception& error) noexcept {
  const char* const said = error.what();
  return said != nullptr && *said != '\0' ? said : "an exception that says nothing, perhaps of a plug-in";
}

/// The caller passed something that is not allowed: an option, a shape, a dtype, a file.
class InvalidArgument : public Error {
 public:
  explicit InvalidArgument(const std::string& what) : Error(ErrorCode::invalid_argument, what) {}
};

/// A call that does not fit what happened before: an unknown sequence, a step out of order.
class StateError : public Error {
 public:
  explicit StateError(const std::string& what) : Error(ErrorCode::state, what) {}
};

/// A valid request that this build has no kernel for.
class Unsupported : public Error {
 public:
  explicit Unsupported(const std::string& what) : Error(ErrorCode::unsupported, what) {}
};

/// The device failed.
class DeviceError : public Error {
 public:
  explicit DeviceError(const std::string& what) : Error(ErrorCode::device, what) {}
};

/// Ranks that decide together could not: one of them failed, died or did not answer in time.
class RankError : public Error {
 public:
  explicit RankError(const std::string& what) : Error(ErrorCode::rank, what) {}
};

/// Throws `E` with the joined parts, escaped: a sentence is one line, whatever a file or a command line put into it.
template <class E = InvalidArgument, class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Parts&... parts) {
  throw E(escaped(text(parts...)));
}

}  // namespace kvkeep

/// KVKEEP_REQUIRE_AS(E, ok, parts...): throws `E` with the joined parts unless `ok`. A macro, so that the parts are
/// evaluated only when it throws: checks are on the path of every step.
#define KVKEEP_REQUIRE_AS(E, ok, ...)   \
  do {                                  \
    if (!(ok)) [[unlikely]]             \
      ::kvkeep::refuse<E>(__VA_ARGS__); \
  } while (false)

/// The same for arguments of the caller: throws InvalidArgument.
#define KVKEEP_REQUIRE(ok, ...) KVKEEP_REQUIRE_AS(::kvkeep::InvalidArgument, ok, __VA_ARGS__)

namespace kvkeep {

/// Throws InvalidArgument "operation: one; two; three" unless `problems` is empty.
inline void require_no_problems(std::string_view operation, const std::vector<std::string>& problems) {
  std::string all;
  for (const std::string& one : problems) all += (all.empty() ? "" : "; ") + one;
  KVKEEP_REQUIRE(all.empty(), operation, ": ", all);
}

}  // namespace kvkeep
