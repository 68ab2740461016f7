#pragma once
/// Safetensors files: a strict reader that trusts no number it finds, and a writer that leaves a whole file or none.

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/tensor.h"

namespace kvkeep::io {

class FileBytes;  // the mapped file, or memory of its own

/// One opened file. Tensors are views of its bytes where their alignment allows it (else copies), so opening costs the
/// header only; they keep the bytes alive and must not be written to (mapped pages are read-only).
///
/// Refused with one sentence that names the file, the tensor, what is wrong and what is allowed: a header that is
/// longer than the file or than 100 MB, is not a JSON object, nests deeper than 32 levels, or holds a name twice; a
/// dtype that is not known; a shape whose product overflows or does not match `data_offsets`; offsets that overlap,
/// leave holes, or do not cover the buffer to the end of the file.
class SafetensorsFile {
 public:
  /// Throws: InvalidArgument as above, or when the file cannot be read. Cost: maps the file, parses the header.
  /// Made for large files of the machine's owner, weights for one: who cuts the file while it is open ends the process
  /// (SIGBUS).
  static SafetensorsFile open(const std::filesystem::path& path);

  /// The same over a copy in memory: what becomes of the file afterwards changes nothing. For small files, and those
  /// that others write. Throws: as open(); InvalidArgument where the file is cut while it is read, DeviceError where
  /// there is no memory for it. Cost: one read of the file, which stays in memory as long as a tensor of it.
  static SafetensorsFile read(const std::filesystem::path& path);

  /// The same for bytes in memory (copied); `name` stands for the file in messages.
  static SafetensorsFile from_bytes(std::string_view bytes, std::string name = "safetensors bytes");

  [[nodiscard]] bool has(std::string_view name) const;

  /// Read-only tensor of the stored dtype and shape. Throws: InvalidArgument when there is none of that name.
  [[nodiscard]] Tensor tensor(std::string_view name) const;

  /// The strings under `__metadata__`; empty where the file has none.
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// Tensor names in the order of their data.
  [[nodiscard]] std::vector<std::string> names() const;

  /// What messages call this file.
  [[nodiscard]] const std::string& where() const { return where_; }

  /// Bytes of tensor data, header not counted.
  [[nodiscard]] std::size_t data_bytes() const { return data_bytes_; }

 private:
  struct Entry {
    std::string name;
    ScalarType dtype;
    std::vector<std::int64_t> shape;
    std::size_t begin;  // from the start of the data
    std::size_t bytes;
  };

  SafetensorsFile() = default;
  static SafetensorsFile parse(std::shared_ptr<const FileBytes> bytes, std::string where);

  std::string where_;
  std::shared_ptr<const FileBytes> bytes_;
  std::size_t data_begin_ = 0;
  std::size_t data_bytes_ = 0;
  std::vector<Entry> entries_;                               // in file order
  std::map<std::string, std::size_t, std::less<>> by_name_;  // name -> entry
  std::map<std::string, std::string> metadata_;
};

/// Writes `tensors` in the order given, so the same input makes the same bytes. Any dtype that safetensors has; tensors
/// are made contiguous. The header is padded to a multiple of 8 bytes. The file appears whole (temporary file in the
/// same folder, fsync, rename) or not at all. Throws: InvalidArgument for a name given twice, a dtype without a
/// safetensors name, or a folder that cannot be written to.
void write_safetensors(const std::filesystem::path& path, const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace kvkeep::io
