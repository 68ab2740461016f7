// SPDX-License-Identifier: Apache-2.0
// The numbers of examples/lab/docs/diagnostics.md: by hand, by identities, and against a second implementation that
// counts position by position.

#include "kvlab/diagnostics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>

#include "kvkeep/core/error.h"
#include "oracle/diagnostics_oracle.h"

namespace kvkeep::report::diagnostics_test {
namespace {

using Positions = std::vector<std::int32_t>;

Positions range(std::int32_t begin, std::int32_t end) {
  Positions all(static_cast<std::size_t>(end - begin));
  std::iota(all.begin(), all.end(), begin);
  return all;
}

Positions joined(std::initializer_list<Positions> parts) {
  Positions all;
  for (const Positions& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

/// Sinks and window out of the way.
DiagnosticsOptions bare() { return {.layers = 1, .regions = {4}, .ngrams = {2}, .window = 0, .sink = 0}; }

DiagnosticsResult one_event(const Positions& before, const Positions& kept, std::int32_t end,
                            const DiagnosticsOptions& options) {
  Diagnostics diagnostics(options);
  const RowEvent row{.next_position = end, .before = before, .kept = kept};
  diagnostics.add_event(0, {&row, 1});
  return diagnostics.result();
}

TEST(Diagnostics, IouIsWhatAShareOfSurvivorsGives) {
  constexpr std::int32_t kBudget = 100;
  for (const std::int32_t survivors : {0, 1, 36, 50, 99, 100}) {
    const Positions old = range(0, kBudget), now = range(kBudget - survivors, 2 * kBudget - survivors);
    EXPECT_DOUBLE_EQ(iou(old, now), static_cast<double>(survivors) / (2.0 * kBudget - survivors)) << survivors;
  }
  EXPECT_NEAR(iou(range(0, 100), range(64, 164)), 0.22, 0.005) << "36 % survivors: the level the paper reports";
  EXPECT_EQ(iou({}, {}), 1.0);
  EXPECT_EQ(iou(range(0, 3), {}), 0.0);
  EXPECT_EQ(common(Positions{1, 3, 5, 9}, Positions{0, 3, 4, 5, 6, 9, 11}), 3);
}

TEST(Diagnostics, CountsRepeatedNGrams) {
  EXPECT_EQ(ngram_repetition({}, 4), 0.0);
  EXPECT_EQ(ngram_repetition(Positions{1, 2, 3}, 4), 0.0);
  EXPECT_EQ(ngram_repetition(Positions{1, 2, 3, 4}, 4), 0.0);
  EXPECT_DOUBLE_EQ(ngram_repetition(Positions{7, 7, 7, 7, 7}, 2), 0.75) << "one distinct of four";
  EXPECT_DOUBLE_EQ(ngram_repetition(Positions{1, 2, 1, 2, 1}, 2), 0.5) << "12 21 12 21";
  EXPECT_THROW(static_cast<void>(ngram_repetition(Positions{1}, 0)), InvalidArgument);
}

TEST(Diagnostics, WipesARegionOutWhenNothingOfALiveOneStays) {
  // 16 positions, regions of 4; region 1 has one slot left of four, region 2 none, region 3 was dead before.
  const DiagnosticsResult r = one_event(joined({range(0, 12), {13}}), joined({range(0, 5), {13}}), 16, bare());
  EXPECT_EQ(r.wipe_out[0].wiped.whole, 3);
  EXPECT_EQ(r.wipe_out[0].wiped.part, 1);
  EXPECT_EQ(r.wipe_out[0].nearly.part, 1) << "a quarter left is more than 5 %";
  EXPECT_EQ(r.wipe_out[0].cumulative.whole, 4);
  EXPECT_EQ(r.wipe_out[0].cumulative.part, 1);
  EXPECT_EQ(r.most_dropped, 7) << "positions 5 to 11";
}

TEST(Diagnostics, WipeOutLeavesOutSinksAndTheNewestAndPartsOfRegions) {
  DiagnosticsOptions options = bare();
  options.sink = 1;
  options.window = 5;
  // [0,4) holds the sink, [12,16) reaches into the newest 5 of 18, [16,20) is no whole region: [4,8) and [8,12) count.
  const DiagnosticsResult r = one_event(range(0, 18), Positions{0, 17}, 18, options);
  EXPECT_EQ(r.wipe_out[0].wiped.whole, 2);
  EXPECT_EQ(r.wipe_out[0].wiped.part, 2);
  EXPECT_EQ(r.wipe_out[0].cumulative.whole, 4);
  EXPECT_EQ(r.wipe_out[0].cumulative.part, 3);
}

TEST(Diagnostics, NearlyWipedIsBelowFivePerCent) {
  DiagnosticsOptions options = bare();
  options.regions = {40};
  EXPECT_EQ(one_event(range(0, 40), range(0, 2), 40, options).wipe_out[0].nearly.part, 0) << "2 of 40 is 5 %";
  EXPECT_EQ(one_event(range(0, 40), range(0, 1), 40, options).wipe_out[0].nearly.part, 1);
  EXPECT_EQ(one_event(range(0, 40), range(0, 1), 40, options).wipe_out[0].wiped.part, 0);
}

TEST(Diagnostics, CoversByPlaceInTheText) {
  // 40 positions: two a bin. The middle third is 14 to 26.
  const DiagnosticsResult r =
      one_event(joined({range(0, 10), range(20, 40)}), joined({{0, 1, 2, 20}, range(38, 40)}), 40, bare());
  EXPECT_DOUBLE_EQ(r.coverage[0].value(), 1.0);
  EXPECT_DOUBLE_EQ(r.coverage[1].value(), 0.5);
  EXPECT_DOUBLE_EQ(r.coverage[2].value(), 0.0);
  EXPECT_TRUE(std::isnan(r.coverage[5].value())) << "nothing was there";
  EXPECT_DOUBLE_EQ(r.coverage_cumulative[5].value(), 0.0);
  EXPECT_DOUBLE_EQ(r.coverage_cumulative[19].value(), 1.0);
  EXPECT_DOUBLE_EQ(r.middle.value(), 1.0 / 7) << "20 of 20 to 26";
  EXPECT_DOUBLE_EQ(r.middle_cumulative.value(), 1.0 / 13) << "20 of 14 to 26";
}

TEST(Diagnostics, TellsSegmentsQuotasAndTheSuffix) {
  DiagnosticsOptions options = bare();
  options.window = 2;
  const Positions before{0, 1, 2, 3, 4, 5, 8, 9}, kept{0, 1, 3, 9}, ends{2, 8}, quotas{2, 2};
  const std::vector<float> mass{0.125F, 0.125F, 0, 0, 0, 0.25F, 0.25F, 0.25F};
  Diagnostics diagnostics(options);
  const RowEvent row{
      .next_position = 10, .before = before, .kept = kept, .segment_ends = ends, .quotas = quotas, .mass = mass};
  diagnostics.add_event(0, {&row, 1});
  const DiagnosticsResult& r = diagnostics.result();
  EXPECT_DOUBLE_EQ(r.segments.value(), 2);
  EXPECT_DOUBLE_EQ(r.segment_slots.value(), 4);
  EXPECT_DOUBLE_EQ(r.quota_share.value(), (1.0 + 1.0 / 3) / 2);
  EXPECT_DOUBLE_EQ(r.suffix_mass.value(), 0.5) << "positions 8 and 9";
  EXPECT_DOUBLE_EQ(r.newest_share.value(), 0.25);
}

TEST(Diagnostics, PairsConsecutiveEventsOfARowByDepth) {
  DiagnosticsOptions options = bare();
  options.layers = 3;
  Diagnostics diagnostics(options);
  const auto event = [&](std::int64_t sequence, const Positions& first, const Positions& last) {
    const Positions before = range(0, 20);
    const std::vector<RowEvent> rows{{.layer = 0, .next_position = 20, .before = before, .kept = first},
                                     {.layer = 2, .next_position = 20, .before = before, .kept = last}};
    diagnostics.add_event(sequence, rows);
  };
  event(7, range(0, 4), range(0, 4));
  EXPECT_TRUE(std::isnan(diagnostics.result().iou.value())) << "one event has no pair";
  event(7, range(0, 4), range(2, 6));
  event(8, range(10, 14), range(10, 14));  // another sequence
  diagnostics.end(7);
  event(7, range(5, 9), range(5, 9));  // the name again
  const DiagnosticsResult& r = diagnostics.result();
  EXPECT_EQ(r.events, 4);
  EXPECT_EQ(r.iou.whole, 2);
  EXPECT_DOUBLE_EQ(r.iou_by_depth[0].value(), 1.0);
  EXPECT_TRUE(std::isnan(r.iou_by_depth[1].value()));
  EXPECT_DOUBLE_EQ(r.iou_by_depth[2].value(), 2.0 / 6);
  EXPECT_DOUBLE_EQ(r.survival_by_depth[2].value(), 0.5);
}

TEST(Diagnostics, OfNothingAreNullNotNumbers) {
  const DiagnosticsResult nothing = Diagnostics(DiagnosticsOptions{}).result();
  const auto json = nlohmann::json::parse(to_json(nothing));
  EXPECT_EQ(json["events"], 0);
  for (const char* name :
       {"iou", "survival", "middle", "newest_share", "segments", "suffix_mass", "collapsed", "longest_dropped"})
    EXPECT_TRUE(json[name].is_null()) << name;
  EXPECT_TRUE(json["attention"]["recall"].is_null());
  EXPECT_TRUE(json["wipe_out"][2]["wiped"].is_null());
  EXPECT_EQ(json["wipe_out"][0]["region"], 64);
  const DiagnosticsResult empty_row = one_event({}, {}, 0, bare());
  EXPECT_EQ(empty_row.row_events, 1);
  EXPECT_TRUE(std::isnan(empty_row.middle.value()));
}

TEST(Diagnostics, RefuseWhatIsNoEvent) {
  Diagnostics diagnostics(bare());
  const auto refused = [&](const RowEvent& row) {
    EXPECT_THROW(diagnostics.add_event(0, {&row, 1}), InvalidArgument);
    EXPECT_EQ(diagnostics.result().events, 0) << "nothing is counted";
  };
  const Positions three{0, 1, 2}, fallen{1, 0}, twice{1, 1}, other{5}, ends{2}, quotas{1, 1};
  const std::vector<float> mass{1};
  refused({.next_position = 3, .before = fallen, .kept = {}});
  refused({.next_position = 3, .before = twice, .kept = {}});
  refused({.next_position = 2, .before = three, .kept = {}});
  refused({.next_position = 9, .before = three, .kept = other});
  refused({.layer = 1, .next_position = 3, .before = three, .kept = three});
  refused({.next_position = 3, .before = three, .kept = three, .segment_ends = ends, .quotas = ends});
  refused({.next_position = 3, .before = three, .kept = three, .segment_ends = ends, .quotas = quotas});
  refused({.next_position = 3, .before = three, .kept = three, .mass = mass});
  EXPECT_THROW(Diagnostics({.layers = 0}), InvalidArgument);
  EXPECT_THROW(Diagnostics({.regions = {0}}), InvalidArgument);
  EXPECT_THROW(Diagnostics({.ngrams = {0}}), InvalidArgument);
  EXPECT_THROW(Diagnostics({.window = -1}), InvalidArgument);
}

// ---- Against the second implementation ----

std::vector<oracle::KeptEvent> random_run(std::mt19937& random, int layers, int heads, int events) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::vector<oracle::KeptEvent> run;
  std::vector<std::set<int>> held(static_cast<std::size_t>(layers * heads));
  int P = 0;
  for (int e = 0; e < events; ++e) {
    const int grown = P + 1 + below(90);
    oracle::KeptEvent event;
    const int style = below(3);
    for (std::size_t r = 0; r < held.size(); ++r) {
      for (int p = P; p < grown; ++p)
        if (below(20) != 0) held[r].insert(p);  // now and then a position is skipped
      oracle::KeptRow row{.layer = static_cast<int>(r) / heads,
                          .head = static_cast<int>(r) % heads,
                          .P = grown,
                          .before = held[r],
                          .kept = {}};
      for (const int p : row.before) {
        const bool stays = style == 0 ? below(4) == 0 : style == 1 ? p / 16 % 2 == 0 : p >= grown - 40;
        if (stays) row.kept.insert(p);
      }
      if (row.kept.empty()) row.kept.insert(*row.before.begin());
      held[r] = row.kept;
      event.push_back(std::move(row));
    }
    run.push_back(std::move(event));
    P = grown;
  }
  return run;
}

void add(Diagnostics& to, std::int64_t sequence, const std::vector<oracle::KeptEvent>& run) {
  for (const oracle::KeptEvent& event : run) {
    std::vector<std::pair<Positions, Positions>> lists;
    std::vector<RowEvent> rows;
    for (const oracle::KeptRow& row : event)
      lists.emplace_back(Positions(row.before.begin(), row.before.end()), Positions(row.kept.begin(), row.kept.end()));
    for (std::size_t r = 0; r < event.size(); ++r)
      rows.push_back({.layer = event[r].layer,
                      .head = event[r].head,
                      .next_position = event[r].P,
                      .before = lists[r].first,
                      .kept = lists[r].second});
    to.add_event(sequence, rows);
  }
  to.end(sequence);
}

TEST(Diagnostics, AgreeWithTheSecondImplementationOnRandomRuns) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const int layers = 1 + static_cast<int>(random() % 7), heads = 1 + static_cast<int>(random() % 3),
              events = 1 + static_cast<int>(random() % 5);
    const int window = static_cast<int>(random() % 40), sink = static_cast<int>(random() % 6);
    const auto run = random_run(random, layers, heads, events);
    const DiagnosticsOptions options{
        .layers = layers, .regions = {64, 7, 1}, .ngrams = {}, .window = window, .sink = sink};
    Diagnostics diagnostics(options);
    add(diagnostics, 3, run);
    const DiagnosticsResult& got = diagnostics.result();
    const oracle::DiagnosticsNumbers want = oracle::diagnose(run, layers, window);
    ASSERT_EQ(got.iou.whole, want.pairs);
    ASSERT_NEAR(got.iou.part, want.iou_sum, 1e-9);
    ASSERT_NEAR(got.survival.part, want.survival_sum, 1e-9);
    for (std::size_t i = 0; i < 3; ++i) {
      ASSERT_EQ(got.iou_by_depth[i].whole, want.third_pairs[i]);
      ASSERT_NEAR(got.iou_by_depth[i].part, want.third_iou[i], 1e-9);
    }
    for (std::size_t i = 0; i < kCoverageBins; ++i) {
      ASSERT_EQ(got.coverage[i].part, want.kept[i]) << i;
      ASSERT_EQ(got.coverage[i].whole, want.held[i]) << i;
      ASSERT_EQ(got.coverage_cumulative[i].part, want.kept[i]) << i;
      ASSERT_EQ(got.coverage_cumulative[i].whole, want.bins[i]) << i;
    }
    ASSERT_EQ(got.middle.part, want.middle_kept);
    ASSERT_EQ(got.middle.whole, want.middle_held);
    ASSERT_EQ(got.middle_cumulative.whole, want.middle_all);
    ASSERT_EQ(got.longest_dropped.part, want.longest_sum);
    ASSERT_EQ(got.longest_dropped.whole, want.rows);
    ASSERT_EQ(static_cast<double>(got.most_dropped), want.longest_max);
    ASSERT_EQ(got.newest_share.part, want.newest);
    ASSERT_EQ(got.newest_share.whole, want.all_kept);
    for (const WipeOut& w : got.wipe_out) {
      const oracle::RegionRates rates = oracle::wipe_out(run, w.region, window, sink);
      ASSERT_EQ(w.wiped.part, rates.wiped) << w.region;
      ASSERT_EQ(w.wiped.whole, rates.live) << w.region;
      ASSERT_EQ(w.nearly.part, rates.nearly) << w.region;
      ASSERT_EQ(w.cumulative.part, rates.lost) << w.region;
      ASSERT_EQ(w.cumulative.whole, rates.whole) << w.region;
    }
  }
}

TEST(Diagnostics, MergedAreThoseOfOneThatSawAll) {
  std::mt19937 random(11);
  const DiagnosticsOptions options{.layers = 4};
  Diagnostics left(options), right(options), all(options);
  for (std::int64_t sequence = 0; sequence < 6; ++sequence) {
    const auto run = random_run(random, 4, 2, 3);
    add(sequence % 2 == 0 ? left : right, sequence, run);
    add(all, sequence, run);
    Positions tokens;
    for (int i = 0; i < 50; ++i) tokens.push_back(static_cast<std::int32_t>(random() % 3));
    (sequence % 2 == 0 ? left : right).add_generated(tokens);
    all.add_generated(tokens);
    const QueryLoss loss{.held = 0.5,
                         .past = 0.25,
                         .past_held = 0.125,
                         .error_squared = 1,
                         .output_squared = static_cast<double>(sequence + 1)};
    (sequence % 2 == 0 ? left : right).add_query(1, static_cast<std::int32_t>(sequence), loss);
    all.add_query(1, static_cast<std::int32_t>(sequence), loss);
  }
  left.merge(right);
  const auto merged = nlohmann::json::parse(to_json(left.result())),
             whole = nlohmann::json::parse(to_json(all.result()));
  EXPECT_EQ(merged["attention_by_head"].size(), 6U);
  for (const auto& [name, value] : whole.items()) {
    if (value.is_number())
      EXPECT_NEAR(merged[name].get<double>(), value.get<double>(), 1e-12) << name;
    else
      EXPECT_EQ(merged[name].size(), value.size()) << name;
  }
  EXPECT_EQ(merged["coverage"], whole["coverage"]);
  EXPECT_EQ(merged["wipe_out"], whole["wipe_out"]);
  EXPECT_THROW(left.merge(Diagnostics(DiagnosticsOptions{.layers = 5})), InvalidArgument);
  const Positions three{0, 1, 2};
  const RowEvent row{.next_position = 3, .before = three, .kept = three};
  left.add_event(9, {&row, 1});
  right.add_event(9, {&row, 1});
  EXPECT_THROW(left.merge(right), InvalidArgument);
}

TEST(Diagnostics, RepetitionAgreesWithTheSecondImplementation) {
  std::mt19937 random(5);
  for (int i = 0; i < 300; ++i) {
    Positions tokens(random() % 60);
    for (std::int32_t& t : tokens) t = static_cast<std::int32_t>(random() % (1 + random() % 4));
    for (const std::int32_t n : {1, 2, 3, 4, 8, 16})
      ASSERT_DOUBLE_EQ(ngram_repetition(tokens, n), oracle::repetition(tokens, n)) << i << ", n " << n;
  }
}

TEST(Diagnostics, ASampleCollapsesAboveOneHalf) {
  Diagnostics diagnostics(bare());
  diagnostics.add_generated(Positions{1, 2, 1, 2, 1});  // exactly one half
  diagnostics.add_generated(Positions{1, 1, 1, 1});
  diagnostics.add_generated({});
  EXPECT_DOUBLE_EQ(diagnostics.result().collapsed.value(), 1.0 / 3);
  EXPECT_DOUBLE_EQ(diagnostics.result().repetition[0].rate.value(), (0.5 + 2.0 / 3) / 3);
}

TEST(Diagnostics, AttentionLossAgreesWithTheSecondImplementation) {
  std::mt19937 random(17);
  std::normal_distribution<double> normal;
  std::vector<double> scratch;
  for (int i = 0; i < 200; ++i) {
    const int T = 1 + static_cast<int>(random() % 40), D = 1 + static_cast<int>(random() % 9),
              Dv = 1 + static_cast<int>(random() % 6);
    const int P = static_cast<int>(random() % static_cast<unsigned>(T));
    std::vector<float> keys, values, query;
    std::vector<std::vector<double>> k, v;
    for (int t = 0; t < T; ++t) {
      k.emplace_back();
      v.emplace_back();
      for (int d = 0; d < D; ++d)
        keys.push_back(static_cast<float>(normal(random))), k.back().push_back(static_cast<double>(keys.back()));
      for (int d = 0; d < Dv; ++d)
        values.push_back(static_cast<float>(normal(random))), v.back().push_back(static_cast<double>(values.back()));
    }
    std::vector<double> q;
    for (int d = 0; d < D; ++d)
      query.push_back(static_cast<float>(normal(random))), q.push_back(static_cast<double>(query.back()));
    std::set<int> kept;
    for (int p = 0; p < P; ++p)
      if (random() % 3 == 0) kept.insert(p);
    const Positions list(kept.begin(), kept.end());
    const QueryLoss got =
        query_loss({keys.data(), D, values.data(), Dv, D, Dv}, query.data(), T, list, P, 0.7, scratch);
    const oracle::Loss want = oracle::attention_loss(k, v, q, kept, P, 0.7);
    ASSERT_NEAR(got.held, want.held, 1e-9);
    ASSERT_NEAR(got.past, want.past, 1e-9);
    ASSERT_NEAR(got.past_held, want.past_held, 1e-9);
    ASSERT_NEAR(got.error_squared, want.error, 1e-9);
    ASSERT_NEAR(got.output_squared, want.output, 1e-9);
    ASSERT_NEAR(got.held + (got.past - got.past_held), 1.0, 1e-9) << "what is not held is of the past";
  }
}

TEST(Diagnostics, NothingIsLostWhereEverythingIsHeld) {
  const std::vector<float> keys{1, 0, 0, 1, 2, 2}, values{1, 2, 3}, query{0.5F, -1};
  std::vector<double> scratch;
  const QueryLoss all =
      query_loss({keys.data(), 2, values.data(), 1, 2, 1}, query.data(), 3, Positions{0, 1}, 2, 1.0, scratch);
  EXPECT_NEAR(all.held, 1, 1e-12);
  EXPECT_EQ(all.past, all.past_held);
  EXPECT_NEAR(all.error_squared, 0, 1e-24);
  const QueryLoss none = query_loss({keys.data(), 2, values.data(), 1, 2, 1}, query.data(), 2, {}, 2, 1.0, scratch);
  EXPECT_EQ(none.held, 0);
  EXPECT_DOUBLE_EQ(none.error_squared, none.output_squared) << "nothing held is an output of zero, not NaN";
}

}  // namespace
}  // namespace kvkeep::report::diagnostics_test
