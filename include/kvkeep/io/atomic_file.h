#pragma once
/// Files that appear whole or not at all.

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace kvkeep::io {

struct ListedFile;

/// A file under construction: bytes go to a temporary file beside `path`, `commit()` puts it in place, and anything
/// else removes it. What a link points to is replaced, or made where there is nothing yet. Any number may be under
/// construction at once. Throws: InvalidArgument when the folder is missing or cannot be written to, when `path` is
/// there and is not a regular file, or is a link that leads in a circle.
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
  ListedFile* listed_ = nullptr;  // what remove_unfinished_files finds
};

/// Writes a text file whole or not at all.
void write_text_atomically(const std::filesystem::path& path, std::string_view content);

/// A file that goes with the process where a signal ends it: remove_unfinished_files() removes it too, as long as this
/// lives.
class RemovedOnSignal {
 public:
  explicit RemovedOnSignal(const std::filesystem::path& path);
  ~RemovedOnSignal();
  RemovedOnSignal(const RemovedOnSignal&) = delete;
  RemovedOnSignal& operator=(const RemovedOnSignal&) = delete;

 private:
  ListedFile* listed_;
};

/// Removes the temporary files of every AtomicFile alive, and every RemovedOnSignal. Async-signal-safe: made for a
/// SIGINT handler that exits next.
void remove_unfinished_files() noexcept;

}  // namespace kvkeep::io
