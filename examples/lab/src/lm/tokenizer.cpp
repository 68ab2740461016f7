// SPDX-License-Identifier: Apache-2.0
#include "kvlab/tokenizer.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/untrusted_json.h"
#include "tokenizer_data.h"
#include "utf8.h"

namespace kvkeep::lm {
namespace {

using detail::Alphabet;
using detail::Before;
using detail::TokenizerData;

/// One call of encode(): text in, ids out.
class Encoder {
 public:
  Encoder(const TokenizerData& data, std::vector<std::int32_t>& out) : data_(data), out_(out) {}

  void text(std::string_view utf8, bool specials, Before before) {
    for (const auto& part : data_.as_written.split(utf8, specials)) {
      const Before here = part.begin == 0 ? before : Before::token;
      if (part.id >= 0)
        out_.push_back(part.id);
      else
        normal_text(data_.normalizer.of(utf8.substr(part.begin, part.end - part.begin), here, normal_), specials, here);
    }
  }

 private:
  void normal_text(std::string_view utf8, bool specials, Before before) {
    for (const auto& part : data_.normalized.split(utf8, specials)) {
      const Before here = part.begin == 0 ? before : Before::token;
      if (part.id >= 0)
        out_.push_back(part.id);
      else
        data_.pre.cut(data_.metaspace.of(utf8.substr(part.begin, part.end - part.begin), here, spelled_),
                      [this](std::string_view found) { word(found); });
    }
  }

  void word(std::string_view bytes) {
    if (data_.ignore_merges) {
      if (const auto found = data_.words.find(bytes); found != data_.words.end()) {
        out_.push_back(found->second);
        return;
      }
    }
    symbols_.clear();
    if (data_.alphabet == Alphabet::bytes)
      take_bytes(bytes);
    else
      take_characters(bytes);
    data_.merges.apply(symbols_, out_, scratch_);
  }

  void take_bytes(std::string_view bytes) {
    bool last_unknown = false;
    for (const char byte : bytes) {
      const std::int32_t token = data_.byte_tokens[static_cast<unsigned char>(byte)];
      if (token != TokenizerData::kNone)
        symbols_.push_back(token);
      else if (data_.unknown != TokenizerData::kNone && !(last_unknown && data_.fuse_unknown))
        symbols_.push_back(data_.unknown);
      last_unknown = token == TokenizerData::kNone;
    }
  }

  void take_characters(std::string_view utf8) {
    for (std::size_t at = 0; at < utf8.size();) {
      const std::string_view character = utf8.substr(at, detail::character_at(utf8, at).bytes);
      if (const auto found = data_.words.find(character); found != data_.words.end())
        symbols_.push_back(found->second);
      else
        take_bytes(character);
      at += character.size();
    }
  }

  const TokenizerData& data_;
  std::vector<std::int32_t>& out_;
  std::vector<std::int32_t> symbols_;
  std::string normal_, spelled_;
  detail::Merges::Scratch scratch_;
};

}  // namespace

Tokenizer Tokenizer::read(const std::filesystem::path& file) {
  return from_json(io::read_file(file, "read tokenizer"), file.string());
}

Tokenizer Tokenizer::from_json(std::string_view json, const std::string& where) {
  constexpr std::size_t kMost = std::size_t{256} << 20U;
  KVKEEP_REQUIRE(json.size() <= kMost, "read tokenizer: ", where, " has ", json.size(), " bytes; allowed at most ",
                 kMost);
  const nlohmann::json parsed = io::read_json(json, "read tokenizer: " + where, io::RepeatedNames::refused);
  return Tokenizer(std::make_shared<const TokenizerData>(detail::plan_of(parsed, where)));
}

Tokenizer Tokenizer::from_parts(const TokenizerParts& parts, const std::string& where) {
  return Tokenizer(std::make_shared<const TokenizerData>(detail::plan_of(parts, where)));
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view utf8, SpecialTokens special, bool add_bos) const {
  std::vector<std::int32_t> out;
  if (add_bos && data_->add_bos) out.push_back(*data_->bos);
  append(out, utf8, special, Before::nothing);
  return out;
}

std::vector<std::int32_t> Tokenizer::encode_continuation(std::string_view utf8, SpecialTokens special) const {
  std::vector<std::int32_t> out;
  append(out, utf8, special, Before::text);
  return out;
}

void Tokenizer::append(std::vector<std::int32_t>& ids, std::string_view utf8, SpecialTokens special,
                       Before before) const {
  constexpr std::size_t kMost = INT32_MAX / 3;  // U+FFFD and NFC make one byte at most three
  KVKEEP_REQUIRE(utf8.size() <= kMost, "encode: the text has ", utf8.size(), " bytes; allowed at most ", kMost);
  ids.reserve(utf8.size() / 4 + 2);
  Encoder encoder(*data_, ids);
  const bool specials = special == SpecialTokens::parsed;
  if (detail::is_utf8(utf8))
    encoder.text(utf8, specials, before);
  else
    encoder.text(detail::replaced_utf8(utf8), specials, before);
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string out = decode_continuation(ids);
  if (data_->strips_blank && out.starts_with(' ')) out.erase(0, 1);
  return out;
}

std::string Tokenizer::decode_continuation(std::span<const std::int32_t> ids) const {
  std::string out;
  for (const std::int32_t id : ids) out += piece(id);
  return out;
}

std::string_view Tokenizer::piece(std::int32_t id) const {
  KVKEEP_REQUIRE(id >= 0, "decode: given the token id ", id, "; allowed 0 and above");
  return id < vocab_size() ? std::string_view(data_->pieces[static_cast<std::size_t>(id)]) : std::string_view();
}

std::optional<std::int32_t> Tokenizer::id_of(std::string_view piece) const {
  if (const auto found = data_->added.find(std::string(piece)); found != data_->added.end()) return found->second;
  if (const auto found = data_->words.find(piece); found != data_->words.end()) return found->second;
  return std::nullopt;
}

std::int32_t Tokenizer::vocab_size() const { return static_cast<std::int32_t>(data_->pieces.size()); }
bool Tokenizer::is_special(std::int32_t id) const {
  return id >= 0 && id < vocab_size() && data_->special[static_cast<std::size_t>(id)];
}
std::optional<std::int32_t> Tokenizer::bos() const { return data_->bos; }
std::optional<std::int32_t> Tokenizer::eos() const { return data_->eos; }
bool Tokenizer::adds_bos() const { return data_->add_bos; }
const std::vector<std::int32_t>& Tokenizer::end_tokens() const { return data_->end_tokens; }

std::string Tokenizer::lacks() const {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte)
    if (data_->byte_tokens[static_cast<std::size_t>(byte)] == TokenizerData::kNone)
      bytes.push_back(static_cast<char>(byte));
  return bytes;
}

std::string StreamDecoder::push(std::int32_t id) {
  held_ += tokenizer_.piece(id);
  std::string_view rest = held_;
  while (!rest.empty()) {
    const detail::Utf8Step step = detail::first_step(rest);
    if (step.state == detail::Utf8State::cut) break;
    rest.remove_prefix(step.bytes);
  }
  std::string whole = detail::replaced_utf8(std::string_view(held_).substr(0, held_.size() - rest.size()));
  held_.erase(0, held_.size() - rest.size());
  return whole;
}

std::string StreamDecoder::finish() { return detail::replaced_utf8(std::exchange(held_, {})); }

}  // namespace kvkeep::lm
