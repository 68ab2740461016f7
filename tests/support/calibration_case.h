// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Calibrations, and files of them.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "kvkeep/core/error.h"
#include "kvkeep/score/calibration.h"
#include "oracle/random_case.h"

namespace kvkeep::testing {

inline std::filesystem::path golden_calibration(const std::string& name) {
  return std::filesystem::path(KVKEEP_TEST_GOLDEN_DIR) / "triattention" / name;
}

inline std::string content(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// Two layers, one of them not the first.
inline Calibration sample_calibration(std::int32_t head_dim = 12) {
  oracle::Random random(11);
  Calibration c{.head_dim = head_dim,
                .rope_style = RopeStyle::interleaved,
                .heads = {},
                .inv_freq = {},
                .attention_scaling = 1.25,
                .model_name = "a \"name\""};
  for (std::int32_t f = 0; f < head_dim / 2; ++f) c.inv_freq.push_back(1.0 / (1 + f));
  for (const std::int32_t l : {1, 4})
    for (std::int32_t h = 0; h < 12; ++h)
      for (std::int32_t f = 0; f < head_dim / 2; ++f) {
        c.heads[{l, h}].q_mean.emplace_back(static_cast<float>(random.normal()), static_cast<float>(random.normal()));
        c.heads[{l, h}].q_abs_mean.push_back(static_cast<float>(random.unit()));
      }
  return c;
}

inline void expect_same(const Calibration& a, const Calibration& b) {
  EXPECT_EQ(a.head_dim, b.head_dim);
  EXPECT_EQ(a.rope_style, b.rope_style);
  ASSERT_EQ(a.heads.size(), b.heads.size());
  for (const auto& [place, head] : a.heads) {
    ASSERT_TRUE(b.heads.contains(place)) << place.first << " " << place.second;
    EXPECT_EQ(head.q_mean, b.heads.at(place).q_mean);
    EXPECT_EQ(head.q_abs_mean, b.heads.at(place).q_abs_mean);
  }
}

/// `read(bytes, name)` refuses them with a sentence of ours that holds `word`.
inline void expect_refused_calibration(Calibration (*read)(std::string_view bytes, const std::string& name),
                                       const std::string& bytes, const std::string& word) {
  try {
    static_cast<void>(read(bytes, "the file"));
    ADD_FAILURE() << "was accepted; should be refused for " << word;
  } catch (const InvalidArgument& e) {
    const std::string said = e.what();
    EXPECT_NE(said.find(word), std::string::npos) << said;
    EXPECT_NE(said.find("the file"), std::string::npos) << said;
    EXPECT_EQ(said.find('\n'), std::string::npos) << said;
  }
}

}  // namespace kvkeep::testing
