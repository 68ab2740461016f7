// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <functional>
#include <unordered_set>

#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"
#include "kvlab/tokenizer.h"
#include "tokenizer_plan.h"

namespace kvkeep::lm::detail {
namespace {

enum TokenType : std::int32_t {
  kNormal = 1,
  kUnknown,
  kControl,
  kUserDefined,
  kUnused,
  kByte
};  // as GGUF numbers them

constexpr std::size_t kLongestWord = 256;  // finding a token's merges costs its length squared

// Byte-level BPE: merges as they are listed.
void read_merges(const TokenizerParts& parts, TokenizerPlan& plan) {
  const WordCut* cut = word_cut_called(parts.pre_tokenizer);
  KVKEEP_REQUIRE_AS(Unsupported, cut != nullptr, "read tokenizer: ", plan.where, " cuts words by the pre-tokenizer ",
                    io::shown(parts.pre_tokenizer), "; allowed ", word_cut_names());
  plan.cuts = cut->expressions;
  plan.normalizer.nfc = cut->nfc;
  plan.ignore_merges = cut->ignore_merges;
  plan.merges.reserve(parts.merges.size());
  for (const std::string& merge : parts.merges) {
    const std::size_t blank = merge.find(' ', 1);
    KVKEEP_REQUIRE(blank != std::string::npos, "read tokenizer: ", plan.where, " has the merge ", io::shown(merge),
                   "; allowed \"left right\"");
    plan.merges.push_back({std::string_view(merge).substr(0, blank), std::string_view(merge).substr(blank + 1),
                           static_cast<std::uint32_t>(plan.merges.size())});
  }
}

// SentencePiece: every two tokens that together are one merge, the highest score of what they become first.
void find_merges(const TokenizerParts& parts, TokenizerPlan& plan) {
  KVKEEP_REQUIRE(parts.scores.size() == parts.tokens.size(), "read tokenizer: ", plan.where, " has ",
                 parts.tokens.size(), " tokens and ", parts.scores.size(), " scores; allowed a score for each token");
  plan.alphabet = Alphabet::characters;
  plan.normalizer = {.blanks = true, .prefix = parts.add_space_prefix ? Prefix::always : Prefix::none};
  plan.strips_blank = parts.add_space_prefix;

  std::vector<float> ranks = parts.scores;
  for (const float score : ranks)
    KVKEEP_REQUIRE(std::isfinite(score), "read tokenizer: ", plan.where, " has the score ", score,
                   "; allowed finite numbers");
  std::sort(ranks.begin(), ranks.end(), std::greater<>());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());

  std::unordered_set<std::string_view> words;
  for (const auto& token : plan.vocabulary)
    if (token.is_word) words.insert(token.text);
  for (const auto& [id, whole, is_word] : plan.vocabulary) {
    if (!is_word) continue;
    KVKEEP_REQUIRE(whole.size() <= kLongestWord, "read tokenizer: ", plan.where, " has the token ", io::shown(whole),
                   " of ", whole.size(), " bytes; allowed at most ", kLongestWord);
    const auto rank =
        std::lower_bound(ranks.begin(), ranks.end(), parts.scores[static_cast<std::size_t>(id)], std::greater<>()) -
        ranks.begin();
    for (std::size_t at = 1; at < whole.size(); ++at)
      if (words.contains(whole.substr(0, at)) && words.contains(whole.substr(at)))
        plan.merges.push_back({whole.substr(0, at), whole.substr(at), static_cast<std::uint32_t>(rank)});
  }
}

}  // namespace

TokenizerPlan plan_of(const TokenizerParts& parts, const std::string& where) {
  KVKEEP_REQUIRE(parts.types.empty() || parts.types.size() == parts.tokens.size(), "read tokenizer: ", where, " has ",
                 parts.tokens.size(), " tokens and ", parts.types.size(),
                 " types; allowed a type for each token, or none");
  KVKEEP_REQUIRE(parts.tokens.size() < INT32_MAX, "read tokenizer: ", where, " has ", parts.tokens.size(),
                 " tokens; allowed below ", INT32_MAX);
  KVKEEP_REQUIRE_AS(Unsupported, parts.model == "gpt2" || parts.model == "llama", "read tokenizer: ", where,
                    " is of the model ", io::shown(parts.model),
                    "; allowed gpt2 (byte-level BPE) and llama (SentencePiece's BPE)");
  TokenizerPlan plan;
  plan.where = where;
  const bool characters = parts.model == "llama";
  plan.vocabulary.reserve(parts.tokens.size());
  for (std::size_t id = 0; id < parts.tokens.size(); ++id) {
    const std::int32_t type = parts.types.empty() ? kNormal : parts.types[id];
    KVKEEP_REQUIRE(type >= kNormal && type <= kByte, "read tokenizer: ", where, " gives the token ", id, " the type ",
                   type, "; allowed 1 to 6");
    const bool special = type == kControl || type == kUnknown;
    const bool is_word = type == kNormal || (characters ? type == kUnused : type == kByte);
    plan.vocabulary.push_back({static_cast<std::int64_t>(id), parts.tokens[id], is_word});
    if (special || type == kUserDefined)
      plan.added.push_back(
          {{.id = static_cast<std::int32_t>(id), .text = parts.tokens[id], .special = special}, false});
  }
  if (characters)
    find_merges(parts, plan);
  else
    read_merges(parts, plan);
  plan.bos = parts.bos;
  plan.eos = parts.eos;
  plan.eot = parts.eot;
  plan.add_bos = parts.add_bos;
  return plan;
}

}  // namespace kvkeep::lm::detail
