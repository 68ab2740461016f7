// SPDX-License-Identifier: Apache-2.0
#include "jinja_builtins.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace kvkeep::lm::jinja {
namespace {

using Given = std::span<const Value>;

const Value kNotGiven;

const Value& argument(Given given, std::size_t at) { return at < given.size() ? given[at] : kNotGiven; }

bool is_given(Given given, std::size_t at) { return !argument(given, at).is(Kind::undefined); }

std::optional<std::string_view> text_if_given(Given given, std::size_t at, const Work& work) {
  const Value& value = argument(given, at);
  if (value.is(Kind::undefined) || value.is(Kind::none)) return std::nullopt;
  return text_of(value, work);
}

std::int64_t count_if_given(Given given, std::size_t at, const Work& work) {
  const Value& value = argument(given, at);
  return value.is(Kind::undefined) || value.is(Kind::none) ? -1 : integer_of(value, work);
}

Value in_case(std::string_view text, bool upper, Work& work) {
  std::string changed(text);
  for (char& c : changed) {
    if (static_cast<unsigned char>(c) >= 0x80)
      work.refuse<Unsupported>("a letter beyond ASCII is turned into upper or lower case");
    if (upper ? c >= 'a' && c <= 'z' : c >= 'A' && c <= 'Z') c = static_cast<char>(c ^ 0x20);
  }
  return made(std::move(changed), work);
}

template <bool left, bool right>
Value strip(const Value& value, Given given, Work& work) {
  const std::string_view text = text_of(value, work);
  work.spend(text.size());
  return made(std::string(stripped(text, left, right, text_if_given(given, 0, work))), work);
}

template <bool upper>
Value change_case(const Value& value, Given, Work& work) {
  return in_case(text_of(value, work), upper, work);
}

template <bool at_end>
Value touches(const Value& value, Given given, Work& work) {
  const std::string_view text = text_of(value, work);
  if (given.empty()) work.refuse("startswith and endswith need an argument");
  const auto one = [&](const Value& wanted) {
    const std::string_view part = text_of(wanted, work);
    work.spend(part.size());
    return at_end ? text.ends_with(part) : text.starts_with(part);
  };
  return Value::of(given[0].is(Kind::tuple) ? std::ranges::any_of(given[0].held->values, one) : one(given[0]));
}

Value split(const Value& value, Given given, Work& work) {
  std::string_view rest = text_of(value, work);
  const std::optional<std::string_view> by = text_if_given(given, 0, work);
  std::int64_t most = count_if_given(given, 1, work);
  std::vector<Value> parts;
  const auto push = [&](std::string_view part) { parts.push_back(made(std::string(part), work)); };
  if (by) {
    if (by->empty()) work.refuse("split() is given an empty separator");
    for (; most != 0; --most) {
      const std::size_t at = place_of(*by, rest, 0, work);
      if (at == std::string_view::npos) break;
      push(rest.substr(0, at));
      rest.remove_prefix(at + by->size());
    }
    push(rest);
    return made(Kind::list, std::move(parts), work);
  }
  work.spend(rest.size() * sizeof(std::string_view));
  std::size_t at = 0, begin = std::string_view::npos;
  for (const std::string_view one : characters(rest)) {
    const bool inside = begin != std::string_view::npos, blank = is_blank(one);
    if (inside && blank) {
      push(rest.substr(begin, at - begin));
      begin = std::string_view::npos;
      --most;
    } else if (!inside && !blank) {
      begin = at;
      if (most == 0) break;
    }
    at += one.size();
  }
  if (begin != std::string_view::npos) push(rest.substr(begin));
  return made(Kind::list, std::move(parts), work);
}

Value replace(const Value& value, Given given, Work& work) {
  std::string_view rest = text_of(value, work);
  if (given.size() < 2) work.refuse("replace needs two arguments");
  const std::string_view old = text_of(given[0], work), by = text_of(given[1], work);
  if (old.empty()) work.refuse<Unsupported>("replace is given an empty string");
  std::string out;
  for (std::int64_t most = count_if_given(given, 2, work); most != 0; --most) {
    const std::size_t at = place_of(old, rest, 0, work);
    if (at == std::string_view::npos) break;
    work.spend(by.size());
    (out += rest.substr(0, at)) += by;
    rest.remove_prefix(at + old.size());
  }
  return made(out += rest, work);
}

// json.dumps(value, ensure_ascii=, indent=)
void write_json(const Value& value, bool ascii, std::int64_t indent, std::int64_t margin, std::string& out,
                Work& work) {
  const std::size_t before = out.size();
  const auto line_break = [&](std::int64_t blanks) {
    if (indent < 0) return;
    work.spend(static_cast<std::uint64_t>(blanks));
    (out += '\n').append(static_cast<std::size_t>(blanks), ' ');
  };
  if (value.is_string()) {
    out += nlohmann::json(value.text()).dump(-1, ' ', ascii, nlohmann::json::error_handler_t::replace);
  } else if (value.is(Kind::boolean)) {
    out += value.number != 0 ? "true" : "false";
  } else if (value.is(Kind::none)) {
    out += "null";
  } else if (value.is(Kind::integer)) {
    out += text(value.number);
  } else if (value.is(Kind::list) || value.is(Kind::tuple) || value.is(Kind::dict)) {
    const bool dict = value.is(Kind::dict);
    const auto& values = value.held->values;
    out += dict ? '{' : '[';
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i > 0) out += indent < 0 ? ", " : ",";
      line_break(margin + indent);
      if (dict) {
        write_json(Value::of(value.held->names[i]), ascii, -1, 0, out, work);
        out += ": ";
      }
      write_json(values[i], ascii, indent, margin + indent, out, work);
    }
    if (!values.empty()) line_break(margin);
    out += dict ? '}' : ']';
  } else {
    work.refuse(name_of(value.kind), " cannot be written as JSON");
  }
  work.spend(1 + out.size() - before);
}

Value to_json(const Value& value, Given given, Work& work) {
  constexpr std::int64_t kWidest = 64;
  const bool indented = is_given(given, 1) && !given[1].is(Kind::none);
  const std::int64_t indent = indented ? integer_of(given[1], work) : -1;
  if (indented && (indent < 0 || indent > kWidest)) work.refuse<Unsupported>("tojson indents by ", indent, " blanks");
  std::string out;
  write_json(value, argument(given, 0).truth(), indent, 0, out, work);
  return made(std::move(out), work);
}

Value pairs(const Value& value, Kind kind, Work& work) {
  std::vector<Value> all;
  for (std::size_t i = 0; i < value.held->values.size(); ++i)
    all.push_back(made(Kind::tuple, {made(value.held->names[i], work), value.held->values[i]}, work));
  return made(kind, std::move(all), work);
}

const Value& dict_of(const Value& value, const Work& work) {
  if (!value.is(Kind::dict)) work.refuse("a dict is needed; given ", name_of(value.kind));
  return value;
}

Value sorted_by_key(const Value& value, Given, Work& work) {
  Value all = pairs(dict_of(value, work), Kind::list, work);
  std::vector<std::pair<std::string, Value>> keyed;
  for (const Value& pair : all.held->values)
    keyed.emplace_back(in_case(pair.held->values[0].text(), false, work).text(), pair);
  std::ranges::stable_sort(keyed, {}, &std::pair<std::string, Value>::first);
  for (std::size_t i = 0; i < keyed.size(); ++i) all.held->values[i] = keyed[i].second;
  return all;
}

Value join(const Value& value, Given given, Work& work) {
  const std::string between = is_given(given, 0) ? printed(given[0], work) : std::string();
  std::string out;
  bool first = true;
  for (const Value& item : items_of(value, work)) {
    work.spend(between.size());
    if (!std::exchange(first, false)) out += between;
    out += printed(item, work);
  }
  return made(std::move(out), work);
}

Value at_path(const Value& value, std::string_view path, Work& work) {
  Value found = value;
  while (true) {
    const std::size_t dot = std::min(path.find('.'), path.size());
    work.spend(1 + dot);
    found = item_of(found, Value::of(std::string(path.substr(0, dot))), work);
    if (dot == path.size()) return found;
    path.remove_prefix(dot + 1);
  }
}

Value map(const Value& value, Given given, Work& work) {
  if (is_given(given, 0) == is_given(given, 1)) work.refuse("map needs the name of a filter, or attribute=");
  std::vector<Value> all = value.truth() ? items_of(value, work) : std::vector<Value>();
  for (Value& item : all)
    item = is_given(given, 1) ? at_path(item, text_of(given[1], work), work)
                              : find_filter(given[0].text())->apply(item, {}, work);
  return made(Kind::generator, std::move(all), work);
}

// select, reject (by_attribute: selectattr, rejectattr): the items for which a test is `wanted`.
template <bool wanted, bool by_attribute>
Value choose(const Value& value, Given given, Work& work) {
  std::vector<Value> chosen;
  constexpr std::size_t kTest = by_attribute ? 1 : 0;
  if (given.size() < kTest) work.refuse("selectattr and rejectattr need the name of an attribute");
  if (!value.truth()) return made(Kind::generator, {}, work);
  for (const Value& item : items_of(value, work)) {
    const Value seen = by_attribute ? at_path(item, text_of(given[0], work), work) : item;
    const bool holds = given.size() > kTest
                           ? find_test(given[kTest].text())->apply(seen, given.subspan(kTest + 1), work).truth()
                           : seen.truth();
    if (holds == wanted) chosen.push_back(item);
  }
  return made(Kind::generator, std::move(chosen), work);
}

// Published templates name these where they are not called without tools. A call fails in transformers, too.
Value no_change(const Value&, Given, Work& work) { work.refuse("a list is changed"); }
Value no_filter(const Value&, Given, Work& work) { work.refuse("jinja2 has no such filter"); }

const Value& other(Given given, const Work& work) {
  if (given.empty()) work.refuse("a test lacks its argument");
  return given[0];
}

constexpr auto kItems = [](const Value& v, Given, Work& w) {
  return v.is(Kind::undefined) ? made(Kind::generator, {}, w) : pairs(dict_of(v, w), Kind::generator, w);
};
constexpr auto kLength = [](const Value& v, Given, Work& w) { return Value::of(length_of(v, w)); };
constexpr auto kDefault = [](const Value& v, Given g, Work&) {
  const bool missing = v.is(Kind::undefined) || (argument(g, 1).truth() && !v.truth());
  return !missing ? v : g.empty() ? Value::of(std::string()) : g[0];
};
constexpr auto kEqual = [](const Value& v, Given g, Work& w) { return Value::of(equal(v, other(g, w), w)); };

// A filter that takes the value as text, whatever it is.
template <Value (*apply)(const Value&, Given, Work&)>
Value of_text(const Value& value, Given given, Work& work) {
  return apply(value.is_string() && !value.is(Kind::safe) ? value : made(printed(value, work), work), given, work);
}

const std::vector<Builtin> kFilters{
    {"count", {}, kLength},
    {"d", {"default_value", "boolean"}, kDefault},
    {"default", {"default_value", "boolean"}, kDefault},
    {"dictsort", {}, sorted_by_key},
    {"from_json", {}, no_filter},
    {"items", {}, kItems},
    {"join", {"d"}, join},
    {"length", {}, kLength},
    {"list", {}, [](const Value& v, Given, Work& w) { return made(Kind::list, items_of(v, w), w); }},
    {"lower", {}, of_text<change_case<false>>},
    {"map", {"filter", "attribute"}, map},
    {"reject", {"*"}, choose<false, false>},
    {"rejectattr", {"*"}, choose<false, true>},
    {"replace", {"old", "new", "count"}, of_text<replace>},
    {"safe",
     {},
     [](const Value& v, Given, Work& w) {
       Value text = made(printed(v, w), w);
       text.kind = Kind::safe;
       return text;
     }},
    {"select", {"*"}, choose<true, false>},
    {"selectattr", {"*"}, choose<true, true>},
    {"string", {}, [](const Value& v, Given, Work& w) { return v.is_string() ? v : made(printed(v, w), w); }},
    {"tojson", {"ensure_ascii", "indent"}, to_json},
    {"trim", {"chars"}, of_text<strip<true, true>>},
    {"upper", {}, of_text<change_case<true>>},
};

template <auto holds>
Value whether(const Value& value, Given, Work&) {
  return Value::of(holds(value));
}

const std::vector<Builtin> kTests{
    {"boolean", {}, whether<[](const Value& v) { return v.is(Kind::boolean); }>},
    {"defined", {}, whether<[](const Value& v) { return !v.is(Kind::undefined); }>},
    {"eq", {"other"}, kEqual},
    {"equalto", {"other"}, kEqual},
    {"false", {}, whether<[](const Value& v) { return v.is(Kind::boolean) && !v.truth(); }>},
    {"in", {"other"}, [](const Value& v, Given g, Work& w) { return Value::of(contains(other(g, w), v, w)); }},
    {"integer", {}, whether<[](const Value& v) { return v.is(Kind::integer); }>},
    {"iterable", {}, whether<[](const Value& v) { return v.is_iterable() || v.is(Kind::loop); }>},
    {"mapping", {}, whether<[](const Value& v) { return v.is(Kind::dict); }>},
    {"ne", {"other"}, [](const Value& v, Given g, Work& w) { return Value::of(!equal(v, other(g, w), w)); }},
    {"none", {}, whether<[](const Value& v) { return v.is(Kind::none); }>},
    {"number", {}, whether<[](const Value& v) { return v.is_number(); }>},
    {"sequence", {}, whether<[](const Value& v) { return v.is_iterable() && !v.is(Kind::generator); }>},
    {"string", {}, whether<[](const Value& v) { return v.is_string(); }>},
    {"true", {}, whether<[](const Value& v) { return v.is(Kind::boolean) && v.truth(); }>},
    {"undefined", {}, whether<[](const Value& v) { return v.is(Kind::undefined); }>},
};

const std::vector<Builtin> kMethods{
    {"append", {"item"}, no_change},
    {"endswith", {"suffix"}, touches<true>},
    {"get",
     {"key", "default"},
     [](const Value& v, Given g, Work& w) {
       const Value* found = is_given(g, 0) ? dict_of(v, w).find(text_of(g[0], w)) : nullptr;
       return found != nullptr ? *found : g.size() > 1 ? g[1] : Value{.kind = Kind::none};
     }},
    {"items", {}, [](const Value& v, Given, Work& w) { return pairs(dict_of(v, w), Kind::list, w); }},
    {"keys", {}, [](const Value& v, Given, Work& w) { return made(Kind::list, items_of(dict_of(v, w), w), w); }},
    {"lower", {}, change_case<false>},
    {"lstrip", {"chars"}, strip<true, false>},
    {"pop", {"index"}, no_change},
    {"replace", {"old", "new", "count"}, replace},
    {"rstrip", {"chars"}, strip<false, true>},
    {"split", {"sep", "maxsplit"}, split},
    {"startswith", {"prefix"}, touches<false>},
    {"strip", {"chars"}, strip<true, true>},
    {"upper", {}, change_case<true>},
    {"values", {}, [](const Value& v, Given, Work& w) { return made(Kind::list, dict_of(v, w).held->values, w); }},
};

const Builtin* find(const std::vector<Builtin>& all, std::string_view name) {
  const auto at = std::ranges::find(all, name, &Builtin::name);
  return at == all.end() ? nullptr : &*at;
}

}  // namespace

const Builtin* find_filter(std::string_view name) { return find(kFilters, name); }
const Builtin* find_test(std::string_view name) { return find(kTests, name); }
const Builtin* find_method(std::string_view name) { return find(kMethods, name); }

int place_of_name(const Builtin& filter) {
  return filter.name.ends_with("attr")                                                     ? 1
         : filter.name == "map" || filter.parameters == std::vector<std::string_view>{"*"} ? 0
                                                                                           : -1;
}

}  // namespace kvkeep::lm::jinja
