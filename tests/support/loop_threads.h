#pragma once
/// Threads of kvkeep's loops, for tests.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/core/parallel.h"

namespace kvkeep::testing {

/// While it lives, kvkeep's loops run in this many parts, each on a thread of its own; one: on the calling thread. A
/// loop within a part, or beside another loop, runs on its calling thread.
class LoopThreads {
 public:
  explicit LoopThreads(int count) : before_(detail::threads.load()), count_before_(count_.exchange(count)) {
    use_threads(count > 1 ? &kThreads : nullptr);
  }
  ~LoopThreads() {
    use_threads(before_);
    count_ = count_before_;
  }
  LoopThreads(const LoopThreads&) = delete;
  LoopThreads& operator=(const LoopThreads&) = delete;

 private:
  /// Threads that wait for work. Kept from loop to loop: to start one takes longer than most loops.
  class Others {
   public:
    ~Others() {
      {
        const std::scoped_lock lock(mutex_);
        over_ = true;
      }
      work_.notify_all();
      for (std::thread& thread : threads_) thread.join();
    }

    /// Calls part(0) on this thread and part(1) to part(parts - 1) on others; throws what a part threw.
    void run(std::int64_t parts, const std::function<void(std::int64_t)>& part) {
      while (std::ssize(threads_) < parts - 1) threads_.emplace_back([this] { serve(); });
      {
        const std::scoped_lock lock(mutex_);
        part_ = &part, next_ = 1, end_ = parts, left_ = parts, thrown_ = nullptr;
      }
      work_.notify_all();
      do_part(part, 0);
      std::unique_lock lock(mutex_);
      done_.wait(lock, [this] { return left_ == 0; });
      if (thrown_) std::rethrow_exception(thrown_);
    }

   private:
    void serve() {
      std::unique_lock lock(mutex_);
      while (true) {
        work_.wait(lock, [this] { return over_ || next_ < end_; });
        if (over_) return;
        const std::int64_t mine = next_++;
        const auto& part = *part_;
        lock.unlock();
        do_part(part, mine);
        lock.lock();
      }
    }
    void do_part(const std::function<void(std::int64_t)>& part, std::int64_t i) {
      std::exception_ptr thrown;
      try {
        part(i);
      } catch (...) {
        thrown = std::current_exception();
      }
      const std::scoped_lock lock(mutex_);
      if (thrown) thrown_ = thrown;
      if (--left_ == 0) done_.notify_one();
    }

    std::mutex mutex_;
    std::condition_variable work_, done_;
    const std::function<void(std::int64_t)>* part_ = nullptr;
    std::int64_t next_ = 0, end_ = 0, left_ = 0;
    std::exception_ptr thrown_;
    bool over_ = false;
    std::vector<std::thread> threads_;
  };

  static void run(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  void (*body)(void* context, std::int64_t begin, std::int64_t end), void* context) {
    static Others others;
    static std::atomic<bool> taken = false;
    const std::int64_t parts =
        std::clamp<std::int64_t>((end - begin) / std::max<std::int64_t>(grain, 1), 1, count_.load());
    if (parts == 1 || taken.exchange(true)) return body(context, begin, end);
    const auto part = [&](std::int64_t i) {
      body(context, begin + (end - begin) * i / parts, begin + (end - begin) * (i + 1) / parts);
    };
    try {
      others.run(parts, part);
    } catch (...) {
      taken = false;
      throw;
    }
    taken = false;
  }

  static constexpr Threads kThreads{run};
  static inline std::atomic<int> count_{1};
  const Threads* before_;
  int count_before_;
};

/// Loops call their body for every part once, for none if there is nothing to do, and throw what it throws.
inline void expect_every_part_once() {
  std::vector<int> seen(1000);
  parallel_for(0, 1000, 7, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
  });
  EXPECT_EQ(seen, std::vector<int>(1000, 1));
  parallel_for(5, 5, 1, [](std::int64_t, std::int64_t) { FAIL() << "there is nothing to do"; });
  EXPECT_THROW(parallel_for(0, 100, 1, [](std::int64_t, std::int64_t) { throw InvalidArgument("as thrown"); }),
               InvalidArgument);
}

}  // namespace kvkeep::testing
