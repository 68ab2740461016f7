// SPDX-License-Identifier: Apache-2.0
#include "races.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <memory>
#include <unordered_map>

extern "C" const char __executable_start[];  // NOLINT(bugprone-reserved-identifier): of the linker

namespace kvkeep::cuda::model {
namespace {

/// Of some bytes of a word, by lanes of one warp with one clock.
struct Access {
  std::uint32_t block = 0, clock = 0, lanes = 0;
  std::uint32_t code = 0;  ///< from where the program begins
  std::uint8_t warp = 0, bytes = 0;
  Touch how = Touch::read;
};

/// The accesses to a word that a later one may race with. More readers than fit are left out: by then several warps are
/// there, and who is not ordered with one that is left out is not with one of these, unless fences order some of them.
struct Word {
  static constexpr std::uint32_t kMost = 6;
  std::uint32_t run = 0;  ///< the launch that they are of; of another one nothing counts
  std::uint32_t count = 0;
  std::array<Access, kMost> accesses;
};

constexpr std::uintptr_t kWord = 4, kPage = 4096;
using Page = std::array<Word, kPage / kWord>;

struct Race {
  Access first, second;
  std::uint32_t second_lane = 0;
};

struct Shadow {
  std::unordered_map<std::uintptr_t, std::unique_ptr<Page>> pages;
  struct Recent {
    std::uintptr_t number = 0;
    Page* page = nullptr;
  };
  std::array<Recent, 1024> recent;
  std::uint32_t run = 1;
  std::vector<Race> races;
  std::unordered_map<std::uintptr_t, Knowledge> handed_on;  ///< by the address of an atomic

  Page* find(std::uintptr_t number) {
    Recent& r = recent[number % recent.size()];
    if (r.page != nullptr && r.number == number) return r.page;
    const auto found = pages.find(number);
    if (found == pages.end()) return nullptr;
    r = {number, found->second.get()};
    return r.page;
  }
  Word& word(std::uintptr_t at) {
    const std::uintptr_t number = at / kPage;
    Page* page = find(number);
    if (page == nullptr) page = (pages[number] = std::make_unique<Page>()).get();
    return (*page)[at % kPage / kWord];
  }
};

Shadow& shadow() {
  thread_local Shadow of_thread;
  return of_thread;
}

constexpr std::size_t kMostPages = 16384;  ///< of 128 KiB or so each, kept between launches
constexpr std::size_t kMostRaces = 6;      ///< that are told of

void join(Knowledge& to, const Knowledge& from) {
  for (const Known& one : from) {
    const auto found =
        std::ranges::find_if(to, [&](const Known& k) { return k.block == one.block && k.warp == one.warp; });
    if (found == to.end()) {
      to.push_back(one);
      continue;
    }
    found->floor = std::max(found->floor, one.floor);
    for (std::size_t l = 0; l < 32; ++l) found->lanes[l] = std::max(found->lanes[l], one.lanes[l]);
  }
}

/// Which lanes of an access precede whatever `t` does now.
std::uint32_t lanes_before(const Access& a, const Watched& t) {
  if (a.how == Touch::arrives) return 0;
  if (a.block == t.block) {
    if (a.clock < t.floor) return ~0U;
    if (a.warp == t.thread / 32) {
      std::uint32_t over = 1U << t.thread % 32;
      for (std::uint32_t left = a.lanes & ~over; left != 0; left &= left - 1) {
        const auto l = static_cast<std::uint32_t>(std::countr_zero(left));
        if (a.clock < t.lanes[l]) over |= 1U << l;
      }
      if ((a.lanes & ~over) == 0 || t.acquired.empty()) return over;
    }
  }
  std::uint32_t over = 0;
  for (const Known& known : t.acquired) {
    if (known.block != a.block) continue;
    if (a.clock < known.floor) return ~0U;
    for (std::uint32_t l = 0; l < 32 && known.warp == a.warp; ++l) over |= a.clock < known.lanes[l] ? 1U << l : 0;
  }
  if (a.block == t.block && a.warp == t.thread / 32) {
    for (std::uint32_t l = 0; l < 32; ++l) over |= l == t.thread % 32 || a.clock < t.lanes[l] ? 1U << l : 0;
  }
  return over;
}

bool conflict(Touch a, Touch b) {
  if (a == Touch::read && b == Touch::read) return false;
  return a != Touch::atomic || b != Touch::atomic;
}

/// Whatever races with `old` races with `now` too, where `old` precedes it.
bool stands_for(Touch now, Touch old) { return now == Touch::write || now == old; }

void touch_word(Shadow& s, const Watched& t, std::uintptr_t at, std::uint8_t bytes, Touch how, std::uint32_t code) {
  Word& word = s.word(at);
  const std::uint32_t lane = t.thread % 32, warp = t.thread / 32;
  if (word.run != s.run) {
    word.run = s.run;
    word.count = 0;
  }
  Access mine{t.block, t.clock, 1U << lane, code, static_cast<std::uint8_t>(warp), bytes, how};
  const auto same = [&](const Access& a) {
    return a.how == how && a.bytes == bytes && a.clock == t.clock && a.warp == warp && a.block == t.block;
  };
  if (how == Touch::arrived) {
    mine.how = how = Touch::write;
    for (std::uint32_t i = 0; i < word.count; ++i) {
      Access& a = word.accesses[i];
      if (a.how != Touch::arrives || a.block != t.block || a.warp != warp || (a.bytes & bytes) == 0) continue;
      a.lanes &= ~mine.lanes;
      if (a.lanes == 0) word.accesses[i--] = word.accesses[--word.count];
    }
  }
  bool there = false;
  for (std::uint32_t i = 0; i < word.count; ++i) {
    Access& a = word.accesses[i];
    if ((a.bytes & bytes) == 0) continue;
    if (how == Touch::read && same(a)) {
      a.lanes |= mine.lanes;
      there = true;
      continue;
    }
    const bool conflicts = conflict(a.how, how), stands = (a.bytes & ~bytes) == 0 && stands_for(how, a.how);
    if (!conflicts && !stands) continue;
    const std::uint32_t over = lanes_before(a, t), left = a.lanes & ~over;
    if (conflicts && left != 0) {
      const bool known =
          std::ranges::any_of(s.races, [&](const Race& r) { return r.first.code == a.code && r.second.code == code; });
      Access first = a;
      first.lanes = left;
      if (!known) s.races.push_back({first, mine, lane});
    }
    if (!stands) continue;
    a.lanes = left;
    if (left == 0) word.accesses[i--] = word.accesses[--word.count];
  }
  if (there) return;
  for (std::uint32_t i = 0; i < word.count; ++i)
    if (same(word.accesses[i])) {
      word.accesses[i].lanes |= mine.lanes;
      return;
    }
  if (word.count < Word::kMost) {
    word.accesses[word.count++] = mine;
    return;
  }
  if (how == Touch::read) return;
  for (Access& a : word.accesses)
    if (a.how == Touch::read) {
      a = mine;
      return;
    }
  word.accesses.front() = mine;
}

/// file:line of code, with those that it is inlined into behind it; its address where the program has no lines.
std::string line_of(std::uint32_t code) {
  std::array<char, 512> text{};
  const std::string program = std::to_string(getpid());
  std::snprintf(text.data(), text.size(), "addr2line -i -e /proc/%s/exe 0x%x 2> /dev/null", program.c_str(), code - 1);
  std::string lines;
  if (FILE* const out = popen(text.data(), "r"); out != nullptr) {
    while (std::fgets(text.data(), text.size(), out) != nullptr) {
      std::string line(text.data());
      line = line.substr(0, line.find_first_of(" \n"));
      line = line.substr(line.rfind('/') + 1);
      if (!line.starts_with("??")) lines += (lines.empty() ? "" : ", in ") + line;
    }
    pclose(out);
  }
  std::snprintf(text.data(), text.size(), "0x%x", code);
  return lines.empty() ? text.data() : lines;
}

const char* verb(Touch how) {
  switch (how) {
    case Touch::read:
      return "reads";
    case Touch::atomic:
      return "updates in one step";
    case Touch::arrives:
      return "copies to, ahead,";
    default:
      return "writes";
  }
}

std::string told(const Access& a, std::uint32_t lane) {
  return "thread " + std::to_string(a.warp * 32U + lane) + " of block " + std::to_string(a.block) + " " + verb(a.how) +
         " (" + line_of(a.code) + ")";
}

}  // namespace

constinit thread_local Watched* watched = nullptr;

void touch(const void* at, std::size_t bytes, Touch how, const void* code) {
  const Watched* const t = watched;
  if (t == nullptr) return;
  for (const std::span<const std::byte> own : t->own)
    if (static_cast<std::uintptr_t>(static_cast<const std::byte*>(at) - own.data()) < own.size()) return;
  const Quiet quiet;
  Shadow& s = shadow();
  const auto place = static_cast<std::uint32_t>(static_cast<const char*>(code) - __executable_start);
  const auto first = reinterpret_cast<std::uintptr_t>(at), end = first + bytes;
  for (std::uintptr_t word = first / kWord * kWord; word < end; word += kWord) {
    unsigned mask = 15;
    if (word < first) mask &= 15U << (first - word);
    if (word + kWord > end) mask &= 15U >> (word + kWord - end);
    touch_word(s, *t, word, static_cast<std::uint8_t>(mask), how, place);
  }
}

void touch_atomic(const void* at, std::size_t bytes, const void* code) {
  touch(at, bytes, Touch::atomic, code);
  Watched* const t = watched;
  if (t == nullptr) return;
  const Quiet quiet;
  auto& handed_on = shadow().handed_on;
  if (t->released.empty() && handed_on.empty()) return;
  Knowledge& here = handed_on[reinterpret_cast<std::uintptr_t>(at)];
  join(t->observed, here);
  join(here, t->released);
}

void order_fence(Watched& t) {
  join(t.acquired, t.observed);
  t.observed.clear();
  ++t.clock;
  t.lanes[t.thread % 32] = t.clock;
  t.released = t.acquired;
  join(t.released, {{t.block, t.thread / 32, t.floor, t.lanes}});
}

void order_threads(std::span<Watched* const> block) {
  std::uint32_t clock = 0;
  Knowledge all;
  for (const Watched* t : block) {
    clock = std::max(clock, t->clock + 1);
    join(all, t->acquired);
  }
  for (Watched* t : block) {
    t->clock = t->floor = clock;
    if (!all.empty()) t->acquired = all;
  }
}

void order_lanes(std::span<Watched* const> lanes) {
  std::uint32_t clock = 0;
  std::array<std::uint32_t, 32> known{};
  Knowledge all;
  for (const Watched* t : lanes) {
    clock = std::max(clock, t->clock + 1);
    for (std::size_t l = 0; l < 32; ++l) known[l] = std::max(known[l], t->lanes[l]);
    join(all, t->acquired);
  }
  for (const Watched* t : lanes) known[t->thread % 32] = clock;
  for (Watched* t : lanes) {
    t->clock = clock;
    t->lanes = known;
    if (!all.empty()) t->acquired = all;
  }
}

void forget_all() {
  Shadow& s = shadow();
  if (s.pages.size() > kMostPages) {
    s.pages.clear();
    s.recent.fill({});
  }
  ++s.run;
  s.races.clear();
  s.handed_on.clear();
}

void forget(const void* memory, std::size_t bytes) {
  Shadow& s = shadow();
  const auto first = reinterpret_cast<std::uintptr_t>(memory) / kWord * kWord,
             end = reinterpret_cast<std::uintptr_t>(memory) + bytes;
  for (std::uintptr_t at = first; at < end;) {
    const std::uintptr_t next = (at / kPage + 1) * kPage;
    if (Page* const page = s.find(at / kPage); page != nullptr)
      for (; at < std::min(next, end); at += kWord) (*page)[at % kPage / kWord].run = 0;
    at = next;
  }
}

std::string races_found() {
  std::string text;
  std::size_t told_of = 0;
  for (const Race& race : shadow().races) {
    if (++told_of > kMostRaces) break;
    const auto lane = static_cast<std::uint32_t>(std::countr_zero(race.first.lanes));
    text += "\n  " + told(race.first, lane) + ", " + told(race.second, race.second_lane);
  }
  if (told_of > kMostRaces) text += "\n  and " + std::to_string(shadow().races.size() - kMostRaces) + " more";
  return text;
}

}  // namespace kvkeep::cuda::model

// What -fsanitize=thread makes the compiler call.

using kvkeep::cuda::model::touch;
using kvkeep::cuda::model::Touch;

// NOLINTBEGIN(bugprone-reserved-identifier,bugprone-macro-parentheses): the names are the compiler's
#define KVKEEP_TOUCH(name, bytes, how) \
  void name(void* at) { touch(at, bytes, Touch::how, __builtin_return_address(0)); }
#define KVKEEP_TOUCHES(bytes)                             \
  KVKEEP_TOUCH(__tsan_read##bytes, bytes, read)           \
  KVKEEP_TOUCH(__tsan_write##bytes, bytes, write)         \
  KVKEEP_TOUCH(__tsan_unaligned_read##bytes, bytes, read) \
  KVKEEP_TOUCH(__tsan_unaligned_write##bytes, bytes, write)
#define KVKEEP_UPDATE(bits, name)                                                                                  \
  std::uint##bits##_t __tsan_atomic##bits##_##name(volatile std::uint##bits##_t* at, std::uint##bits##_t x, int) { \
    return __atomic_##name(at, x, __ATOMIC_SEQ_CST);                                                               \
  }
// The host's atomics; kernels have none of these.
#define KVKEEP_ATOMICS(bits)                                                                                         \
  std::uint##bits##_t __tsan_atomic##bits##_load(const volatile std::uint##bits##_t* at, int) {                      \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                                    \
  }                                                                                                                  \
  void __tsan_atomic##bits##_store(volatile std::uint##bits##_t* at, std::uint##bits##_t x, int) {                   \
    __atomic_store_n(at, x, __ATOMIC_SEQ_CST);                                                                       \
  }                                                                                                                  \
  std::uint##bits##_t __tsan_atomic##bits##_exchange(volatile std::uint##bits##_t* at, std::uint##bits##_t x, int) { \
    return __atomic_exchange_n(at, x, __ATOMIC_SEQ_CST);                                                             \
  }                                                                                                                  \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile std::uint##bits##_t* at, std::uint##bits##_t* was,      \
                                                    std::uint##bits##_t x, int, int) {                               \
    return __atomic_compare_exchange_n(at, was, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ? 1 : 0;               \
  }                                                                                                                  \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile std::uint##bits##_t* at, std::uint##bits##_t* was,        \
                                                  std::uint##bits##_t x, int, int) {                                 \
    return __atomic_compare_exchange_n(at, was, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ? 1 : 0;               \
  }                                                                                                                  \
  std::uint##bits##_t __tsan_atomic##bits##_compare_exchange_val(                                                    \
      volatile std::uint##bits##_t* at, std::uint##bits##_t was, std::uint##bits##_t x, int, int) {                  \
    __atomic_compare_exchange_n(at, &was, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                             \
    return was;                                                                                                      \
  }                                                                                                                  \
  KVKEEP_UPDATE(bits, fetch_add)                                                                                     \
  KVKEEP_UPDATE(bits, fetch_sub)                                                                                     \
  KVKEEP_UPDATE(bits, fetch_and)                                                                                     \
  KVKEEP_UPDATE(bits, fetch_or)                                                                                      \
  KVKEEP_UPDATE(bits, fetch_xor)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
KVKEEP_TOUCHES(1)
KVKEEP_TOUCHES(2)
KVKEEP_TOUCHES(4)
KVKEEP_TOUCHES(8)
KVKEEP_TOUCHES(16)
void __tsan_read_range(void* at, unsigned long bytes) { touch(at, bytes, Touch::read, __builtin_return_address(0)); }
void __tsan_write_range(void* at, unsigned long bytes) { touch(at, bytes, Touch::write, __builtin_return_address(0)); }
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  touch(from, bytes, Touch::read, __builtin_return_address(0));
  touch(to, bytes, Touch::write, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
  touch(from, bytes, Touch::read, __builtin_return_address(0));
  touch(to, bytes, Touch::write, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
  touch(to, bytes, Touch::write, __builtin_return_address(0));
  return std::memset(to, value, bytes);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}
KVKEEP_ATOMICS(8)
KVKEEP_ATOMICS(16)
KVKEEP_ATOMICS(32)
KVKEEP_ATOMICS(64)

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier,bugprone-macro-parentheses)
