// SPDX-License-Identifier: Apache-2.0
// The adapter over llama.cpp and docs/reference/llama.md.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "evictor_engine.h"

namespace kvkeep::llama {
namespace {

/// What the page says is refused, and nothing else.
TEST_P(LlamaEvictor, RefusesThePoliciesThatItsPageNames) {
  std::ifstream file(KVKEEP_TEST_LLAMA_PAGE);
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  const std::size_t table = page.find("\n| policies | because |");
  ASSERT_NE(table, std::string::npos);
  const std::string named = page.substr(table, page.find("\n\n", table) - table);
  const auto runs = [](const std::string& text) {
    try {
      static_cast<void>(Engine(text));
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  EXPECT_FALSE(runs("tova,budget=100,rest=fold"));
  EXPECT_NE(named.find("`rest=fold`"), std::string::npos);
  for (const PolicyInfo& policy : policies()) {
    const bool given = policy.scorer == "given", threshold = policy.allocator == "threshold";
    if (policy.name.find("triattention") != std::string::npos) continue;  // needs a file
    const std::string family = given                      ? "given"
                               : policy.allocator.empty() ? policy.name
                                                          : policy.allocator + "-*",
                      options = policy.name == "full" ? ""
                                : threshold           ? ",budget=100,threshold=0.1"
                                                      : ",budget=100";
    EXPECT_EQ(runs(policy.name + options), named.find("`" + family + "`") == std::string::npos) << policy.name;
  }
}

}  // namespace
}  // namespace kvkeep::llama
