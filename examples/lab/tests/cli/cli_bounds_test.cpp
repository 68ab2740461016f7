// SPDX-License-Identifier: Apache-2.0
// Where the text decides what a policy holds, kvkeep plan says the least and the most, and runs stay in between.

#ifdef KVKEEP_CLI_PATH

#include <nlohmann/json.hpp>

#include "command.h"

namespace kvkeep::cli_measured_bounds_test {
namespace {

using nlohmann::json;

class MeasuredBounds : public Command {
 protected:
  json plan(Words words) {
    words.insert(words.begin(), {"plan", "--dtype", "f32", "--page-size", "1", "-o", "json"});
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.code == 0 ? json::parse(outcome.out) : json();
  }
};

TEST_F(MeasuredBounds, HoldWhatTheModelMeasures) {
  std::string ids = "1";
  unsigned state = 7;
  for (int i = 1; i < 300; ++i) ids += "," + std::to_string(8 + (state = state * 1103515245U + 12345U) / 65536U % 200U);
  const std::string shortcut = "sekv,recent=16,interval=16,alpha=";
  for (const std::string& policy :
       {shortcut + "1",
        shortcut + "3,max_span=64",
        shortcut + "3,min_span=1,max_span=3,sketch=false",
        shortcut + "-1,min_span=8",
        shortcut + "1e6,budget=100",
        shortcut + "0.5,budget=160,store=bf16",
        std::string("sekv,interval=32"),
        std::string("sekv,recent=100,interval=7"),
        std::string("sekv,budget=60"),
        std::string("sekv,variant=official,rank=energy,interval=16"),
        std::string("tova,budget=64,interval=16,rest=fold"),
        std::string(
            "ams-tova,budget=64,interval=16,window=8,prefill=cut,rest=fold,memory.min_span=3,memory.max_span=5"),
        std::string("adakv-tova,budget=64,interval=16,prefill=cut,rest=fold"),
        std::string("pyramidkv-tova,budget=64,interval=16,rest=fold"),
        std::string("asl,budget=100,window=8,min_layer=0"),
        std::string("asl,budget=100,window=8,min_layer=0,cache=40"),
        std::string("asl,budget=100,window=8,min_layer=0,cache_mass=0.7"),
        std::string("asl,budget=100,window=8,min_layer=0,select_mass=0.5,threshold=2"),
        std::string("fastkv,budget=24,window=8,layer=0+tova,budget=110,interval=9"),
        std::string("asl-2pass,budget=100,window=8,min_layer=0"),
        std::string("gemfilter,budget=100,layer=1"),
        std::string("pyramidinfer,keep=0.5,min_context=8"),
        std::string("fastkv,budget=100,window=8,layer=1"),
        std::string("asl,budget=100,window=8,min_layer=0+tova,budget=80,interval=16"),
        std::string("asl,budget=100,window=8,min_layer=0+tova,budget=60,interval=16,rest=fold"),
        std::string("gemfilter,budget=100,layer=1+tova,budget=60,interval=16,prefill=cut,rest=fold")}) {
    SCOPED_TRACE(policy);
    const json bounds =
        plan({"--model", KVKEEP_TEST_MODEL_DIR, "--prompt", "300", "--length", "359", "--policy", policy});
    const Outcome outcome = run({"generate", "--model", KVKEEP_TEST_MODEL_DIR, "--ids", ids, "--max-new-tokens", "60",
                                 "--policy", policy, "-o", "json", "--quiet"});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const json measured = json::parse(outcome.out);
    const auto inside = [&](const char* what, std::int64_t bytes, const json& least_and_most) {
      EXPECT_GE(bytes, least_and_most["least"].get<std::int64_t>()) << what;
      EXPECT_LE(bytes, least_and_most["most"].get<std::int64_t>()) << what;
    };
    inside("peak", measured["peak_bytes"], bounds["sequence"]["peak_bytes"]);
    inside("kept", measured["kept_bytes"], bounds["sequence"]["kept_bytes"]);
    inside("events", static_cast<std::int64_t>(measured["events"].size()), bounds["events"]);
    EXPECT_LE(bounds["sequence"]["peak_bytes"]["most"], bounds["sequence"]["full_bytes"].get<std::int64_t>() * 2);
    if (!measured.contains("folded")) continue;
    EXPECT_EQ(measured["folded"]["spans"] > 0, !measured["events"].empty());
    inside("far", measured["folded"]["far_bytes"], bounds["sequence"]["far_bytes"]);
    inside("spans", measured["folded"]["spans"], bounds["spans"]);
    inside("folded", measured["folded"]["tokens"], bounds["folded"]);
  }
}

}  // namespace
}  // namespace kvkeep::cli_measured_bounds_test

#endif  // KVKEEP_CLI_PATH
