// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Loops over threads. They run on the calling thread unless it, or the keeper that it calls, has threads to use:
/// Provided::threads, or UsingThreads around the call. Nothing here is process-wide.

#include <cstdint>
#include <utility>

#include "kvkeep/core/hd.h"

namespace kvkeep {

/// Threads that an engine lends, such as its own pool (kvkeep/keeper/thread_pool.h and kvkeep/torch.h have one each).
/// `run` calls body(context, begin, end) for parts of [begin, end) of at least `grain`, on any threads, returns when
/// all are done, and rethrows what a body throws. It is called from every thread that calls a keeper with it.
struct Threads {
  void (*run)(void* pool, std::int64_t begin, std::int64_t end, std::int64_t grain,
              void (*body)(void* context, std::int64_t begin, std::int64_t end), void* context) = nullptr;
  void* pool = nullptr;  ///< the first argument of run(), alive as long as these threads are used
};

namespace detail {
// One for each thread, whatever a consumer hides. Null: loops run on the calling thread.
[[gnu::visibility("default")]] inline constinit thread_local const Threads* threads = nullptr;
}  // namespace detail

/// While it lives, loops that this thread starts run on `threads`, which it copies. Without a `run` nothing changes.
class UsingThreads {
 public:
  explicit UsingThreads(Threads threads) : own_(threads), before_(detail::threads) {
    if (own_.run != nullptr) detail::threads = &own_;
  }
  ~UsingThreads() { detail::threads = before_; }
  UsingThreads(const UsingThreads&) = delete;
  UsingThreads& operator=(const UsingThreads&) = delete;

 private:
  Threads own_;
  const Threads* before_;
};

/// Calls body(begin, end) for parts of [begin, end) of at least `grain`. A loop within a part runs on its thread.
template <class Body>
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, const Body& body) {
  if (begin >= end) return;
  if (detail::threads == nullptr || end - begin <= grain) return body(begin, end);
  struct Alone {
    const Threads* threads = std::exchange(detail::threads, nullptr);
    ~Alone() { detail::threads = threads; }
  };
  const Alone alone;
  alone.threads->run(
      alone.threads->pool, begin, end, grain,
      [](void* context, std::int64_t first, std::int64_t last) { (*static_cast<const Body*>(context))(first, last); },
      const_cast<Body*>(&body));
}

}  // namespace kvkeep
