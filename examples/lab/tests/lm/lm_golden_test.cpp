// SPDX-License-Identifier: Apache-2.0
// Every folder of tests/golden/decoder: checkpoints as transformers writes them, and what they compute.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "kvkeep/core/error.h"
#include "kvkeep/io/safetensors.h"
#include "kvlab/decoder.h"

namespace kvkeep::lm::lm_golden_test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::vector<std::string> cases() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(fs::path(KVKEEP_TEST_GOLDEN_DIR) / "decoder"))
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

struct Case {
  fs::path folder;
  Json about;
  io::SafetensorsFile trace;

  static Case read(const std::string& name) {
    const fs::path folder = fs::path(KVKEEP_TEST_GOLDEN_DIR) / "decoder" / name;
    std::ifstream in(folder / "case.json");
    return {folder, Json::parse(in), io::SafetensorsFile::open(folder / "trace.safetensors")};
  }
  [[nodiscard]] fs::path model() const { return folder / trace.metadata().at("model"); }
  [[nodiscard]] std::int32_t number(const std::string& key) const { return std::stoi(trace.metadata().at(key)); }
};

std::vector<std::int32_t> ints(const at::Tensor& t) {
  return {t.const_data_ptr<std::int32_t>(), t.const_data_ptr<std::int32_t>() + t.numel()};
}

// |got - expected| <= atol + rtol * |expected| everywhere.
void expect_close(const at::Tensor& got, const at::Tensor& expected, const Json& tolerance, const std::string& name) {
  ASSERT_EQ(got.sizes().vec(), expected.sizes().vec()) << name;
  const at::Tensor a = got.contiguous(), b = expected.contiguous();
  const double atol = tolerance["atol"], rtol = tolerance["rtol"];
  double worst = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const double x = a.const_data_ptr<float>()[i], y = b.const_data_ptr<float>()[i];
    worst = std::max(worst, std::abs(x - y) - atol - rtol * std::abs(y));
    ASSERT_FALSE(std::isnan(x)) << name;
  }
  EXPECT_LE(worst, 0) << name;
}

class GoldenDecoder : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Cases, GoldenDecoder, ::testing::ValuesIn(cases()), [](const auto& one) { return one.param; });

TEST_P(GoldenDecoder, ComputesWhatTheModelComputesOrRefusesWithItsName) {
  const Case golden = Case::read(GetParam());
  if (golden.about.value("must_fail", false)) {
    try {
      (void)Decoder::open(golden.model());
      FAIL() << "accepted";
    } catch (const Error& error) {
      for (const std::string name : golden.about["message_should_name"])
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
    return;
  }
  Decoder decoder = Decoder::open(golden.model());
  const io::SafetensorsFile expected = io::SafetensorsFile::open(golden.folder / "expected.safetensors");
  const std::vector<std::int32_t> prompt = ints(golden.trace.tensor("input_ids"));
  const auto n = static_cast<std::int32_t>(prompt.size());
  const std::int32_t new_tokens = golden.number("new_tokens"), tail = golden.number("query_tail");

  std::vector<LayerCache> cache = decoder.make_cache(1, n + new_tokens);
  std::vector<std::int32_t> positions(static_cast<std::size_t>(n));
  for (std::int32_t i = 0; i < n; ++i) positions[static_cast<std::size_t>(i)] = i;
  at::Tensor queries;
  StepOptions options;
  options.logits = Logits::all;
  options.on_layer = [&](const LayerSight& sight) {
    if (sight.layer == 0) queries = sight.queries.narrow(0, n - tail, tail).permute({1, 0, 2}).contiguous();
  };
  const std::vector<std::int32_t> ends{0, n}, row{0}, empty{0};
  const at::Tensor logits = decoder.forward({prompt, ends, positions, row, empty}, cache, options);

  for (const auto& [name, tolerance] : golden.about["compare"].items()) {
    if (name == "greedy") continue;
    at::Tensor got = name == "logits" ? logits : queries;
    if (name.starts_with("layer.")) {
      const LayerCache& layer = cache[static_cast<std::size_t>(std::stoi(name.substr(6)))];
      got = (name.ends_with("keys") ? layer.keys : layer.values).select(0, 0).narrow(1, 0, n);
    }
    expect_close(got, expected.tensor(name), tolerance, name);
  }
  if (!golden.about["compare"].contains("greedy")) return;

  std::vector<std::int32_t> greedy;
  at::Tensor last = logits.narrow(0, n - 1, 1);
  while (static_cast<std::int32_t>(greedy.size()) < new_tokens) {
    const std::vector<std::int32_t> token = lm::argmax(last);
    greedy.push_back(token[0]);
    if (decoder.config().ends(token[0])) break;
    const std::vector<std::int32_t> one{0, 1}, at{n + static_cast<std::int32_t>(greedy.size()) - 1};
    last = decoder.forward({token, one, at, row, at}, cache);
  }
  EXPECT_EQ(greedy, ints(expected.tensor("greedy")));
}

}  // namespace
}  // namespace kvkeep::lm::lm_golden_test
