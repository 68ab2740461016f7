// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Page-locked host memory in slabs, under an exact cap: taking one is a long call into the driver.

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>

namespace kvkeep::cuda {

/// For one thread.
class PageLocked {
 public:
  class Room;

  /// `most`: cap on the bytes of slabs.
  explicit PageLocked(std::int64_t most) : most_(most) {}
  ~PageLocked();
  PageLocked(const PageLocked&) = delete;
  PageLocked& operator=(const PageLocked&) = delete;

  /// Of `bytes`, 1 or more, rounded up to 64, in one piece. Throws StateError if the cap leaves no such piece,
  /// DeviceError if the system has no memory. Cost: a look at every slab with so much room, and at the rooms in it.
  [[nodiscard]] std::unique_ptr<Room> room(std::int64_t bytes);
  /// Bytes of rooms.
  [[nodiscard]] std::int64_t bytes() const;

 private:
  struct Slab {
    std::byte* at;
    std::int64_t bytes;
    std::int64_t used = 0;
    std::map<std::int64_t, std::int64_t> rooms = {};  ///< bytes by offset
  };
  using Slabs = std::list<Slab>;

  void grow(std::int64_t bytes);
  void free_empty() noexcept;

  std::int64_t most_;
  Slabs slabs_;
};

/// Goes back when it ends. `PageLocked` must outlive it.
class PageLocked::Room {
 public:
  Room(Slab& slab, std::int64_t offset, std::int64_t bytes);
  ~Room();
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  /// At a multiple of 64 bytes into memory that is aligned as the driver aligns it.
  [[nodiscard]] std::byte* bytes() const { return slab_.at + offset_; }
  [[nodiscard]] std::int64_t size() const { return slab_.rooms.at(offset_); }

 private:
  Slab& slab_;
  std::int64_t offset_;
};

}  // namespace kvkeep::cuda
