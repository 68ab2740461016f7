// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/cli/program.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <sstream>
#include <stdexcept>

#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string formatted(const char* format, auto... numbers) {
  char text[64];
  std::snprintf(text, sizeof text, format, numbers...);
  return text;
}

std::string csv_cell(const Json& value) {
  const std::string text = escaped(value.is_null() ? "" : value.is_string() ? value.get<std::string>() : value.dump());
  if (text.find_first_of(",\"") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

// Characters that are shown, not bytes, so that columns line up.
std::size_t width(const std::string& given) {
  const std::string text = escaped(given);
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

std::string padded(const std::string& given, std::size_t to, bool right) {
  const std::string text = escaped(given), space(to - std::min(to, width(text)), ' ');
  return right ? space + text : text + space;
}

// Broken where it is wider than `most`: at a blank, or within a word that is.
std::vector<std::string> lines_of(const std::string& given, std::size_t most) {
  std::vector<std::string> lines;
  std::string text = escaped(given);
  while (width(text) > most) {
    std::size_t end = 0;
    for (std::size_t shown = 0; end < text.size(); ++end)
      if ((static_cast<unsigned char>(text[end]) & 0xC0U) != 0x80U && shown++ == most) break;
    const std::size_t blank = text.rfind(' ', end);
    const bool whole = blank != std::string::npos && blank > 0;
    lines.push_back(text.substr(0, whole ? blank : end));
    text.erase(0, whole ? blank + 1 : end);
  }
  lines.push_back(std::move(text));
  return lines;
}

}  // namespace

Cell bytes_cell(std::int64_t bytes) {
  const auto number = static_cast<double>(bytes);
  if (bytes < 1024) return {bytes, std::to_string(bytes) + " B"};
  if (bytes < 1024 * 1024) return {bytes, formatted("%.1f KiB", number / 1024)};
  if (bytes < std::int64_t{1} << 30) return {bytes, formatted("%.2f MiB", number / (1024 * 1024))};
  return {bytes, formatted("%.2f GiB", number / (1024.0 * 1024 * 1024))};
}

Cell real_cell(double number, int digits) {
  if (!std::isfinite(number)) return {nullptr, "-"};
  const std::string text = formatted("%.*f", digits, number);
  return {Json::parse(text), text};
}

Cell share_cell(double share) {
  if (!std::isfinite(share)) return {nullptr, "-"};
  return {Json::parse(formatted("%.5f", share)), formatted("%.1f %%", 100 * share)};
}

std::vector<Column> columns_of(std::initializer_list<const char*> keys) {
  std::vector<Column> columns;
  for (const char* key : keys) columns.push_back({key, key, false});
  return columns;
}

void Table::add(std::vector<Cell> row) {
  if (row.size() != columns_.size()) throw std::logic_error("table: the row does not have one cell per column");
  rows_.push_back(std::move(row));
}

std::vector<std::size_t> Table::widths(std::size_t most) const {
  constexpr std::size_t kNarrowest = 12;
  std::vector<std::size_t> wide, least;
  std::size_t all = 1, needed = 1;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    wide.push_back(std::max<std::size_t>(3, width(columns_[c].title)));
    const std::size_t narrow = std::max(kNarrowest, wide[c]);
    for (const auto& row : rows_) wide[c] = std::max(wide[c], width(row[c].shown));
    least.push_back(c == 0 || columns_[c].number ? wide[c] : std::min(wide[c], narrow));
    all += wide[c] + 3;
    needed += least[c] + 3;
  }
  const auto room = [&](std::size_t c) { return wide[c] > least[c] ? wide[c] : 0; };
  for (; needed <= most && all > most; --all) {  // the widest that can be narrower gives way
    std::size_t widest = 0;
    for (std::size_t c = 1; c < wide.size(); ++c)
      if (room(c) > room(widest)) widest = c;
    --wide[widest];
  }
  return wide;
}

std::string Table::markdown(std::size_t most) const {
  constexpr std::size_t kWidest = 60;  // longer texts in the last column are not padded to one length
  const std::vector<std::size_t> all = widths(most);
  const auto padding = [&](std::size_t c) {
    return most > 0 || c + 1 < all.size() ? all[c] : std::min(all[c], kWidest);
  };
  std::ostringstream out;
  out << "|";
  for (std::size_t c = 0; c < columns_.size(); ++c)
    out << " " << padded(columns_[c].title, padding(c), columns_[c].number) << " |";
  out << "\n|";
  for (std::size_t c = 0; c < columns_.size(); ++c)
    out << std::string(padding(c) + 1, '-') << (columns_[c].number ? ":|" : "-|");
  for (const auto& row : rows_) {
    std::vector<std::vector<std::string>> cells;
    std::size_t lines = 1;
    for (std::size_t c = 0; c < row.size(); ++c)
      lines = std::max(lines, cells.emplace_back(lines_of(row[c].shown, all[c])).size());
    for (std::size_t line = 0; line < lines; ++line) {
      out << "\n|";
      for (std::size_t c = 0; c < row.size(); ++c)
        out << " " << padded(line < cells[c].size() ? cells[c][line] : "", padding(c), columns_[c].number) << " |";
    }
  }
  out << "\n";
  return out.str();
}

std::string Table::csv() const {
  std::ostringstream out;
  for (std::size_t c = 0; c < columns_.size(); ++c) out << (c > 0 ? "," : "") << columns_[c].key;
  out << "\n";
  for (const auto& row : rows_) {
    for (std::size_t c = 0; c < row.size(); ++c) out << (c > 0 ? "," : "") << csv_cell(row[c].value);
    out << "\n";
  }
  return out.str();
}

Json Table::json() const {
  Json all = Json::array();
  for (const auto& row : rows_) {
    Json object = Json::object();
    for (std::size_t c = 0; c < row.size(); ++c) object[columns_[c].key] = row[c].value;
    all.push_back(std::move(object));
  }
  return all;
}

std::string Table::text(Format format) const {
  if (format == Format::csv) return csv();
  if (format == Format::json) return io::written(json(), 2) + "\n";
  return markdown();
}

void print(const std::string& text) {
  const std::string shown = escaped(text, "\n\t");
  const bool whole = std::fwrite(shown.data(), 1, shown.size(), stdout) == shown.size() && std::fflush(stdout) == 0;
  if (!whole && errno == EPIPE) throw NobodyReads();
  KVKEEP_REQUIRE_AS(Error, whole, "stdout: the result could not be written; is the disk full?");
}

std::string compact_ranges(const std::vector<std::int32_t>& ascending) {
  std::ostringstream out;
  for (std::size_t i = 0; i < ascending.size();) {
    std::size_t last = i;
    while (last + 1 < ascending.size() && ascending[last + 1] == ascending[last] + 1) ++last;
    out << (i > 0 ? "," : "") << ascending[i];
    if (last > i) out << "-" << ascending[last];
    i = last + 1;
  }
  return out.str();
}

}  // namespace kvkeep::cli
