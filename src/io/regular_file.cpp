// SPDX-License-Identifier: Apache-2.0
#include "regular_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"

namespace kvkeep::io {
namespace {

/// A regular file while its bytes are read.
struct OpenedFile {
  /// Non-blocking: opening a pipe without a writer would wait, and it is refused anyway.
  OpenedFile(const std::filesystem::path& path, std::string_view operation)
      : descriptor((require_readable(path, operation), ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK))) {
    KVKEEP_REQUIRE(descriptor >= 0, operation, ": cannot open ", path.string(), " (",
                   std::system_category().message(errno), "); allowed a file that can be read");
    struct stat status{};
    const bool regular = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
    if (!regular) ::close(descriptor);
    KVKEEP_REQUIRE(regular, operation, ": ", path.string(), " is not a regular file");
    size = static_cast<std::size_t>(status.st_size);
  }
  ~OpenedFile() { ::close(descriptor); }
  OpenedFile(const OpenedFile&) = delete;
  OpenedFile& operator=(const OpenedFile&) = delete;

  const int descriptor;
  std::size_t size = 0;
};

}  // namespace

FileBytes::~FileBytes() {
  if (mapping_ != nullptr) ::munmap(mapping_, size_);
}

std::shared_ptr<const FileBytes> FileBytes::mapped(const std::filesystem::path& path, std::string_view operation) {
  const OpenedFile file(path, operation);
  auto bytes = std::make_shared<FileBytes>();
  bytes->size_ = file.size;
  if (file.size > 0) {
    void* mapping = ::mmap(nullptr, file.size, PROT_READ, MAP_PRIVATE, file.descriptor, 0);
    if (mapping != MAP_FAILED) bytes->mapping_ = mapping;
  }
  KVKEEP_REQUIRE(bytes->mapping_ != nullptr || bytes->size_ == 0, operation, ": cannot map ", path.string(), " (",
                 std::system_category().message(errno), ")");
  bytes->data_ = static_cast<const std::byte*>(bytes->mapping_);
  return bytes;
}

std::shared_ptr<const FileBytes> FileBytes::copied(const std::filesystem::path& path, std::string_view operation) {
  const OpenedFile file(path, operation);
  const std::shared_ptr<FileBytes> bytes = room_for(file.size, path.string(), operation);
  for (std::size_t done = 0; done < bytes->size_;) {
    constexpr std::size_t kMost = std::size_t{1} << 30;  // Linux reads at most 2 GiB at once
    const ssize_t more = ::read(file.descriptor, bytes->owned_.get() + done, std::min(kMost, bytes->size_ - done));
    if (more < 0 && errno == EINTR) continue;
    KVKEEP_REQUIRE(more >= 0, operation, ": reading ", path.string(), " failed (",
                   std::system_category().message(errno), ")");
    KVKEEP_REQUIRE(more > 0, operation, ": ", path.string(), " was cut to ", done, " bytes while it was being read");
    done += static_cast<std::size_t>(more);
  }
  return bytes;
}

std::shared_ptr<const FileBytes> FileBytes::copied(std::string_view source, const std::string& name,
                                                   std::string_view operation) {
  const std::shared_ptr<FileBytes> bytes = room_for(source.size(), name, operation);
  if (!source.empty()) std::memcpy(bytes->owned_.get(), source.data(), source.size());
  return bytes;
}

std::shared_ptr<FileBytes> FileBytes::room_for(std::size_t size, const std::string& name, std::string_view operation) {
  auto bytes = std::make_shared<FileBytes>();
  bytes->size_ = size;
  bytes->owned_.reset(new (std::nothrow) std::byte[size]);
  KVKEEP_REQUIRE_AS(DeviceError, bytes->owned_ != nullptr, operation, ": no memory for the ", size, " bytes of ", name);
  bytes->data_ = bytes->owned_.get();
  return bytes;
}

}  // namespace kvkeep::io
