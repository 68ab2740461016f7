// What is read is what was put, whatever comes when; the budget holds at every moment; nobody waits longer than for one
// load.

#include "kvkeep/memory/factor_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <list>
#include <mutex>
#include <thread>

#include "far_blobs.h"

namespace kvkeep::factor_cache_test {
namespace {

using namespace testing;
using Bytes = FactorCache::Bytes;

/// Blobs with bytes that anybody can make again, all in one store.
struct Blobs {
  SpillFolder folder;
  std::shared_ptr<FarStore> store;
  std::vector<FarBlobPtr> all;
  std::vector<Data> data;

  explicit Blobs(bool disk, const std::vector<std::size_t>& sizes = {}) {
    FarStoreOptions options;
    if (disk) options.host_bytes = 0, options.file = folder.file();
    store = FarStore::make(options);
    for (const std::size_t size : sizes) add(size);
  }
  void add(std::size_t size) {
    data.push_back(random_bytes(data.size() + 1, size));
    all.push_back(store->put(data.back(), {.sequence = static_cast<std::int64_t>(data.size()) - 1}));
  }
  const FarBlobPtr& operator[](std::size_t i) const { return all[i]; }
  [[nodiscard]] bool same(std::size_t i, const Bytes& bytes) const {
    return bytes != nullptr && (data[i].empty() || std::memcmp(bytes.get(), data[i].data(), data[i].size()) == 0);
  }
};

/// A door that loads wait at.
class Door {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  void open() {
    const std::scoped_lock lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  /// Returns once so many loads have come to the door.
  void await(int loads) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ >= loads; });
  }
  int came() {
    const std::scoped_lock lock(mutex_);
    return waiting_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int waiting_ = 0;
};

void eventually(auto&& true_at_last) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!true_at_last()) {
    ASSERT_LT(std::chrono::steady_clock::now(), until) << "nothing happens";
    std::this_thread::yield();
  }
}

TEST(FactorCache, ReadsHostMemoryInPlaceAndCountsItAsAnAcceleratorWould) {
  const Blobs blobs(false, {100, 200, 0});
  FactorCache cache;
  for (int round = 0; round < 3; ++round)
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(cache.get(blobs[i]).get(), blobs[i]->in_host());
  EXPECT_EQ(cache.bytes(), 300);
  const FactorCache::Totals totals = cache.totals();
  EXPECT_EQ(totals.misses, 3);
  EXPECT_EQ(totals.hits, 6);
  EXPECT_EQ(totals.bytes_moved, 300);
  EXPECT_EQ(totals.late + totals.evicted + totals.prefetched + totals.failed, 0);
}

TEST(FactorCache, ReadsTheDiskOnce) {
  const Blobs blobs(true, {100, 65, 1 << 20});
  FactorCache cache;
  for (int round = 0; round < 3; ++round)
    for (std::size_t i = 0; i < 3; ++i) {
      const Bytes bytes = cache.get(blobs[i]);
      EXPECT_TRUE(blobs.same(i, bytes));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes.get()) % 64, 0U);
    }
  EXPECT_EQ(cache.totals().misses, 3);
  EXPECT_EQ(cache.totals().hits, 6);
  EXPECT_EQ(cache.totals().bytes_moved, 165 + (1 << 20));
  EXPECT_EQ(cache.bytes(), 165 + (1 << 20));
}

TEST(FactorCache, DropsWhatWasNotAskedForTheLongest) {
  for (const bool disk : {false, true}) {
    const Blobs blobs(disk, {100, 100, 100, 100, 150});
    FactorCache cache({.bytes = 300});
    const auto hits = [&](std::size_t i) {
      const std::int64_t before = cache.totals().hits;
      EXPECT_TRUE(blobs.same(i, cache.get(blobs[i])));
      return cache.totals().hits > before;
    };
    for (const std::size_t i : {0, 1, 2}) EXPECT_FALSE(hits(i));
    EXPECT_TRUE(hits(0));   // 0 2 1
    EXPECT_FALSE(hits(3));  // 3 0 2, 1 left
    EXPECT_TRUE(hits(2));   // 2 3 0
    EXPECT_TRUE(hits(0));   // 0 2 3
    EXPECT_FALSE(hits(1));  // 1 0 2, 3 left
    EXPECT_FALSE(hits(4));  // 4 1, 2 and 0 left
    EXPECT_TRUE(hits(1));
    EXPECT_FALSE(hits(0));
    EXPECT_EQ(cache.totals().evicted, 5) << "the last get drops 4";
    EXPECT_EQ(cache.bytes(), 200);
  }
}

TEST(FactorCache, HandsOutWhatIsLargerThanTheBudgetAndKeepsTheRest) {
  for (const bool disk : {false, true}) {
    const Blobs blobs(disk, {100, 100, 201});
    FactorCache cache({.bytes = 200});
    for (const std::size_t i : {0, 1, 2, 2, 0, 1}) EXPECT_TRUE(blobs.same(i, cache.get(blobs[i])));
    EXPECT_EQ(cache.totals().hits, 2);
    EXPECT_EQ(cache.totals().misses, 4);
    EXPECT_EQ(cache.totals().evicted, 0);
    EXPECT_EQ(cache.totals().bytes_moved, 602) << "moved each time";
    EXPECT_EQ(cache.bytes(), 200);
    FactorCache none({.bytes = 0});
    EXPECT_TRUE(blobs.same(2, none.get(blobs[2])));
    EXPECT_EQ(none.bytes(), 0);
  }
}

TEST(FactorCache, KeepsItsBudgetAndTheOrderOfAPlainList) {
  for (const std::uint64_t seed : {1, 2, 3, 4}) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Blobs blobs(seed % 2 == 0);
    for (int i = 0; i < 40; ++i) blobs.add(random() % 12 == 0 ? random() % 3000 : random() % 400);
    const auto budget = static_cast<std::int64_t>(500 + random() % 2000);
    FactorCache cache({.bytes = budget});
    std::list<std::size_t> model;  // latest first
    std::int64_t bytes = 0, hits = 0, evicted = 0;
    for (int step = 0; step < 4000; ++step) {
      const std::size_t i = random() % 40;
      ASSERT_TRUE(blobs.same(i, cache.get(blobs[i])));
      const auto size = blobs[i]->size();
      const auto found = std::find(model.begin(), model.end(), i);
      if (found != model.end()) {
        ++hits;
        model.splice(model.begin(), model, found);
      } else if (size <= budget) {
        for (; bytes + size > budget; model.pop_back(), ++evicted) bytes -= blobs[model.back()]->size();
        model.push_front(i);
        bytes += size;
      }
      ASSERT_EQ(cache.bytes(), bytes);
      ASSERT_LE(cache.bytes(), budget);
      if (random() % 100 == 0 && !model.empty()) {
        cache.forget({&blobs[model.front()], 1});
        bytes -= blobs[model.front()]->size();
        model.pop_front();
      }
    }
    EXPECT_EQ(cache.totals().hits, hits);
    EXPECT_EQ(cache.totals().evicted, evicted);
    EXPECT_EQ(cache.totals().misses, 4000 - hits);
    EXPECT_GT(evicted, 100);
  }
}

TEST(FactorCache, BytesOutliveEverythingElse) {
  for (const bool disk : {false, true}) {
    Bytes held, evicted, forgotten;
    Blobs blobs(disk, {100, 100, 100});
    {
      FactorCache cache({.bytes = 200});
      evicted = cache.get(blobs[0]), forgotten = cache.get(blobs[1]), held = cache.get(blobs[2]);
      cache.forget({&blobs[1], 1});
      EXPECT_EQ(cache.totals().evicted, 1);
    }
    blobs.all.clear();
    blobs.store = nullptr;
    EXPECT_TRUE(blobs.same(0, evicted) && blobs.same(1, forgotten) && blobs.same(2, held));
  }
}

TEST(FactorCache, HoldsNoBlob) {
  for (const bool disk : {false, true}) {
    Blobs blobs(disk, {100, 100, 100});
    FactorCache cache;
    for (const FarBlobPtr& blob : blobs.all) (void)cache.get(blob);
    cache.prefetch(blobs.all);
    eventually([&] {  // the thread may still look at them
      blobs.all.clear();
      return blobs.store->blobs() == 0;
    });
    EXPECT_EQ(blobs.store->host_bytes() + blobs.store->file_bytes(), 0);
  }
}

TEST(FactorCache, BringsWhatIsWantedSoonFromTheDisk) {
  const Blobs blobs(true, {100, 200, 300}), host(false, {50});
  FactorCache cache;
  cache.prefetch(host.all);
  cache.prefetch(blobs.all);
  cache.prefetch(blobs.all);
  eventually([&] { return cache.totals().prefetched == 3; });
  EXPECT_EQ(cache.bytes(), 600) << "what lies in host memory is not brought ahead";
  for (const std::size_t i : {0, 1, 2}) EXPECT_TRUE(blobs.same(i, cache.get(blobs[i])));
  EXPECT_EQ(cache.totals().hits, 3);
  EXPECT_EQ(cache.totals().misses + cache.totals().late, 0);
  EXPECT_EQ(cache.totals().bytes_moved, 600) << "once each";
}

TEST(FactorCache, DoesNothingAheadWithoutItsThread) {
  const Blobs blobs(true, {100});
  FactorCache cache({.background = false});
  cache.prefetch(blobs.all);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(cache.bytes(), 0);
  EXPECT_TRUE(blobs.same(0, cache.get(blobs[0])));
  EXPECT_EQ(cache.totals().misses, 1);
}

TEST(FactorCache, LeavesWhatExceedsTheBudgetInTheOrderOfTheCall) {
  const Blobs blobs(true, {100, 150, 400, 90, 60, 20});
  Door door;
  std::vector<std::uint64_t> order;
  FactorCache cache({.bytes = 300, .load = [&](const FarBlob& blob, std::byte* to) {
                       door.pass();
                       order.push_back(blob.id());
                       blob.read(to);
                     }});
  cache.prefetch({});
  cache.prefetch({&blobs[4], 1});
  door.await(1);              // 4 is on its way
  cache.prefetch(blobs.all);  // 0, 1, then 2 and 3 do not fit; 4 is on its way but no longer fits either; 20 fits
  cache.prefetch(blobs.all);  // what waits is not asked for twice
  door.open();
  eventually([&] { return cache.totals().prefetched == 4; });
  EXPECT_EQ(order, (std::vector<std::uint64_t>{blobs[4]->id(), blobs[0]->id(), blobs[1]->id(), blobs[5]->id()}));
  EXPECT_LE(cache.bytes(), 300);
  EXPECT_EQ(cache.bytes(), 270) << "0, 1 and 5; 4 had to leave";
  EXPECT_EQ(cache.totals().evicted, 1);
}

TEST(FactorCache, TakesRoomOnceForWhatIsWantedTwice) {
  const Blobs blobs(true, {10, 100, 100});
  Door door;
  FactorCache cache({.bytes = 300, .load = [&](const FarBlob& blob, std::byte* to) {
                       door.pass();
                       blob.read(to);
                     }});
  cache.prefetch({&blobs[0], 1});
  door.await(1);
  for (int i = 0; i < 5; ++i) cache.prefetch({&blobs[1], 1});
  cache.prefetch({&blobs[2], 1});
  door.open();
  eventually([&] { return cache.totals().prefetched == 3; });
  EXPECT_EQ(door.came(), 3);
}

TEST(FactorCache, WhatIsNearAndWantedStaysForWhatIsWantedAfterIt) {
  const Blobs blobs(true, {100, 100, 100, 100});
  FactorCache cache({.bytes = 300});
  for (const std::size_t i : {0, 1, 2}) (void)cache.get(blobs[i]);
  const std::vector<FarBlobPtr> wanted{blobs[0], blobs[3]};  // 0 was the oldest
  cache.prefetch(wanted);
  eventually([&] { return cache.totals().prefetched == 1; });
  (void)cache.get(blobs[0]);
  EXPECT_EQ(cache.totals().hits, 1);
  (void)cache.get(blobs[1]);
  EXPECT_EQ(cache.totals().misses, 4) << "1 left for 3";
}

TEST(FactorCache, GetWaitsForWhatIsOnItsWay) {
  const Blobs blobs(true, {4096});
  Door door;
  std::atomic<int> loads{0};
  FactorCache cache({.load = [&](const FarBlob& blob, std::byte* to) {
    ++loads;
    door.pass();
    blob.read(to);
  }});
  cache.prefetch(blobs.all);
  door.await(1);
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      if (blobs.same(0, cache.get(blobs[0]))) ++right;
    });
  eventually([&] { return cache.totals().late == 3; });
  EXPECT_EQ(right, 0);
  EXPECT_EQ(cache.bytes(), 4096) << "counted from its start";
  door.open();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 3);
  EXPECT_EQ(loads, 1);
  EXPECT_EQ(cache.totals().misses + cache.totals().hits, 0);
}

TEST(FactorCache, LoadsOnceWhatSeveralThreadsAskFor) {
  const Blobs blobs(true, {4096});
  for (const std::int64_t budget : {std::int64_t{5000}, std::int64_t{100}}) {  // kept, and too large to be
    Door door;
    FactorCache cache({.bytes = budget, .load = [&](const FarBlob& blob, std::byte* to) {
                         door.pass();
                         blob.read(to);
                       }});
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&] {
        if (blobs.same(0, cache.get(blobs[0]))) ++right;
      });
    eventually([&] { return cache.totals().late == 3; });
    door.open();
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(right, 4);
    EXPECT_EQ(door.came(), 1);
    EXPECT_EQ(cache.totals().misses, 1);
    EXPECT_EQ(cache.bytes(), budget == 100 ? 0 : 4096);
  }
}

TEST(FactorCache, DoesNotKeepWhatFindsTheBudgetOnItsWay) {
  const Blobs blobs(true, {200, 200});
  Door door;
  FactorCache cache({.bytes = 300, .load = [&](const FarBlob& blob, std::byte* to) {
                       if (blob.label().sequence == 0) door.pass();
                       blob.read(to);
                     }});
  cache.prefetch({&blobs[0], 1});
  door.await(1);
  EXPECT_TRUE(blobs.same(1, cache.get(blobs[1])));
  EXPECT_EQ(cache.bytes(), 200);
  door.open();
  EXPECT_TRUE(blobs.same(0, cache.get(blobs[0])));
  EXPECT_EQ(cache.bytes(), 200);
}

TEST(FactorCache, ThrowsWhatIsDamagedWhetherItWasPrefetchedOrNot) {
  Blobs blobs(true, {1000, 1000});
  {
    std::fstream file(blobs.folder.file(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(64 + 500).put(static_cast<char>(~blobs.data[0][500]));
  }
  FactorCache cache;
  cache.prefetch(blobs.all);
  eventually([&] { return cache.totals().failed == 1 && cache.totals().prefetched == 1; });
  EXPECT_EQ(cache.bytes(), 1000);
  for (int i = 0; i < 2; ++i)
    expect_says(message_of<DamagedData>([&] { (void)cache.get(blobs[0]); }),
                {"a blob of sequence 0", "checksum", blobs.folder.file().string()});
  EXPECT_TRUE(blobs.same(1, cache.get(blobs[1])));
  FactorCache plain({.background = false});
  EXPECT_THROW((void)plain.get(blobs[0]), DamagedData);
  EXPECT_EQ(plain.bytes(), 0);
}

TEST(FactorCache, ReadsAgainWhatFailedForAnother) {
  const Blobs blobs(true, {1000});
  Door door;
  std::atomic<int> loads{0};
  FactorCache cache({.load = [&](const FarBlob& blob, std::byte* to) {
    if (++loads == 1) {
      door.pass();
      refuse<DamagedData>("this once");
    }
    blob.read(to);
  }});
  cache.prefetch(blobs.all);
  door.await(1);
  Bytes got;
  std::thread asks([&] { got = cache.get(blobs[0]); });
  eventually([&] { return cache.totals().late == 1; });
  door.open();
  asks.join();
  EXPECT_TRUE(blobs.same(0, got));
  EXPECT_EQ(cache.totals().failed, 1);
  EXPECT_EQ(cache.totals().misses, 0) << "it was late, and is counted once";
  EXPECT_EQ(loads, 2);
  EXPECT_EQ(cache.bytes(), 1000);
}

TEST(FactorCache, ForgetsASequenceInTheMiddleOfAPrefetch) {
  Blobs blobs(true, std::vector<std::size_t>(20, 512));
  Door door;
  FactorCache cache({.load = [&](const FarBlob& blob, std::byte* to) {
    door.pass();
    blob.read(to);
  }});
  cache.prefetch(blobs.all);
  door.await(1);
  const std::vector<FarBlobPtr> others{blobs.store->put(random_bytes(50, 77))};
  cache.forget({blobs.all.data() + 1, 19});  // at once: none of them was begun
  std::atomic<bool> left{false};
  std::thread leaves([&] {
    cache.forget(blobs.all);
    left = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(left) << "its bytes are being read";
  door.open();
  leaves.join();
  EXPECT_EQ(door.came(), 1) << "the others were never begun";
  EXPECT_EQ(cache.bytes(), 0);
  blobs.all.clear();
  EXPECT_EQ(blobs.store->file_bytes(), 128) << "the cache holds none of them";
  cache.prefetch(others);
  eventually([&] { return cache.bytes() == 77; });
}

TEST(FactorCache, ForgetsWithoutWaitingForTheLoadOfAnother) {
  const Blobs blobs(true, {512, 512, 512});
  Door door;
  FactorCache cache({.load = [&](const FarBlob& blob, std::byte* to) {
    if (blob.label().sequence == 0) door.pass();
    blob.read(to);
  }});
  (void)cache.get(blobs[2]);
  cache.prefetch({blobs.all.data(), 2});
  door.await(1);
  cache.forget({&blobs.all[1], 2});
  EXPECT_EQ(cache.bytes(), 512) << "of 0, which is on its way";
  door.open();
  eventually([&] { return cache.totals().prefetched == 1; });
  EXPECT_EQ(cache.totals().bytes_moved, 1024);
}

TEST(FactorCache, DoesNotKeepWhatIsForgottenWhileItIsAskedFor) {
  const Blobs blobs(true, {512});
  Door door;
  FactorCache cache({.load = [&](const FarBlob& blob, std::byte* to) {
    door.pass();
    blob.read(to);
  }});
  Bytes got;
  std::thread asks([&] { got = cache.get(blobs[0]); });
  door.await(1);
  cache.forget(blobs.all);
  door.open();
  asks.join();
  EXPECT_TRUE(blobs.same(0, got));
  EXPECT_EQ(cache.bytes(), 0);
}

TEST(FactorCache, EndsInTheMiddleOfAPrefetch) {
  const Blobs blobs(true, std::vector<std::size_t>(20, 512));
  Door door;
  std::atomic<bool> ended{false};
  auto cache = std::make_unique<FactorCache>(FactorCache::Options{.load = [&](const FarBlob& blob, std::byte* to) {
    door.pass();
    EXPECT_FALSE(ended);
    blob.read(to);
  }});
  cache->prefetch(blobs.all);
  door.await(1);
  std::thread ends([&] {
    cache = nullptr;
    ended = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(ended) << "the load under way writes into the cache's memory";
  door.open();
  ends.join();
  EXPECT_EQ(door.came(), 1);
}

TEST(FactorCache, PassesOverWhatNobodyHoldsAnyMore) {
  Blobs blobs(true, {512, 512});
  Door door;
  FactorCache cache({.load = [&](const FarBlob& blob, std::byte* to) {
    door.pass();
    blob.read(to);
  }});
  cache.prefetch(blobs.all);
  door.await(1);
  blobs.all[1] = nullptr;
  EXPECT_EQ(blobs.store->blobs(), 1) << "a wish holds nothing";
  door.open();
  const std::vector<FarBlobPtr> last{blobs.store->put(random_bytes(9, 100))};
  cache.prefetch(last);
  eventually([&] { return cache.totals().prefetched == 2; });
  EXPECT_EQ(door.came(), 2);
}

TEST(FactorCache, ReadsTheSameBytesForAThousandRoundsOfSlowLoadsAndThreads) {
  Blobs blobs(true);
  std::mt19937_64 sizes(1);
  for (int i = 0; i < 24; ++i) blobs.add(sizes() % 3000);
  const auto slow = [](const FarBlob& blob, std::byte* to) {
    blob.read(to);
    for (std::uint64_t i = blob.id() * 2654435761 % 8; i > 0; --i) std::this_thread::yield();
  };
  for (const std::int64_t budget : {std::int64_t{9000}, FactorCache::Options::kUnlimited}) {
    FactorCache cache({.bytes = budget, .load = slow});
    std::atomic<std::int64_t> wrong{0}, over{0};
    std::vector<std::thread> threads;
    constexpr int kThreads = 4, kRounds = 1000;
    for (std::uint64_t t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        std::mt19937_64 random(t);
        std::vector<std::pair<std::size_t, Bytes>> held;
        for (int round = 0; round < kRounds; ++round) {
          const std::size_t i = random() % 24;
          if (random() % 4 == 0) cache.prefetch({blobs.all.data() + random() % 20, 4});
          if (random() % 50 == 0) cache.forget({blobs.all.data() + random() % 20, 4});
          held.emplace_back(i, cache.get(blobs[i]));
          if (cache.bytes() > budget) ++over;
          if (held.size() > 5) held.erase(held.begin());
          for (const auto& [of, bytes] : held)
            if (!blobs.same(of, bytes)) ++wrong;
        }
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(over, 0);
    const FactorCache::Totals totals = cache.totals();
    EXPECT_EQ(totals.hits + totals.misses + totals.late, kThreads * kRounds);
    EXPECT_GT(totals.prefetched, 0);
    EXPECT_EQ(totals.failed, 0);
    cache.forget(blobs.all);
    EXPECT_EQ(cache.bytes(), 0) << "every load gave back what it took";
  }
}

TEST(FactorCache, StaysFlatWhileTenThousandSequencesComeAndGo) {
  const SpillFolder folder;
  const auto store = FarStore::make({.host_bytes = 1 << 16, .file = folder.file(), .slab_bytes = 1 << 14});
  FactorCache cache({.bytes = 1 << 15});
  std::mt19937_64 random(3);
  std::list<std::vector<FarBlobPtr>> sequences;
  for (std::uint64_t s = 0; s < 10000; ++s) {
    auto& blobs = sequences.emplace_back();
    for (std::uint64_t b = 0; b < 4; ++b) blobs.push_back(store->put(random_bytes(4 * s + b, 100 + random() % 900)));
    if (s % 8 == 0) cache.prefetch(blobs);
    for (const FarBlobPtr& blob : blobs)
      ASSERT_EQ(checksum({cache.get(blob).get(), static_cast<std::size_t>(blob->size())}), blob->checksum());
    ASSERT_LE(cache.bytes(), 1 << 15);
    if (sequences.size() > 40) {
      const auto leaves = std::next(sequences.begin(), static_cast<std::ptrdiff_t>(random() % sequences.size()));
      cache.forget(*leaves);
      sequences.erase(leaves);
    }
  }
  EXPECT_GT(store->file_peak_bytes(), 0);
  for (const auto& blobs : sequences) cache.forget(blobs);
  EXPECT_EQ(cache.bytes(), 0);
  sequences.clear();
  EXPECT_EQ(store->host_bytes() + store->slab_bytes() + store->file_bytes() + store->blobs(), 0);
}

TEST(FactorCache, RefusesWhatIsNotAllowed) {
  EXPECT_TRUE(FactorCacheOptions{}.problems().empty());
  expect_says(message_of<InvalidArgument>([] { FactorCache cache({.bytes = -1}); }), {"factor cache: bytes: -1"});
  FactorCache cache;
  EXPECT_THROW((void)cache.get(nullptr), InvalidArgument);
  EXPECT_THROW(cache.prefetch(std::vector<FarBlobPtr>(1)), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::factor_cache_test
