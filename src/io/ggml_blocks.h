#pragma once
/// How ggml stores numbers: the names of its types, the blocks of those that can be read, and what a block holds.

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvkeep::io {

/// A type of ggml that can be read. Source: ggml-common.h (blocks), ggml-quants.c (`dequantize_row_*`).
struct GgmlType {
  std::uint32_t number;   ///< in files
  std::string_view name;  ///< "Q4_1"
  std::int32_t values;    ///< of one block; 1: plain numbers
  std::int32_t bytes;     ///< of one block
  /// Writes the values of `count` blocks, f32 [count * values]. The same bits as the Python package `gguf` gives, NaN
  /// but for its payload. `blocks` needs no alignment.
  void (*widen)(const std::byte* blocks, std::int64_t count, float* out);
};

/// The type of that number; null where it has none that can be read.
[[nodiscard]] const GgmlType* ggml_type(std::uint32_t number);

/// What ggml calls the number, whether or not it can be read here; "unknown" where ggml has no such type.
[[nodiscard]] std::string_view ggml_type_name(std::uint32_t number);

/// The names of all that can be read, for messages.
inline constexpr std::string_view kReadableGgmlTypes = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K";

}  // namespace kvkeep::io
