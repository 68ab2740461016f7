#pragma once
/// Options from JSON, to JSON, and as a list.

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/fields.h"
#include "kvkeep/policy/registry.h"

namespace kvkeep {

/// Reading fills the options and `resolved()`; listing fills `listed()` from the defaults.
class JsonFields final : public Fields {
 public:
  /// `from` must outlive it. `folder`: base of relative file names.
  static JsonFields reader(const nlohmann::json& from, std::filesystem::path folder = {}) {
    return JsonFields(&from, std::move(folder));
  }
  static JsonFields lister() { return JsonFields(nullptr, {}); }

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
  void require_known(const nlohmann::json& object, const std::string& policy) const;

  /// Every option with its value, defaults included.
  [[nodiscard]] const nlohmann::ordered_json& resolved() const { return resolved_; }
  [[nodiscard]] const std::vector<OptionInfo>& listed() const { return listed_; }

 protected:
  void respell(const char* name, const std::string& word) override {
    if (!listing()) put(name, word);
  }

 private:
  JsonFields(const nlohmann::json* from, std::filesystem::path folder) : from_(from), folder_(std::move(folder)) {}
  enum class Given : std::uint8_t { nothing, number, word };
  Given number(const char* name, double& value, Range range, const char* what, Aliases aliases, const char* fallback,
               const char* word);
  [[noreturn]] void bad_json(const char* name, const nlohmann::json& given, const std::string& allowed) const;
  [[nodiscard]] std::string full_name(const char* name) const { return scope_.empty() ? name : scope_ + "." + name; }
  const nlohmann::json* find(const char* name, Aliases aliases);
  /// What was given; null: nothing, or the option is listed. `usual` is then written, unless that is null.
  const nlohmann::json* take(const char* name, Aliases aliases, OptionInfo info, const nlohmann::ordered_json& usual);
  std::filesystem::path named_file(const char* name, const char* fallback, const char* what);
  void list(const char* name, Aliases aliases, OptionInfo info);
  void put(const char* name, const nlohmann::ordered_json& value);

  const nlohmann::json* from_;  ///< null while listing
  std::filesystem::path folder_;
  std::string scope_;
  std::vector<std::string> taken_;    ///< full names that were requested or listed, aliases included
  std::vector<std::string> offered_;  ///< canonical full names, for messages
  nlohmann::ordered_json resolved_ = nlohmann::ordered_json::object();
  std::vector<OptionInfo> listed_;
};

}  // namespace kvkeep
