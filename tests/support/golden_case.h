// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Golden cases: a trace, a policy, what must come out, and how exactly (tests/golden/README.md).

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "arrays.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/trace/trace.h"

namespace kvkeep::testing {

struct GoldenCase {
  std::filesystem::path folder;
  nlohmann::json rules;
  [[nodiscard]] std::filesystem::path file(const char* name) const { return folder / name; }
  [[nodiscard]] bool must_fail() const { return rules.value("must_fail", false); }
};

/// Every case of one family below the folders that tests read: tests/golden, and those in KVKEEP_GOLDEN_DIR (separated
/// by ':').
inline std::vector<GoldenCase> golden_cases(const std::string& family) {
  std::vector<std::filesystem::path> roots{KVKEEP_TEST_GOLDEN_DIR};
  if (const char* more = std::getenv("KVKEEP_GOLDEN_DIR"); more != nullptr) {
    std::stringstream list(more);
    for (std::string root; std::getline(list, root, ':');)
      if (!root.empty()) roots.emplace_back(root);
  }
  std::vector<GoldenCase> cases;
  for (const auto& root : roots) {
    if (!std::filesystem::is_directory(root / family)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(root / family)) {
      std::ifstream rules(entry.path() / "case.json");
      if (rules) cases.push_back({entry.path(), nlohmann::json::parse(rules)});
    }
  }
  std::sort(cases.begin(), cases.end(), [](const GoldenCase& a, const GoldenCase& b) { return a.folder < b.folder; });
  return cases;
}

/// Entries of the last dimension that are compared: all, one pair, or one pair per sequence.
inline bool compared(const nlohmann::json& limits, std::int64_t sequence, std::int64_t slot) {
  if (limits.is_null()) return true;
  const auto& pair = limits[0].is_array() ? limits[static_cast<std::size_t>(sequence)] : limits;
  return slot >= pair[0].get<std::int64_t>() && slot < pair[1].get<std::int64_t>();
}

inline bool is_floating_point(const Tensor& t) { return is_scorable(t.dtype()) || t.dtype() == Dtype::f64; }

/// Integers may carry more or fewer -1 at the end of the last dimension.
inline Array padded(const Array& t, std::int64_t width) {
  if (t.dim() == 0 || t.size(-1) >= width) return t;
  Shape shape = t.sizes();
  shape[shape.size() - 1] = width;
  Array wide = Array::full(shape, -1, t.dtype());
  wide.narrow(-1, 0, t.size(-1)).copy_(t);
  return wide;
}

/// Fails the running test where `got` is not what the case expects.
inline void expect_as_golden(const GoldenCase& c, const trace::Result& got) {
  const auto expected = io::SafetensorsFile::open(c.file("expected.safetensors"));
  ASSERT_FALSE(c.rules["compare"].empty()) << c.folder;
  for (const auto& [name, rule] : c.rules["compare"].items()) {
    const auto found = std::find_if(got.tensors.begin(), got.tensors.end(),
                                    [&, &key = name](const auto& t) { return t.first == key; });
    if (found == got.tensors.end()) {
      ADD_FAILURE() << c.folder << ": the result has no " << name;
      continue;
    }
    Array want = expected.tensor(name), have = found->second;
    ASSERT_EQ(is_floating_point(want), is_floating_point(have)) << c.folder << ": " << name;
    if (!is_floating_point(want)) {
      const std::int64_t width = std::max(want.size(-1), have.size(-1));
      want = padded(want, width);
      have = padded(have, width);
    }
    if (want.sizes() != have.sizes()) {
      ADD_FAILURE() << c.folder << ": " << name << " has shape " << have.sizes() << ", expected " << want.sizes();
      continue;
    }
    const bool exact = rule.is_string();
    if (exact && is_floating_point(want)) {
      EXPECT_EQ(want.dtype(), have.dtype()) << c.folder << ": " << name;
    }
    const double atol = exact ? 0 : rule["atol"].get<double>(), rtol = exact ? 0 : rule["rtol"].get<double>();
    const auto limits = c.rules.value("compare_slots", nlohmann::json::object()).value(name, nlohmann::json());
    const Array w = want.to(Dtype::f64).contiguous(), h = have.to(Dtype::f64).contiguous();
    const std::int64_t last = w.dim() == 0 ? 1 : w.size(-1),
                       per_sequence = w.dim() == 0 || w.size(0) == 0 ? 1 : w.numel() / w.size(0);
    std::int64_t bad = 0;
    for (std::int64_t i = 0; i < w.numel(); ++i) {
      if (!compared(limits, i / per_sequence, i % last)) continue;
      const double a = h.data<double>()[i], b = w.data<double>()[i];
      const bool same =
          a == b || (std::isnan(a) && std::isnan(b)) || (!exact && std::abs(a - b) <= atol + rtol * std::abs(b));
      if (!same && bad++ == 0)
        ADD_FAILURE() << c.folder << ": " << name << " differs first at flat index " << i << ": " << a << ", expected "
                      << b;
    }
    if (bad > 1) ADD_FAILURE() << c.folder << ": " << name << " differs in " << bad << " of " << w.numel() << " places";
  }
}

}  // namespace kvkeep::testing
