// SPDX-License-Identifier: Apache-2.0
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
#include "spelling.h"

namespace kvkeep::lm {
struct TokenizerParts;
}

namespace kvkeep::lm::detail {

/// How tokens are written.
enum class Alphabet : std::uint8_t {
  bytes,       ///< byte-level BPE: GPT-2's, a character for each byte
  characters,  ///< SentencePiece: themselves, blanks as U+2581, and <0x00> to <0xFF> for what has no token
};

/// Views into the source: a plan does not outlive it.
struct TokenizerPlan {
  struct Token {
    std::int64_t id = 0;
    std::string_view text;  ///< in the alphabet
    bool is_word = true;    ///< text may become it; what it is of the others is their text as it stands
  };
  struct Added {
    AddedToken token;
    bool normalized = false;  ///< found in text as `normalizer` writes it
  };
  struct Pair {
    std::string_view left, right;
    std::uint32_t rank = 0;  ///< the least merges first, of equal ones the leftmost
  };

  std::string where;
  Alphabet alphabet = Alphabet::bytes;
  std::vector<Token> vocabulary;
  std::vector<Added> added;  ///< `id` is one of the vocabulary, with the same text, or a new one
  std::vector<Pair> merges;
  std::vector<std::string_view> cuts;            ///< a PreTokenizer's
  Spelling normalizer;                           ///< before tokens that are `normalized` are found
  Spelling metaspace;                            ///< after it
  bool strips_blank = false;                     ///< decoding leaves out a blank in front
  bool ignore_merges = false;                    ///< a word that is a token is not merged
  std::optional<std::string_view> unknown = {};  ///< the token for bytes without one
  bool fuse_unknown = false;
  std::optional<std::int64_t> bos = {}, eos = {}, eot = {};
  bool add_bos = false;
};

/// What a parsed tokenizer.json says; it must outlive the plan. Throws as Tokenizer::from_json() does for anything that
/// there is no code for.
[[nodiscard]] TokenizerPlan plan_of(const nlohmann::json& json, const std::string& where);

/// What the parts say; they must outlive the plan. Throws as Tokenizer::from_parts() does.
[[nodiscard]] TokenizerPlan plan_of(const TokenizerParts& parts, const std::string& where);

}  // namespace kvkeep::lm::detail
