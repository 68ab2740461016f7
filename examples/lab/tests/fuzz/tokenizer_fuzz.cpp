// SPDX-License-Identifier: Apache-2.0
// Whatever the bytes, as a tokenizer.json, as the parts of one, or as a text: a tokenizer whose ids are its own, or a
// sentence; and the text comes back.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvlab/tokenizer.h"
#include "spelling.h"
#include "utf8.h"

namespace {

using namespace kvkeep;
using lm::SpecialTokens;
using lm::Tokenizer;
using lm::TokenizerParts;

// All expressions; only "qwen2" changes text. "" is SentencePiece.
constexpr const char* kPreTokenizers[] = {
    "gpt-2",       "smollm",       "llama-bpe",      "qwen2",  "qwen35",  "tekken", "gpt-4o",
    "deepseek-v3", "deepseek-llm", "deepseek-coder", "falcon", "default", ""};

void require(bool holds) {
  if (!holds) std::abort();
}

// A token for each byte, as 0 to 255.
TokenizerParts bytes_alone(const std::string& pre) {
  TokenizerParts parts;
  parts.pre_tokenizer = pre;
  if (pre.empty()) {
    parts.model = "llama";
    constexpr const char* kDigits = "0123456789ABCDEF";
    for (int byte = 0; byte < 256; ++byte)
      parts.tokens.push_back({'<', '0', 'x', kDigits[byte / 16], kDigits[byte % 16], '>'});
    return parts;
  }
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool itself = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    parts.tokens.emplace_back();
    lm::detail::append_utf8(parts.tokens.back(), itself ? byte : next++);
  }
  return parts;
}

// What must hold of any tokenizer and any text.
void check(const Tokenizer& tokenizer, std::string_view text) {
  for (const SpecialTokens special : {SpecialTokens::parsed, SpecialTokens::plain}) {
    const std::vector<std::int32_t> ids = tokenizer.encode(text, special);
    for (const std::int32_t id : ids) require(id >= 0 && id < tokenizer.vocab_size());
    lm::StreamDecoder stream(tokenizer);
    std::string streamed;
    for (const std::int32_t id : ids) streamed += stream.push(id);
    require(streamed + stream.finish() == lm::detail::replaced_utf8(tokenizer.decode_continuation(ids)));
  }
}

void check_round_trip(const Tokenizer& tokenizer, std::string_view text, const std::string& pre) {
  const bool nfc = pre == "qwen2";
  std::string clean = lm::detail::replaced_utf8(text);
  require(lm::detail::is_utf8(clean) && lm::detail::is_utf8(text) == (clean == text));
  if (pre.empty()) clean = lm::detail::with_blanks(clean);
  require(tokenizer.decode(tokenizer.encode(text)) == (nfc ? lm::detail::nfc(clean) : clean));
  if (nfc) require(lm::detail::nfc(lm::detail::nfc(clean)) == lm::detail::nfc(clean));
}

// Lines: 'm' a merge whose token is added, 't' a token, 's' one with its first byte as score, 'c' a control token, 'u'
// a user-defined one, 'x' a merge as it stands; the rest is text.
void check_parts(std::string_view bytes) {
  const std::string pre =
      kPreTokenizers[bytes.empty() ? 0 : static_cast<unsigned char>(bytes[0]) % std::size(kPreTokenizers)];
  TokenizerParts parts = bytes_alone(pre);
  parts.types.assign(parts.tokens.size(), pre.empty() ? 6 : 1);
  parts.scores.resize(parts.tokens.size());
  std::string text;
  bool finds_tokens = false;  // which come back as they are stored, not as they stood in the text
  while (!bytes.empty()) {
    const std::string_view line = bytes.substr(0, bytes.find('\n'));
    bytes.remove_prefix(std::min(bytes.size(), line.size() + 1));
    const std::string rest(line.substr(std::min<std::size_t>(1, line.size())));
    const char kind = line.empty() ? 'e' : line[0];
    const auto token = [&](const std::string& written, std::int32_t type) {
      if (std::find(parts.tokens.begin(), parts.tokens.end(), written) != parts.tokens.end()) return;
      parts.tokens.push_back(written);
      parts.types.push_back(type);
      parts.scores.push_back(kind == 's' ? static_cast<float>(static_cast<signed char>(rest[0])) : 0);
    };
    if (kind == 'm' && rest.size() >= 3 && rest.find(' ', 1) != std::string::npos) {
      std::string both = rest;
      both.erase(rest.find(' ', 1), 1);
      token(both, 1);
    }
    if (kind == 'm' || kind == 'x')
      parts.merges.push_back(rest);
    else if (kind == 't')
      token(rest, 1);
    else if (kind == 's' && !rest.empty())
      token(rest.substr(1), 1);
    else if (kind == 'c')
      token(rest, 3);
    else if (kind == 'u')
      token(rest, 4);
    else if (kind == 'b')
      parts.bos = static_cast<std::int32_t>(rest.size()) - 1;
    else
      text += rest;
    finds_tokens |= kind == 'c' || kind == 'u';
  }
  try {
    const Tokenizer tokenizer = Tokenizer::from_parts(parts);
    check(tokenizer, text);
    if (!finds_tokens) check_round_trip(tokenizer, text, pre);
  } catch (const InvalidArgument& refused) {
    require(std::string_view(refused.what()).starts_with("read tokenizer: "));
  }
}

void check_json(std::string_view bytes) {
  try {
    const Tokenizer tokenizer = Tokenizer::from_json(bytes);
    check(tokenizer, bytes.substr(0, 4096));
    check(tokenizer, "It's 2024, <|im_end|>h\xc3\xa9llo \xf0\x9f\x99\x82\r\n\r\n  end");
  } catch (const Error& refused) {
    require(std::string_view(refused.what()).starts_with("read tokenizer: "));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  static const std::vector<Tokenizer> plain = [] {
    std::vector<Tokenizer> tokenizers;
    for (const char* pre : kPreTokenizers) {
      TokenizerParts parts = bytes_alone(pre);
      parts.scores.resize(parts.tokens.size());
      tokenizers.push_back(Tokenizer::from_parts(parts));
    }
    return tokenizers;
  }();
  const std::size_t one = size == 0 ? 0 : data[0] % plain.size();
  check_round_trip(plain[one], bytes, kPreTokenizers[one]);
  check_parts(bytes);
  check_json(bytes);
  return 0;
}
