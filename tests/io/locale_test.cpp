// SPDX-License-Identifier: Apache-2.0
// Files are the same bytes under every locale: what an engine writes under one that groups digits is read under the
// classic one, and vice versa.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <locale>
#include <map>

#include "arrays.h"
#include "engines.h"
#include "kvkeep/score/calibration.h"
#include "kvkeep/trace/trace.h"

namespace kvkeep::locale_test {
namespace {

using testing::Array;

/// 12.345,5 where C++ says 12345.5.
class Grouping final : public std::numpunct<char> {
 protected:
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

/// The global locale as long as this lives.
class Under {
 public:
  explicit Under(bool grouping)
      : before_(std::locale::global(grouping ? std::locale(std::locale::classic(), new Grouping)
                                             : std::locale::classic())) {}
  ~Under() { std::locale::global(before_); }
  Under(const Under&) = delete;
  Under& operator=(const Under&) = delete;

 private:
  std::locale before_;
};

class Locales : public ::testing::TestWithParam<bool> {
 protected:
  [[nodiscard]] static bool writes_grouped() { return GetParam(); }
  ~Locales() override { std::filesystem::remove(file_); }
  std::filesystem::path file_ = std::filesystem::temp_directory_path() /
                                text("kvkeep-locale-", ::getpid(), "-", GetParam() ? "grouped" : "classic");
};
INSTANTIATE_TEST_SUITE_P(Written, Locales, ::testing::Bool(), [](const auto& one) {
  return one.param ? "UnderGroupingReadUnderClassic" : "UnderClassicReadUnderGrouping";
});

// An earlier version: "data_offsets":[0,48.104], which no locale reads; and a checksum whose words were grouped.
TEST_P(Locales, KeepSavedSequencesWhole) {
  const std::string policy = "ams-tova,budget=2000,interval=8,recent=8,window=4";
  engines::DenseEngine here(policy, true, Dtype::f32), there(policy, true, Dtype::f32);
  oracle::Random random(2);
  here.join(1);
  here.step(engines::numbers_of(random, {{1, 350}}));
  {
    const Under locale(writes_grouped());
    here.keeper.save(1, file_);
  }
  const Under locale(!writes_grouped());
  there.keeper.restore(1, file_);
  EXPECT_EQ(there.keeper.logical_length(1), 350);
}

TEST_P(Locales, KeepTensorsCalibrationsAndTracesWhole) {
  const Array large = Array::full({1234, 5}, 0.5F);
  {
    const Under locale(writes_grouped());
    io::write_safetensors(file_, {{"first", large}, {"second", large}}, {{"count", text(12345)}});
  }
  {
    const Under locale(!writes_grouped());
    const io::SafetensorsFile file = io::SafetensorsFile::open(file_);
    EXPECT_TRUE(Array(file.tensor("second")).equal(large));
    EXPECT_EQ(file.metadata().at("count"), "12345");
  }
  Calibration calibration{.head_dim = 4,
                          .rope_style = RopeStyle::half,
                          .heads = {},
                          .inv_freq = {12345.5, 0.25},
                          .attention_scaling = 1.25,
                          .model_name = "m"};
  for (std::int32_t head = 0; head < 1200; ++head)
    calibration.heads[{0, head}] =
        Calibration::Head{.q_mean = {{1.0F, 2.0F}, {3.0F, 4.0F}}, .q_abs_mean = {5.0F, 6.0F}};
  {
    const Under locale(writes_grouped());
    save_calibration(file_, calibration);
  }
  const Under locale(!writes_grouped());
  const Calibration read = load_calibration(file_);
  EXPECT_EQ(read.heads.size(), 1200U);
  EXPECT_EQ(read.inv_freq, calibration.inv_freq);
}

TEST_P(Locales, KeepReplayedTracesWhole) {
  const auto i32 = Dtype::i32;
  Array positions = Array::full({1, 1500}, 0, i32);
  for (std::int32_t t = 0; t < 1500; ++t) positions.data<std::int32_t>()[t] = t;
  const std::map<std::string, std::string> metadata{{"kvkeep_trace", "1"},
                                                    {"kind", "event"},
                                                    {"rope_style", "half"},
                                                    {"inv_freq", "[1000.5,0.1]"},
                                                    {"next_position", "[1500]"}};
  std::vector<std::pair<std::string, Tensor>> tensors;
  {
    const Under locale(writes_grouped());
    io::write_safetensors(file_,
                          {{"keys", Array::full({1, 1, 1500, 4}, 0.5F)},
                           {"values", Array::full({1, 1, 1500, 4}, 0.5F)},
                           {"positions", positions}},
                          metadata);
    const trace::Result result =
        trace::replay_event(io::SafetensorsFile::open(file_), *make_policy("streaming,budget=1200"));
    EXPECT_EQ(result.metadata.at("slots_kept"), "1200");
    io::write_safetensors(file_, result.tensors, result.metadata);
    tensors = result.tensors;
  }
  const Under locale(!writes_grouped());
  const io::SafetensorsFile file = io::SafetensorsFile::open(file_);
  for (const auto& [name, tensor] : tensors) EXPECT_EQ(file.tensor(name).sizes(), tensor.sizes()) << name;
}

}  // namespace
}  // namespace kvkeep::locale_test
