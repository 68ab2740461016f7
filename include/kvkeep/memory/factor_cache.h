#pragma once
/// Blobs near the processor: the most recently used ones, within a budget. A thread may load them ahead of time; the
/// bytes that are read never depend on that.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kvkeep/memory/far_store.h"

namespace kvkeep {

struct FactorCacheOptions {
  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

  std::int64_t bytes = kUnlimited;  ///< exact cap on all that is near or on its way
  bool background = true;  ///< prefetch() loads in a thread that starts with the first request for a blob on disk;
                           ///< false: prefetch() does nothing
  /// Reads a blob on disk into size() bytes; default FarBlob::read. For tests. Any thread may call it, several at once
  /// for different blobs.
  std::function<void(const FarBlob& blob, std::byte* to)> load = {};

  /// Options that are not allowed, one sentence each with the field's name; empty if there are none.
  [[nodiscard]] std::vector<std::string> problems() const;
};

/// Thread-safe. Least recently used blobs leave first.
class FactorCache {
 public:
  using Options = FactorCacheOptions;
  /// Valid as long as it is held, even after the cache drops the blob, which then no longer counts. Aligned to 64
  /// bytes.
  using Bytes = std::shared_ptr<const std::byte>;

  struct Totals {
    std::int64_t hits = 0;         ///< get() of a blob that was near
    std::int64_t misses = 0;       ///< get() of a blob that was not, and that get() brought
    std::int64_t late = 0;         ///< get() that waited for a blob on its way. Each get() is one of the three
    std::int64_t prefetched = 0;   ///< blobs that prefetch() brought
    std::int64_t failed = 0;       ///< blobs that prefetch() could not read
    std::int64_t evicted = 0;      ///< dropped to make room
    std::int64_t bytes_moved = 0;  ///< brought near by either
  };

  /// Throws InvalidArgument with all of options.problems().
  explicit FactorCache(Options options = {});
  /// Waits at most for the one load of prefetch() that is under way. No other call may be under way.
  ~FactorCache();
  FactorCache(const FactorCache&) = delete;
  FactorCache& operator=(const FactorCache&) = delete;

  /// The blob's bytes, near. A blob in host memory is read in place, without a copy, but counts against the budget, and
  /// as moved if it was not near, as it would with an accelerator. A blob on disk is read and checked; callers that ask
  /// for the same blob meanwhile wait for it. A blob that is larger than the whole budget, or than what loads on their
  /// way leave of it, is returned but not kept. Throws DamagedData, and whatever else `load` throws. Cost if it is
  /// near: a lock and a table look-up. There are 64 locks without a limit, else one.
  [[nodiscard]] Bytes get(const FarBlobPtr& blob);

  /// Announces blobs that are wanted soon: those on disk are loaded in the background, in order, after those of earlier
  /// calls; returns at once. A blob that would exceed the budget together with those already waiting is skipped; later
  /// ones may fit. A blob that is near becomes the most recently used. A blob that nobody holds any more is skipped.
  /// Errors are not reported here: get() reads again and throws them.
  void prefetch(std::span<const FarBlobPtr> blobs);

  /// Drops blobs that will not be asked for again, since their sequence has left. Waits only if the one load of
  /// prefetch() under way is for one of them. Afterwards the cache holds none of them, so their bytes go back to the
  /// store with their last owner.
  void forget(std::span<const FarBlobPtr> blobs);

  /// Bytes near or on their way. Never above the budget.
  [[nodiscard]] std::int64_t bytes() const;
  [[nodiscard]] Totals totals() const;
  [[nodiscard]] const Options& options() const { return options_; }

 private:
  struct Entry;
  struct Shard;
  struct Queue;
  using Entries = std::list<Entry>;

  [[nodiscard]] Shard& shard_of(std::uint64_t id) const { return *shards_[id & (shards_.size() - 1)]; }
  [[nodiscard]] bool make_room(Shard& shard, std::int64_t bytes, Entries& dropped) const;
  Bytes bring(Shard& shard, std::unique_lock<std::mutex>& lock, const FarBlobPtr& blob, bool kept,
              Entries& dropped) const;
  [[nodiscard]] Bytes read(const FarBlob& blob) const;
  [[nodiscard]] bool touch(const FarBlob& blob);
  void bring_ahead(const FarBlobPtr& blob);
  void serve();

  const Options options_;
  std::vector<std::unique_ptr<Shard>>
      shards_;  ///< a power of two; one if the budget has a limit, so that all blobs have one order
  std::unique_ptr<Queue> queue_;
};

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/factor_cache-inl.h"
#endif
