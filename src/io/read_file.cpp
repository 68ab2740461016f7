// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/io/atomic_file.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <system_error>

#include "kvkeep/core/error.h"

namespace kvkeep::io {

void require_readable(const std::filesystem::path& path, std::string_view operation, Source source) {
  const char* const allowed =
      source == Source::file ? "; allowed a file that can be read" : "; allowed a file or a folder that can be read";
  KVKEEP_REQUIRE(!path.empty(), operation, ": the path is empty", allowed);
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  KVKEEP_REQUIRE(status.type() != std::filesystem::file_type::not_found, operation, ": there is no file '",
                 path.string(), "'", allowed);
  const bool folder = std::filesystem::is_directory(status);
  KVKEEP_REQUIRE(!folder || source == Source::file_or_folder, operation, ": '", path.string(), "' is a folder",
                 allowed);
  KVKEEP_REQUIRE(::access(path.c_str(), folder ? R_OK | X_OK : R_OK) == 0, operation, ": cannot open '", path.string(),
                 "' (", std::system_category().message(errno), ")", allowed);
}

std::string read_file(const std::filesystem::path& path, std::string_view operation) {
  constexpr std::size_t kMost = std::size_t{1} << 30, kPiece = std::size_t{1} << 16;
  require_readable(path, operation);
  std::ifstream in(path, std::ios::binary);
  KVKEEP_REQUIRE(in.is_open(), operation, ": cannot read '", path.string(),
                 "'; allowed an existing file that can be read");
  std::string content;
  std::array<char, kPiece> piece;
  do {
    in.read(piece.data(), piece.size());
    content.append(piece.data(), static_cast<std::size_t>(in.gcount()));
    KVKEEP_REQUIRE(content.size() <= kMost, operation, ": '", path.string(), "' has more than ", kMost,
                   " bytes; allowed at most that many");
  } while (in.good());
  KVKEEP_REQUIRE(!in.bad(), operation, ": reading '", path.string(), "' failed; allowed a file that can be read");
  return content;
}

}  // namespace kvkeep::io
