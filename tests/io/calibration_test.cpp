// SPDX-License-Identifier: Apache-2.0
// Calibration files: they come back as they were saved, and what is damaged or hostile is refused with a sentence.

#include "kvkeep/score/calibration.h"

#include <gtest/gtest.h>

#include <array>
#include <filesystem>

#include "arrays.h"
#include "calibration_case.h"
#include "kvkeep/io/safetensors.h"
#include "temporary_folder.h"

namespace kvkeep::calibration_test {
namespace {

using testing::Array;
using testing::content;
using testing::expect_same;
using testing::golden_calibration;
using testing::sample_calibration;

namespace fs = std::filesystem;
using Bytes = std::string;

class CalibrationFile : public testing::TemporaryFolder {};

void expect_refused(const Bytes& bytes, const std::string& word) {
  testing::expect_refused_calibration(read_calibration, bytes, word);
}

TEST_F(CalibrationFile, ComesBackAsItWasSaved) {
  const Calibration c = sample_calibration();
  const fs::path file = folder_ / "any name";
  save_calibration(file, c);
  const Calibration back = load_calibration(file);
  expect_same(c, back);
  EXPECT_EQ(back.inv_freq, c.inv_freq);
  EXPECT_EQ(back.attention_scaling, c.attention_scaling);
  EXPECT_EQ(back.model_name, c.model_name);
  const Bytes first = content(file);
  save_calibration(file, c);
  EXPECT_EQ(first, content(file)) << "the same numbers make the same bytes";
}

TEST_F(CalibrationFile, SavesNothingThatLacksAHead) {
  Calibration c = sample_calibration();
  c.heads.erase({4, 3});
  EXPECT_THROW(save_calibration(folder_ / "f", c), InvalidArgument);
  EXPECT_TRUE(fs::is_empty(folder_));
  EXPECT_THROW(save_calibration(folder_ / "no/f", sample_calibration()), InvalidArgument);
}

TEST_F(CalibrationFile, TruncatedAnywhereIsRefused) {
  const Bytes whole = content(golden_calibration("mean_basic/calibration.safetensors"));
  for (int part = 0; part < 50; ++part)
    expect_refused(whole.substr(0, whole.size() * static_cast<std::size_t>(part) / 50), "");
  expect_refused("", "not a safetensors file");
}

TEST_F(CalibrationFile, OfTorchSaveSaysHowItIsConverted) {
  expect_refused(content(golden_calibration("mean_basic/calibration.pt")), "docs/method/calibration.md converts it");
}

TEST_F(CalibrationFile, AReaderOfOtherFilesIsAskedFirst) {
  use_calibration_reader([](std::string_view bytes) { return bytes == "ours"; },
                         [](std::string_view, const std::string& name) {
                           Calibration c = sample_calibration();
                           c.model_name = name;
                           return c;
                         });
  EXPECT_EQ(read_calibration("ours", "the file").model_name, "the file");
  expect_refused("theirs", "not a safetensors file");
  use_calibration_reader(nullptr, nullptr);
  expect_refused("ours", "not a safetensors file");
}

TEST_F(CalibrationFile, AFlippedBitOfOurFileNeverCrashes) {
  const Bytes whole = content(golden_calibration("mean_basic/calibration.safetensors"));
  for (std::size_t at = 0; at < whole.size(); ++at) {
    Bytes damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 1 << (at % 8));
    try {
      static_cast<void>(read_calibration(damaged, "the file"));
    } catch (const InvalidArgument&) {
    }
  }
}

TEST_F(CalibrationFile, MissingFilesAndFoldersAreRefused) {
  EXPECT_THROW(static_cast<void>(load_calibration(folder_ / "none")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(load_calibration(folder_)), InvalidArgument);
}

TEST_F(CalibrationFile, OurLayoutIsRefusedForEveryFieldThatIsWrong) {
  const fs::path file = folder_ / "c.safetensors";
  const auto zeros = [](std::initializer_list<std::int64_t> shape) { return Array::full(shape, 0.5F, Dtype::f32); };
  const auto written = [&](const std::map<std::string, std::string>& change, const Array& mean, const Array& modulus) {
    std::map<std::string, std::string> metadata{
        {"kvkeep_calibration", "1"}, {"head_dim", "4"}, {"rope_style", "half"}, {"inv_freq", "[1, 0.1]"}};
    for (const auto& [key, value] : change) {
      if (value.empty())
        metadata.erase(key);
      else
        metadata[key] = value;
    }
    io::write_safetensors(file, {{"q_mean", mean}, {"q_abs_mean", modulus}}, metadata);
    return content(file);
  };
  const Array mean = zeros({2, 3, 2, 2}), modulus = zeros({2, 3, 2});
  EXPECT_EQ(read_calibration(written({{"layers", "[5, 3]"}}, mean, modulus), "x").heads.count({5, 2}), 1U);
  EXPECT_TRUE(read_calibration(written({{"inv_freq", ""}}, mean, modulus), "x").inv_freq.empty());
  for (const auto& [key, value, word] :
       std::vector<std::array<const char*, 3>>{{"kvkeep_calibration", "", "not a calibration file"},
                                               {"kvkeep_calibration", "2", "version 2"},
                                               {"head_dim", "", "head_dim"},
                                               {"head_dim", "5", "head_dim"},
                                               {"head_dim", "-4", "head_dim"},
                                               {"head_dim", "4294967300", "head_dim"},
                                               {"head_dim", "four", "head_dim"},
                                               {"rope_style", "", "rope_style"},
                                               {"rope_style", "quarter", "quarter"},
                                               {"inv_freq", "[1]", "inv_freq"},
                                               {"inv_freq", "[1, null]", "inv_freq"},
                                               {"inv_freq", "[", "inv_freq"},
                                               {"attention_scaling", "0", "attention_scaling"},
                                               {"attention_scaling", "\"1\"", "attention_scaling"},
                                               {"layers", "[0]", "layers"},
                                               {"layers", "[0, 0]", "twice"},
                                               {"layers", "[0, -1]", "-1"},
                                               {"layers", "[0, 70000]", "70000"}})
    expect_refused(written({{key, value}}, mean, modulus), word);
  expect_refused(written({}, zeros({2, 3, 3, 2}), modulus), "q_mean");
  expect_refused(written({}, zeros({2, 3, 2, 3}), modulus), "do not match");
  expect_refused(written({}, zeros({2, 2, 2, 2}), modulus), "do not match");
  expect_refused(written({}, zeros({2, 3, 4}), modulus), "q_mean");
  expect_refused(written({}, mean.to(Dtype::f64), modulus), "f64");
  expect_refused(written({}, zeros({0, 3, 2, 2}), zeros({0, 3, 2})), "q_mean");
  io::write_safetensors(file, {{"q_mean", mean}},
                        {{"kvkeep_calibration", "1"}, {"head_dim", "4"}, {"rope_style", "half"}});
  expect_refused(content(file), "q_abs_mean");
}

}  // namespace
}  // namespace kvkeep::calibration_test
