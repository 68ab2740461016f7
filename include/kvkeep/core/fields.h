// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Options by name. One description of a struct of options serves to read it, to write it in full, and to list it.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kvkeep/core/error.h"

namespace kvkeep {

inline constexpr std::int64_t kMostQueries = 1 << 20;  ///< most queries that a ring may be asked to hold
inline constexpr std::int64_t kWidestPool = 4095;      ///< slots

/// Numbers from `low` to `high`.
struct Range {
  double low;
  double high;
  bool low_open = false;  ///< `low` itself is not allowed
  bool high_open = false;

  [[nodiscard]] static constexpr Range above(double low, double high) { return {low, high, true}; }
  [[nodiscard]] static constexpr Range below(double low, double high) { return {low, high, false, true}; }
  [[nodiscard]] static constexpr Range between(double low, double high) { return {low, high, true, true}; }
};

/// One option of a policy, for display.
struct OptionInfo {
  std::string name;      ///< as in JSON, with its sub-object: "allocator.window"
  std::string fallback;  ///< default; "required" if there is none
  std::string allowed;   ///< range or choices
  std::string what;      ///< one line
  bool file = false;     ///< it names a file
};

/// A struct of options has a function `describe(Fields& f)` that calls integer(), real(), flag(), choice() or another
/// function of this class once per option, with the member that holds it. The member's value is the default. Texts are
/// shown to people: `what` is one line.
///
/// While reading, a call sets its member, or throws InvalidArgument with the option's name, the value and what is
/// allowed. While listing, it changes nothing.
class Fields {
 public:
  using Aliases = std::initializer_list<const char*>;
  using Value = std::variant<bool, std::int64_t, double, std::string>;

  virtual ~Fields() = default;

  bool uneven_heads = false;    ///< rows of a layer may differ in length: changes the defaults of scorers that read
                                ///< them side by side
  bool values_weighed = false;  ///< the allocator weighs values itself: changes the defaults of scorers that do so too

  [[nodiscard]] virtual bool listing() const = 0;

  /// True if it was given. `fallback`, if set, replaces the default in lists; an option that is not given is then not
  /// written.
  virtual bool integer(const char* name, std::int64_t& value, std::int64_t least, std::int64_t most, const char* what,
                       Aliases aliases = {}, const char* fallback = nullptr) = 0;
  bool integer(const char* name, std::int32_t& value, std::int64_t least, std::int64_t most, const char* what,
               Aliases aliases = {}, const char* fallback = nullptr) {
    std::int64_t wide = value;
    const bool given = integer(name, wide, least, std::min<std::int64_t>(most, INT32_MAX), what, aliases, fallback);
    value = static_cast<std::int32_t>(wide);
    return given;
  }

  /// An odd number of slots that are pooled over; 1: none.
  void pool(std::int32_t& value, const char* what, Aliases aliases = {}) {
    integer("pool", value, 1, kWidestPool, what, aliases);
    if (value % 2 == 0) bad("pool", value, "an odd number");
  }

  virtual bool real(const char* name, double& value, Range range, const char* what, Aliases aliases = {},
                    const char* fallback = nullptr) = 0;

  /// A number as in real(), or the word, which sets `chosen`.
  virtual void real_or(const char* name, double& value, Range range, const char* word, bool& chosen,
                       const char* what) = 0;

  virtual void flag(const char* name, bool& value, const char* what) = 0;

  /// One of `choices`. Several words may mean the same; the first of them is written and listed.
  template <class Choice>
  void choice(const char* name, Choice& value, std::initializer_list<std::pair<const char*, Choice>> choices,
              const char* what, Aliases aliases = {}) {
    const auto word_of = [&choices](const Choice& meant) -> std::string {
      const auto first = std::find_if(choices.begin(), choices.end(), [&](const auto& c) { return c.second == meant; });
      return first == choices.end() ? "" : first->first;
    };
    std::vector<std::string> listed;
    for (const auto& [text, meant] : choices)
      if (word_of(meant) == text) listed.emplace_back(text);
    const std::string allowed = joined(listed);
    const std::string given = word(name, word_of(value), allowed, what, aliases);
    const auto chosen = std::find_if(choices.begin(), choices.end(), [&](const auto& c) { return given == c.first; });
    if (chosen == choices.end()) bad(name, given, text("one of ", allowed, did_you_mean(given, listed)));
    value = chosen->second;
    if (word_of(value) != given) respell(name, word_of(value));
  }

  /// A word that the caller checks: the given one, or `fallback`.
  virtual std::string word(const char* name, const std::string& fallback, const std::string& allowed, const char* what,
                           Aliases aliases = {}) = 0;

  /// A file that must be named, with the folder that it is relative to. Empty while listing.
  virtual std::filesystem::path file(const char* name, const char* what) = 0;

  /// The same for a file that may be left out; then empty.
  virtual std::filesystem::path optional_file(const char* name, const char* what) = 0;

  /// Reading only: throws unless exactly one of these options was given.
  virtual void exactly_one(std::initializer_list<std::pair<const char*, bool>> given) const = 0;

  /// For what depends on options that are described later or nowhere; false while listing. True if the object has the
  /// key `name`, whatever its value; if option `name` of sub-object `scope` was given; if it was given as `word`.
  [[nodiscard]] virtual bool has(const char* name) const = 0;
  [[nodiscard]] virtual bool gives(const char* scope, const char* name) const = 0;
  [[nodiscard]] virtual bool says(const char* scope, const char* name, const char* word) const = 0;

  /// Options in a sub-object of this name until leave().
  virtual void enter(const char* scope) = 0;
  virtual void leave() = 0;

  /// Throws InvalidArgument: `given` is not allowed for option `name`.
  [[noreturn]] virtual void bad(const char* name, const Value& given, const std::string& allowed) const = 0;

 protected:
  /// The option just read is written as `word`.
  virtual void respell(const char* name, const std::string& word) = 0;
};

}  // namespace kvkeep
