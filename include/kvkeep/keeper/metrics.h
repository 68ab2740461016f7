// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Totals of keepers as Prometheus reads them: what a server adds to its own page of metrics.

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/parts/report.h"

namespace kvkeep {

/// One keeper of the process.
struct KeeperMetrics {
  Totals totals = {};       ///< a copy, taken on the keeper's thread
  std::string labels = {};  ///< of its samples, as in `model="llama-8b",worker="0"`; empty: none
};

/// The page in the text format 0.0.4 (Content-Type: text/plain; version=0.0.4). Counters grow as long as their keeper
/// lives: kvkeep_steps_total, kvkeep_events_total, kvkeep_sequences_cut_total, kvkeep_unscored_total,
/// kvkeep_slots_kept_total, kvkeep_slots_chosen_total, kvkeep_slots_dropped_total, kvkeep_slots_folded_total,
/// kvkeep_moved_bytes_total, kvkeep_pages_freed_total, and the histogram kvkeep_event_duration_seconds
/// (Totals::event_seconds). Throws InvalidArgument for labels that Prometheus could not read, and for two keepers with
/// the same. Cost: microseconds.
[[nodiscard]] std::string prometheus_metrics(std::span<const KeeperMetrics> keepers);

namespace metrics_detail {

/// The labels of name="value",... in UTF-8, each name once, with \\, \" and \n in values, sorted, without those of an
/// empty value, which Prometheus takes for no label; absent: it is no such list, or takes a name of Prometheus' own.
inline std::optional<std::vector<std::string_view>> labels_of(std::string_view s) {
  for (std::string_view rest = s; !rest.empty();) {
    const detail::Utf8Step step = detail::first_step(rest);
    if (step.state != detail::Utf8State::good) return {};
    rest.remove_prefix(step.bytes);
  }
  std::vector<std::string_view> labels, names = {"le"};
  while (!s.empty()) {
    while (s.starts_with(' ')) s.remove_prefix(1);
    const std::string_view label = s;
    const auto is_of_name = [&s](std::size_t i) {
      const char c = s[i];
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (i > 0 && c >= '0' && c <= '9');
    };
    std::size_t name = 0;
    while (name < s.size() && is_of_name(name)) ++name;
    names.push_back(s.substr(0, name));
    if (name == 0 || names.back().starts_with("__") || std::ranges::count(names, names.back()) > 1 ||
        s.substr(name, 2) != "=\"")
      return {};
    s.remove_prefix(name + 2);
    while (!s.starts_with('"')) {
      const bool escape = s.starts_with('\\');
      if (s.empty() || s[0] == '\n') return {};
      if (escape && (s.size() < 2 || std::string_view("\\\"n").find(s[1]) == std::string_view::npos)) return {};
      s.remove_prefix(escape ? 2 : 1);
    }
    s.remove_prefix(1);
    if (name + 3 < label.size() - s.size()) labels.push_back(label.substr(0, label.size() - s.size()));
    if (s.empty()) break;
    if (s[0] != ',' || s.size() == 1) return {};
    s.remove_prefix(1);
  }
  std::ranges::sort(labels);
  return labels;
}

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
  std::vector<std::vector<std::string_view>> all;
  for (const KeeperMetrics& keeper : keepers) {
    const auto labels = metrics_detail::labels_of(keeper.labels);
    KVKEEP_REQUIRE(labels.has_value(), "metrics: labels are no list that Prometheus reads; given ",
                   shortened(keeper.labels),
                   "; allowed name=\"value\",... in UTF-8, each name once, none `le` nor with __ before it");
    KVKEEP_REQUIRE(std::ranges::count(all, *labels) == 0, "metrics: keepers ",
                   std::ranges::find(all, *labels) - all.begin(), " and ", all.size(),
                   " have the same labels; given \"", shortened(keeper.labels),
                   "\"; allowed labels of its own for each keeper, such as worker=\"0\"");
    all.push_back(*labels);
  }
  metrics_detail::Page page(keepers);
  page.counter("kvkeep_steps_total", "Calls of step() or apply().", &Totals::steps);
  page.counter("kvkeep_events_total", "Steps in which something was cut.", &Totals::events);
  page.counter("kvkeep_sequences_cut_total", "Sequences cut at events.", &Totals::sequences_cut);
  page.counter("kvkeep_unscored_total", "Sequences due but not cut, for a query that was not finite.",
               &Totals::unscored);
  page.counter("kvkeep_slots_kept_total", "Slots that stayed at events, over all rows.", &Totals::slots_kept);
  page.counter("kvkeep_slots_chosen_total", "Of the slots kept, those that the scorer chose.", &Totals::slots_chosen);
  page.counter("kvkeep_slots_dropped_total", "Slots dropped at events, over all rows.", &Totals::slots_dropped);
  page.counter("kvkeep_slots_folded_total", "Of the slots dropped, those that were folded.", &Totals::slots_folded);
  page.counter("kvkeep_moved_bytes_total", "Bytes of keys and values moved at events.", &Totals::bytes_moved);
  page.counter("kvkeep_pages_freed_total", "Pages that events gave back.", &Totals::pages_freed);
  page.histogram("kvkeep_event_duration_seconds", "Host time to plan, carry out and finish an event.",
                 &Totals::event_seconds);
  return std::move(page).text();
}

}  // namespace kvkeep
