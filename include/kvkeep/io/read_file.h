#pragma once
/// Whole files that others wrote, copied into memory.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace kvkeep::io {

/// What a program reads: a file or pipe, or also a folder.
enum class Source : std::uint8_t { file, file_or_folder };

/// Throws InvalidArgument, with a message that begins with `operation`, if there is nothing of this name, if it is a
/// folder and must not be, or if it cannot be opened.
void require_readable(const std::filesystem::path& path, std::string_view operation, Source source = Source::file);

/// The bytes of a file or pipe, at most 1 GiB. Throws InvalidArgument, with a message that begins with `operation`, if
/// it cannot be read or is longer.
[[nodiscard]] std::string read_file(const std::filesystem::path& path, std::string_view operation);

}  // namespace kvkeep::io
