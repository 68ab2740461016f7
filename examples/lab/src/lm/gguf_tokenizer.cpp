// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/core/error.h"
#include "kvkeep/io/gguf.h"
#include "kvlab/text_model.h"
#include "pre_tokenizer.h"

namespace kvkeep::lm {
namespace {

std::optional<std::int32_t> token_called(const io::GgufFile& file, std::string_view key, std::size_t tokens) {
  if (!file.has_key(key)) return std::nullopt;
  const std::uint64_t id = file.whole_number(key);
  KVKEEP_REQUIRE(id < tokens, "read GGUF: ", key, " of ", file.where(), " is ", id, "; allowed ids below its ", tokens,
                 " tokens");
  return static_cast<std::int32_t>(id);
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

}  // namespace kvkeep::lm
