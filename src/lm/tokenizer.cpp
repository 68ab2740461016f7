#include "kvkeep/lm/tokenizer.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "kvkeep/core/error.h"
#include "read_file.h"
#include "tokenizer_data.h"
#include "untrusted_json.h"
#include "utf8.h"

namespace kvkeep::lm {
namespace {

using detail::TokenizerData;
using detail::TokenizerPlan;

enum TokenType : std::int32_t {
  kNormal = 1,
  kUnknown,
  kControl,
  kUserDefined,
  kUnused,
  kByte
};  // as GGUF numbers them

/// One call of encode(): text in, ids out.
class Encoder {
 public:
  Encoder(const TokenizerData& data, std::vector<std::int32_t>& out) : data_(data), out_(out) {}

  void text(std::string_view utf8, bool specials) {
    for (const auto& part : data_.as_written.split(utf8, specials)) {
      const std::string_view between = utf8.substr(part.begin, part.end - part.begin);
      if (part.id >= 0)
        out_.push_back(part.id);
      else if (data_.nfc)
        normal_text(detail::nfc(between), specials);
      else
        normal_text(between, specials);
    }
  }

 private:
  void normal_text(std::string_view utf8, bool specials) {
    for (const auto& part : data_.normalized.split(utf8, specials)) {
      if (part.id >= 0)
        out_.push_back(part.id);
      else
        words(utf8.substr(part.begin, part.end - part.begin));
    }
  }

  void words(std::string_view utf8) {
    for (std::size_t begin = 0; begin < utf8.size();) {
      const std::size_t end = word_end(data_.pre, utf8, begin);
      word(utf8.substr(begin, end - begin));
      begin = end;
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
    bool last_unknown = false;
    for (const char byte : bytes) {
      const std::int32_t token = data_.byte_tokens[static_cast<unsigned char>(byte)];
      if (token != TokenizerData::kNone)
        symbols_.push_back(token);
      else if (data_.unknown != TokenizerData::kNone && !(last_unknown && data_.fuse_unknown))
        symbols_.push_back(data_.unknown);
      last_unknown = token == TokenizerData::kNone;
    }
    data_.merges.apply(symbols_, out_, scratch_);
  }

  const TokenizerData& data_;
  std::vector<std::int32_t>& out_;
  std::vector<std::int32_t> symbols_;
  detail::Merges::Scratch scratch_;
};

TokenizerPlan plan_of(const TokenizerParts& parts, const std::string& where) {
  const auto pre = detail::pre_tokenizer_called(parts.pre_tokenizer);
  KVKEEP_REQUIRE_AS(Unsupported, pre.has_value(), "read tokenizer: ", where, " cuts words by the pre-tokenizer ",
                    io::shown(parts.pre_tokenizer), "; allowed ", detail::kPreTokenizerNames);
  KVKEEP_REQUIRE(parts.types.empty() || parts.types.size() == parts.tokens.size(), "read tokenizer: ", where, " has ",
                 parts.tokens.size(), " tokens and ", parts.types.size(),
                 " types; allowed a type for each token, or none");
  KVKEEP_REQUIRE(parts.tokens.size() < INT32_MAX, "read tokenizer: ", where, " has ", parts.tokens.size(),
                 " tokens; allowed below ", INT32_MAX);
  TokenizerPlan plan;
  plan.where = where;
  plan.pre = *pre;
  plan.nfc = *pre == detail::PreTokenizer::qwen2;
  plan.ignore_merges = *pre == detail::PreTokenizer::llama_bpe;
  plan.vocabulary.reserve(parts.tokens.size());
  for (std::size_t id = 0; id < parts.tokens.size(); ++id) {
    const std::int32_t type = parts.types.empty() ? kNormal : parts.types[id];
    KVKEEP_REQUIRE(type >= kNormal && type <= kByte, "read tokenizer: ", where, " gives the token ", id, " the type ",
                   type, "; allowed 1 to 6");
    const bool special = type == kControl || type == kUnknown;
    plan.vocabulary.push_back({static_cast<std::int64_t>(id), parts.tokens[id], !special && type != kUnused});
    if (special || type == kUserDefined)
      plan.added.push_back(
          {{.id = static_cast<std::int32_t>(id), .text = parts.tokens[id], .special = special}, false});
  }
  plan.merges.reserve(parts.merges.size());
  for (const std::string& merge : parts.merges) {
    const std::size_t blank = merge.find(' ', 1);
    KVKEEP_REQUIRE(blank != std::string::npos, "read tokenizer: ", where, " has the merge ", io::shown(merge),
                   "; allowed \"left right\"");
    plan.merges.push_back({std::string_view(merge).substr(0, blank), std::string_view(merge).substr(blank + 1)});
  }
  plan.bos = parts.bos;
  plan.eos = parts.eos;
  plan.eot = parts.eot;
  plan.add_bos = parts.add_bos;
  return plan;
}

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
  return Tokenizer(std::make_shared<const TokenizerData>(plan_of(parts, where)));
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view utf8, SpecialTokens special, bool add_bos) const {
  constexpr std::size_t kMost = INT32_MAX / 3;  // U+FFFD and NFC make one byte at most three
  KVKEEP_REQUIRE(utf8.size() <= kMost, "encode: the text has ", utf8.size(), " bytes; allowed at most ", kMost);
  std::vector<std::int32_t> out;
  out.reserve(utf8.size() / 4 + 2);
  if (add_bos && data_->add_bos) out.push_back(*data_->bos);
  Encoder encoder(*data_, out);
  const bool specials = special == SpecialTokens::parsed;
  if (detail::is_utf8(utf8))
    encoder.text(utf8, specials);
  else
    encoder.text(detail::replaced_utf8(utf8), specials);
  return out;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids) const {
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
