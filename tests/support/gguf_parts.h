// SPDX-License-Identifier: Apache-2.0
#pragma once
/// GGUF files in memory, well made or lying.

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"

namespace kvkeep::testing {

/// The number as it stands in a little-endian file.
template <class T>
std::string raw(T number) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &number, sizeof(T));
  return bytes;
}

/// A string with its length.
inline std::string raw_string(std::string_view string) {
  return raw<std::uint64_t>(string.size()) + std::string(string);
}

/// Numbers of value types and ggml types, as files say them.
namespace gguf {
enum Value : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
enum Type : std::uint32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  BF16 = 30
};
}  // namespace gguf

/// Put together key by key and tensor by tensor; bytes() is the file. What the header says of itself can be changed.
class GgufParts {
 public:
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;               ///< of the data; the key is not written
  std::optional<std::uint64_t> tensors_said;  ///< other than there are
  std::optional<std::uint64_t> keys_said;

  /// A value by the bytes behind its type.
  GgufParts& key(std::string_view name, gguf::Value type, const std::string& bytes) {
    keys_ += raw_string(name) + raw<std::uint32_t>(type) + bytes;
    ++key_count_;
    return *this;
  }
  GgufParts& text(std::string_view name, std::string_view value) { return key(name, gguf::string, raw_string(value)); }
  GgufParts& whole(std::string_view name, std::uint32_t value) { return key(name, gguf::u32, raw(value)); }
  GgufParts& number(std::string_view name, float value) { return key(name, gguf::f32, raw(value)); }
  GgufParts& truth(std::string_view name, bool value) {
    return key(name, gguf::boolean, raw<std::uint8_t>(value ? 1 : 0));
  }
  GgufParts& texts(std::string_view name, const std::vector<std::string>& values) {
    std::string bytes = raw<std::uint32_t>(gguf::string) + raw<std::uint64_t>(values.size());
    for (const std::string& value : values) bytes += raw_string(value);
    return key(name, gguf::array, bytes);
  }
  template <class T>
  GgufParts& list(std::string_view name, gguf::Value type, const std::vector<T>& values) {
    std::string bytes = raw<std::uint32_t>(type) + raw<std::uint64_t>(values.size());
    for (const T value : values) bytes += raw(value);
    return key(name, gguf::array, bytes);
  }

  /// A tensor of `shape` (row-major) by its blocks, behind the one before; or where `offset` says.
  GgufParts& tensor(std::string_view name, const std::vector<std::uint64_t>& shape, std::uint32_t type,
                    const std::string& blocks, std::optional<std::uint64_t> offset = {}) {
    data_.append((alignment - data_.size() % alignment) % alignment, '\0');
    tensors_ += raw_string(name) + raw(static_cast<std::uint32_t>(shape.size()));
    for (auto extent = shape.rbegin(); extent != shape.rend(); ++extent) tensors_ += raw(*extent);
    tensors_ += raw(type) + raw<std::uint64_t>(offset.value_or(data_.size()));
    data_ += blocks;
    ++tensor_count_;
    return *this;
  }
  /// A tensor of f32, f16 or bf16 as it is.
  GgufParts& tensor(std::string_view name, const Array& values) {
    const Array data = values.contiguous();
    const auto type = data.dtype() == Dtype::f32 ? gguf::F32 : data.dtype() == Dtype::f16 ? gguf::F16 : gguf::BF16;
    const std::vector<std::uint64_t> shape(data.sizes().begin(), data.sizes().end());
    return tensor(name, shape, type,
                  std::string(reinterpret_cast<const char*>(data.bytes()), static_cast<std::size_t>(data.nbytes())));
  }

  [[nodiscard]] std::string bytes() const {
    std::string file = "GGUF" + raw(version) + raw(tensors_said.value_or(tensor_count_)) +
                       raw(keys_said.value_or(key_count_)) + keys_ + tensors_;
    file.append((alignment - file.size() % alignment) % alignment, '\0');
    return file + data_;
  }

 private:
  std::string keys_, tensors_, data_;
  std::uint64_t key_count_ = 0, tensor_count_ = 0;
};

}  // namespace kvkeep::testing
