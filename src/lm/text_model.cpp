#include "kvkeep/lm/text_model.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "kvkeep/core/error.h"
#include "kvkeep/io/gguf.h"
#include "pre_tokenizer.h"
#include "read_file.h"
#include "untrusted_json.h"

namespace kvkeep::lm {
namespace {

namespace fs = std::filesystem;

bool is_gguf(const fs::path& model) {  // as LmConfig::read() decides
  std::error_code none;
  return fs::is_regular_file(model, none);
}

std::optional<std::int32_t> token_called(const io::GgufFile& file, std::string_view key, std::size_t tokens) {
  if (!file.has_key(key)) return std::nullopt;
  const std::uint64_t id = file.whole_number(key);
  KVKEEP_REQUIRE(id < tokens, "read GGUF: ", key, " of ", file.where(), " is ", id, "; allowed ids below its ", tokens,
                 " tokens");
  return static_cast<std::int32_t>(id);
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

Tokenizer read_tokenizer(const io::GgufFile& file) {
  for (const char* key : {"tokenizer.ggml.add_eos_token", "tokenizer.ggml.remove_extra_whitespaces"})
    KVKEEP_REQUIRE_AS(Unsupported, !file.has_key(key) || !file.truth(key), "read GGUF: ", key, " of ", file.where(),
                      " is true; allowed false");
  TokenizerParts parts;
  parts.model = file.string("tokenizer.ggml.model");
  const bool characters = parts.model == "llama";
  const auto truth = [&](const char* key, bool otherwise) { return file.has_key(key) ? file.truth(key) : otherwise; };
  const auto copy = [](const std::vector<std::string_view>& views) {
    return std::vector<std::string>(views.begin(), views.end());
  };
  parts.tokens = copy(file.strings("tokenizer.ggml.tokens"));
  if (characters)
    for (const double score : file.numbers("tokenizer.ggml.scores")) parts.scores.push_back(static_cast<float>(score));
  else
    parts.merges = copy(file.strings("tokenizer.ggml.merges"));
  parts.add_space_prefix = truth("tokenizer.ggml.add_space_prefix", characters);
  parts.pre_tokenizer = file.has_key("tokenizer.ggml.pre") ? std::string(file.string("tokenizer.ggml.pre")) : "gpt-2";
  if (file.has_key("tokenizer.ggml.token_type"))
    for (const std::int64_t type : file.whole_numbers("tokenizer.ggml.token_type")) {
      KVKEEP_REQUIRE(type >= 1 && type <= 6, "read GGUF: ", file.where(), " has a token of type ", type,
                     "; allowed 1 (normal) to 6 (byte)");
      parts.types.push_back(static_cast<std::int32_t>(type));
    }
  parts.bos = token_called(file, "tokenizer.ggml.bos_token_id", parts.tokens.size());
  parts.eos = token_called(file, "tokenizer.ggml.eos_token_id", parts.tokens.size());
  parts.eot = token_called(file, "tokenizer.ggml.eot_token_id", parts.tokens.size());
  const detail::WordCut* cut = detail::word_cut_called(parts.pre_tokenizer);
  parts.add_bos =
      truth("tokenizer.ggml.add_bos_token", (characters || (cut != nullptr && cut->adds_bos)) && parts.bos.has_value());
  return Tokenizer::from_parts(parts, file.where());
}

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
