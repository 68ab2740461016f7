// SPDX-License-Identifier: Apache-2.0
#pragma once
// Diagnostics in tables: their columns, and why a number is missing.

#include <optional>
#include <string>
#include <vector>

#include "contests.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvlab/diagnostics.h"

namespace kvkeep::cli {

// What a kind of run, or a policy in it, does not have. Empty: it has it.
struct DiagnosticsGaps {
  std::string attention, repetition;
};

// What one policy showed.
struct Diagnosed {
  report::DiagnosticsResult result;
  DiagnosticsGaps gaps = {};
};

// One row per policy and budget, for people.
Table diagnostics_table(const ContestOptions& options, const std::vector<Contest>& contests,
                        const std::vector<report::DiagnosticsResult>& results);
// The same, and a sentence that says why numbers are missing and for whom.
std::string diagnostics_section(const ContestOptions& options, const std::vector<Contest>& contests,
                                const std::vector<Diagnosed>& all);

// For programs: a column for each number, and in JSON everything under `diagnostics`.
std::vector<Column> diagnostics_columns(Format format);
// Their cells. null: none.
std::vector<Cell> diagnostics_cells(const report::DiagnosticsResult* result, Format format);
// With the reason for each missing number, by its column, under `absent`.
std::vector<Cell> diagnostics_cells(const Diagnosed& diagnosed, Format format);

}  // namespace kvkeep::cli
