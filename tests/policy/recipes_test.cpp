// SPDX-License-Identifier: Apache-2.0
// Policies made in C++ are those that their texts make.

#include "kvkeep/recipes.h"

#include <gtest/gtest.h>

#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/score/expected.h"
#include "message_of.h"

namespace kvkeep::recipes_test {
namespace {

using testing::message_of;

TEST(Recipes, AreThePoliciesOfTheirTexts) {
  const std::pair<std::unique_ptr<Evict>, const char*> pairs[] = {
      {recipes::streaming(24), "streaming,budget=24"},
      {recipes::tova(1024), "tova,budget=1024"},
      {recipes::snapkv(1024), "snapkv,budget=1024"},
      {recipes::keydiff(1024), "keydiff,budget=1024"},
      {recipes::knorm(1024), "knorm,budget=1024"},
      {recipes::ams_tova(1024), "ams-tova,budget=1024"},
      {recipes::ams_snapkv(1024), "ams-snapkv,budget=1024"},
      {recipes::ams_tova(1024, {{"preset", "question"}, {"interval", 64}}),
       "ams-tova,preset=question,interval=64,budget=1024"},
      {recipes::ams_tova(1024, {{"preset", "paper"}, {"allocator.window", 64}, {"allocator.credit", false}}),
       "ams-tova,budget=1024,preset=paper,window=64,credit=false"},
      {recipes::ams_tova(1024, {{"preset", "paper"}, {"window", 64}, {"credit", false}}),
       "ams-tova,budget=1024,preset=paper,allocator.window=64,allocator.credit=false"},
      {recipes::ams_tova(9, {{"variant", "official"}}), "ams-tova,budget=9,variant=official"},
      {recipes::evicting<Expected, MassSegmented>({{"ratio", 0.5}}), "ams-expected,ratio=0.5"},
      {recipes::evicting<Expected, AdaptiveHeads>({{"budget", 64}}), "adakv-expected,budget=64"}};
  for (const auto& [made, said] : pairs) {
    const auto named = make_policy(said);
    EXPECT_EQ(made->to_json(), named->to_json());
    EXPECT_EQ(made->name(), named->name());
    EXPECT_EQ(made->newest(1024), dynamic_cast<const Evict&>(*named).newest(1024)) << said;
  }
}

TEST(Recipes, RefuseWhatTheirTextsRefuse) {
  EXPECT_TRUE(message_of<InvalidArgument>([] {
                (void)recipes::tova(64, {{"bugdet", 3}});
              }).starts_with("policy: tova has no option \"bugdet\" (did you mean \"budget\"?); allowed budget, "));
  EXPECT_EQ(message_of<InvalidArgument>([] { (void)recipes::tova(64, {{"budget", 3}}); }),
            message_of<InvalidArgument>([] { (void)make_policy("tova,budget=64,budget=3"); }));
  EXPECT_EQ(message_of<InvalidArgument>([] { (void)recipes::tova(2); }),
            message_of<InvalidArgument>([] { (void)make_policy("tova,budget=2"); }));
  EXPECT_EQ(message_of<InvalidArgument>([] { (void)recipes::ams_tova(64, {{"allocator.window", "wide"}}); }),
            message_of<InvalidArgument>([] { (void)make_policy("ams-tova,budget=64,window=wide"); }));
}

}  // namespace
}  // namespace kvkeep::recipes_test
