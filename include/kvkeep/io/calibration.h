#pragma once
/// Query statistics of a model, as TriAttention needs them: where the queries of each head lie before RoPE, and how
/// closely.

#include <complex>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
  std::vector<double> inv_freq;                                 ///< [F], or empty where the file does not say
  double attention_scaling =
      1.0;  ///< of the model it was made with; says nothing about the statistics, which lie before RoPE
  std::string model_name;

  [[nodiscard]] std::int64_t pairs() const { return head_dim / 2; }

  /// Query heads of the given layers: one more than the largest head that any of them has; 0 where there is none.
  [[nodiscard]] std::int32_t query_heads(const std::vector<std::int32_t>& layers) const;

  /// Why it does not fit the model, one sentence each that names the field or (layer, head): head_dim and rope_style
  /// differ, F is not the model's number of rotary pairs, the query heads of `spec.full_layers()` are not a multiple of
  /// its KV heads or not its own number, one of them is missing or holds a number that is not finite, inv_freq is off
  /// by more than 1e-4 of itself.
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const;
};

/// The two containers: the same numbers, told apart by content and never by name.
enum class CalibrationLayout : std::uint8_t {
  safetensors,  ///< `q_mean` f32 [L, Hq, F, 2], `q_abs_mean` f32 [L, Hq, F]; the rest is metadata
  published,    ///< what TriAttention's own tool writes with torch.save: {"metadata": ..., "stats": {"layer05_head13":
                ///< {"q_mean_real", "q_mean_imag", "q_abs_mean"}}}, f32 [F] each
};

/// Reads either layout. Of the published one: views with strides and offsets into a shared storage, f64, f32, f16 or
/// bf16, metadata that differs by release. Nothing in the file is run; its checksums are verified. Throws:
/// InvalidArgument with one sentence for a file that is neither, is damaged, or lacks a field. Cost: O(size of the
/// file).
[[nodiscard]] Calibration load_calibration(const std::filesystem::path& file);

/// The same for bytes in memory; `name` stands for the file in messages.
[[nodiscard]] Calibration read_calibration(std::string_view bytes, const std::string& name);

/// Writes the file whole or not at all. The published layout opens in Python with torch.load(path, weights_only=True).
/// Throws: InvalidArgument for a folder that cannot be written to, and where a layer lacks a query head that another
/// has.
void save_calibration(const std::filesystem::path& file, const Calibration& calibration, CalibrationLayout layout);

}  // namespace kvkeep
