#include "cuda_model.h"

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef KVKEEP_SANITIZED
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__x86_64__)
/// Saves the running stack's registers and goes on where `to` was left. ucontext would do, at two system calls a
/// switch.
extern "C" void kvkeep_model_switch(void** from, void* to);
asm(R"(
.text
.globl kvkeep_model_switch
.type kvkeep_model_switch,@function
kvkeep_model_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kvkeep_model_switch,.-kvkeep_model_switch
)");
#endif

namespace kvkeep::cuda::model {
namespace {

constexpr std::size_t kStack = std::size_t{128} << 10;
constexpr std::size_t kExchange = 256;  ///< bytes a lane may give

struct Barrier {
  unsigned arrived = 0;
  std::uint64_t generation = 0;
};

struct Warp {
  std::array<std::byte, 2 * 32 * kExchange>
      buffer;            ///< two, so that a lane may read one exchange while the next begins
  unsigned waiting = 0;  ///< lanes at a barrier
};

struct Fiber {
  Place place;
  int number = 0;
  bool done = false;
  std::uint64_t exchanges = 0;
  std::unique_ptr<std::byte[]> stack;
#if defined(__x86_64__)
  void* top = nullptr;
#else
  ucontext_t context;
#endif
};

struct Machine {
  Order order = Order::ascending;
  Counters counters;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier block;
  int living = 0, threads = 0;
  Fiber* fiber = nullptr;
  const std::function<void()>* body = nullptr;
  std::exception_ptr failure;
  std::uint64_t progress = 0;  ///< barriers passed and fibers ended
#if defined(__x86_64__)
  void* host = nullptr;
#else
  ucontext_t host;
#endif
#ifdef KVKEEP_SANITIZED
  const void* host_stack = nullptr;
  std::size_t host_size = 0;
  void* host_fake = nullptr;
#endif
};
/// The one that the running kernel is on: read at every step, so without the check that a Machine is there.
constinit thread_local Machine* running = nullptr;

Machine& machine() {
  thread_local Machine of_thread;
  running = &of_thread;
  return of_thread;
}

void to_host(bool ends) {
  Fiber& f = *running->fiber;
#ifdef KVKEEP_SANITIZED
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(ends ? nullptr : &fake, running->host_stack, running->host_size);
#else
  static_cast<void>(ends);
#endif
#if defined(__x86_64__)
  kvkeep_model_switch(&f.top, running->host);
#else
  swapcontext(&f.context, &running->host);
#endif
#ifdef KVKEEP_SANITIZED
  __sanitizer_finish_switch_fiber(fake, &running->host_stack, &running->host_size);
#endif
}

void enter() {
#ifdef KVKEEP_SANITIZED
  __sanitizer_finish_switch_fiber(nullptr, &running->host_stack, &running->host_size);
#endif
  try {
    (*running->body)();
  } catch (...) {
    if (!running->failure) running->failure = std::current_exception();
  }
  running->fiber->done = true;
  --running->living;
  ++running->progress;
  to_host(true);
}

void resume(Fiber& f) {
  running->fiber = &f;
#ifdef KVKEEP_SANITIZED
  __sanitizer_start_switch_fiber(&running->host_fake, f.stack.get(), kStack);
#endif
#if defined(__x86_64__)
  kvkeep_model_switch(&running->host, f.top);
#else
  swapcontext(&running->host, &f.context);
#endif
#ifdef KVKEEP_SANITIZED
  __sanitizer_finish_switch_fiber(running->host_fake, nullptr, nullptr);
#endif
  running->fiber = nullptr;
}

void prepare(Fiber& f) {
  if (!f.stack) f.stack = std::make_unique_for_overwrite<std::byte[]>(kStack);
#ifdef KVKEEP_SANITIZED
  // Frames that returned left nothing; what an ended fiber has not returned from is enter() and to_host().
  const std::size_t left = f.done ? kStack / 32 : kStack;
  __asan_unpoison_memory_region(f.stack.get() + kStack - left, left);
#endif
  f.done = false;
  f.exchanges = 0;
#if defined(__x86_64__)
  auto* top = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(f.stack.get() + kStack) & ~std::uintptr_t{15});
  *--top = nullptr;  // where enter() would return to: it never does
  *--top = reinterpret_cast<void*>(&enter);
  top -= 6;  // the registers that the switch restores
  std::fill_n(top, 6, nullptr);
  f.top = top;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.get();
  f.context.uc_stack.ss_size = kStack;
  f.context.uc_link = nullptr;
  makecontext(&f.context, enter, 0);
#endif
}

[[nodiscard]] Warp& warp() { return running->warps[static_cast<std::size_t>(running->fiber->number / 32)]; }

/// A warp runs as far as it can before the next one does: what a missing barrier of the block would let it overtake, it
/// overtakes.
void run_block(const char* name) {
  const std::size_t n = running->fibers.size();
  while (running->living > 0) {
    const std::uint64_t before = running->progress;
    for (std::size_t first = 0; first < n; first += 32) {
      std::uint64_t of_warp = 0;
      do {
        of_warp = running->progress;
        for (std::size_t i = first; i < first + 32; ++i) {
          Fiber& f = running->fibers[running->order == Order::ascending ? i : n - 1 - i];
          if (!f.done) resume(f);
        }
        if (running->failure) std::rethrow_exception(running->failure);
      } while (running->progress != of_warp);
    }
    if (running->progress == before)
      throw std::logic_error(std::string(name) + ": threads wait at a barrier that others never reach");
  }
}

}  // namespace

const Place& here() { return running->fiber->place; }
int lane() { return running->fiber->number % 32; }
void set_order(Order order) { machine().order = order; }
const Counters& counters() { return machine().counters; }
void waited() { ++machine().counters.waits; }

Chip& chip() {
  static Chip only;
  return only;
}

void wait_block() {
  Barrier& b = running->block;
  const std::uint64_t mine = b.generation;
  ++b.arrived;
  ++running->counters.barriers;
  while (b.generation == mine) {
    if (b.arrived == static_cast<unsigned>(running->threads)) {
      b.arrived = 0;
      ++b.generation;
      ++running->progress;
      break;
    }
    to_host(false);
  }
}

void wait_warp(unsigned mask) {
  Warp& w = warp();
  const unsigned mine = 1U << lane();
  if ((mask & mine) == 0) throw std::logic_error("a lane waits for a mask that does not hold it");
  w.waiting |= mine;
  while ((w.waiting & mine) != 0) {
    if ((w.waiting & mask) == mask) {
      w.waiting &= ~mask;
      ++running->progress;
      break;
    }
    to_host(false);
  }
}

const std::byte* exchange(unsigned mask, const void* mine, std::size_t bytes) {
  if (bytes > kExchange) throw std::logic_error("exchange: too many bytes a lane");
  ++running->counters.exchanges;
  Warp& w = warp();
  std::byte* buffer = w.buffer.data() + (running->fiber->exchanges++ % 2) * 32 * kExchange;
  std::memcpy(buffer + static_cast<std::size_t>(lane()) * bytes, mine, bytes);
  wait_warp(mask);
  return buffer;
}

void run(const char* name, dim3 blocks, int threads, std::size_t shared_bytes, const std::function<void()>& body) {
  if (threads <= 0 || threads > 1024 || threads % 32 != 0)
    throw std::logic_error(std::string(name) + ": " + std::to_string(threads) +
                           " threads a block; allowed 32, 64 ... 1024");
  if (blocks.y > 65535 || blocks.z > 65535)
    throw std::logic_error(std::string(name) + ": more than 65535 blocks in y or z");
  if (shared_bytes > static_cast<std::size_t>(chip().shared_bytes))
    throw std::logic_error(std::string(name) + ": more shared memory than a block can have");
  Machine& machine = model::machine();
  ++machine.counters.launches;
  machine.body = &body;
  machine.failure = nullptr;
  machine.threads = threads;
  machine.fibers.resize(static_cast<std::size_t>(threads));
  const std::int64_t count = std::int64_t{blocks.x} * blocks.y * blocks.z;
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t b = machine.order == Order::ascending ? n : count - 1 - n;
    const auto shared = std::make_unique_for_overwrite<std::byte[]>(
        shared_bytes);  // of exactly that size: the address sanitizer watches its ends
    std::memset(shared.get(), 0xCD, shared_bytes);
    machine.warps.assign(static_cast<std::size_t>(threads / 32), Warp{});
    machine.block = {};
    machine.living = threads;
    ++machine.counters.blocks;
    for (int t = 0; t < threads; ++t) {
      Fiber& f = machine.fibers[static_cast<std::size_t>(t)];
      f.number = t;
      f.place = {dim3(static_cast<unsigned>(t)),
                 dim3(static_cast<unsigned>(b % blocks.x), static_cast<unsigned>(b / blocks.x % blocks.y),
                      static_cast<unsigned>(b / blocks.x / blocks.y)),
                 dim3(static_cast<unsigned>(threads)), blocks, shared.get()};
      prepare(f);
    }
    run_block(name);
  }
}

}  // namespace kvkeep::cuda::model
