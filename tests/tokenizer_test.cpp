#include "kvkeep/lm/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "kvkeep/core/error.h"
#include "message_of.h"

namespace kvkeep::lm {
namespace {

using kvkeep::testing::message_of;
using Ids = std::vector<std::int32_t>;
using Json = nlohmann::json;

const std::filesystem::path kGolden = std::filesystem::path(KVKEEP_TEST_GOLDEN_DIR) / "tokenizer";
constexpr std::array kNames{"gpt-2", "smollm", "llama-bpe", "qwen2"};

std::string content_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

std::filesystem::path file_of(const std::string& name) { return kGolden / name / "tokenizer.json"; }
Tokenizer golden(const std::string& name) { return Tokenizer::read(file_of(name)); }

std::vector<std::string> texts() {
  std::vector<std::string> texts;
  for (const auto& entry : Json::parse(content_of(kGolden / "texts.json"))) {
    if (entry.contains("text")) {
      texts.push_back(entry["text"]);
      continue;
    }
    const std::string hex = entry["hex"];
    texts.emplace_back();
    for (std::size_t i = 0; i < hex.size(); i += 2) texts.back().push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return texts;
}

std::string alphabet_of(const std::string& bytes) {
  std::string out;
  const auto itself = [](unsigned c) { return (c >= 0x21 && c <= 0x7e) || (c >= 0xa1 && c <= 0xac) || c >= 0xae; };
  for (const char byte : bytes) {
    const unsigned value = static_cast<unsigned char>(byte);
    unsigned code = value;
    if (!itself(value)) {
      code = 0x100;
      for (unsigned before = 0; before < value; ++before) code += itself(before) ? 0 : 1;
    }
    if (code < 0x80)
      out += static_cast<char>(code);
    else
      out += {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
  }
  return out;
}

// All bytes, in their order, as ids 0 to 255.
TokenizerParts bytes_alone(const std::string& pre = "gpt-2") {
  TokenizerParts parts;
  for (int byte = 0; byte < 256; ++byte) parts.tokens.push_back(alphabet_of(std::string(1, static_cast<char>(byte))));
  parts.pre_tokenizer = pre;
  return parts;
}

// The same tokenizer through its other door, as a file of GGUF would describe it.
TokenizerParts parts_of(const std::string& name) {
  const Json json = Json::parse(content_of(file_of(name)));
  TokenizerParts parts;
  parts.pre_tokenizer = name;
  const auto put = [&](std::size_t id, const std::string& token, std::int32_t type) {
    parts.tokens.resize(std::max(parts.tokens.size(), id + 1));
    parts.types.resize(parts.tokens.size(), 1);
    parts.tokens[id] = token;
    parts.types[id] = type;
  };
  for (const auto& [token, id] : json["model"]["vocab"].items()) put(id.get<std::size_t>(), token, 1);
  for (const auto& token : json["added_tokens"]) put(token["id"].get<std::size_t>(), token["content"], token["special"] ? 3 : 4);
  for (const auto& merge : json["model"]["merges"]) parts.merges.push_back(merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  if (name == "llama-bpe") {
    parts.bos = Tokenizer::read(file_of(name)).bos();
    parts.add_bos = true;
  }
  return parts;
}

std::string replaced(const Tokenizer& tokenizer, const Ids& ids) {
  StreamDecoder stream(tokenizer);
  std::string out;
  for (const std::int32_t id : ids) out += stream.push(id);
  return out + stream.finish();
}

TEST(Tokenizer, GivesTheIdsOfThePackage) {
  const std::vector<std::string> given = texts();
  ASSERT_GE(given.size(), 150U);
  for (const std::string name : kNames) {
    const Tokenizer tokenizer = golden(name);
    const Json expected = Json::parse(content_of(kGolden / name / "ids.json"));
    ASSERT_EQ(expected.size(), given.size());
    for (std::size_t i = 0; i < given.size(); ++i) {
      const Ids parsed = expected[i]["parsed"], plain = expected[i].value("plain", parsed);
      EXPECT_EQ(tokenizer.encode(given[i]), parsed) << name << ", text " << i;
      EXPECT_EQ(tokenizer.encode(given[i], SpecialTokens::plain), plain) << name << ", text " << i;
    }
  }
}

TEST(Tokenizer, FromPartsIsTheOneFromJson) {
  for (const std::string name : {"smollm", "llama-bpe"}) {
    const Tokenizer json = golden(name), parts = Tokenizer::from_parts(parts_of(name));
    ASSERT_EQ(parts.vocab_size(), json.vocab_size());
    EXPECT_EQ(parts.end_tokens(), json.end_tokens());
    EXPECT_EQ(parts.lacks(), json.lacks());
    for (std::int32_t id = 0; id < json.vocab_size(); ++id) {
      EXPECT_EQ(parts.piece(id), json.piece(id));
      EXPECT_EQ(parts.is_special(id), json.is_special(id));
    }
    for (const std::string& text : texts())
      for (const SpecialTokens special : {SpecialTokens::parsed, SpecialTokens::plain})
        EXPECT_EQ(parts.encode(text, special), json.encode(text, special)) << name;
  }
}

TEST(Tokenizer, GivesTheTextBack) {
  for (const std::string name : {"gpt-2", "llama-bpe"}) {
    const Tokenizer tokenizer = golden(name);
    EXPECT_EQ(tokenizer.lacks(), "");
    for (const std::string& text : texts()) {
      if (text.find("<mask>") != std::string::npos || text.find("<right>") != std::string::npos) continue;  // they take blanks beside them
      const Ids ids = tokenizer.encode(text, SpecialTokens::parsed, false);
      const std::string back = tokenizer.decode(ids);
      EXPECT_EQ(replaced(tokenizer, ids), back);
      const Ids again = tokenizer.encode(back, SpecialTokens::parsed, false);
      EXPECT_EQ(again, ids) << name;
      if (back.find("\xef\xbf\xbd") == std::string::npos) EXPECT_EQ(back, text) << name;
    }
  }
}

TEST(Tokenizer, MergesTheLeastRankFirstAndTheLeftmostOfEqualOnes) {
  TokenizerParts parts = bytes_alone();
  parts.tokens.insert(parts.tokens.end(), {"ab", "bc", "aa", "abc"});  // 256 to 259
  parts.merges = {"b c", "a b", "a a", "a bc"};
  const Tokenizer tokenizer = Tokenizer::from_parts(parts);
  EXPECT_EQ(tokenizer.encode("abc"), (Ids{259}));
  EXPECT_EQ(tokenizer.encode("abab"), (Ids{256, 256}));
  EXPECT_EQ(tokenizer.encode("aaa"), (Ids{258, 'a'}));
  EXPECT_EQ(tokenizer.encode("aaab"), (Ids{258, 256}));
  EXPECT_EQ(tokenizer.encode(""), Ids{});
}

TEST(Tokenizer, MergesLongWordsAsItDoesShortOnes) {
  // Words of 40 to 60 letters lie on both sides of where merging by scanning ends. A plain loop is the second opinion.
  TokenizerParts parts = bytes_alone();
  parts.merges = {"a b", "b a", "ab a", "a a", "aba b", "b b", "ab ab", "aa aa", "abab abab"};
  for (const std::string& merge : parts.merges) {
    std::string token = merge;
    token.erase(token.find(' '), 1);
    if (std::find(parts.tokens.begin(), parts.tokens.end(), token) == parts.tokens.end()) parts.tokens.push_back(token);
  }
  const Tokenizer tokenizer = Tokenizer::from_parts(parts);
  std::mt19937 random(5);
  for (int round = 0; round < 500; ++round) {
    std::string word(40 + random() % 21, 'a');
    for (char& c : word) c = random() % 2 == 0 ? 'a' : 'b';
    std::vector<std::string> symbols;
    for (const char c : word) symbols.emplace_back(1, c);
    for (bool merged = true; merged;) {
      merged = false;
      for (std::size_t m = 0; m < parts.merges.size() && !merged; ++m)
        for (std::size_t i = 0; i + 1 < symbols.size() && !merged; ++i)
          if (symbols[i] + " " + symbols[i + 1] == parts.merges[m]) {
            symbols[i] += symbols[i + 1];
            symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(i) + 1);
            merged = true;
          }
    }
    Ids expected;
    for (const std::string& symbol : symbols) expected.push_back(*tokenizer.id_of(symbol));
    EXPECT_EQ(tokenizer.encode(word), expected) << word;
  }
}

TEST(Tokenizer, TakesLongTextsWithoutBlanksInLittleTime) {
  const Tokenizer tokenizer = golden("gpt-2"), nfc = golden("qwen2");
  std::string marks = "a", nested;
  for (int i = 0; i < 250000; ++i) marks += "\xcc\x81\xcc\x96";  // U+0301, U+0316: to be sorted
  for (int i = 0; i < 300000; ++i) nested += "<mask";
  for (const std::string& text :
       {std::string(1000000, 'a'), std::string(1000000, ' '), std::string(1000000, '\n'), std::string(1000000, '7'), marks, nested}) {
    const auto start = std::chrono::steady_clock::now();
    (void)tokenizer.encode(text);
    (void)nfc.encode(text);
    EXPECT_LT(std::chrono::steady_clock::now() - start,
              std::chrono::seconds(60));  // squared it would be hours; under the sanitizers it is seconds
  }
}

TEST(Tokenizer, HoldsBackTheBeginningOfACharacter) {
  const Tokenizer tokenizer = Tokenizer::from_parts(bytes_alone());
  StreamDecoder stream(tokenizer);
  EXPECT_EQ(stream.push('a'), "a");
  EXPECT_EQ(stream.push(0xf0), "");
  EXPECT_EQ(stream.push(0x9f), "");
  EXPECT_EQ(stream.push(0x99), "");
  EXPECT_EQ(stream.push(0x82), "\xf0\x9f\x99\x82");
  EXPECT_EQ(stream.push(0xe4), "");
  EXPECT_EQ(stream.push('b'),
            "\xef\xbf\xbd"
            "b");  // what cannot go on
  EXPECT_EQ(stream.push(0x80), "\xef\xbf\xbd");
  EXPECT_EQ(stream.push(0xc3), "");
  EXPECT_EQ(stream.finish(), "\xef\xbf\xbd");
  EXPECT_EQ(stream.finish(), "");
  EXPECT_EQ(stream.push('c'), "c");
  EXPECT_EQ(stream.push(1 << 20), "");
}

TEST(Tokenizer, FindsControlTokensOnlyWhereItMay) {
  const Tokenizer tokenizer = golden("smollm");
  const std::int32_t end = tokenizer.id_of("<|im_end|>").value();
  EXPECT_EQ(tokenizer.encode("<|im_end|>"), (Ids{end}));
  const Ids plain = tokenizer.encode("<|im_end|>", SpecialTokens::plain);
  EXPECT_GT(plain.size(), 1U);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), end), 0);
  EXPECT_EQ(tokenizer.decode(plain), "<|im_end|>");
  EXPECT_TRUE(tokenizer.is_special(end));
  EXPECT_FALSE(tokenizer.is_special(tokenizer.id_of("a").value()));
  EXPECT_EQ(tokenizer.end_tokens(), (Ids{*tokenizer.id_of("<|endoftext|>"), end}));
}

TEST(Tokenizer, PutsTheFirstTokenInFrontWhereItsFileSaysSo) {
  const Tokenizer llama = golden("llama-bpe"), smollm = golden("smollm");
  const std::int32_t bos = llama.id_of("<|begin_of_text|>").value();
  EXPECT_TRUE(llama.adds_bos());
  EXPECT_EQ(llama.bos(), bos);
  EXPECT_EQ(llama.encode(""), (Ids{bos}));
  EXPECT_EQ(llama.encode("", SpecialTokens::parsed, false), Ids{});
  EXPECT_FALSE(smollm.adds_bos());
  EXPECT_EQ(smollm.encode(""), Ids{});
}

TEST(Tokenizer, LeavesBytesWithoutATokenOutAndSaysWhich) {
  const Tokenizer tokenizer = golden("smollm");
  EXPECT_NE(tokenizer.lacks().find('\4'), std::string::npos);
  EXPECT_EQ(tokenizer.encode("a\4b"), tokenizer.encode("ab"));
}

TEST(Tokenizer, GivesBytesWithoutATokenTheUnknownOneWhereTheFileNamesIt) {
  Json json = Json::parse(content_of(file_of("smollm")));
  json["model"]["unk_token"] = "<|endoftext|>";
  const std::int32_t unknown = golden("smollm").id_of("<|endoftext|>").value();
  const auto a = *golden("smollm").id_of("a");
  EXPECT_EQ(Tokenizer::from_json(json.dump()).encode("a\4\4a"), (Ids{a, unknown, unknown, a}));
  json["model"]["fuse_unk"] = true;
  EXPECT_EQ(Tokenizer::from_json(json.dump()).encode("a\4\4a"), (Ids{a, unknown, a}));
}

TEST(Tokenizer, ReadsMergesAsOldFilesWriteThem) {
  Json json = Json::parse(content_of(file_of("qwen2")));
  for (Json& merge : json["model"]["merges"]) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  const Tokenizer old = Tokenizer::from_json(json.dump()), now = golden("qwen2");
  for (const std::string& text : texts()) EXPECT_EQ(old.encode(text), now.encode(text));
}

TEST(Tokenizer, GivesNothingForIdsWithoutATokenAndRefusesNegativeOnes) {
  const Tokenizer tokenizer = golden("gpt-2");
  EXPECT_EQ(tokenizer.decode(Ids{tokenizer.vocab_size(), INT32_MAX}), "");
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)tokenizer.decode(Ids{-1}); }).find("-1"), std::string::npos);
}

void expect_json_refused(const std::string& what, const std::function<void(Json&)>& change, const std::string& says,
                         const std::string& name = "gpt-2") {
  Json json = Json::parse(content_of(file_of(name)));
  change(json);
  const std::string message = message_of([&] { (void)Tokenizer::from_json(json.dump(), "lying.json"); });
  EXPECT_EQ(message.rfind("read tokenizer: lying.json", 0), 0U) << what << ": " << message;
  EXPECT_NE(message.find(says), std::string::npos) << what << ": " << message;
  EXPECT_LT(message.size(), 600U) << what;
}

TEST(Tokenizer, RefusesFilesThatContradictThemselves) {
  expect_json_refused(
      "merge of no token",
      [](Json& j) {
        j["model"]["merges"].push_back({"a", std::string(1000, 'x')});
      },
      "has no token");
  expect_json_refused(
      "merge into no token",
      [](Json& j) {
        j["model"]["merges"].push_back({"~", "~"});
      },
      "\"~~\"");
  expect_json_refused(
      "merge of three",
      [](Json& j) {
        j["model"]["merges"][0] = {"a", "b", "c"};
      },
      "merge");
  expect_json_refused(
      "merge in words", [](Json& j) { j["model"]["merges"][0] = "a b c"; }, "merge");
  expect_json_refused(
      "merge of numbers",
      [](Json& j) {
        j["model"]["merges"][0] = {1, 2};
      },
      "merge");
  expect_json_refused(
      "two tokens, one id", [](Json& j) { j["model"]["vocab"]["a"] = j["model"]["vocab"]["b"]; }, "another token");
  expect_json_refused(
      "negative id", [](Json& j) { j["model"]["vocab"]["a"] = -1; }, "-1");
  expect_json_refused(
      "huge id", [](Json& j) { j["model"]["vocab"]["a"] = 2000000000; }, "2000000000");
  expect_json_refused(
      "id beyond 2^63", [](Json& j) { j["model"]["vocab"]["a"] = UINT64_MAX; }, "18446744073709551615");
  expect_json_refused(
      "id of no kind", [](Json& j) { j["model"]["vocab"]["a"] = "7"; }, "\"7\"");
  expect_json_refused(
      "no vocabulary", [](Json& j) { j["model"]["vocab"] = Json::array(); }, "vocab");
  expect_json_refused(
      "empty vocabulary",
      [](Json& j) { j["model"]["vocab"] = Json::object(), j["model"]["merges"] = Json::array(), j["added_tokens"] = Json::array(); },
      "no token for the byte");
  expect_json_refused(
      "no byte token", [](Json& j) { j["model"]["vocab"].erase("~"); }, "the byte 126 ('~')");
  expect_json_refused(
      "no merges", [](Json& j) { j["model"].erase("merges"); }, "merges");
  expect_json_refused(
      "added with another id",
      [](Json& j) {
        j["added_tokens"].push_back({{"id", 3}, {"content", "a"}});
      },
      "one id");
  expect_json_refused(
      "added with a taken id",
      [](Json& j) {
        j["added_tokens"].push_back({{"id", 3}, {"content", "<new>"}});
      },
      "<new>");
  expect_json_refused(
      "added with a gap",
      [](Json& j) {
        j["added_tokens"].push_back({{"id", 1000}, {"content", "<new>"}});
      },
      "1000");
  expect_json_refused(
      "added with a huge id",
      [](Json& j) {
        j["added_tokens"].push_back({{"id", INT32_MAX}, {"content", "<new>"}});
      },
      "2147483647");
  expect_json_refused(
      "added twice", [](Json& j) { j["added_tokens"].push_back(j["added_tokens"][0]); }, "twice");
  expect_json_refused(
      "added without text",
      [](Json& j) {
        j["added_tokens"].push_back({{"id", 706}, {"content", ""}});
      },
      "0 bytes");
  expect_json_refused(
      "added with a long text",
      [](Json& j) {
        j["added_tokens"].push_back({{"id", 706}, {"content", std::string(257, 'x')}});
      },
      "257");
  expect_json_refused(
      "unknown token that is none", [](Json& j) { j["model"]["unk_token"] = "<unk>"; }, "<unk>");
  expect_json_refused(
      "bos that is none", [](Json& j) { j["post_processor"]["processors"][1]["special_tokens"]["<|begin_of_text|>"]["ids"] = {5000}; },
      "5000", "llama-bpe");
  expect_json_refused(
      "bos that is not listed", [](Json& j) { j["post_processor"]["processors"][1]["special_tokens"] = Json::object(); }, "begin_of_text",
      "llama-bpe");
  expect_json_refused(
      "text with NUL",
      [](Json& j) {
        j["model"]["merges"].push_back({"a", std::string("\0\x1b[2J", 5)});
      },
      "\\u0000\\u001b[2J");
  expect_json_refused(
      "a list", [](Json& j) { j = Json::array({1}); }, "object");
  expect_json_refused(
      "an empty object", [](Json& j) { j = Json::object(); }, "decoder");
}

TEST(Tokenizer, RefusesWhatItHasNoCodeForByName) {
  expect_json_refused(
      "model", [](Json& j) { j["model"]["type"] = "Unigram"; }, "Unigram");
  expect_json_refused(
      "normalizer",
      [](Json& j) {
        j["normalizer"] = {{"type", "Lowercase"}};
      },
      "Lowercase");
  expect_json_refused(
      "pre-tokenizer",
      [](Json& j) {
        j["pre_tokenizer"] = {{"type", "Whitespace"}};
      },
      "Whitespace");
  expect_json_refused(
      "prefix", [](Json& j) { j["pre_tokenizer"]["add_prefix_space"] = true; }, "add_prefix_space");
  expect_json_refused(
      "empty sequence",
      [](Json& j) {
        j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", Json::array()}};
      },
      "gpt-2, smollm");
  expect_json_refused(
      "regex", [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "\\w+"; }, "\\\\w+", "qwen2");
  expect_json_refused(
      "string pattern",
      [](Json& j) {
        j["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"String", " "}};
      },
      "expressions of Llama 3", "qwen2");
  expect_json_refused(
      "behaviour", [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"; }, "\"Split\", \"ByteLevel\"", "qwen2");
  expect_json_refused(
      "digits together", [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = false; }, "\"Digits\", \"ByteLevel\"",
      "smollm");
  expect_json_refused(
      "decoder",
      [](Json& j) {
        j["decoder"] = {{"type", "Metaspace"}};
      },
      "Metaspace");
  expect_json_refused(
      "post-processor",
      [](Json& j) {
        j["post_processor"] = {{"type", "RobertaProcessing"}};
      },
      "RobertaProcessing");
  expect_json_refused(
      "template",
      [](Json& j) { j["post_processor"]["processors"][1]["single"].push_back(j["post_processor"]["processors"][1]["single"][0]); },
      "one token in front", "llama-bpe");
  expect_json_refused(
      "suffix", [](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }, "</w>");
  expect_json_refused(
      "byte fallback", [](Json& j) { j["model"]["byte_fallback"] = true; }, "byte_fallback");
  expect_json_refused(
      "dropout", [](Json& j) { j["model"]["dropout"] = 0.1; }, "dropout");
  expect_json_refused(
      "truncation",
      [](Json& j) {
        j["truncation"] = {{"max_length", 5}};
      },
      "truncation");
}

TEST(Tokenizer, RefusesTextThatIsNoJson) {
  for (const std::string text : {"", "{", "\xff", "null", "[[[[", "{\"a\":1,\"a\":2}"})
    EXPECT_NE(message_of<InvalidArgument>([&] { (void)Tokenizer::from_json(text, "x"); }).find("read tokenizer: x"), std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)Tokenizer::from_json(std::string(100000, '[')); }).find("nests"), std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)Tokenizer::read("/nowhere/tokenizer.json"); }).find("/nowhere/tokenizer.json"),
            std::string::npos);
}

void expect_parts_refused(const std::function<void(TokenizerParts&)>& change, const std::string& says) {
  TokenizerParts parts = bytes_alone();
  change(parts);
  const std::string message = message_of([&] { (void)Tokenizer::from_parts(parts, "lying.gguf"); });
  EXPECT_EQ(message.rfind("read tokenizer: lying.gguf", 0), 0U) << message;
  EXPECT_NE(message.find(says), std::string::npos) << message;
}

TEST(Tokenizer, RefusesPartsThatContradictThemselves) {
  expect_parts_refused([](auto& p) { p.pre_tokenizer = "deepseek-llm"; }, "\"deepseek-llm\"; allowed gpt-2, smollm, llama-bpe, qwen2");
  expect_parts_refused([](auto& p) { p.types = {1, 1}; }, "2 types");
  expect_parts_refused([](auto& p) { p.types.assign(256, 1), p.types[7] = 0; }, "type 0");
  expect_parts_refused([](auto& p) { p.types.assign(256, 1), p.types[7] = 7; }, "type 7");
  expect_parts_refused([](auto& p) { p.tokens.push_back("a"); }, "twice");
  expect_parts_refused([](auto& p) { p.tokens.clear(); }, "no token for the byte");
  expect_parts_refused([](auto& p) { p.merges = {""}; }, "merge \"\"");
  expect_parts_refused([](auto& p) { p.merges = {"ab"}; }, "merge \"ab\"");
  expect_parts_refused([](auto& p) { p.merges = {"a b"}; }, "no token \"ab\"");
  expect_parts_refused([](auto& p) { p.bos = 256; }, "bos token; allowed 0 to 255");
  expect_parts_refused([](auto& p) { p.eos = -1; }, "eos");
  expect_parts_refused([](auto& p) { p.add_bos = true; }, "names none");
  expect_parts_refused([](auto& p) { p.types.assign(256, 1), p.types.push_back(3), p.tokens.push_back("\xff"); }, "UTF-8");
}

}  // namespace
}  // namespace kvkeep::lm
