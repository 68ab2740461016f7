// SPDX-License-Identifier: Apache-2.0
// What is refused, and with which sentence.

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "kvkeep/core/error.h"
#include "kvlab/tokenizer.h"
#include "message_of.h"
#include "tokenizer_case.h"

namespace kvkeep::lm::tokenizer_refusals_test {
namespace {

using Json = nlohmann::json;
using kvkeep::testing::message_of;
using testing::bytes_alone;
using testing::content_of;
using testing::file_of;

void expect_json_refused(const std::string& what, const std::function<void(Json&)>& change, const std::string& says,
                         const std::string& name = "gpt-2") {
  Json json = Json::parse(content_of(file_of(name)));
  change(json);
  const std::string message = message_of([&] { (void)Tokenizer::from_json(json.dump(), "lying.json"); });
  EXPECT_EQ(message.rfind("read tokenizer: lying.json", 0), 0U) << what << ": " << message;
  EXPECT_NE(message.find(says), std::string::npos) << what << ": " << message;
  EXPECT_LT(message.size(), 600U) << what;
}

TEST(TokenizerOfAFile, RefusesFilesThatContradictThemselves) {
  expect_json_refused(
      "merge of no token", [](Json& j) { j["model"]["merges"].push_back({"a", std::string(1000, 'x')}); },
      "has no token");
  expect_json_refused("merge into no token", [](Json& j) { j["model"]["merges"].push_back({"~", "~"}); }, "\"~~\"");
  expect_json_refused("merge of three", [](Json& j) { j["model"]["merges"][0] = {"a", "b", "c"}; }, "merge");
  expect_json_refused("merge in words", [](Json& j) { j["model"]["merges"][0] = "a b c"; }, "merge");
  expect_json_refused("merge of numbers", [](Json& j) { j["model"]["merges"][0] = {1, 2}; }, "merge");
  expect_json_refused(
      "two tokens, one id", [](Json& j) { j["model"]["vocab"]["a"] = j["model"]["vocab"]["b"]; }, "another token");
  expect_json_refused("negative id", [](Json& j) { j["model"]["vocab"]["a"] = -1; }, "-1");
  expect_json_refused("huge id", [](Json& j) { j["model"]["vocab"]["a"] = 2000000000; }, "2000000000");
  expect_json_refused("id beyond 2^63", [](Json& j) { j["model"]["vocab"]["a"] = UINT64_MAX; }, "18446744073709551615");
  expect_json_refused("id of no kind", [](Json& j) { j["model"]["vocab"]["a"] = "7"; }, "\"7\"");
  expect_json_refused("no vocabulary", [](Json& j) { j["model"]["vocab"] = Json::array(); }, "vocab");
  expect_json_refused(
      "empty vocabulary",
      [](Json& j) {
        j["model"]["vocab"] = Json::object(), j["model"]["merges"] = Json::array(), j["added_tokens"] = Json::array();
      },
      "no token for the byte");
  expect_json_refused("no byte token", [](Json& j) { j["model"]["vocab"].erase("~"); }, "the byte 126 ('~')");
  expect_json_refused("no merges", [](Json& j) { j["model"].erase("merges"); }, "merges");
  expect_json_refused(
      "added with another id", [](Json& j) { j["added_tokens"].push_back({{"id", 3}, {"content", "a"}}); }, "one id");
  expect_json_refused(
      "added with a taken id", [](Json& j) { j["added_tokens"].push_back({{"id", 3}, {"content", "<new>"}}); },
      "<new>");
  expect_json_refused(
      "added with a gap", [](Json& j) { j["added_tokens"].push_back({{"id", 1000}, {"content", "<new>"}}); }, "1000");
  expect_json_refused(
      "added with a huge id", [](Json& j) { j["added_tokens"].push_back({{"id", INT32_MAX}, {"content", "<new>"}}); },
      "2147483647");
  expect_json_refused("added twice", [](Json& j) { j["added_tokens"].push_back(j["added_tokens"][0]); }, "twice");
  expect_json_refused(
      "added without text", [](Json& j) { j["added_tokens"].push_back({{"id", 706}, {"content", ""}}); }, "0 bytes");
  expect_json_refused(
      "added with a long text",
      [](Json& j) { j["added_tokens"].push_back({{"id", 706}, {"content", std::string(257, 'x')}}); }, "257");
  expect_json_refused("unknown token that is none", [](Json& j) { j["model"]["unk_token"] = "<unk>"; }, "<unk>");
  expect_json_refused(
      "bos that is none",
      [](Json& j) { j["post_processor"]["processors"][1]["special_tokens"]["<|begin_of_text|>"]["ids"] = {5000}; },
      "5000", "llama-bpe");
  expect_json_refused(
      "bos that is not listed",
      [](Json& j) { j["post_processor"]["processors"][1]["special_tokens"] = Json::object(); }, "begin_of_text",
      "llama-bpe");
  expect_json_refused(
      "text with NUL", [](Json& j) { j["model"]["merges"].push_back({"a", std::string("\0\x1b[2J", 5)}); },
      "\\u0000\\u001b[2J");
  expect_json_refused("a list", [](Json& j) { j = Json::array({1}); }, "object");
  expect_json_refused("an empty object", [](Json& j) { j = Json::object(); }, "model");
}

TEST(TokenizerOfAFile, RefusesWhatItHasNoCodeForByName) {
  expect_json_refused("model", [](Json& j) { j["model"]["type"] = "Unigram"; }, "Unigram");
  expect_json_refused("normalizer", [](Json& j) { j["normalizer"] = {{"type", "Lowercase"}}; }, "Lowercase");
  expect_json_refused("pre-tokenizer", [](Json& j) { j["pre_tokenizer"] = {{"type", "Whitespace"}}; }, "Whitespace");
  expect_json_refused("prefix", [](Json& j) { j["pre_tokenizer"]["add_prefix_space"] = true; }, "add_prefix_space");
  expect_json_refused(
      "empty sequence", [](Json& j) { j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", Json::array()}}; },
      "is [] and cuts words by []; allowed what is known as gpt-2");
  expect_json_refused(
      "regex", [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "\\w+"; }, "\\\\w+", "qwen2");
  expect_json_refused(
      "string pattern", [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"String", " "}}; },
      "by [\"\"]; allowed", "qwen2");
  expect_json_refused(
      "behaviour", [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"; },
      "\"Split\", \"ByteLevel\"", "qwen2");
  expect_json_refused(
      "digits together", [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = false; },
      "\"Digits\", \"ByteLevel\"", "smollm");
  expect_json_refused("decoder", [](Json& j) { j["decoder"] = {{"type", "Metaspace"}}; }, "Metaspace");
  expect_json_refused(
      "post-processor", [](Json& j) { j["post_processor"] = {{"type", "RobertaProcessing"}}; }, "RobertaProcessing");
  expect_json_refused(
      "template",
      [](Json& j) {
        j["post_processor"]["processors"][1]["single"].push_back(j["post_processor"]["processors"][1]["single"][0]);
      },
      "one token in front", "llama-bpe");
  expect_json_refused("suffix", [](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }, "</w>");
  expect_json_refused(
      "byte fallback", [](Json& j) { j["model"]["byte_fallback"] = true; }, "ByteLevel\"; allowed Metaspace");
  expect_json_refused("dropout", [](Json& j) { j["model"]["dropout"] = 0.1; }, "dropout");
  expect_json_refused("truncation", [](Json& j) { j["truncation"] = {{"max_length", 5}}; }, "truncation");
}

TEST(TokenizerOfAFile, RefusesTextThatIsNoJson) {
  for (const std::string text : {"", "{", "\xff", "null", "[[[[", "{\"a\":1,\"a\":2}"})
    EXPECT_NE(message_of<InvalidArgument>([&] { (void)Tokenizer::from_json(text, "x"); }).find("read tokenizer: x"),
              std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)Tokenizer::from_json(std::string(100000, '[')); }).find("nests"),
            std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] {
              (void)Tokenizer::read("/nowhere/tokenizer.json");
            }).find("/nowhere/tokenizer.json"),
            std::string::npos);
}

void expect_parts_refused(const std::function<void(TokenizerParts&)>& change, const std::string& says) {
  TokenizerParts parts = bytes_alone();
  change(parts);
  const std::string message = message_of([&] { (void)Tokenizer::from_parts(parts, "lying.gguf"); });
  EXPECT_EQ(message.rfind("read tokenizer: lying.gguf", 0), 0U) << message;
  EXPECT_NE(message.find(says), std::string::npos) << message;
}

TEST(TokenizerOfParts, RefusesPartsThatContradictThemselves) {
  expect_parts_refused([](auto& p) { p.pre_tokenizer = "superbpe"; }, "\"superbpe\"; allowed gpt-2, phi-2, mpt");
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
  expect_parts_refused([](auto& p) { p.types.assign(256, 1), p.types.push_back(3), p.tokens.push_back("\xff"); },
                       "UTF-8");
}

}  // namespace
}  // namespace kvkeep::lm::tokenizer_refusals_test
