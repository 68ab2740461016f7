// SPDX-License-Identifier: Apache-2.0
// What the documents say of the code stays true: they are read beside it.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "kvkeep/policy/registry.h"
#include "kvkeep/version.h"

namespace kvkeep::docs_test {
namespace {

namespace fs = std::filesystem;

fs::path root() { return fs::path(KVKEEP_TEST_GOLDEN_DIR) / ".." / ".."; }

std::string read(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  EXPECT_TRUE(in.good()) << file;
  return {std::istreambuf_iterator<char>(in), {}};
}

/// A source as pages show it: without the line of its licence.
std::string shown(const fs::path& file) {
  std::string text = read(file);
  return text.starts_with("// SPDX") ? text.substr(text.find('\n') + 1) : text;
}

/// The rows of Markdown tables whose first cell is `name` in backticks.
std::vector<std::string> table_rows(const std::string& page, const std::string& name) {
  std::vector<std::string> rows;
  const std::string start = "\n| `" + name + "` |";
  for (std::size_t at = page.find(start); at != std::string::npos; at = page.find(start, at + 1))
    rows.push_back(page.substr(at + 1, page.find('\n', at + 1) - at - 1));
  return rows;
}

/// Whether a row says what an option defaults to and may be.
bool tells(const std::string& row, const OptionInfo& option) {
  if (row.find(option.fallback) == std::string::npos) return false;
  if (option.allowed.find("integer") != std::string::npos || option.allowed.find("number") != std::string::npos)
    return true;
  std::istringstream choices(option.allowed);
  for (std::string choice; std::getline(choices >> std::ws, choice, ',');)
    if (row.find("`" + choice + "`") == std::string::npos && row.find(choice) == std::string::npos) return false;
  return true;
}

/// True of policies that other tests of this program added.
bool added_by_a_test(const PolicyInfo& policy) {
  return std::ranges::any_of(std::array{"vnorm", "heeded", "strided", "tapering", "outside", "vmax"},
                             [&](const char* added) { return policy.name.find(added) != std::string::npos; });
}

TEST(Docs, ThePageOfPoliciesNamesEveryPolicyAndEveryOptionWithItsDefaultAndChoices) {
  const std::string page = read(root() / "docs/reference/policies.md");
  for (const PolicyInfo& policy : policies()) {
    if (added_by_a_test(policy)) continue;
    const std::string allocator =
        policy.name.substr(0, policy.name.find('-'));  // "ams-tova" stands on the page as `ams-<scorer>`
    EXPECT_TRUE(!table_rows(page, policy.name).empty() || !table_rows(page, allocator + "-<scorer>").empty())
        << policy.name;
    for (const OptionInfo& option : policy.options) {
      const auto rows = table_rows(page, option.name);
      EXPECT_TRUE(std::any_of(rows.begin(), rows.end(), [&](const std::string& row) { return tells(row, option); }))
          << policy.name << ": " << option.name << " defaults to " << option.fallback << " and may be "
          << option.allowed << "; the page says otherwise, or nothing";
    }
  }
}

TEST(Docs, ThePageOfWhatIsSupportedCountsTheScorersOfEachAllocator) {
  const std::string page = read(root() / "docs/reference/supported.md");
  const std::size_t begin = page.find("\n| policies |");
  ASSERT_NE(begin, std::string::npos);
  const std::string row = page.substr(begin, page.find(';', page.find("`criticalkv-`", begin)) - begin);
  std::map<std::string, std::int64_t> said, known;
  std::int64_t number = 0;
  const std::regex word(R"((\d+) (scorers|of them)|and (\d+) under|`(\w+)-`)");
  for (std::sregex_iterator at(row.begin(), row.end(), word), last; at != last; ++at)
    if ((*at)[4].matched)
      said[(*at)[4]] = number;
    else
      number = std::stoll((*at)[(*at)[1].matched ? 1 : 3]);
  for (const PolicyInfo& policy : policies())
    if (!policy.allocator.empty() && !added_by_a_test(policy) && policy.name != policy.allocator)
      ++known[policy.allocator];
  EXPECT_EQ(said, known) << row;
}

/// The lines of a source from `begins` up to `ends`, as a page shows them.
std::string lines_of(const fs::path& file, const char* begins, const char* ends) {
  const std::string source = read(root() / file);
  const std::size_t begin = source.find(begins), end = source.find(ends, begin);
  EXPECT_NE(begin, std::string::npos) << file;
  EXPECT_NE(end, std::string::npos) << file;
  return std::regex_replace(std::string("\n").append(source, begin, end - begin), std::regex("\n  "), "\n");
}

// `Keeper::step`, `parts::Pins::pin`: what documents and comments call by name is there.
TEST(Docs, MembersThatAreNamedExist) {
  const std::map<std::string, std::string> headers{
      {"Keeper", read(root() / "include/kvkeep/keeper/keeper.h")},
      {"parts::Pins", read(root() / "include/kvkeep/parts/pins.h")},
      {"parts::Given", read(root() / "include/kvkeep/parts/given.h")},
      {"parts::Surprisal", read(root() / "include/kvkeep/parts/surprisal.h")},
      {"parts::Folds", read(root() / "include/kvkeep/parts/folds.h")},
      {"parts::Prompts", read(root() / "include/kvkeep/parts/prompts.h")}};
  const std::regex name("((?:parts::)?[A-Z][A-Za-z]+)::([a-z_]+)");
  std::size_t named = 0;
  std::vector<fs::path> files{root() / "README.md", root() / "CONTRIBUTING.md"};
  for (const char* folder : {"docs", "include", "examples/lab/docs", "examples/lab/include"})
    for (const auto& entry : fs::recursive_directory_iterator(root() / folder))
      if (entry.path().extension() == ".md" || entry.path().extension() == ".h") files.push_back(entry.path());
  for (const fs::path& file : files) {
    const std::string text = read(file);
    for (std::sregex_iterator it(text.begin(), text.end(), name), end; it != end; ++it) {
      const auto header = headers.find((*it)[1]);
      if (header == headers.end()) continue;
      EXPECT_NE(header->second.find((*it)[2].str() + "("), std::string::npos)
          << file << " names " << it->str() << ", which is not in its header";
      ++named;
    }
  }
  EXPECT_GT(named, 40U);
}

TEST(Docs, TheReadmeShowsTheLinesThatTheEmbeddingExampleCompiles) {
  const std::string lines = lines_of("examples/embed.cpp", "  kvkeep::Keeper keeper(", "  // ----\n");
  EXPECT_NE(read(root() / "README.md").find("```cpp" + lines + "```"), std::string::npos)
      << "README.md should hold:" << lines;
}

TEST(Docs, ThePageOfEnginesShowsTheLinesThatTheEmbeddingExampleCompiles) {
  const std::string lines =
      lines_of("examples/embed.cpp", "  /// Where the keys and values of each layer are", "  // ----\n");
  EXPECT_NE(read(root() / "docs/start/integration.md").find("```cpp" + lines + "```"), std::string::npos)
      << "docs/start/integration.md should hold:" << lines;
}

TEST(Docs, ThePageOfOneIntegerShowsTheEventOfTheEngineThatIsTested) {
  const std::string engine = read(root() / "examples/serving/one_integer.cpp"),
                    begins = "\nbool OneIntegerEngine::cut(";
  const std::size_t begin = engine.find(begins), end = engine.find("\n}\n", begin);
  ASSERT_NE(end, std::string::npos);
  const std::string event = "```cpp" + engine.substr(begin, end + 3 - begin) + "```\n";
  EXPECT_NE(read(root() / "docs/reference/one-integer.md").find(event), std::string::npos) << event;
}

TEST(Docs, ThePageOfTheCInterfaceShowsTheLinesThatTheEngineOnAGpuCompiles) {
  const std::string lines =
      lines_of("examples/c/gpu_engine.c", "  check(kvkeep_cuda_accelerator_make(", "  /* ---- */\n");
  EXPECT_NE(read(root() / "docs/reference/c.md").find(lines + "```"), std::string::npos)
      << "docs/reference/c.md should hold:" << lines;
}

TEST(Docs, TheExamplesOfAScorerAnAllocatorAPolicyAndAPartAreThoseThatTheTestsCompile) {
  const std::string page = read(root() / "CONTRIBUTING.md");
  const fs::path folder = root() / "tests";
  const auto whole = [&](const char* file) { return shown(folder / file); };
  const auto test_of = [&](const char* file, const char* begins) {
    const std::string test = whole(file);
    const std::size_t begin = test.find(begins);
    return test.substr(begin, test.find("\n}\n", begin) + 3 - begin);
  };
  for (const std::string& code : {whole("policy/vnorm.h"), test_of("policy/vnorm_test.cpp", "TEST(Vnorm, Keeps"),
                                  whole("policy/heeded.h"), whole("policy/strided.h"), whole("policy/tapering.h"),
                                  test_of("policy/tapering_test.cpp", "TEST(Tapering, Cuts"), whole("parts/turns.h"),
                                  test_of("parts/turns_test.cpp", "TEST(Turns, TheNewest")})
    EXPECT_NE(page.find("```cpp\n" + code + "```"), std::string::npos) << "CONTRIBUTING.md should hold:\n" << code;
}

TEST(Docs, ThePageOfPluginsShowsTheExampleThatIsBuilt) {
  const std::string page = read(root() / "docs/start/extending.md");
  for (const char* file : {"examples/plugin/vmax.cpp", "examples/plugin/halves.cpp"})
    EXPECT_NE(page.find("```cpp\n" + shown(root() / file) + "```"), std::string::npos) << file;
  for (const auto& [file, begins] : {std::pair{"ramp.h", "class Ramp final"}, {"fade.h", "struct FadeOptions"}}) {
    std::string code = read(root() / "tests/policy" / file);
    code = code.substr(code.find(begins), code.find("\n}  // namespace") - code.find(begins));
    EXPECT_NE(page.find("```cpp\n" + code + "```"), std::string::npos) << "the page should hold:\n" << code;
  }
  const std::string cmake = read(root() / "examples/plugin/CMakeLists.txt");
  EXPECT_NE(page.find("```cmake\n" + cmake.substr(cmake.find("cmake_minimum_required")) + "```"), std::string::npos);
}

TEST(Docs, WhoeverNamesAVersionNamesThisOne) {
  for (const auto& [file, line] : std::vector<std::pair<const char*, const char*>>{
           {"CITATION.cff", "\nversion: " KVKEEP_VERSION "\n"},
           {"CHANGELOG.md", "\n## " KVKEEP_VERSION " ("},
           {"README.md", "**Status**: " KVKEEP_VERSION},
           {"pyproject.toml", "\nversion = \"" KVKEEP_VERSION "\"\n"},
           {"cmake/ports/vcpkg/vcpkg.json", "\"version\": \"" KVKEEP_VERSION "\""},
           {"cmake/ports/conda/recipe.yaml", "\n  version: " KVKEEP_VERSION "\n"},
           {"docs/start/linking.md", "kvkeep-" KVKEEP_VERSION ".tar.gz"}})
    EXPECT_NE(read(root() / file).find(line), std::string::npos) << file << " does not say " << line;
}

TEST(Docs, TheReadmeIsShortAndBeginsWithCode) {
  const std::string readme = read(root() / "README.md");
  EXPECT_LE(std::ranges::count(readme, '\n'), 110);
  const std::size_t code = readme.find("```cpp\n");
  ASSERT_NE(code, std::string::npos);
  EXPECT_LT(std::ranges::count(readme.substr(0, code), '\n'), 25);
}

TEST(Docs, LinksBetweenPagesLeadToPages) {
  const std::regex link(R"(\]\(([^)#: ]+)(#[^)]*)?\))");
  for (const char* folder : {".", "docs", "docs/start", "docs/reference", "docs/method", "docs/inside", "tests/golden",
                             "examples/model", "examples/serving", "examples/lab", "examples/lab/docs"})
    for (const auto& entry : fs::directory_iterator(root() / folder)) {
      if (entry.path().extension() != ".md") continue;
      const std::string page = read(entry.path());
      for (std::sregex_iterator at(page.begin(), page.end(), link), last; at != last; ++at)
        EXPECT_TRUE(fs::exists(entry.path().parent_path() / (*at)[1].str()))
            << entry.path() << " links to " << (*at)[1];
    }
}

}  // namespace
}  // namespace kvkeep::docs_test
