// SPDX-License-Identifier: Apache-2.0
#include "lazy_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <mutex>
#include <system_error>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvlab/memory_left.h"

namespace kvkeep::lm::detail {
namespace {

/// What lives, and what the machine had left when nothing did: later its own pages would count twice.
struct Lazy {
  std::mutex mutex;
  std::size_t bytes = 0;
  std::int64_t left = 0;
};
Lazy& lazy() {
  static auto* const all = new Lazy;  // outlives every tensor
  return *all;
}

}  // namespace

void require_room(std::string_view operation, std::string_view what, double bytes) {
  const std::lock_guard lock(lazy().mutex);
  if (lazy().bytes == 0) lazy().left = lm::memory_left();
  const auto living = static_cast<double>(lazy().bytes);
  lm::require_memory(
      operation, living > 0 ? text(what, ", with those that there are,") : std::string(what), bytes + living,
      "fewer tokens, fewer sequences at once, a cache of 16 bits, or a policy with a smaller budget", lazy().left);
}

namespace {

/// Memory of the machine that is given back with it.
class Mapping {
 public:
  Mapping(void* memory, std::size_t bytes) : memory_(memory), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() {
    if (memory_ == nullptr) return;
    ::munmap(memory_, bytes_);
    const std::lock_guard lock(lazy().mutex);
    lazy().bytes -= bytes_;
  }

 private:
  void* memory_;
  std::size_t bytes_;
};

}  // namespace

kvkeep::Tensor lazy_zeros(const Shape& sizes, Dtype dtype) {
  const std::size_t bytes = static_cast<std::size_t>(sizes.product()) * static_cast<std::size_t>(element_size(dtype));
  if (bytes == 0) return zeros(sizes, dtype);
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  KVKEEP_REQUIRE(memory != MAP_FAILED, "make cache: the machine does not give ",
                 lm::shown_bytes(static_cast<double>(bytes)), " (", std::system_category().message(errno),
                 "); allowed fewer tokens or sequences at once");
  {
    const std::lock_guard lock(lazy().mutex);
    lazy().bytes += bytes;
  }
  return {memory, dtype, sizes, Device{}, Owner::of(Mapping(memory, bytes))};
}

}  // namespace kvkeep::lm::detail
