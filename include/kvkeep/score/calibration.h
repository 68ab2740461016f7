// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Query statistics of a model for TriAttention: where the queries of each head are before RoPE, and how concentrated
/// they are.

#include <complex>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/header_only.h"
#include "kvkeep/core/model_spec.h"

namespace kvkeep {

/// Per (layer, query head) and rotary pair f, from queries before RoPE (projection, bias, query norm).
struct Calibration {
  struct Head {
    std::vector<std::complex<float>> q_mean;  ///< [F] mean of the complex query component
    std::vector<float> q_abs_mean;            ///< [F] mean of its modulus
  };
  std::int32_t head_dim = 0;  ///< D; F = D / 2
  RopeStyle rope_style = RopeStyle::half;
  std::map<std::pair<std::int32_t, std::int32_t>, Head> heads;  ///< by (layer, query head); may hold some layers only
  std::vector<double> inv_freq;                                 ///< [F], or empty if the file does not say
  double attention_scaling =
      1.0;  ///< of the model it was made with; does not affect the statistics, which are from before RoPE
  std::string model_name;

  [[nodiscard]] std::int64_t pairs() const { return head_dim / 2; }

  /// Query heads of the given layers: one more than the largest head index in any of them; 0 if there is none.
  [[nodiscard]] std::int32_t query_heads(const std::vector<std::int32_t>& layers) const;

  /// Reasons why it does not fit the model, one sentence each that names the field or (layer, head): head_dim or
  /// rope_style differs, F is not the model's number of rotary pairs, the query heads of `spec.full_layers()` are not a
  /// multiple of its KV heads or differ from its query heads, one of them is missing or has a number that is not
  /// finite, or inv_freq differs by more than 1e-4 relative.
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const;
};

#if KVKEEP_FILES

/// Reads a safetensors file: `q_mean` f32 [L, Hq, F, 2], `q_abs_mean` f32 [L, Hq, F]; the rest is metadata. Throws
/// InvalidArgument with one sentence for a file that is none, is damaged, or lacks a field. Cost: O(size of the file).
[[nodiscard]] Calibration load_calibration(const std::filesystem::path& file);

/// The same for bytes in memory; messages use `name` for the file.
[[nodiscard]] Calibration read_calibration(std::string_view bytes, const std::string& name);

/// Writes the file whole or not at all. Throws InvalidArgument for a folder that cannot be written to, and if a layer
/// lacks a query head that another has.
void save_calibration(const std::filesystem::path& file, const Calibration& calibration);

/// Throws InvalidArgument as save_calibration() does for what a file cannot hold; returns its layers.
std::vector<std::int32_t> check_complete(const Calibration& calibration);

// What a file may say, for readers of any format: they throw InvalidArgument, and `where` stands for the file.
namespace calibration_detail {
inline constexpr std::int64_t kMostEntries = 1 << 16;  ///< layers, heads and components of a head
[[nodiscard]] RopeStyle style_called(const std::string& name, const std::string& where);
void check_head_dim(std::int64_t dim, const std::string& where);
void check_scaling(double scaling, const std::string& where);
}  // namespace calibration_detail

/// From now on bytes that `takes` accepts are read by `reader`: files of other tools.
using CalibrationReader = Calibration (*)(std::string_view bytes, const std::string& name);
void use_calibration_reader(bool (*takes)(std::string_view bytes), CalibrationReader reader);

#endif

}  // namespace kvkeep
