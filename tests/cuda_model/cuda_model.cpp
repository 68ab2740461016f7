// SPDX-License-Identifier: Apache-2.0
#include "cuda_model.h"

#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_memory.h"

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
constexpr int kGarbage = 0xCD;          ///< what shared memory holds before a block writes it

struct Barrier {
  unsigned arrived = 0, counted = 0, last_count = 0;
  std::uint64_t generation = 0;
};

struct Warp {
  std::array<std::byte, 2 * 32 * kExchange>
      buffer;            ///< two, so that a lane may read one exchange while the next begins
  unsigned waiting = 0;  ///< lanes at a barrier
  struct Asked {
    unsigned mask = 0;
    bool orders = false;
    bool operator==(const Asked&) const = default;
  };
  std::array<Asked, 32> asked{};  ///< by those: lanes of other masks, or at another kind of barrier, are elsewhere
};

struct Copy {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
  const void* code = nullptr;
};

struct Fiber {
  Place place;
  Watched watched;
  int number = 0;
  bool done = false;
  bool has_waited = false;  ///< for earlier kernels
  std::uint64_t exchanges = 0;
  std::vector<Copy> copies;  ///< under way to shared memory
  std::unique_ptr<std::byte[]> stack;
#if defined(__x86_64__)
  void* top = nullptr;
#else
  ucontext_t context;
#endif
};

struct Aligned {
  static constexpr std::align_val_t kTo{32};
  void operator()(std::byte* memory) const { ::operator delete[](memory, kTo); }
};

/// A block in flight.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  int living = 0;
  std::unique_ptr<std::byte[]> shared;  ///< dynamic
  std::size_t shared_bytes = 0;         ///< of that, and of all static ones that it has taken
  std::vector<std::pair<const void*, std::unique_ptr<std::byte[], Aligned>>> statics;  ///< by declaration
};

struct Machine {
  Order order = Order::ascending;
  Counters counters;
  std::vector<std::unique_ptr<Block>> blocks;  ///< used again by the next ones
  Block* block = nullptr;
  Fiber* fiber = nullptr;
  const std::function<void()>* body = nullptr;
  std::exception_ptr failure;
  const char* name = "";        ///< of the kernel
  std::size_t most_shared = 0;  ///< of a block
  bool early = false;           ///< the kernel may have begun before the one before it ended
  bool first_block = false;     ///< of it is the next to begin
  std::uint64_t progress = 0;   ///< barriers passed and fibers ended
  std::uint64_t drawn = 0;      ///< of the random order
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
  const Quiet quiet;
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
    if (settings().races) watched = &running->fiber->watched;
    (*running->body)();
  } catch (...) {
    if (!running->failure) running->failure = std::current_exception();
  }
  watched = nullptr;
  running->fiber->done = true;
  --running->block->living;
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
  f.done = f.has_waited = false;
  f.exchanges = 0;
  f.copies.clear();
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

[[nodiscard]] Warp& warp() { return running->block->warps[static_cast<std::size_t>(running->fiber->number / 32)]; }

/// The fibers of the running one's warp.
[[nodiscard]] std::span<Fiber> lanes_of_warp() {
  return std::span(running->block->fibers).subspan(static_cast<std::size_t>(running->fiber->number / 32 * 32), 32);
}

/// What is watched of those that `wanted` names.
template <class Wanted>
std::vector<Watched*> watched_of(std::span<Fiber> fibers, const Wanted& wanted) {
  std::vector<Watched*> some;
  for (Fiber& f : fibers)
    if (wanted(f)) some.push_back(&f.watched);
  return some;
}

/// The next number of the random order, below n.
std::uint64_t draw(std::uint64_t n) {
  std::uint64_t x = (running->drawn += 0x9E3779B97F4A7C15U);  // splitmix64
  x = (x ^ x >> 30U) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27U) * 0x94D049BB133111EBU;
  return (x ^ x >> 31U) % n;
}

/// 0 to n - 1 as the machine's order has them.
const std::vector<std::size_t>& in_order(std::size_t n, std::vector<std::size_t>& order) {
  order.resize(n);
  for (std::size_t i = 0; i < n; ++i) order[i] = running->order == Order::descending ? n - 1 - i : i;
  if (running->order == Order::random)
    for (std::size_t i = n; i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
  return order;
}

/// Runs the threads of a block until each waits. A warp runs as far as it can before the next one does: what a missing
/// barrier of the block would let it overtake, it overtakes. In random order it may stop anywhere, and go on later.
/// Returns false if none of them went on.
bool run_threads(Block& block) {
  const std::uint64_t before = running->progress;
  thread_local std::vector<std::size_t> warps, lanes;
  for (const std::size_t w : in_order(block.warps.size(), warps)) {
    std::uint64_t of_warp = 0;
    std::uint64_t rounds = running->order == Order::random ? 1 + draw(4) : ~std::uint64_t{0};
    do {
      of_warp = running->progress;
      in_order(32, lanes);
      for (const std::size_t lane : lanes) {
        Fiber& f = block.fibers[w * 32 + lane];
        if (!f.done) resume(f);
      }
      if (running->failure) std::rethrow_exception(running->failure);
    } while (running->progress != of_warp && --rounds > 0);
  }
  return running->progress != before;
}

/// Runs the threads of a block up to where each waits for earlier kernels.
void run_to_wait(Block& block) {
  running->block = &block;
  for (Fiber& f : block.fibers) {
    resume(f);
    if (running->failure) std::rethrow_exception(running->failure);
    if (!f.has_waited)
      throw std::logic_error(
          std::string(running->name) +
          ": a thread may begin before earlier kernels have ended, and does not wait for them first");
  }
}

void begin_block(Block& block, std::int64_t number, dim3 blocks, int threads, std::size_t shared_bytes) {
  block.shared = std::make_unique_for_overwrite<std::byte[]>(
      shared_bytes);  // of exactly that size: the address sanitizer watches its ends
  std::memset(block.shared.get(), kGarbage, shared_bytes);
  block.shared_bytes = shared_bytes;
  if (settings().races) forget(block.shared.get(), shared_bytes);
  block.statics.clear();
  block.fibers.resize(static_cast<std::size_t>(threads));
  block.warps.assign(static_cast<std::size_t>(threads / 32), Warp{});
  block.barrier = {};
  block.living = threads;
  ++running->counters.blocks;
  for (int t = 0; t < threads; ++t) {
    Fiber& f = block.fibers[static_cast<std::size_t>(t)];
    f.number = t;
    f.place = {dim3(static_cast<unsigned>(t)),
               dim3(static_cast<unsigned>(number % blocks.x), static_cast<unsigned>(number / blocks.x % blocks.y),
                    static_cast<unsigned>(number / blocks.x / blocks.y)),
               dim3(static_cast<unsigned>(threads)), blocks, block.shared.get()};
    f.watched = {};
    f.watched.block = static_cast<std::uint32_t>(number);
    f.watched.thread = static_cast<std::uint32_t>(t);
    prepare(f);
    f.watched.own = {std::span<const std::byte>(f.stack.get(), kStack), std::as_bytes(std::span(&f, 1))};
  }
  if (!running->early) return;
  std::optional<ClosedDevice> closed;
  if (running->first_block) closed.emplace();  // of the first alone, for their number
  running->first_block = false;
  run_to_wait(block);
}

[[nodiscard]] std::logic_error wait_in_vain(const char* name) {
  return std::logic_error(std::string(name) + ": threads wait at a barrier that others never reach");
}

/// Blocks one after the other.
void run_in_turn(const char* name, std::int64_t count, dim3 blocks, int threads, std::size_t shared_bytes) {
  Block& block = *running->blocks.front();
  running->block = &block;
  for (std::int64_t n = 0; n < count; ++n) {
    begin_block(block, running->order == Order::ascending ? n : count - 1 - n, blocks, threads, shared_bytes);
    while (block.living > 0)
      if (!run_threads(block)) throw wait_in_vain(name);
  }
}

/// Up to four blocks at a time, which give way to each other where their threads wait, and at atomics and fences.
void run_interleaved(const char* name, std::int64_t count, dim3 blocks, int threads, std::size_t shared_bytes) {
  std::vector<std::size_t> numbers;
  in_order(static_cast<std::size_t>(count), numbers);
  const auto at_once = static_cast<std::size_t>(std::min<std::int64_t>(count, 1 + static_cast<std::int64_t>(draw(4))));
  while (running->blocks.size() < at_once) running->blocks.push_back(std::make_unique<Block>());
  std::vector<Block*> flying;
  std::size_t next = 0, stuck = 0;
  while (next < numbers.size() || !flying.empty()) {
    if (next < numbers.size() && flying.size() < at_once) {
      for (const auto& block : running->blocks)
        if (std::ranges::find(flying, block.get()) == flying.end()) {
          begin_block(*block, static_cast<std::int64_t>(numbers[next++]), blocks, threads, shared_bytes);
          flying.push_back(block.get());
          break;
        }
      continue;
    }
    const std::size_t which = draw(flying.size());
    Block& block = *flying[which];
    running->block = &block;
    const bool went_on = run_threads(block);
    // Blocks are picked at random, so some picks in a row that go nowhere mean nothing; as many as this, that none can.
    stuck = went_on ? 0 : stuck + 1;
    if (stuck > 64 * flying.size()) throw wait_in_vain(name);
    if (block.living == 0) flying.erase(flying.begin() + static_cast<std::ptrdiff_t>(which));
  }
}

}  // namespace

const Place& here() { return running->fiber->place; }
int lane() { return running->fiber->number % 32; }
void set_order(Order order) { machine().order = settings().seed != 0 ? Order::random : order; }
const Counters& counters() { return machine().counters; }
void waited() { ++machine().counters.waits; }
void allocated() { ++machine().counters.allocations; }

Chip& chip() {
  static Chip only;
  return only;
}

void wait_for_earlier() {
  if (!running->early || running->fiber->has_waited) return;
  running->fiber->has_waited = true;
  to_host(false);
}

void give_way() {
  if (running->order != Order::random || draw(4) != 0) return;
  const Quiet quiet;
  ++running->progress;  // it can go on at any time
  to_host(false);
}

void fence() {
  give_way();
  const Quiet quiet;
  if (settings().races) order_fence(running->fiber->watched);
}

void begin_copy(void* to, const void* from, std::size_t bytes, const void* code) {
  touch(from, bytes, Touch::read, code);
  touch(to, bytes, Touch::arrives, code);
  const Quiet quiet;
  running->fiber->copies.push_back({to, from, bytes, code});
}

void land_copies() {
  for (const Copy& copy : running->fiber->copies) {
    touch(copy.from, copy.bytes, Touch::read, copy.code);
    touch(copy.to, copy.bytes, Touch::arrived, copy.code);
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
  const Quiet quiet;
  running->fiber->copies.clear();
}

unsigned wait_block(bool counts) {
  const Quiet quiet;
  Barrier& b = running->block->barrier;
  const std::uint64_t mine = b.generation;
  ++b.arrived;
  b.counted += counts ? 1 : 0;
  ++running->counters.barriers;
  while (b.generation == mine) {
    if (b.arrived == running->block->fibers.size()) {
      b.last_count = b.counted;
      b.arrived = b.counted = 0;
      ++b.generation;
      ++running->progress;
      if (settings().races) order_threads(watched_of(running->block->fibers, [](const Fiber&) { return true; }));
      break;
    }
    to_host(false);
  }
  return b.last_count;
}

void wait_warp(unsigned mask, bool orders) {
  const Quiet quiet;
  Warp& w = warp();
  const unsigned mine = 1U << lane();
  if ((mask & mine) == 0) throw std::logic_error("a lane waits for a mask that does not hold it");
  w.waiting |= mine;
  const Warp::Asked asked{mask, orders};
  w.asked[static_cast<std::size_t>(lane())] = asked;
  const auto at_the_same = [&] {
    for (std::size_t l = 0; l < 32; ++l)
      if ((mask >> l & 1U) != 0 && w.asked[l] != asked) return false;
    return true;
  };
  while ((w.waiting & mine) != 0) {
    if ((w.waiting & mask) == mask && at_the_same()) {
      w.waiting &= ~mask;
      ++running->progress;
      if (orders && settings().races)
        order_lanes(watched_of(lanes_of_warp(), [&](const Fiber& f) { return (mask >> f.number % 32 & 1U) != 0; }));
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
  wait_warp(mask, false);
  return buffer;
}

std::byte* static_shared_memory(const void* site, std::size_t bytes) {
  const Quiet quiet;
  Block& block = *running->block;
  for (const auto& [of, memory] : block.statics)
    if (of == site) return memory.get();
  block.shared_bytes += bytes;
  if (block.shared_bytes > running->most_shared)
    throw std::logic_error(std::string(running->name) + ": a block takes " + std::to_string(block.shared_bytes) +
                           " bytes of shared memory, static and dynamic; allowed " +
                           std::to_string(running->most_shared));
  auto* const memory = static_cast<std::byte*>(::operator new[](bytes, Aligned::kTo));
  block.statics.emplace_back(site, std::unique_ptr<std::byte[], Aligned>(memory));
  std::memset(memory, kGarbage, bytes);
  if (settings().races) forget(memory, bytes);
  return memory;
}

void run(const char* name, dim3 blocks, int threads, std::size_t shared_bytes, std::size_t most_shared, bool early,
         const std::function<void()>& body) {
  Machine& machine = model::machine();
  ++machine.counters.launches;
  if (settings().seed != 0) {
    machine.order = Order::random;
    machine.drawn = settings().seed * 0x9E3779B97F4A7C15U + static_cast<std::uint64_t>(machine.counters.launches);
  }
  machine.body = &body;
  machine.failure = nullptr;
  machine.name = name;
  machine.most_shared = most_shared;
  machine.early = machine.first_block = early;
  if (machine.blocks.empty()) machine.blocks.push_back(std::make_unique<Block>());
  const std::int64_t count = std::int64_t{blocks.x} * blocks.y * blocks.z;
  const DeviceAccess access;
  if (settings().races) forget_all();
  if (machine.order == Order::random)
    run_interleaved(name, count, blocks, threads, shared_bytes);
  else
    run_in_turn(name, count, blocks, threads, shared_bytes);
  if (const std::string races = settings().races ? races_found() : ""; !races.empty())
    throw std::logic_error(std::string(name) + ": accesses that nothing orders:" + races);
}

}  // namespace kvkeep::cuda::model
