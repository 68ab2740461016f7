#pragma once
/// Threads of kvkeep's loops, for tests.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kvkeep/core/parallel.h"

namespace kvkeep::testing {

/// While it lives, kvkeep's loops run in this many parts, each on a thread of its own; one: on the calling thread.
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
  static void run(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  void (*body)(void* context, std::int64_t begin, std::int64_t end), void* context) {
    static thread_local bool inside = false;
    const std::int64_t parts =
        inside ? 1 : std::clamp<std::int64_t>((end - begin) / std::max<std::int64_t>(grain, 1), 1, count_);
    std::exception_ptr thrown;
    std::mutex one_at_a_time;
    const auto part = [&](std::int64_t i) {
      const bool outer = std::exchange(inside, true);
      try {
        body(context, begin + (end - begin) * i / parts, begin + (end - begin) * (i + 1) / parts);
      } catch (...) {
        const std::scoped_lock lock(one_at_a_time);
        if (!thrown) thrown = std::current_exception();
      }
      inside = outer;
    };
    std::vector<std::thread> others;
    for (std::int64_t i = 1; i < parts; ++i) others.emplace_back(part, i);
    part(0);
    for (std::thread& other : others) other.join();
    if (thrown) std::rethrow_exception(thrown);
  }

  static constexpr Threads kThreads{run};
  static inline std::atomic<int> count_{1};
  const Threads* before_;
  int count_before_;
};

}  // namespace kvkeep::testing
