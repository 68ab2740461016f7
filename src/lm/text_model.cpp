#include "kvkeep/lm/text_model.h"

#include <nlohmann/json.hpp>

#include "kvkeep/core/error.h"
#include "kvkeep/io/gguf.h"
#include "read_file.h"
#include "untrusted_json.h"

namespace kvkeep::lm {
namespace {

namespace fs = std::filesystem;

bool is_gguf(const fs::path& model) {  // as LmConfig::read() decides
  std::error_code none;
  return fs::is_regular_file(model, none);
}

// The template of a Hugging Face folder: a file of its own, or in tokenizer_config.json, alone or as "default" in a
// list.
std::string folder_template(const fs::path& folder) {
  if (fs::exists(folder / "chat_template.jinja")) return io::read_file(folder / "chat_template.jinja", "chat template");
  const fs::path config = folder / "tokenizer_config.json";
  if (!fs::exists(config)) return {};
  const nlohmann::json parsed =
      io::read_json(io::read_file(config, "tokenizer config"), "read " + config.string(), io::RepeatedNames::refused);
  if (!parsed.is_object() || !parsed.contains("chat_template")) return {};
  const nlohmann::json& found = parsed["chat_template"];
  if (found.is_string()) return found.get<std::string>();
  if (found.is_array())
    for (const nlohmann::json& one : found)
      if (one.is_object() && one.value("name", nlohmann::json()) == "default" &&
          one.value("template", nlohmann::json()).is_string())
        return one["template"].get<std::string>();
  return {};
}

}  // namespace

bool TextModel::is_there(const fs::path& model) {
  std::error_code none;
  return is_gguf(model) || fs::exists(model / "tokenizer.json", none);
}

TextModel TextModel::open(const fs::path& model) {
  if (is_gguf(model)) {
    const io::GgufFile file = io::GgufFile::open(model);
    return {read_tokenizer(file), file.has_key("tokenizer.chat_template")
                                      ? std::string(file.string("tokenizer.chat_template"))
                                      : std::string()};
  }
  KVKEEP_REQUIRE(is_there(model), "text: ", model.string(),
                 " has no tokenizer; allowed a GGUF file, or a folder with tokenizer.json");
  return {Tokenizer::read(model / "tokenizer.json"), folder_template(model)};
}

ChatTemplate TextModel::layout() const {
  KVKEEP_REQUIRE(!chat_template.empty(), "chat: the model has no chat template; allowed a prompt without one");
  const std::optional<std::int32_t> bos = tokenizer.bos();
  return bos ? ChatTemplate::recognise(chat_template, tokenizer.piece(*bos)) : ChatTemplate::recognise(chat_template);
}

std::vector<std::int32_t> TextModel::chat(std::span<const ChatMessage> messages) const {
  const ChatTemplate known = layout();
  return tokenizer.encode(known.render(messages), SpecialTokens::parsed, !known.writes_bos());
}

}  // namespace kvkeep::lm
