#pragma once
/// Chat templates: turn messages into the text of a prompt.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace kvkeep::lm {

struct ChatMessage {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
};

/// A published chat template, recognised by its text and rendered without Jinja. It renders exactly what jinja2 renders
/// from that text.
///
/// Known: ChatML, with or without a default system message (SmolLM2, Qwen2; any other message in the same place),
/// Qwen2.5 (without tools), Llama 3 (not 3.1 and later, whose templates include the date).
class ChatTemplate {
 public:
  /// `jinja` as tokenizer_config.json ("chat_template") or GGUF ("tokenizer.chat_template") holds it. `bos`: the text
  /// of the first token, which Llama 3 writes itself. Throws: Unsupported for a template that is not known.
  static ChatTemplate recognise(std::string_view jinja, std::string_view bos = "<|begin_of_text|>");

  /// Renders the prompt. Encode it with SpecialTokens::parsed, and without a bos token if writes_bos(). This also
  /// parses control tokens inside a message. `add_generation_prompt` ends it where the assistant's answer begins. Llama
  /// 3 strips blanks around each content. Throws: InvalidArgument without messages, and for a role other than the
  /// three.
  [[nodiscard]] std::string render(std::span<const ChatMessage> messages, bool add_generation_prompt = true) const;

  [[nodiscard]] std::string_view name() const;  ///< "chatml", "qwen2.5" or "llama3"

  /// The system message that it adds in front of messages without one.
  [[nodiscard]] const std::optional<std::string>& default_system() const { return default_system_; }

  [[nodiscard]] bool writes_bos() const { return kind_ == Kind::llama3; }

 private:
  enum class Kind : std::uint8_t { chatml, qwen25, llama3 };

  ChatTemplate() = default;

  Kind kind_ = Kind::chatml;
  std::optional<std::string> default_system_;
  std::string bos_;
};

}  // namespace kvkeep::lm
