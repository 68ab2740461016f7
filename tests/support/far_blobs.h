#pragma once
/// Bytes and files for the tests of far stores.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "kvkeep/memory/far_store.h"
#include "message_of.h"

namespace kvkeep::testing {

using Data = std::vector<std::byte>;

inline Data random_bytes(std::uint64_t seed, std::size_t size) {
  std::mt19937_64 random(seed);
  Data bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

inline Data read(const FarBlob& blob) {
  Data bytes(static_cast<std::size_t>(blob.size()), std::byte{0xee});
  blob.read(bytes.data());
  return bytes;
}

/// A folder that goes with everything in it.
class SpillFolder {
 public:
  SpillFolder() {
    static std::atomic<int> count{0};
    path_ = std::filesystem::temp_directory_path() / text("kvkeep_far_", ::getpid(), "_", count++);
    std::filesystem::create_directories(path_);
  }
  ~SpillFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  SpillFolder(const SpillFolder&) = delete;
  SpillFolder& operator=(const SpillFolder&) = delete;

  [[nodiscard]] std::filesystem::path file(const std::string& name = "far") const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline void expect_says(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << "'" << message << "' should say '" << part << "'";
}

}  // namespace kvkeep::testing
