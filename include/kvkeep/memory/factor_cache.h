#pragma once
/// Blobs near the processor: those that were asked for last, within a budget. A thread may bring them before they are
/// asked for; what is read never depends on that.

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

  std::int64_t bytes = kUnlimited;  ///< of all that is near or on its way, exact
  bool background = true;  ///< prefetch() loads, in a thread that starts when first one on disk is asked for; false:
                           ///< prefetch() does nothing
  /// Reads a blob that lies on disk into size() bytes; FarBlob::read unless given. For tests. Called by any thread, by
  /// several at once for different blobs.
  std::function<void(const FarBlob& blob, std::byte* to)> load = {};

  /// What is not allowed, one sentence each with the field's name; empty: nothing.
  [[nodiscard]] std::vector<std::string> problems() const;
};

/// Thread safe. Least recently used blobs leave first.
class FactorCache {
 public:
  using Options = FactorCacheOptions;
  /// Valid as long as it is held, whatever the cache drops meanwhile; what is still held then is not counted. Begins at
  /// a multiple of 64.
  using Bytes = std::shared_ptr<const std::byte>;

  struct Totals {
    std::int64_t hits = 0;    ///< get() of what was near
    std::int64_t misses = 0;  ///< get() of what was not, and that get() brought
    std::int64_t late = 0;  ///< get() of what was on its way, and that get() waited for. Each get() is one of the three
    std::int64_t prefetched = 0;   ///< brought by prefetch()
    std::int64_t failed = 0;       ///< prefetch() that could not be read
    std::int64_t evicted = 0;      ///< dropped for want of room
    std::int64_t bytes_moved = 0;  ///< brought near, by whomever
  };

  /// Throws InvalidArgument with all of options.problems().
  explicit FactorCache(Options options = {});
  /// Waits for no more than the one load of prefetch() that is under way. No other call may be.
  ~FactorCache();
  FactorCache(const FactorCache&) = delete;
  FactorCache& operator=(const FactorCache&) = delete;

  /// The blob's bytes, near. One in host memory is read in place, without a copy, yet counts against the budget, and as
  /// moved when it was not near, as it would with an accelerator. One on disk is read and checked; callers that ask for
  /// the same one meanwhile wait for it. What is larger than the whole budget, or finds it taken by what is on its way,
  /// is handed out and not kept. Throws DamagedData, and what else `load` throws. Cost where it is near: a lock, a look
  /// into a table. Without a limit the lock is one of 64, else there is one.
  [[nodiscard]] Bytes get(const FarBlobPtr& blob);

  /// These are wanted soon: those on disk are brought in the background, the first first, behind those of earlier
  /// calls; returns at once. What would exceed the budget beside those that already wait is left; what follows it may
  /// fit. A blob that is near becomes the latest used. One that nobody holds any more is passed over. Errors are
  /// nobody's here: get() reads again, and throws them.
  void prefetch(std::span<const FarBlobPtr> blobs);

  /// These will not be asked for again: their sequence has left. Drops them; they are waited for only where the one
  /// load of prefetch() under way is among them. The cache then holds none of them, so that their bytes go back to the
  /// store with their last owner.
  void forget(std::span<const FarBlobPtr> blobs);

  /// Near, or on its way. Not above the budget.
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
      shards_;  ///< a power of two; one where the budget has a limit: what is near has one order then
  std::unique_ptr<Queue> queue_;
};

}  // namespace kvkeep
