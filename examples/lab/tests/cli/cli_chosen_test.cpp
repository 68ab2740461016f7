// SPDX-License-Identifier: Apache-2.0
// What the kvkeep command says of the slots that a scorer chose, and that it warns where that was none.

#ifdef KVKEEP_CLI_PATH

#include <nlohmann/json.hpp>

#include "command.h"

namespace kvkeep::cli_chosen_test {
namespace {

using nlohmann::json;

class Chosen : public Command {
 protected:
  Outcome generate(const std::string& policy, const Words& more = {}) {
    std::string ids = "1";
    for (int i = 2; i <= 40; ++i) ids += "," + std::to_string(i);
    Words words{"generate", "--model", model(), "--ids", ids, "--policy", policy, "--max-new-tokens", "30"};
    words.insert(words.end(), more.begin(), more.end());
    return run(words);
  }
};

TEST_F(Chosen, APolicyWhoseScorerHasNoSayIsWarnedAboutOnce) {
  const auto warned = [&](const std::string& policy, const std::string& sentence) {
    const Outcome outcome = generate(policy);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(outcome.err.find("warning: "), outcome.err.rfind("warning: ")) << outcome.err;
    EXPECT_NE(outcome.err.find("warning: " + sentence), std::string::npos) << outcome.err;
    EXPECT_EQ(generate(policy, {"--quiet"}).err, "");
  };
  warned("tova,budget=24,interval=8,recent=20",
         "tova chooses none of the 24 slots: sink=4 and recent=20 take the whole budget");
  warned("snapkv,budget=24,interval=8",
         "snapkv chooses none of the 24 slots: sink=4 and the scorer's newest 20 take the whole budget");
  warned("tova,budget=24,interval=8,recent=16", "tova chooses 4 of the 24 slots: sink=4 and recent=16 take the others");
  warned("tova,ratio=0.7,interval=8,recent=100", "tova chose none of the slots that its events kept");
  for (const char* policy : {"tova,budget=24,interval=8", "streaming,budget=24,interval=8,recent=20"})
    EXPECT_EQ(generate(policy).err.find("warning"), std::string::npos) << policy;
}

TEST_F(Chosen, ARunSaysHowManySlotsTheScorerChose) {
  const std::string policy = "tova,budget=24,interval=8,sink=2,recent=4";
  EXPECT_NE(generate(policy).out.find("; the scorer chose 75.0 % of the slots that stayed"), std::string::npos);
  const json done = json::parse(generate(policy, {"-o", "json"}).out);
  ASSERT_GT(done["events"].size(), 1U);
  for (const json& event : done["events"]) {
    EXPECT_EQ(event["slots_kept"].get<int>() * 18, event["slots_chosen"].get<int>() * 24);
    EXPECT_GT(event["slots_chosen"], 0);
  }
  const json plan = json::parse(
      run({"plan", "--model", model(), "--policy", policy, "--prompt", "40", "--length", "70", "-o", "json"}).out);
  EXPECT_EQ(plan["kept_slots"], done["events"][0]["slots_kept"]);
  EXPECT_EQ(plan["chosen_slots"], done["events"][0]["slots_chosen"]);
}

TEST_F(Chosen, TablesShowTheShareOfEveryPolicy) {
  const Outcome outcome = run({"eval", "--model", model(), "--task", "ask", "--length", "96", "--samples", "1",
                               "--interval", "8", "--policy", "full", "--policy", "tova,budget=24,interval=8",
                               "--policy", "keydiff,budget=24,interval=8,recent=2", "-o", "json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json rows = json::parse(outcome.out);
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_TRUE(rows[0]["chosen"].is_null());
  EXPECT_NEAR(rows[1]["chosen"].get<double>(), 14.0 / 24, 1e-4);
  EXPECT_NEAR(rows[2]["chosen"].get<double>(), 18.0 / 24, 1e-4);
}

TEST_F(Chosen, PagesOfPoliciesSayItForSomeBudgets) {
  EXPECT_NE(run({"policies", "tova"}).out.find("Chooses by score: 14 of 24, 92 of 128, 988 of 1024 slots"),
            std::string::npos);
  EXPECT_NE(run({"policies", "snapkv"}).out.find("Chooses by score: 0 of 24,"), std::string::npos);
  EXPECT_EQ(run({"policies", "sekv"}).out.find("Chooses"), std::string::npos);
}

}  // namespace
}  // namespace kvkeep::cli_chosen_test

#endif  // KVKEEP_CLI_PATH
