// SPDX-License-Identifier: Apache-2.0
// A page of metrics of several keepers, from copies of their totals.

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

extern "C" kvkeep_status kvkeep_prometheus_metrics(const kvkeep_keeper_metrics* keepers, std::size_t count,
                                                   const char** text) {
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

}  // namespace kvkeep
