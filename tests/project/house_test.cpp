// SPDX-License-Identifier: Apache-2.0
// The rules of docs/inside/design.md and CONTRIBUTING.md that a look at the sources can check.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/policy/evict.h"
#include "kvkeep/policy/registry.h"

namespace kvkeep::house_test {
namespace {

namespace fs = std::filesystem;

constexpr std::ptrdiff_t kColumns = 120, kLines = 800;

fs::path root() { return fs::path(KVKEEP_TEST_GOLDEN_DIR) / ".." / ".."; }

// Files by their suffixes, where CMakeLists.txt counts as .cmake.
std::vector<fs::path> sources_in(const fs::path& folder,
                                 const std::set<std::string>& kinds = {".h", ".cpp", ".cu", ".cuh", ".c"}) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::recursive_directory_iterator(root() / folder)) {
    const fs::path& file = entry.path();
    if (kinds.contains(file.filename() == "CMakeLists.txt" ? ".cmake" : file.extension().string()))
      found.push_back(fs::relative(file, root()));
  }
  EXPECT_FALSE(found.empty()) << folder;
  return found;
}

std::string content_of(const fs::path& file) {
  std::ifstream in(root() / file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The folder below src or include/kvkeep that a file lies in.
std::string room_of(const fs::path& file) {
  auto part = file.begin();
  const bool header = *part == "include";
  std::advance(part, header ? 2 : 1);
  return part->string();
}

bool knows_libtorch(const fs::path& file) {
  const std::string text = content_of(file);
  for (const char* include : {"#include <ATen/", "#include <c10/", "#include <torch/", "\"kvkeep/torch.h\""})
    if (text.find(include) != std::string::npos) return true;
  return false;
}

TEST(House, LibTorchIsAtTheEdgeAlone) {
  for (const fs::path& header : sources_in("include/kvkeep")) {
    const std::string name = header.generic_string();
    if (name == "include/kvkeep/torch.h" || name == "include/kvkeep/torch_ranks.h") continue;
    EXPECT_FALSE(knows_libtorch(header)) << name;
  }
  for (const char* room : {"src", "cuda"})
    for (const fs::path& source : sources_in(room))
      if (room_of(source) != "torch") EXPECT_FALSE(knows_libtorch(source)) << source;
  EXPECT_TRUE(knows_libtorch("include/kvkeep/torch.h")) << "what this test looks for";
}

// And this program: it is built, linked and run where there is none.
TEST(House, TheLibrarysTestsKnowNoLibTorch) {
  const std::set<std::string> with_libtorch{"torch", "cuda", "cuda_model", "ranks", "project"};
  std::size_t looked_at = 0;
  for (const fs::path& file : sources_in("tests")) {
    if (with_libtorch.contains(room_of(file))) continue;
    EXPECT_FALSE(knows_libtorch(file)) << file;
    ++looked_at;
  }
  EXPECT_GT(looked_at, 100U);
  std::ifstream loaded("/proc/self/maps");
  for (std::string line; std::getline(loaded, line);)
    EXPECT_EQ(line.find("libtorch"), std::string::npos) << "this program links " << line;
}

// Policies run on a Machine. Only what stands between them and a cache may ask which.
TEST(House, PoliciesKnowNoAccelerator) {
  const std::set<std::string> between{"machine.h",       "policy.h",       "host-inl.h", "across_ranks.cpp",
                                      "folded_memory.h", "part.h",         "columns.h",  "query_ring.h",
                                      "restore.cpp",     "checked_view.h", "copy_rows.h"};
  std::size_t looked_at = 0;
  for (const char* room : {"policy", "parts", "keeper", "score", "allot", "layers", "keep", "memory", "observe"})
    for (const char* above : {"include/kvkeep", "src"}) {
      if (!fs::exists(root() / above / room)) continue;  // all of it is in headers
      for (const fs::path& file : sources_in(fs::path(above) / room)) {
        if (between.contains(file.filename().string())) continue;
        const std::string text = content_of(file);
        for (const char* word : {"accelerator ==", "accelerator !=", "is_host(", "dynamic_cast", "typeid", "\"cuda/"})
          EXPECT_EQ(text.find(word), std::string::npos) << file << " says " << word;
        ++looked_at;
      }
    }
  EXPECT_GT(looked_at, 100U);
  for (const fs::path& file : sources_in("src/cuda"))
    for (const char* policy : {"dynamic_cast", "policy/evict.h", "policy/sekv.h", "policy/asl.h"})
      EXPECT_EQ(content_of(file).find(policy), std::string::npos) << file << " knows a policy";
}

// Each room, and the rooms that its headers may include besides core/ and simd/ (docs/inside/design.md).
TEST(House, RoomsIncludeEachOtherInOneDirection) {
  const std::map<std::string, std::set<std::string>> may{
      {"core", {}},
      {"simd", {}},
      {"io", {}},
      {"keep", {}},
      {"observe", {}},
      {"score", {"observe"}},
      {"allot", {"keep", "score"}},
      {"layers", {"keep", "score"}},
      {"memory", {"keep"}},
      {"state", {"io"}},
      {"policy", {"allot", "keep", "layers", "memory", "observe", "score"}},
      {"parts", {"keep", "memory", "observe", "policy", "score"}},
      {"keeper", {"keep", "observe", "parts", "policy"}},
  };
  for (const auto& [room, others] : may)
    for (const fs::path& header : sources_in(fs::path("include/kvkeep") / room)) {
      const std::string text = content_of(header), start = "#include \"kvkeep/";
      for (std::size_t at = text.find(start); at != std::string::npos; at = text.find(start, at + 1)) {
        const std::size_t from = at + start.size(), end = text.find_first_of("/\"", from);
        if (text[end] == '"') continue;  // a header that is in no room
        const std::string other = text.substr(from, end - from);
        EXPECT_TRUE(other == room || other == "core" || (other == "simd" && room != "core") || others.contains(other))
            << header << " includes " << other << '/';
      }
    }
}

TEST(House, ASourceLiesInTheRoomOfItsHeader) {
  std::map<std::string, std::string> rooms;
  for (const auto& header : sources_in("include/kvkeep")) rooms[header.stem().string()] = room_of(header);
  std::size_t found = 0;
  for (const fs::path& source : sources_in("src")) {
    const std::string room = room_of(source);
    const auto header = rooms.find(source.stem().string());
    // The command and what lies between kernels and a Keeper use the words of what they show or run.
    if (header == rooms.end() || room == "cli" || room == "cuda" || source.extension() == ".h") continue;
    EXPECT_TRUE(room == header->second || fs::exists(root() / "include/kvkeep" / room / source.stem() += ".h"))
        << source << " belongs into src/" << header->second;
    ++found;
  }
  EXPECT_GE(found, 20U);
}

std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(House, TheFacadeAndTheCellarStaySmall) {
  const std::vector<fs::path> headers = sources_in("include/kvkeep");
  EXPECT_LE(headers.size(), 166U);
  EXPECT_LE(std::ranges::count_if(headers, [](const fs::path& one) { return one.string().ends_with("-inl.h"); }), 25);
  EXPECT_LE(sources_in("include/kvkeep/core").size(), 20U);
  EXPECT_LE(occurrences(content_of("include/kvkeep/kvkeep.h"), "#include \"kvkeep/"), 12U);
}

TEST(House, AMachineIsLittleToImplement) {
  std::size_t calls = 0;
  for (const char* file : {"policy/machine.h", "policy/folded_memory.h", "core/machine_memory.h", "keep/columns.h"})
    calls += occurrences(content_of(fs::path("include/kvkeep") / file), "virtual ");
  EXPECT_GT(calls, 10U);
  EXPECT_LE(calls, 25U);
}

TEST(House, MostLinesAreInHeaders) {
  std::ptrdiff_t in_headers = 0, in_sources = 0;
  for (const char* folder : {"include", "src"})
    for (const fs::path& source : sources_in(folder)) {
      const std::string room = room_of(source);
      if (room == "cli") continue;  // on top of the library
      const std::string text = content_of(source);
      (folder[0] == 'i' ? in_headers : in_sources) += std::ranges::count(text, '\n');
    }
  EXPECT_GE(10 * in_headers, 6 * (in_headers + in_sources)) << in_headers << " and " << in_sources;
}

TEST(House, EveryBodyIsCompiledOnceAndIncludedByAHeader) {
  std::string headers, sources;
  for (const fs::path& header : sources_in("include/kvkeep")) headers += content_of(header);
  for (const fs::path& source : sources_in("src")) sources += content_of(source);
  for (const fs::path& header : sources_in("include/kvkeep")) {
    const std::string name = header.generic_string().substr(std::string("include/").size());
    if (!name.ends_with("-inl.h")) continue;
    EXPECT_GE(occurrences(headers, "#include \"" + name + '"'), 1U) << name;
    if (!name.ends_with("exponential-inl.h")) EXPECT_EQ(occurrences(sources, "#include \"" + name + '"'), 1U) << name;
  }
}

// What the first group of `pattern` takes wherever it matches, and the second one, if there is one.
std::vector<std::pair<std::string, std::string>> found_in(const std::string& text, const std::string& pattern) {
  const std::regex wanted(pattern);
  std::vector<std::pair<std::string, std::string>> found;
  for (std::sregex_iterator at(text.begin(), text.end(), wanted), end; at != end; ++at)
    found.emplace_back(at->str(1), at->size() > 2 ? at->str(2) : "");
  return found;
}

// A profile, a sanitizer and a failed launch say its name alone.
TEST(House, AKernelsNameTellsItsFile) {
  std::map<std::string, std::string> files;  // of each kernel
  std::size_t launches = 0;
  for (const fs::path& source : sources_in("cuda")) {
    const std::string text = content_of(source), file = source.generic_string(), stem = source.stem().string();
    const auto kernels = found_in(text, R"(__global__ void[^;{]*?(\w+)\([^(){]*\) \{)");
    EXPECT_EQ(kernels.size(), found_in(text, "(__global__)").size()) << file << " has kernels that this does not see";
    for (const auto& [name, none] : kernels) {
      const auto [other, is_new] = files.emplace(name, file);
      EXPECT_TRUE(is_new) << name << " is in " << other->second << " and in " << file;
      EXPECT_TRUE(name.ends_with("_kernel")) << name << " in " << file;
      const std::string first = name.substr(0, name.find('_'));
      EXPECT_NE(('_' + stem + '_').find('_' + first + '_'), std::string::npos)
          << name << " begins with no word of " << file;
    }
    for (const auto& [said, name] : found_in(text, R"re(launch\(\s*"([^"]*)",\s*(\w+)_kernel)re")) {
      EXPECT_TRUE(said == name || said.starts_with(name + '_'))
          << file << " launches " << name << "_kernel as " << said;
      ++launches;
    }
  }
  EXPECT_GT(files.size(), 50U);
  EXPECT_GT(launches, 50U);
}

// launch() lets it begin while the kernel before it is at work.
TEST(House, EveryKernelFirstWaitsForEarlierOnes) {
  std::size_t kernels = 0;
  for (const fs::path& source : sources_in("cuda")) {
    const std::string text = content_of(source);
    const std::size_t all = found_in(text, "(__global__)").size();
    kernels += all;
    EXPECT_EQ(found_in(text, R"(__global__ void[^;{]*?(\w+)\([^(){]*\) \{\s+wait_for_earlier_kernels\(\);)").size(),
              all)
        << source << ": allowed kernels whose first statement is wait_for_earlier_kernels()";
  }
  EXPECT_GT(kernels, 50U);
}

// The execution model gives every block its own, of exactly its size, only where it is declared so.
TEST(House, StaticSharedMemoryIsDeclaredByItsMacro) {
  std::size_t declared = 0;
  for (const fs::path& source : sources_in("cuda")) {
    const std::string text = content_of(source);
    declared += found_in(text, R"((KVKEEP_SHARED\())").size();
    if (source.filename() != "platform.cuh")
      EXPECT_EQ(text.find("__shared__"), std::string::npos) << source << ": allowed KVKEEP_SHARED(Type, name, count)";
  }
  EXPECT_GT(declared, 50U);
}

TEST(House, ATypeOfTheKernelsIsInOneFile) {
  std::map<std::string, std::string> files;
  for (const fs::path& source : sources_in("cuda"))
    for (const auto& [name, none] :
         found_in(content_of(source), R"(\n(?:struct|class) (?:alignas\(.*\) )?(\w+)(?: final)?(?: : [^;{]*)? \{)")) {
      const auto [other, is_new] = files.emplace(name, source.generic_string());
      EXPECT_TRUE(is_new) << name << " is in " << other->second << " and in " << source.generic_string();
    }
  EXPECT_GT(files.size(), 80U);
}

TEST(House, ATypeOfTheLibraryIsInOneFile) {
  // Of one body each, but for the scorer `given` and the part that holds its scores.
  const std::set<std::string> local{"Scratch", "Workspace", "View", "Given"};
  std::map<std::string, std::string> files;
  for (const char* folder : {"include", "src"})
    for (const fs::path& source : sources_in(folder, {".h", ".cpp"}))
      for (const auto& [name, none] :
           found_in(content_of(source), R"(\n(?:struct|class|enum class) (\w+)(?: final)?(?: : [^;{]*)? \{)")) {
        if (local.contains(name)) continue;
        const auto [other, is_new] = files.emplace(name, source.generic_string());
        EXPECT_TRUE(is_new || other->second == source.generic_string())
            << name << " is in " << other->second << " and in " << source.generic_string();
      }
  EXPECT_GT(files.size(), 200U);
}

TEST(House, SmallHeadersAreFew) {
  std::vector<std::string> small;
  for (const fs::path& header : sources_in("include", {".h"})) {
    const std::string text = content_of(header);
    if (std::ranges::count(text, '\n') < 25) small.push_back(header.generic_string());
  }
  EXPECT_LE(small.size(), 8U) << ::testing::PrintToString(small);
}

// Policies in tests whose sinks and recents fill the budget are StreamingLLM, whatever their names (B35).
TEST(House, APolicyOfATestLeavesItsScorerASay) {
  const std::set<std::string> meant{"tova,budget=24,interval=8,recent=20", "snapkv,budget=24,interval=8",
                                    "tova,budget=24,interval=8,recent=32", "tova,budget=24,recent=32"};
  const std::regex policy("[a-z0-9]+(-[a-z0-9]+)*(,[a-z_.]+=[^,\"'` )]+)*,budget=[0-9]+(,[a-z_.]+=[^,\"'` )]+)*");
  std::size_t looked_at = 0;
  for (const char* folder : {"tests", "bench", "examples"})
    for (const auto& entry : fs::recursive_directory_iterator(root() / folder)) {
      const fs::path file = fs::relative(entry.path(), root());
      if (!std::set<std::string>{".h", ".cpp", ".py", ".sh"}.contains(file.extension().string())) continue;
      const std::string text = content_of(file);
      for (std::sregex_iterator one(text.begin(), text.end(), policy), end; one != end; ++one) {
        std::unique_ptr<KVPolicy> made;
        try {
          made = make_policy(one->str());
        } catch (const std::exception&) {
          continue;  // a test of a refusal, or a text that goes on elsewhere
        }
        const auto* evict = dynamic_cast<const Evict*>(made.get());
        if (evict == nullptr || evict->scorer().name() == "streaming") continue;
        const std::int32_t slots = evict->retention().trigger.budget.slots;
        EXPECT_TRUE(evict->guarded(slots).count() < slots || meant.contains(one->str()))
            << file << ": " << one->str() << " leaves its scorer no slot";
        ++looked_at;
      }
    }
  EXPECT_GT(looked_at, 500U);
}

TEST(House, LinesAndFilesAreShort) {
  // Text that others wrote, and a page of HTML.
  const std::set<std::string> as_it_is{"examples/lab/src/lm/chat.cpp", "src/io/kept_page_html.h"};
  std::vector<fs::path> sources{"CMakeLists.txt", ".ci/run"};
  for (const char* folder : {"include", "src", "cuda", "cmake", "tests", "bench", "examples"})
    for (fs::path& source : sources_in(folder, {".h", ".cpp", ".cu", ".cuh", ".c", ".py", ".sh", ".cmake"}))
      sources.push_back(std::move(source));
  for (const fs::path& source : sources) {
    const std::string text = content_of(source);
    EXPECT_FALSE(text.empty()) << source;
    EXPECT_LT(text.find("SPDX-License-Identifier: Apache-2.0\n"), 64U) << source << " does not state its licence";
    EXPECT_LE(std::ranges::count(text, '\n'), kLines) << source;
    if (as_it_is.contains(source.generic_string())) continue;
    std::ptrdiff_t line = 1, column = 0;
    for (const char c : text) {
      if (c == '\n') {
        EXPECT_LE(column, kColumns) << source << ':' << line;
        ++line;
        column = 0;
      } else if ((static_cast<unsigned char>(c) & 0xc0U) != 0x80U) {  // the first byte of a character
        ++column;
      }
    }
  }
}

}  // namespace
}  // namespace kvkeep::house_test
