// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"

namespace kvkeep::io {

// A signal handler may only read what existed before the signal: entries that are reused and never freed, each
// published by one atomic store.
struct ListedFile {
  std::atomic<int> state{0};
  std::array<char, 4096> path{};
  ListedFile* next = nullptr;  // set before the entry is visible
};

namespace {

constexpr int kFree = 0, kTaken = 1, kListed = 2;  // taken: the path is not complete yet
std::atomic<ListedFile*> first_listed{nullptr};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<ListedFile*>::is_always_lock_free,
              "a signal handler reads them");

ListedFile& free_entry() {
  for (ListedFile* file = first_listed.load(); file != nullptr; file = file->next) {
    int expected = kFree;
    if (file->state.compare_exchange_strong(expected, kTaken)) return *file;
  }
  auto* added = new ListedFile;
  added->state.store(kTaken);
  added->next = first_listed.load();
  while (!first_listed.compare_exchange_weak(added->next, added)) {
  }
  return *added;
}

/// Null if the path is longer than any that a file can have.
ListedFile* publish(const std::string& path) {
  if (path.size() >= ListedFile{}.path.size()) return nullptr;
  ListedFile& file = free_entry();
  std::memcpy(file.path.data(), path.c_str(), path.size() + 1);
  file.state.store(kListed);
  return &file;
}

std::string reason() { return std::system_category().message(errno); }

void sync_folder(const std::filesystem::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;  // the file itself is safe; a folder that cannot be opened cannot be synced
  ::fsync(descriptor);
  ::close(descriptor);
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : ".";
}

}  // namespace

std::filesystem::path through_links(const std::filesystem::path& path) {
  constexpr int kMostLinks = 40;  // as many as Linux follows
  std::error_code ignored;
  std::filesystem::path target = path;
  for (int links = 0; links < kMostLinks; ++links) {
    if (!std::filesystem::is_symlink(std::filesystem::symlink_status(target, ignored))) return target;
    target = target.parent_path() / std::filesystem::read_symlink(target, ignored);  // an absolute one replaces it all
  }
  refuse("write file: '", path.string(), "' is a link without an end; allowed a file or a new name");
}

AtomicFile::AtomicFile(const std::filesystem::path& path) : path_(through_links(path)) {
  static std::atomic<unsigned> count{0};
  KVKEEP_REQUIRE(path_.has_filename(), "write file: '", path.string(),
                 "' does not name a file; allowed a path that ends in a file name");
  std::error_code error;
  const std::filesystem::file_status there = std::filesystem::status(path_, error);
  KVKEEP_REQUIRE(there.type() != std::filesystem::file_type::none, "write file: '", path.string(),
                 "' cannot be inspected (", error.message(), "); allowed a file or a new name");
  KVKEEP_REQUIRE(!std::filesystem::exists(there) || std::filesystem::is_regular_file(there), "write file: '",
                 path.string(), "' exists and is not a regular file; allowed a file or a new name");
  constexpr std::size_t kMostOfName = 200;  // the rest of the 255 is for the prefix and suffix
  const std::string name = path_.filename().string().substr(0, kMostOfName);
  do {  // a killed process may have left a file, and in a container the next one has the same process id
    temporary_ = (folder_of(path_) / text(".", name, ".", ::getpid(), "-", count++, ".unfinished")).string();
    listed_.emplace(temporary_);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0) return;
    listed_.reset();
  } while (errno == EEXIST);
  refuse("write file: cannot create '", path.string(), "' (", reason(),
         "); allowed an existing folder that can be written to");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
    ::unlink(temporary_.c_str());
  }
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    constexpr std::size_t kMost = std::size_t{1} << 30;  // Linux writes at most 2 GiB at once
    const ssize_t done = ::write(descriptor_, next, bytes < kMost ? bytes : kMost);
    if (done < 0 && errno == EINTR) continue;
    KVKEEP_REQUIRE_AS(Error, done > 0, "write file: writing '", path_.string(), "' failed (", reason(), ")");
    next += done;
    bytes -= static_cast<std::size_t>(done);
  }
}

void AtomicFile::commit() {
  KVKEEP_REQUIRE_AS(Error, ::fsync(descriptor_) == 0, "write file: syncing '", path_.string(), "' failed (", reason(),
                    ")");
  KVKEEP_REQUIRE_AS(Error, ::rename(temporary_.c_str(), path_.c_str()) == 0, "write file: putting '", path_.string(),
                    "' in place failed (", reason(), ")");
  ::close(descriptor_);
  descriptor_ = -1;
  listed_.reset();
  sync_folder(folder_of(path_));
}

RemovedOnSignal::RemovedOnSignal(const std::filesystem::path& path) : listed_(publish(path.string())) {}

RemovedOnSignal::~RemovedOnSignal() {
  if (listed_ != nullptr) listed_->state.store(kFree);
}

void write_text_atomically(const std::filesystem::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

void remove_unfinished_files() noexcept {
  const int saved = errno;
  for (const ListedFile* file = first_listed.load(); file != nullptr; file = file->next)
    if (file->state.load() == kListed) ::unlink(file->path.data());
  errno = saved;
}

}  // namespace kvkeep::io
