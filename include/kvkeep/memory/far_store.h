#pragma once
/// Bytes far from the processor: blobs that are written once and read by any number of threads. They are stored in host
/// memory under an exact cap; blobs that do not fit there go into a file.

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
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"

namespace kvkeep {

/// Stored bytes that are lost: their file was truncated, changed, or cannot be read. The message names their owner.
class DamagedData : public Error {
 public:
  using Error::Error;
};

/// A 64-bit checksum. Bytes that differ only within one aligned 8-byte word never have the same; others do by chance,
/// about once in 2^64. The same in every process and build of one byte order. No protection against forgery. Cost: one
/// pass at about the speed of memory.
[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> bytes);

/// Owner of a blob's bytes; -1 or an empty range of tokens: unknown. Only error messages print it.
struct FarLabel {
  std::int64_t sequence = -1;
  std::int32_t layer = -1;
  std::int32_t head = -1;  ///< KV head; -1: all of them
  std::int32_t span = -1;
  std::int32_t begin = 0, end = 0;  ///< tokens begin to end - 1
};

/// "span 17 (tokens 210 to 273) of sequence 3, layer 2, head 0"; "a blob" if nothing is known.
std::ostream& operator<<(std::ostream& out, const FarLabel& label);

struct FarStoreOptions {
  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

  std::int64_t host_bytes =
      kUnlimited;  ///< cap on the host memory taken from the system, and so on the blobs in it, alignment included
  std::filesystem::path file = {};  ///< takes blobs that do not fit there; empty: no file
  std::int64_t file_bytes =
      kUnlimited;  ///< cap on the blobs in the file, alignment included; its first line of 64 bytes does not count
  std::int64_t slab_bytes = 1 << 20;  ///< taken from the system at a time. A blob above a quarter of it that finds no
                                      ///< room gets a slab of its own size

  /// Source of slabs, for memory that an accelerator reads (pinned). allocate: memory aligned to 64 bytes, or null if
  /// there is none. release: takes it back, with the same number of bytes. Any thread may call them, one at a time. If
  /// neither is set: system pages.
  std::function<std::byte*(std::int64_t bytes)> allocate = {};
  std::function<void(std::byte* slab, std::int64_t bytes)> release = {};

  /// Options that are not allowed, one sentence each with the field's name; empty if there are none.
  [[nodiscard]] std::vector<std::string> problems() const;
};

class FarBlob;
class FarRoom;
/// The last holder returns the bytes to the store, which lives as long as its blobs.
using FarBlobPtr = std::shared_ptr<const FarBlob>;

/// Thread-safe.
class FarStore : public std::enable_shared_from_this<FarStore> {
 public:
  /// Creates the file, for this user alone, and removes it with the store. The path may be new, or name an empty file,
  /// or one that a store left behind when its process was killed: that one is overwritten. Throws InvalidArgument with
  /// all of options.problems(), and for a file that cannot be created, holds anything else, is used by another store,
  /// or is a link.
  [[nodiscard]] static std::shared_ptr<FarStore> make(FarStoreOptions options = {});

  ~FarStore();
  FarStore(const FarStore&) = delete;
  FarStore& operator=(const FarStore&) = delete;

  /// Copies the bytes into host memory if they fit there in one piece, else into the file. 0 bytes are allowed and take
  /// no room. Throws StateError if neither has room, with the size asked for, the free bytes and the caps. Throws
  /// DeviceError if the file cannot be written (disk full) or the system has no memory for a slab. Nothing changes in
  /// either case. Cost: one checksum and one copy; finding room is logarithmic in the number of free pieces, and only
  /// that holds a lock.
  [[nodiscard]] FarBlobPtr put(std::span<const std::byte> bytes, const FarLabel& label = {});

  /// Host memory of `bytes`, 1 or more, that its holder writes, such as a device. Its content is undefined at first,
  /// and there is no checksum. Throws StateError if host memory has no room in one piece, DeviceError as put(). Cost:
  /// finding room.
  [[nodiscard]] std::unique_ptr<FarRoom> room(std::int64_t bytes, const FarLabel& label = {});

  /// Bytes of blobs and rooms in host memory, now and at their peak, each rounded up to 64.
  [[nodiscard]] std::int64_t host_bytes() const;
  [[nodiscard]] std::int64_t host_peak_bytes() const;
  /// Bytes taken from the system for them, in slabs. Never above options().host_bytes. An empty slab goes back at once.
  [[nodiscard]] std::int64_t slab_bytes() const;
  [[nodiscard]] std::int64_t slab_peak_bytes() const;
  /// Bytes of blobs in the file, each blob rounded up to 64. The file itself may be longer if blobs in between are
  /// gone; their room is reused.
  [[nodiscard]] std::int64_t file_bytes() const;
  [[nodiscard]] std::int64_t file_peak_bytes() const;
  /// Number of blobs that somebody holds.
  [[nodiscard]] std::int64_t blobs() const { return blobs_.load(std::memory_order_relaxed); }

  [[nodiscard]] const FarStoreOptions& options() const { return options_; }

 private:
  friend class FarBlob;
  friend class FarRoom;
  struct Rooms;
  /// Where a blob is stored.
  struct Piece {
    std::byte* at = nullptr;  ///< in host memory; null: in the file, or nowhere
    std::int64_t offset = 0;  ///< in the file, or among slabs
    std::int64_t bytes = 0;   ///< rounded up; 0: nowhere
  };

  explicit FarStore(FarStoreOptions options);
  [[nodiscard]] Piece reserve(std::int64_t bytes, const FarLabel& label, bool in_file);
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
  /// From 1 on; no two blobs of a process ever have the same, whatever their store.
  [[nodiscard]] std::uint64_t id() const { return id_; }
  [[nodiscard]] const FarLabel& label() const { return label_; }
  [[nodiscard]] const FarStore& store() const { return *store_; }

  [[nodiscard]] bool on_disk() const { return place_ == nullptr; }
  /// Where the bytes can be read in place, aligned to 64 bytes; null: on disk. A blob of 0 bytes is in host memory.
  [[nodiscard]] const std::byte* in_host() const { return place_; }

  /// Copies size() bytes and checks those of a file against the checksum: throws DamagedData with label, offset and
  /// file, and leaves `to` undefined.
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

/// Host memory of a store, from FarStore::room(); the store lives as long as it.
class FarRoom {
 public:
  ~FarRoom();
  FarRoom(const FarRoom&) = delete;
  FarRoom& operator=(const FarRoom&) = delete;

  /// Aligned to 64 bytes.
  [[nodiscard]] std::byte* bytes() const { return piece_.at; }
  [[nodiscard]] std::int64_t size() const { return piece_.bytes; }

 private:
  friend class FarStore;
  FarRoom(std::shared_ptr<FarStore> store, FarStore::Piece piece) : store_(std::move(store)), piece_(piece) {}
  std::shared_ptr<FarStore> store_;
  FarStore::Piece piece_;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/far_store-inl.h"
#endif
