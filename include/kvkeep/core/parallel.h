#pragma once
/// Loops over threads. They run on the calling thread unless a backend or an engine supplies threads: use_torch()
/// of kvkeep/torch.h takes LibTorch's.

#include <atomic>
#include <cstdint>

namespace kvkeep {

/// Runs loops. `run` calls body(context, begin, end) for parts of [begin, end) of at least `grain`, on any threads,
/// returns when all are done, and rethrows what a body throws.
struct Threads {
  void (*run)(std::int64_t begin, std::int64_t end, std::int64_t grain,
              void (*body)(void* context, std::int64_t begin, std::int64_t end), void* context);
};

namespace detail {
// One in the whole process, whatever a consumer hides.
[[gnu::visibility("default")]] inline std::atomic<const Threads*> threads{nullptr};
}  // namespace detail

/// From now on loops run on `threads`, which must outlive them; null: on the calling thread.
inline void use_threads(const Threads* threads) { detail::threads.store(threads, std::memory_order_release); }

/// Calls body(begin, end) for parts of [begin, end) of at least `grain`.
template <class Body>
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, const Body& body) {
  if (begin >= end) return;
  const Threads* threads = detail::threads.load(std::memory_order_acquire);
  if (threads == nullptr || end - begin <= grain) return body(begin, end);
  threads->run(
      begin, end, grain,
      [](void* context, std::int64_t first, std::int64_t last) { (*static_cast<const Body*>(context))(first, last); },
      const_cast<Body*>(&body));
}

}  // namespace kvkeep
