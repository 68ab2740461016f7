#include "read_file.h"

#include <array>
#include <fstream>
#include <system_error>

#include "kvkeep/core/error.h"

namespace kvkeep::io {

std::string read_file(const std::filesystem::path& path, std::string_view operation) {
  constexpr std::size_t kMost = std::size_t{1} << 30, kPiece = std::size_t{1} << 16;
  std::error_code none;
  std::ifstream in(path, std::ios::binary);
  const bool opened = in.is_open() && !std::filesystem::is_directory(path, none);
  KVKEEP_REQUIRE(opened, operation, ": cannot read '", path.string(), "'; allowed an existing file that can be read");
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
