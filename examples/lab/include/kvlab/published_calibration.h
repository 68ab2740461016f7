// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Calibration files of TriAttention's own tool, which writes them with torch.save: {"metadata": ..., "stats":
/// {"layer05_head13": {"q_mean_real", "q_mean_imag", "q_abs_mean"}}}, f32 [F] each.

#include <filesystem>
#include <string>
#include <string_view>

#include "kvkeep/score/calibration.h"

namespace kvkeep::lm {

/// Accepts views with strides and offsets into a shared storage, f64, f32, f16 or bf16, and metadata that differs by
/// release. Executes nothing in the file, and verifies its checksums. Throws InvalidArgument with one sentence, which
/// uses `name` for the file, if it is damaged or lacks a field. Cost: O(size of the file).
[[nodiscard]] Calibration read_published_calibration(std::string_view bytes, const std::string& name);

/// Writes the file whole or not at all; torch.load(path, weights_only=True) opens it. Throws as save_calibration().
void save_published_calibration(const std::filesystem::path& file, const Calibration& calibration);

/// From now on load_calibration() takes these files, too.
void use_published_calibrations();

}  // namespace kvkeep::lm
