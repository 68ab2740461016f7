// SPDX-License-Identifier: Apache-2.0
// The whole strict and official event against the slow second implementation, and what must hold of any event
// (invariants 2.6).

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <numeric>

#include "kvkeep/allot/divide.h"
#include "kvkeep/allot/segments.h"
#include "kvkeep/keep/select.h"
#include "library_event.h"
#include "oracle/invariants.h"
#include "oracle/random_case.h"

namespace kvkeep::event_test {
namespace {

using oracle::random_case;
using testing::library_event;

/// A row that keeps everything has no mass, no segments; its scores are not defined.
void drop_what_is_not_defined(const oracle::Sequence& s, const oracle::Options& o, oracle::Row& row) {
  if (o.policy == "streaming") row.scores.clear();
  if (s.T > o.budget) return;
  row.scores.clear();
  row.mass.clear();
  row.mass_used.clear();
  row.segment_ends.clear();
  row.quotas.clear();
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want, const char* what) {
  if (want.empty() || got.empty()) return;
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t t = 0; t < want.size(); ++t)
    ASSERT_NEAR(got[t], want[t], 1e-6 + 2e-4 * std::abs(want[t])) << what << " at slot " << t;
}

/// Returns whether rounding decides.
bool expect_agreement(const oracle::RandomCase& c) {
  SCOPED_TRACE(c.description);
  const auto want = oracle::event(c.options, c.sequence);
  auto got = library_event(c.options, {c.sequence})[0];
  EXPECT_EQ(got.size(), want.size());
  const bool rounding_decides = oracle::near_tie(want);
  for (std::size_t h = 0; h < want.size(); ++h) {
    drop_what_is_not_defined(c.sequence, c.options, got[h]);
    expect_near(got[h].scores, want[h].scores, "scores");
    expect_near(got[h].mass, want[h].mass, "mass");
    expect_near(got[h].mass_used, want[h].mass_used, "mass_used");
    if (c.sequence.T > c.options.budget) expect_near(got[h].credit, want[h].credit, "credit");
    if (rounding_decides) continue;
    EXPECT_EQ(got[h].segment_ends, want[h].segment_ends) << "head " << h;
    EXPECT_EQ(got[h].quotas, want[h].quotas) << "head " << h;
    EXPECT_EQ(got[h].slots, want[h].slots) << "head " << h;
  }
  return rounding_decides;
}

TEST(Event, AgreesWithTheSlowSecondImplementationOnRandomEvents) {
  const int cases = oracle::random_case_count(4000);
  int tied = 0;
  for (int seed = 0; seed < cases; ++seed) {
    tied += expect_agreement(random_case(static_cast<std::uint64_t>(seed)));
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_LT(tied, cases / 10) << "too many cases hang on rounding to prove anything";
}

// Protected slots hold half of the mass, which does not count, one slot the rest: all others share by the least mass
// that a slot has.
TEST(Event, AgreesWhereAllThatIsLeftToShareIsTheLeastMassOfASlot) {
  oracle::RandomCase c = random_case(11024826226273615794U);
  c.sequence.sinks.clear(), c.sequence.cap = 0;
  EXPECT_FALSE(expect_agreement(c));
}

/// Pins spans of positions, as many as every head's budget holds beside its sinks and one newest slot. Returns the most
/// that a head holds.
int pin_some(oracle::Random& random, const oracle::Options& o, oracle::Sequence& s) {
  int most = 0;
  for (int spans = random.between(1, 4); spans > 0; --spans) {
    const int begin = random.between(0, s.positions.back()), end = begin + random.one_of({1, 2, 5, 17, 60});
    std::vector<int> more = s.pinned;
    for (int p = begin; p < end; ++p) more.push_back(p);
    int held = 0;
    for (int h = 0; h < s.Hkv; ++h) {
      int own = 0;
      for (int t = o.sink; t < s.T; ++t)
        own += std::find(more.begin(), more.end(), s.positions[static_cast<std::size_t>(h * s.T + t)]) != more.end();
      held = std::max(held, own);
    }
    if (held > o.budget - o.sink - 1) continue;
    s.pinned = more;
    most = held;
  }
  return most;
}

TEST(Event, AgreesWithTheSlowSecondImplementationAboutPinnedSlots) {
  const int cases = oracle::random_case_count(4000);
  int tied = 0, pinned = 0;
  for (int seed = 0; seed < cases; ++seed) {
    oracle::RandomCase c = random_case(static_cast<std::uint64_t>(seed) + 3'000'000);
    if (c.options.variant == "official") continue;
    oracle::Random random(static_cast<std::uint64_t>(seed));
    pinned += pin_some(random, c.options, c.sequence) > 0;
    for (const int p : c.sequence.pinned) c.description += text(p == c.sequence.pinned.front() ? ", pinned " : " ", p);
    tied += expect_agreement(c);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_LT(tied, cases / 10) << "too many cases hang on rounding to prove anything";
  EXPECT_GT(pinned, cases / 4);
}

TEST(Event, SatisfiesTheInvariantsOnRandomEvents) {
  const int cases = oracle::random_case_count(4000);
  for (int seed = 0; seed < cases; ++seed) {
    const oracle::RandomCase c = random_case(static_cast<std::uint64_t>(seed) + 1'000'000);
    auto rows = library_event(c.options, {c.sequence})[0];
    for (std::size_t h = 0; h < rows.size(); ++h) {
      drop_what_is_not_defined(c.sequence, c.options, rows[h]);
      if (c.sequence.T <= c.options.budget) rows[h].credit.clear();
      const auto violations = oracle::violations(c.options, c.sequence, static_cast<int>(h), rows[h]);
      ASSERT_TRUE(violations.empty()) << c.description << ": " << violations.front();
    }
  }
}

TEST(Event, OfASequenceDoesNotDependOnItsBatch) {  // B14, invariant 11
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    oracle::RandomCase a = random_case(seed);
    std::vector<oracle::Sequence> batch{a.sequence};
    for (std::uint64_t other = 1; other < 4; ++other) {
      oracle::Sequence s = random_case(seed * 7 + other, a.options).sequence;
      if (s.Hq == a.sequence.Hq && s.Hkv == a.sequence.Hkv && s.D == a.sequence.D)
        batch.push_back({s.T, s.Hq, s.Hkv, s.D, a.sequence.scale, s.keys, s.queries, s.positions, s.query_positions,
                         s.credit, a.sequence.cap, a.sequence.sinks});
    }
    while (batch.size() < 3) batch.push_back(batch[0]);
    std::swap(batch[0], batch[2]);
    const auto together = library_event(a.options, batch);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const auto alone = library_event(a.options, {batch[i]})[0];
      for (std::size_t h = 0; h < alone.size(); ++h) {
        ASSERT_EQ(together[i][h].slots, alone[h].slots) << a.description;
        ASSERT_EQ(together[i][h].credit, alone[h].credit) << a.description;
        ASSERT_EQ(together[i][h].mass_used, alone[h].mass_used) << a.description;
      }
    }
  }
}

TEST(Event, KeepsTheSameSlotsBehindAnyPadding) {  // B20
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const oracle::RandomCase c = random_case(seed);
    const auto plain = library_event(c.options, {c.sequence})[0];
    for (const int padding : {1, 2, 7, 17}) {
      const auto padded = library_event(c.options, {c.sequence}, Dtype::f32, padding)[0];
      for (std::size_t h = 0; h < plain.size(); ++h)
        ASSERT_EQ(padded[h].slots, plain[h].slots) << c.description << ", padding " << padding;
    }
  }
}

TEST(Event, DecidesTheSameAHundredTimes) {  // B8
  const oracle::RandomCase c = random_case(11);
  const auto first = library_event(c.options, {c.sequence})[0];
  for (int n = 0; n < 100; ++n) {
    const auto again = library_event(c.options, {c.sequence})[0];
    for (std::size_t h = 0; h < first.size(); ++h) ASSERT_EQ(again[h].slots, first[h].slots);
  }
}

oracle::Options small_ams(int budget) {
  oracle::Options o;
  o.budget = budget;
  o.sink = 2;
  o.recent = 4;
  o.window = 4;
  o.segment_mass = 0.2;
  o.min_segment = 2;
  o.max_segment = 8;
  o.min_quota = 1;
  return o;
}

TEST(Event, EqualScoresFallBackToTheNewestSlotsWithSinksKept) {  // B7: bf16, where max + 1 would be a no-op
  oracle::Sequence s;
  s.T = 300;
  s.Hq = 4;
  s.Hkv = 2;
  s.D = 8;
  s.keys.assign(static_cast<std::size_t>(2 * 300 * 8), 1.0F);
  s.queries.assign(static_cast<std::size_t>(4 * 1 * 8), 0.5F);
  for (int h = 0; h < 2; ++h)
    for (int t = 0; t < 300; ++t) s.positions.push_back(t);
  s.query_positions = {299};
  oracle::Options o = small_ams(20);
  o.policy = "tova";
  std::vector<int> want{0, 1};
  for (int t = 282; t < 300; ++t) want.push_back(t);
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
    for (const auto& rows : library_event(o, {s}, dtype))
      for (const auto& row : rows) EXPECT_EQ(row.slots, want) << dtype;
}

TEST(Event, DropsNaNScoresFirst) {  // B9
  std::vector<float> scores(40, 0.5F);
  scores[20] = std::numeric_limits<float>::quiet_NaN();
  scores[21] = -std::numeric_limits<float>::infinity();
  scores[22] = std::numeric_limits<float>::infinity();
  std::vector<std::uint64_t> keys;
  std::vector<std::int32_t> slots(38);
  select(scores, {}, keys, slots);
  EXPECT_EQ(std::count(slots.begin(), slots.end(), 20), 0);
  EXPECT_EQ(std::count(slots.begin(), slots.end(), 21), 0) << "NaN ranks as -inf, so the older of the two goes too";
  EXPECT_EQ(std::count(slots.begin(), slots.end(), 22), 1);
}

TEST(Event, HoldsAtEveryBudgetEdge) {  // B12
  for (const int T : {1, 2, 3, 5, 16, 17, 31})
    for (int budget = 1; budget <= T + 1; ++budget)
      for (const char* policy : {"streaming", "tova", "ams-tova"})
        for (const int queries : {0, 1, 2, T, T + 5}) {
          oracle::Options o = small_ams(budget);
          o.policy = policy;
          o.sink = std::min(2, budget - 1);
          o.window = 64;
          oracle::Sequence s;
          s.T = T;
          s.Hq = 2;
          s.D = 2;
          for (int t = 0; t < T; ++t) s.positions.push_back(t + 5);
          for (int i = 0; i < queries; ++i) s.query_positions.push_back(T + 5 - queries + i);
          for (int i = 0; i < T * 2; ++i) s.keys.push_back(static_cast<float>((i * 7) % 5));
          for (int i = 0; i < queries * 4; ++i) s.queries.push_back(static_cast<float>((i * 3) % 4));
          const auto rows = library_event(o, {s})[0];
          ASSERT_EQ(static_cast<int>(rows[0].slots.size()), std::min(T, budget))
              << policy << " T " << T << " budget " << budget << " queries " << queries;
        }
}

TEST(Event, CountsKeptSlotsExactlyForAnyRatio) {  // B11
  for (int n = 1; n <= 300; n += 7)
    for (int percent = 0; percent < 100; percent += 3) {
      const int budget = std::max(1, n - n * percent / 100);
      std::vector<float> scores(static_cast<std::size_t>(n), 1.0F);
      std::vector<std::uint64_t> keys;
      std::vector<std::int32_t> slots(static_cast<std::size_t>(budget), -1);
      select(scores, protect(n, budget, 0, 0, Variant::strict), keys, slots);
      ASSERT_TRUE(std::is_sorted(slots.begin(), slots.end()));
      ASSERT_EQ(slots.back(), n - 1);
      ASSERT_EQ(slots.front(), n - budget);
    }
}

TEST(Event, KeepsAscendingOrderOverTwentyRounds) {  // B10, invariant 16
  const oracle::Options o = small_ams(24);
  oracle::Sequence s = random_case(3, o, 40).sequence;
  for (int round = 0; round < 20; ++round) {
    auto rows = library_event(o, {s})[0];
    if (s.T <= o.budget)
      for (auto& row : rows) row.credit_kept = row.credit;
    for (std::size_t h = 0; h < rows.size(); ++h) {
      const std::vector<int> positions(s.positions.begin() + static_cast<long>(h) * s.T,
                                       s.positions.begin() + static_cast<long>(h + 1) * s.T);
      const auto wrong = oracle::check_positions(o, positions, rows[h].slots);
      ASSERT_TRUE(wrong.empty()) << "round " << round << ": " << wrong.front();
    }
    s = oracle::continued(s, rows, 9, static_cast<std::uint64_t>(round));
  }
}

TEST(Event, CoverageAutoIsTopKWhereNoSegmentFallsShortAndGivesUpNoMoreThanTheDeficit) {
  int same = 0, different = 0;
  for (std::uint64_t seed = 0; seed < 800; ++seed) {
    oracle::RandomCase c = random_case(seed);
    if (c.options.policy != "ams-tova" || c.options.variant == "official" || c.sequence.T <= c.options.budget) continue;
    SCOPED_TRACE(c.description);
    c.options.coverage_auto = true;
    const auto found = library_event(c.options, {c.sequence})[0];
    c.options.coverage_auto = false;
    c.options.coverage = 0;
    const auto best = library_event(c.options, {c.sequence})[0];
    const oracle::MustKeep must = oracle::must_keep(c.options, c.sequence.T);
    for (std::size_t h = 0; h < found.size(); ++h) {
      ASSERT_EQ(found[h].segment_ends, best[h].segment_ends);
      int start = 0, floors = 0;
      std::vector<int> wanted, deficits;
      for (const int end : found[h].segment_ends) {
        const auto inside = [&](const std::vector<int>& slots) {
          return static_cast<int>(
              std::count_if(slots.begin(), slots.end(), [&](int t) { return t >= start && t < end; }));
        };
        int guarded = 0;
        for (int t = start; t < end; ++t) guarded += must.holds(t, c.sequence.T);
        wanted.push_back(std::max(guarded, std::min(c.options.min_quota, end - start)));
        floors += wanted.back();
        deficits.push_back(std::max(0, wanted.back() - inside(best[h].slots)));
        start = end;
      }
      const int deficit = std::accumulate(deficits.begin(), deficits.end(), 0);
      std::vector<int> new_ones;
      std::set_difference(found[h].slots.begin(), found[h].slots.end(), best[h].slots.begin(), best[h].slots.end(),
                          std::back_inserter(new_ones));
      ++(deficit == 0 ? same : different);
      if (floors > c.options.budget) {  // not all fit: no more is given up than what fits
        ASSERT_LE(static_cast<int>(new_ones.size()), deficit);
        continue;
      }
      ASSERT_EQ(static_cast<int>(new_ones.size()), deficit);
      start = 0;
      for (std::size_t i = 0; i < wanted.size(); start = found[h].segment_ends[i++])
        ASSERT_GE(std::count_if(found[h].slots.begin(), found[h].slots.end(),
                                [&](int t) { return t >= start && t < found[h].segment_ends[i]; }),
                  wanted[i])
            << "segment " << i;
    }
  }
  EXPECT_GT(same, 50);
  EXPECT_GT(different, 50);
}

TEST(Event, IgnoresIncreasingTransformsOfScoresAndScalesOfUsage) {  // invariants 9 and 10
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    oracle::Options o = small_ams(12);
    oracle::Random random(seed);
    const std::int32_t length = 40;
    std::vector<float> scores, shifted, usage, scaled;
    for (int t = 0; t < length; ++t) {
      scores.push_back(static_cast<float>(random.between(-4, 4)));
      shifted.push_back(std::exp(scores.back()) * 3 + 1);
      usage.push_back(static_cast<float>(random.unit() * random.unit()));
      scaled.push_back(usage.back() * 8);
    }
    normalise_mass(usage.data(), length, kMassEpsilon);
    normalise_mass(scaled.data(), length, kMassEpsilon);
    std::vector<std::uint64_t> prefix(length), other(length), keys;
    prefix_mass(usage.data(), length, prefix.data());
    prefix_mass(scaled.data(), length, other.data());
    std::vector<std::int32_t> ends(length), more(length), scratch(length);
    const SegmentOptions options{Variant::strict, Segmentation::mass, 0, 0.1, 2, 8};
    const auto n = segment_ends(prefix.data(), length, options, ends.data(), scratch.data());
    ASSERT_EQ(segment_ends(other.data(), length, options, more.data(), scratch.data()), n);
    ASSERT_EQ(ends, more);
    std::vector<std::int32_t> a(12), b(12);
    select(scores, {2, 3}, keys, a);
    select(shifted, {2, 3}, keys, b);
    ASSERT_EQ(a, b);
  }
}

}  // namespace
}  // namespace kvkeep::event_test
