// SPDX-License-Identifier: Apache-2.0
// The reader of JSON that others wrote: it agrees with nlohmann's on what both read, and nothing that a text says makes
// it crash, hang or wrap a number.

#include "kvkeep/io/untrusted_json.h"

#include <gtest/gtest.h>

#include <chrono>

#include "kvkeep/io/model_config.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/state/state_file.h"
#include "message_of.h"
#include "oracle/random_case.h"

namespace kvkeep::io::untrusted_json_test {
namespace {

using Json = nlohmann::json;
using testing::message_of;

std::string nested(std::size_t levels) { return std::string(levels, '[') + std::string(levels, ']'); }

Json random_json(oracle::Random& random, int levels) {
  const double kind = random.unit();
  if (levels == 0 || kind < 0.5) {
    const std::vector<Json> leaves{
        nullptr, true, false, 0, -7, 18446744073709551615U, 0.1, -2.5e300, "", "caf\xc3\xa9 \"\\\n", "x"};
    return leaves[static_cast<std::size_t>(random.unit() * 0.999 * static_cast<double>(leaves.size()))];
  }
  Json made = kind < 0.75 ? Json::array() : Json::object();
  for (int i = static_cast<int>(random.unit() * 5); i > 0; --i) {
    if (made.is_array())
      made.push_back(random_json(random, levels - 1));
    else
      made[std::to_string(i)] = random_json(random, levels - 1);
  }
  return made;
}

TEST(UntrustedJson, ReadsWhatNlohmannReads) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    oracle::Random random(seed);
    const std::string text = random_json(random, 6).dump(seed % 2 == 0 ? -1 : 2);
    const ParsedJson parsed = parse_json(text);
    EXPECT_EQ(parsed.problem, "") << text;
    EXPECT_EQ(parsed.value, Json::parse(text)) << text;
  }
  for (const char* wrong : {"", " ", "{", "[1,]", "{\"a\":1}{}", "nul", "\"\xff\"", "1e999", "{\"a\" 1}", "NaN"}) {
    EXPECT_NE(parse_json(wrong).problem.find("not JSON"), std::string::npos) << wrong;
    EXPECT_TRUE(parse_json(wrong).value.is_null()) << wrong;
  }
}

TEST(UntrustedJson, RefusesWhatNestsDeeperThanItsLimit) {
  EXPECT_EQ(parse_json(nested(kDeepestJson)).problem, "");
  for (const std::size_t levels : {std::size_t{kDeepestJson} + 1, std::size_t{1000000}})
    EXPECT_NE(parse_json(nested(levels)).problem.find("nests deeper than 32"), std::string::npos);
  EXPECT_NE(parse_json(std::string(1000000, '[')).problem.find("nests deeper"), std::string::npos)
      << "before it sees that it never ends";
}

TEST(UntrustedJson, TakesTheLastOfARepeatedNameOrRefusesIt) {
  const std::string twice = R"({"a":{"b":1},"c":[{"b":1,"b":[2]}],"a":3})";
  EXPECT_EQ(parse_json(twice).value, Json::parse(R"({"a":3,"c":[{"b":[2]}]})"));
  EXPECT_NE(parse_json(twice, RepeatedNames::refused).problem.find("'b' twice"), std::string::npos);
  EXPECT_EQ(parse_json(R"([{"a":1},{"a":1}])", RepeatedNames::refused).problem, "") << "two objects";
}

TEST(UntrustedJson, WrapsNoNumber) {
  for (const char* large :
       {"18446744073709551615", "9223372036854775808", "9223372036854775813", "1.0", "true", "\"1\"", "-1", "65536"})
    EXPECT_FALSE(whole_number(Json::parse(large), 0, 65535)) << large;
  EXPECT_EQ(whole_number(Json(65535), 0, 65535), 65535);
  EXPECT_EQ(whole_number(Json(-3), -3, 0), -3);
}

TEST(UntrustedJson, WritesNamesThatAreNotUtf8AndShortensMessages) {
  EXPECT_EQ(written(Json("bad\xff")), "\"bad\xef\xbf\xbd\"");
  EXPECT_FALSE(is_utf8("bad\xff"));
  EXPECT_TRUE(is_utf8("caf\xc3\xa9"));
  EXPECT_EQ(shortened("short"), "short");
  std::string accents;
  for (int i = 0; i < 200; ++i) accents += "\xc3\xa9";
  EXPECT_TRUE(is_utf8(shortened("x" + accents)));
  EXPECT_LT(shown(Json(std::vector<int>(100000))).size(), 90U);
}

// An earlier version took 120 s for this header: the callback of its parser walked all siblings at each object's end.
TEST(UntrustedJson, AHeaderOfManyTensorsTakesTimeInProportionToItsSize) {
  std::string header = "{";
  for (int i = 0; i < 40000; ++i)
    header += text(i > 0 ? "," : "", "\"t", i, R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})");
  header += "}";
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(SafetensorsFile::from_bytes(bytes + header).names().size(), 40000U);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

// In an earlier version each of these ended the process: the words of a refusal were made by recursion, whether it was
// refused or not.
TEST(UntrustedJson, EveryReaderRefusesWhatNestsDeep) {
  const std::string deep = nested(100000);
  const auto header = [](const std::string& json) {
    std::string bytes(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
    return bytes + json;
  };
  const auto expect = [](const std::string& message) {
    EXPECT_NE(message.find("nests deeper"), std::string::npos) << message.substr(0, 200);
  };
  expect(message_of<InvalidArgument>([&] {
    (void)SafetensorsFile::from_bytes(header(R"({"a":{"dtype":"F32","shape":)" + deep + R"(,"data_offsets":[0,0]}})"));
  }));
  for (const char* field : {"vocab_size", "rms_norm_eps", "model_type", "tie_word_embeddings", "rope_theta",
                            "eos_token_id", "rope_scaling", "layer_types"}) {
    const std::string config = text(R"({"model_type":"llama",")", field, "\":", deep, "}");
    expect(message_of<InvalidArgument>([&] { (void)io::ModelConfig::parse(config, "", "config.json"); }));
  }
  for (const std::string& policy :
       {text(R"({"policy":"tova","budget":)", deep, "}"), text(R"({"policy":"tova","budget":16,"foo":)", deep, "}"),
        text(R"({"policy":"tova","budget":16,"scorer":{"heads":)", deep, "}}")})
    expect(message_of<InvalidArgument>([&] { (void)make_policy_from_json(policy); }));
  std::string decode = R"({"policy":"full"})";
  for (int i = 0; i < 5000; ++i) decode = R"({"policy":"asl","budget":64,"decode":)" + decode + "}";
  expect(message_of<InvalidArgument>([&] { (void)make_policy_from_json(decode); }));
}

}  // namespace
}  // namespace kvkeep::io::untrusted_json_test
