// SPDX-License-Identifier: Apache-2.0
#include "kvlab/tasks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "kvkeep/core/error.h"

namespace kvkeep::lm::tasks_test {
namespace {

bool is_entity(int32_t id) { return id >= kFirstEntity; }

uint64_t hash_of(const TaskSample& sample) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  const auto add = [&hash](int64_t number) { hash = (hash ^ static_cast<uint64_t>(number)) * 0x100000001B3ULL; };
  for (int32_t id : sample.ids) add(id);
  for (uint8_t kind : sample.target) add(kind);
  for (int32_t position : sample.needed) add(position);
  for (int32_t position : sample.needed_until) add(position);
  return hash;
}

/// A reader of the rule alone: the latest `key value` before `end` that `may_read` allows. Returns the position of the
/// key or -1.
template <class MayRead>
int32_t latest_statement(const TaskSample& sample, int32_t key, int32_t end, MayRead may_read) {
  for (int32_t i = end - 2; i >= 0; --i)
    if (sample.ids[i] == key && is_entity(sample.ids[i + 1]) && may_read(i) && may_read(i + 1) &&
        !(i > 0 && is_entity(sample.ids[i - 1])))
      return i;
  return -1;
}

/// The token that follows from the last few, or -1.
int32_t routine_answer(const TaskSample& sample, int32_t at) {
  const int32_t last = sample.ids[at - 1];
  if (last == kAsk) return kGo;  // only chain asks for one: its first step
  if (last == kGo) {             // the value of the last look-up
    int32_t i = at - 2;
    while (!is_entity(sample.ids[i])) --i;
    return sample.ids[i];
  }
  if (is_entity(last)) return kFirstThought + 10 * ((last - kFirstEntity) % 4);
  return (last - kFirstThought) % 10 == kThoughtWords - 1 ? static_cast<int32_t>(kGo) : last + 1;
}

std::vector<TaskOptions> shapes_of(std::string_view task) {
  std::vector<TaskOptions> shapes(4);
  shapes[1].length = 1024;
  shapes[2].length = 257, shapes[2].prompt_length = 150, shapes[2].facts = 7, shapes[2].sections = 3;
  shapes[3].length = 200, shapes[3].facts = 4, shapes[3].thinking = false;
  if (task == "ask") shapes[2].hops = 3, shapes[3].phase = 0;
  if (task == "needle") shapes[2].gap = 5;
  if (task == "updates") shapes[2].rewrites = 3, shapes[3].update_every = 0;
  if (task == "chain" || task == "copies") shapes[2].copies = 4;
  return shapes;
}

/// Calls `check(task, sample, options)` for every task, several shapes, `seeds` seeds each.
template <class Check>
void for_each_sample(uint64_t seeds, Check check) {
  for (const TaskInfo& task : tasks())
    for (const TaskOptions& options : shapes_of(task.name))
      for (uint64_t seed = 0; seed < seeds; ++seed) {
        SCOPED_TRACE(std::string(task.name) + " seed " + std::to_string(seed) + " length " +
                     std::to_string(options.length));
        check(task, make_task(task.name, seed, options), options);
      }
}

std::string refusal(std::string_view name, const TaskOptions& options) {
  try {
    make_task(name, 1, options);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Tasks, AreTheSameOnEveryPlatform) {
  const std::map<std::string_view, uint64_t> expected{
      {"chain", 14966109552474098941ULL},  {"ask", 15442139893635578505ULL},    {"needle", 3456546413649064893ULL},
      {"updates", 8728422605712133462ULL}, {"copies", 12861997505108036121ULL},
  };
  for (const TaskInfo& task : tasks()) EXPECT_EQ(hash_of(make_task(task.name, 7)), expected.at(task.name)) << task.name;
}

TEST(Tasks, DifferBySeedAndByName) {
  std::set<uint64_t> hashes;
  for (const TaskInfo& task : tasks())
    for (uint64_t seed = 0; seed < 50; ++seed) hashes.insert(hash_of(make_task(task.name, seed)));
  EXPECT_EQ(hashes.size(), tasks().size() * 50);
  EXPECT_EQ(make_task("chain", 3).ids, make_task("chain", 3).ids);
}

TEST(Tasks, FillTheLengthAndStartWithBos) {
  for_each_sample(20, [](const TaskInfo&, const TaskSample& sample, const TaskOptions& options) {
    ASSERT_EQ(sample.ids.size(), static_cast<size_t>(options.length));
    ASSERT_EQ(sample.target.size(), sample.ids.size());
    EXPECT_EQ(sample.prompt_length, options.prompt_length.value_or(options.length * 3 / 8));
    EXPECT_EQ(sample.ids[0], kBos);
    EXPECT_EQ(std::count(sample.ids.begin(), sample.ids.end(), kBos), 1);
    for (int32_t id : sample.ids) EXPECT_EQ(token_name(id).find("unused"), std::string::npos) << id;
  });
}

TEST(Tasks, PutEntitiesInThePromptOnlyAsKeyAndValueBetweenWords) {
  for_each_sample(20, [](const TaskInfo&, const TaskSample& sample, const TaskOptions&) {
    for (int32_t i = 1; i < sample.prompt_length; ++i) {
      EXPECT_EQ(sample.target[i], kUnpredictable);
      if (!is_entity(sample.ids[i]) || is_entity(sample.ids[i - 1])) continue;
      ASSERT_LT(i + 2, sample.prompt_length);
      EXPECT_TRUE(is_entity(sample.ids[i + 1]));
      EXPECT_FALSE(is_entity(sample.ids[i + 2]));
    }
  });
}

TEST(Tasks, AnswerEveryLookUpWithTheLatestStatement) {
  for_each_sample(50, [](const TaskInfo&, const TaskSample& sample, const TaskOptions& options) {
    int32_t look_ups = 0;
    for (int32_t i = 1; i < options.length; ++i) {
      if (sample.target[i] != kLookUp) continue;
      ++look_ups;
      const int32_t found = latest_statement(sample, sample.ids[i - 1], i - 1, [](int32_t) { return true; });
      ASSERT_GE(found, 0) << "at " << i;
      EXPECT_EQ(sample.ids[found + 1], sample.ids[i]) << "at " << i;
    }
    EXPECT_GE(look_ups, 3);
  });
}

TEST(Tasks, KeepInNeededWhatTheLookUpsRead) {
  for_each_sample(50, [](const TaskInfo&, const TaskSample& sample, const TaskOptions& options) {
    EXPECT_TRUE(std::is_sorted(sample.needed.begin(), sample.needed.end()));
    EXPECT_EQ(std::adjacent_find(sample.needed.begin(), sample.needed.end()), sample.needed.end());
    ASSERT_EQ(sample.needed_until.size(), sample.needed.size());
    for (int32_t i = 1; i < options.length; ++i) {
      if (sample.target[i] != kLookUp) continue;
      const auto still_kept = [&](int32_t position) {
        const auto at = std::lower_bound(sample.needed.begin(), sample.needed.end(), position);
        return at != sample.needed.end() && *at == position && i <= sample.needed_until[at - sample.needed.begin()];
      };
      const int32_t found = latest_statement(sample, sample.ids[i - 1], i - 1, still_kept);
      ASSERT_GE(found, 0) << "at " << i;
      EXPECT_EQ(sample.ids[found + 1], sample.ids[i]) << "at " << i;
    }
  });
}

TEST(Tasks, NeedFarLessThanTheySay) {
  for (const TaskInfo& task : tasks()) {
    const TaskSample sample = make_task(task.name, 1);
    EXPECT_FALSE(sample.needed.empty()) << task.name;
    EXPECT_LE(sample.needed.size(), sample.ids.size() / 4) << task.name;
  }
}

TEST(Tasks, CallARoutineTokenOnlyWhatFollowsFromTheLastFew) {
  for_each_sample(20, [](const TaskInfo&, const TaskSample& sample, const TaskOptions& options) {
    for (int32_t i = sample.prompt_length; i < options.length; ++i) {
      if (sample.target[i] != kRoutine) continue;
      if (!options.thinking && sample.ids[i] == kGo) continue;  // without thoughts a GO follows the value at once
      EXPECT_EQ(sample.ids[i], routine_answer(sample, i)) << "at " << i;
    }
  });
}

TEST(Tasks, RewriteValuesInThePromptAndInTheTraceOfUpdates) {
  const TaskSample sample = make_task("updates", 5);
  std::map<int32_t, std::set<int32_t>> values;
  for (int32_t i = 0; i + 1 < sample.prompt_length; ++i)
    if (is_entity(sample.ids[i]) && is_entity(sample.ids[i + 1])) values[sample.ids[i]].insert(sample.ids[i + 1]);
  EXPECT_EQ(values.size(), 18U);  // the trace assigns six more
  EXPECT_EQ(std::count_if(values.begin(), values.end(), [](const auto& entry) { return entry.second.size() == 2; }), 8);
  EXPECT_GT(std::count(sample.ids.begin() + sample.prompt_length, sample.ids.end(), kSet), 5);
}

TEST(Tasks, AskForLateVariablesOnlyAfterTheTraceAssignedThem) {
  const TaskSample sample = make_task("updates", 9, {.length = 1024});
  int32_t asked_late = 0;
  for (int32_t i = sample.prompt_length; i < 1024; ++i) {
    if (sample.target[i] != kLookUp) continue;
    const auto first = std::find(sample.ids.begin(), sample.ids.end(), sample.ids[i - 1]) - sample.ids.begin();
    asked_late += first >= sample.prompt_length && sample.ids[first - 1] == kSet;
  }
  EXPECT_GT(asked_late, 3);
}

TEST(Tasks, AskOneSectionForAWholePhase) {
  const TaskSample sample = make_task("ask", 11);
  std::map<int32_t, int32_t> section_of;
  int32_t section = 0;
  for (int32_t i = 1; i < sample.prompt_length; ++i) {
    section += sample.ids[i] < kFirstFiller;
    if (is_entity(sample.ids[i]) && is_entity(sample.ids[i + 1])) section_of[sample.ids[i]] = section;
  }
  std::vector<int32_t> asked;
  for (int32_t i = sample.prompt_length; i + 1 < 512; ++i)
    if (sample.ids[i] == kAsk) asked.push_back(section_of.at(sample.ids[i + 1]));
  for (size_t turn = 1; turn < asked.size(); ++turn)
    EXPECT_EQ(asked[turn] == asked[turn - 1], turn % 8 != 0) << "turn " << turn;
}

TEST(Tasks, RefuseWithWhatIsAllowed) {
  EXPECT_NE(refusal("chian", {})
                .find("given \"chian\" (did you mean \"chain\"?); allowed chain, ask, needle, updates, copies"),
            std::string::npos)
      << refusal("chian", {});
  EXPECT_NE(refusal("chain", {.length = 15}).find("length is out of range; given 15; allowed 16 to 65536"),
            std::string::npos);
  EXPECT_NE(refusal("chain", {.prompt_length = 512}).find("given 512; allowed 4 to 508"), std::string::npos);
  EXPECT_NE(refusal("chain", {.facts = 1}).find("given 1; allowed 2 to 96"), std::string::npos);
  EXPECT_NE(refusal("ask", {.sections = 9}).find("sections is out of range; given 9; allowed 1 to 8"),
            std::string::npos);
  EXPECT_NE(refusal("ask", {.facts = 3, .sections = 4}).find("given 4; allowed 1 to 3"), std::string::npos);
  EXPECT_NE(refusal("chain", {.hops = 2}).find("no option hops"), std::string::npos);
  EXPECT_NE(refusal("chain", {.phase = 2}).find("no option phase"), std::string::npos);
  EXPECT_NE(refusal("ask", {.gap = 2}).find("no option gap"), std::string::npos);
  EXPECT_NE(refusal("needle", {.update_every = 2}).find("no option update_every"), std::string::npos);
  EXPECT_NE(refusal("updates", {.copies = 2}).find("given 2; allowed 1 to 1"), std::string::npos);
  EXPECT_NE(refusal("updates", {.facts = 5, .rewrites = 6}).find("given 6; allowed 0 to 4"), std::string::npos);
  EXPECT_NE(refusal("chain", {.prompt_length = 100, .facts = 60})
                .find("do not fit the prompt; given prompt_length 100; allowed 185 or more"),
            std::string::npos);
}

TEST(Tasks, NameTokensForPeople) {
  EXPECT_EQ(token_name(kBos), "BOS");
  EXPECT_EQ(token_name(11), "sec3");
  EXPECT_EQ(token_name(16), "w0");
  EXPECT_EQ(token_name(105), "think2.5");
  EXPECT_EQ(token_name(128 + 41), "E41");
  EXPECT_EQ(token_name(7), "unused7");
  EXPECT_THROW(token_name(256), InvalidArgument);
  EXPECT_THROW(token_name(-1), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::lm::tasks_test
