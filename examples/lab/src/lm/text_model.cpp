// SPDX-License-Identifier: Apache-2.0
#include "kvlab/text_model.h"

#include <nlohmann/json.hpp>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/gguf.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep::lm {
namespace {

namespace fs = std::filesystem;

bool is_gguf(const fs::path& model) {  // as io::ModelConfig::read() decides
  std::error_code none;
  return fs::is_regular_file(model, none);
}

// A token in tokenizer_config.json: its text, or an object with it.
std::optional<std::string> token_in(const nlohmann::json& config, const char* key) {
  if (!config.contains(key)) return std::nullopt;
  const nlohmann::json& token = config[key];
  const nlohmann::json& content = token.is_object() ? token.value("content", nlohmann::json()) : token;
  return content.is_string() ? std::optional(content.get<std::string>()) : std::nullopt;
}

// The template of a Hugging Face folder, a file of its own or in tokenizer_config.json, alone or as "default" in a
// list; and the tokens that it may write.
void read_chat(const fs::path& folder, TextModel& to) {
  if (fs::exists(folder / "tokenizer_config.json")) {
    const fs::path file = folder / "tokenizer_config.json";
    const nlohmann::json config =
        io::read_json(io::read_file(file, "tokenizer config"), "read " + file.string(), io::RepeatedNames::refused);
    if (config.is_object()) {
      if (const auto bos = token_in(config, "bos_token")) to.context.bos = bos;
      if (const auto eos = token_in(config, "eos_token")) to.context.eos = eos;
      const nlohmann::json found = config.value("chat_template", nlohmann::json());
      if (found.is_string()) to.chat_template = found.get<std::string>();
      if (found.is_array())
        for (const nlohmann::json& one : found)
          if (one.is_object() && one.value("name", nlohmann::json()) == "default" &&
              one.value("template", nlohmann::json()).is_string())
            to.chat_template = one["template"].get<std::string>();
    }
  }
  if (fs::exists(folder / "chat_template.jinja"))
    to.chat_template = io::read_file(folder / "chat_template.jinja", "chat template");
}

}  // namespace

bool TextModel::is_there(const fs::path& model) {
  std::error_code none;
  return is_gguf(model) || fs::exists(model / "tokenizer.json", none);
}

TextModel TextModel::open(const fs::path& model) {
  std::optional<TextModel> made;
  if (is_gguf(model)) {
    const io::GgufFile file = io::GgufFile::open(model);
    made = TextModel{.tokenizer = read_tokenizer(file)};
    if (file.has_key("tokenizer.chat_template")) made->chat_template = file.string("tokenizer.chat_template");
  } else {
    KVKEEP_REQUIRE(is_there(model), "text: ", model.string(),
                   " has no tokenizer; allowed a GGUF file, or a folder with tokenizer.json");
    made = TextModel{.tokenizer = Tokenizer::read(model / "tokenizer.json")};
  }
  const Tokenizer& tokenizer = made->tokenizer;
  if (const auto bos = tokenizer.bos()) made->context.bos = tokenizer.piece(*bos);
  if (const auto eos = tokenizer.eos()) made->context.eos = tokenizer.piece(*eos);
  if (!is_gguf(model)) read_chat(model, *made);
  return *std::move(made);
}

ChatTemplate TextModel::layout() const {
  KVKEEP_REQUIRE(!chat_template.empty(), "chat: the model has no chat template; allowed a prompt without one");
  return ChatTemplate::parse(chat_template, context);
}

std::vector<std::int32_t> TextModel::chat(std::span<const ChatMessage> messages) const {
  const ChatTemplate known = layout();
  const std::string rendered = known.render(messages);
  return tokenizer.encode(rendered, SpecialTokens::parsed, !known.begins_with_bos(rendered));
}

std::vector<std::int32_t> TextModel::turn(std::span<const ChatMessage> messages) const {
  KVKEEP_REQUIRE(messages.size() >= 2 && messages[messages.size() - 2].role == "assistant",
                 "chat: a turn follows an answer of the assistant; allowed messages whose last but one is its");
  // A mark stands for the answer: templates trim answers, or leave out what was thought.
  std::vector<ChatMessage> marked(messages.begin(), messages.end());
  std::string& mark = marked[marked.size() - 2].content = "answer";
  const std::string& last = marked.back().content;
  while (last.find(mark) != std::string::npos) mark += "-answer";
  const std::string rendered = layout().render(marked);
  const std::size_t at = rendered.rfind(mark);
  KVKEEP_REQUIRE(at != std::string::npos,
                 "chat: the model's template does not show answers of the assistant; allowed "
                 "one that does");
  return tokenizer.encode_continuation(std::string_view(rendered).substr(at + mark.size()));
}

}  // namespace kvkeep::lm
