// SPDX-License-Identifier: Apache-2.0
#include "device_memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda_model.h"

namespace kvkeep::cuda::model {
namespace {

constexpr std::align_val_t kAligned{256};  ///< as CUDA aligns
constexpr std::size_t kPage = 4096, kHugePage = std::size_t{2} << 20, kReserved = std::size_t{64} << 30;

/// One range of addresses, of which the first `used` bytes are open or closed together.
struct Arena {
  std::byte* base = nullptr;
  std::size_t used = 0;
  int open = 0;
  bool in_kernel = false;                                ///< closed for a kernel that begins
  std::map<std::byte*, std::size_t> taken;               ///< bytes, whole pages
  std::map<std::size_t, std::vector<std::byte*>> given;  ///< by bytes
};

Arena& arena();

struct sigaction before{};

void tell(int signal, siginfo_t* what, void* context) {
  const auto* at = static_cast<const std::byte*>(what->si_addr);
  if (at >= arena().base && at < arena().base + kReserved) {
    const auto say = [](std::string_view said) { static_cast<void>(!write(STDERR_FILENO, said.data(), said.size())); };
    arena().in_kernel ? say("cuda_model: a kernel touched device memory before it waited for earlier kernels\n")
                      : say("cuda_model: the host touched device memory outside a copy\n");
  }
  sigaction(signal, &before, nullptr);  // and again, as it would have been without this
  static_cast<void>(context);
}

Arena& arena() {
  static Arena* const only = [] {
    auto* made = new Arena;  // outlives what is freed at the end of the program
    void* base = mmap(nullptr, kReserved + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    std::size_t room = kReserved + kHugePage;
    base = std::align(kHugePage, kReserved, base, room);
    madvise(base, kReserved, MADV_HUGEPAGE);  // opening and closing takes as long as there are pages
    made->base = static_cast<std::byte*>(base);
    return made;
  }();
  return *only;
}

bool is_free_of_guard(const std::byte* memory) { return memory < arena().base || memory >= arena().base + kReserved; }

void protect(const Arena& a) {
  const std::size_t whole = (a.used + kHugePage - 1) / kHugePage * kHugePage;
  if (whole > 0 && mprotect(a.base, whole, a.open > 0 ? PROT_READ | PROT_WRITE : PROT_NONE) != 0)
    throw std::runtime_error("cuda_model: mprotect failed");
}

}  // namespace

std::byte* take_device_memory(std::size_t bytes) {
  if (!settings().guard) return static_cast<std::byte*>(::operator new(bytes, kAligned));
  Arena& a = arena();
  static const bool handled = [] {
    struct sigaction with{};
    with.sa_sigaction = tell;
    with.sa_flags = SA_SIGINFO;
    return sigaction(SIGSEGV, &with, &before) == 0;
  }();
  static_cast<void>(handled);
  const std::size_t whole = std::bit_ceil(std::max(bytes, kPage));
  std::byte* memory = nullptr;
  if (auto& free = a.given[whole]; !free.empty()) {
    memory = free.back();
    free.pop_back();
  } else {
    if (a.used + whole > kReserved) throw std::bad_alloc();
    memory = a.base + a.used;
    a.used += whole;
    protect(a);
  }
  a.taken[memory] = whole;
  const DeviceAccess access;
  std::memset(memory, 0xCD, whole);
  return memory;
}

void give_device_memory(std::byte* memory) noexcept {
  if (is_free_of_guard(memory)) {
    ::operator delete(memory, kAligned);
    return;
  }
  Arena& a = arena();
  const auto found = a.taken.find(memory);
  a.given[found->second].push_back(memory);
  a.taken.erase(found);
}

DeviceAccess::DeviceAccess() {
  if (++arena().open == 1) protect(arena());
}
DeviceAccess::~DeviceAccess() {
  if (--arena().open == 0) protect(arena());
}

ClosedDevice::ClosedDevice() : before_(std::exchange(arena().open, 0)) {
  arena().in_kernel = true;
  protect(arena());
}
ClosedDevice::~ClosedDevice() {
  arena().open = before_;
  arena().in_kernel = false;
  protect(arena());
}

}  // namespace kvkeep::cuda::model
