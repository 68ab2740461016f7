// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Chat templates: turn messages into the text of a prompt.

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace kvkeep::lm {

namespace jinja {
struct Node;
}

struct ChatMessage {
  std::string role;  ///< "system", "user", "assistant", or another that the template knows
  std::string content;
};

/// What a template may read beside the messages.
struct ChatContext {
  std::optional<std::string> bos = {}, eos = {};  ///< `bos_token`, `eos_token`; none: not defined
  /// What `strftime_now` writes. It is never today's, so that a prompt is the same on every day. The default is the
  /// date that Llama 3.1 and 3.2 write where none is given.
  std::chrono::year_month_day date{std::chrono::year(2024), std::chrono::July, std::chrono::day(26)};
};

/// A model's chat template, in the part of Jinja that examples/lab/docs/text.md lists. It renders byte for byte what
/// jinja2 3.1 renders in the environment of transformers (trim_blocks, lstrip_blocks, break and continue,
/// `raise_exception`, `strftime_now`, `tojson`; `tools` and `documents` are none; {% generation %} marks nothing).
///
/// Differs: what is not in that part is refused when the template is parsed. A few things show only in the values and
/// are refused then: lists and dicts written as text, letters beyond ASCII in upper and lower case, numbers beyond
/// 2^63.
///
/// Immutable, cheap to copy, and safe to use from any number of threads.
class ChatTemplate {
 public:
  /// `jinja` as chat_template.jinja, tokenizer_config.json ("chat_template") or GGUF ("tokenizer.chat_template") holds
  /// it, at most 1 MiB. Throws: Unsupported, with the line and by name, for what is not read. Cost: O(n).
  static ChatTemplate parse(std::string_view jinja, ChatContext context = {});

  /// Renders the prompt. Encode it with SpecialTokens::parsed, and without a bos token if begins_with_bos(). This also
  /// parses control tokens inside a message. `add_generation_prompt` ends it where the assistant's answer begins.
  /// Throws: InvalidArgument without messages, where the template refuses them or fails, and if it takes more than 64
  /// MiB and 64 times the messages, in bytes made and steps of 8 bytes; Unsupported for what is listed above.
  [[nodiscard]] std::string render(std::span<const ChatMessage> messages, bool add_generation_prompt = true) const;

  [[nodiscard]] bool begins_with_bos(std::string_view rendered) const;

 private:
  ChatTemplate(std::shared_ptr<const jinja::Node> tree, ChatContext context)
      : tree_(std::move(tree)), context_(std::move(context)) {}

  std::shared_ptr<const jinja::Node> tree_;
  ChatContext context_;
};

}  // namespace kvkeep::lm
