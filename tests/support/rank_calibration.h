// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A calibration of all query heads of RankEngine's model.

#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "kvkeep/score/calibration.h"
#include "rank_engine.h"

namespace kvkeep::testing {

class CalibrationFile {
 public:
  CalibrationFile() : path(std::filesystem::temp_directory_path() / text("ranks-", ::getpid(), ".safetensors")) {
    Calibration all;
    all.head_dim = RankEngine::kDim;
    for (std::int32_t l = 0; l < RankEngine::kLayers; ++l)
      for (std::int32_t h = 0; h < RankEngine::kHeads * RankEngine::kGroup; ++h) {
        Calibration::Head& head = all.heads[{l, h}];
        for (std::int32_t f = 0; f < RankEngine::kDim / 2; ++f) {
          head.q_mean.emplace_back(RankEngine::noise(3, l, h, f, 0, 1), RankEngine::noise(3, l, h, f, 1, 1));
          head.q_abs_mean.push_back(std::abs(head.q_mean.back()) + 0.5F);
        }
      }
    save_calibration(path, all);
  }
  ~CalibrationFile() { std::filesystem::remove(path); }
  CalibrationFile(const CalibrationFile&) = delete;
  const std::filesystem::path path;
};

}  // namespace kvkeep::testing
