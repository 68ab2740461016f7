// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Regular files that others wrote, as bytes: mapped if they are large, copied if they must not change.

#include <bit>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace kvkeep::io {

/// A number as files store it: little-endian, at any address.
template <class T>
T load(const void* bytes) {
  static_assert(std::endian::native == std::endian::little, "files are read as they are stored in memory");
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

/// Bytes that stay in place while somebody holds them. Every message begins with `operation`, for example "read
/// safetensors".
class FileBytes {
 public:
  /// The file itself: if someone truncates it while it is mapped, the process ends (SIGBUS). Throws: InvalidArgument if
  /// it cannot be opened, is not a regular file (a pipe is refused at once) or cannot be mapped.
  static std::shared_ptr<const FileBytes> mapped(const std::filesystem::path& path, std::string_view operation);

  /// The file's current content. Throws: as mapped(); InvalidArgument if it is truncated while it is read, DeviceError
  /// if there is no memory for it.
  static std::shared_ptr<const FileBytes> copied(const std::filesystem::path& path, std::string_view operation);

  /// A copy of bytes in memory; `name` stands for the file. Throws: DeviceError if there is no memory for it.
  static std::shared_ptr<const FileBytes> copied(std::string_view source, const std::string& name,
                                                 std::string_view operation);

  FileBytes() = default;
  ~FileBytes();
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;

  [[nodiscard]] const std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  static std::shared_ptr<FileBytes> room_for(std::size_t size, const std::string& name, std::string_view operation);

  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  void* mapping_ = nullptr;
  std::unique_ptr<std::byte[]> owned_;
};

}  // namespace kvkeep::io
