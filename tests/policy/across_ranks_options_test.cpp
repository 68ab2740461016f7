// SPDX-License-Identifier: Apache-2.0
// Every policy that has a name, with every choice of each of its options: ranks that hold a part of the heads keep what
// one machine keeps, bit for bit, or refuse the policy by name when the keeper is made. Sinks and recents are few, so
// that scores decide which slots stay.

#include <gtest/gtest.h>

#include <bit>
#include <iostream>
#include <set>

#include "rank_calibration.h"
#include "rank_engine.h"
#include "threads_collective.h"

namespace kvkeep::across_ranks_options_test {
namespace {

using testing::RankEngine;
using testing::ThreadRanks;

using Options = std::map<std::string, std::string>;
using Row = std::tuple<int, SequenceId, std::int32_t, std::int32_t>;  ///< step, sequence, layer, KV head of the model

/// What a row holds after a step: positions, bits of credit and tally, and of what attention read of folded spans.
using Held = std::vector<std::uint64_t>;

struct Run {
  std::map<Row, Held> rows;
  std::int64_t events = 0;
  bool scored = false;  ///< slots between sinks and recents stay that are no run
  std::string error;    ///< of a step; the run ends there
};

constexpr int kSteps = 22;

void add_rows(RankEngine& engine, int step, const std::map<Row, Held>& tallies, Run& run) {
  for (const SequenceId id : {1, 2})
    for (std::int32_t l = 0; l < RankEngine::kLayers; ++l)
      for (std::int32_t h = 0; h < RankEngine::kHeads; ++h) {
        if (!engine.has(h)) continue;
        const std::vector<std::int32_t> positions = engine.positions(id, l, h);
        std::size_t gaps = 0;
        for (std::size_t t = 1; t < positions.size(); ++t) gaps += positions[t] > positions[t - 1] + 1 ? 1 : 0;
        run.scored = run.scored || (id == 2 && gaps > 1);  // the other sequence has pinned spans
        Held held(positions.begin(), positions.end());
        for (const float credit : engine.credit(id, l, h)) held.push_back(std::bit_cast<std::uint32_t>(credit));
        if (const auto tally = tallies.find({step, id, l, h}); tally != tallies.end())
          held.insert(held.end(), tally->second.begin(), tally->second.end());
        held.push_back(engine.read[{id, l, h}]);
        run.rows[{step, id, l, h}] = std::move(held);
      }
}

/// Tallies that an event gives to the slots that stay.
std::map<Row, Held> tallies_of(const RankEngine& engine, int step, const Plan& plan) {
  std::map<Row, Held> found;
  if (!plan.decision.tally || !plan.decision.keep) return found;
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const kvkeep::Row& row = plan.table.rows[r];
    const float* const tally = plan.decision.tally->data<float>() + row.first;
    Held& held =
        found[{step, engine.ids[static_cast<std::size_t>(row.sequence)], row.layer, engine.first() + row.head}];
    for (const std::int32_t slot : plan.decision.keep->row(r))
      held.push_back(std::bit_cast<std::uint32_t>(tally[slot]));
  }
  return found;
}

Run run(RankEngine& engine) {
  Run done;
  try {
    engine.begin_run<Error>();  // official forms pin nothing, and the smallest budgets have no room
    for (int n = 0; n < kSteps; ++n) {
      engine.observe(RankEngine::work_of_step(n));
      const Plan plan = engine.keeper.plan(engine.view());
      const std::map<Row, Held> tallies = tallies_of(engine, n, plan);
      static_cast<void>(engine.keeper.apply(plan, engine.view()));
      engine.settle();
      if (n == 0) engine.run_second_pass();
      add_rows(engine, n, tallies, done);
    }
  } catch (const RankError&) {
    throw;
  } catch (const Error& error) {
    done.error = error.what();
  }
  done.events = engine.keeper.totals().events;
  return done;
}

// ---- Choices

/// The parts of "a, b, c".
std::vector<std::string> words_of(std::string_view allowed) {
  std::vector<std::string> words;
  while (!allowed.empty()) {
    const std::size_t end = std::min(allowed.find(", "), allowed.size());
    std::string word(allowed.substr(0, end));
    if (const std::size_t hole = word.find("<slots>"); hole != std::string::npos) word.replace(hole, 7, "5");
    words.push_back(std::move(word));
    allowed.remove_prefix(std::min(end + 2, allowed.size()));
  }
  return words;
}

/// Values to try: every word, both truths, and a few numbers. A file has none.
std::vector<std::string> values_of(const OptionInfo& option) {
  static const std::map<std::string, std::vector<std::string>> special{{"bytes", {"20000"}},
                                                                       {"memory.host_bytes", {"4000000"}},
                                                                       {"memory.alpha", {"-1", "0"}},
                                                                       {"allocator.threshold", {"-2", "0.03"}},
                                                                       {"layers.threshold", {"0.9"}}};
  if (const auto found = special.find(option.name); found != special.end()) return found->second;
  if (option.allowed.starts_with("a file")) return {};
  if (option.allowed.starts_with("an integer")) {
    const std::size_t digit = option.allowed.find_first_of("-0123456789");
    const long long least = std::stoll(option.allowed.substr(digit));
    std::vector<std::string> numbers{std::to_string(least)};
    for (const int n : {3, 7})
      if (n > least) numbers.push_back(std::to_string(n));
    return numbers;
  }
  if (!option.allowed.starts_with("a number")) return words_of(option.allowed);
  std::vector<std::string> numbers{"0.3", "0.8"};
  if (option.allowed.find("[0.0") != std::string::npos) numbers.emplace_back("0");
  if (option.allowed.find("1.0]") != std::string::npos) numbers.emplace_back("1");
  if (const std::size_t word = option.allowed.find(" or "); word != std::string::npos)
    numbers.push_back(option.allowed.substr(word + 4));
  if (option.allowed.find("[1.0") != std::string::npos) numbers = {"1", "3"};
  return numbers;
}

/// Options under which budgets, windows and segments fit these engines, and few slots are protected.
Options small(const PolicyInfo& policy, const std::string& calibration) {
  const Options fitting{{"budget", "24"},
                        {"interval", "6"},
                        {"sink", "2"},
                        {"recent", "4"},
                        {"scorer.window", "6"},
                        {"scorer.calibration", calibration},
                        {"allocator.window", "6"},
                        {"allocator.min_segment", "2"},
                        {"allocator.max_segment", "12"},
                        {"allocator.chunk", "5"},
                        {"allocator.threshold", "0.001"},
                        {"layers.layer", "1"},
                        {"layers.min_layer", "0"},
                        {"layers.observed_layers", "1"},
                        {"layers.min_context", "12"}};
  Options chosen;
  for (const OptionInfo& option : policy.options) {
    if (option.name == "budget" && option.fallback == "-") continue;
    if (const auto found = fitting.find(option.name); found != fitting.end()) chosen.insert(*found);
  }
  if (policy.name == "sekv") chosen["memory.min_span"] = "3", chosen["memory.max_span"] = "8";
  return chosen;
}

/// What must be said besides one option.
void make_room(const PolicyInfo& policy, const std::string& option, const std::string& value, Options& chosen) {
  if (option == "ratio" || option == "bytes" || option == "budget_share") chosen.erase("budget");
  if (option == "budget_counts" && value == "decoded") chosen["protect_prompt"] = "true";
  const bool folds = option.starts_with("memory.") || (option == "rest" && value == "fold");
  if (folds && policy.name != "sekv") {
    chosen["rest"] = "fold";
    chosen.try_emplace("memory.min_span", "3"), chosen.try_emplace("memory.max_span", "8");
  }
  if (option.starts_with("memory.coverage")) chosen["memory.zoom"] = "coverage";
  if (option == "allocator.safeguard" && policy.allocator == "criticalkv") chosen["allocator.heads"] = "adaptive";
}

std::string text_of(const PolicyInfo& policy, const Options& options) {
  std::string all = policy.name;
  for (const auto& [name, value] : options) all += "," + name + "=" + value;
  return policy.narrows ? all + "+tova,budget=20,interval=6,sink=2,recent=4" : all;
}

/// Options that say how heads are put together or which slots compete: tried in pairs too.
bool decides(const std::string& option) {
  static const std::set<std::string> all{"variant",      "share",           "scorer.style",          "scorer.heads",
                                         "scorer.group", "allocator.heads", "allocator.suffix_fill", "preset"};
  return all.contains(option);
}

/// Options of folded spans are read once slots are chosen, by the same code whatever chose them: they are tried under
/// one scorer.
bool is_tried(const PolicyInfo& policy, const std::string& option) {
  return !option.starts_with("memory.") || policy.scorer == "keydiff" || policy.scorer.empty() || policy.name == "sekv";
}

/// Policy texts to compare, and the choices in each: as it is, one option changed, two that decide changed, and over
/// rows of unequal length.
std::map<std::string, std::set<std::string>> choices_of(const PolicyInfo& policy, const std::string& calibration) {
  const Options usual = small(policy, calibration);
  std::map<std::string, std::set<std::string>> texts{{text_of(policy, usual), {}}};
  if (!policy.narrows && !policy.scorer.empty())
    texts["asl,budget=24,scorer.window=6,min_layer=0,cache_mass=0.7+" + text_of(policy, usual)] = {};
  for (const OptionInfo& one : policy.options) {
    if (!is_tried(policy, one.name)) continue;
    for (const std::string& value : values_of(one)) {
      Options changed = usual;
      changed[one.name] = value;
      make_room(policy, one.name, value, changed);
      texts[text_of(policy, changed)].insert(one.name + "=" + value);
      for (const OptionInfo& two : policy.options) {
        if (&two <= &one || !decides(one.name) || !decides(two.name)) continue;
        for (const std::string& other : values_of(two)) {
          Options both = changed;
          both[two.name] = other;
          texts[text_of(policy, both)].insert({one.name + "=" + value, two.name + "=" + other});
        }
      }
    }
  }
  return texts;
}

// ---- Comparison

struct Count {
  int compared = 0, refused = 0, not_allowed = 0;
  std::set<std::string> failed_alike;
  std::int64_t events = 0;
  bool scored = false;
};

/// False if the policy cannot be made on any machine.
bool compare(const std::string& policy, std::string_view name, Count& count) {
  Run alone;
  try {
    RankEngine engine(policy);
    alone = run(engine);
  } catch (const Error&) {  // a value that does not go with the others, or with this model
    ++count.not_allowed;
    return false;
  }
  bool refused = false;
  for (const std::int32_t size : {2, 4}) {
    ThreadRanks ranks(size);
    std::mutex mutex;
    std::map<Row, Held> together;
    std::set<std::string> refusals, errors;
    ranks.run([&](const std::shared_ptr<Collective>& own) {
      std::unique_ptr<RankEngine> engine;
      try {
        engine = std::make_unique<RankEngine>(policy, own);
      } catch (const Error& error) {
        const std::scoped_lock lock(mutex);
        refusals.insert(error.what());
        return;
      }
      std::string error;
      Run part;
      try {
        part = run(*engine);
        error = part.error;
      } catch (const RankError& lost) {
        error = lost.what();
      }
      if (!error.empty()) ranks.lose();
      const std::scoped_lock lock(mutex);
      together.merge(part.rows);
      if (!error.empty()) errors.insert(error);
    });
    if (!refusals.empty()) {
      refused = true;
      for (const std::string& why : refusals) EXPECT_NE(why.find(name), std::string::npos) << policy << ": " << why;
      continue;
    }
    EXPECT_EQ(errors.empty(), alone.error.empty())
        << policy << " on " << size << " ranks: " << (errors.empty() ? alone.error : *errors.begin());
    if (!errors.empty()) continue;
    EXPECT_EQ(together.size(), alone.rows.size()) << policy << " on " << size << " ranks";
    const auto differ =
        std::ranges::count_if(alone.rows, [&](const auto& row) { return together[row.first] != row.second; });
    EXPECT_EQ(differ, 0) << policy << " on " << size << " ranks, of " << alone.rows.size() << " rows";
  }
  if (refused) {
    ++count.refused;
  } else if (!alone.error.empty()) {
    count.failed_alike.insert(policy + ": " + alone.error);
  } else {
    ++count.compared;
    count.events += alone.events;
    count.scored = count.scored || alone.scored;
  }
  return true;
}

/// Policies are tried by what spends their budget.
class AcrossRanksOptions : public ::testing::TestWithParam<std::string> {
 protected:
  [[nodiscard]] static bool is_mine(const PolicyInfo& policy) {
    if (GetParam() == "flat") return policy.allocator.empty() && !policy.scorer.empty();
    if (GetParam() != "others") return policy.allocator == GetParam();
    return policy.scorer.empty() && policy.name != "full";
  }
};

TEST_P(AcrossRanksOptions, KeepWhatOneMachineKeepsUnderEveryChoiceOfEveryOption) {
  const testing::CalibrationFile calibration;
  Count sum;
  int tried = 0;
  std::set<std::string> choices_made, choices_left;
  for (const PolicyInfo& policy : policies()) {
    if (policy.name.find("outside-") != std::string::npos || !is_mine(policy)) continue;
    Count count;
    for (const auto& [policy_text, choices] : choices_of(policy, calibration.path.string()))
      (compare(policy_text, policy.name, count) ? choices_made : choices_left).insert(choices.begin(), choices.end());
    EXPECT_GE(count.compared, 8) << policy.name;
    EXPECT_GT(count.events, 30) << policy.name << ": too few events to say anything";
    EXPECT_TRUE(count.scored || policy.scorer == "streaming") << policy.name << ": no score mattered";
    ++tried;
    sum.compared += count.compared, sum.refused += count.refused, sum.events += count.events;
    sum.not_allowed += count.not_allowed;
    sum.failed_alike.merge(count.failed_alike);
  }
  EXPECT_GT(tried, 3);
  for (const std::string& made : choices_made) choices_left.erase(made);
  std::cout << GetParam() << ": " << tried << " policies, " << sum.compared
            << " choices compared on 2 and 4 ranks over " << sum.events << " events, " << sum.refused
            << " refused by name, " << sum.failed_alike.size() << " that fail alike everywhere, " << sum.not_allowed
            << " not allowed anywhere\n";
  for (const std::string& one : choices_left) std::cout << "  never allowed: " << one << "\n";
  for (const std::string& one : sum.failed_alike) std::cout << "  " << one << "\n";
}

INSTANTIATE_TEST_SUITE_P(Allocators, AcrossRanksOptions,
                         ::testing::Values("flat", "ams", "pyramidkv", "adakv", "chunkkv", "criticalkv", "threshold",
                                           "others"),
                         [](const auto& one) { return one.param; });

}  // namespace
}  // namespace kvkeep::across_ranks_options_test
