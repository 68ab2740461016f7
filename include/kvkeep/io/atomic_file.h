#pragma once
/// Files that appear whole or not at all.

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace kvkeep::io {

/// A file under construction: bytes go to a temporary file beside `path`, `commit()` puts it in place, and anything else removes it.
/// Throws: InvalidArgument when the folder is missing or cannot be written to, or when `path` is there and is not a regular file.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }

  /// fsync, then rename over `path`.
  void commit();

 private:
  std::filesystem::path path_;
  std::string temporary_;
  int descriptor_ = -1;
  int slot_ = -1;  // in the list that remove_unfinished_files walks
};

/// Writes a text file whole or not at all.
void write_text_atomically(const std::filesystem::path& path, std::string_view content);

/// A file that goes with the process where a signal ends it: remove_unfinished_files() removes it too, as long as this lives. 32 such and AtomicFiles have room at once, and paths below 4096 bytes; others
/// stay behind.
class RemovedOnSignal {
 public:
  explicit RemovedOnSignal(const std::filesystem::path& path);
  ~RemovedOnSignal();
  RemovedOnSignal(const RemovedOnSignal&) = delete;
  RemovedOnSignal& operator=(const RemovedOnSignal&) = delete;

 private:
  int slot_;
};

/// Removes the temporary files of every AtomicFile alive, and every RemovedOnSignal. Async-signal-safe: made for a SIGINT handler that exits next.
void remove_unfinished_files() noexcept;

}  // namespace kvkeep::io
