#pragma once
// Bodies of far_store.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <ostream>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/core/problems.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/memory/far_store.h"

namespace kvkeep {
namespace far_store_detail {

namespace fs = std::filesystem;

inline constexpr std::int64_t kAlignment = 64, kPage = 4096;
alignas(kAlignment) inline constexpr std::byte kNothing{};
#ifdef MAP_POPULATE
inline constexpr int kPopulate = MAP_POPULATE;
#else
constexpr int kPopulate = 0;
#endif

constexpr std::int64_t round_up(std::int64_t bytes, std::int64_t to) { return (bytes + to - 1) / to * to; }
constexpr std::int64_t round_down(std::int64_t bytes, std::int64_t to) { return bytes / to * to; }

inline std::string reason() { return std::system_category().message(errno); }

struct Extent {
  std::int64_t offset = 0, bytes = 0;
};

/// Free extents of a line of bytes. Neighbours are merged.
class FreeExtents {
 public:
  /// Takes `bytes` from the first of the smallest extents that hold them. Allocates nothing.
  std::optional<std::int64_t> take(std::int64_t bytes) {
    const auto found = by_size_.lower_bound({bytes, 0});
    if (found == by_size_.end()) return std::nullopt;
    const Extent piece{found->second, found->first};
    if (piece.bytes == bytes)
      remove(piece);
    else
      become(piece, {piece.offset + bytes, piece.bytes - bytes});
    return piece.offset;
  }

  /// Returns the extent that this one is now part of. Allocates only if it has no neighbour.
  Extent add(Extent piece) {
    const auto after = by_place_.lower_bound(piece.offset);
    Extent next{}, before{};
    if (after != by_place_.end() && after->first == piece.offset + piece.bytes) next = {after->first, after->second};
    if (after != by_place_.begin())
      if (const auto [offset, bytes] = *std::prev(after); offset + bytes == piece.offset) before = {offset, bytes};
    if (before.bytes > 0) piece = {before.offset, before.bytes + piece.bytes};
    piece.bytes += next.bytes;
    if (before.bytes > 0 && next.bytes > 0) remove(next);
    if (before.bytes + next.bytes > 0) return become(before.bytes > 0 ? before : next, piece);
    const auto here = by_place_.emplace(piece.offset, piece.bytes).first;
    try {
      by_size_.emplace(piece.bytes, piece.offset);
    } catch (...) {
      by_place_.erase(here);
      throw;
    }
    return piece;
  }

  void remove(Extent piece) {
    by_place_.erase(piece.offset);
    by_size_.erase({piece.bytes, piece.offset});
  }

  [[nodiscard]] std::int64_t largest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

 private:
  Extent become(Extent old, Extent piece) {
    auto place = by_place_.extract(old.offset);
    place.key() = piece.offset, place.mapped() = piece.bytes;
    by_place_.insert(std::move(place));
    auto size = by_size_.extract({old.bytes, old.offset});
    size.value() = {piece.bytes, piece.offset};
    by_size_.insert(std::move(size));
    return piece;
  }

  std::map<std::int64_t, std::int64_t> by_place_;            ///< bytes by offset
  std::set<std::pair<std::int64_t, std::int64_t>> by_size_;  ///< bytes, offset
};

/// Bytes handed out, now and at the peak.
struct Tally {
  std::int64_t bytes = 0, peak = 0;

  void add(std::int64_t more) { peak = std::max(peak, bytes += more); }
};

/// Slabs of host memory. Each has a range of one number line to itself: offsets are never reused, with a gap between
/// ranges, so extents of two slabs are never neighbours.
class Arena {
 public:
  explicit Arena(const FarStoreOptions& options) : options_(options) {}

  /// Null if there is no room under the cap.
  std::optional<std::pair<std::int64_t, std::byte*>> take(std::int64_t bytes) {
    std::optional<std::int64_t> offset = free_.take(bytes);
    if (!offset && grow(bytes)) offset = free_.take(bytes);
    if (!offset) return std::nullopt;
    handed.add(bytes);
    const auto& [base, slab] = *slab_of(*offset);
    return std::pair(*offset, slab.at + (*offset - base));
  }

  void give_back(Extent piece) {
    handed.bytes -= piece.bytes;
    const Extent free = free_.add(piece);
    const auto slab = slab_of(free.offset);
    if (free.bytes < slab->second.bytes) return;
    free_.remove(free);
    slabs.bytes -= slab->second.bytes;
    release(slab->second.at, slab->second.bytes);
    slabs_.erase(slab);
  }

  /// Largest extent that take() would find.
  [[nodiscard]] std::int64_t largest() const { return std::max(free_.largest(), left()); }

  Tally handed, slabs;

 private:
  struct Slab {
    std::byte* at;
    std::int64_t bytes;
  };
  using Slabs = std::map<std::int64_t, Slab>;  ///< by the begin of their range

  [[nodiscard]] std::int64_t left() const { return round_down(options_.host_bytes - slabs.bytes, kAlignment); }
  [[nodiscard]] Slabs::iterator slab_of(std::int64_t offset) { return std::prev(slabs_.upper_bound(offset)); }

  bool grow(std::int64_t bytes) {
    const std::int64_t wanted = bytes > options_.slab_bytes / 4 ? round_up(bytes, kPage) : options_.slab_bytes,
                       size = std::min(wanted, left());
    if (size < bytes) return false;
    std::byte* const at = allocate(size);
    KVKEEP_REQUIRE_AS(DeviceError, at != nullptr, "far store: the system has no memory for a slab of ", size,
                      " bytes; ", slabs.bytes, " are taken, host_bytes allows ", options_.host_bytes);
    try {
      slabs_.emplace(end_, Slab{at, size});
      free_.add({end_, size});
    } catch (...) {
      slabs_.erase(end_);
      release(at, size);
      throw;
    }
    end_ += size + kAlignment;
    slabs.add(size);
    return true;
  }

  [[nodiscard]] std::byte* allocate(std::int64_t bytes) const {
    if (options_.allocate) return options_.allocate(bytes);
    // A slab that many blobs will fill gets all its pages at once, which takes a fraction of the time of faulting them
    // in one by one. Larger slabs would hold the lock for too long.
    const int at_once = bytes <= options_.slab_bytes ? kPopulate : 0;
    void* const at = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | at_once, -1, 0);
    return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
  }

  void release(std::byte* slab, std::int64_t bytes) const {
    if (options_.release) return options_.release(slab, bytes);
    ::munmap(slab, static_cast<std::size_t>(bytes));
  }

  const FarStoreOptions& options_;
  Slabs slabs_;
  FreeExtents free_;
  std::int64_t end_ = 0;
};

/// A file of a store, locked while it is open. Its first line says what it is.
class SpillFile {
 public:
  explicit SpillFile(const FarStoreOptions& options) : path_(from_root(options.file)), cap_(options.file_bytes) {
    open();
    try {
      begin();
    } catch (...) {
      ::close(descriptor_);
      throw;
    }
    removed_.emplace(path_);
  }

  ~SpillFile() {
    if (is_at_its_path()) ::unlink(path_.c_str());
    ::close(descriptor_);
  }
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  std::optional<std::int64_t> take(std::int64_t bytes) {
    std::optional<std::int64_t> offset = free_.take(bytes);
    if (!offset && bytes <= cap_ - end_) offset = std::exchange(end_, end_ + bytes);
    if (offset) handed.add(bytes);
    return offset;
  }

  /// The file ends with its last blob.
  void give_back(Extent piece) {
    handed.bytes -= piece.bytes;
    const Extent free = free_.add(piece);
    if (free.offset + free.bytes < end_) return;
    free_.remove(free);
    end_ = free.offset;
    if (::ftruncate(descriptor_, kLine + end_) != 0) return;  // the room is still reused
  }

  [[nodiscard]] std::int64_t largest() const { return std::max(free_.largest(), round_down(cap_ - end_, kAlignment)); }

  void write(std::span<const std::byte> bytes, std::int64_t offset, const FarLabel& label) const {
    for (std::size_t done = 0; done < bytes.size();) {
      const ssize_t more = ::pwrite(descriptor_, bytes.data() + done, bytes.size() - done,
                                    kLine + offset + static_cast<std::int64_t>(done));
      if (more < 0 && errno == EINTR) continue;
      KVKEEP_REQUIRE_AS(DeviceError, more > 0, "far store: writing ", bytes.size(), " bytes of ", label, " to '",
                        path_.string(), "' failed (", reason(), "); allowed a disk with room for them");
      done += static_cast<std::size_t>(more);
    }
  }

  void read(std::span<std::byte> bytes, std::int64_t offset, const FarBlob& blob) const {
    const auto damaged = [&](const auto&... what) {
      refuse<DamagedData>("read far blob: ", blob.label(), " cannot be read: ", bytes.size(), " bytes at offset ",
                          kLine + offset, " of '", path_.string(), "' ", what...);
    };
    for (std::size_t done = 0; done < bytes.size();) {
      const ssize_t more = ::pread(descriptor_, bytes.data() + done, bytes.size() - done,
                                   kLine + offset + static_cast<std::int64_t>(done));
      if (more < 0 && errno == EINTR) continue;
      if (more < 0) damaged("failed (", reason(), ")");
      if (more == 0) damaged("end after ", done, "; was the file truncated?");
      done += static_cast<std::size_t>(more);
    }
    if (checksum(bytes) != blob.checksum())
      damaged("have a different checksum than when they were written; was the file changed?");
  }

  Tally handed;

 private:
  static constexpr std::int64_t kLine = 64;
  static constexpr std::string_view kFirstLine = "kvkeep far store: spilled blobs, of no use without their process";
  static_assert(kFirstLine.size() == kLine);

  /// The working directory may change while the store lives.
  static fs::path from_root(const fs::path& file) {
    std::error_code none;
    fs::path path = fs::absolute(file, none);
    KVKEEP_REQUIRE(!none, "far store: '", file.string(), "' is relative to a folder that is gone (", none.message(),
                   "); allowed a path from /");
    return path;
  }

  /// Creates the file or opens the existing one, and locks it. If a store that ends removes it in between, tries again.
  void open() {
    for (int tries = 0; tries < 100; ++tries) {
      descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
      KVKEEP_REQUIRE(descriptor_ >= 0, "far store: cannot create file '", path_.string(), "' (", reason(),
                     "); allowed a file name that is not a link, in an existing folder that can be written to");
      if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
        const bool used = errno == EWOULDBLOCK;
        const std::string why = reason();
        ::close(descriptor_);
        refuse("far store: cannot lock file '", path_.string(), "' (", used ? "another store uses it" : why,
               "); allowed one file per store");
      }
      if (is_at_its_path()) return;
      ::close(descriptor_);
    }
    refuse("far store: file '", path_.string(), "' is removed by others again and again; allowed one file per store");
  }

  void begin() const {
    struct stat status{};
    std::array<char, kLine> first{};
    KVKEEP_REQUIRE(::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode), "far store: '", path_.string(),
                   "' is not a regular file");
    const bool ours = status.st_size >= kLine && ::pread(descriptor_, first.data(), first.size(), 0) == kLine &&
                      std::string_view(first.data(), first.size()) == kFirstLine;
    KVKEEP_REQUIRE(
        status.st_size == 0 || ours, "far store: file '", path_.string(),
        "' exists and is not a far store's; allowed a new name, an empty file, or one that a far store left");
    const bool alone = ::fchmod(descriptor_, 0600) == 0;  // an existing file may be readable by anybody
    KVKEEP_REQUIRE(alone, "far store: file '", path_.string(), "' cannot be restricted to this user (", reason(),
                   "); allowed a file of this user");
    const bool begun =
        ::ftruncate(descriptor_, 0) == 0 && ::pwrite(descriptor_, kFirstLine.data(), kFirstLine.size(), 0) == kLine;
    if (begun) return;
    const std::string why = reason();
    if (!ours) ::unlink(path_.c_str());
    refuse<DeviceError>("far store: cannot write file '", path_.string(), "' (", why, ")");
  }

  [[nodiscard]] bool is_at_its_path() const {
    struct stat here{}, there{};
    return ::fstat(descriptor_, &here) == 0 && ::lstat(path_.c_str(), &there) == 0 && here.st_dev == there.st_dev &&
           here.st_ino == there.st_ino;
  }

  const fs::path path_;
  const std::int64_t cap_;
  std::optional<io::RemovedOnSignal> removed_;
  int descriptor_ = -1;
  std::int64_t end_ = 0;  ///< end of the last blob; offsets count from the end of the first line
  FreeExtents free_;      ///< none touches end_
};

}  // namespace far_store_detail

// Eight sums side by side, each a chain of steps that lose no information: a difference in one word stays a difference
// in every later sum.
KVKEEP_INLINE std::uint64_t checksum(std::span<const std::byte> bytes) {
  constexpr std::size_t kLanes = 8, kBlock = kLanes * sizeof(std::uint64_t);
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 / the golden ratio
  const auto step = [](std::uint64_t sum, std::uint64_t word) { return std::rotl((sum ^ word) * kOdd, 31); };
  std::array<std::uint64_t, kLanes> sums{};
  for (std::size_t i = 0; i < kLanes; ++i) sums[i] = (i + 1) * kOdd;
  const auto add = [&](const std::byte* block) {
    std::array<std::uint64_t, kLanes> words;
    std::memcpy(words.data(), block, kBlock);
    for (std::size_t i = 0; i < kLanes; ++i) sums[i] = step(sums[i], words[i]);
  };
  std::size_t done = 0;
  for (; done + kBlock <= bytes.size(); done += kBlock) add(bytes.data() + done);
  if (done < bytes.size()) {
    std::array<std::byte, kBlock> last{};
    std::memcpy(last.data(), bytes.data() + done, bytes.size() - done);
    add(last.data());
  }
  std::uint64_t all = bytes.size();
  for (const std::uint64_t sum : sums) {
    all = step(all, sum);
    all ^= all >> 29;
  }
  return all * kOdd;
}

KVKEEP_INLINE std::ostream& operator<<(std::ostream& out, const FarLabel& label) {
  if (label.span >= 0)
    out << "span " << label.span;
  else
    out << "a blob";
  if (label.end > label.begin) out << " (tokens " << label.begin << " to " << label.end - 1 << ")";
  const char* between = " of ";
  const auto add = [&](const char* name, std::int64_t number) {
    if (number < 0) return;
    out << std::exchange(between, ", ") << name << number;
  };
  add("sequence ", label.sequence);
  add("layer ", label.layer);
  add("head ", label.head);
  return out;
}

KVKEEP_INLINE std::vector<std::string> FarStoreOptions::problems() const {
  std::vector<std::string> found;
  if (host_bytes < 0) found.push_back(text("host_bytes: ", host_bytes, "; allowed 0 or more"));
  if (file_bytes < 0) found.push_back(text("file_bytes: ", file_bytes, "; allowed 0 or more"));
  if (file.empty() && file_bytes != kUnlimited)
    found.push_back(text("file_bytes: ", file_bytes, " without a file; allowed only with `file`"));
  if (slab_bytes < far_store_detail::kPage || slab_bytes % far_store_detail::kPage != 0)
    found.push_back(text("slab_bytes: ", slab_bytes, "; allowed multiples of ", far_store_detail::kPage));
  if ((allocate == nullptr) != (release == nullptr))
    found.emplace_back("allocate, release: one without the other; allowed both or neither");
  return found;
}

struct FarStore::Rooms {
  explicit Rooms(const FarStoreOptions& options) : arena(options) {
    if (!options.file.empty()) file.emplace(options);
  }

  std::mutex mutex;
  far_store_detail::Arena arena;
  std::optional<far_store_detail::SpillFile> file;
};

class FarBlob::Key {};

KVKEEP_INLINE FarStore::FarStore(FarStoreOptions options) : options_(std::move(options)) {
  require_no_problems("far store", options_.problems());
  rooms_ = std::make_unique<Rooms>(options_);
}

KVKEEP_INLINE FarStore::~FarStore() = default;

KVKEEP_INLINE std::shared_ptr<FarStore> FarStore::make(FarStoreOptions options) {
  return std::shared_ptr<FarStore>(new FarStore(std::move(options)));
}

KVKEEP_INLINE FarBlobPtr FarStore::put(std::span<const std::byte> bytes, const FarLabel& label) {
  // The blob first: it gives back what it holds if a later step throws.
  const auto blob = std::make_shared<FarBlob>(FarBlob::Key(), shared_from_this(), bytes, label);
  if (bytes.empty()) {
    blob->place_ = &far_store_detail::kNothing;
    return blob;
  }
  blob->piece_ = reserve(blob->size_, label, true);
  blob->place_ = blob->piece_.at;
  if (blob->on_disk())
    rooms_->file->write(bytes, blob->piece_.offset, label);
  else
    std::memcpy(blob->piece_.at, bytes.data(), bytes.size());
  return blob;
}

KVKEEP_INLINE std::unique_ptr<FarRoom> FarStore::room(std::int64_t bytes, const FarLabel& label) {
  std::unique_ptr<FarRoom> room(new FarRoom(shared_from_this(), {}));  // it gives back what it holds
  room->piece_ = reserve(bytes, label, false);
  return room;
}

KVKEEP_INLINE FarRoom::~FarRoom() {
  if (piece_.bytes > 0) store_->give_back(piece_);
}

KVKEEP_INLINE FarStore::Piece FarStore::reserve(std::int64_t size, const FarLabel& label, bool in_file) {
  const std::int64_t bytes = far_store_detail::round_up(size, far_store_detail::kAlignment);
  const std::scoped_lock lock(rooms_->mutex);
  if (const auto found = rooms_->arena.take(bytes)) return {found->second, found->first, bytes};
  if (in_file && rooms_->file)
    if (const auto offset = rooms_->file->take(bytes)) return {nullptr, *offset, bytes};
  const auto room = [](std::int64_t cap, std::int64_t used, std::int64_t largest) {
    return text(cap - used, " of ", cap, " bytes free, at most ", largest, " in one piece");
  };
  refuse<StateError>("far store: no room for ", label, "; given ", size, " bytes; host memory has ",
                     room(options_.host_bytes, rooms_->arena.handed.bytes, rooms_->arena.largest()), "; ",
                     in_file && rooms_->file
                         ? text("file '", options_.file.string(), "' has ",
                                room(options_.file_bytes, rooms_->file->handed.bytes, rooms_->file->largest()))
                         : "there is no file");
}

KVKEEP_INLINE void FarStore::give_back(const Piece& piece) noexcept {
  const std::scoped_lock lock(rooms_->mutex);
  const far_store_detail::Extent extent{piece.offset, piece.bytes};
  try {
    if (piece.at != nullptr)
      rooms_->arena.give_back(extent);
    else
      rooms_->file->give_back(extent);
  } catch (const std::bad_alloc&) {  // no memory to record that the room is free: it is lost until the store ends
  }
}

namespace far_store_detail {

template <class Of>
std::int64_t under(std::mutex& mutex, Of of) {
  const std::scoped_lock lock(mutex);
  return of();
}

}  // namespace far_store_detail

KVKEEP_INLINE std::int64_t FarStore::host_bytes() const {
  return far_store_detail::under(rooms_->mutex, [&] { return rooms_->arena.handed.bytes; });
}
KVKEEP_INLINE std::int64_t FarStore::host_peak_bytes() const {
  return far_store_detail::under(rooms_->mutex, [&] { return rooms_->arena.handed.peak; });
}
KVKEEP_INLINE std::int64_t FarStore::slab_bytes() const {
  return far_store_detail::under(rooms_->mutex, [&] { return rooms_->arena.slabs.bytes; });
}
KVKEEP_INLINE std::int64_t FarStore::slab_peak_bytes() const {
  return far_store_detail::under(rooms_->mutex, [&] { return rooms_->arena.slabs.peak; });
}
KVKEEP_INLINE std::int64_t FarStore::file_bytes() const {
  return far_store_detail::under(rooms_->mutex, [&] { return rooms_->file ? rooms_->file->handed.bytes : 0; });
}
KVKEEP_INLINE std::int64_t FarStore::file_peak_bytes() const {
  return far_store_detail::under(rooms_->mutex, [&] { return rooms_->file ? rooms_->file->handed.peak : 0; });
}

namespace far_store_detail {

inline std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace far_store_detail

KVKEEP_INLINE FarBlob::FarBlob(const Key&, std::shared_ptr<FarStore> store, std::span<const std::byte> bytes,
                               const FarLabel& label)
    : store_(std::move(store)),
      size_(static_cast<std::int64_t>(bytes.size())),
      checksum_(kvkeep::checksum(bytes)),
      id_(far_store_detail::next_id()),
      label_(label) {
  store_->blobs_.fetch_add(1, std::memory_order_relaxed);
}

KVKEEP_INLINE FarBlob::~FarBlob() {
  if (piece_.bytes > 0) store_->give_back(piece_);
  store_->blobs_.fetch_sub(1, std::memory_order_relaxed);
}

KVKEEP_INLINE void FarBlob::read(std::byte* to) const {
  if (on_disk())
    store_->rooms_->file->read({to, static_cast<std::size_t>(size_)}, piece_.offset, *this);
  else if (size_ > 0)
    std::memcpy(to, place_, static_cast<std::size_t>(size_));
}

}  // namespace kvkeep
