// SPDX-License-Identifier: Apache-2.0
#include "jinja_value.h"

#include <algorithm>
#include <iterator>

#include "utf8.h"

namespace kvkeep::lm::jinja {
namespace {

constexpr int kDeepestValue = 64;

// Methods that Python finds before it looks for an item of that name.
constexpr std::string_view kMethodsOfDict = " clear copy fromkeys get items keys pop popitem setdefault update values ";
constexpr std::string_view kMethodsOfList = " append clear copy count extend index insert pop remove reverse sort ";
constexpr std::string_view kMethodsOfString =
    " capitalize casefold center count encode endswith expandtabs find format format_map index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip "
    "maketrans partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title translate upper zfill ";

bool has_method(const Value& value, std::string_view name) {
  const std::string_view methods = value.is(Kind::dict)  ? kMethodsOfDict
                                   : value.is_string()   ? kMethodsOfString
                                   : value.is_sequence() ? kMethodsOfList
                                                         : std::string_view();
  return methods.find(text(" ", name, " ")) != std::string_view::npos;
}

// Python's indices of a slice: the first, and how many.
std::pair<std::int64_t, std::int64_t> slice_indices(std::optional<std::int64_t> begin, std::optional<std::int64_t> end,
                                                    std::int64_t step, std::int64_t size) {
  const std::int64_t lowest = step > 0 ? 0 : -1, highest = step > 0 ? size : size - 1;
  const auto place = [&](std::int64_t at) {
    return at < 0 ? std::max(at < -size ? lowest : at + size, lowest) : std::min(at, highest);
  };
  const std::int64_t first = begin ? place(*begin) : step > 0 ? lowest : highest;
  const std::int64_t last = end ? place(*end) : step > 0 ? highest : lowest;
  const std::int64_t way = step > 0 ? last - first : first - last, stride = step > 0 ? step : -step;
  return {first, way > 0 ? (way - 1) / stride + 1 : 0};
}

}  // namespace

Value Value::of(std::string text) {
  return {.kind = Kind::string, .held = std::make_shared<Held>(Held{.text = std::move(text)})};
}

std::string_view Value::text() const { return held->text; }

bool Value::truth() const {
  if (is_number()) return number != 0;
  if (is_string()) return !held->text.empty();
  if (is(Kind::list) || is(Kind::tuple) || is(Kind::dict)) return !held->values.empty();
  return !is(Kind::undefined) && !is(Kind::none);
}

const Value* Value::find(std::string_view name) const {
  const auto at = std::find(held->names.begin(), held->names.end(), name);
  return at == held->names.end() ? nullptr : &held->values[static_cast<std::size_t>(at - held->names.begin())];
}

int depth_around(const std::vector<Value>& values, const Work& work) {
  int depth = 1;
  for (const Value& value : values) {
    const bool alone = value.is(Kind::space) || value.is(Kind::loop) || value.is(Kind::macro);
    depth = std::max(depth, alone ? kDeepestValue + 1 : value.held ? value.held->depth + 1 : 1);
  }
  if (depth > kDeepestValue) work.refuse<Unsupported>("a value nests too deeply, or a namespace, loop or macro in it");
  return depth;
}

Value made(std::string text, Work& work) {
  work.spend(sizeof(Held) + text.size());
  return Value::of(std::move(text));
}

Value made(Kind sequence, std::vector<Value> values, Work& work) {
  work.spend(sizeof(Held) + values.size() * sizeof(Value));
  const int depth = depth_around(values, work);
  return {.kind = sequence, .held = std::make_shared<Held>(Held{.values = std::move(values), .depth = depth})};
}

Value made_dict(std::vector<std::string> names, std::vector<Value> values, Work& work) {
  for (const std::string& name : names) work.spend(sizeof(name) + name.size());
  Value dict = made(Kind::dict, std::move(values), work);
  dict.held->names = std::move(names);
  return dict;
}

std::string_view name_of(Kind kind) {
  constexpr std::string_view kNames[] = {"an undefined value", "none",   "a boolean", "a number",    "a string",
                                         "a safe string",      "a list", "a tuple",   "a generator", "a dict",
                                         "a namespace",        "a loop", "a macro",   "a function"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string_view text_of(const Value& value, const Work& work) {
  if (!value.is(Kind::string)) work.refuse("a string is needed; given ", name_of(value.kind));
  return value.held->text;
}

std::int64_t integer_of(const Value& value, const Work& work) {
  if (!value.is_number()) work.refuse("a number is needed; given ", name_of(value.kind));
  return value.number;
}

std::string printed(const Value& value, Work& work) {
  switch (value.kind) {
    case Kind::undefined:
      return {};
    case Kind::none:
      return "None";
    case Kind::boolean:
      return value.number != 0 ? "True" : "False";
    case Kind::integer:
      return text(value.number);
    case Kind::string:
    case Kind::safe:
      work.spend(value.held->text.size());
      return value.held->text;
    default:
      work.refuse<Unsupported>(name_of(value.kind), " is written as text; allowed strings, numbers, none");
  }
}

std::vector<Value> items_of(const Value& value, Work& work) {
  if (!value.is_iterable()) work.refuse(name_of(value.kind), " cannot be iterated over");
  std::vector<Value> items;
  if (value.is_sequence()) {
    work.spend(value.held->values.size() * sizeof(Value));
    return value.held->values;
  }
  if (value.is_string()) {
    work.spend(value.held->text.size() * sizeof(std::string_view));
    for (const std::string_view character : characters(value.text()))
      items.push_back(made(std::string(character), work));
  } else if (value.is(Kind::dict)) {
    for (const std::string& name : value.held->names) items.push_back(made(name, work));
  }
  return items;
}

std::int64_t length_of(const Value& value, Work& work) {
  if (value.is(Kind::undefined)) return 0;
  if (value.is_string()) {
    work.spend(value.held->text.size() * sizeof(std::string_view));
    return std::ssize(characters(value.text()));
  }
  if (!value.held || value.is(Kind::generator) || value.is(Kind::space))
    work.refuse(name_of(value.kind), " has no length");
  return std::ssize(value.held->values);
}

bool equal(const Value& a, const Value& b, Work& work) {
  work.spend(1);
  if (a.is_number() && b.is_number()) return a.number == b.number;
  if (a.is_string() && b.is_string()) {
    work.spend(std::min(a.text().size(), b.text().size()));
    return a.text() == b.text();
  }
  if (a.kind != b.kind) return false;
  if (a.is(Kind::list) || a.is(Kind::tuple))
    return std::ranges::equal(a.held->values, b.held->values,
                              [&](const Value& x, const Value& y) { return equal(x, y, work); });
  if (a.is(Kind::dict)) {
    if (a.held->names.size() != b.held->names.size()) return false;
    for (const std::string& name : a.held->names) {
      work.spend(b.held->names.size());
      const Value* other = b.find(name);
      if (other == nullptr || !equal(*a.find(name), *other, work)) return false;
    }
    return true;
  }
  if (a.is(Kind::undefined) || a.is(Kind::none)) return true;
  return a.held == b.held && a.loop == b.loop && a.macro == b.macro;
}

bool contains(const Value& container, const Value& value, Work& work) {
  if (container.is_string()) {
    if (!value.is_string()) work.refuse(name_of(value.kind), " in a string; allowed a string");
    return place_of(value.text(), container.text(), 0, work) != std::string_view::npos;
  }
  if (!container.is_iterable()) work.refuse("'in' ", name_of(container.kind), "; allowed strings, lists and dicts");
  if (container.is(Kind::undefined)) return false;
  if (container.is(Kind::dict)) {
    work.spend(container.held->names.size());
    return value.is_string() && container.find(value.text()) != nullptr;
  }
  return std::ranges::any_of(container.held->values, [&](const Value& one) { return equal(one, value, work); });
}

std::size_t place_of(std::string_view wanted, std::string_view text, std::size_t at, Work& work) {
  constexpr std::size_t kShort = 64;  // a long one may be compared at every place
  const std::size_t found = text.find(wanted, at);
  work.spend((std::min(found, text.size()) - at) * (1 + wanted.size() / kShort));
  return found;
}

Value item_of(const Value& value, const Value& key, Work& work) {
  if (value.is(Kind::undefined))
    work.refuse("an undefined value has no ", key.is_string() ? text("'", key.text(), "'") : "items");
  if (value.is(Kind::dict) || value.is(Kind::space)) {
    work.spend(value.held->names.size());
    const Value* found = key.is_string() ? value.find(key.text()) : nullptr;
    if (found != nullptr) return *found;
  }
  if (key.is_string() && has_method(value, key.text()))
    work.refuse<Unsupported>("the method '", key.text(), "' is not called");
  if (!key.is_number() || !(value.is_string() || value.is(Kind::list) || value.is(Kind::tuple))) return {};
  const std::int64_t size = length_of(value, work), at = key.number < 0 ? key.number + size : key.number;
  if (at < 0 || at >= size) return {};
  if (!value.is_string()) return value.held->values[static_cast<std::size_t>(at)];
  return made(std::string(characters(value.text())[static_cast<std::size_t>(at)]), work);
}

Value attribute_of(const Value& value, const std::string& name, Work& work) {
  if (value.is(Kind::dict) && has_method(value, name))
    work.refuse<Unsupported>("the method '", name, "' is not called");
  return item_of(value, Value::of(name), work);
}

Value slice_of(const Value& value, const Value& begin, const Value& end, const Value& step, Work& work) {
  if (!(value.is(Kind::string) || value.is(Kind::list) || value.is(Kind::tuple)))
    work.refuse("a slice of ", name_of(value.kind), "; allowed strings and lists");
  const auto given = [&](const Value& bound) {
    return bound.is(Kind::none) ? std::nullopt : std::optional(integer_of(bound, work));
  };
  constexpr std::int64_t kFarthest = std::int64_t{1} << 40;
  const std::int64_t stride = std::clamp(given(step).value_or(1), -kFarthest, kFarthest);
  if (stride == 0) work.refuse("the step of a slice is 0");
  const auto [first, count] = slice_indices(given(begin), given(end), stride, length_of(value, work));
  const auto at = [&, first = first](std::int64_t i) { return static_cast<std::size_t>(first + i * stride); };
  if (value.is_string()) {
    const std::vector<std::string_view> all = characters(value.text());
    std::string some;
    for (std::int64_t i = 0; i < count; ++i) some += all[at(i)];
    return made(std::move(some), work);
  }
  std::vector<Value> some;
  for (std::int64_t i = 0; i < count; ++i) some.push_back(value.held->values[at(i)]);
  return made(value.kind, std::move(some), work);
}

bool is_blank(std::string_view character) {
  if (detail::first_step(character).state != detail::Utf8State::good) return false;
  const char32_t code = detail::character_at(character, 0).code;
  return detail::class_of(code) == detail::CharClass::space || (code >= 0x1c && code <= 0x1f);
}

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> all;
  for (; !text.empty(); text.remove_prefix(all.back().size()))
    all.push_back(text.substr(0, detail::first_step(text).bytes));
  return all;
}

std::string_view stripped(std::string_view text, bool left, bool right, std::optional<std::string_view> chars) {
  std::size_t begin = text.size(), end = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view one = text.substr(at, detail::first_step(text.substr(at)).bytes);
    const bool stays = chars ? chars->find(one) == std::string_view::npos : !is_blank(one);
    if (stays) begin = std::min(begin, at);
    at += one.size();
    if (stays) end = at;
  }
  if (!left) begin = 0;
  if (!right) end = text.size();
  return begin < end ? text.substr(begin, end - begin) : std::string_view();
}

}  // namespace kvkeep::lm::jinja
