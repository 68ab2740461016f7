#pragma once
// Results on stdout: one table as Markdown, CSV or JSON.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvkeep::cli {

enum class Format : std::uint8_t { md, csv, json };

// A value, and its text in Markdown.
struct Cell {
  nlohmann::ordered_json value;
  std::string shown;

  Cell(const char* text) : value(text), shown(text) {}                         // NOLINT(google-explicit-constructor)
  Cell(const std::string& text) : value(text), shown(text) {}                  // NOLINT(google-explicit-constructor)
  Cell(std::int64_t number) : value(number), shown(std::to_string(number)) {}  // NOLINT(google-explicit-constructor)
  Cell(std::int32_t number) : Cell(std::int64_t{number}) {}                    // NOLINT(google-explicit-constructor)
  Cell(nlohmann::ordered_json raw, std::string people) : value(std::move(raw)), shown(std::move(people)) {}
};

Cell bytes_cell(std::int64_t bytes);
Cell real_cell(double number, int digits);
// A share as a percentage.
Cell share_cell(double share);

struct Column {
  std::string key;    // in CSV and JSON
  std::string title;  // in Markdown
  bool number = true;
};

// More columns of a header, or more cells of a row.
template <class T>
void append(std::vector<T>& to, const std::vector<T>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // Throws std::logic_error unless the row has a cell per column.
  void add(std::vector<Cell> row);
  [[nodiscard]] bool empty() const { return rows_.empty(); }
  [[nodiscard]] std::string markdown() const;
  [[nodiscard]] std::string csv() const;
  [[nodiscard]] nlohmann::ordered_json json() const;  // an array of objects
  [[nodiscard]] std::string text(Format format) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

// Writes to stdout, escaped but for line ends and tabs, and throws when it cannot be written (a full disk, a closed
// pipe).
void print(const std::string& text);

// 0-3,17,21-40 of ascending numbers.
std::string compact_ranges(const std::vector<std::int32_t>& ascending);

}  // namespace kvkeep::cli
