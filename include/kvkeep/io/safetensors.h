// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Safetensors files: a strict reader that trusts no number in the file, and a writer that leaves a whole file or none.

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep::io {

class FileBytes;  // a mapped file, or owned memory

/// One opened file. Tensors are views of its bytes if their alignment allows it (else copies), so opening reads only
/// the header. They keep the bytes alive and must not be written to (mapped pages are read-only).
///
/// Refuses the following, with one sentence that names the file, the tensor, what is wrong and what is allowed: a
/// header that is longer than the file or than 100 MB, is not a JSON object, nests deeper than 32 levels, or has a
/// duplicate name; an unknown dtype; a shape whose product overflows or does not match `data_offsets`; offsets that
/// overlap, leave holes, or do not cover the buffer to the end of the file.
class SafetensorsFile {
 public:
  /// Throws: InvalidArgument as above, or if the file cannot be read. Cost: maps the file, parses the header.
  /// Intended for large files that nobody else writes, such as weights: truncating the file while it is open ends the
  /// process (SIGBUS).
  static SafetensorsFile open(const std::filesystem::path& path);

  /// The same with a copy in memory, which later changes to the file do not affect. For small files, and files that
  /// others write. Throws as open() does; InvalidArgument if the file is truncated while it is read, DeviceError if
  /// there is not enough memory. Cost: one read of the file, which stays in memory as long as one of its tensors.
  static SafetensorsFile read(const std::filesystem::path& path);

  /// The same for bytes in memory (copied); messages use `name` for the file.
  static SafetensorsFile from_bytes(std::string_view bytes, std::string name = "safetensors bytes");

  [[nodiscard]] bool has(std::string_view name) const;

  /// Read-only tensor of the stored dtype and shape. Throws: InvalidArgument if there is no tensor of that name.
  [[nodiscard]] Tensor tensor(std::string_view name) const;

  /// The strings under `__metadata__`; empty if the file has none.
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// Tensor names in the order of their data.
  [[nodiscard]] std::vector<std::string> names() const;

  /// The name of this file in messages.
  [[nodiscard]] const std::string& where() const { return where_; }

 private:
  struct Entry {
    std::string name;
    Dtype dtype;
    std::vector<std::int64_t> shape;
    std::size_t begin;  // from the start of the data
    std::size_t bytes;
  };

  SafetensorsFile() = default;
  static SafetensorsFile parse(std::shared_ptr<const FileBytes> bytes, std::string where);

  std::string where_;
  std::shared_ptr<const FileBytes> bytes_;
  std::size_t data_begin_ = 0;
  std::vector<Entry> entries_;                               // in file order
  std::map<std::string, std::size_t, std::less<>> by_name_;  // name -> entry
  std::map<std::string, std::string> metadata_;
};

/// Writes `tensors` in the given order, so the same input gives the same bytes. Accepts any dtype that safetensors has,
/// and makes tensors contiguous. The header is padded to a multiple of 8 bytes. The file appears whole (temporary file
/// in the same folder, fsync, rename) or not at all. Throws: InvalidArgument for a duplicate name, a dtype without a
/// safetensors name, or a folder that cannot be written to.
void write_safetensors(const std::filesystem::path& path, const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

/// The bytes of such a file, for SafetensorsFile::from_bytes(). Throws as write_safetensors() does for its arguments.
[[nodiscard]] std::vector<std::byte> safetensors_bytes(const std::vector<std::pair<std::string, Tensor>>& tensors,
                                                       const std::map<std::string, std::string>& metadata = {});

}  // namespace kvkeep::io
