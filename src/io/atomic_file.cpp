#include "kvkeep/io/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "kvkeep/core/error.h"

namespace kvkeep::io {
namespace {

namespace fs = std::filesystem;

// A signal handler may only read what was there before the signal: fixed storage, each slot published by one atomic store.
struct UnfinishedFile {
  std::atomic<int> state{0};  // 0 free, 1 taken, 2 path is whole
  std::array<char, 4096> path{};
};
constexpr int kFree = 0, kTaken = 1, kListed = 2;
std::array<UnfinishedFile, 32> unfinished_files;

/// -1 where there is no room.
int try_to_list(const std::string& path) {
  if (path.size() >= unfinished_files[0].path.size()) return -1;
  for (std::size_t i = 0; i < unfinished_files.size(); ++i) {
    UnfinishedFile& file = unfinished_files[i];
    int expected = kFree;
    if (!file.state.compare_exchange_strong(expected, kTaken)) continue;
    std::memcpy(file.path.data(), path.c_str(), path.size() + 1);
    file.state.store(kListed);
    return static_cast<int>(i);
  }
  return -1;
}

int list_unfinished(const std::string& path) {
  const int slot = try_to_list(path);
  if (slot >= 0) return slot;
  refuse<StateError>("write file: more than ", unfinished_files.size(), " files are being written at once; allowed ",
                     unfinished_files.size());
}

void unlist(int slot) {
  if (slot >= 0) unfinished_files[static_cast<std::size_t>(slot)].state.store(kFree);
}

std::string reason() { return std::system_category().message(errno); }

// What a link points to is replaced, not the link.
fs::path through_links(const fs::path& path) {
  std::error_code ignored;
  const fs::path target = fs::is_symlink(path, ignored) ? fs::weakly_canonical(path, ignored) : path;
  return target.empty() ? path : target;
}

void sync_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;  // the file itself is safe; a folder that cannot be opened cannot be synced
  ::fsync(descriptor);
  ::close(descriptor);
}

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

}  // namespace

AtomicFile::AtomicFile(const fs::path& path) : path_(through_links(path)) {
  static std::atomic<unsigned> count{0};
  require(path_.has_filename(), "write file: '", path.string(), "' names no file; allowed a path that ends in a file name");
  std::error_code error;
  const fs::file_status there = fs::status(path_, error);
  require(!fs::exists(there) || fs::is_regular_file(there), "write file: '", path.string(),
          "' is there and is not a regular file; allowed a file or a new name");
  const fs::path temporary = folder_of(path_) / text(".", path_.filename().string(), ".", ::getpid(), "-", count++, ".unfinished");
  temporary_ = temporary.string();
  require(temporary_.size() < unfinished_files[0].path.size(), "write file: the path of '", path.string(), "' is too long");
  slot_ = list_unfinished(temporary_);
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ >= 0) return;
  const std::string why = reason();
  unlist(slot_);
  refuse("write file: cannot create '", path.string(), "' (", why, "); allowed a folder that is there and can be written to");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
    ::unlink(temporary_.c_str());
  }
  unlist(slot_);
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    constexpr std::size_t kMost = std::size_t{1} << 30;  // Linux writes at most 2 GiB at once
    const ssize_t done = ::write(descriptor_, next, bytes < kMost ? bytes : kMost);
    if (done < 0 && errno == EINTR) continue;
    require<Error>(done > 0, "write file: writing '", path_.string(), "' failed (", reason(), ")");
    next += done;
    bytes -= static_cast<std::size_t>(done);
  }
}

void AtomicFile::commit() {
  require<Error>(::fsync(descriptor_) == 0, "write file: syncing '", path_.string(), "' failed (", reason(), ")");
  require<Error>(::rename(temporary_.c_str(), path_.c_str()) == 0, "write file: putting '", path_.string(), "' in place failed (", reason(),
                 ")");
  ::close(descriptor_);
  descriptor_ = -1;
  unlist(slot_);
  slot_ = -1;
  sync_folder(folder_of(path_));
}

RemovedOnSignal::RemovedOnSignal(const fs::path& path) : slot_(try_to_list(path.string())) {}

RemovedOnSignal::~RemovedOnSignal() { unlist(slot_); }

void write_text_atomically(const fs::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

void remove_unfinished_files() noexcept {
  const int saved = errno;
  for (const UnfinishedFile& file : unfinished_files)
    if (file.state.load() == kListed) ::unlink(file.path.data());
  errno = saved;
}

}  // namespace kvkeep::io
