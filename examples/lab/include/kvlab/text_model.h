// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The text side of a model: its tokenizer and its chat template, from wherever its weights are.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvlab/chat.h"
#include "kvlab/tokenizer.h"

namespace kvkeep::io {
class GgufFile;
}

namespace kvkeep::lm {

/// What a model folder (`tokenizer.json`; `chat_template.jinja` or `tokenizer_config.json`) or a GGUF file says about
/// text.
struct TextModel {
  Tokenizer tokenizer;
  std::string chat_template = {};  ///< Jinja, as the model has it; empty: none
  ChatContext context = {};        ///< the first and the end token, as the model names them

  /// Throws: InvalidArgument if the model has no tokenizer, or a damaged one; Unsupported, by name, for one that is not
  /// supported.
  static TextModel open(const std::filesystem::path& model);

  /// True if open() finds something to open: a GGUF file, or a folder with `tokenizer.json`.
  [[nodiscard]] static bool is_there(const std::filesystem::path& model);

  /// The chat template in its `context`. Throws: InvalidArgument if the model has none; Unsupported for one that is
  /// not read (ChatTemplate).
  [[nodiscard]] ChatTemplate layout() const;

  /// The ids of a conversation, up to where the assistant's next answer begins. Throws: as layout() and
  /// ChatTemplate::render().
  [[nodiscard]] std::vector<std::int32_t> chat(std::span<const ChatMessage> messages) const;

  /// The ids that follow an assistant's answer, for a model that has the answer in its cache as it wrote it: its end,
  /// the last message, and the beginning of the next answer. `messages`: the conversation; the last but one is the
  /// assistant's, whose words are not read. Throws: as chat(); InvalidArgument if the last but one is another's, or if
  /// the template does not show it.
  [[nodiscard]] std::vector<std::int32_t> turn(std::span<const ChatMessage> messages) const;
};

/// The tokenizer that a GGUF file holds. Throws as TextModel::open().
[[nodiscard]] Tokenizer read_tokenizer(const io::GgufFile& file);

}  // namespace kvkeep::lm
