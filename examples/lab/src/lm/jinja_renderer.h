// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Writes what a chat template makes of its names.

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "jinja_parser.h"

namespace kvkeep::lm::jinja {

/// What jinja2 renders in the environment of transformers. `work.spend()` bounds time and memory. `date` is what
/// strftime_now() writes. Throws: InvalidArgument, with the line, where jinja2 fails, and beyond `work`; Unsupported
/// for what only shows in the values.
[[nodiscard]] std::string render(const Node& tree, std::vector<std::pair<std::string, Value>> names,
                                 std::chrono::year_month_day date, Work& work);

}  // namespace kvkeep::lm::jinja
