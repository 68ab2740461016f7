// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The options of a policy, as a program, its text or JSON gives them and as KVPolicy::to_json() writes them.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>
#include "kvkeep/core/error.h"

namespace kvkeep {

/// One value, or an object of values in the order in which they were added. By default nothing.
class OptionValue {
 public:
  using Object = std::vector<std::pair<std::string, OptionValue>>;
  /// JSON that no option takes, such as an array; and JSON that is written as it is.
  struct Json {
    std::string text;
  };

  OptionValue() = default;
  OptionValue(bool value) : value_(value) {}
  template <std::integral T>
  OptionValue(T value) : value_(static_cast<std::int64_t>(value)) {}
  OptionValue(double value) : value_(value) {}
  OptionValue(std::string value) : value_(std::move(value)) {}
  OptionValue(const char* value) : value_(std::string(value)) {}
  OptionValue(Json json) : value_(std::move(json)) {}
  [[nodiscard]] static OptionValue object() {
    OptionValue made;
    made.value_ = Object();
    return made;
  }
  /// The value of "key=value": a number or a boolean if it reads as one, else a string.
  [[nodiscard]] static OptionValue of_text(std::string_view text);

  [[nodiscard]] bool is_nothing() const { return std::holds_alternative<std::monostate>(value_); }
  [[nodiscard]] bool is_object() const { return std::holds_alternative<Object>(value_); }
  /// Null if it is of another type.
  template <class T>
  [[nodiscard]] const T* get() const {
    return std::get_if<T>(&value_);
  }
  [[nodiscard]] bool is(std::string_view word) const {
    const auto* const own = get<std::string>();
    return own != nullptr && *own == word;
  }
  /// A number of either kind; false if it is none.
  [[nodiscard]] bool number(double& to) const;

  /// Members of an object; none of another value.
  [[nodiscard]] const Object& members() const;
  /// Null if there is none of this name.
  [[nodiscard]] const OptionValue* find(std::string_view name) const;
  [[nodiscard]] bool contains(std::string_view name) const { return find(name) != nullptr; }
  /// Made if it is not there. Of nothing it makes an object.
  OptionValue& operator[](std::string_view name);
  void erase(std::string_view name);
  /// Adds an option by its full name, such as "allocator.window". Throws InvalidArgument if it is there already, and if
  /// its sub-object was given as a value.
  void give(const std::string& name, OptionValue value);

  /// As JSON on one line. Strings may be file names, which need not be UTF-8: U+FFFD stands for what is not. No
  /// terminal acts upon it. Numbers have the fewest digits that read back as they are.
  [[nodiscard]] std::string json() const;
  /// The same for messages: its first 80 bytes.
  [[nodiscard]] std::string shown() const;

 private:
  void write(std::string& out) const;

  std::variant<std::monostate, bool, std::int64_t, double, std::string, Object, Json> value_;
};

namespace option_value_detail {

inline void write_number(std::string& out, double value) {
  if (!std::isfinite(value)) {
    out += "null";
    return;
  }
  const double size = std::abs(value);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e15);
  char digits[48];
  const std::string_view written(
      digits, static_cast<std::size_t>(std::to_chars(digits, digits + sizeof digits, value,
                                                     plain ? std::chars_format::fixed : std::chars_format::scientific)
                                           .ptr -
                                       digits));
  out += written;
  if (plain && written.find('.') == std::string_view::npos) out += ".0";
}

inline void write_string(std::string& out, std::string_view text) {
  constexpr const char* kDigits = "0123456789abcdef";
  out += '"';
  while (!text.empty()) {
    const detail::Utf8Step step = detail::first_step(text);
    const auto last = static_cast<unsigned char>(text[step.bytes - 1]);
    const bool control = step.bytes == 1 ? last < 0x20 || last == 0x7F : text[0] == '\xC2' && last < 0xA0;
    if (step.state != detail::Utf8State::good)
      out += "\xEF\xBF\xBD";
    else if (last == '"' || last == '\\')
      (out += '\\') += text[0];
    else if (constexpr std::string_view kNamed = "\b\f\n\r\t"; kNamed.find(text[0]) != std::string_view::npos)
      (out += '\\') += "bfnrt"[kNamed.find(text[0])];
    else if (control)
      ((out += "\\u00") += kDigits[last >> 4U]) += kDigits[last & 15U];
    else
      out += text.substr(0, step.bytes);
    text.remove_prefix(step.bytes);
  }
  out += '"';
}

template <class T>
bool reads(std::string_view text, T& to) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), to);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace option_value_detail

inline OptionValue OptionValue::of_text(std::string_view text) {
  constexpr const char* kSpaces = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kSpaces);
  const std::string_view word =
      first == std::string_view::npos ? "" : text.substr(first, text.find_last_not_of(kSpaces) + 1 - first);
  if (word == "true" || word == "false") return word == "true";
  const std::string_view digits = word.substr(word.starts_with('-') ? 1 : 0);
  if (digits.empty() || digits[0] < '0' || digits[0] > '9') return std::string(text);  // among others inf and nan
  if (std::int64_t whole = 0; option_value_detail::reads(word, whole)) return whole;
  if (double real = 0; option_value_detail::reads(word, real)) return real;
  return std::string(text);
}

inline bool OptionValue::number(double& to) const {
  if (const auto* const whole = get<std::int64_t>())
    to = static_cast<double>(*whole);
  else if (const auto* const real = get<double>())
    to = *real;
  else
    return false;
  return true;
}

inline const OptionValue::Object& OptionValue::members() const {
  static const Object none;
  const auto* const own = get<Object>();
  return own == nullptr ? none : *own;
}

inline const OptionValue* OptionValue::find(std::string_view name) const {
  const auto found = std::ranges::find(members(), name, &Object::value_type::first);
  return found == members().end() ? nullptr : &found->second;
}

inline OptionValue& OptionValue::operator[](std::string_view name) {
  if (is_nothing()) value_ = Object();
  auto& own = std::get<Object>(value_);
  const auto found = std::ranges::find(own, name, &Object::value_type::first);
  return found == own.end() ? own.emplace_back(name, OptionValue()).second : found->second;
}

inline void OptionValue::erase(std::string_view name) {
  std::erase_if(std::get<Object>(value_), [name](const auto& member) { return member.first == name; });
}

inline void OptionValue::give(const std::string& name, OptionValue value) {
  const std::size_t dot = name.find('.');
  OptionValue& scope = dot == std::string::npos ? *this : (*this)[name.substr(0, dot)];
  KVKEEP_REQUIRE(scope.is_nothing() || scope.is_object(), "policy: ", shortened(name.substr(0, dot)),
                 " is given as a value, and ", shortened(name), " as an option in it; allowed one of them");
  OptionValue& slot = scope[dot == std::string::npos ? name : name.substr(dot + 1)];
  KVKEEP_REQUIRE(slot.is_nothing(), "policy: ", shortened(name), " is given twice; allowed once");
  slot = std::move(value);
}

inline void OptionValue::write(std::string& out) const {
  if (const auto* const json = get<Json>()) {
    out += json->text;
  } else if (const auto* const flag = get<bool>()) {
    out += *flag ? "true" : "false";
  } else if (const auto* const whole = get<std::int64_t>()) {
    out += text(*whole);
  } else if (const auto* const real = get<double>()) {
    option_value_detail::write_number(out, *real);
  } else if (const auto* const words = get<std::string>()) {
    option_value_detail::write_string(out, *words);
  } else if (is_object()) {
    const char* before = "{";
    for (const auto& [name, value] : members()) {
      out += before;
      option_value_detail::write_string(out, name);
      out += ':';
      value.write(out);
      before = ",";
    }
    out += members().empty() ? "{}" : "}";
  } else {
    out += "null";
  }
}

inline std::string OptionValue::json() const {
  std::string out;
  write(out);
  return out;
}

inline std::string OptionValue::shown() const { return shortened(json()); }

}  // namespace kvkeep
