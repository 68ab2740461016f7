// SPDX-License-Identifier: Apache-2.0
// The bar of the kvkeep command: on a terminal, and only there.

#ifdef KVKEEP_CLI_PATH

#include "command_text.h"

namespace kvkeep::cli_progress_test {
namespace {

class CommandProgress : public CommandText {
 protected:
  void SetUp() override {
    CommandText::SetUp();
    std::string prose;
    for (int i = 0; i < 100; ++i) prose += text("the cat sat on the mat ", i, ". ");
    const std::string said = write("prose.txt", prose), from = place("model");
    commands_ = {
        {"full cache generates",
         {"fidelity", "--model", from, "--prompt", "the cat", "--new-tokens", "8", "--policy",
          "tova,budget=8,interval=2,recent=2"}},
        {"texts 1-1 of 1",
         {"perplexity", "--model", from, "--text", said, "--length", "40", "--texts", "1", "--policy", "full"}},
        {"tokens", {"calibrate", "--model", from, "--ids", "1,2,3,4,5,6,7,8", "--out", place("out.safetensors")}},
        {"tokens until the event",
         {"record", "--model", from, "--ids", "1,2,3", "--event", "4", "--out", place("event.safetensors")}},
        {"layers",
         {"record", "--model", from, "--ids", "1,2,3", "--kind", "prefill", "--out", place("prefill.safetensors")}},
        {"full runs to compare with",
         {"eval", "--model", model(), "--samples", "1", "--length", "80", "--policy", "full", "--diagnostics"}},
        {"prompts, ruler/niah-single-1",
         {"eval", "--model", from, "--samples", "1", "--length", "600", "--policy", "full", "--task",
          "ruler/niah-single-1"}}};
  }

  std::vector<std::pair<std::string, Words>> commands_;  // the label of a bar, and who shows it
};

TEST_F(CommandProgress, ShowsABarOnATerminalAndTakesItAway) {
  const std::string clear = "\r\033[K";
  for (const auto& [label, words] : commands_) {
    SCOPED_TRACE(label);
    const std::string all = shown(words);
    EXPECT_NE(all.find(clear + "["), std::string::npos) << all;
    EXPECT_NE(all.find(label), std::string::npos) << all;
    const std::size_t bar = all.rfind(" %  ");
    ASSERT_NE(bar, std::string::npos);
    EXPECT_NE(all.find(clear, bar), std::string::npos) << "the bar stays: " << all;
  }
}

TEST_F(CommandProgress, IsSilentElsewhere) {
  for (auto& [label, words] : commands_) {
    SCOPED_TRACE(label);
    EXPECT_EQ(run(words).err.find('\r'), std::string::npos) << "a pipe";
    EXPECT_EQ(shown(words, {.kind = "dumb"}).find('\033'), std::string::npos) << "a terminal that moves no cursor";
    words.push_back("--quiet");
    EXPECT_EQ(shown(words), "");
  }
}

}  // namespace
}  // namespace kvkeep::cli_progress_test

#endif  // KVKEEP_CLI_PATH
