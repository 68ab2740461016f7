// SPDX-License-Identifier: Apache-2.0
#pragma once
// The contexts of a program that libkvkeep_llama_preload.so keeps under a policy.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/llama.h"
#include "kvkeep/policy/registry.h"
#include "library.h"

namespace kvkeep::llama::preload {

inline std::string setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}
inline bool verbose() { return setting("KVKEEP_VERBOSE") == "1"; }

/// A context under a policy.
struct Followed {
  const llama_model* model = nullptr;
  llama_context* context = nullptr;
  llama_memory_t memory = nullptr;
  std::string policy;
  Evictor evictor;
  std::uint32_t asked = 0;  ///< cells that the program believes in; 0: as many as there are
  bool alone = false;       ///< llama.cpp goes on alone
  std::int64_t tokens = 0, events = 0, most = 0;

  Followed(llama_model* of, llama_context_params& params, std::string text)
      : model(of), policy(std::move(text)), evictor(of, params, make_policy(policy)) {}

  void let_go(const std::exception& error) {
    evictor.detach();
    alone = true;
    say(policy, " ends here, and llama.cpp goes on alone: ", error.what());
  }
  [[nodiscard]] bool has(llama_seq_id sequence) const {
    return evictor.keeper().knows(sequence) && KVKEEP_OWN(llama_memory_seq_pos_max)(memory, sequence) >= 0;
  }
  void count(std::int32_t batch) {
    tokens += batch;
    for (const Cut& cut : evictor.report().cuts) {
      ++events;
      if (verbose())
        say("sequence ", cut.sequence, " was cut at ", cut.logical_length, " tokens: of ", cut.length_before,
            " cells, ", cut.length_after, " stay");
    }
    for (llama_seq_id s = 0; s < static_cast<llama_seq_id>(llama_n_seq_max(context)); ++s)
      if (evictor.keeper().knows(s)) most = std::max<std::int64_t>(most, std::ssize(evictor.cells(s)));
  }
  void sum_up() const {
    say(policy, ": ", tokens, " tokens, ", events, " events, at most ", most, " cells of a sequence",
        alone ? ", then alone" : "");
  }
};

struct Contexts {
  std::mutex mutex;
  std::vector<std::unique_ptr<Followed>> all;
  std::set<const llama_model*> empty;  ///< models without weights, which measure memory
  std::set<const llama_model*> left;   ///< models of which llama.cpp has a context alone

  /// Also one that llama.cpp has alone by now, if its program goes on with what it was told.
  template <class Is>
  Followed* told(Is is) {
    if (inside) return nullptr;
    const std::lock_guard lock(mutex);
    const auto found = std::ranges::find_if(all, [&](const auto& f) { return is(*f); });
    return found == all.end() || ((*found)->alone && !(*found)->evictor.mixed()) ? nullptr : found->get();
  }
  template <class Is>
  Followed* find(Is is) {
    Followed* const f = told(is);
    return f == nullptr || f->alone ? nullptr : f;
  }
  static auto is(const llama_context* context) {
    return [=](const Followed& f) { return f.context == context; };
  }
  static auto is(llama_memory_t memory) {
    return [=](const Followed& f) { return f.memory == memory; };
  }
  template <class Whose>
  Followed* of(Whose whose) {
    return find(is(whose));
  }
};

/// Never destroyed: a program may end with contexts that are not freed.
inline Contexts& contexts() {
  static auto* const all = new Contexts;
  return *all;
}

}  // namespace kvkeep::llama::preload
