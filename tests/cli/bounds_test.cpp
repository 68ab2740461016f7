// SPDX-License-Identifier: Apache-2.0
// Where the text decides what a policy holds, kvkeep plan says the least and the most, and runs stay in between.

#ifdef KVKEEP_CLI_PATH

#include <nlohmann/json.hpp>

#include "command.h"

namespace kvkeep::cli_bounds_test {
namespace {

using nlohmann::json;

class Bounds : public Command {
 protected:
  json plan(Words words) {
    words.insert(words.begin(), {"plan", "--dtype", "f32", "--page-size", "1", "-o", "json"});
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.code == 0 ? json::parse(outcome.out) : json();
  }
};

json between(std::int64_t least, std::int64_t most) { return {{"least", least}, {"most", most}}; }

TEST_F(Bounds, OfSekvFollowFromItsOptions) {
  // Before the window of 8 are 4 sinks and 88 tokens. At most a tenth of all 100 is 3 deviations above the mean, with
  // runs of up to 3 tokens between them that are too short: 10 + 11 * 3 stay. So 45 to 88 fold, into spans of 4 to 16.
  const json all = plan({"--shape", "2:2:1:64", "--prompt", "100", "--length", "100", "--policy",
                         "sekv,alpha=3,recent=8,min_span=4,max_span=16,interval=8,sketch=false"});
  constexpr std::int64_t kRows = 2, kSlot = 512, kSpan = 516;
  EXPECT_EQ(all["events"], between(1, 1));
  EXPECT_EQ(all["folded"], between(45 * kRows, 88 * kRows));
  EXPECT_EQ(all["spans"], between(3 * kRows, 22 * kRows));
  EXPECT_EQ(all["sequence"]["peak_bytes"], between(100 * kSlot * kRows, 100 * kSlot * kRows));
  EXPECT_EQ(all["sequence"]["kept_bytes"],
            between(kRows * (12 * kSlot + 88 * kSpan / 16), kRows * (55 * kSlot + 45 * kSpan / 4)));
  EXPECT_EQ(all["sequence"]["far_bytes"], between(0, 88 * kSlot * kRows)) << "rows as they are, at most";
  EXPECT_EQ(all["layers"][0]["kept_slots"], between(12, 55));
  EXPECT_EQ(all["own"]["surprisal"], 400);
}

TEST_F(Bounds, OfSlotsThatFoldFollowFromTheBudget) {
  // 76 of 100 slots fold, into spans of 4 to 16 tokens.
  const json all = plan({"--shape", "2:2:1:64", "--prompt", "100", "--length", "100", "--policy",
                         "tova,budget=24,interval=8,prefill=cut,rest=fold,memory.min_span=4,memory.max_span=16"});
  EXPECT_EQ(all["folded"], between(152, 152));
  EXPECT_EQ(all["spans"], between(10, 38));
  const std::int64_t sketches = 2 * 76 * 10;
  EXPECT_EQ(all["sequence"]["kept_bytes"],
            between(2 * 24 * 512 + 10 * 516 + sketches, 2 * 24 * 512 + 38 * 516 + sketches));
}

TEST_F(Bounds, OfAslHoldForEveryLayerThatMaySelect) {
  const auto slots = [&](const std::string& policy, const char* what) {
    const json bytes =
        plan({"--shape", "6:2:1:64", "--prompt", "100", "--length", "110", "--policy", policy})["sequence"][what];
    return between(bytes["least"].get<std::int64_t>() / 512, bytes["most"].get<std::int64_t>() / 512);
  };
  // Layers 3 to 5 may select: ranks of layer 2 are compared with themselves. Then 10 tokens are decoded.
  EXPECT_EQ(slots("asl,budget=40,window=8,min_layer=2", "kept_bytes"), between(4 * 110 + 2 * 50, 6 * 110));
  EXPECT_EQ(slots("asl,budget=40,window=8,min_layer=2,threshold=2", "kept_bytes"), between(3 * 110 + 3 * 50, 6 * 110));
  EXPECT_EQ(slots("fastkv,budget=40,window=8,layer=1", "kept_bytes"), between(2 * 110 + 4 * 50, 2 * 110 + 4 * 50));
  EXPECT_EQ(slots("asl,budget=40,window=8,min_layer=2,cache=20", "kept_bytes"), between(6 * 30, 6 * 30));
  EXPECT_EQ(slots("asl,budget=40,window=8,min_layer=2,cache=20", "peak_bytes"), between(6 * 30, 5 * 20 + 100))
      << "a layer holds what reaches it until it has decided";
  EXPECT_EQ(slots("asl-2pass,budget=40,window=8,min_layer=2", "kept_bytes"), between(6 * 50, 6 * 50));
  EXPECT_EQ(slots("asl-2pass,budget=40,window=8,min_layer=2", "peak_bytes"), between(4 * 100, 6 * 100));
  EXPECT_EQ(slots("gemfilter,budget=40,layer=2", "peak_bytes"), between(300, 300));
}

TEST_F(Bounds, AreRefusedByNameWhereThereAreNone) {
  const auto said = [&](const std::string& policy, const std::string& prompt) {
    const Outcome outcome =
        run({"plan", "--shape", "6:2:1:64", "--length", "200", "--prompt", prompt, "--policy", policy});
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    return outcome.err;
  };
  EXPECT_NE(said("asl,budget=40,window=8", "0").find("--prompt: 0, but asl narrows prompts"), std::string::npos);
  EXPECT_NE(said("threshold-tova,budget=40,threshold=0.1,rest=fold", "100").find("passes a threshold"),
            std::string::npos);
  EXPECT_NE(said("asl,budget=40,window=8,cache_mass=0.5+tova,budget=20", "100").find("a share of the attention"),
            std::string::npos);
  EXPECT_NE(said("sekv,budget=130,max_span=128", "100").find("budget: 130, but 36 tokens"), std::string::npos);
}

TEST_F(Bounds, StandInTablesForPeopleAndPrograms) {
  const auto as = [&](const char* format) {
    return run({"plan", "--shape", "2:2:1:64", "--prompt", "100", "--length", "120", "--batch", "3", "--policy",
                "sekv,recent=8,interval=8", "-o", format})
        .out;
  };
  const std::string table = as("md");
  for (const char* words : {"the text decides", "| near at the peak", "| factors, far", "| full slots |", " least |"})
    EXPECT_NE(table.find(words), std::string::npos) << table;
  EXPECT_NE(as("csv").find("peak_bytes_least,peak_bytes_most"), std::string::npos);
  const json all = json::parse(as("json"));
  EXPECT_EQ(all["total"]["peak_bytes"]["most"], 3 * all["sequence"]["peak_bytes"]["most"].get<std::int64_t>());
}

}  // namespace
}  // namespace kvkeep::cli_bounds_test

#endif  // KVKEEP_CLI_PATH
