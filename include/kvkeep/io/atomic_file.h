// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Files: read whole into memory, and written so that they appear whole or not at all.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "kvkeep/core/compiled_only.h"

namespace kvkeep::io {

// Whole files that others wrote, copied into memory.

/// What a program reads: a file or pipe, or also a folder.
enum class Source : std::uint8_t { file, file_or_folder };

/// Throws InvalidArgument, with a message that begins with `operation`, if there is nothing of this name, if it is a
/// folder and must not be, or if it cannot be opened.
void require_readable(const std::filesystem::path& path, std::string_view operation, Source source = Source::file);

/// The bytes of a file or pipe, at most 1 GiB. Throws InvalidArgument, with a message that begins with `operation`, if
/// it cannot be read or is longer.
[[nodiscard]] std::string read_file(const std::filesystem::path& path, std::string_view operation);

struct ListedFile;

/// The file that writing to `path` replaces or creates: the target of a link, which need not exist yet. Throws
/// InvalidArgument for a circular link.
[[nodiscard]] std::filesystem::path through_links(const std::filesystem::path& path);

/// A file that must not outlive the process if a signal ends it: remove_unfinished_files() removes it while this object
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

/// A file under construction: bytes go to a temporary file beside `path`. commit() puts it in place; without it, the
/// temporary file is removed. If `path` is a link, its target is replaced or created. Any number may be under
/// construction at once. Throws: InvalidArgument if the folder is missing or cannot be written to, if `path` exists and
/// is not a regular file, or if it is a circular link.
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
  std::optional<RemovedOnSignal> listed_;  // ends after the file is gone
};

/// Writes a text file whole or not at all.
void write_text_atomically(const std::filesystem::path& path, std::string_view content);

/// Removes the temporary file of every living AtomicFile, and every RemovedOnSignal. Async-signal-safe: for a SIGINT
/// handler that then exits.
void remove_unfinished_files() noexcept;

}  // namespace kvkeep::io
