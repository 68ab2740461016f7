// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Totals of keepers as Prometheus reads them: what a server adds to its own page of metrics.

#include <charconv>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "kvkeep/parts/report.h"

namespace kvkeep {

/// One keeper of the process.
struct KeeperMetrics {
  Totals totals = {};       ///< a copy, taken on the keeper's thread
  std::string labels = {};  ///< of its samples, as in `model="llama-8b",worker="0"`; empty: none
};

/// The page in the text format 0.0.4 (Content-Type: text/plain; version=0.0.4). Counters grow as long as their keeper
/// lives: kvkeep_steps_total, kvkeep_events_total, kvkeep_sequences_cut_total, kvkeep_slots_kept_total,
/// kvkeep_slots_dropped_total, kvkeep_slots_folded_total, kvkeep_moved_bytes_total, kvkeep_pages_freed_total, and the
/// histogram kvkeep_event_duration_seconds (Totals::event_seconds). Cost: microseconds.
[[nodiscard]] std::string prometheus_metrics(std::span<const KeeperMetrics> keepers);

namespace metrics_detail {

class Page {
 public:
  explicit Page(std::span<const KeeperMetrics> keepers) : keepers_(keepers) {}

  void counter(std::string_view name, std::string_view help, std::int64_t Totals::* count) {
    head(name, help, "counter");
    for (const KeeperMetrics& keeper : keepers_) sample(name, keeper.labels, {}, keeper.totals.*count);
  }

  void histogram(std::string_view name, std::string_view help, TimeHistogram Totals::* times) {
    head(name, help, "histogram");
    for (const KeeperMetrics& keeper : keepers_) {
      const TimeHistogram& own = keeper.totals.*times;
      const std::string base(name);
      for (std::size_t b = 0; b < own.up_to.size(); ++b)
        sample(base + "_bucket", keeper.labels, bound(number(TimeHistogram::kBounds[b])), own.up_to[b]);
      sample(base + "_bucket", keeper.labels, bound("+Inf"), own.count);
      sample(base + "_sum", keeper.labels, {}, own.sum);
      sample(base + "_count", keeper.labels, {}, own.count);
    }
  }

  [[nodiscard]] std::string text() && { return std::move(text_); }

 private:
  static std::string bound(std::string_view seconds) { return "le=\"" + std::string(seconds) + '"'; }

  /// The shortest text without an exponent that reads back as the same number, in every locale.
  static std::string number(double x) {
    char digits[400];
    return {digits, std::to_chars(digits, digits + sizeof digits, x, std::chars_format::fixed).ptr};
  }
  static std::string number(std::int64_t x) { return std::to_string(x); }

  void head(std::string_view name, std::string_view help, std::string_view type) {
    for (const auto& [what, said] : {std::pair{"# HELP ", help}, std::pair{"# TYPE ", type}})
      text_.append(what).append(name).append(" ").append(said).append("\n");
  }

  template <class T>
  void sample(std::string_view name, std::string_view labels, const std::string& label, T x) {
    text_ += name;
    if (!labels.empty() || !label.empty())
      text_.append("{").append(labels).append(!labels.empty() && !label.empty() ? "," : "").append(label).append("}");
    text_.append(" ").append(number(x)).append("\n");
  }

  std::span<const KeeperMetrics> keepers_;
  std::string text_;
};

}  // namespace metrics_detail

inline std::string prometheus_metrics(std::span<const KeeperMetrics> keepers) {
  metrics_detail::Page page(keepers);
  page.counter("kvkeep_steps_total", "Calls of step() or apply().", &Totals::steps);
  page.counter("kvkeep_events_total", "Steps in which something was cut.", &Totals::events);
  page.counter("kvkeep_sequences_cut_total", "Sequences cut at events.", &Totals::sequences_cut);
  page.counter("kvkeep_slots_kept_total", "Slots that stayed at events, over all rows.", &Totals::slots_kept);
  page.counter("kvkeep_slots_dropped_total", "Slots dropped at events, over all rows.", &Totals::slots_dropped);
  page.counter("kvkeep_slots_folded_total", "Of the slots dropped, those that were folded.", &Totals::slots_folded);
  page.counter("kvkeep_moved_bytes_total", "Bytes of keys and values moved at events.", &Totals::bytes_moved);
  page.counter("kvkeep_pages_freed_total", "Pages that events gave back.", &Totals::pages_freed);
  page.histogram("kvkeep_event_duration_seconds", "Host time to plan, carry out and finish an event.",
                 &Totals::event_seconds);
  return std::move(page).text();
}

}  // namespace kvkeep
