// SPDX-License-Identifier: Apache-2.0
#pragma once
/// GGUF files: a strict reader of the models that llama.cpp runs.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep::io {

class FileBytes;  // a mapped file, or owned memory
struct GgmlType;

/// How a tensor is stored.
struct GgufTensor {
  std::vector<std::int64_t> shape;  ///< row-major: the reverse of ggml's `ne`
  std::string_view type;            ///< ggml's name, for example "Q4_1"
  std::optional<Dtype> dtype;       ///< f32, f16 or bf16; empty: quantised in blocks
};

/// One opened file. Opening reads only the header: tensors are widened on request, and strings are views of the file's
/// bytes, valid while this object or a copy of it lives.
///
/// Refuses the following, with one sentence that names the file, the tensor or key, what is wrong and what is allowed:
/// versions other than 2 and 3, big-endian files, counts and lengths that the file cannot hold, a duplicate key or
/// name, arrays of arrays, a `general.alignment` that is not a power of two, and a tensor with more than 4 dimensions,
/// of a type that cannot be read (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K can), with rows that
/// are not whole blocks, or whose data overlap another's, leave more than padding after another's, or are not in the
/// file. Names and strings are bytes, not checked for UTF-8. Source: docs/gguf.md of ggml.
class GgufFile {
 public:
  /// Throws: InvalidArgument as above, or if the file cannot be read. Cost: maps the file, one pass over the header,
  /// memory for its entries (not for the items of arrays). Intended for large files that nobody else writes: truncating
  /// the file while it is open ends the process (SIGBUS).
  static GgufFile open(const std::filesystem::path& path);

  /// The same for bytes in memory (copied); messages use `name` for the file.
  static GgufFile from_bytes(std::string_view bytes, std::string name = "GGUF bytes");

  /// The name of this file in messages.
  [[nodiscard]] const std::string& where() const { return where_; }

  // ---- Metadata. The functions below throw InvalidArgument for a missing key, or if its value has another type.

  [[nodiscard]] bool has_key(std::string_view key) const { return values_.contains(key); }
  /// In alphabetical order.
  [[nodiscard]] std::vector<std::string_view> keys() const;

  [[nodiscard]] std::string_view string(std::string_view key) const;
  /// Of any integer type. Also throws if it is negative.
  [[nodiscard]] std::uint64_t whole_number(std::string_view key) const;
  /// Stored as f32 or f64; may be infinite or NaN.
  [[nodiscard]] double number(std::string_view key) const;
  [[nodiscard]] bool truth(std::string_view key) const;

  [[nodiscard]] std::vector<std::string_view> strings(std::string_view key) const;
  /// Of any integer type. Also throws for a number above 2^63 - 1.
  [[nodiscard]] std::vector<std::int64_t> whole_numbers(std::string_view key) const;
  /// Stored as f32 or f64.
  [[nodiscard]] std::vector<double> numbers(std::string_view key) const;

  // ---- Tensors

  [[nodiscard]] bool has(std::string_view name) const { return tensors_.contains(name); }
  /// In file order.
  [[nodiscard]] const std::vector<std::string_view>& names() const { return names_; }
  /// Throws: InvalidArgument if there is no tensor of that name.
  [[nodiscard]] const GgufTensor& described(std::string_view name) const;

  /// A new contiguous tensor of the stored shape as f32, f16 or bf16: the numbers in f32 (the same bits as from the
  /// Python package `gguf`), then rounded to nearest even; copied if already stored as `dtype`. Throws: InvalidArgument
  /// if there is no tensor of that name, or for any other `dtype`; DeviceError if there is not enough memory. Cost: one
  /// pass over its bytes, in parallel.
  [[nodiscard]] Tensor tensor(std::string_view name, Dtype dtype = Dtype::f32) const;

 private:
  struct Reader;
  /// A value's place among the bytes. A value that is not an array is one item.
  struct Value {
    std::uint32_t type;  // of the items
    bool array;
    std::uint64_t count;
    std::size_t begin;
  };
  struct Entry {
    GgufTensor described;
    const GgmlType* type;
    std::size_t begin;  // of the file
    std::int64_t blocks;
  };

  GgufFile() = default;
  static GgufFile parse(std::shared_ptr<const FileBytes> bytes, std::string where);
  [[nodiscard]] const Value& value(std::string_view key, bool array, std::uint32_t types,
                                   std::string_view allowed) const;
  [[nodiscard]] const Entry& entry(std::string_view name) const;

  std::string where_;
  std::shared_ptr<const FileBytes> bytes_;
  std::map<std::string_view, Value> values_;  // names are views of the bytes
  std::map<std::string_view, Entry> tensors_;
  std::vector<std::string_view> names_;
};

}  // namespace kvkeep::io
