// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A tokenizer.json as llama.cpp's converter would write it.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gguf_parts.h"
#include "kvkeep/core/error.h"

namespace kvkeep::testing {

/// `pre`: the name of its pre-tokenizer; `leave_out`: a key behind "tokenizer.ggml." that is not written.
inline void with_tokenizer_of(GgufParts& parts, const std::string& tokenizer_json, const std::string& pre,
                              const std::string& leave_out = "") {
  const nlohmann::json whole = nlohmann::json::parse(tokenizer_json);
  std::vector<std::string> tokens, merges;
  std::vector<std::int32_t> types;
  const auto put = [&](std::size_t id, const std::string& piece, std::int32_t type) {
    if (tokens.size() <= id) {
      tokens.resize(id + 1);
      types.resize(id + 1, 5);
    }
    tokens[id] = piece;
    types[id] = type;
  };
  for (const auto& [piece, id] : whole["model"]["vocab"].items()) put(id, piece, 1);
  for (const nlohmann::json& added : whole["added_tokens"])
    put(added["id"], added["content"], added["special"].get<bool>() ? 3 : 4);
  for (const nlohmann::json& merge : whole["model"]["merges"])
    merges.push_back(merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  for (std::size_t id = 0; id < tokens.size(); ++id)
    if (types[id] == 5) tokens[id] = text("[unused", id, "]");
  const auto unless = [&](const std::string& key, const auto& write) {
    if (key != leave_out) write("tokenizer.ggml." + key);
  };
  unless("model", [&](const std::string& key) { parts.text(key, "gpt2"); });
  unless("pre", [&](const std::string& key) { parts.text(key, pre); });
  unless("tokens", [&](const std::string& key) { parts.texts(key, tokens); });
  unless("merges", [&](const std::string& key) { parts.texts(key, merges); });
  unless("token_type", [&](const std::string& key) { parts.list(key, gguf::i32, types); });
}

}  // namespace kvkeep::testing
