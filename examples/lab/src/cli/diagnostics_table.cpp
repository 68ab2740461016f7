// SPDX-License-Identifier: Apache-2.0
#include "diagnostics_table.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

namespace kvkeep::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int32_t kShownRegion = 32, kShownRepetition = 4;

const report::WipeOut& shown_region(const report::DiagnosticsResult& r) {
  return *std::find_if(r.wipe_out.begin(), r.wipe_out.end(), [](const auto& w) { return w.region == kShownRegion; });
}
const report::Repetition& shown_repetition(const report::DiagnosticsResult& r) {
  return *std::find_if(r.repetition.begin(), r.repetition.end(),
                       [](const auto& one) { return one.n == kShownRepetition; });
}

// What a number needs, to be one.
enum class Of : std::uint8_t { event, pairs, segments, attention, writing };

struct DiagnosticsColumn {
  const char* key;
  Of of;
  const char* title;
  Cell (*cell)(const report::DiagnosticsResult&);
};

const std::vector<DiagnosticsColumn>& shown_columns() {
  using Result = report::DiagnosticsResult;
  static const std::vector<DiagnosticsColumn> kColumns{
      {"iou", Of::pairs, "IoU", [](const Result& r) { return real_cell(r.iou.value(), 3); }},
      {"survival", Of::pairs, "survive", [](const Result& r) { return share_cell(r.survival.value()); }},
      {"wiped_32", Of::event, "wiped", [](const Result& r) { return share_cell(shown_region(r).wiped.value()); }},
      {"nearly_wiped_32", Of::event, "nearly",
       [](const Result& r) { return share_cell(shown_region(r).nearly.value()); }},
      {"wiped_so_far_32", Of::event, "wiped so far",
       [](const Result& r) { return share_cell(shown_region(r).cumulative.value()); }},
      {"longest_dropped", Of::event, "longest run",
       [](const Result& r) { return real_cell(r.longest_dropped.value(), 1); }},
      {"middle", Of::event, "middle", [](const Result& r) { return share_cell(r.middle.value()); }},
      {"middle_cumulative", Of::event, "middle so far",
       [](const Result& r) { return share_cell(r.middle_cumulative.value()); }},
      {"newest_share", Of::event, "newest 32", [](const Result& r) { return share_cell(r.newest_share.value()); }},
      {"segments", Of::segments, "segments", [](const Result& r) { return real_cell(r.segments.value(), 1); }},
      {"segment_slots", Of::segments, "slots each",
       [](const Result& r) { return real_cell(r.segment_slots.value(), 1); }},
      {"quota_share", Of::segments, "quota", [](const Result& r) { return share_cell(r.quota_share.value()); }},
      {"suffix_mass", Of::segments, "suffix mass", [](const Result& r) { return share_cell(r.suffix_mass.value()); }},
      {"recall", Of::attention, "recall", [](const Result& r) { return share_cell(r.attention.held.value()); }},
      {"past_recall", Of::attention, "of the past",
       [](const Result& r) { return share_cell(r.attention.past.value()); }},
      {"output_error", Of::attention, "output error",
       [](const Result& r) { return real_cell(r.attention.output_error(), 3); }},
      {"repetition_4", Of::writing, "repeats",
       [](const Result& r) { return share_cell(shown_repetition(r).rate.value()); }},
      {"collapsed", Of::writing, "collapsed", [](const Result& r) { return share_cell(r.collapsed.value()); }}};
  return kColumns;
}

// Why a number is missing.
std::string gap_of(const DiagnosticsColumn& column, const Diagnosed& d) {
  if (column.of == Of::writing) return d.gaps.repetition.empty() ? "nothing was written" : d.gaps.repetition;
  if (d.result.events == 0) return "there was no event";
  switch (column.of) {
    case Of::pairs:
      return "no sequence had two events";
    case Of::segments:
      return "the policy has no segments";
    case Of::attention:
      return d.gaps.attention.empty() ? "no compared text had a token after an event" : d.gaps.attention;
    default:
      return "no event had a region to count";
  }
}

// Missing numbers, by column, each with its reason.
std::vector<std::pair<const DiagnosticsColumn*, std::string>> gaps_in(const Diagnosed& d) {
  std::vector<std::pair<const DiagnosticsColumn*, std::string>> gaps;
  for (const DiagnosticsColumn& column : shown_columns())
    if (column.cell(d.result).value.is_null()) gaps.emplace_back(&column, gap_of(column, d));
  return gaps;
}

}  // namespace

Table diagnostics_table(const ContestOptions& options, const std::vector<Contest>& contests,
                        const std::vector<report::DiagnosticsResult>& results) {
  std::vector<Column> columns = contest_columns(options);
  for (const DiagnosticsColumn& column : shown_columns()) columns.push_back({column.key, column.title});
  Table table(std::move(columns));
  for (std::size_t c = 0; c < contests.size(); ++c) {
    std::vector<Cell> row = contest_cells(options, contests[c]);
    append(row, diagnostics_cells(&results[c], Format::csv));
    table.add(std::move(row));
  }
  return table;
}

std::string diagnostics_section(const ContestOptions& options, const std::vector<Contest>& contests,
                                const std::vector<Diagnosed>& all) {
  std::vector<report::DiagnosticsResult> results;
  std::vector<std::pair<std::string, std::string>> reasons;  // each with the policies that it is of
  for (std::size_t c = 0; c < all.size(); ++c) {
    results.push_back(all[c].result);
    std::vector<std::string> own;
    for (const auto& [column, reason] : gaps_in(all[c]))
      if (std::ranges::find(own, reason) == own.end()) own.push_back(reason);
    for (const std::string& reason : own) {
      const auto found = std::ranges::find(reasons, reason, &std::pair<std::string, std::string>::first);
      if (found == reasons.end())
        reasons.emplace_back(reason, contests[c].shown());
      else
        found->second += ", " + contests[c].shown();
    }
  }
  std::string out = diagnostics_table(options, contests, results).markdown();
  if (!reasons.empty()) out += "\n";
  for (const auto& [reason, policies] : reasons) out += text("No number (-): ", reason, ": ", policies, ".\n");
  return out;
}

std::vector<Column> diagnostics_columns(Format format) {
  std::vector<Column> columns;
  for (const DiagnosticsColumn& column : shown_columns()) columns.push_back({column.key, column.key});
  if (format == Format::json) columns.push_back({"diagnostics", "diagnostics"});
  return columns;
}

std::vector<Cell> diagnostics_cells(const report::DiagnosticsResult* result, Format format) {
  std::vector<Cell> cells;
  for (const DiagnosticsColumn& column : shown_columns())
    cells.push_back(result == nullptr ? Cell(nullptr, "-") : column.cell(*result));
  if (format == Format::json)
    cells.emplace_back(result == nullptr ? Json() : Json::parse(report::to_json(*result)), "");
  return cells;
}

std::vector<Cell> diagnostics_cells(const Diagnosed& diagnosed, Format format) {
  std::vector<Cell> cells = diagnostics_cells(&diagnosed.result, format);
  if (format != Format::json) return cells;
  Json absent = Json::object();
  for (const auto& [column, reason] : gaps_in(diagnosed)) absent[column->key] = reason;
  cells.back().value["absent"] = std::move(absent);
  if (diagnosed.result.events == 0) cells.back().value["most_dropped"] = nullptr;
  return cells;
}

}  // namespace kvkeep::cli
