#include "json_fields.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep {
namespace {

std::string shown(double value) { return nlohmann::json(value).dump(); }

}  // namespace

void JsonFields::bad_json(const char* name, const nlohmann::json& given, const std::string& allowed) const {
  refuse("policy: ", full_name(name), " is out of range or of the wrong type; given ", io::shown(given), "; allowed ",
         allowed);
}

void JsonFields::bad(const char* name, const Value& given, const std::string& allowed) const {
  bad_json(name, std::visit([](const auto& value) { return nlohmann::json(value); }, given), allowed);
}

const nlohmann::json* JsonFields::find(const char* name, Aliases aliases) {
  offered_.push_back(full_name(name));
  taken_.push_back(full_name(name));
  const nlohmann::json* object = from_;
  if (!scope_.empty()) {
    if (!from_->contains(scope_)) return nullptr;
    object = &(*from_)[scope_];
  }
  const nlohmann::json* found = object->contains(name) ? &(*object)[name] : nullptr;
  for (const char* alias : aliases) {
    taken_.push_back(full_name(alias));
    if (!object->contains(alias)) continue;
    KVKEEP_REQUIRE(found == nullptr, "policy: ", full_name(name), " is given twice, the second time under the alias ",
                   alias, "; allowed once");
    found = &(*object)[alias];
  }
  return found;
}

const nlohmann::json* JsonFields::take(const char* name, Aliases aliases, OptionInfo info,
                                       const nlohmann::ordered_json& usual) {
  if (listing()) {
    list(name, aliases, std::move(info));
    return nullptr;
  }
  const nlohmann::json* given = find(name, aliases);
  if (given == nullptr && !usual.is_null()) put(name, usual);
  return given;
}

void JsonFields::put(const char* name, const nlohmann::ordered_json& value) {
  if (scope_.empty())
    resolved_[name] = value;
  else
    resolved_[scope_][name] = value;
}

bool JsonFields::integer(const char* name, std::int64_t& value, std::int64_t least, std::int64_t most, const char* what,
                         Aliases aliases, const char* fallback) {
  const std::string allowed =
      most >= INT32_MAX ? text("an integer, ", least, " or more") : text("an integer from ", least, " to ", most);
  const nlohmann::json* given = take(name, aliases, {{}, fallback != nullptr ? fallback : text(value), allowed, what},
                                     fallback == nullptr ? nlohmann::ordered_json(value) : nullptr);
  if (given == nullptr) return false;
  const std::optional<std::int64_t> number = io::whole_number(*given, least, most);
  if (!number) bad_json(name, *given, allowed);
  value = *number;
  put(name, value);
  return true;
}

bool JsonFields::real(const char* name, double& value, Range range, const char* what, Aliases aliases,
                      const char* fallback) {
  return number(name, value, range, what, aliases, fallback, nullptr) == Given::number;
}

void JsonFields::real_or(const char* name, double& value, Range range, const char* word, bool& chosen,
                         const char* what) {
  chosen = number(name, value, range, what, {}, nullptr, word) == Given::word;
}

JsonFields::Given JsonFields::number(const char* name, double& value, Range range, const char* what, Aliases aliases,
                                     const char* fallback, const char* word) {
  std::string allowed = text("a number in ", range.low_open ? "(" : "[", shown(range.low), ", ", shown(range.high),
                             range.high_open ? ")" : "]");
  if (word != nullptr) allowed += text(" or ", word);
  const nlohmann::json* given = take(name, aliases, {{}, fallback != nullptr ? fallback : shown(value), allowed, what},
                                     fallback == nullptr ? nlohmann::ordered_json(value) : nullptr);
  if (given == nullptr) return Given::nothing;
  if (word != nullptr && *given == word) {
    put(name, word);
    return Given::word;
  }
  if (!given->is_number()) bad_json(name, *given, allowed);
  const auto wanted = given->get<double>();
  const bool inside = (range.low_open ? wanted > range.low : wanted >= range.low) &&
                      (range.high_open ? wanted < range.high : wanted <= range.high);
  if (!inside || !std::isfinite(wanted)) bad_json(name, *given, allowed);
  value = wanted;
  put(name, value);
  return Given::number;
}

void JsonFields::exactly_one(std::initializer_list<std::pair<const char*, bool>> given) const {
  if (listing()) return;
  std::string names, found;
  int count = 0;
  for (const auto& [name, is] : given) {
    names += (names.empty() ? "" : ", ") + full_name(name);
    if (is) found += (count++ > 0 ? ", " : "") + full_name(name);
  }
  KVKEEP_REQUIRE(count != 0, "policy: ", full_name(given.begin()->first), " is missing; allowed exactly one of ",
                 names);
  KVKEEP_REQUIRE(count == 1, "policy: ", found, " are given together; allowed exactly one of ", names);
}

std::filesystem::path JsonFields::file(const char* name, const char* what) {
  const std::filesystem::path path = named_file(name, "required", what);
  KVKEEP_REQUIRE(!path.empty() || listing(), "policy: ", full_name(name),
                 " is missing; allowed the name of a file, relative to the policy file");
  return path;
}

std::filesystem::path JsonFields::optional_file(const char* name, const char* what) {
  return named_file(name, "-", what);
}

std::filesystem::path JsonFields::named_file(const char* name, const char* fallback, const char* what) {
  const nlohmann::json* given =
      take(name, {}, {{}, fallback, "a file, relative to the policy file", what, true}, nullptr);
  if (given == nullptr) return {};
  if (!given->is_string() || given->get<std::string>().empty()) bad_json(name, *given, "the name of a file");
  const std::filesystem::path path = folder_ / given->get<std::string>();  // an absolute one replaces it all
  put(name, path.string());
  return path;
}

bool JsonFields::gives(const char* scope, const char* name) const {
  return !listing() && from_->contains(scope) && (*from_)[scope].is_object() && (*from_)[scope].contains(name);
}

bool JsonFields::says(const char* scope, const char* name, const char* word) const {
  return gives(scope, name) && (*from_)[scope][name] == word;
}

void JsonFields::flag(const char* name, bool& value, const char* what) {
  const nlohmann::json* given = take(name, {}, {{}, value ? "true" : "false", "true, false", what}, value);
  if (given == nullptr) return;
  if (!given->is_boolean()) bad_json(name, *given, "true, false");
  value = given->get<bool>();
  put(name, value);
}

std::string JsonFields::word(const char* name, const std::string& fallback, const std::string& allowed,
                             const char* what, Aliases aliases) {
  const nlohmann::json* given = take(name, aliases, {{}, fallback, allowed, what}, fallback);
  if (given == nullptr) return fallback;
  if (!given->is_string()) bad_json(name, *given, "one of " + allowed);
  put(name, *given);
  return given->get<std::string>();
}

void JsonFields::enter(const char* scope) {
  scope_ = scope;
  taken_.emplace_back(scope);
  if (listing()) return;
  resolved_[scope] = nlohmann::ordered_json::object();
  if (from_->contains(scope))
    KVKEEP_REQUIRE((*from_)[scope].is_object(), "policy: ", scope, " holds ", io::shown((*from_)[scope]),
                   "; allowed an object");
}

void JsonFields::list(const char* name, Aliases aliases, OptionInfo info) {
  info.name = full_name(name);
  offered_.push_back(info.name);
  taken_.push_back(info.name);
  for (const char* alias : aliases) taken_.push_back(full_name(alias));
  listed_.push_back(std::move(info));
}

void JsonFields::finish(const std::string& policy) const { require_known(*from_, policy); }

void JsonFields::require_known(const nlohmann::json& object, const std::string& policy) const {
  const auto check = [&](const std::string& name) {
    if (std::ranges::find(taken_, name) != taken_.end()) return;
    refuse("policy: ", policy, " has no option \"", shortened(name), "\"", did_you_mean(name, taken_), "; allowed ",
           joined(offered_));
  };
  for (const auto& [key, value] : object.items()) {
    check(key);
    if (!value.is_object()) continue;
    for (const auto& [inner, ignored] : value.items()) check(key + "." + inner);
  }
}

}  // namespace kvkeep
