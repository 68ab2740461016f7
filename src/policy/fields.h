#pragma once
/// One description of an options struct serves to read JSON, to write the resolved JSON and to list the options.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"

namespace kvkeep {

/// A description function calls integer(), real(), flag(), choice() or word() once per option. Reading fills the
/// options and `resolved()`; listing fills `listed()` from the defaults.
class Fields {
 public:
  /// `folder`: base of relative file names.
  static Fields reader(const nlohmann::json& from, std::filesystem::path folder = {}) {
    return Fields(&from, std::move(folder));
  }
  static Fields lister() { return Fields(nullptr, {}); }
  [[nodiscard]] bool listing() const { return from_ == nullptr; }
  /// True if this object has the key `name`, whatever its value.
  [[nodiscard]] bool has(const char* name) const { return !listing() && from_->contains(name); }

  bool uneven_heads =
      false;  ///< rows of a layer may differ in length: changes the defaults of scorers that read them side by side
  bool values_weighed = false;  ///< the allocator weighs values itself: changes the defaults of scorers that do so too

  using Aliases = std::initializer_list<const char*>;

  /// True if it was given. `fallback`, if set, replaces the default in lists; an option that is not given is then left
  /// out of `resolved()`.
  bool integer(const char* name, std::int64_t& value, std::int64_t least, std::int64_t most, const char* what,
               Aliases aliases = {}, const char* fallback = nullptr);
  bool integer(const char* name, std::int32_t& value, std::int64_t least, std::int64_t most, const char* what,
               Aliases aliases = {}, const char* fallback = nullptr);
  /// `low_open`, `high_open`: the bound itself is not allowed.
  bool real(const char* name, double& value, double low, bool low_open, double high, bool high_open, const char* what,
            Aliases aliases = {}, const char* fallback = nullptr);
  /// A number as in real(), or the word, which sets `chosen`.
  void real_or(const char* name, double& value, double low, bool low_open, double high, bool high_open,
               const char* word, bool& chosen, const char* what);
  /// Reading only: throws unless exactly one of these options was given.
  void exactly_one(std::initializer_list<std::pair<const char*, bool>> given) const;
  void flag(const char* name, bool& value, const char* what);

  template <class Choice>
  void choice(const char* name, Choice& value, std::initializer_list<std::pair<const char*, Choice>> choices,
              const char* what, Aliases aliases = {}) {
    std::string allowed, current;
    for (const auto& [word, c] : choices) {
      allowed += (allowed.empty() ? "" : ", ") + std::string(word);
      if (c == value && current.empty()) current = word;
    }
    const std::string given = word(name, current, allowed, what, aliases);
    const auto chosen =
        std::find_if(choices.begin(), choices.end(), [&](const auto& choice) { return given == choice.first; });
    if (chosen == choices.end()) bad(name, given, "one of " + allowed);
    value = chosen->second;
    const auto canonical =
        std::find_if(choices.begin(), choices.end(), [&](const auto& choice) { return choice.second == value; });
    if (!listing()) put(name, canonical->first);
  }

  /// A free-form string option: the given value, or `fallback`.
  std::string word(const char* name, const std::string& fallback, const std::string& allowed, const char* what,
                   Aliases aliases = {});

  /// True if the option `name` of sub-object `scope` was given (and is `word`): for defaults that depend on an option
  /// described later.
  [[nodiscard]] bool gives(const char* scope, const char* name) const;
  [[nodiscard]] bool says(const char* scope, const char* name, const char* word) const;

  /// A file that must be named; relative to the reader's folder. Empty while listing.
  std::filesystem::path file(const char* name, const char* what);

  /// The same for a file that may be left out; then empty.
  std::filesystem::path optional_file(const char* name, const char* what);

  [[noreturn]] void bad(const char* name, const nlohmann::json& given, const std::string& allowed) const;

  /// Options in a sub-object of this name until leave().
  void enter(const char* scope);
  void leave();

  /// Reading only: throws for keys that no option used.
  void finish(const std::string& policy) const;

  /// Every option with its value, defaults included.
  [[nodiscard]] const nlohmann::ordered_json& resolved() const { return resolved_; }
  [[nodiscard]] const std::vector<OptionInfo>& listed() const { return listed_; }

 private:
  Fields(const nlohmann::json* from, std::filesystem::path folder) : from_(from), folder_(std::move(folder)) {}
  struct Range {
    double low;
    bool low_open;
    double high;
    bool high_open;
  };
  enum class Given : std::uint8_t { nothing, number, word };
  Given number(const char* name, double& value, Range range, const char* what, Aliases aliases, const char* fallback,
               const char* word);
  [[nodiscard]] std::string full_name(const char* name) const { return scope_.empty() ? name : scope_ + "." + name; }
  const nlohmann::json* find(const char* name, Aliases aliases);
  std::filesystem::path named_file(const char* name);
  void put(const char* name, const nlohmann::ordered_json& value);

  const nlohmann::json* from_;  ///< null while listing
  std::filesystem::path folder_;
  std::string scope_;
  std::vector<std::string> taken_;    ///< full names that were requested
  std::vector<std::string> offered_;  ///< canonical full names, for messages
  nlohmann::ordered_json resolved_ = nlohmann::ordered_json::object();
  std::vector<OptionInfo> listed_;
};

}  // namespace kvkeep
