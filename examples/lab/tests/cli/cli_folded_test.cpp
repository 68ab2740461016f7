// SPDX-License-Identifier: Apache-2.0
// What the kvkeep command says of policies that fold: that a budget left no room for what queries asked for.

#ifdef KVKEEP_CLI_PATH

#include <nlohmann/json.hpp>

#include "command.h"

namespace kvkeep::cli_folded_test {
namespace {

using nlohmann::json;

class Folded : public Command {
 protected:
  const Words eval{"eval", "--model", KVKEEP_TEST_MODEL_DIR, "--task", "ask", "--length", "200", "--samples", "1"},
      generate{"generate", "--model", KVKEEP_TEST_MODEL_DIR, "--task", "ask", "--length", "200", "--forced"};

  Outcome with(Words words, const std::string& policy, const Words& more = {}) {
    words.insert(words.end(), {"--policy", policy});
    words.insert(words.end(), more.begin(), more.end());
    return run(words);
  }
};

TEST_F(Folded, ABudgetThatATextFillsIsNamedIfNothingOpens) {
  const std::string tight = "sekv,budget=30,recent=20", wide = "sekv,budget=100";
  for (const Words& command : {eval, generate}) {
    const std::string said = with(command, tight).err;
    for (const char* words :
         {"note: sekv,recent=20", " opened nothing: ", " entries are always there, of a budget of 30; ",
          " spans that queries asked for did not fit"})
      EXPECT_NE(said.find(words), std::string::npos) << said;
    EXPECT_EQ(with(command, tight, {"--quiet"}).err, "");
    EXPECT_EQ(with(command, wide).err.find("opened nothing"), std::string::npos);
    EXPECT_EQ(with(command, "sekv,recent=20,mass=1").err.find("opened nothing"), std::string::npos)
        << "no query asked for a span";
  }
  const Outcome done = with(generate, tight, {"-o", "json"});
  ASSERT_EQ(done.code, 0) << done.err;
  const json folded = json::parse(done.out)["folded"];
  EXPECT_EQ(folded["opened"], 0);
  EXPECT_GT(folded["did_not_fit"], 0);
}

TEST_F(Folded, StandsBesideDroppingWhereNoPolicyIsNamed) {
  Words words = eval;
  words.insert(words.end(), {"-o", "csv"});
  const Outcome outcome = run(words);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const char* policy : {"\ntova,", "\n\"tova,rest=fold\",", "\noracle,"})
    EXPECT_NE(outcome.out.find(policy), std::string::npos) << outcome.out;
}

TEST_F(Folded, ABudgetThatCannotOpenASpanIsRefusedBeforeAnythingRuns) {
  const Outcome made = with(generate, "sekv,budget=128,recent=512"),
                met = with(generate, "sekv,budget=160,max_span=128");
  EXPECT_EQ(made.code, 2);
  EXPECT_NE(made.err.find("budget: 128, but 516 tokens always stay"), std::string::npos) << made.err;
  EXPECT_EQ(met.code, 2);
  EXPECT_NE(met.err.find("budget: 160, but 36 tokens always stay"), std::string::npos) << met.err;
}

}  // namespace
}  // namespace kvkeep::cli_folded_test

#endif  // KVKEEP_CLI_PATH
