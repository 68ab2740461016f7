// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Threads for engines that have no pool of their own.

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/parallel.h"

namespace kvkeep {

/// A number of threads that wait for loops, for one keeper or several:
///
///     kvkeep::ThreadPool pool(4);
///     kvkeep::Keeper keeper(model, policy, {.threads = pool.threads()});
///
/// A loop runs in equal parts, one of them on the calling thread. While one runs, a loop of another caller runs on its
/// own thread alone. Threads wait without spinning, so an idle pool costs nothing.
class ThreadPool {
 public:
  /// `count` threads, the calling one included. Throws InvalidArgument for fewer than 1, and what std::thread throws.
  explicit ThreadPool(std::int32_t count) {
    KVKEEP_REQUIRE(count >= 1, "thread pool: ", count, " threads; allowed 1 or more");
    try {
      while (std::ssize(others_) < count - 1) others_.emplace_back([this] { serve(); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~ThreadPool() { end(); }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] std::int32_t count() const { return static_cast<std::int32_t>(others_.size()) + 1; }

  /// For Provided::threads and UsingThreads. Refers to the pool, which must outlive its use.
  [[nodiscard]] Threads threads() {
    return {[](void* pool, std::int64_t begin, std::int64_t end, std::int64_t grain, Body body, void* context) {
              static_cast<ThreadPool*>(pool)->run({begin, end, body, context}, grain);
            },
            this};
  }

 private:
  using Body = void (*)(void* context, std::int64_t begin, std::int64_t end);
  struct Loop {
    std::int64_t begin = 0, end = 0;
    Body body = nullptr;
    void* context = nullptr;
    std::int64_t parts = 1;
  };

  void run(Loop loop, std::int64_t grain) {
    const std::int64_t numbers = loop.end - loop.begin;
    loop.parts = std::clamp<std::int64_t>(numbers / std::max<std::int64_t>(grain, 1), 1, count());
    std::unique_lock one_caller(callers_, std::try_to_lock);
    if (loop.parts == 1 || !one_caller) return loop.body(loop.context, loop.begin, loop.end);
    {
      const std::scoped_lock lock(mutex_);
      loop_ = loop, next_ = 1, left_ = loop.parts, thrown_ = nullptr;
    }
    work_.notify_all();
    do_part(loop, 0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
    if (thrown_) std::rethrow_exception(thrown_);
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return over_ || next_ < loop_.parts; });
      if (over_) return;
      const std::int64_t mine = next_++;
      const Loop loop = loop_;
      lock.unlock();
      do_part(loop, mine);
      lock.lock();
    }
  }

  void do_part(const Loop& loop, std::int64_t part) {
    const auto edge = [&](std::int64_t p) { return loop.begin + (loop.end - loop.begin) * p / loop.parts; };
    std::exception_ptr thrown;
    try {
      loop.body(loop.context, edge(part), edge(part + 1));
    } catch (...) {
      thrown = std::current_exception();
    }
    const std::scoped_lock lock(mutex_);
    if (thrown) thrown_ = thrown;
    if (--left_ == 0) done_.notify_one();
  }

  void end() {
    {
      const std::scoped_lock lock(mutex_);
      over_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : others_) thread.join();
  }

  std::mutex callers_;  ///< held by the loop that has the threads
  std::mutex mutex_;    ///< of all below
  std::condition_variable work_, done_;
  Loop loop_;
  std::int64_t next_ = 1, left_ = 0;  ///< the next part that nobody has, and parts that are not done
  std::exception_ptr thrown_;
  bool over_ = false;
  std::vector<std::thread> others_;
};

}  // namespace kvkeep
