// SPDX-License-Identifier: Apache-2.0
#include "tokenizer_data.h"

#include <algorithm>

#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"
#include "utf8.h"

namespace kvkeep::lm::detail {
namespace {

// Ids may have gaps, but not such that a small source takes much memory.
constexpr std::int64_t kIdsPerToken = 16;

// GPT-2's alphabet: printable bytes of Latin-1 are written as themselves, the others as U+0100 and up, in order.
constexpr bool stands_for_itself(int byte) { return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad); }

constexpr std::array<std::int16_t, 0x144> kByteOf = [] {
  std::array<std::int16_t, 0x144> bytes{};
  for (auto& byte : bytes) byte = -1;
  std::size_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte)
    bytes[stands_for_itself(byte) ? static_cast<std::size_t>(byte) : next++] = static_cast<std::int16_t>(byte);
  return bytes;
}();

/// The bytes that a token's text represents; nothing if it has a character outside the alphabet.
std::optional<std::string> bytes_of(std::string_view written) {
  std::string bytes;
  if (!is_utf8(written)) return std::nullopt;
  for (std::size_t at = 0; at < written.size();) {
    const Character c = character_at(written, at);
    if (c.code >= kByteOf.size() || kByteOf[c.code] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kByteOf[c.code]));
    at += c.bytes;
  }
  return bytes;
}

/// The byte of "<0x0A>"; nothing for another text.
std::optional<unsigned char> byte_called(std::string_view written) {
  if (written.size() != 6 || !written.starts_with("<0x") || written[5] != '>') return std::nullopt;
  unsigned value = 0;
  for (const char c : written.substr(3, 2)) {
    if (!(c >= '0' && c <= '9') && !(c >= 'A' && c <= 'F')) return std::nullopt;
    value = value * 16 + static_cast<unsigned>(c <= '9' ? c - '0' : c - 'A' + 10);
  }
  return static_cast<unsigned char>(value);
}

}  // namespace

TokenizerData::TokenizerData(const TokenizerPlan& plan)
    : merges(plan.merges.size()),
      alphabet(plan.alphabet),
      normalizer(plan.normalizer),
      metaspace(plan.metaspace),
      pre(plan.cuts),
      ignore_merges(plan.ignore_merges),
      fuse_unknown(plan.fuse_unknown),
      add_bos(plan.add_bos),
      strips_blank(plan.strips_blank) {
  const IdsByText ids = take_vocabulary(plan);
  take_merges(plan, ids);
  take_added(plan, ids);
  take_named(plan, ids);
}

TokenizerData::IdsByText TokenizerData::take_vocabulary(const TokenizerPlan& plan) {
  const auto tokens = static_cast<std::int64_t>(plan.vocabulary.size() + plan.added.size());
  const std::int64_t most = std::min<std::int64_t>(kIdsPerToken * tokens, INT32_MAX);
  std::int64_t ids = 0;
  const auto count = [&](std::int64_t id, std::string_view written) {
    KVKEEP_REQUIRE(id >= 0 && id < most, "read tokenizer: ", plan.where, " gives ", io::shown(written), " the id ", id,
                   "; allowed ids below ", most, ", since it has ", tokens, " tokens");
    ids = std::max(ids, id + 1);
  };
  for (const auto& token : plan.vocabulary) count(token.id, token.text);
  for (const auto& added_token : plan.added) count(added_token.token.id, added_token.token.text);

  pieces.resize(static_cast<std::size_t>(ids));
  special.resize(pieces.size());
  byte_tokens.fill(kNone);
  std::vector<bool> taken(pieces.size());
  IdsByText by_text(plan.vocabulary.size());
  for (const auto& token : plan.vocabulary) {
    const auto place = static_cast<std::size_t>(token.id);
    const auto id = static_cast<std::int32_t>(token.id);
    KVKEEP_REQUIRE(!taken[place], "read tokenizer: ", plan.where, " gives ", io::shown(token.text), " the id ", id,
                   ", which another token has; allowed one token per id");
    taken[place] = true;
    KVKEEP_REQUIRE(by_text.emplace(token.text, id).second, "read tokenizer: ", plan.where, " has ",
                   io::shown(token.text), " twice, the second time with id ", id, "; allowed once");
    take_token(token);
  }
  const bool in_bytes = alphabet == Alphabet::bytes;
  for (int byte = in_bytes ? ' ' : 0; byte <= (in_bytes ? '~' : 255); ++byte)
    KVKEEP_REQUIRE(byte_tokens[static_cast<std::size_t>(byte)] != kNone, "read tokenizer: ", plan.where,
                   " has no token for the byte ", byte, in_bytes ? text(" ('", static_cast<char>(byte), "')") : "",
                   in_bytes ? "; allowed vocabularies of byte-level BPE, which have one for each printable ASCII "
                              "character"
                            : "; allowed vocabularies of SentencePiece with <0x00> to <0xFF>");
  return by_text;
}

void TokenizerData::take_token(const TokenizerPlan::Token& token) {
  std::string& piece = pieces[static_cast<std::size_t>(token.id)];
  const auto id = static_cast<std::int32_t>(token.id);
  if (alphabet == Alphabet::bytes) {
    const std::optional<std::string> bytes = token.is_word ? bytes_of(token.text) : std::nullopt;
    piece = bytes.value_or(std::string(token.text));
    if (!bytes || bytes->empty()) return;
    words.emplace(piece, id);
    if (bytes->size() == 1) byte_tokens[static_cast<unsigned char>(piece[0])] = id;
  } else if (const std::optional<unsigned char> byte = byte_called(token.text)) {
    piece = static_cast<char>(*byte);
    byte_tokens[*byte] = id;
  } else {
    piece = token.is_word ? with_blanks(token.text) : std::string(token.text);
    if (token.is_word && !piece.empty() && token.text.find(' ') == std::string_view::npos) words.emplace(piece, id);
  }
}

void TokenizerData::take_merges(const TokenizerPlan& plan, const IdsByText& ids) {
  KVKEEP_REQUIRE(plan.merges.size() < UINT32_MAX, "read tokenizer: ", plan.where, " has ", plan.merges.size(),
                 " merges; allowed below ", UINT32_MAX);
  std::string both;
  for (const auto& pair : plan.merges) {
    both.assign(pair.left).append(pair.right);
    const auto id_of = [&](std::string_view written) {
      const auto found = ids.find(written);
      KVKEEP_REQUIRE(found != ids.end(), "read tokenizer: ", plan.where, " merges ", io::shown(pair.left), " and ",
                     io::shown(pair.right), ", but has no token ", io::shown(written),
                     "; allowed merges of tokens into a token");
      return found->second;
    };
    merges.put(id_of(pair.left), id_of(pair.right), {pair.rank, id_of(both)});
  }
}

void TokenizerData::take_added(const TokenizerPlan& plan, const IdsByText& ids) {
  std::vector<AddedToken> before, after;
  std::string room;
  auto next = static_cast<std::int64_t>(
      plan.vocabulary.size());  // the package numbers new tokens this way, whatever the file says
  std::vector<bool> taken(pieces.size());
  for (const auto& token : plan.vocabulary) taken[static_cast<std::size_t>(token.id)] = true;
  for (const auto& [token, is_normalized] : plan.added) {
    const auto known = ids.find(token.text);
    const auto place = static_cast<std::size_t>(token.id);
    const auto shown = [&text = token.text] { return io::shown(text); };
    KVKEEP_REQUIRE(is_utf8(token.text) && !token.text.empty() && token.text.size() <= kLongestAddedToken,
                   "read tokenizer: ", plan.where, " has the added token ", shown(), " of ", token.text.size(),
                   " bytes; allowed 1 to ", kLongestAddedToken, " bytes of UTF-8");
    KVKEEP_REQUIRE(added.emplace(token.text, token.id).second, "read tokenizer: ", plan.where, " adds the token ",
                   shown(), " twice; allowed once");
    if (known != ids.end()) {
      KVKEEP_REQUIRE(known->second == token.id, "read tokenizer: ", plan.where, " has the token ", shown(), " with id ",
                     known->second, " and adds it with id ", token.id, "; allowed one id");
    } else {
      KVKEEP_REQUIRE(token.id == next && !taken[place], "read tokenizer: ", plan.where, " adds the token ", shown(),
                     " with id ", token.id, "; allowed ", next,
                     ", the first after the tokens before it, if it is free");
      taken[place] = true;
      pieces[place] = alphabet == Alphabet::bytes ? bytes_of(token.text).value_or(token.text) : with_blanks(token.text);
    }
    next = std::max(next, token.id + std::int64_t{1});
    special[place] = token.special;
    auto& found = is_normalized ? after : before;
    found.push_back(token);
    if (is_normalized) found.back().text = normalizer.of(token.text, Before::nothing, room);
  }
  // Of two tokens that are the same after the normalizer, a control token is found.
  std::stable_partition(after.begin(), after.end(), [](const AddedToken& token) { return token.special; });
  as_written = AddedTokens(std::move(before));
  normalized = AddedTokens(std::move(after));
}

void TokenizerData::take_named(const TokenizerPlan& plan, const IdsByText& ids) {
  if (plan.unknown) {
    const auto found = ids.find(*plan.unknown);
    KVKEEP_REQUIRE(found != ids.end(), "read tokenizer: ", plan.where, " has the unk_token ", io::shown(*plan.unknown),
                   ", which is not a token of its vocabulary; allowed one that is");
    unknown = found->second;
  }
  const auto named = [&](const std::optional<std::int64_t>& id, const char* name) -> std::optional<std::int32_t> {
    if (!id) return std::nullopt;
    const bool exists = *id >= 0 && *id < static_cast<std::int64_t>(pieces.size());
    KVKEEP_REQUIRE(exists, "read tokenizer: ", plan.where, " names ", *id, " as its ", name, " token; allowed 0 to ",
                   pieces.size() - 1);
    return static_cast<std::int32_t>(*id);
  };
  bos = named(plan.bos, "bos");
  eos = named(plan.eos, "eos");
  eot = named(plan.eot, "eot");
  KVKEEP_REQUIRE(!add_bos || bos, "read tokenizer: ", plan.where,
                 " puts a bos token in front but names none; allowed with one");
  for (const auto& id : {eos, eot})
    if (id) end_tokens.push_back(*id);
  for (const char* name :
       {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<end_of_turn>"})
    if (const auto found = added.find(name); found != added.end() && special[static_cast<std::size_t>(found->second)])
      end_tokens.push_back(found->second);
  std::sort(end_tokens.begin(), end_tokens.end());
  end_tokens.erase(std::unique(end_tokens.begin(), end_tokens.end()), end_tokens.end());
}

}  // namespace kvkeep::lm::detail
