// SPDX-License-Identifier: Apache-2.0
#include "kvlab/memory_left.h"

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>

#include "kvkeep/core/error.h"

namespace kvkeep::lm {
namespace {

/// The number after `key` at the beginning of a line, or the first of the file.
std::optional<std::int64_t> number_in(const std::filesystem::path& file, std::string_view key = {}) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t digits = std::min(line.find_first_of("0123456789", key.size()), line.size());
    std::int64_t number = 0;
    if (std::from_chars(line.data() + digits, line.data() + line.size(), number).ec == std::errc()) return number;
    if (key.empty()) return std::nullopt;  // "max"
  }
  return std::nullopt;
}

std::int64_t left_to_system() {
  constexpr std::int64_t kKiB = 1024;
  const auto available = number_in("/proc/meminfo", "MemAvailable:");
  if (!available) return INT64_MAX;
  return kKiB * (*available + number_in("/proc/meminfo", "SwapFree:").value_or(0));
}

/// Of the process's group and of those around it; in version 1 there is one of memory alone.
std::int64_t left_to_groups() {
  std::int64_t left = INT64_MAX;
  std::ifstream in("/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const bool second = line.starts_with("0::"), first = line.find(":memory:") != std::string::npos;
    if (!second && !first) continue;
    const std::filesystem::path root = second ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    std::filesystem::path group = line.substr(line.rfind(':') + 1);
    while (true) {
      const std::filesystem::path folder = root / group.relative_path();
      const auto most = number_in(folder / (second ? "memory.max" : "memory.limit_in_bytes")),
                 used = number_in(folder / (second ? "memory.current" : "memory.usage_in_bytes"));
      const std::int64_t cached =
          number_in(folder / "memory.stat", second ? "inactive_file " : "total_inactive_file ").value_or(0);
      if (most && used)
        left = std::min(left, std::max<std::int64_t>(0, *most - std::max<std::int64_t>(0, *used - cached)));
      if (!group.has_relative_path()) break;
      group = group.parent_path();
    }
  }
  return left;
}

std::int64_t left_of_address_space() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return INT64_MAX;
  const std::int64_t used = 1024 * number_in("/proc/self/status", "VmSize:").value_or(0);
  return std::max<std::int64_t>(0, static_cast<std::int64_t>(limit.rlim_cur) - used);
}

}  // namespace

std::int64_t memory_left() { return std::min({left_to_system(), left_to_groups(), left_of_address_space()}); }

std::string shown_bytes(double bytes) {
  constexpr double kKiB = 1024;
  constexpr const char* kUnits[] = {" B", " KiB", " MiB", " GiB", " TiB"};
  std::size_t unit = 0;
  for (; bytes >= kKiB && unit + 1 < std::size(kUnits); ++unit) bytes /= kKiB;
  return text(std::round(10 * bytes) / 10, kUnits[unit]);
}

void require_memory(std::string_view operation, std::string_view what, double bytes, std::string_view allowed,
                    std::int64_t given) {
  KVKEEP_REQUIRE(bytes <= static_cast<double>(given), operation, ": ", what, " takes ", shown_bytes(bytes), ", and ",
                 shown_bytes(static_cast<double>(given)), " of memory is left on this machine; allowed ", allowed);
}

}  // namespace kvkeep::lm
