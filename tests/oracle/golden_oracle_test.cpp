// SPDX-License-Identifier: Apache-2.0
// Replays the golden events on the slow second implementation alone, so that it is known to be right before anything is
// compared with it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "event_oracle.h"
#include "safetensors_reader.h"

#ifndef KVKEEP_TEST_GOLDEN_DIR
#define KVKEEP_TEST_GOLDEN_DIR ""
#endif

namespace oracle {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

fs::path golden_folder() {
  const char* named = std::getenv("KVKEEP_TEST_GOLDEN_DIR");
  return named ? named : KVKEEP_TEST_GOLDEN_DIR;
}

Json read_json(const fs::path& path) {
  std::ifstream in(path);
  return Json::parse(in);
}

/// Streaming and TOVA are replayed whole; other AMS cases with the scores of `expected`, which proves everything after
/// the scorer.
bool is_ours(const Json& policy) {
  const std::string name = policy.at("policy").get<std::string>();
  return name == "streaming" || name == "tova" || name.rfind("ams-", 0) == 0;
}

/// Paths of the cases, relative to the golden folder.
std::vector<std::string> cases() {
  std::vector<std::string> found;
  for (const char* family : {"ams", "scorers"}) {
    const fs::path folder = golden_folder() / family;
    if (!fs::is_directory(folder)) continue;
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (!fs::exists(entry.path() / "case.json") || !fs::exists(entry.path() / "expected.safetensors")) continue;
      if (is_ours(read_json(entry.path() / "policy.json")))
        found.push_back(std::string(family) + "/" + entry.path().filename().string());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

Options options_from(const Json& policy) {
  Options o;
  o.policy = policy.at("policy").get<std::string>();
  o.variant = policy.value("variant", o.variant);
  o.budget = policy.at("budget").get<int>();
  o.sink = policy.value("sink", 4);
  o.recent = policy.at("recent").get<int>();
  o.tova_heads_all = policy.value("scorer", Json::object()).value("heads", "all") == "all";
  const Json a = policy.value("allocator", Json::object());
  o.window = a.value("window", o.window);
  o.segment_mass = a.value("segment_mass", o.segment_mass);
  o.min_segment = a.value("min_segment", o.min_segment);
  o.max_segment = a.value("max_segment", o.max_segment);
  o.min_quota = a.value("min_quota", o.min_quota);
  o.credit_decay = a.value("credit_decay", o.credit_decay);
  o.credit_mix = a.value("credit_mix", o.credit_mix);
  o.credit = a.value("credit", o.credit);
  o.pool = a.value("pool", o.pool);
  o.suffix_fill = a.value("suffix_fill", o.suffix_fill);
  o.segments = a.value("segments", o.segments);
  o.quotas = a.value("quotas", o.quotas);
  o.coverage = a.value("coverage", o.coverage);
  return o;
}

/// An event trace, cut into sequences.
struct Trace {
  TensorFile file;
  const TensorData& of(const std::string& name) const { return file.tensors.at(name); }
  std::string meta(const std::string& name, const std::string& otherwise) const {
    return file.metadata.count(name) ? file.metadata.at(name) : otherwise;
  }
  size_t batch() const { return of("keys").shape[0]; }
  size_t width() const { return of("keys").shape[2]; }
};

/// Rotates a query to its own position, where the trace has them before RoPE.
void rotate(const Trace& trace, int position, float* query, size_t D) {
  const std::vector<double> frequency = Json::parse(trace.meta("inv_freq", "[]")).get<std::vector<double>>();
  const double scaling = std::stod(trace.meta("attention_scaling", "1"));
  const bool half = trace.meta("rope_style", "half") == "half";
  for (size_t f = 0; f < frequency.size(); ++f) {
    float& x = query[half ? f : 2 * f];
    float& y = query[half ? f + D / 2 : 2 * f + 1];
    const double c = scaling * std::cos(position * frequency[f]);
    const double s = scaling * std::sin(position * frequency[f]);
    const double rotated = x * c - y * s;
    y = static_cast<float>(x * s + y * c);
    x = static_cast<float>(rotated);
  }
}

void read_queries(const Trace& trace, size_t b, Sequence& s) {
  const TensorData& queries = trace.of("queries");
  const size_t N = queries.shape[2];
  for (size_t i = 0; i < N; ++i)
    s.query_positions.push_back(static_cast<int>(trace.of("query_positions").data[b * N + i]));
  const size_t per_sequence = s.Hq * N * s.D;
  for (size_t i = 0; i < per_sequence; ++i) s.queries.push_back(static_cast<float>(queries.data[b * per_sequence + i]));
  if (trace.meta("query_basis", "") != "pre_rope") return;
  for (int h = 0; h < s.Hq; ++h) {
    for (size_t i = 0; i < N; ++i) rotate(trace, s.query_positions[i], &s.queries[(h * N + i) * s.D], s.D);
  }
}

Sequence sequence_from(const Trace& trace, size_t b) {
  const TensorData& keys = trace.of("keys");
  const TensorData& positions = trace.of("positions");
  const size_t width = trace.width();
  Sequence s;
  s.Hkv = static_cast<int>(keys.shape[1]);
  s.D = static_cast<int>(keys.shape[3]);
  s.Hq = static_cast<int>(trace.of("queries").shape[1]);
  s.T = static_cast<int>(trace.file.tensors.count("lengths") ? trace.of("lengths").data[b] : width);
  const std::string scale = trace.meta("softmax_scale", "");
  s.scale = scale.empty() ? 1 / std::sqrt(static_cast<double>(s.D)) : std::stod(scale);
  for (int h = 0; h < s.Hkv; ++h) {
    const size_t row = b * s.Hkv + h;
    for (int t = 0; t < s.T; ++t) {
      const size_t position_row = positions.shape.size() == 3 ? row : b;
      s.positions.push_back(static_cast<int>(positions.data[position_row * width + t]));
      for (int d = 0; d < s.D; ++d) s.keys.push_back(static_cast<float>(keys.data[(row * width + t) * s.D + d]));
    }
    if (!trace.file.tensors.count("credit")) continue;
    const TensorData& credit = trace.of("credit");
    const size_t seen = credit.shape[2];
    s.credit.emplace_back(credit.data.begin() + row * seen, credit.data.begin() + (row + 1) * seen);
  }
  read_queries(trace, b, s);
  return s;
}

std::pair<int, int> compared_slots(const Json& test, const std::string& name, size_t b, size_t width) {
  if (!test.contains("compare_slots") || !test["compare_slots"].contains(name)) return {0, static_cast<int>(width)};
  const Json& limits = test["compare_slots"][name];
  return limits[0].is_array() ? limits[b].get<std::pair<int, int>>() : limits.get<std::pair<int, int>>();
}

/// The scores a golden file expects; slots outside the compared range are protected by the scorer and rank first.
std::vector<std::vector<double>> given_scores(const Json& test, const TensorFile& expected, const Sequence& s, size_t b,
                                              size_t width) {
  const std::vector<double>& all = expected.tensors.at("scores").data;
  const auto [first, last] = compared_slots(test, "scores", b, width);
  std::vector<std::vector<double>> scores;
  for (int h = 0; h < s.Hkv; ++h) {
    const auto row = all.begin() + (b * s.Hkv + h) * width;
    scores.emplace_back(row, row + s.T);
    for (int t = 0; t < s.T; ++t) {
      if (t < first || t >= last) scores.back()[t] = INFINITY;
    }
  }
  return scores;
}

std::vector<double> as_doubles(const std::vector<int>& values) { return {values.begin(), values.end()}; }

/// What the row says under a result's name; nullopt for the tensors that only an implementation with storage has.
std::optional<std::vector<double>> field(const Row& row, const std::string& name) {
  if (name == "slots") return as_doubles(row.slots);
  if (name == "segment_ends") return as_doubles(row.segment_ends);
  if (name == "quotas") return as_doubles(row.quotas);
  if (name == "scores") return row.scores;
  if (name == "mass") return row.mass;
  if (name == "mass_used") return row.mass_used;
  if (name == "credit") return row.credit;
  if (name == "credit_kept") return row.credit_kept;
  return std::nullopt;
}

std::vector<double> without_padding(std::vector<double> values) {
  while (!values.empty() && values.back() == -1) values.pop_back();
  return values;
}

void expect_integers(const std::string& what, const std::vector<double>& got, const std::vector<double>& want) {
  EXPECT_EQ(got, without_padding(want)) << what;
}

void expect_floats(const std::string& what, const std::vector<double>& got, const std::vector<double>& want,
                   const Json& rule, std::pair<int, int> range) {
  const double atol = rule.at("atol").get<double>();
  const double rtol = rule.at("rtol").get<double>();
  const int last = std::min<int>(range.second, static_cast<int>(want.size()));
  ASSERT_GE(static_cast<int>(got.size()), last) << what;
  for (int t = range.first; t < last; ++t) {
    ASSERT_LE(std::abs(got[t] - want[t]), atol + rtol * std::abs(want[t]))
        << what << "[" << t << "]: " << got[t] << ", expected " << want[t];
  }
}

class OracleGoldenEvent : public testing::TestWithParam<std::string> {};

TEST_P(OracleGoldenEvent, IsReproducedByTheSlowImplementation) {
  const fs::path folder = golden_folder() / GetParam();
  const Json test = read_json(folder / "case.json");
  const Options options = options_from(read_json(folder / "policy.json"));
  const Trace trace{read_safetensors(folder / "trace.safetensors")};
  const TensorFile expected = read_safetensors(folder / "expected.safetensors");
  const bool scores_given = options.policy.rfind("ams-", 0) == 0 && options.policy != "ams-tova";

  for (size_t b = 0; b < trace.batch(); ++b) {
    const Sequence s = sequence_from(trace, b);
    const std::vector<Row> rows = scores_given
                                      ? event_with_scores(options, s, given_scores(test, expected, s, b, trace.width()))
                                      : event(options, s);
    EXPECT_GT(std::min_element(rows.begin(), rows.end(), [](const Row& x, const Row& y) { return x.margin < y.margin; })
                  ->margin,
              0);
    for (const auto& [name, rule] : test.at("compare").items()) {
      if (scores_given && name == "scores") continue;
      const TensorData& want = expected.tensors.at(name);
      const size_t width = want.shape.back();
      for (int h = 0; h < s.Hkv; ++h) {
        const auto got = field(rows[h], name);
        if (!got) continue;
        const std::string what =
            GetParam() + " " + name + " sequence " + std::to_string(b) + " head " + std::to_string(h);
        const auto start = want.data.begin() + (b * s.Hkv + h) * width;
        const std::vector<double> row(start, start + width);
        if (rule.is_string()) {
          expect_integers(what, *got, row);
        } else {
          expect_floats(what, *got, row, rule, compared_slots(test, name, b, width));
        }
      }
    }
  }
}

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace_if(name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Cases, OracleGoldenEvent, testing::ValuesIn(cases()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OracleGoldenEvent);

TEST(OracleGoldenEvents, AreThere) { EXPECT_FALSE(cases().empty()) << "no golden event under " << golden_folder(); }

}  // namespace
}  // namespace oracle
