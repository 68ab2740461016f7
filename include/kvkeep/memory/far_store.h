#pragma once
/// Bytes far from the processor: blobs that are written once and read by any number of threads. They lie in host memory
/// under an exact cap, and what does not fit there in a file.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvkeep/core/error.h"

namespace kvkeep {

/// Bytes that were stored and cannot be had any more: their file was truncated, changed, or fails to be read. The
/// message names whose they are.
class DamagedData : public Error {
 public:
  using Error::Error;
};

/// 64 bits that stand for some bytes. Bytes that differ from them inside one aligned word of 8 never have the same;
/// others by chance, about once in 2^64. The same in every process and build of one byte order. Not against forgery.
/// Cost: one pass at about the speed of memory.
[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> bytes);

/// Whose bytes a blob holds; -1 or an empty range of tokens: not told. Made into words by errors only.
struct FarLabel {
  std::int64_t sequence = -1;
  std::int32_t layer = -1;
  std::int32_t head = -1;  ///< KV head; -1: all of them
  std::int32_t span = -1;
  std::int32_t begin = 0, end = 0;  ///< tokens begin to end - 1
};

/// "span 17 (tokens 210 to 273) of sequence 3, layer 2, head 0"; "a blob" where nothing is told.
std::ostream& operator<<(std::ostream& out, const FarLabel& label);

struct FarStoreOptions {
  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

  std::int64_t host_bytes = kUnlimited;  ///< cap of the host memory that is taken from the system, and so of what is
                                         ///< handed out of it, alignment included
  std::filesystem::path file = {};       ///< what does not fit there goes into this file; empty: nowhere
  std::int64_t file_bytes =
      kUnlimited;  ///< cap of what lies in the file, alignment included; its first line of 64 bytes not counted
  std::int64_t slab_bytes = 1 << 20;  ///< taken from the system at a time. A blob above a quarter of it that finds no
                                      ///< room gets one of its own size

  /// Where slabs come from, for memory that an accelerator reads (pinned). allocate: memory that begins at a multiple
  /// of 64, or null where there is none. release: takes it back, with the same number of bytes. Called one at a time,
  /// by any thread. Neither: pages of the system.
  std::function<std::byte*(std::int64_t bytes)> allocate = {};
  std::function<void(std::byte* slab, std::int64_t bytes)> release = {};

  /// What is not allowed, one sentence each with the field's name; empty: nothing.
  [[nodiscard]] std::vector<std::string> problems() const;
};

class FarBlob;
/// The last holder gives the bytes back. A store lives as long as its blobs.
using FarBlobPtr = std::shared_ptr<const FarBlob>;

/// Thread safe.
class FarStore : public std::enable_shared_from_this<FarStore> {
 public:
  /// The file is made here, for this user alone, and removed with the store. Beside a new name the path may be that of
  /// an empty file, or of one that a store left when its process was killed: that is begun anew. Throws InvalidArgument
  /// with all of options.problems(), and for a file that cannot be made, that holds anything else, that another store
  /// uses, or that is a link.
  [[nodiscard]] static std::shared_ptr<FarStore> make(FarStoreOptions options = {});

  ~FarStore();
  FarStore(const FarStore&) = delete;
  FarStore& operator=(const FarStore&) = delete;

  /// Copies the bytes: into host memory where they fit in one piece, else into the file. 0 bytes are allowed and take
  /// nothing. Throws StateError where neither has room: what was asked, what is free, the caps. Throws DeviceError
  /// where the file cannot be written (disk full) or the system has no memory for a slab. Nothing has changed then.
  /// Cost: one checksum and one copy; finding room is logarithmic in the number of free pieces. Only that holds a lock.
  [[nodiscard]] FarBlobPtr put(std::span<const std::byte> bytes, const FarLabel& label = {});

  /// Handed out of host memory, now and at most ever: blobs, rounded up to 64 bytes each.
  [[nodiscard]] std::int64_t host_bytes() const;
  [[nodiscard]] std::int64_t host_peak_bytes() const;
  /// Taken from the system for that: slabs. Not above options().host_bytes. A slab that is empty goes back at once.
  [[nodiscard]] std::int64_t slab_bytes() const;
  [[nodiscard]] std::int64_t slab_peak_bytes() const;
  /// Blobs in the file, rounded up to 64 bytes each. The file itself may be longer where others between them are gone;
  /// their room is used again.
  [[nodiscard]] std::int64_t file_bytes() const;
  [[nodiscard]] std::int64_t file_peak_bytes() const;
  /// Blobs that somebody holds.
  [[nodiscard]] std::int64_t blobs() const { return blobs_.load(std::memory_order_relaxed); }

  [[nodiscard]] const FarStoreOptions& options() const { return options_; }

 private:
  friend class FarBlob;
  struct Rooms;
  /// Where a blob lies.
  struct Piece {
    std::byte* at = nullptr;  ///< in host memory; null: in the file, or nowhere
    std::int64_t offset = 0;  ///< in the file, or among slabs
    std::int64_t bytes = 0;   ///< rounded up; 0: nowhere
  };

  explicit FarStore(FarStoreOptions options);
  [[nodiscard]] Piece reserve(std::int64_t bytes, const FarLabel& label);
  void give_back(const Piece& piece) noexcept;
  void write(const FarBlob& blob, std::span<const std::byte> bytes);
  void read(const FarBlob& blob, std::byte* to) const;

  const FarStoreOptions options_;
  std::unique_ptr<Rooms> rooms_;
  std::atomic<std::int64_t> blobs_{0};
};

/// Bytes that never change. Made by FarStore::put.
class FarBlob {
 public:
  class Key;
  FarBlob(const Key&, std::shared_ptr<FarStore> store, std::span<const std::byte> bytes, const FarLabel& label);
  ~FarBlob();
  FarBlob(const FarBlob&) = delete;
  FarBlob& operator=(const FarBlob&) = delete;

  [[nodiscard]] std::int64_t size() const { return size_; }
  [[nodiscard]] std::uint64_t checksum() const { return checksum_; }
  /// From 1 on; no two blobs of a process have the same, whatever their store, ever.
  [[nodiscard]] std::uint64_t id() const { return id_; }
  [[nodiscard]] const FarLabel& label() const { return label_; }
  [[nodiscard]] const FarStore& store() const { return *store_; }

  [[nodiscard]] bool on_disk() const { return place_ == nullptr; }
  /// Where the bytes can be read as they are, from a multiple of 64 on; null: on disk. A blob of 0 bytes is in host
  /// memory.
  [[nodiscard]] const std::byte* in_host() const { return place_; }

  /// Copies size() bytes. Those of a file are held against the checksum: throws DamagedData with label, offset and
  /// file; `to` holds anything then.
  void read(std::byte* to) const;

 private:
  friend class FarStore;
  std::shared_ptr<FarStore> store_;
  FarStore::Piece piece_;
  const std::byte* place_ = nullptr;
  std::int64_t size_;
  std::uint64_t checksum_, id_;
  FarLabel label_;
};

}  // namespace kvkeep
