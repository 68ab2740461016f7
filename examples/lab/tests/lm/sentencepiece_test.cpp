// SPDX-License-Identifier: Apache-2.0
// SentencePiece's tokenizers, from GGUF and from tokenizer.json, and the vectors that llama.cpp publishes for these and
// for byte-level BPE.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvlab/text_model.h"
#include "kvlab/tokenizer.h"
#include "message_of.h"
#include "tokenizer_case.h"

namespace kvkeep::lm::sentencepiece_test {
namespace {

namespace fs = std::filesystem;
using kvkeep::testing::message_of;
using testing::alphabet_of;
using testing::bytes_alone;
using testing::content_of;
using testing::file_of;
using testing::kGoldenTokenizers;
using testing::pieces_of;
using Ids = std::vector<std::int32_t>;
using Json = nlohmann::json;

Json golden(const fs::path& file) { return Json::parse(content_of(kGoldenTokenizers / file)); }

// What published.py kept of a vocabulary; the ids between are no words.
TokenizerParts parts_of(const Json& published) {
  TokenizerParts parts;
  const auto put = [&](std::size_t id, const std::string& token, std::int32_t type, float score) {
    for (std::size_t gap = parts.tokens.size(); gap <= id; ++gap) parts.tokens.push_back(text("[gap ", gap, "]"));
    parts.types.resize(parts.tokens.size(), 5);
    parts.scores.resize(parts.tokens.size());
    parts.tokens[id] = token;
    parts.types[id] = type;
    parts.scores[id] = score;
  };
  parts.pre_tokenizer = published["pre"];
  if (published.contains("scores")) {
    const TokenizerParts bytes = pieces_of({});
    parts.model = "llama";
    for (std::size_t byte = 0; byte < 256; ++byte)
      put(published["first_byte"].get<std::size_t>() + byte, bytes.tokens[byte], 6, 0);
    for (const auto& [token, id] : published["scores"].items()) put(id[0], token, 1, id[1]);
    return parts;
  }
  for (const auto& [token, id] : published["tokens"].items()) put(id, token, 1, 0);
  for (const std::string merge : published["merges"]) {
    const std::size_t first = merge.find(' '), second = merge.find(' ', first + 1);
    parts.merges.push_back(merge.substr(0, second));
    put(std::stoul(merge.substr(second + 1)), merge.substr(0, first) + merge.substr(first + 1, second - first - 1), 1,
        0);
  }
  return parts;
}

void expect_ids(const Tokenizer& tokenizer, const std::vector<std::string>& texts, const std::vector<Ids>& ids) {
  ASSERT_EQ(texts.size(), ids.size());
  for (std::size_t i = 0; i < texts.size(); ++i)
    EXPECT_EQ(tokenizer.encode(texts[i], SpecialTokens::parsed, false), ids[i]) << "text " << i << ": " << texts[i];
}

TEST(PublishedVectors, AreTheIdsOfEveryText) {
  const std::vector<std::string> common = golden("published/texts.json");
  ASSERT_EQ(common.size(), 46U);
  for (const std::string name :
       {"llama-spm", "llama-bpe", "qwen2", "qwen35", "starcoder", "falcon", "deepseek-llm", "deepseek-coder"}) {
    SCOPED_TRACE(name);
    const Json published = golden("published/" + name + ".json");
    const Tokenizer tokenizer = Tokenizer::from_parts(parts_of(published), name);
    expect_ids(tokenizer, published.value("texts", common), published["ids"]);
    const std::vector<Ids> ids = published["ids"];
    for (std::size_t i = 0; i < common.size() && name == "llama-spm"; ++i)
      EXPECT_EQ(tokenizer.decode(ids[i]), common[i]) << "text " << i;
  }
}

// The same over the whole vocabularies.
TEST(RealVocabularies, GiveTheIdsThatArePublishedBesideThem) {
  const char* folder = std::getenv("KVKEEP_TEST_VOCABULARIES");
  if (folder == nullptr)
    GTEST_SKIP() << "KVKEEP_TEST_VOCABULARIES is not set: it names the folder models of llama.cpp's sources";
  int seen = 0;
  for (const std::string name : {"llama-spm", "phi-3", "llama-bpe", "qwen2", "qwen35", "gpt-2", "mpt", "starcoder",
                                 "refact", "command-r", "falcon", "deepseek-llm", "deepseek-coder"}) {
    const fs::path file = fs::path(folder) / ("ggml-vocab-" + name + ".gguf");
    if (!fs::exists(file)) continue;
    SCOPED_TRACE(name);
    std::vector<Ids> ids;
    std::ifstream lines(file.string() + ".out");
    for (std::string line; std::getline(lines, line);) {
      std::istringstream numbers(line);
      ids.emplace_back(std::istream_iterator<std::int32_t>(numbers), std::istream_iterator<std::int32_t>());
    }
    const std::string all = content_of(file.string() + ".inp"), separator = "\n__ggml_vocab_test__\n";
    std::vector<std::string> texts;
    for (std::size_t at = 0; texts.size() < ids.size(); at += texts.back().size() + separator.size())
      texts.push_back(all.substr(at, all.find(separator, at) - at));
    expect_ids(TextModel::open(file).tokenizer, texts, ids);
    ++seen;
  }
  EXPECT_GT(seen, 0) << "no ggml-vocab-*.gguf in " << folder;
}

TEST(SentencePieceJson, GivesTheIdsAndTheTextOfThePackage) {
  const Json file = golden("sentencepiece/tokenizer.json"), texts = golden("texts.json");
  for (const Json& kind : golden("sentencepiece/kinds.json")) {
    SCOPED_TRACE(kind["kind"]);
    Json changed = file;
    changed.update(kind["parts"]);
    const Tokenizer tokenizer = Tokenizer::from_json(changed.dump());
    const auto expect = [&](const std::string& said, const Json& expected) {
      const Ids parsed = expected["parsed"], plain = expected.value("plain", parsed);
      EXPECT_EQ(tokenizer.encode(said), parsed) << said;
      EXPECT_EQ(tokenizer.encode(said, SpecialTokens::plain), plain) << said;
    };
    for (std::size_t i = 0; i < kind["ids"].size(); ++i)
      if (texts[i].contains("text")) expect(texts[i]["text"], kind["ids"][i]);
    ASSERT_GE(kind["more"].size(), 25U);
    for (const Json& more : kind["more"]) {
      expect(more["text"], more);
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(more["text"].get<std::string>(), SpecialTokens::parsed, false)),
                more["decoded"].get<std::string>())
          << more["text"];
    }
  }
}

TEST(SentencePiece, MergesTheHighestScoreFirstAndTheLeftmostOfEqualOnes) {
  TokenizerParts parts = pieces_of({{"a", -9}, {"b", -9}, {"c", -9}, {"ab", -3}, {"bc", -2}, {"aa", -4}, {"abc", -5}});
  parts.add_space_prefix = false;
  const Tokenizer tokenizer = Tokenizer::from_parts(parts);
  EXPECT_EQ(tokenizer.encode("abc"), (Ids{262}));
  EXPECT_EQ(tokenizer.encode("abab"), (Ids{259, 259}));
  EXPECT_EQ(tokenizer.encode("aaa"), (Ids{261, 256}));
  EXPECT_EQ(tokenizer.encode("aaab"), (Ids{261, 259}));
  EXPECT_EQ(tokenizer.encode("aabc"), (Ids{261, 260}));
  EXPECT_EQ(tokenizer.encode(""), Ids{});
  parts.scores[259] = -2;  // ab as good as bc: the one on the left
  parts.tokens[262] = "xyz";
  EXPECT_EQ(Tokenizer::from_parts(parts).encode("abc"), (Ids{259, 258}));
}

TEST(SentencePiece, GivesTheBytesOfACharacterWithoutAPiece) {
  TokenizerParts parts = pieces_of({{"\u2581", -1}, {"h", -1}, {"\u2581h", -2}});
  const Tokenizer tokenizer = Tokenizer::from_parts(parts);
  EXPECT_EQ(tokenizer.encode("h\u00e9\nh"), (Ids{258, 0xc3, 0xa9, 0x0a, 257}));
  EXPECT_EQ(tokenizer.decode(Ids{258, 0xc3, 0xa9, 0x0a, 257}), "h\u00e9\nh");
  EXPECT_EQ(tokenizer.lacks(), "");
  EXPECT_EQ(tokenizer.encode("<0x0A>").size(), 7U) << "the name of a byte is text";
}

TEST(SentencePiece, PutsABlankInFrontOfATextAndBehindATokenThatIsFound) {
  TokenizerParts parts = pieces_of({{"\u2581", -1}, {"a", -1}, {"\u2581a", -2}, {"<s>", 0}, {"[x]", 0}});
  parts.types[259] = 3;
  parts.types[260] = 4;
  const Tokenizer blank = Tokenizer::from_parts(parts);
  EXPECT_EQ(blank.encode("a"), (Ids{258}));
  EXPECT_EQ(blank.encode(" a"), (Ids{256, 258}));
  EXPECT_EQ(blank.encode("\u2581"
                         "a"),
            (Ids{256, 258}));
  EXPECT_EQ(blank.encode("<s>a[x]a"), (Ids{259, 258, 260, 258}));
  EXPECT_EQ(blank.encode("<s>"), (Ids{259}));
  parts.add_space_prefix = false;
  const Tokenizer none = Tokenizer::from_parts(parts);
  EXPECT_EQ(none.encode("a"), (Ids{257}));
  EXPECT_EQ(none.encode("<s>a [x]a"), (Ids{259, 257, 256, 260, 257}));
  EXPECT_EQ(none.decode(none.encode(" a")), " a");
}

TEST(SentencePiece, ContinuesATextWithoutABlankOfItsOwn) {
  TokenizerParts parts = pieces_of({{"\u2581", -1}, {"a", -1}, {"\u2581a", -2}, {"<s>", 0}});
  parts.types[259] = 3;
  parts.bos = 259;
  parts.add_bos = true;
  const Tokenizer tokenizer = Tokenizer::from_parts(parts);
  EXPECT_EQ(tokenizer.encode("a"), (Ids{259, 258}));
  EXPECT_EQ(tokenizer.encode_continuation("a"), (Ids{257}));
  EXPECT_EQ(tokenizer.encode_continuation(" a<s>a"), (Ids{258, 259, 258}));
  const Ids answer{258, 258};
  EXPECT_EQ(tokenizer.decode(answer), "a a");
  EXPECT_EQ(tokenizer.decode_continuation(answer), " a a");
  EXPECT_EQ(tokenizer.piece(258), " a");
  StreamDecoder stream(tokenizer);
  EXPECT_EQ(stream.push(258), " a");
}

TEST(SentencePiece, NeverMergesTextIntoAControlToken) {
  TokenizerParts parts = pieces_of({{"<", -1}, {"s", -1}, {">", -1}, {"s>", -2}, {"<s>", 0}});
  parts.types[260] = 3;
  parts.add_space_prefix = false;
  const Tokenizer tokenizer = Tokenizer::from_parts(parts);
  EXPECT_EQ(tokenizer.encode("<s>", SpecialTokens::plain), (Ids{256, 259}));
  EXPECT_EQ(tokenizer.encode("<s>"), (Ids{260}));
}

TEST(SentencePiece, MergesLongTextsAsItDoesShortOnes) {
  TokenizerParts parts = pieces_of({{"a", 0}, {"b", 0}, {"aa", -1}, {"ab", -1}, {"aab", -2}, {"abaa", -3}, {"bb", -1}});
  parts.add_space_prefix = false;
  const Tokenizer tokenizer = Tokenizer::from_parts(parts);
  const std::string part = "abaabbaaab";  // in 40 letters, merged by scanning, and in 80, by a queue
  const auto repeated = [&](int times) {
    std::string out;
    for (int i = 0; i < times; ++i) out += part + "\n";
    return tokenizer.encode(out);
  };
  const Ids once = repeated(1), many = repeated(9);
  for (std::size_t i = 0; i < many.size(); ++i) EXPECT_EQ(many[i], once[i % once.size()]);
}

TEST(SentencePieceJson, IsReadWithoutADecoder) {
  Json json = golden("sentencepiece/tokenizer.json");
  const Tokenizer whole = Tokenizer::from_json(json.dump());
  json.erase("decoder");
  const Tokenizer bare = Tokenizer::from_json(json.dump());
  EXPECT_EQ(bare.decode(whole.encode("the cat\n", SpecialTokens::parsed, false)), "the cat\n");
  Json bytes = Json::parse(content_of(file_of("qwen2")));
  bytes["decoder"] = nullptr;
  const Tokenizer byte_level = Tokenizer::from_json(bytes.dump());
  EXPECT_EQ(byte_level.decode(byte_level.encode("the c\u00e4t\n")), "the c\u00e4t\n");
}

TEST(SentencePiece, RefusesPartsThatContradictThemselves) {
  const auto expect = [](const std::function<void(TokenizerParts&)>& change, const std::string& says) {
    TokenizerParts parts = pieces_of({{"a", 0}, {"b", 0}, {"ab", 0}});
    change(parts);
    const std::string message = message_of([&] { (void)Tokenizer::from_parts(parts, "lying.gguf"); });
    EXPECT_EQ(message.rfind("read tokenizer: lying.gguf", 0), 0U) << message;
    EXPECT_NE(message.find(says), std::string::npos) << message;
  };
  expect([](auto& p) { p.model = "t5"; }, "\"t5\"; allowed gpt2 (byte-level BPE) and llama");
  expect([](auto& p) { p.scores.pop_back(); }, "259 tokens and 258 scores");
  expect([](auto& p) { p.scores[257] = std::numeric_limits<float>::quiet_NaN(); }, "the score nan");
  expect([](auto& p) { p.scores[257] = -std::numeric_limits<float>::infinity(); }, "the score -inf");
  expect([](auto& p) { p.tokens[10] = "<0x0a>"; }, "no token for the byte 10; allowed vocabularies of SentencePiece");
  expect([](auto& p) { p.tokens[257] = std::string(257, 'b'); }, "257 bytes; allowed at most 256");
  expect([](auto& p) { p.tokens[257] = "a"; }, "twice");
}

TEST(SentencePieceJson, RefusesWhatItHasNoCodeForByName) {
  const auto expect = [](const std::function<void(Json&)>& change, const std::string& says) {
    Json json = golden("sentencepiece/tokenizer.json");
    change(json);
    const std::string message = message_of([&] { (void)Tokenizer::from_json(json.dump(), "lying.json"); });
    EXPECT_EQ(message.rfind("read tokenizer: lying.json", 0), 0U) << message;
    EXPECT_NE(message.find(says), std::string::npos) << message;
  };
  const Json metaspace{{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "last"}, {"split", true}};
  expect([](Json& j) { j["normalizer"] = nullptr; }, "keeps blanks as they are");
  expect([](Json& j) { j["normalizer"]["normalizers"][0]["prepend"] = "x"; }, "\"Prepend\"");
  expect([](Json& j) { j["normalizer"]["normalizers"][1]["content"] = "x"; }, "\"Replace\"");
  expect([](Json& j) { std::swap(j["normalizer"]["normalizers"][0], j["normalizer"]["normalizers"][1]); },
         "\"Prepend\"");
  expect([](Json& j) { j["normalizer"]["normalizers"].erase(1); }, "a Prepend of it before");
  expect([](Json& j) { j["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"String", " "}}}, {"invert", true}}; },
         "\"Split\"; allowed Metaspace");
  expect([&](Json& j) { j["pre_tokenizer"] = metaspace; }, "\"last\"; allowed always, first or never");
  expect([&](Json& j) { j["pre_tokenizer"] = metaspace, j["pre_tokenizer"]["replacement"] = "_"; }, "U+2581");
  expect([](Json& j) { j["pre_tokenizer"] = {{"type", "Whitespace"}}; }, "\"Whitespace\"; allowed Metaspace");
  expect([](Json& j) { j["decoder"] = {{"type", "ByteLevel"}}; }, "\"ByteLevel\"; allowed a Sequence of Replace");
  expect([](Json& j) { j["decoder"]["decoders"][3]["start"] = 2; }, "allowed a Sequence of Replace");
  expect([](Json& j) { j["model"]["vocab"].erase("<0x41>"); }, "the byte 65");
  expect([](Json& j) { j["post_processor"]["single"].push_back({{"SpecialToken", {{"id", "</s>"}, {"type_id", 0}}}}); },
         "at most one token in front");
}

// A bar where words are cut: where a merge of the two bytes beside it does not come about.
std::string cut(const std::string& pre_tokenizer, const std::string& said) {
  std::string out;
  for (std::size_t i = 0; i + 1 < said.size(); ++i) {
    EXPECT_EQ(said.find(said.substr(i, 2), i + 1), std::string::npos) << "bytes that stand beside each other once";
    TokenizerParts parts = bytes_alone(pre_tokenizer);
    const std::string left = alphabet_of(said.substr(i, 1)), right = alphabet_of(said.substr(i + 1, 1));
    parts.merges = {left + " " + right};
    parts.tokens.push_back(left + right);
    out += said[i];
    if (Tokenizer::from_parts(parts).encode(said).size() == said.size()) out += '|';
  }
  return out + said.back();
}

// The words into which Oniguruma cuts these by the published expressions.
TEST(WordCuts, AreThoseOfTheirExpressions) {
  const std::string mixed =
      "HTTPSeal caMe don't IT'S 1234 x/y //\n u\u0301\u4f60"
      "A  ";
  EXPECT_EQ(cut("tekken", mixed), "HTTPSeal| ca|Me| don|'t| IT|'S| |1|2|3|4| x|/y| //\n| u\u0301\u4f60|A|  ");
  EXPECT_EQ(cut("gpt-4o", mixed), "HTTPSeal| ca|Me| don't| IT'S| |123|4| x|/y| //\n| u\u0301\u4f60|A|  ");
  EXPECT_EQ(cut("deepseek-v3", mixed), "HTTPSeal| caMe| don|'t| IT|'S| |123|4| x|/y| //\n| u\u0301|\u4f60|A|  ");
  EXPECT_EQ(cut("default", mixed),
            "HTTPSeal| caMe| don|'|t| IT|'|S| |123|4| x|/|y| |//|\n| u|\u0301|\u4f60"
            "A|  ");
  EXPECT_EQ(cut("qwen35", mixed),
            "HTTPSeal| caMe| don|'t| IT|'S| |1|2|3|4| x|/y| //\n| u\u0301\u4f60"
            "A|  ");
  EXPECT_EQ(cut("deepseek-llm", "\u0301 \u0302\t "), "\u0301 \u0302|\t ");
}

}  // namespace
}  // namespace kvkeep::lm::sentencepiece_test
