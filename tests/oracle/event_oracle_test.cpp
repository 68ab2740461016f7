// SPDX-License-Identifier: Apache-2.0
// The slow second implementation against examples worked by hand, its own invariants, and its own claim of what hangs
// on rounding.

#include "event_oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "invariants.h"
#include "random_case.h"

namespace oracle {
namespace {

using Doubles = std::vector<double>;
using Ints = std::vector<int>;

const int kRandomCases = random_case_count(1500);

// 24 slots, a window of 4, one head: mean attention to the history, then the suffix.
struct WorkedExample {
  Options options;
  Doubles history = {.30, .01, .01, .02, .05, .04, .01, .01, .01, .01,
                     .02, .06, .03, .01, .01, .01, .01, .02, .01, .05};
  Doubles scores = {9, 1, 2, 8, 7, 3, 1, 4, 2, 6, 5, 9, 8, 2, 1, 3, 2, 7, 1, 6, 4, 3, 2, 5};
  Doubles mass;

  explicit WorkedExample(const std::string& variant) {
    options.policy = "ams-given";
    options.variant = variant;
    options.budget = 12;
    options.sink = 1;
    options.recent = 2;
    options.segment_mass = 0.2;
    options.min_segment = 2;
    options.max_segment = 8;
    options.min_quota = 1;
    Doubles usage(24, 0.078);
    for (int t = 0; t < 20; ++t) {
      usage[t] = 0;
      for (int j = std::max(0, t - 2); j <= std::min(19, t + 2); ++j) usage[t] += history[j] / 5;
    }
    mass = normalised(usage);
  }

  Ints ends() const { return segment_ends(options, mass); }
  Ints quotas_of_12() const { return quotas(options, mass, ends(), 12, must_keep(options, 24)); }
  Ints kept() const { return select(options, scores, ends(), quotas_of_12(), must_keep(options, 24)); }
};

TEST(OracleWorkedExample, IsReproducedAsPublished) {
  const WorkedExample example("official");
  EXPECT_EQ(example.ends(), (Ints{2, 9, 17, 21, 24}));
  EXPECT_EQ(example.quotas_of_12(), (Ints{2, 3, 2, 2, 3}));
  EXPECT_EQ(example.kept(), (Ints{0, 1, 3, 4, 7, 11, 12, 17, 19, 21, 22, 23}));
}

TEST(OracleWorkedExample, IsReproducedInTheStrictForm) {
  const WorkedExample example("strict");
  EXPECT_EQ(example.ends(), (Ints{3, 10, 18, 22, 24}));
  EXPECT_EQ(example.quotas_of_12(), (Ints{3, 2, 2, 3, 2}));
  EXPECT_EQ(example.kept(), (Ints{0, 1, 2, 3, 4, 11, 12, 19, 20, 21, 22, 23}));
}

TEST(OracleWorkedExample, MixesCreditAtTheSecondEvent) {
  WorkedExample example("official");
  example.options.credit_decay = example.options.credit_mix = 0.9;
  const Masses first = masses(example.options, example.mass, {});
  Doubles credit;
  for (int slot : example.kept()) credit.push_back(first.credit[slot]);
  Doubles usage(18);
  const Doubles smooth = {.048, .052, .056, .02, .02, .02, .02, .02, .02, .02, .02, .02, .016, .012};
  std::fill(std::copy(smooth.begin(), smooth.end(), usage.begin()), usage.end(), .056);
  const Masses second = masses(example.options, usage, credit);
  const Doubles want_credit = {.014799, .015894, .012220, .006097, .005060, .006097, .006097, .005475, .005060,
                               .011489, .011489, .011489, .002721, .002041, .009524, .009524, .009524, .009524};
  const Doubles want_used = {.08307, .08990, .09364, .03457, .03390, .03457, .03457, .03416, .03390,
                             .03807, .03807, .03807, .02626, .01969, .09189, .09189, .09189, .09189};
  for (int t = 0; t < 18; ++t) {
    EXPECT_NEAR(second.credit[t], want_credit[t], 2e-5) << t;
    EXPECT_NEAR(second.used[t], want_used[t], 2e-5) << t;
  }
}

TEST(OracleMustKeep, ShrinksRecentsFirstInStrictAndSinksFirstAsPublished) {
  for (int T = 1; T <= 12; ++T) {
    for (int budget = 1; budget <= 12; ++budget) {
      Options o;
      o.policy = "keydiff";
      o.budget = budget;
      o.sink = 4;
      o.recent = 5;
      const MustKeep strict = must_keep(o, T);
      EXPECT_EQ(strict.sinks, std::min({4, budget, T}));
      EXPECT_EQ(strict.recents, std::min({5, budget - strict.sinks, T - strict.sinks}));
      o.variant = "official";
      const MustKeep official = must_keep(o, T);
      EXPECT_EQ(official.recents, std::min({5, budget, T}));
      EXPECT_EQ(official.sinks, std::min({4, budget - official.recents, T - official.recents}));
    }
  }
}

TEST(OracleSelection, PrefersTheLargerSlotOnTiesAndDropsNaNFirst) {
  Options o;
  o.policy = "given";
  o.budget = 3;
  const MustKeep nothing;
  EXPECT_EQ(select(o, {1, 1, 1, 1, 1}, {5}, {3}, nothing), (Ints{2, 3, 4}));
  EXPECT_EQ(select(o, {-0.0, 0.0, -0.0, 0.0, -1}, {5}, {3}, nothing), (Ints{1, 2, 3}));
  EXPECT_EQ(select(o, {-9, NAN, -8, NAN, -7}, {5}, {3}, nothing), (Ints{0, 2, 4}));
  EXPECT_EQ(select(o, {-INFINITY, NAN, -INFINITY, NAN, 1}, {5}, {3}, nothing), (Ints{2, 3, 4}));
}

TEST(OracleSegments, HaveAsManyThresholdsAsFitBelowOne) {
  for (const auto& [share, wanted] : {std::pair{0.02, 49}, {0.05, 19}, {0.1, 9}, {0.3, 3}, {0.7, 1}, {1.0, 0}}) {
    Options o;
    o.segment_mass = share;
    o.min_segment = 1;
    o.max_segment = 10000;
    EXPECT_EQ(static_cast<int>(segment_ends(o, Doubles(997, 1.0 / 997)).size()), wanted + 1) << share;
  }
}

TEST(OracleSegments, MergeAShortTailIntoItsPredecessorAndSplitEvenly) {
  Options o;
  o.segment_mass = 0.5;
  o.min_segment = 3;
  o.max_segment = 6;
  EXPECT_EQ(segment_ends(o, {0, 0, 0, 0, 0, 0, 0, .6, .4}), (Ints{4, 9}))
      << "[0,8) and a tail of one become nine, split in two";
  EXPECT_EQ(segment_ends(o, {1, 0}), (Ints{2})) << "fewer slots than min_segment";
}

TEST(OracleQuotas, GiveTheHeaviestSegmentsTheirFloorsWhereNotAllFit) {
  Options o;
  o.policy = "given";
  o.min_quota = 2;
  o.budget = 4;
  EXPECT_EQ(quotas(o, {.1, .1, .3, .1, .1, .3}, {2, 4, 6}, 4, {}), (Ints{1, 2, 1}))
      << "one round to all, the second to the first of two equals";
  o.variant = "official";
  EXPECT_EQ(quotas(o, {.2, .2, .2, .2, .2}, {1, 2, 3, 4, 5}, 4, {}), (Ints{1, 1, 1, 1, 0}))
      << "the published loop would never end";
}

TEST(OracleCoverage, GoesFromSegmentsToPlainTopK) {
  Options o = WorkedExample("strict").options;
  WorkedExample example("strict");
  example.options.coverage = 0;
  const MustKeep must = must_keep(example.options, 24);
  const int budget = segment_budget(example.options, must);
  EXPECT_EQ(budget, 3);
  const Ints ends = example.ends();
  const Ints all_by_rank = select(o, example.scores, {24}, {12}, must);
  EXPECT_EQ(
      select(example.options, example.scores, ends, quotas(example.options, example.mass, ends, budget, must), must),
      all_by_rank);
}

TEST(OracleEvent, KeepsEverythingWhereTheBudgetCoversIt) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    RandomCase random = random_case(seed);
    random.options.budget = random.sequence.T;
    for (const Row& row : event(random.options, random.sequence)) {
      EXPECT_EQ(static_cast<int>(row.slots.size()), random.sequence.T);
      EXPECT_TRUE(row.scores.empty());
    }
  }
}

TEST(OracleEvent, FallsBackToRecencyWithoutQueries) {
  Options o;
  o.budget = 5;
  o.min_segment = 1;
  o.max_segment = 2;
  o.segments = "none";
  RandomCase random = random_case(7, o, 20);
  Sequence& s = random.sequence;
  s.queries.clear();
  s.query_positions.clear();
  ASSERT_GT(s.T, 5);
  for (const Row& row : event(o, s)) {
    EXPECT_EQ(row.slots, (Ints{s.T - 5, s.T - 4, s.T - 3, s.T - 2, s.T - 1}));
    for (double m : row.mass) EXPECT_DOUBLE_EQ(m, 1.0 / s.T);
  }
}

TEST(OracleEvent, ForgetsCreditOfALongerSequence) {
  Options o;
  const Masses fresh = masses(o, {.5, .2, .3}, {});
  EXPECT_EQ(masses(o, {.5, .2, .3}, {.1, .1, .1, .1}).credit, fresh.credit);
  EXPECT_NE(masses(o, {.5, .2, .3}, {.1}).credit, fresh.credit);
}

TEST(OracleRandomEvents, SatisfyTheInvariants) {
  for (int seed = 0; seed < kRandomCases; ++seed) {
    const RandomCase random = random_case(seed);
    const std::vector<Row> rows = event(random.options, random.sequence);
    for (int h = 0; h < random.sequence.Hkv; ++h) {
      for (const std::string& what : violations(random.options, random.sequence, h, rows[h])) {
        ADD_FAILURE() << random.description << ", head " << h << ": " << what;
      }
    }
  }
}

TEST(OracleRandomEvents, KeepTheirInvariantsOverFiveEventsInARow) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    RandomCase random = random_case(seed);
    for (uint64_t round = 0; round < 5; ++round) {
      const std::vector<Row> rows = event(random.options, random.sequence);
      for (int h = 0; h < random.sequence.Hkv; ++h) {
        for (const std::string& what : violations(random.options, random.sequence, h, rows[h])) {
          ADD_FAILURE() << "round " << round << " of " << random.description << ", head " << h << ": " << what;
        }
      }
      random.sequence = continued(random.sequence, rows, 1 + static_cast<int>(seed + round) % 9, seed * 31 + round);
    }
  }
}

TEST(OracleInvariants, NameWhatIsWrong) {
  Options o;
  o.policy = "given";
  o.budget = 4;
  o.sink = 1;
  o.recent = 1;
  o.min_quota = 1;
  o.min_segment = 2;
  o.max_segment = 4;
  EXPECT_TRUE(check_slots(o, 8, {0, 2, 3, 7}).empty());
  EXPECT_FALSE(check_slots(o, 8, {0, 2, 7}).empty()) << "one too few";
  EXPECT_FALSE(check_slots(o, 8, {0, 3, 2, 7}).empty()) << "not ascending";
  EXPECT_FALSE(check_slots(o, 8, {0, 2, 2, 7}).empty()) << "twice the same";
  EXPECT_FALSE(check_slots(o, 8, {1, 2, 3, 7}).empty()) << "no sink";
  EXPECT_FALSE(check_slots(o, 8, {0, 2, 3, 6}).empty()) << "not the newest";
  EXPECT_FALSE(check_slots(o, 3, {0, 2}).empty()) << "drops although all fit";
  EXPECT_TRUE(check_segments(o, 8, {2, 4, 8}).empty());
  EXPECT_FALSE(check_segments(o, 8, {2, 4, 7}).empty()) << "does not reach the end";
  EXPECT_FALSE(check_segments(o, 8, {2, 2, 4, 8}).empty()) << "an empty segment";
  EXPECT_FALSE(check_segments(o, 8, {1, 4, 8}).empty()) << "too short";
  EXPECT_FALSE(check_segments(o, 8, {3, 8}).empty()) << "too long";
  EXPECT_TRUE(check_quotas(o, {4, 8}, {3, 1}, {0, 2, 3, 7}).empty());
  EXPECT_FALSE(check_quotas(o, {4, 8}, {2, 1}, {0, 2, 3, 7}).empty()) << "does not add up";
  EXPECT_FALSE(check_quotas(o, {4, 8}, {2, 2}, {0, 2, 3, 7}).empty()) << "keeps other counts";
  EXPECT_FALSE(check_quotas(o, {4, 8}, {4, 0}, {0, 1, 2, 3}).empty()) << "below a floor";
  EXPECT_TRUE(check_ranking(o, {0, 1, 2, 3, 0, 0, 0, 0}, {8}, {0, 2, 3, 7}).empty());
  EXPECT_FALSE(check_ranking(o, {0, 1, 2, 3, 0, 0, 0, 0}, {8}, {0, 1, 3, 7}).empty()) << "drops a better one";
  EXPECT_FALSE(check_ranking(o, {0, 1, 1, 0, 0, 0, 0, 0}, {8}, {0, 1, 6, 7}).empty()) << "keeps the older of a tie";
  EXPECT_TRUE(check_mass("mass", {.5, .5}).empty());
  EXPECT_FALSE(check_mass("mass", {.5, .6}).empty());
  EXPECT_FALSE(check_mass("mass", {1.5, -.5}).empty());
  EXPECT_FALSE(check_mass("mass", {NAN, 1}).empty());
  EXPECT_FALSE(check_positions(o, {0, 1, 3, 2}, {0, 2, 3}).empty()) << "positions out of order";
  EXPECT_FALSE(check_positions(o, {0, 1, 2, 3}, {1, 2, 3}).empty()) << "the sink is gone";
  Row row;
  row.slots = {1};
  row.mass = {.5, .5};
  row.credit = {.1, .1};
  row.credit_kept = {.1};
  EXPECT_TRUE(check_credit(o, {}, row).empty());
  EXPECT_FALSE(check_credit(o, {.5}, row).empty()) << "the credit given is not in it";
  row.credit_kept = {.2};
  EXPECT_FALSE(check_credit(o, {}, row).empty()) << "moved wrongly";
}

/// A relative error that depends on the value alone, so that equal values stay equal, as they do in any arithmetic.
double with_rounding(double value, uint64_t seed, double size) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return value * (1 + size * (2 * Random(bits ^ seed).unit() - 1));
}

Doubles with_rounding(Doubles values, uint64_t seed, double size) {
  for (double& x : values) x = with_rounding(x, seed, size);
  return values;
}

/// The slots that head `head` keeps when its scores, its usage and its mass carry rounding errors.
Ints slots_with_rounding(const RandomCase& random, int head, Doubles scores, const Doubles& usage, uint64_t seed,
                         double size) {
  const Options& o = random.options;
  const Sequence& s = random.sequence;
  scores = with_rounding(scores, seed, size);
  if (o.variant == "official") scores.back() = INFINITY;
  const MustKeep must = must_keep(o, s.T);
  if (o.policy == "tova") return select(o, scores, {s.T}, {o.budget}, must);
  const Masses mixed = masses(o, with_rounding(usage, seed, size), s.credit.empty() ? Doubles() : s.credit[head]);
  const Doubles mass = competing(o, with_rounding(mixed.used, seed, size), must);
  const Ints ends = segment_ends(o, mass);
  return select(o, scores, ends, quotas(o, mass, ends, segment_budget(o, must), must), must);
}

TEST(OracleNearTies, CountAScoreThatIsAlmostEqualToTwoEqualOnesAtTheBorder) {
  Options o;
  o.budget = 2;
  for (const double almost : {1 - 1e-12, 1 + 1e-12}) {
    Margin margin;
    select(o, {1, 1, almost, 1}, {4}, {2}, {}, &margin);
    EXPECT_LT(margin.smallest, 1e-11) << almost;
  }
  Margin exact;
  select(o, {1, 1, 0.5, 1}, {4}, {2}, {}, &exact);
  EXPECT_EQ(exact.smallest, 0.5);
}

TEST(OracleNearTies, CountSharesThatTheGridOfIntegerMassMayOrderOtherwise) {
  Options o;
  o.min_quota = 0;
  const auto margin_beside = [&](double mass) {  // the first segment is full: the others share one slot
    Margin margin;
    EXPECT_EQ(quotas(o, {1, mass, mass, mass, mass * 1.0002}, {1, 3, 5}, 2, {}, &margin), (std::vector<int>{1, 0, 1}));
    return margin.smallest;
  };
  EXPECT_EQ(margin_beside(5e-13), 0);
  EXPECT_GT(margin_beside(5e-9), 1e-5);
}

TEST(OracleNearTies, AreTheOnlyPlaceWhereRoundingDecides) {
  int near_ties = 0;
  int events = 0;
  for (int seed = 0; seed < kRandomCases; ++seed) {
    const RandomCase random = random_case(seed);
    const bool queried = random.options.policy != "streaming" && random.sequence.queries_seen() > 0;
    if (!queried || random.sequence.T <= random.options.budget) continue;
    ++events;
    const std::vector<Row> rows = event(random.options, random.sequence);
    if (near_tie(rows)) {
      ++near_ties;
      continue;
    }
    const std::vector<Doubles> scores = tova_scores(random.options, random.sequence);
    const std::vector<Doubles> used = usage(random.options, random.sequence);
    for (int h = 0; h < random.sequence.Hkv; ++h) {
      for (uint64_t run = 0; run < 3; ++run) {
        ASSERT_EQ(slots_with_rounding(random, h, scores[h], used[h], run, 4e-7), rows[h].slots)
            << random.description << ", margin " << rows[h].margin;
      }
    }
  }
  EXPECT_LT(near_ties, events / 10) << "of " << events << " events";
  RecordProperty("near_ties", near_ties);
  RecordProperty("events", events);
}

}  // namespace
}  // namespace oracle
