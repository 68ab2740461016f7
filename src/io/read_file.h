#pragma once
/// Whole files that others wrote, copied into memory.

#include <filesystem>
#include <string>
#include <string_view>

namespace kvkeep::io {

/// The bytes of a file or pipe, at most 1 GiB. Throws InvalidArgument, with a message that begins with `operation`, if
/// it cannot be read or is longer.
[[nodiscard]] std::string read_file(const std::filesystem::path& path, std::string_view operation);

}  // namespace kvkeep::io
