// SPDX-License-Identifier: Apache-2.0
// Shared libraries with policies: examples/plugin, by name, with options, in a keeper, in the command; and those that
// are refused.

#include "kvkeep/policy/plugin.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "kvkeep/c.h"
#include "kvkeep/keeper/keeper.h"
#include "message_of.h"
#include "temporary_folder.h"

namespace kvkeep::plugin_test {
namespace {

using testing::message_of;

class Plugins : public testing::TemporaryFolder {};

std::string refusal(const std::filesystem::path& file) {
  return message_of([&] { load_plugin(file); });
}

/// A library of tests/plugins, or examples/plugin.
std::filesystem::path library(const std::string& name) {
  return std::filesystem::path(KVKEEP_TEST_PLUGIN_DIR) / ("lib" + name + ".so");
}

#ifdef KVKEEP_TEST_SHARED

/// Values of slot t are norms[t] in one component.
std::vector<std::int32_t> kept_under(const char* policy, const std::vector<float>& numbers) {
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = 1;
  spec.key_dim = spec.value_dim = 4;
  spec.layers.resize(1);
  auto length = static_cast<std::int32_t>(numbers.size());
  const DenseKv rows{zeros({1, 1, length, 4}, Dtype::f32), zeros({1, 1, length, 4}, Dtype::f32)};
  for (int t = 0; t < length; ++t) rows.values.data<float>()[4 * t + 2] = numbers[static_cast<std::size_t>(t)];
  Keeper keeper(spec, make_policy(policy));
  const SequenceId id = 1;
  keeper.bind({rows});
  keeper.join(id, length);
  keeper.step({{&id, 1}, {{&length, 1}}});
  const auto kept = keeper.positions(id, 0, 0);
  return {kept.begin(), kept.end()};
}

TEST_F(Plugins, BringAScorerThatPoliciesAreMadeOfListedAndSaved) {
  load_plugin(library("vmax"));
  load_plugin(library("vmax"));  // once is enough
  EXPECT_EQ(std::ranges::count(loaded_plugins(), library("vmax")), 1);
  const std::vector<float> numbers{5, 1, -4, 2, -3, 9, 6, 7};
  EXPECT_EQ(kept_under("vmax,budget=4,prefill=cut,sink=1,recent=1", numbers), (std::vector<std::int32_t>{0, 5, 6, 7}));
  EXPECT_EQ(kept_under("vmax,budget=3,prefill=cut,sink=0,recent=1,floor=8", numbers),
            (std::vector<std::int32_t>{5, 6, 7}));
  EXPECT_EQ(kept_under("vmax,budget=5,prefill=cut,sink=1,recent=1", numbers),
            (std::vector<std::int32_t>{0, 2, 5, 6, 7}));
  EXPECT_EQ(kept_under("vmax,budget=5,prefill=cut,sink=1,recent=1,negative=false", numbers),
            (std::vector<std::int32_t>{0, 3, 5, 6, 7}));
  EXPECT_EQ(kept_under("vmax,budget=4,prefill=cut,sink=1,recent=1,scorer.skip_first=3", numbers),
            (std::vector<std::int32_t>{0, 5, 6, 7}))
      << "without the number that differs, newer slots stay";
}

TEST_F(Plugins, BringAnAllocator) {
  load_plugin(library("vmax")), load_plugin(library("halves"));
  const std::vector<float> numbers{5, 1, 4, 2, 3, 9, 0.5, 7, 0.2F, 9, 1};
  const auto kept = [&](const char* newest) {
    return kept_under(text("halves-vmax,budget=7,prefill=cut,sink=1,recent=2,allocator.newest=", newest).c_str(),
                      numbers);
  };
  EXPECT_EQ(kept("0"), (std::vector<std::int32_t>{0, 2, 4, 5, 7, 9, 10})) << "top-k";
  EXPECT_EQ(kept("1"), (std::vector<std::int32_t>{0, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(kept("0.5"), (std::vector<std::int32_t>{0, 2, 5, 7, 8, 9, 10})) << "7 and 8 by age, 5 and 2 by score";
  EXPECT_EQ(
      message_of([] { static_cast<void>(make_policy("halves-vmax,budget=7,variant=official")); }),
      "policy: variant is official with allocator halves; allowed strict (docs/method/allocators.md describes how "
      "that differs from the published form)");
}

TEST_F(Plugins, BringOptionsOfEveryKind) {
  load_plugin(library("vmax"));
  const auto policy = make_policy("ams-vmax,budget=64,floor=0.5,of=max,scorer.skip_first=2");
  const auto json = nlohmann::json::parse(policy->to_json());
  EXPECT_EQ(json["scorer"], (nlohmann::json{{"of", "largest"}, {"skip", 2}, {"floor", 0.5}, {"negative", true}}));
  const std::pair<const char*, const char*> faults[] = {
      {"floor=1000000", "scorer.floor"}, {"skip=-1", "scorer.skip"},          {"of=mean", "largest, sum"},
      {"negative=1", "scorer.negative"}, {"of=sum,negative=false", "of=sum"}, {"skpi=1", "did you mean"}};
  for (const auto& [options, names] : faults) {
    const std::string said =
        message_of([&, given = std::string(options)] { static_cast<void>(make_policy("vmax,budget=64," + given)); });
    EXPECT_NE(said.find(names), std::string::npos) << said;
  }
}

TEST_F(Plugins, OfAnotherVersionAreRefusedBeforeAnythingOfThemRuns) {  // B39
  ::unsetenv("KVKEEP_TEST_FAULTY_RAN");
  const std::string said = refusal(library("faulty_other_version"));
  EXPECT_NE(said.find("was compiled for kvkeep 0.0.9, and this is kvkeep " KVKEEP_VERSION), std::string::npos) << said;
  EXPECT_EQ(std::getenv("KVKEEP_TEST_FAULTY_RAN"), nullptr);
  EXPECT_NE(refusal(library("faulty_throws")), "");
  EXPECT_NE(std::getenv("KVKEEP_TEST_FAULTY_RAN"), nullptr) << "the library would have told";
}

TEST_F(Plugins, AreRefusedByNameForEveryOtherFault) {
  const std::size_t before = policies().size(), loaded = loaded_plugins().size();
  const std::pair<const char*, const char*> faults[] = {
      {"faulty_other_kvkeep", "is linked to another kvkeep than this program"},
      {"faulty_other_layout", "was compiled with flags under which strings, containers or structs have other sizes"},
      {"faulty_throws", "did not register: this plug-in has a bad day"},
      {"faulty_throws_a_number", "did not register: it threw what is no std::exception"},
      {"faulty_throws_no_word", "did not register: an exception that says nothing, perhaps of a plug-in"},
      {"faulty_takes_a_name", "did not register: register_scorer: there is a policy or an allocator tova already"},
      {"faulty_not_exported", "exports no kvkeep_plugin"},
      {"nowhere", "there is no file"}};
  for (const auto& [name, what] : faults) {
    const std::string said = refusal(library(name));
    EXPECT_NE(said.find(what), std::string::npos) << said;
    EXPECT_NE(said.find(library(name).string()), std::string::npos) << said;
  }
  EXPECT_EQ(policies().size(), before);
  EXPECT_EQ(loaded_plugins().size(), loaded);
}

TEST_F(Plugins, ThatTheSystemCannotLoadAreRefusedWithItsReason) {
  const std::filesystem::path file = folder_ / "libhalf.so";
  std::ofstream(file) << KVKEEP_PLUGIN_MARK;
  const std::string said = refusal(file);
  EXPECT_NE(said.find("the system cannot load " + file.string() + ": "), std::string::npos) << said;
}

TEST_F(Plugins, AreLoadedFromCWithAStatusAndASentence) {
  EXPECT_EQ(kvkeep_load_plugin(library("vmax").c_str()), KVKEEP_OK) << kvkeep_last_error();
  EXPECT_EQ(kvkeep_load_plugin(library("faulty_throws").c_str()), KVKEEP_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kvkeep_last_error()).find("a bad day"), std::string::npos);
  EXPECT_EQ(kvkeep_load_plugin(nullptr), KVKEEP_INVALID_ARGUMENT);
}

#else

TEST_F(Plugins, AreRefusedByAProgramThatHoldsAKvkeepOfItsOwn) {
  EXPECT_NE(refusal(library("vmax")).find("is linked to another kvkeep than this program"), std::string::npos);
}

#endif

TEST_F(Plugins, MustBePlugins) {
  const std::filesystem::path file = folder_ / "notes.txt";
  std::ofstream(file) << "milk, bread";
  EXPECT_NE(refusal(file).find("notes.txt is no plug-in of kvkeep; allowed a shared library with"), std::string::npos);
  EXPECT_NE(refusal("").find("the path is empty"), std::string::npos);
  EXPECT_NE(refusal(folder_).find("is a folder"), std::string::npos);
}

}  // namespace
}  // namespace kvkeep::plugin_test
