// SPDX-License-Identifier: Apache-2.0
// Scorers, allocators and policies that a program adds: by name, in lists, in a Keeper, saved and restored; and names
// that are refused.

#include "kvkeep/policy/asl.h"
#include "kvkeep/policy/registry.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "engines.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/score/knorm.h"
#include "message_of.h"
#include "ramp.h"
#include "told.h"
#include "vnorm.h"

namespace kvkeep::registration_test {
namespace {

using testing::message_of;

struct ReversedOptions {
  bool reversed = true;

  void describe(Fields& f) { f.flag("reversed", reversed, "the lowest scores stay"); }
};

/// Top-k of scores with the other sign.
class Reversed final : public Allocator {
 public:
  using Options = ReversedOptions;
  static constexpr AllocatorTraits traits{
      .name = "outside-reversed", .what = "the worst slots stay", .source = "none", .scorer = "vnorm"};
  static void context(Fields& f) { f.uneven_heads = true; }

  explicit Reversed(ReversedOptions options) : options_(options) {}
  [[nodiscard]] std::string_view name() const override { return traits.name; }
  void check(AllocatorContext& policy) const override { require_own_form(traits.name, policy, true); }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override {
    const Scores reversed{clone(scores.data)};
    float* const g = reversed.data.data<float>();
    std::for_each(g, g + reversed.data.numel(), [](float& x) { x = -x; });
    Flat().allot(evidence, limits, options_.reversed ? reversed : scores, std::move(seen), decision);
  }

 private:
  ReversedOptions options_;
};

/// Another policy under its own name.
class Renamed final : public KVPolicy {
 public:
  Renamed(std::unique_ptr<KVPolicy> other, std::string json) : other_(std::move(other)), json_(std::move(json)) {}
  [[nodiscard]] std::string_view name() const override { return "outside-renamed"; }
  [[nodiscard]] Needs needs() const override { return other_->needs(); }
  [[nodiscard]] Trigger trigger() const override { return other_->trigger(); }
  [[nodiscard]] Decision decide(Machine& machine, const Evidence& evidence) const override {
    return other_->decide(machine, evidence);
  }
  [[nodiscard]] std::string to_json() const override { return json_; }

 private:
  std::unique_ptr<KVPolicy> other_;
  std::string json_;
};

PolicyEntry renamed() {
  return {
      .name = "outside-renamed", .what = "the newest slots", .source = "none", .describe = [](Fields& f) -> MakePolicy {
        std::int32_t budget = 64;
        f.integer("budget", budget, 5, 4096, "slots");
        return [budget](std::string json, std::unique_ptr<KVPolicy>) {
          return std::make_unique<Renamed>(make_policy(text("streaming,interval=8,budget=", budget)), std::move(json));
        };
      }};
}

/// ASL under another name: a policy that narrows.
PolicyEntry narrowing() {
  return {.name = "outside-narrowing",
          .what = "as asl",
          .source = "none",
          .needs = "prompts layer by layer",
          .narrows = true,
          .describe = [](Fields& f) -> MakePolicy {
            AslOptions o;
            o.describe(f, "outside-narrowing");
            return [o](std::string json, std::unique_ptr<KVPolicy> decoding) {
              return std::make_unique<Asl>("outside-narrowing", o, std::move(decoding), std::move(json));
            };
          }};
}

class Registration : public ::testing::Test {
 protected:
  /// Once a process, whichever suites run.
  static void SetUpTestSuite() {
    static const bool added = [] {
      register_scorer(
          scorer_entry<Vnorm>({.name = "outside-recent", .what = "large values, and the newest", .source = "none"},
                              [](const Fields&, Retention& r) { r.recent = 17; }));
      register_allocator<Reversed>();
      register_policy(renamed());
      register_policy(narrowing());
      return true;
    }();
    ASSERT_TRUE(added);
  }

  static nlohmann::json resolved(const std::string& text) {
    return nlohmann::json::parse(make_policy(text)->to_json());
  }

  static PolicyInfo listed(const std::string& name) {
    const std::vector<PolicyInfo> all = policies();
    const auto found = std::ranges::find(all, name, &PolicyInfo::name);
    EXPECT_NE(found, all.end()) << name;
    return found == all.end() ? PolicyInfo{} : *found;
  }
};

TEST_F(Registration, MakesWhatWasAddedByTextAndByJson) {
  EXPECT_EQ(resolved("vnorm,budget=64,squared=true")["scorer"]["squared"], true);
  EXPECT_EQ(resolved("ams-vnorm,budget=64,window=8")["allocator"]["window"], 8);
  EXPECT_EQ(resolved("outside-recent,budget=64")["recent"], 17);
  EXPECT_EQ(resolved("outside-reversed-tova,budget=64")["scorer"]["heads"], "group") << "Reversed::context";
  EXPECT_EQ(resolved("outside-reversed,budget=64")["allocator"]["reversed"], true);
  EXPECT_EQ(resolved("outside-renamed")["budget"], 64);
  EXPECT_EQ(resolved("outside-narrowing,budget=64+vnorm,budget=9")["decode"]["policy"], "vnorm");
  EXPECT_EQ(resolved("outside-narrowing,budget=64,cache_mass=0.5+tova,budget=9")["decode"]["scorer"]["heads"], "group");
  for (const char* policy : {"vnorm,budget=64,squared=true", "ams-vnorm,budget=64", "chunkkv-outside-recent,budget=64",
                             "outside-reversed-rkv,budget=64", "outside-renamed,budget=9",
                             "outside-narrowing,budget=64+ams-vnorm,budget=9"}) {
    const std::string json = make_policy(policy)->to_json();
    EXPECT_EQ(make_policy_from_json(json)->to_json(), json) << policy;
  }
  EXPECT_TRUE(make_policy("vnorm,budget=64")->needs().values);
}

TEST_F(Registration, ListsWhatWasAdded) {
  EXPECT_EQ(listed("vnorm").what, "values of large norm");
  EXPECT_EQ(listed("ams-vnorm").scorer, "vnorm");
  EXPECT_EQ(listed("ams-vnorm").allocator, "ams");
  EXPECT_EQ(listed("outside-reversed").scorer, "vnorm");
  EXPECT_EQ(listed("outside-reversed-h2o").source, "none, over " + listed("h2o").source);
  EXPECT_EQ(listed("outside-renamed").options.size(), 1U);
  EXPECT_TRUE(listed("outside-narrowing").narrows);
  const auto options = listed("vnorm").options;
  EXPECT_TRUE(std::ranges::any_of(options, [](const OptionInfo& o) {
    return o.name == "scorer.squared" && o.fallback == "false" && o.allowed == "true, false";
  }));
  const std::vector<PolicyInfo> all = policies();
  for (const char* none : {"adakv-vnorm", "outside-reversed-streaming", "outside-reversed-random-attention"})
    EXPECT_FALSE(std::ranges::any_of(all, [&](const PolicyInfo& p) { return p.name == none; })) << none;
}

TEST_F(Registration, ChecksWhatWasAddedLikeItsOwn) {
  const auto refusal = [](const std::string& policy) {
    return message_of<InvalidArgument>([&] { static_cast<void>(make_policy(policy)); });
  };
  EXPECT_NE(refusal("vnorm,budget=64,scorer.norm=2").find("vnorm has no option \"scorer.norm\""), std::string::npos);
  EXPECT_NE(refusal("outside-renamed,budget=4").find("given 4; allowed an integer from 5 to 4096"), std::string::npos);
  EXPECT_NE(refusal("outside-reversed,budget=64,variant=official").find("outside-reversed; allowed strict"),
            std::string::npos);
}

TEST_F(Registration, SavesAndRestoresUnderWhatWasAdded) {
  for (const std::string policy : {"vnorm,budget=24,interval=8,recent=8", "ams-vnorm,budget=24,interval=8,recent=8",
                                   "outside-reversed,budget=24,interval=8,recent=8", "outside-renamed,budget=24"}) {
    SCOPED_TRACE(policy);
    const std::filesystem::path file =
        std::filesystem::temp_directory_path() / text("kvkeep-registration-", ::getpid());
    engines::DenseEngine here(policy, true, Dtype::f32), there(policy, true, Dtype::f32);
    oracle::Random random(5);
    here.join(0);
    here.step(engines::numbers_of(random, {{0, 60}}));
    for (int i = 0; i < 5; ++i) here.step(engines::numbers_of(random, {{0, 1}}));
    here.keeper.save(0, file);
    there.keeper.restore(0, file);
    std::filesystem::remove(file);
    there.lengths[0] = here.lengths.at(0);
    for (std::int32_t r = 0; r < engines::kRows; ++r)
      for (std::int32_t t = 0; t < here.lengths.at(0)[static_cast<std::size_t>(r)]; ++t)
        for (const engines::Sided side : engines::kAllSides)
          there.slot_of(0, r / engines::kHeads, r % engines::kHeads, t, side)
              .copy_(here.slot_of(0, r / engines::kHeads, r % engines::kHeads, t, side));
    std::int64_t dropped = 0;
    for (int i = 0; i < 20; ++i) {
      const engines::Numbers numbers = engines::numbers_of(random, {{0, 1}});
      static_cast<void>(here.step(numbers));
      dropped += there.step(numbers).slots_dropped;
      for (std::int32_t r = 0; r < engines::kRows; ++r)
        EXPECT_TRUE(std::ranges::equal(here.keeper.positions(0, r / engines::kHeads, r % engines::kHeads),
                                       there.keeper.positions(0, r / engines::kHeads, r % engines::kHeads)));
    }
    EXPECT_GT(dropped, 0);
  }
}

TEST_F(Registration, RefusesNamesThatAreNoneOrTaken) {
  const std::size_t before = policies().size();
  const auto scorer = [](std::string_view name) {
    return message_of<InvalidArgument>(
        [&] { register_scorer(scorer_entry<Vnorm>({.name = name, .what = "w", .source = "s"})); });
  };
  for (const char* name : {"", "Vnorm", "my norm", "norm,2", "a+b", "norm_2", "-", "-x", "x-"})
    EXPECT_EQ(scorer(name), text("register_scorer: this is no name for a policy; given \"", name,
                                 "\"; allowed lower-case letters, digits, and hyphens within"));
  for (const char* name : {"vnorm", "tova", "ams", "ams-tova", "full", "sekv", "asl", "adakv", "random-attention"})
    EXPECT_EQ(scorer(name), text("register_scorer: there is a policy or an allocator ", name, " already; given \"",
                                 name, "\"; allowed a name that is not taken"));
  const auto allocator = [](AllocatorTraits traits) {
    return message_of<InvalidArgument>([&] { register_allocator(allocator_entry<Reversed>(traits)); });
  };
  EXPECT_NE(allocator({.name = "tova", .what = "w", .source = "s"}).find("tova already"), std::string::npos);
  EXPECT_NE(allocator({.name = "ams", .what = "w", .source = "s"}).find("ams already"), std::string::npos);
  for (const char* alone : {"nobody", "streaming"})
    EXPECT_NE(allocator({.name = "outside-x", .what = "w", .source = "s", .scorer = alone}).find(alone),
              std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([] { register_policy(renamed()); }).find("outside-renamed already"),
            std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([] { register_policy({}); }).find("no name"), std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([] {
              register_policy({.name = "outside-x", .what = {}, .source = {}});
            }).find("describe of outside-x is empty"),
            std::string::npos);
  EXPECT_EQ(policies().size(), before) << "a refused name adds nothing";
}

struct CrookedOptions {
  std::int32_t window = -7;
  double share = 0.5;

  void describe(Fields& f) {
    f.integer("window", window, 1, 64, "queries");
    f.real("share", share, Range::between(0, 1), "of something");
  }
};
struct CrookedShare : CrookedOptions {
  CrookedShare() { window = 8, share = 1; }
};

template <class Of>
class Crooked final : public Allocator {
 public:
  using Options = Of;
  static constexpr AllocatorTraits traits{.name = "outside-crooked", .what = "the best slots", .source = "none"};
  explicit Crooked(const Of&) {}
  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override {
    Flat().allot(evidence, limits, scores, std::move(seen), decision);
  }
};

TEST_F(Registration, RefusesDefaultsThatAreNotAllowed) {
  EXPECT_EQ(
      message_of<InvalidArgument>([] { register_allocator<Crooked<CrookedOptions>>(); }),
      "register_allocator: an option of outside-crooked is not allowed: policy: the default of allocator.window is out "
      "of range or of the wrong type; given -7; allowed an integer from 1 to 64; one that must be given has a "
      "`fallback` instead");
  EXPECT_NE(message_of<InvalidArgument>([] {
              register_allocator<Crooked<CrookedShare>>();
            }).find("allocator.share is out of range or of the wrong type; given 1.0; allowed a number in (0.0, 1.0)"),
            std::string::npos);
  PolicyEntry policy = renamed();
  policy.name = "outside-crooked";
  policy.describe = [](Fields& f) -> MakePolicy {
    std::int32_t budget = 2;
    f.integer("budget", budget, 5, 4096, "slots");
    return {};
  };
  EXPECT_NE(message_of<InvalidArgument>([&] { register_policy(policy); }).find("policy: the default of budget"),
            std::string::npos);
  EXPECT_EQ(std::ranges::count(policies(), std::string("outside-crooked"), &PolicyInfo::name), 0);
}

/// What registering a scorer says whose options `describe` describes.
std::string scorer_refused(const std::function<void(Fields&)>& describe) {
  const ScorerTraits traits{.name = "outside-named", .what = "w", .source = "s"};
  return message_of<InvalidArgument>([&] {
    register_scorer({.traits = traits, .make = [describe](Fields& f) {
                       describe(f);
                       return std::make_unique<Knorm>();
                     }});
  });
}

TEST_F(Registration, RefusesNamesOfOptionsThatCannotBeGiven) {
  const std::size_t before = policies().size();
  const auto one = [](const char* name, Fields::Aliases aliases = {}) {
    return [name, aliases = std::vector<const char*>(aliases)](Fields& f) {
      std::int32_t value = 1;
      if (aliases.empty())
        f.integer(name, value, 0, 9, "w");
      else
        f.integer(name, value, 0, 9, "w", {aliases.front()});
    };
  };
  for (const char* name : {"", "a b", "a=b", "a,b", "a+b", "a.b", "\xc3\xa9"})
    EXPECT_EQ(scorer_refused(one(name)),
              text("register_scorer: an option of outside-named is not allowed: policy: this is no name for an option; "
                   "given \"",
                   name, "\"; allowed letters, digits, underscores and hyphens, at least one"));
  EXPECT_NE(scorer_refused(one("good", {"not good"})).find("given \"not good\""), std::string::npos);
  for (const char* name : {"budget", "ratio", "bytes", "interval", "share", "recent", "sink", "variant", "rest",
                           "memory", "kv_budget", "policy"})
    EXPECT_EQ(scorer_refused(one(name)),
              text("register_scorer: option \"", name,
                   "\" of outside-named is an option of every policy; allowed another name"));
  EXPECT_NE(scorer_refused(one("good", {"n_sink"})).find("option \"n_sink\" of outside-named"), std::string::npos);
  EXPECT_EQ(scorer_refused([&](Fields& f) { one("twice")(f), one("twice")(f); }),
            "register_scorer: an option of outside-named is not allowed: policy: twice is described twice; allowed "
            "options that share no name");
  EXPECT_NE(scorer_refused([&](Fields& f) { one("once", {"other"})(f), one("other")(f); }).find("other is described"),
            std::string::npos);

  AllocatorEntry allocator = allocator_entry<Reversed>({.name = "outside-named", .what = "w", .source = "s"});
  allocator.make = [&](Fields& f, const AllocatorContext&) {
    f.enter("allocator"), one("interval")(f), f.leave();
    return std::make_unique<Reversed>(ReversedOptions{});
  };
  EXPECT_EQ(
      message_of<InvalidArgument>([&] { register_allocator(allocator); }),
      "register_allocator: option \"interval\" of outside-named is an option of every policy; allowed another name");
  PolicyEntry policy = renamed();
  policy.name = "outside-named";
  policy.describe = [&](Fields& f) -> MakePolicy {
    one("policy")(f);
    return renamed().describe(f);
  };
  EXPECT_NE(
      message_of<InvalidArgument>([&] { register_policy(policy); }).find("an option of outside-named is called policy"),
      std::string::npos);
  EXPECT_EQ(policies().size(), before) << "a refused option adds nothing";
}

TEST_F(Registration, RefusesWhatMakesNull) {
  const auto scorer = [](bool always) -> ScorerEntry {
    return {.traits = {.name = "outside-null", .what = "w", .source = "s"},
            .make = [always](Fields& f) -> std::unique_ptr<Scorer> {
              bool none = always;
              f.flag("none", none, "w");
              return none ? nullptr : std::make_unique<Knorm>();
            }};
  };
  EXPECT_EQ(message_of<InvalidArgument>([&] { register_scorer(scorer(true)); }),
            "register_scorer: the default options of outside-null make null; allowed a scorer, an allocator, or a "
            "function that makes a policy");
  register_scorer(scorer(false));
  const auto said = [](const char* text) {
    return message_of<InvalidArgument>([text] { static_cast<void>(make_policy(text)); });
  };
  EXPECT_EQ(said("outside-null,budget=24,none=true"),
            "policy: make of scorer outside-null returned null; allowed a scorer");
  EXPECT_NE(make_policy("ams-outside-null,budget=24"), nullptr);

  AllocatorEntry allocator = allocator_entry<Reversed>({.name = "outside-null-too", .what = "w", .source = "s"});
  allocator.make = [](Fields& f, const AllocatorContext&) -> std::unique_ptr<Allocator> {
    if (f.has("sink")) return nullptr;
    return std::make_unique<Reversed>(ReversedOptions{});
  };
  register_allocator(allocator);
  EXPECT_EQ(said("outside-null-too-tova,budget=24,sink=1"),
            "policy: make of allocator outside-null-too returned null; allowed an allocator");

  PolicyEntry policy = renamed();
  policy.name = "outside-null-policy";
  policy.describe = [](Fields& f) -> MakePolicy {
    std::int32_t budget = 64;
    f.integer("budget", budget, 5, 4096, "slots");
    bool empty = false, none = false;
    f.flag("empty", empty, "w");
    f.flag("none", none, "w");
    if (empty) return {};
    return [none](std::string json, std::unique_ptr<KVPolicy>) -> std::unique_ptr<KVPolicy> {
      if (none) return nullptr;
      return std::make_unique<Renamed>(make_policy("streaming,budget=64"), std::move(json));
    };
  };
  register_policy(policy);
  EXPECT_EQ(said("outside-null-policy,empty=true"),
            "policy: describe of outside-null-policy returned an empty function; allowed one that makes the policy");
  EXPECT_EQ(said("outside-null-policy,none=true"),
            "policy: what describe of outside-null-policy returned made null; allowed a policy");
}

/// Scores and chooses as it is told.
class Told final : public Scorer {
 public:
  explicit Told(std::function<Scores(Scores)> change) : change_(std::move(change)) {}
  [[nodiscard]] std::string_view name() const override { return "outside-told"; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override {
    return change_(Knorm().score(evidence, limits, seen));
  }

 private:
  std::function<Scores(Scores)> change_;
};
class Chosen final : public Allocator {
 public:
  using Change = std::function<void(const RowTable&, std::optional<KeepSet>&)>;
  using Spread = std::function<void(std::vector<RowLimit>&)>;
  explicit Chosen(Change change, Spread spread = {}) : change_(std::move(change)), spread_(std::move(spread)) {}
  [[nodiscard]] std::string_view name() const override { return "outside-chosen"; }
  void spread(const Evidence&, std::span<const std::int32_t>, std::vector<RowLimit>& rows) const override {
    if (spread_) spread_(rows);
  }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override {
    Flat().allot(evidence, limits, scores, std::move(seen), decision);
    change_(evidence.table, decision.keep);
  }

 private:
  Change change_;
  Spread spread_;
};

/// What an event of a sequence of 61 tokens, with a budget of 24, says of these.
template <class Error>
std::string refused(std::unique_ptr<Scorer> scorer, std::unique_ptr<Allocator> allocator) {
  Retention retention{.trigger = {.budget = {.slots = 24}, .interval = 8}, .recent = 3};
  engines::DenseEngine engine(std::make_unique<Evict>("outside", std::move(scorer), std::move(allocator), retention),
                              false, Dtype::f32);
  oracle::Random random(5);
  engine.join(1);
  static_cast<void>(engine.step(engines::numbers_of(random, {{1, 60}})));
  const std::string said =
      message_of<Error>([&] { static_cast<void>(engine.step(engines::numbers_of(random, {{1, 1}}))); });
  EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 61) << said;
  return said;
}

TEST_F(Registration, RefusesAnEventWhoseAllocatorKeepsWhatItMayNot) {
  const auto first = [](KeepSet& keep) { return keep.slots.data<std::int32_t>(); };
  const auto one_less = [first](KeepSet& keep) {  // the newest of the first row
    std::copy(first(keep) + keep.indptr[1], first(keep) + keep.indptr.back(), first(keep) + keep.indptr[1] - 1);
    for (std::size_t r = 1; r < keep.indptr.size(); ++r) --keep.indptr[r];
  };
  const std::pair<Chosen::Change, std::string> wrong[] = {
      {[](auto&, auto& keep) { keep.reset(); },
       "decide: allocator outside-chosen of outside chose no slots; allowed one whose allot() fills Decision::keep"},
      {[](auto&, auto& keep) { keep = KeepSet{}; }, " gave 0 offsets of kept slots; allowed "},
      {[](auto&, auto& keep) { keep->indptr.pop_back(); }, " offsets of kept slots; allowed "},
      {[](auto&, auto& keep) { keep->slots = {}; },
       "step: kept slots of allocator outside-chosen of outside are an absent tensor; allowed a contiguous i32 ["},
      {[](auto&, auto& keep) { keep->slots = empty(keep->slots.sizes(), Dtype::i64); }, " are i64 ["},
      {[](auto&, auto& keep) { keep->slots = keep->slots.narrow(0, 0, 20); }, " are i32 [20] on cpu; allowed "},
      {[&](auto&, auto& keep) { first(*keep)[5] = first(*keep)[4]; }, " that do not ascend; allowed ascending ones"},
      {[&](auto&, auto& keep) { first(*keep)[0] = -1; }, " that do not ascend; allowed ascending ones from 0 to 60"},
      {[&](auto&, auto& keep) { first(*keep)[23] = 61; },
       " keeps slots of layer 0, head 0 that are beyond it; allowed ascending ones from 0 to 60"},
      {[](auto& table, auto& keep) { keep = keep_everything(table), ++keep->indptr[1]; },
       " keeps 62 slots of layer 0, head 0; allowed 1 to all 61"},
      {[](auto& table, auto& keep) { keep = keep_everything(table); },
       " keeps 61 slots of layer 0, head 0; allowed up to 24 (RowLimit::budget)"},
      {[](auto&, auto& keep) { keep->indptr[1] = 0; }, " keeps 0 slots of layer 0, head 0; allowed 1 to all 61"},
      {[&](auto&, auto& keep) { first(*keep)[3] = 4, std::iota(first(*keep) + 4, first(*keep) + 21, 5); },
       " drops slots of layer 0, head 0 that stay whatever they score; allowed all that RowLimit::guarded holds, here "
       "the oldest 4 and the newest 3"},
      {[&](auto&, auto& keep) { one_less(*keep); }, " drops slots of layer 0, head 0 that stay whatever they score"},
  };
  for (const auto& [change, says] : wrong) {
    const std::string said = refused<InvalidArgument>(std::make_unique<Knorm>(), std::make_unique<Chosen>(change));
    EXPECT_NE(said.find(says), std::string::npos) << said << "\nis not\n" << says;
  }
  const std::string said = refused<InvalidArgument>(
      std::make_unique<Knorm>(), std::make_unique<Chosen>([&](auto&, auto& keep) { one_less(*keep); },
                                                          [](auto& rows) {
                                                            for (auto& row : rows)
                                                              row.budget = 10;  // room for the row that keeps all
                                                            rows[0].due = false;
                                                          }));
  EXPECT_NE(said.find("layer 0, head 0, which is not due; allowed all 61 slots"), std::string::npos) << said;
}

TEST_F(Registration, RefusesAnEventWhoseAllocatorSpreadsBudgetsWrongly) {
  const std::pair<Chosen::Spread, std::string> wrong[] = {
      {[](auto& rows) { rows.pop_back(); }, " spread budgets over "},
      {[](auto& rows) { rows[1].budget = 3; },
       "step: allocator outside-chosen of outside gives layer 0, head 1 a budget of 3; allowed 4 or more, which its "},
      {[](auto& rows) { rows[0].budget = -1; }, " a budget of -1; allowed 4 or more"},
      {[](auto& rows) { rows[2].budget += 1; },
       " gives the rows of a sequence 97 slots in all; allowed 96, which the "},
      {[](auto& rows) { rows[1].due = false; },
       " slots in all; allowed 96, which the policy's budget gives them (a row "},
  };
  for (const auto& [spread, says] : wrong) {
    const std::string said =
        refused<InvalidArgument>(std::make_unique<Knorm>(), std::make_unique<Chosen>([](auto&, auto&) {}, spread));
    EXPECT_NE(said.find(says), std::string::npos) << said << "\nis not\n" << says;
  }
}

/// Ramp, without its check.
class Unchecked final : public Allocator {
 public:
  [[nodiscard]] std::string_view name() const override { return "outside-unchecked"; }
  [[nodiscard]] bool ragged() const override { return true; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  void allot(const Evidence& evidence, const Limits& limits, const Scores& scores, WindowAttention seen,
             Decision& decision) const override {
    Flat().allot(evidence, limits, scores, std::move(seen), decision);
  }
};

TEST_F(Registration, RowsOfDifferentLengthsShareNoSelection) {
  const auto made = [](Sharing share) {
    Retention retention{.trigger = {.budget = {.slots = 24}, .interval = 8}};
    retention.share = share;
    return std::make_unique<Evict>("outside", std::make_unique<Knorm>(), std::make_unique<Unchecked>(), retention);
  };
  for (const Sharing share : {Sharing::per_head, Sharing::all, Sharing::all_mean})
    EXPECT_EQ(
        message_of<InvalidArgument>([&] { static_cast<void>(made(share)); }),
        "policy: share of outside joins rows, and allocator outside-unchecked lets them keep different numbers of "
        "slots (ragged()); allowed share=per_layer_per_head");
  EXPECT_NE(made(Sharing::per_layer_per_head), nullptr);
}

TEST_F(Registration, RefusesAKeeperWhoseScorerReadsMoreQueriesThanARingHolds) {
  class Reader final : public Scorer {
   public:
    explicit Reader(std::int32_t queries) : queries_(queries) {}
    [[nodiscard]] std::string_view name() const override { return "outside-reader"; }
    [[nodiscard]] Needs needs() const override { return {.queries = queries_}; }
    [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
    [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                               const WindowAttention& seen) const override {
      return Knorm().score(evidence, limits, seen);
    }

   private:
    std::int32_t queries_;
  };
  const auto keeper = [](std::int32_t queries) {
    Retention retention{.trigger = {.budget = {.slots = 24}, .interval = 8}};
    return Keeper(engines::model(), std::make_unique<Evict>("outside", std::make_unique<Reader>(queries),
                                                            std::make_unique<Flat>(), retention));
  };
  for (const std::int32_t queries : {-1, INT32_MIN, (1 << 20) + 1, INT32_MAX})
    EXPECT_EQ(message_of<InvalidArgument>([&] { static_cast<void>(keeper(queries)); }),
              text("policy outside cannot run here: queries: outside reads the newest ", queries,
                   " of every full layer (Needs::queries); allowed 0 to 1048576"));
  EXPECT_EQ(keeper(1 << 20).queries_read(), 1 << 20);
}

TEST_F(Registration, AnAllocatorOfOnesOwnSpreadsBudgetsOverLayers) {
  testing::register_ramp();
  engines::DenseEngine engine("ramp-knorm,budget=24,interval=8,sink=2,recent=3", true, Dtype::f32);
  oracle::Random random(5);
  engine.join(1);
  static_cast<void>(engine.step(engines::numbers_of(random, {{1, 60}})));
  static_cast<void>(engine.step(engines::numbers_of(random, {{1, 1}})));
  EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 16);
  EXPECT_EQ(engine.keeper.physical_length(1, engines::kLayers - 1, 0), 31);
}

TEST_F(Registration, RefusesADecisionWhoseColumnsWouldNotMove) {
  const auto said = testing::refused_decision;
  const auto few = [](const Evidence&) { return empty({3}, Dtype::f32); };
  EXPECT_TRUE(
      said([&](auto& e, auto& d) { d.credit = few(e); }).starts_with("step: credit of told are f32 [3] on cpu"));
  EXPECT_TRUE(said([&](auto& e, auto& d) { d.tally = empty({e.table.slots}, Dtype::f64); }).starts_with("step: tally"));
  EXPECT_TRUE(said([&](auto&, auto& d) { d.credit = Tensor(); }).starts_with("step: credit of told are an absent"));
  EXPECT_TRUE(said([&](auto&, auto& d) { d.guarded = {1}; }).starts_with("step: Decision::guarded of told has 1 rows"));
  const auto first = [](Decision& d) { return d.keep->slots.data<std::int32_t>(); };
  EXPECT_EQ(said([&](auto&, auto& d) { first(d)[1] = 0; }),
            "step: told keeps slots of layer 0, head 0 that do not ascend; allowed ascending ones from 0 to 60");
  EXPECT_EQ(said([&](auto&, auto& d) { first(d)[60] = 61; }),
            "step: told keeps slots of layer 0, head 0 that are beyond it; allowed ascending ones from 0 to 60");
  EXPECT_EQ(said([&](auto&, auto& d) { d.keep.reset(); }),
            "step: told says that rows are over their budget, and not what stays of them; allowed with Decision::keep");
  EXPECT_EQ(message_of<InvalidArgument>(
                [] { engines::DenseEngine(std::make_unique<testing::ToldPolicy>(Trigger{}), false, Dtype::f32); }),
            "Keeper: the trigger of told has an interval of 0 tokens; allowed 1 or more");
  EXPECT_EQ(message_of<InvalidArgument>([] {
              engines::DenseEngine(
                  std::make_unique<testing::ToldPolicy>(Trigger{.budget = {.slots = 0}, .interval = 8}), false,
                  Dtype::f32);
            }),
            "Keeper: the trigger of told has a budget of 0 slots; allowed 1 or more");
}

/// A body that reads values, of a scorer that does not say so.
struct Silent {
  void describe(Fields&) {}
  template <class Row, class Team>
  KVKEEP_HD void score(const Row& row, float* g, Team team) const {
    for (std::int32_t t = team.thread(); t < row.length(); t += team.size()) {
      float sum = 0;
      for (std::int32_t d = 0; d < row.value_dim(); ++d) sum += static_cast<float>(row.value(t)[d]);
      g[t] = sum;
    }
  }
};
class SilentScorer final : public RowScorer<SilentScorer, Silent> {
 public:
  static constexpr ScorerTraits traits{.name = "outside-silent", .what = "sums", .source = "none"};
  using RowScorer::RowScorer;
};

TEST_F(Registration, AScorerThatForgetsWhatItReadsReadsNumbersAsTheyAreOrNone) {
  const auto scored = [](Dtype dtype) {
    const ModelSpec spec{.query_heads = 1, .kv_heads = 1, .key_dim = 4, .value_dim = 4, .layers = {LayerSpec{}}};
    const Tensor keys = zeros({1, 1, 6, 4}, Dtype::f32), values = zeros({1, 1, 6, 4}, dtype);
    if (dtype == Dtype::bf16)
      for (int t = 0; t < 6; ++t) values.data<BFloat16>()[4 * t] = BFloat16(1.0F);
    const DenseKv rows{keys, values, {}, dtype == Dtype::i8 ? zeros({1, 1, 6}, Dtype::f32) : Tensor()};
    const LayerKv layer = rows;
    std::int32_t length = 6;
    const SequenceId id = 1;
    const CacheView view{.sequences = {&id, 1}, .lengths = {{&length, 1}}};
    const std::int32_t of[] = {0}, due[] = {0};
    const RowTable form = common_form(spec, {&layer, 1}, of);
    const RowTable table = make_rows(spec, {&layer, 1}, form, view, of, due);
    const Scores scores = SilentScorer().score({.spec = spec, .table = table}, even_limits(table, 3), {});
    return scores.data.data<float>()[5];
  };
  EXPECT_EQ(scored(Dtype::bf16), 1.0F);
  EXPECT_TRUE(std::isnan(scored(Dtype::i8)));
}

TEST_F(Registration, RefusesAnEventWhoseScorerGivesNoScores) {
  using Change = std::function<Scores(Scores)>;
  const std::pair<Change, std::string> wrong[] = {
      {[](auto) { return Scores{}; }, "step: scores of outside-told are an absent tensor; allowed a contiguous f32 ["},
      {[](auto given) { return Scores{empty(given.data.sizes(), Dtype::bf16)}; }, " are bf16 ["},
      {[](auto given) { return Scores{given.data.narrow(0, 1, given.data.size(0) - 1)}; }, "] on cpu; allowed "},
      {[](auto given) { return Scores{given.data.reshaped({1, given.data.size(0)})}; }, " are f32 [1, "},
  };
  for (const auto& [change, says] : wrong) {
    const std::string said = refused<InvalidArgument>(std::make_unique<Told>(change), std::make_unique<Flat>());
    EXPECT_NE(said.find(says), std::string::npos) << said << "\nis not\n" << says;
  }
}

TEST_F(Registration, SaysWhatAScorerLacksForAnAllocator) {
  const auto said = [](const char* name) {
    return message_of<InvalidArgument>([name] { static_cast<void>(make_policy(name)); });
  };
  EXPECT_TRUE(
      said("adakv-outside-recent,budget=24")
          .starts_with("policy: there is no policy \"adakv-outside-recent\", as allocator adakv takes scores that "
                       "heads can compare (ScorerTraits::comparable or probability), and scorer outside-recent "
                       "does not say that of its own; allowed "))
      << said("adakv-outside-recent,budget=24");
  EXPECT_NE(said("adakv-outside-recent").find(" adakv-snapkv,"), std::string::npos);
  EXPECT_NE(said("criticalkv-outside-recent").find("are shares of attention (ScorerTraits::probability)"),
            std::string::npos);
  EXPECT_EQ(
      said("ams-streaming"),
      "policy: there is no policy \"ams-streaming\", as scorer streaming goes under no allocator; allowed streaming "
      "alone");
}

TEST_F(Registration, AddsWhileOtherThreadsMakePolicies) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([i] {
      for (int n = 0; n < 10; ++n) {
        EXPECT_EQ(make_policy("ams-tova,budget=64")->name(), "ams-tova");
        if (i > 0) continue;
        PolicyEntry entry = renamed();
        entry.name = text("outside-", n);
        register_policy(std::move(entry));
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_NE(make_policy("outside-9"), nullptr);
}

}  // namespace
}  // namespace kvkeep::registration_test
