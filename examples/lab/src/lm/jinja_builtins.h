// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Filters, tests and methods of chat templates.

#include <span>
#include <string_view>
#include <vector>

#include "jinja_value.h"

namespace kvkeep::lm::jinja {

/// A filter, a test or a method: `apply(value, arguments, work)`. An argument that is not given is undefined, or is
/// left out at the end.
struct Builtin {
  std::string_view name;
  std::vector<std::string_view> parameters;  ///< "*" at the end: any number more, without names
  Value (*apply)(const Value& value, std::span<const Value> given, Work& work);
};

/// Null: not known.
[[nodiscard]] const Builtin* find_filter(std::string_view name);
[[nodiscard]] const Builtin* find_test(std::string_view name);
[[nodiscard]] const Builtin* find_method(std::string_view name);

/// Where the arguments of this filter name another filter or test, its place; -1: they do not.
[[nodiscard]] int place_of_name(const Builtin& filter);

}  // namespace kvkeep::lm::jinja
