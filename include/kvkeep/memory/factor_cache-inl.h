#pragma once
// Bodies of factor_cache.h: compiled by src/memory, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <new>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/core/problems.h"
#include "kvkeep/memory/factor_cache.h"
#include "kvkeep/simd/aligned.h"

namespace kvkeep {
namespace factor_cache_detail {

inline constexpr std::size_t kShards = 64;

/// A blob's bytes while they are being loaded: other readers wait for them here.
struct Load {
  bool done = false;
  FactorCache::Bytes bytes;  ///< null if the load failed
};

struct Wish {
  std::uint64_t id;
  std::int64_t bytes;
  std::weak_ptr<const FarBlob> blob;
};

}  // namespace factor_cache_detail

struct FactorCache::Entry {
  std::uint64_t id;
  std::int64_t size;
  bool kept = true;                                      ///< counts towards the size, and stays once loaded
  bool forgotten = false;                                ///< while it was being loaded
  Bytes bytes = {};                                      ///< null: read in place, or being loaded
  std::shared_ptr<factor_cache_detail::Load> load = {};  ///< while it is being loaded
};

struct alignas(64) FactorCache::Shard {
  std::mutex mutex;
  std::condition_variable loaded;
  Entries recent;  ///< near, most recently used first
  Entries under_way;
  std::unordered_map<std::uint64_t, Entries::iterator> by_id;
  std::int64_t bytes = 0, under_way_bytes = 0;
  Totals totals;

  void touch(Entries::iterator entry) { recent.splice(recent.begin(), recent, entry); }

  /// There is room already. An allocation that fails changes nothing.
  Entries::iterator enter(Entry entry) {
    Entries mine;
    mine.push_front(std::move(entry));
    const auto here = mine.begin();
    by_id.emplace(here->id, here);
    if (here->kept) bytes += here->size;
    if (here->kept && here->load) under_way_bytes += here->size;
    Entries& where = here->load ? under_way : recent;
    where.splice(where.begin(), mine);
    return here;
  }

  /// Takes the result of a load, null if it failed, and wakes those who wait for it.
  void arrived(Entries::iterator entry, const Bytes& what) {
    const std::shared_ptr<factor_cache_detail::Load> load = std::move(entry->load);
    load->done = true;
    load->bytes = what;
    loaded.notify_all();
    if (entry->kept) under_way_bytes -= entry->size;
    if (what) totals.bytes_moved += entry->size;
    if (what && entry->kept && !entry->forgotten) {
      entry->bytes = what;
      recent.splice(recent.begin(), under_way, entry);
      return;
    }
    if (entry->kept) bytes -= entry->size;
    by_id.erase(entry->id);
    under_way.erase(entry);
  }
};

/// Requests of prefetch().
struct FactorCache::Queue {
  std::mutex mutex;
  std::condition_variable asked, served;
  std::deque<factor_cache_detail::Wish> wishes;
  std::unordered_set<std::uint64_t> ids;  ///< of wishes
  std::int64_t bytes = 0;                 ///< of wishes
  std::uint64_t under_way = 0;            ///< id of the blob that the thread works on; 0: none
  bool ending = false;
  std::thread thread;
};

KVKEEP_INLINE std::vector<std::string> FactorCacheOptions::problems() const {
  std::vector<std::string> found;
  if (bytes < 0) found.push_back(text("bytes: ", bytes, "; allowed 0 or more"));
  return found;
}

KVKEEP_INLINE FactorCache::FactorCache(Options options)
    : options_(std::move(options)), queue_(std::make_unique<Queue>()) {
  require_no_problems("factor cache", options_.problems());
  shards_.resize(options_.bytes == Options::kUnlimited ? factor_cache_detail::kShards : 1);
  for (auto& shard : shards_) shard = std::make_unique<Shard>();
}

KVKEEP_INLINE FactorCache::~FactorCache() {
  {
    const std::scoped_lock lock(queue_->mutex);
    queue_->ending = true;
  }
  queue_->asked.notify_all();
  if (queue_->thread.joinable()) queue_->thread.join();
}

KVKEEP_INLINE FactorCache::Bytes FactorCache::get(const FarBlobPtr& blob) {
  KVKEEP_REQUIRE(blob != nullptr, "factor cache: get of a null blob; allowed blobs that FarStore::put returned");
  Shard& shard = shard_of(blob->id());
  Entries dropped;  // freed after the lock is released
  std::unique_lock lock(shard.mutex);
  bool waited = false;
  for (auto found = shard.by_id.find(blob->id()); found != shard.by_id.end(); found = shard.by_id.find(blob->id())) {
    const std::shared_ptr<factor_cache_detail::Load> load = found->second->load;
    if (!load) {
      shard.touch(found->second);
      if (!waited) ++shard.totals.hits;
      return blob->on_disk() ? found->second->bytes : Bytes(blob, blob->in_host());
    }
    if (!std::exchange(waited, true)) ++shard.totals.late;
    shard.loaded.wait(lock, [&] { return load->done; });
    if (load->bytes) return load->bytes;
  }
  if (!waited) ++shard.totals.misses;
  const bool kept = make_room(shard, blob->size(), dropped);
  if (blob->on_disk()) return bring(shard, lock, blob, kept, dropped);
  if (kept) shard.enter({.id = blob->id(), .size = blob->size()});
  shard.totals.bytes_moved += blob->size();
  return {blob, blob->in_host()};
}

/// True if `bytes` fit beside the entries that cannot leave; evicted entries then go to `dropped`.
KVKEEP_INLINE bool FactorCache::make_room(Shard& shard, std::int64_t bytes, Entries& dropped) const {
  if (bytes > options_.bytes - shard.under_way_bytes) return false;
  while (shard.bytes > options_.bytes - bytes) {
    const auto oldest = std::prev(shard.recent.end());
    shard.by_id.erase(oldest->id);
    shard.bytes -= oldest->size;
    dropped.splice(dropped.begin(), shard.recent, oldest);
    ++shard.totals.evicted;
  }
  return true;
}

/// Loads a blob that is on disk, neither near nor being loaded. Meanwhile releases the lock and the dropped entries.
KVKEEP_INLINE FactorCache::Bytes FactorCache::bring(Shard& shard, std::unique_lock<std::mutex>& lock,
                                                    const FarBlobPtr& blob, bool kept, Entries& dropped) const {
  const auto entry = shard.enter(
      {.id = blob->id(), .size = blob->size(), .kept = kept, .load = std::make_shared<factor_cache_detail::Load>()});
  lock.unlock();
  Bytes bytes;
  try {
    dropped.clear();
    bytes = read(*blob);
  } catch (...) {
    lock.lock();
    shard.arrived(entry, nullptr);
    throw;
  }
  lock.lock();
  shard.arrived(entry, bytes);
  return bytes;
}

/// A copy of a blob.
KVKEEP_INLINE FactorCache::Bytes FactorCache::read(const FarBlob& blob) const {
  const auto free = [](std::byte* at) { ::operator delete(at, cpu::kLine); };
  const std::shared_ptr<std::byte> to(
      static_cast<std::byte*>(::operator new(static_cast<std::size_t>(blob.size()), cpu::kLine)), free);
  if (options_.load)
    options_.load(blob, to.get());
  else
    blob.read(to.get());
  return to;
}

KVKEEP_INLINE void FactorCache::prefetch(std::span<const FarBlobPtr> blobs) {
  for (const FarBlobPtr& blob : blobs)
    KVKEEP_REQUIRE(blob != nullptr, "factor cache: prefetch of a null blob; allowed blobs that FarStore::put returned");
  if (!options_.background) return;
  const std::scoped_lock lock(queue_->mutex);
  std::int64_t room = options_.bytes - queue_->bytes;
  for (const FarBlobPtr& blob : blobs) {
    if (queue_->ids.contains(blob->id()) || blob->size() > room) continue;
    if (!touch(*blob)) {
      if (!blob->on_disk()) continue;
      if (!queue_->thread.joinable()) try {
          queue_->thread = std::thread([this] { serve(); });
        } catch (const std::system_error&) {
          return;  // the system has no thread left: blobs are loaded when they are requested
        }
      queue_->wishes.push_back({blob->id(), blob->size(), blob});
      queue_->ids.insert(blob->id());
      queue_->bytes += blob->size();
    }
    room -= blob->size();
  }
  queue_->asked.notify_one();
}

/// True if a blob is near, which makes it the most recently used, or being loaded.
KVKEEP_INLINE bool FactorCache::touch(const FarBlob& blob) {
  Shard& shard = shard_of(blob.id());
  const std::scoped_lock lock(shard.mutex);
  const auto found = shard.by_id.find(blob.id());
  if (found == shard.by_id.end()) return false;
  if (!found->second->load) shard.touch(found->second);
  return true;
}

/// The thread of prefetch().
KVKEEP_INLINE void FactorCache::serve() {
  std::unique_lock lock(queue_->mutex);
  for (;;) {
    queue_->asked.wait(lock, [&] { return queue_->ending || !queue_->wishes.empty(); });
    if (queue_->ending) return;
    const factor_cache_detail::Wish wish = std::move(queue_->wishes.front());
    queue_->wishes.pop_front();
    queue_->ids.erase(wish.id);
    queue_->bytes -= wish.bytes;
    queue_->under_way = wish.id;
    lock.unlock();
    if (const FarBlobPtr blob = wish.blob.lock()) bring_ahead(blob);
    lock.lock();
    queue_->under_way = 0;
    queue_->served.notify_all();
  }
}

KVKEEP_INLINE void FactorCache::bring_ahead(const FarBlobPtr& blob) {
  Shard& shard = shard_of(blob->id());
  Entries dropped;
  std::unique_lock lock(shard.mutex);
  if (shard.by_id.contains(blob->id()) || !make_room(shard, blob->size(), dropped)) return;
  try {
    bring(shard, lock, blob, true, dropped);
    ++shard.totals.prefetched;
  } catch (...) {
    ++shard.totals.failed;
  }
}

KVKEEP_INLINE void FactorCache::forget(std::span<const FarBlobPtr> blobs) {
  std::unordered_set<std::uint64_t> ids;
  for (const FarBlobPtr& blob : blobs)
    if (blob) ids.insert(blob->id());
  {
    std::unique_lock lock(queue_->mutex);
    std::erase_if(queue_->wishes, [&](const factor_cache_detail::Wish& wish) {
      if (!ids.contains(wish.id)) return false;
      queue_->ids.erase(wish.id);
      queue_->bytes -= wish.bytes;
      return true;
    });
    queue_->served.wait(lock, [&] { return !ids.contains(queue_->under_way); });
  }
  for (const std::uint64_t id : ids) {
    Shard& shard = shard_of(id);
    Entries dropped;
    const std::scoped_lock lock(shard.mutex);
    const auto found = shard.by_id.find(id);
    if (found == shard.by_id.end()) continue;
    const auto entry = found->second;
    if (entry->load) {
      entry->forgotten = true;
      continue;
    }
    shard.bytes -= entry->size;
    shard.by_id.erase(found);
    dropped.splice(dropped.begin(), shard.recent, entry);
  }
}

KVKEEP_INLINE std::int64_t FactorCache::bytes() const {
  std::int64_t sum = 0;
  for (const auto& shard : shards_) {
    const std::scoped_lock lock(shard->mutex);
    sum += shard->bytes;
  }
  return sum;
}

KVKEEP_INLINE FactorCache::Totals FactorCache::totals() const {
  Totals sum;
  for (const auto& shard : shards_) {
    const std::scoped_lock lock(shard->mutex);
    for (const auto field : {&Totals::hits, &Totals::misses, &Totals::late, &Totals::prefetched, &Totals::failed,
                             &Totals::evicted, &Totals::bytes_moved})
      sum.*field += shard->totals.*field;
  }
  return sum;
}

}  // namespace kvkeep
