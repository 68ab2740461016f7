// SPDX-License-Identifier: Apache-2.0
#pragma once
// The kvkeep command on a model that has a tokenizer.

#include <nlohmann/json.hpp>

#include "command.h"
#include "gguf_model_parts.h"
#include "gguf_tokenizer_parts.h"
#include "kvlab/tokenizer.h"

namespace kvkeep {

/// A model of random weights that has a tokenizer, as a folder and as a GGUF file.
class CommandText : public Command {
 protected:
  void SetUp() override {
    Command::SetUp();
    const lm::Tokenizer tokenizer = lm::Tokenizer::read(tokenizer_file());
    io::ModelConfig config =
        io::ModelConfig::shape(io::Architecture::llama, 2, 32, 48, 4, 2, 8, tokenizer.vocab_size());
    config.end_tokens = {2};
    lm::write_random_checkpoint(place("model"), config, 3, Dtype::f32);
    fs::copy(tokenizer_file(), place("model/tokenizer.json"));
    fs::copy(golden("chat/smollm2.jinja"), place("model/chat_template.jinja"));
  }

  static std::string tokenizer_file() { return golden("tokenizer/smollm/tokenizer.json"); }

  // The folder's model and tokenizer in one file.
  std::string gguf() const {
    const io::ModelConfig config = io::ModelConfig::read(place("model"));
    testing::GgufParts parts = testing::metadata(config);
    testing::with_tokenizer_of(parts, content(tokenizer_file()), "smollm");
    parts.text("tokenizer.chat_template", content(place("model/chat_template.jinja")));
    return write("model.gguf", testing::with_tensors_of(parts, place("model"), config).bytes());
  }

  nlohmann::json answered(Words words) {
    words.insert(words.end(), {"-o", "json", "--quiet"});
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out, nullptr, false);
  }
  nlohmann::json tokens(Words words) {
    words.insert(words.begin(), {"tokens", "--model", place("model")});
    return answered(words);
  }
};

/// With a text of its own, as a file and as ids.
class CommandProse : public CommandText {
 protected:
  void SetUp() override {
    CommandText::SetUp();
    std::string prose;
    for (int i = 0; i < 300; ++i)
      prose += text(i % 3 == 0 ? "the cat sat on the mat " : "a hat and a rat sat there ", i * 17 % 97, ". ");
    prose_ = write("prose.txt", prose);
    ids_ = lm::Tokenizer::read(tokenizer_file()).encode(prose, lm::SpecialTokens::plain, false);
  }

  std::string prose_;
  std::vector<std::int32_t> ids_;
};

}  // namespace kvkeep
