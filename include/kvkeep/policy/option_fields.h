// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Options from their values, back to values, and as a list.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/policy/option_value.h"

namespace kvkeep {

/// Reading fills the options and `resolved()`; listing fills `listed()` from the defaults.
class OptionFields final : public Fields {
 public:
  /// `from` must outlive it. `folder`: base of relative file names.
  static OptionFields reader(const OptionValue& from, std::filesystem::path folder = {}) {
    return OptionFields(&from, std::move(folder));
  }
  static OptionFields lister() { return OptionFields(nullptr, {}); }

  [[nodiscard]] bool listing() const override { return from_ == nullptr; }
  using Fields::integer;
  bool integer(const char* name, std::int64_t& value, std::int64_t least, std::int64_t most, const char* what,
               Aliases aliases = {}, const char* fallback = nullptr) override;
  bool real(const char* name, double& value, Range range, const char* what, Aliases aliases = {},
            const char* fallback = nullptr) override;
  void real_or(const char* name, double& value, Range range, const char* word, bool& chosen, const char* what) override;
  void flag(const char* name, bool& value, const char* what) override;
  std::string word(const char* name, const std::string& fallback, const std::string& allowed, const char* what,
                   Aliases aliases = {}) override;
  std::filesystem::path file(const char* name, const char* what) override;
  std::filesystem::path optional_file(const char* name, const char* what) override;
  void exactly_one(std::initializer_list<std::pair<const char*, bool>> given) const override;
  [[nodiscard]] bool has(const char* name) const override { return !listing() && from_->contains(name); }
  [[nodiscard]] bool gives(const char* scope, const char* name) const override;
  [[nodiscard]] bool says(const char* scope, const char* name, const char* word) const override;
  void enter(const char* scope) override;
  void leave() override { scope_.clear(); }
  [[noreturn]] void bad(const char* name, const Value& given, const std::string& allowed) const override;

  /// Reading only: throws for keys that no option used.
  void finish(const std::string& policy) const;

  /// Throws for keys of `object` that no option of the list has, under whatever name.
  void require_known(const OptionValue& object, const std::string& policy) const;

  /// The policy in full: its name, and every option with its value, defaults included.
  [[nodiscard]] OptionValue resolved(const std::string& policy) const;
  [[nodiscard]] const std::vector<OptionInfo>& listed() const { return listed_; }
  /// Full names of all options that were read or listed, under every name that they have, and of sub-objects.
  [[nodiscard]] const std::vector<std::string>& names() const { return taken_; }

 protected:
  void respell(const char* name, const std::string& word) override {
    if (!listing()) put(name, word);
  }

 private:
  OptionFields(const OptionValue* from, std::filesystem::path folder) : from_(from), folder_(std::move(folder)) {}
  enum class Given : std::uint8_t { nothing, number, word };
  Given number(const char* name, double& value, Range range, const char* what, Aliases aliases, const char* fallback,
               const char* word);
  [[noreturn]] void bad_value(const char* name, const OptionValue& given, const std::string& allowed) const;
  [[nodiscard]] std::string full_name(const char* name) const { return scope_.empty() ? name : scope_ + "." + name; }
  const OptionValue* find(const char* name, Aliases aliases);
  /// What was given; null: nothing, or the option is listed. `usual` is then written, unless that is nothing.
  const OptionValue* take(const char* name, Aliases aliases, OptionInfo info, const OptionValue& usual);
  std::filesystem::path named_file(const char* name, const char* fallback, const char* what);
  void list(const char* name, Aliases aliases, OptionInfo info);
  void put(const char* name, const OptionValue& value);

  const OptionValue* from_;  ///< null while listing
  std::filesystem::path folder_;
  std::string scope_;
  std::vector<std::string> taken_;    ///< full names that were requested or listed, aliases included
  std::vector<std::string> offered_;  ///< canonical full names, for messages
  OptionValue resolved_ = OptionValue::object();
  std::vector<OptionInfo> listed_;
};

/// The full name of an option of a policy that was written without its sub-object: "heads" of "scorer.heads". Throws
/// InvalidArgument if several end so. evicts: the policy is a scorer's, alone or under an allocator.
[[nodiscard]] inline std::string full_name_of(std::string_view policy, bool evicts, std::span<const OptionInfo> options,
                                              const std::string& key) {
  if (key.find('.') != std::string::npos) return key;
  std::vector<std::string> matches;
  for (const OptionInfo& o : options) {
    if (o.name == key) return key;
    if (o.name.ends_with("." + key)) matches.push_back(o.name);
  }
  // Every evicting policy has the options of folded spans: a name that the policy itself uses means its own.
  if (matches.size() > 1)
    std::erase_if(matches, [&](const std::string& match) { return evicts && match.starts_with("memory."); });
  KVKEEP_REQUIRE(matches.size() < 2, "policy: option \"", shortened(key), "\" of ", policy, " could be ",
                 matches.empty() ? "" : matches.front() + " or " + matches.back(), "; write one of them");
  return matches.empty() ? key : matches.front();
}

namespace option_fields_detail {

inline std::string shown(double value) { return OptionValue(value).json(); }

/// The numbers of a range, either end of which may be infinite.
inline std::string numbers_in(Range range) {
  const bool from = std::isfinite(range.low), to = std::isfinite(range.high);
  if (from && to)
    return text("a number in ", range.low_open ? "(" : "[", shown(range.low), ", ", shown(range.high),
                range.high_open ? ")" : "]");
  if (from)
    return text("a number, ", range.low_open ? "above " : "", shown(range.low), range.low_open ? "" : " or more");
  if (to)
    return text("a number, ", range.high_open ? "below " : "", shown(range.high), range.high_open ? "" : " or less");
  return "a number";
}

inline bool is_of_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

}  // namespace option_fields_detail

inline void OptionFields::bad_value(const char* name, const OptionValue& given, const std::string& allowed) const {
  refuse("policy: ", listing() ? "the default of " : "", full_name(name),
         " is out of range or of the wrong type; given ", given.shown(), "; allowed ", allowed,
         listing() ? "; one that must be given has a `fallback` instead" : "");
}

inline void OptionFields::bad(const char* name, const Value& given, const std::string& allowed) const {
  bad_value(name, std::visit([](const auto& value) { return OptionValue(value); }, given), allowed);
}

inline const OptionValue* OptionFields::find(const char* name, Aliases aliases) {
  offered_.push_back(full_name(name));
  taken_.push_back(full_name(name));
  const OptionValue* object = from_;
  if (!scope_.empty()) {
    object = from_->find(scope_);
    if (object == nullptr) return nullptr;
  }
  const OptionValue* found = object->find(name);
  for (const char* alias : aliases) {
    taken_.push_back(full_name(alias));
    const OptionValue* const other = object->find(alias);
    if (other == nullptr) continue;
    KVKEEP_REQUIRE(found == nullptr, "policy: ", full_name(name), " is given twice, the second time under the alias ",
                   alias, "; allowed once");
    found = other;
  }
  return found;
}

inline const OptionValue* OptionFields::take(const char* name, Aliases aliases, OptionInfo info,
                                             const OptionValue& usual) {
  if (listing()) {
    list(name, aliases, std::move(info));
    return nullptr;
  }
  const OptionValue* given = find(name, aliases);
  if (given == nullptr && !usual.is_nothing()) put(name, usual);
  return given;
}

inline void OptionFields::put(const char* name, const OptionValue& value) {
  if (scope_.empty())
    resolved_[name] = value;
  else
    resolved_[scope_][name] = value;
}

inline bool OptionFields::integer(const char* name, std::int64_t& value, std::int64_t least, std::int64_t most,
                                  const char* what, Aliases aliases, const char* fallback) {
  const std::string allowed =
      most >= INT32_MAX ? text("an integer, ", least, " or more") : text("an integer from ", least, " to ", most);
  const OptionValue* given = take(name, aliases, {{}, fallback != nullptr ? fallback : text(value), allowed, what},
                                  fallback == nullptr ? OptionValue(value) : OptionValue());
  if (listing() && fallback == nullptr && (value < least || value > most)) bad_value(name, value, allowed);
  if (given == nullptr) return false;
  const auto* const whole = given->get<std::int64_t>();
  if (whole == nullptr || *whole < least || *whole > most) bad_value(name, *given, allowed);
  value = *whole;
  put(name, value);
  return true;
}

inline bool OptionFields::real(const char* name, double& value, Range range, const char* what, Aliases aliases,
                               const char* fallback) {
  return number(name, value, range, what, aliases, fallback, nullptr) == Given::number;
}

inline void OptionFields::real_or(const char* name, double& value, Range range, const char* word, bool& chosen,
                                  const char* what) {
  chosen = number(name, value, range, what, {}, nullptr, word) == Given::word;
}

inline OptionFields::Given OptionFields::number(const char* name, double& value, Range range, const char* what,
                                                Aliases aliases, const char* fallback, const char* word) {
  std::string allowed = option_fields_detail::numbers_in(range);
  if (word != nullptr) allowed += text(" or ", word);
  const OptionValue* given =
      take(name, aliases, {{}, fallback != nullptr ? fallback : option_fields_detail::shown(value), allowed, what},
           fallback == nullptr ? OptionValue(value) : OptionValue());
  const auto inside = [range](double x) {
    return std::isfinite(x) && (range.low_open ? x > range.low : x >= range.low) &&
           (range.high_open ? x < range.high : x <= range.high);
  };
  if (listing() && fallback == nullptr && word == nullptr && !inside(value)) bad_value(name, value, allowed);
  if (given == nullptr) return Given::nothing;
  if (word != nullptr && given->is(word)) {
    put(name, word);
    return Given::word;
  }
  double wanted = 0;
  if (!given->number(wanted) || !inside(wanted)) bad_value(name, *given, allowed);
  value = wanted;
  put(name, value);
  return Given::number;
}

inline void OptionFields::exactly_one(std::initializer_list<std::pair<const char*, bool>> given) const {
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

inline std::filesystem::path OptionFields::file(const char* name, const char* what) {
  const std::filesystem::path path = named_file(name, "required", what);
  KVKEEP_REQUIRE(!path.empty() || listing(), "policy: ", full_name(name),
                 " is missing; allowed the name of a file, relative to the policy file");
  return path;
}

inline std::filesystem::path OptionFields::optional_file(const char* name, const char* what) {
  return named_file(name, "-", what);
}

inline std::filesystem::path OptionFields::named_file(const char* name, const char* fallback, const char* what) {
  const OptionValue* given = take(name, {}, {{}, fallback, "a file, relative to the policy file", what, true}, {});
  if (given == nullptr) return {};
  const auto* const named = given->get<std::string>();
  if (named == nullptr || named->empty()) bad_value(name, *given, "the name of a file");
  const std::filesystem::path path = folder_ / *named;  // an absolute one replaces it all
  put(name, path.string());
  return path;
}

inline bool OptionFields::gives(const char* scope, const char* name) const {
  const OptionValue* const object = listing() ? nullptr : from_->find(scope);
  return object != nullptr && object->contains(name);
}

inline bool OptionFields::says(const char* scope, const char* name, const char* word) const {
  return gives(scope, name) && from_->find(scope)->find(name)->is(word);
}

inline void OptionFields::flag(const char* name, bool& value, const char* what) {
  const OptionValue* given = take(name, {}, {{}, value ? "true" : "false", "true, false", what}, value);
  if (given == nullptr) return;
  const auto* const wanted = given->get<bool>();
  if (wanted == nullptr) bad_value(name, *given, "true, false");
  value = *wanted;
  put(name, value);
}

inline std::string OptionFields::word(const char* name, const std::string& fallback, const std::string& allowed,
                                      const char* what, Aliases aliases) {
  const OptionValue* given = take(name, aliases, {{}, fallback, allowed, what}, fallback);
  if (given == nullptr) return fallback;
  const auto* const wanted = given->get<std::string>();
  if (wanted == nullptr) bad_value(name, *given, "one of " + allowed);
  put(name, *given);
  return *wanted;
}

inline void OptionFields::enter(const char* scope) {
  scope_ = scope;
  if (std::ranges::find(taken_, scope_) == taken_.end()) taken_.push_back(scope_);
  if (listing()) return;
  resolved_[scope] = OptionValue::object();
  if (const OptionValue* const object = from_->find(scope))
    KVKEEP_REQUIRE(object->is_object(), "policy: ", scope, " holds ", object->shown(), "; allowed an object");
}

inline void OptionFields::list(const char* name, Aliases aliases, OptionInfo info) {
  const auto add = [this](const char* given) {
    const std::string_view said = given;
    KVKEEP_REQUIRE(!said.empty() && std::ranges::all_of(said, option_fields_detail::is_of_name),
                   "policy: this is no name for an option; given \"", shortened(said),
                   "\"; allowed letters, digits, underscores and hyphens, at least one");
    const std::string full = full_name(given);
    KVKEEP_REQUIRE(std::ranges::find(taken_, full) == taken_.end(), "policy: ", full,
                   " is described twice; allowed options that share no name");
    taken_.push_back(full);
  };
  add(name);
  for (const char* alias : aliases) add(alias);
  info.name = full_name(name);
  offered_.push_back(info.name);
  listed_.push_back(std::move(info));
}

inline OptionValue OptionFields::resolved(const std::string& policy) const {
  OptionValue all;
  all["policy"] = policy;
  for (const auto& [name, value] : resolved_.members()) all[name] = value;
  return all;
}

inline void OptionFields::finish(const std::string& policy) const { require_known(*from_, policy); }

inline void OptionFields::require_known(const OptionValue& object, const std::string& policy) const {
  const auto check = [&](const std::string& name) {
    if (std::ranges::find(taken_, name) != taken_.end()) return;
    refuse("policy: ", policy, " has no option \"", shortened(name), "\"", did_you_mean(name, taken_), "; allowed ",
           offered_.empty() ? "none" : joined(offered_));
  };
  for (const auto& [key, value] : object.members()) {
    check(key);
    for (const auto& [inner, ignored] : value.members()) check(key + "." + inner);
  }
}

}  // namespace kvkeep
