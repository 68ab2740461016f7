// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A checked tokenizer.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "added_tokens.h"
#include "bpe.h"
#include "pre_tokenizer.h"
#include "tokenizer_plan.h"

namespace kvkeep::lm::detail {

struct TokenizerData {
  static constexpr std::int32_t kNone = -1;

  /// Throws InvalidArgument if the plan contradicts itself, before taking memory for more than it lists.
  explicit TokenizerData(const TokenizerPlan& plan);
  TokenizerData(const TokenizerData&) = delete;
  TokenizerData& operator=(const TokenizerData&) = delete;

  std::vector<std::string> pieces;                           ///< [ids] bytes; empty if an id has no token
  std::vector<bool> special;                                 ///< [ids]
  std::unordered_map<std::string_view, std::int32_t> words;  ///< by bytes, into `pieces`: tokens that text may become
  std::unordered_map<std::string, std::int32_t> added;       ///< by text
  std::array<std::int32_t, 256> byte_tokens;                 ///< kNone if there is none
  Merges merges;
  AddedTokens as_written, normalized;  ///< found before `normalizer` and after it
  Alphabet alphabet;
  Spelling normalizer, metaspace;
  PreTokenizer pre;
  bool ignore_merges, fuse_unknown, add_bos, strips_blank;
  std::int32_t unknown = kNone;  ///< for bytes without a token
  std::optional<std::int32_t> bos, eos, eot;
  std::vector<std::int32_t> end_tokens;

 private:
  using IdsByText = std::unordered_map<std::string_view, std::int32_t>;

  [[nodiscard]] IdsByText take_vocabulary(const TokenizerPlan& plan);
  void take_token(const TokenizerPlan::Token& token);
  void take_merges(const TokenizerPlan& plan, const IdsByText& ids);
  void take_added(const TokenizerPlan& plan, const IdsByText& ids);
  void take_named(const TokenizerPlan& plan, const IdsByText& ids);
};

}  // namespace kvkeep::lm::detail
