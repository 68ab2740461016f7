// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The values of a chat template, as Python has them: shared, immutable but for namespaces, and counted as they are
/// made.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"

namespace kvkeep::lm::jinja {

/// What a rendering may still take. Steps and bytes are counted together, so that no template runs or grows without
/// end.
class Work {
 public:
  explicit Work(std::uint64_t limit) : left_(limit) {}

  void spend(std::uint64_t amount) {
    if (amount > left_) refuse("it takes more steps or bytes than allowed");
    left_ -= amount;
  }

  /// Throws `E`; the sentence names the line that is being rendered.
  template <class E = InvalidArgument, class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    kvkeep::refuse<E>("render chat: line ", line, " of the template: ", parts...);
  }

  std::uint32_t line = 0;  ///< of the template, from 1

 private:
  std::uint64_t left_;
};

enum class Kind : std::uint8_t {
  undefined,
  none,
  boolean,
  integer,
  string,
  safe,  ///< a string after the filter `safe`. jinja escapes what is added to it, which is refused here
  list,
  tuple,
  generator,  ///< what some filters return: it has no length and is always true
  dict,
  space,  ///< a namespace
  loop,
  macro,
  function,
};

struct Held;
struct Loop;
struct Macro;

struct Value {
  Kind kind = Kind::undefined;
  std::int64_t number = 0;          ///< of a boolean or an integer
  std::shared_ptr<Held> held = {};  ///< of strings, sequences, dicts and namespaces
  Loop* loop = nullptr;
  const Macro* macro = nullptr;

  static Value of(bool truth) { return {.kind = Kind::boolean, .number = truth ? 1 : 0}; }
  static Value of(std::int64_t number) { return {.kind = Kind::integer, .number = number}; }
  static Value of(std::string text);

  [[nodiscard]] bool is(Kind wanted) const { return kind == wanted; }
  [[nodiscard]] bool is_number() const { return is(Kind::boolean) || is(Kind::integer); }
  [[nodiscard]] bool is_string() const { return is(Kind::string) || is(Kind::safe); }
  [[nodiscard]] bool is_sequence() const { return is(Kind::list) || is(Kind::tuple) || is(Kind::generator); }
  [[nodiscard]] bool is_iterable() const {
    return is(Kind::undefined) || is_string() || is_sequence() || is(Kind::dict);
  }
  [[nodiscard]] std::string_view text() const;  ///< of a string
  [[nodiscard]] bool truth() const;
  [[nodiscard]] const Value* find(std::string_view name) const;  ///< in a dict or namespace; null: it has none
};

struct Held {
  std::string text = {};
  std::vector<Value> values = {};
  std::vector<std::string> names = {};  ///< of the values of a dict or namespace, in order
  int depth = 0;                        ///< how deep values nest in it
};

/// Throws if a value in a container nests too deeply. What could form a circle, or outlive what it refers to (a
/// namespace, a loop, a macro), nests too deeply anywhere.
int depth_around(const std::vector<Value>& values, const Work& work);

[[nodiscard]] Value made(std::string text, Work& work);
[[nodiscard]] Value made(Kind sequence, std::vector<Value> values, Work& work);
[[nodiscard]] Value made_dict(std::vector<std::string> names, std::vector<Value> values, Work& work);

[[nodiscard]] std::string_view name_of(Kind kind);

/// The string; throws for anything else.
[[nodiscard]] std::string_view text_of(const Value& value, const Work& work);
[[nodiscard]] std::int64_t integer_of(const Value& value, const Work& work);

/// str(value). Throws Unsupported for values that Python writes as it writes source.
[[nodiscard]] std::string printed(const Value& value, Work& work);

/// What a loop over it takes; throws for what is not iterable.
[[nodiscard]] std::vector<Value> items_of(const Value& value, Work& work);

[[nodiscard]] std::int64_t length_of(const Value& value, Work& work);
[[nodiscard]] bool equal(const Value& a, const Value& b, Work& work);
[[nodiscard]] bool contains(const Value& container, const Value& value, Work& work);

/// Where `wanted` begins in the text, from byte `at`; npos: nowhere.
[[nodiscard]] std::size_t place_of(std::string_view wanted, std::string_view text, std::size_t at, Work& work);

/// value[key], undefined where there is none. Throws for an undefined value, and for a method, which is only called.
[[nodiscard]] Value item_of(const Value& value, const Value& key, Work& work);

/// value.name: the same, but a method goes before an item of a dict.
[[nodiscard]] Value attribute_of(const Value& value, const std::string& name, Work& work);

/// value[begin:end:step]; undefined or none: not given.
[[nodiscard]] Value slice_of(const Value& value, const Value& begin, const Value& end, const Value& step, Work& work);

/// Python's str.isspace() of one character.
[[nodiscard]] bool is_blank(std::string_view character);

/// The text in characters; a byte that is not UTF-8 is one.
[[nodiscard]] std::vector<std::string_view> characters(std::string_view text);

/// str.strip(), str.lstrip() and str.rstrip(): of blanks, or of these characters.
[[nodiscard]] std::string_view stripped(std::string_view text, bool left = true, bool right = true,
                                        std::optional<std::string_view> chars = std::nullopt);

}  // namespace kvkeep::lm::jinja
