// What the documents say of the code stays true: they are read beside it.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>
#include <string>

#include "kvkeep/policy/registry.h"

namespace kvkeep {
namespace {

namespace fs = std::filesystem;

fs::path root() { return fs::path(KVKEEP_TEST_GOLDEN_DIR) / ".." / ".."; }

std::string read(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  EXPECT_TRUE(in.good()) << file;
  return {std::istreambuf_iterator<char>(in), {}};
}

/// The row of a Markdown table whose first cell is `name` in backticks.
std::string table_row(const std::string& page, const std::string& name) {
  const std::size_t begin = page.find("\n| `" + name + "` |");
  return begin == std::string::npos ? std::string() : page.substr(begin + 1, page.find('\n', begin + 1) - begin - 1);
}

TEST(Docs, ThePageOfPoliciesNamesEveryPolicyAndEveryOptionWithItsDefaultAndChoices) {
  const std::string page = read(root() / "docs" / "policies.md");
  for (const PolicyInfo& policy : policies()) {
    EXPECT_NE(table_row(page, policy.name), "") << policy.name;
    for (const OptionInfo& option : policy.options) {
      const std::string row = table_row(page, option.name);
      ASSERT_NE(row, "") << policy.name << " " << option.name;
      EXPECT_NE(row.find(option.fallback), std::string::npos)
          << option.name << " defaults to " << option.fallback << "; the page says " << row;
      if (option.allowed.find("integer") != std::string::npos || option.allowed.find("number") != std::string::npos) continue;
      std::istringstream choices(option.allowed);
      for (std::string choice; std::getline(choices >> std::ws, choice, ',');)
        EXPECT_NE(row.find("`" + choice + "`"), std::string::npos) << option.name << " may be " << choice << "; the page says " << row;
    }
  }
}

TEST(Docs, TheReadmeShowsTheLinesThatTheEmbeddingExampleCompiles) {
  const std::string example = read(root() / "examples" / "embed.cpp");
  const std::size_t begin = example.find("  kvkeep::Keeper keeper("), end = example.find("  // ----\n", begin);
  ASSERT_NE(begin, std::string::npos);
  ASSERT_NE(end, std::string::npos);
  const std::string lines = std::regex_replace(std::string("\n").append(example, begin, end - begin), std::regex("\n  "), "\n");
  EXPECT_NE(read(root() / "README.md").find("```cpp" + lines + "```"), std::string::npos) << "README.md should hold:" << lines;
}

TEST(Docs, LinksBetweenPagesLeadToPages) {
  const std::regex link(R"(\]\(([^)#:]+\.(md|cpp|h|sh))\))");
  for (const fs::path& folder : {root(), root() / "docs", root() / "tests" / "golden"})
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() != ".md") continue;
      const std::string page = read(entry.path());
      for (std::sregex_iterator at(page.begin(), page.end(), link), last; at != last; ++at)
        EXPECT_TRUE(fs::exists(entry.path().parent_path() / (*at)[1].str())) << entry.path() << " links to " << (*at)[1];
    }
}

}  // namespace
}  // namespace kvkeep
