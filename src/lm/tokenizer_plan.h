#pragma once
/// What a source says about a tokenizer, before any of it is checked.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "added_tokens.h"
#include "pre_tokenizer.h"

namespace kvkeep::lm::detail {

/// Views into the source: a plan does not outlive it.
struct TokenizerPlan {
  struct Token {
    std::int64_t id = 0;
    std::string_view text;  ///< in GPT-2's alphabet
    bool is_word = true;    ///< a whole word may become it under `ignore_merges`
  };
  struct Added {
    AddedToken token;
    bool normalized = false;  ///< found in text after NFC
  };
  struct Pair {
    std::string_view left, right;
  };

  std::string where;
  std::vector<Token> vocabulary;
  std::vector<Added> added;  ///< `id` is one of the vocabulary, with the same text, or a new one
  std::vector<Pair> merges;
  PreTokenizer pre = PreTokenizer::gpt2;
  bool nfc = false;
  bool ignore_merges = false;                    ///< a word that is a token is not merged
  std::optional<std::string_view> unknown = {};  ///< the token for bytes without one
  bool fuse_unknown = false;
  std::optional<std::int64_t> bos = {}, eos = {}, eot = {};
  bool add_bos = false;
};

/// What a parsed tokenizer.json says; it must outlive the plan. Throws as Tokenizer::from_json() does for anything that
/// there is no code for.
[[nodiscard]] TokenizerPlan plan_of(const nlohmann::json& json, const std::string& where);

}  // namespace kvkeep::lm::detail
