#include "kvkeep/lm/chat.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kvkeep/core/error.h"
#include "message_of.h"

namespace kvkeep::lm::chat_test {
namespace {

using kvkeep::testing::message_of;

const std::filesystem::path kGolden = std::filesystem::path(KVKEEP_TEST_GOLDEN_DIR) / "chat";

std::string content_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

ChatTemplate published(const std::string& name) {
  return ChatTemplate::recognise(content_of(kGolden / (name + ".jinja")));
}

std::vector<ChatMessage> messages_of(const nlohmann::json& list) {
  std::vector<ChatMessage> messages;
  for (const auto& message : list) messages.push_back({message[0], message[1]});
  return messages;
}

TEST(ChatTemplate, RendersAsJinjaDoes) {
  const auto cases = nlohmann::json::parse(content_of(kGolden / "rendered.json"));
  std::map<std::string, int> seen;
  for (const auto& c : cases) {
    const std::string name = c["template"];
    EXPECT_EQ(published(name).render(messages_of(c["messages"]), c["add_generation_prompt"]),
              c["text"].get<std::string>())
        << c.dump(-1, ' ', true);
    ++seen[name];
  }
  EXPECT_EQ(seen.size(), 5U);
  for (const auto& [name, count] : seen) EXPECT_GE(count, 20) << name;
}

TEST(ChatTemplate, SaysWhatItIs) {
  EXPECT_EQ(published("chatml").name(), "chatml");
  EXPECT_EQ(published("chatml").default_system(), std::nullopt);
  EXPECT_EQ(published("smollm2").name(), "chatml");
  EXPECT_EQ(published("smollm2").default_system(),
            "You are a helpful AI assistant named SmolLM, trained by Hugging Face");
  EXPECT_EQ(published("qwen2").default_system(), "You are a helpful assistant.");
  EXPECT_EQ(published("qwen2.5").name(), "qwen2.5");
  EXPECT_EQ(published("qwen2.5").default_system(),
            "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.");
  EXPECT_EQ(published("llama3").name(), "llama3");
  EXPECT_TRUE(published("llama3").writes_bos());
  EXPECT_FALSE(published("qwen2.5").writes_bos());
}

TEST(ChatTemplate, IsRecognisedHoweverItsLineBreaksAreWritten) {
  for (const char* name : {"chatml", "smollm2", "qwen2", "qwen2.5", "llama3"}) {
    const std::string given = content_of(kGolden / (std::string(name) + ".jinja"));
    const std::vector<ChatMessage> messages{{"user", "Hi"}};
    std::string escaped, raw;
    bool in_string = false;
    for (const char c : given) {
      if (c == '\'') in_string = !in_string;
      escaped += in_string && c == '\n' ? std::string("\\n") : std::string(1, c);
    }
    EXPECT_EQ(ChatTemplate::recognise(escaped).render(messages), published(name).render(messages)) << name;
    EXPECT_EQ(ChatTemplate::recognise(given.ends_with('\n') ? given.substr(0, given.size() - 1) : given + '\n')
                  .render(messages),
              published(name).render(messages))
        << name;
  }
}

TEST(ChatTemplate, TakesAnotherDefaultSystemMessageInTheSamePlace) {
  for (const char* name : {"qwen2", "qwen2.5"}) {
    std::string given = content_of(kGolden / (std::string(name) + ".jinja"));
    const std::string old = published(name).default_system().value();
    for (std::size_t at = given.find(old); at != std::string::npos; at = given.find(old, at + 1))
      given.replace(at, old.size(), "Be kind.");
    EXPECT_EQ(ChatTemplate::recognise(given).default_system(), "Be kind.") << name;
  }
}

TEST(ChatTemplate, PutsTheModelsOwnFirstTokenInFrontOfLlama3) {
  const auto llama = ChatTemplate::recognise(content_of(kGolden / "llama3.jinja"), "<s>");
  const std::vector<ChatMessage> messages{{"user", "Hi"}};
  EXPECT_EQ(llama.render(messages, false), "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>");
}

TEST(ChatTemplate, IsRefusedWhereAnythingElseStandsInIt) {
  std::vector<std::string> unknown{
      "", "{{ messages }}", std::string("\0", 1), "\x01", "{% for message in messages %}", std::string(100000, '{')};
  for (const char* name : {"chatml", "smollm2", "qwen2", "qwen2.5", "llama3"}) {
    const std::string given = content_of(kGolden / (std::string(name) + ".jinja"));
    unknown.insert(unknown.end(), {given + "x", "x" + given, given.substr(0, given.size() / 2), given.substr(10)});
    unknown.push_back(given);
    unknown.back().replace(given.find("role"), 4, "rule");
  }
  std::string two_messages = content_of(kGolden / "qwen2.5.jinja"), quoted = content_of(kGolden / "qwen2.jinja");
  two_messages.replace(two_messages.find("You are Qwen, created"), 7, "You were");
  quoted.replace(quoted.find("helpful"), 7, "\\x41");
  unknown.insert(unknown.end(), {two_messages, quoted});
  for (const std::string& jinja : unknown) {
    const std::string message = message_of<Unsupported>([&] { (void)ChatTemplate::recognise(jinja); });
    EXPECT_NE(message.find("--raw"), std::string::npos) << message;
    EXPECT_LT(message.size(), 400U);
  }
}

TEST(ChatTemplate, RefusesNoMessagesAndUnknownRoles) {
  const auto chatml = published("chatml");
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)chatml.render({}); }).find("no messages"), std::string::npos);
  const std::vector<ChatMessage> tool{{"user", "Hi"}, {"tool", "42"}};
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)chatml.render(tool); }).find("\"tool\""), std::string::npos);
}

TEST(ChatTemplate, TakesContentsThatAreNotUtf8AsTheyAre) {
  const std::vector<ChatMessage> messages{{"user", " \xff\xc3 "}};
  EXPECT_NE(published("llama3").render(messages).find("\n\n\xff\xc3<|eot_id|>"), std::string::npos);
  EXPECT_NE(published("chatml").render(messages).find("\n \xff\xc3 <|im_end|>"), std::string::npos);
}

}  // namespace
}  // namespace kvkeep::lm::chat_test
