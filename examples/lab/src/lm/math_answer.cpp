// SPDX-License-Identifier: Apache-2.0
#include "math_answer.h"

#include <algorithm>
#include <charconv>
#include <optional>

namespace kvkeep::lm {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

void replace_all(std::string& in, std::string_view what, std::string_view by) {
  std::string out;
  std::size_t at = 0;
  for (std::size_t found = 0; (found = in.find(what, at)) != std::string::npos; at = found + what.size())
    out.append(in, at, found - at).append(by);
  in = std::move(out.append(in, at));
}

/// The end of the digits from `at` on.
std::size_t after_digits(std::string_view text, std::size_t at) {
  while (at < text.size() && is_digit(text[at])) ++at;
  return at;
}

/// The last number: a sign, digits, commas between groups of three, a point.
std::string_view last_number(std::string_view text) {
  std::string_view last;
  for (std::size_t i = 0; i < text.size();) {
    const bool bare_point = text[i] == '.' && i + 1 < text.size() && is_digit(text[i + 1]);
    if (!is_digit(text[i]) && !bare_point) {
      ++i;
      continue;
    }
    std::size_t end = after_digits(text, i);
    while (end < text.size() && text[end] == ',' && after_digits(text, end + 1) == end + 4) end += 4;
    if (end + 1 < text.size() && text[end] == '.' && is_digit(text[end + 1])) end = after_digits(text, end + 1);
    const bool minus = i > 0 && text[i - 1] == '-' && (i == 1 || !(is_digit(text[i - 2]) || text[i - 2] == ')'));
    last = text.substr(i - (minus ? 1 : 0), end - i + (minus ? 1 : 0));
    i = end;
  }
  return last;
}

/// What stands in the braces that open at `open`; nothing if they do not close.
std::optional<std::string_view> braced(std::string_view text, std::size_t open) {
  int depth = 0;
  for (std::size_t i = open; i < text.size(); ++i) {
    depth += text[i] == '{' ? 1 : text[i] == '}' ? -1 : 0;
    if (depth == 0) return text.substr(open + 1, i - open - 1);
  }
  return std::nullopt;
}

/// The last argument of `command`, in braces or after a blank.
std::optional<std::string_view> last_argument(std::string_view text, std::string_view command) {
  const std::size_t at = text.rfind(command);
  if (at == std::string_view::npos) return std::nullopt;
  const std::size_t open = at + command.size();
  if (open < text.size() && text[open] == '{') return braced(text, open);
  if (open >= text.size() || text[open] != ' ') return std::nullopt;
  const std::string_view rest = text.substr(open + 1);
  return rest.substr(0, rest.find_first_of("$\n"));
}

/// \frac12 as \frac{1}{2}, \sqrt3 as \sqrt{3}.
void brace_arguments(std::string& in, std::string_view command, int arguments) {
  std::string out;
  std::size_t at = 0;
  for (std::size_t found = 0; (found = in.find(command, at)) != std::string::npos;) {
    found += command.size();
    out.append(in, at, found - at);
    at = found;
    for (int i = 0; i < arguments && at < in.size() && in[at] != '\\'; ++i) {
      if (in[at] == '{') {
        const std::optional<std::string_view> group = braced(in, at);
        if (!group) break;
        out.append(in, at, group->size() + 2);
        at += group->size() + 2;
      } else if (in[at] == '[') {
        break;
      } else {
        out.append("{").append(1, in[at++]).append("}");
      }
    }
  }
  in = std::move(out.append(in, at));
}

/// A decimal number; commas group its digits.
std::optional<double> decimal(std::string text) {
  std::erase(text, ',');
  if (text.starts_with('+')) text.erase(0, 1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  const bool number = std::ranges::any_of(text, is_digit);  // not inf, not nan
  return error == std::errc() && end == text.data() + text.size() && number ? std::optional(value) : std::nullopt;
}

/// A number or a fraction of two.
std::optional<double> value_of(std::string_view plain) {
  const bool negative = plain.starts_with('-');
  std::string_view rest = plain.substr(negative ? 1 : 0);
  if (rest.starts_with("\\frac{")) {
    const std::optional<std::string_view> above = braced(rest, 5);
    if (!above) return std::nullopt;
    const std::size_t open = 7 + above->size();
    if (open >= rest.size() || rest[open] != '{') return std::nullopt;
    const std::optional<std::string_view> below = braced(rest, open);
    if (!below || open + below->size() + 2 != rest.size()) return std::nullopt;
    const std::optional<double> a = decimal(std::string(*above)), b = decimal(std::string(*below));
    if (!a || !b || *b == 0) return std::nullopt;
    return (negative ? -1 : 1) * (*a / *b);
  }
  return decimal(std::string(plain));
}

}  // namespace

std::string final_answer(std::string_view answer) {
  const std::size_t boxed = answer.rfind("\\boxed"), fboxed = answer.rfind("\\fbox");
  if (const auto found = last_argument(answer, boxed == std::string_view::npos ? "\\fbox" : "\\boxed");
      found && (boxed != std::string_view::npos || fboxed != std::string_view::npos))
    return std::string(*found);
  return std::string(last_number(answer));
}

std::string plain_expression(std::string_view latex) {
  std::string s(latex);
  for (const char* gone : {"\n", "\\!"}) replace_all(s, gone, "");
  replace_all(s, "\\\\", "\\");
  for (const char* gone : {"\\,", "\\;", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "$"})
    replace_all(s, gone, "");
  for (const char* fraction : {"tfrac", "dfrac"}) replace_all(s, fraction, "frac");
  if (const std::size_t unit = s.find("\\text{ "); unit != std::string::npos) s.erase(unit);
  for (const std::string_view wrapper : {"\\text{", "\\mbox{", "\\mathrm{"}) {
    const auto inner = s.starts_with(wrapper) ? braced(s, wrapper.size() - 1) : std::nullopt;
    if (inner && wrapper.size() + inner->size() + 1 == s.size()) s = std::string(*inner);
  }
  for (const char* percent : {"\\%", "%"}) replace_all(s, percent, "");
  replace_all(s, " ", "");
  while (s.ends_with('.')) s.pop_back();
  if (const std::size_t equal = s.find('='); equal <= 2 && equal == s.rfind('=') && equal != std::string::npos)
    s.erase(0, equal + 1);
  if (s.starts_with('.')) s.insert(0, "0");
  replace_all(s, "{.", "{0.");
  brace_arguments(s, "\\sqrt", 1);
  brace_arguments(s, "\\frac", 2);
  if (const std::size_t slash = s.find('/'); slash != std::string::npos && slash == s.rfind('/')) {
    std::string_view above(s.data(), slash), below(s.data() + slash + 1, s.size() - slash - 1);
    const bool negative = above.starts_with('-');
    if (negative) above.remove_prefix(1);
    if (!above.empty() && !below.empty() && std::ranges::all_of(above, is_digit) &&
        std::ranges::all_of(below, is_digit))
      s = (negative ? "-\\frac{" : "\\frac{") + std::string(above) + "}{" + std::string(below) + "}";
  }
  return s;
}

bool same_answer(std::string_view a, std::string_view b) {
  const std::string ours = plain_expression(a), theirs = plain_expression(b);
  const std::optional<double> x = value_of(ours), y = value_of(theirs);
  return x && y ? *x == *y : !ours.empty() && ours == theirs;
}

}  // namespace kvkeep::lm
