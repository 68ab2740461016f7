// SPDX-License-Identifier: Apache-2.0
#pragma once
// What libkvkeep_llama_preload.so knows of the llama.cpp that it stands before: its functions, and whether it is the
// one whose headers it was compiled with.

#include <dlfcn.h>
#include <llama.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "kvkeep/core/error.h"

namespace kvkeep::llama::preload {

/// The newest sentence on stderr of this thread (kvkeep_llama_said()).
inline thread_local std::string said;

template <class... Parts>
void say(const Parts&... parts) {
  said = text(parts...);
  std::fprintf(stderr, "kvkeep: %s\n", said.c_str());
}

/// In a call of ours: what llama.cpp and the evictor call in it is llama.cpp's own.
inline thread_local bool inside = false;
struct Inside {
  bool before = std::exchange(inside, true);
  Inside() = default;
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  ~Inside() { inside = before; }
};

/// dlopen()'s, of a llama.cpp that the program has loaded by itself; null: the one that is linked.
inline void* handle = nullptr;

/// A function of llama.cpp's by its name, behind ours.
template <class F>
F* own(const char* name) {
  void* found = handle != nullptr ? dlsym(handle, name) : dlsym(RTLD_NEXT, name);
  if (found == nullptr) {
    say("the program calls ", name, "(), and has loaded no llama.cpp that has it");
    std::abort();
  }
  return reinterpret_cast<F*>(found);
}
#define KVKEEP_OWN(name)                                                               \
  ([] {                                                                                \
    static auto* const found = ::kvkeep::llama::preload::own<decltype(::name)>(#name); \
    return found;                                                                      \
  }())

// The defaults are asked for as part of a longer structure.
#ifdef __clang__
#define KVKEEP_AS_ANOTHER_TYPE __attribute__((no_sanitize("function")))
#else
#define KVKEEP_AS_ANOTHER_TYPE
#endif

/// Throws Unsupported if llama.cpp's structures are not those that this library was compiled with.
KVKEEP_AS_ANOTHER_TYPE inline void require_same_structures() {
  struct Defaults {
    llama_context_params params;
    std::array<unsigned char, 1024> behind;
  };
  alignas(Defaults) std::array<unsigned char, sizeof(Defaults)> memory{};
  constexpr unsigned char kUnwritten = 0xA5;
  memory.fill(kUnwritten);
  // Returned in memory of ours, of which a longer structure takes more.
  const auto* const defaults =
      new (memory.data()) Defaults(reinterpret_cast<Defaults (*)()>(own<void>("llama_context_default_params"))());
  const llama_context_params& p = defaults->params;
  bool same = defaults->behind.front() == kUnwritten && p.n_ctx == 512 && p.n_batch == 2048 && p.n_ubatch == 512 &&
              p.n_seq_max == 1 && p.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_AUTO && p.cb_eval == nullptr &&
              p.type_k == GGML_TYPE_F16 && p.type_v == GGML_TYPE_F16 && p.abort_callback == nullptr && p.offload_kqv &&
              !p.kv_unified;
  constexpr std::size_t kObject = 32;  // before each tensor in ggml's memory
  same = same && ggml_tensor_overhead() == kObject + sizeof(ggml_tensor);
  for (const auto& [op, name] : {std::pair(GGML_OP_SET_ROWS, "SET_ROWS"),
                                 {GGML_OP_ROPE, "ROPE"},
                                 {GGML_OP_SOFT_MAX, "SOFT_MAX"},
                                 {GGML_OP_FLASH_ATTN_EXT, "FLASH_ATTN_EXT"}})
    same = same && std::string_view(ggml_op_name(op)) == name;
  KVKEEP_REQUIRE_AS(Unsupported, same,
                    "llama: the program's llama.cpp has other structures than the one that this "
                    "library was compiled with; allowed a library that was compiled with the program's llama.h");
}

}  // namespace kvkeep::llama::preload
