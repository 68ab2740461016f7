// SPDX-License-Identifier: Apache-2.0
// Totals of a keeper, and pages of metrics, of one or of several keepers from copies of their totals.

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "boundary.h"
#include "kvkeep/c.h"
#include "kvkeep/keeper/metrics.h"

namespace kvkeep {
namespace {

static_assert(std::size(kvkeep_totals{}.event_buckets) == TimeHistogram::kBounds.size());

Totals totals_of(const kvkeep_totals* totals) {
  const kvkeep_totals t = given(totals, "metrics: totals");
  constexpr std::size_t kWithTimes = offsetof(kvkeep_totals, event_buckets) + sizeof t.event_buckets;
  KVKEEP_REQUIRE(t.size >= kWithTimes, "metrics: totals have a size of ", t.size,
                 ", without the times of events; allowed ", kWithTimes, " or more");
  Totals all{.steps = t.steps,
             .events = t.events,
             .sequences_cut = t.sequences_cut,
             .unscored = t.unscored,
             .slots_kept = t.slots_kept,
             .slots_chosen = t.slots_chosen,
             .slots_dropped = t.slots_dropped,
             .bytes_moved = t.bytes_moved,
             .pages_freed = t.pages_freed,
             .slots_folded = t.slots_folded,
             .reads = {},
             .event_seconds = {.count = t.events, .sum = t.event_seconds}};  // every event is timed
  std::ranges::copy(t.event_buckets, all.event_seconds.up_to.begin());
  return all;
}

thread_local std::string page_of_metrics;

}  // namespace

extern "C" {

kvkeep_status kvkeep_prometheus_metrics(const kvkeep_keeper_metrics* keepers, std::size_t count, const char** text) {
  return guarded([&] {
    const char*& to = required(text, "text");
    KVKEEP_REQUIRE(keepers != nullptr || count == 0, "metrics: keepers is NULL; allowed an address of ", count,
                   " entries");
    std::vector<KeeperMetrics> all;
    for (const kvkeep_keeper_metrics& one : std::span(keepers, count))
      all.push_back({totals_of(one.totals), one.labels == nullptr ? "" : one.labels});
    page_of_metrics = prometheus_metrics(all);
    to = page_of_metrics.c_str();
  });
}

kvkeep_status kvkeep_metrics(kvkeep_keeper* keeper, const char* labels, const char** text) {
  return guarded([&] {
    kvkeep_keeper& k = required(keeper, "keeper");
    const char*& to = required(text, "text");
    const KeeperMetrics own{k.keeper.totals(), labels == nullptr ? "" : labels};
    k.text = prometheus_metrics({&own, 1});
    to = k.text.c_str();
  });
}

kvkeep_status kvkeep_read_totals(const kvkeep_keeper* keeper, kvkeep_totals* totals) {
  return guarded([&] {
    static_cast<void>(size_of(required(totals, "totals"), "totals"));
    const Totals& t = required(keeper, "keeper").keeper.totals();
    kvkeep_totals known{.size = 0,
                        .steps = t.steps,
                        .events = t.events,
                        .sequences_cut = t.sequences_cut,
                        .slots_dropped = t.slots_dropped,
                        .bytes_moved = t.bytes_moved,
                        .pages_freed = t.pages_freed,
                        .slots_folded = t.slots_folded,
                        .slots_kept = t.slots_kept,
                        .slots_chosen = t.slots_chosen,
                        .unscored = t.unscored,
                        .event_seconds = t.event_seconds.sum,
                        .event_buckets = {}};
    std::ranges::copy(t.event_seconds.up_to, known.event_buckets);
    give_back(known, totals);
  });
}

}  // extern "C"

}  // namespace kvkeep
