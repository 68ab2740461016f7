// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The first reading of a chat template: its tokens, with blanks cut as jinja2 cuts them under trim_blocks and
/// lstrip_blocks.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/error.h"

namespace kvkeep::lm::jinja {

/// Throws Unsupported: a sentence with the line, what stands there, and the way out.
template <class... Parts>
[[noreturn]] void refuse_template(std::uint32_t line, const Parts&... parts) {
  refuse<Unsupported>("read chat template: line ", line, ": ", parts...,
                      "; allowed what examples/lab/docs/text.md lists, or --raw, which takes the prompt as it is");
}

struct Token {
  enum class Kind : std::uint8_t { data, begin, end, output_begin, output_end, name, string, integer, operation, last };

  Kind kind;
  std::string text;  ///< of a string: without quotes and escapes
  std::uint32_t line;

  [[nodiscard]] bool is(std::string_view wanted) const {
    return (kind == Kind::name || kind == Kind::operation) && text == wanted;
  }
};

/// The last one is Kind::last. Throws Unsupported for what is not read, and for more than 1 MiB.
[[nodiscard]] std::vector<Token> tokens_of(std::string_view jinja);

}  // namespace kvkeep::lm::jinja
