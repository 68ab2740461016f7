// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The second reading of a chat template: its tree. All that a template may use is known, and named if it is not,
/// before anything is rendered.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "jinja_value.h"

namespace kvkeep::lm::jinja {

struct Builtin;

struct Node {
  enum class Kind : std::uint8_t {
    // Expressions. What they have in `parts` stands behind them.
    literal,      // `value`
    name,         // `text`
    attribute,    // of a value, `text`
    item,         // a value, its key
    slice,        // a value; begin, end, step: literals of none where they are not given
    call,         // of the function or macro `text`; arguments, then those by name, `names`
    method,       // `builtin`; a value, arguments
    filter,       // `builtin`; a value, arguments
    test,         // `builtin`; a value, arguments
    negative,     // a number
    negation,     // a truth
    arithmetic,   // `text`: + - * %; two values
    concat,       // values
    comparison,   // values; between each two the operation `names`
    either,       // two values: or
    both,         // two values: and
    conditional,  // the condition, the value; the other value
    list,         // values
    tuple,        // values
    dict,         // `names`, their values
    // Statements. Their bodies are their last parts.
    data,       // `value`
    output,     // a value
    set,        // `names`, or the attribute `text` of names[0]; a value
    set_block,  // the same; a body
    choice,     // conditions, each followed by its body; the body of else
    loop,       // `names`; what is iterated over, the condition or null, the body, the body of else or null
    macro,      // `text`, parameters `names`; for each its default or null, the body
    scope,      // a body with names of its own
    body,       // statements
    break_,
    continue_,
  };

  Kind kind;
  std::uint32_t line;
  std::string text = {};
  Value value = {};
  const Builtin* builtin = nullptr;
  std::vector<std::string> names = {};
  std::vector<std::unique_ptr<const Node>> parts = {};
  int depth = 0;
};

using NodeKind = Node::Kind;

/// Throws Unsupported, with the line, for what is no Jinja and for all that is not read.
[[nodiscard]] std::unique_ptr<const Node> parse(std::string_view jinja);

}  // namespace kvkeep::lm::jinja
