// SPDX-License-Identifier: Apache-2.0
// Events replayed against the published implementations.

#include <filesystem>

#include "golden_case.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/score/calibration.h"
#include "kvkeep/trace/trace.h"

namespace kvkeep::event_golden_test {
namespace {

/// Cases whose policy this build knows; the others belong to scorers that are not here yet, and are counted in sight.
void replay_family(const std::string& family, int at_least) {
  int run = 0, other = 0;
  for (const testing::GoldenCase& c : testing::golden_cases(family)) {
    SCOPED_TRACE(c.folder.string());
    std::ifstream file(c.file("policy.json"));
    const std::string name = nlohmann::json::parse(file).at("policy");
    const auto known = policies();
    if (std::none_of(known.begin(), known.end(), [&](const PolicyInfo& p) { return p.name == name; })) {
      ++other;
      continue;
    }
    const auto replay = [&] {
      return trace::replay_event(io::SafetensorsFile::open(c.file("trace.safetensors")),
                                 *load_policy(c.file("policy.json")));
    };
    if (c.must_fail()) {
      EXPECT_THROW(static_cast<void>(replay()), Error);
    } else {
      testing::expect_as_golden(c, replay());
    }
    ++run;
  }
  EXPECT_GE(run, at_least) << "golden cases are missing from the folder";
  if (other > 0)
    std::printf("%d cases of family %s name policies that this build does not have\n", other, family.c_str());
}

TEST(Golden, AmsEventsMatchThePublishedCodeAndTheStrictReference) { replay_family("ams", 44); }

TEST(Golden, ScorersMatchThePublishedImplementations) { replay_family("scorers", 39); }

TEST(Golden, RkvMatchesTheCodeOfItsAuthors) { replay_family("rkv", 9); }

TEST(Golden, PoliciesThatNarrowPromptsMatchThePublishedCode) {
  int run = 0;
  for (const testing::GoldenCase& c : testing::golden_cases("asl")) {
    SCOPED_TRACE(c.folder.string());
    const auto replay = [&] {
      return trace::replay_prefill(io::SafetensorsFile::open(c.file("trace.safetensors")),
                                   *load_policy(c.file("policy.json")));
    };
    if (c.must_fail())
      EXPECT_THROW(static_cast<void>(replay()), Error);
    else
      testing::expect_as_golden(c, replay());
    ++run;
  }
  EXPECT_GE(run, 12) << "golden cases are missing from the folder";
}

TEST(Golden, TriAttentionMatchesTheCodeOfItsAuthors) {
  // Policies name the published files, whose numbers lie beside them as the library reads them.
  use_calibration_reader([](std::string_view bytes) { return bytes.starts_with("PK"); },
                         [](std::string_view, const std::string& name) {
                           return load_calibration(std::filesystem::path(name).replace_extension("safetensors"));
                         });
  replay_family("triattention", 11);
  use_calibration_reader(nullptr, nullptr);
}

}  // namespace
}  // namespace kvkeep::event_golden_test
