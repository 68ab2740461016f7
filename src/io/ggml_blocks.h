// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How ggml stores numbers: the names of its types, and the layout and content of blocks that can be read.

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvkeep::io {

/// A type of ggml that can be read. Source: ggml-common.h (blocks), ggml-quants.c (`dequantize_row_*`).
struct GgmlType {
  std::uint32_t number;   ///< in files
  std::string_view name;  ///< "Q4_1"
  std::int32_t values;    ///< per block; 1: plain numbers
  std::int32_t bytes;     ///< per block
  /// Writes the values of `count` blocks, f32 [count * values]. The bits equal those of the Python package `gguf`,
  /// except for the payload of NaN. `blocks` needs no alignment.
  void (*widen)(const std::byte* blocks, std::int64_t count, float* out);
};

/// The type with that number; null if it has none that can be read.
[[nodiscard]] const GgmlType* ggml_type(std::uint32_t number);

/// ggml's name for the number, whether or not it can be read here; "unknown" if ggml has no such type.
[[nodiscard]] std::string_view ggml_type_name(std::uint32_t number);

/// The names of all readable types, for messages.
inline constexpr std::string_view kReadableGgmlTypes = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K";

}  // namespace kvkeep::io
