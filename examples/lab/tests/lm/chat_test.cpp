// SPDX-License-Identifier: Apache-2.0
#include "kvlab/chat.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"
#include "message_of.h"

namespace kvkeep::lm::chat_test {
namespace {

using kvkeep::testing::message_of;
using nlohmann::json;
using Messages = std::vector<ChatMessage>;

const std::filesystem::path kGolden = std::filesystem::path(KVKEEP_TEST_GOLDEN_DIR) / "chat";
const ChatContext kTokens{.bos = "<s>", .eos = "</s>"};

std::string content_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

ChatTemplate published(const std::string& name) {
  return ChatTemplate::parse(content_of(kGolden / (name + ".jinja")), kTokens);
}

Messages messages_of(const json& list) {
  Messages messages;
  for (const auto& message : list) messages.push_back({message[0], message[1]});
  return messages;
}

std::string rendered(const std::string& jinja, const Messages& messages = {{"user", "Hi"}}) {
  return ChatTemplate::parse(jinja, kTokens).render(messages);
}

// Whether a template renders the text; if that is null, whether it fails.
void expect_text(const json& text, const std::string& where, auto&& render) {
  std::optional<std::string> got;
  std::string failed;
  try {
    got = render();
  } catch (const Error& error) {
    failed = error.what();
  }
  EXPECT_EQ(got.has_value(), text.is_string()) << where << "\n" << failed;
  if (got && text.is_string()) {
    EXPECT_EQ(*got, text.get<std::string>()) << where;
  }
}

TEST(ChatTemplate, RendersWhatJinjaMakesOfPublishedTemplates) {
  const json golden = json::parse(content_of(kGolden / "rendered.json"));
  for (const char* name : {"chatml", "gemma2", "gemma3", "llama2", "llama3", "llama3.1", "llama3.2", "mistral", "qwen2",
                           "qwen2.5", "qwen3", "r1-llama", "r1-qwen", "smollm2", "smollm3", "zephyr"}) {
    const ChatTemplate jinja = published(name);
    const json& texts = golden["texts"][name];
    ASSERT_EQ(texts.size(), 2 * golden["conversations"].size()) << name;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const json& conversation = golden["conversations"][i / 2];
      expect_text(texts[i], name + conversation.dump(-1, ' ', true),
                  [&] { return jinja.render(messages_of(conversation), i % 2 == 1); });
    }
  }
  EXPECT_EQ(golden["texts"].size(), 16U);
}

TEST(ChatTemplate, RendersWhatJinjaMakesOfEachConstruct) {
  const json snippets = json::parse(content_of(kGolden / "snippets.json"));
  EXPECT_GT(snippets.size(), 80U);
  for (const json& snippet : snippets)
    expect_text(snippet["text"], snippet["jinja"],
                [&] { return rendered(snippet["jinja"], {{"system", "Be."}, {"user", " Hi\n"}, {"assistant", "é"}}); });
}

TEST(ChatTemplate, IsRefusedByNameWhereItLeavesWhatIsRead) {
  const std::pair<const char*, const char*> cases[] = {
      {"{{ messages | my_own }}", "the filter 'my_own'"},
      {"{{ messages is my_own }}", "the test 'my_own'"},
      {"{{ messages | map('my_own') }}", "the filter 'my_own'"},
      {"{{ messages | selectattr('role', 'my_own') }}", "the test 'my_own'"},
      {"{{ messages | selectattr('role', role) }}", "not a string"},
      {"{{ 'a'.center(9) }}", "the method 'center'"},
      {"{% if false %}{{ lipsum() }}{% endif %}", "'lipsum'"},
      {"{{ my_own(1) }}", "the function 'my_own'"},
      {"{{ messages[0]() }}", "a call"},
      {"{{ messages | tojson(separators=(',', ':')) }}", "the argument 'separators' of 'tojson'"},
      {"{% include 'x' %}", "{% include %}"},
      {"{% raw %}{{{% endraw %}", "{% raw %}"},
      {"{% filter upper %}x{% endfilter %}", "{% filter %}"},
      {"{% break %}", "{% break %}"},
      {"{% for m in messages recursive %}{% endfor %}", "recursive"},
      {"{{ 1.5 }}", "the number '1'"},
      {"{{ 4 / 2 }}", "'/'"},
      {"{{ 2 ** 8 }}", "'**'"},
      {"{{ {1: 2} }}", "strings only"},
      {"{{ messages.__class__ }}", "'__class__'"},
      {"{% for m in messages %}", "{% endfor %} is missing"},
      {"{% if true %}{% endfor %}", "{% endfor %} is not known here"},
      {"{% endif %}", "{% endif %} is not known here"},
      {"{{ 'a }}", "a string does not end"},
      {"{{ a", "a tag does not end"},
      {"{# a", "a comment does not end"},
      {"{{ a b }}", "'b'"},
      {"{{ (1] }}", "']'"},
      {"{{ '\\ud800' }}", "no character"},
      {"{{ a $ b }}", "'$'"},
      {"{{ }}", "the end of a tag"},
  };
  for (const auto& [jinja, named] : cases) {
    const std::string message =
        message_of<Unsupported>([&, &jinja = jinja] { (void)ChatTemplate::parse(text("a\nb\n", jinja)); });
    EXPECT_TRUE(message.starts_with("read chat template: line 3: ")) << jinja << ": " << message;
    EXPECT_NE(message.find(named), std::string::npos) << message;
    EXPECT_NE(message.find("--raw"), std::string::npos) << message;
  }
}

TEST(ChatTemplate, NamesTheLineWhereValuesDoNotFit) {
  EXPECT_EQ(message_of<InvalidArgument>([] { (void)rendered("\n{{ messages[0].name + 'x' }}"); }),
            "render chat: line 2 of the template: a string is needed; given an undefined value");
  EXPECT_EQ(message_of<InvalidArgument>([] { (void)rendered("{{ raise_exception('Only\nusers') }}"); }),
            "render chat: the template refuses the messages: Only\\nusers");
  for (const char* jinja :
       {"{{ messages }}", "{{ 'É' | lower }}", "{{ messages[0].items }}", "{{ 9223372036854775807 + 1 }}",
        "{{ strftime_now('%H') }}", "{% for m in messages %}{{ loop.cycle }}{% endfor %}"})
    EXPECT_NE(message_of<Unsupported>([&] { (void)rendered(jinja); }).find("line 1"), std::string::npos) << jinja;
}

TEST(ChatTemplate, WritesTheDateThatItIsGivenAndNeverToday) {
  const std::string jinja = "{{ strftime_now('%A %a %d %B %b %m %Y') }}";
  EXPECT_EQ(rendered(jinja), "Friday Fri 26 July Jul 07 2024");
  using std::chrono::year_month_day;
  const auto on = [&](int year, unsigned month, unsigned day) {
    return ChatTemplate::parse(
        jinja, {.date = year_month_day(std::chrono::year(year), std::chrono::month(month), std::chrono::day(day))});
  };
  const Messages messages{{"user", "Hi"}};
  EXPECT_EQ(on(2000, 2, 29).render(messages), "Tuesday Tue 29 February Feb 02 2000");
  EXPECT_THROW((void)on(2023, 2, 29), InvalidArgument);
}

TEST(ChatTemplate, KnowsWhetherItWritesTheFirstToken) {
  const Messages messages{{"user", "Hi"}};
  const auto begins = [&](const ChatTemplate& jinja) { return jinja.begins_with_bos(jinja.render(messages)); };
  EXPECT_TRUE(begins(published("llama3")));
  EXPECT_TRUE(begins(published("gemma3")));
  EXPECT_FALSE(begins(published("qwen2.5")));
  EXPECT_FALSE(begins(published("zephyr")));
  EXPECT_FALSE(begins(ChatTemplate::parse("x"))) << "there is none";
  EXPECT_FALSE(begins(ChatTemplate::parse("x", {.bos = ""})));
}

TEST(ChatTemplate, EndsTemplatesThatWouldNeverEndOrFillTheMemory) {
  const std::string doubling = "{% set n = namespace(x='abcd', l=[], m=[]) %}{% for i in range(60) %}";
  const auto many = [](const std::string& one) {
    std::string all;
    for (int i = 0; i < 20000; ++i) all += one;
    return all;
  };
  const std::vector<std::string> hostile{
      doubling + "{% set n.x = n.x ~ n.x %}{% endfor %}",
      doubling + "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
      doubling + "{% set n.x = [n.x, n.x] | join(n.x) %}{% endfor %}",
      doubling + "{% set n.l = n.l + n.l + [1] %}{% endfor %}",
      doubling + "{% set n.l = [n.l, n.l] %}{% set n.m = [n.m, n.m] %}{% endfor %}{{ n.l == n.m }}",
      doubling + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | tojson }}",
      doubling + "{{ 'a' * 9999999999 }}{% endfor %}",
      "{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = [n.l] %}{% endfor %}",
      "{% set n = namespace() %}{% set n.n = n %}",
      "{% set n = namespace() %}{% set n.l = [n] %}",
      "{% macro f() %}{% endmacro %}{% set n = namespace() %}{% set n.f = f %}",
      "{% for i in messages %}{% set x = [loop] %}{% endfor %}",
      "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
      "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
      "{% for i in range(100000) %}{% set x = 'ab' * 100000 %}{% endfor %}",
      "{% for i in range(100000) %}{% if messages[0].content in 'b' * 1000 %}{% endif %}{% endfor %}",
      "{{ " + many("(") + "1" + many(")") + " }}",
      "{{ " + many("[") + many("]") + " }}",
      "{{ " + many("-") + "1 }}",
      "{{ " + many("not ") + "1 }}",
      "{{ 1" + many(" + 1") + " }}",
      "{{ a" + many(".b") + " }}",
      "{{ a" + many("[a") + many("]") + " }}",
      "{{ a" + many(" | trim") + " }}",
      "{{ a" + many(" if a else a") + " }}",
      many("{% if a %}") + many("{% endif %}"),
      many("{% for a in a %}"),
      std::string((1U << 20U) + 1, ' '),
  };
  std::string busy = "{% for i in range(100000) %}";  // makes nothing, and takes long
  for (int i = 0; i < 100; ++i) busy += "{% if 1 %}{% endif %}";
  EXPECT_THROW((void)rendered(busy + "{% endfor %}"), InvalidArgument);
  for (const std::string& jinja : hostile)
    EXPECT_THROW((void)rendered(jinja, {{"user", std::string(10000, 'a')}}), Error) << jinja.substr(0, 120);
}

TEST(ChatTemplate, TakesLongPromptsAndManyMessages) {
  const std::string content(4U << 20U, 'x');
  EXPECT_EQ(published("llama3.1").render(Messages{{"user", content}}).size(),
            published("llama3.1").render(Messages{{"user", ""}}).size() + content.size());
  Messages messages;
  for (int i = 0; i < 2000; ++i) messages.push_back({i % 2 == 0 ? "user" : "assistant", "Well."});
  for (const char* name : {"qwen3", "smollm3", "llama3.2", "gemma3"})
    EXPECT_GT(published(name).render(messages).size(), 2000U * 20) << name;
}

TEST(ChatTemplate, RefusesNoMessages) {
  EXPECT_NE(message_of<InvalidArgument>([] { (void)rendered("x", {}); }).find("no messages"), std::string::npos);
}

TEST(ChatTemplate, TakesContentsThatAreNotUtf8AsTheyAre) {
  const Messages messages{{"user", " \xff\xc3 "}};
  EXPECT_NE(published("llama3").render(messages).find("\n\n\xff\xc3<|eot_id|>"), std::string::npos);
  EXPECT_NE(published("chatml").render(messages).find("\n \xff\xc3 <|im_end|>"), std::string::npos);
  EXPECT_EQ(rendered("{{ messages[0].content[::-1] }}", messages), " \xc3\xff ");
}

}  // namespace
}  // namespace kvkeep::lm::chat_test
