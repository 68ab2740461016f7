#pragma once
/// Parts of a caller's workspace. No LibTorch in here.

#include <cstddef>
#include <cstdint>

namespace kvkeep::cuda {

/// Hands out one part after the other, each aligned to 16 bytes. Where the workspace is null only its size is found.
class WorkspaceParts {
 public:
  explicit WorkspaceParts(void* workspace) : base_(static_cast<std::byte*>(workspace)) {}

  template <class T>
  [[nodiscard]] T* take(std::int64_t count) {
    std::byte* part = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (count * static_cast<std::int64_t>(sizeof(T)) + 15) / 16 * 16;
    return reinterpret_cast<T*>(part);
  }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::int64_t bytes_ = 0;
};

}  // namespace kvkeep::cuda
