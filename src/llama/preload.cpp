// SPDX-License-Identifier: Apache-2.0
// libkvkeep_llama_preload.so: a policy in any program that is linked to libllama, which is not touched
// (docs/reference/llama.md#any-program). Functions of llama.cpp's by their own names, which the loader finds before
// llama.cpp's where this library is preloaded, or linked first: each does for a context under a policy what must be
// done beside, and calls llama.cpp's. No exception leaves them.

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "followed.h"
#include "kvkeep/llama.h"
#include "kvkeep/policy/registry.h"
#include "library.h"

namespace kvkeep::llama::preload {
namespace {

constexpr std::int32_t kInvalidBatch = -1;  // llama_decode(): nothing has changed

/// A program's own choice (kvkeep_llama_policy()), instead of KVKEEP_POLICY.
std::optional<std::string>& chosen() {
  static std::optional<std::string> policy;
  return policy;
}
std::string policy_text() { return chosen() ? *chosen() : setting("KVKEEP_POLICY"); }

[[gnu::destructor]] void at_exit() {
  for (const auto& followed : contexts().all) followed->sum_up();
}

// ---- Contexts ----

std::string list_of_policies() {
  std::string list = "policies, as in KVKEEP_POLICY=tova,budget=1024,share=union:";
  for (const PolicyInfo& policy : policies()) list += "\n  " + policy.name + ": " + policy.what;
  return list;
}

/// Why a context is left as it is; empty: it is not.
std::string why_not(const llama_context_params& params) {
  if (params.ctx_other != nullptr || params.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT)
    return "it serves another context (drafts)";
  if (params.embeddings || params.attention_type == LLAMA_ATTENTION_TYPE_NON_CAUSAL) return "it is for embeddings";
  return "";
}

std::uint32_t padded(std::uint32_t cells) { return (cells + 255) / 256 * 256; }

/// KVKEEP_CELLS: the cache has fewer cells than the program asks for. Returns what the program believes in.
std::uint32_t lower_cells(const llama_model* model, llama_context_params& params) {
  const std::string text = setting("KVKEEP_CELLS");
  if (text.empty()) return 0;
  std::uint32_t cells = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), cells);
  KVKEEP_REQUIRE(error == std::errc() && end == text.data() + text.size() && cells > 0, "KVKEEP_CELLS is \"",
                 shortened(text), "\"; allowed a number of cells, 1 or more");
  const std::string arch = metadata(model, "general.architecture").value_or("");
  KVKEEP_REQUIRE_AS(Unsupported, !metadata(model, arch + ".rope.scaling.original_context_length"),
                    "llama: the RoPE of the model (", arch,
                    ") follows the size of the context; allowed without KVKEEP_CELLS");
  const std::uint32_t asked =
      params.n_ctx != 0 ? params.n_ctx : static_cast<std::uint32_t>(KVKEEP_OWN(llama_model_n_ctx_train)(model));
  if (padded(cells) >= padded(asked)) return 0;
  params.n_ctx = cells;
  return params.kv_unified ? padded(asked)
                           : padded(padded(asked) / std::max(1U, params.n_seq_max)) * std::max(1U, params.n_seq_max);
}

/// llama_init_from_model() under the policy; null, with a sentence on stderr: the program's own context, alone.
llama_context* init_followed(llama_model* model, llama_context_params params, const std::string& policy) {
  std::unique_ptr<Followed> made;
  std::unique_ptr<llama_context, void (*)(llama_context*)> context(nullptr, KVKEEP_OWN(llama_free));
  try {
    require_same_structures();
    const std::string why = why_not(params);
    KVKEEP_REQUIRE_AS(Unsupported, why.empty(), why);
    const std::uint32_t asked = lower_cells(model, params);
    made = std::make_unique<Followed>(model, params, policy);
    made->asked = asked;
    context.reset(KVKEEP_OWN(llama_init_from_model)(model, params));
    KVKEEP_REQUIRE_AS(Unsupported, context != nullptr, "llama.cpp made no context as the policy needs it");
    made->evictor.attach(context.get());
    made->context = context.get();
    made->memory = KVKEEP_OWN(llama_get_memory)(context.get());
  } catch (const std::exception& error) {
    say(policy, " does not follow this context, which llama.cpp has alone: ", error.what());
    return nullptr;  // the context ends before the evictor
  }
  say(policy, " keeps a context of ", KVKEEP_OWN(llama_n_ctx)(context.get()), " cells",
      made->asked == 0 ? "" : text(", shown as ", made->asked), ", ", KVKEEP_OWN(llama_n_seq_max)(context.get()),
      " sequences");
  Contexts& all = contexts();
  const std::lock_guard lock(all.mutex);
  all.all.push_back(std::move(made));
  return context.release();
}

/// A model without weights, which runs no token.
llama_model* loaded(llama_model* model, const llama_model_params& params) {
  const std::lock_guard lock(contexts().mutex);
  if (params.no_alloc)
    contexts().empty.insert(model);
  else
    contexts().empty.erase(model);
  return model;
}
bool is_empty(const llama_model* model) {
  const std::lock_guard lock(contexts().mutex);
  return contexts().empty.contains(model);
}

llama_context* init(llama_model* model, llama_context_params params) {
  const Inside guard;
  const auto alone = [&] { return KVKEEP_OWN(llama_init_from_model)(model, params); };
  const std::string policy = policy_text();
  if (policy.empty()) {
    if (!chosen()) say("KVKEEP_POLICY is not set, so llama.cpp is alone; for example tova,budget=1024,share=union");
    return alone();
  }
  if (policy == "help") {
    say(list_of_policies());
    return nullptr;
  }
  try {
    static_cast<void>(make_policy(policy));
  } catch (const std::exception& error) {
    say("KVKEEP_POLICY is \"", shortened(policy), "\", so no context is made: ", error.what());
    return nullptr;
  }
  if (model == nullptr || is_empty(model)) return alone();
  llama_context* made = init_followed(model, params, policy);
  if (made != nullptr) return made;
  {
    const std::lock_guard lock(contexts().mutex);
    contexts().left.insert(model);
  }
  return alone();
}

void end(llama_context* context) {
  std::unique_ptr<Followed> ended;
  if (!inside) {
    Contexts& all = contexts();
    const std::lock_guard lock(all.mutex);
    const auto found = std::ranges::find_if(all.all, [&](const auto& f) { return f->context == context; });
    if (found != all.all.end()) {
      ended = std::move(*found);
      all.all.erase(found);
    }
  }
  KVKEEP_OWN(llama_free)(context);
  if (ended) ended->sum_up();
}

// ---- Batches ----

/// llama_decode() or llama_process(), of a batch that the evictor sees as `batch`.
template <class Call>
std::int32_t decode(Followed& f, const llama_batch& batch, const Call& call) {
  const Inside guard;
  try {
    f.evictor.begin(batch);
  } catch (const Unsupported& error) {
    if (f.evictor.attached() && f.evictor.spent().cut > 0) {
      say(error.what());
      return kInvalidBatch;
    }
    f.let_go(error);
    return call();
  } catch (const std::exception& error) {
    if (f.evictor.attached())
      say(error.what());
    else
      f.let_go(error);  // an event failed
    return kInvalidBatch;
  }
  const std::int32_t status = call();
  try {
    f.evictor.end(status);
    f.count(status == 0 ? batch.n_tokens : 0);
  } catch (const std::exception& error) {
    if (f.evictor.attached()) {  // positions were moved: nothing of the batch was computed
      say(error.what());
      return kInvalidBatch;
    }
    f.let_go(error);
  }
  return status;
}

/// What a llama_batch_ext holds, which cannot be asked.
struct Batch {
  std::vector<llama_pos> positions = {};
  std::vector<std::vector<llama_seq_id>> sequences = {};
  std::vector<std::int8_t> outputs = {};

  std::int32_t add(std::int32_t index, llama_seq_id sequence) {
    if (index < 0) return index;
    positions.push_back(0);
    sequences.push_back({sequence});
    outputs.push_back(0);
    return index;
  }
  [[nodiscard]] bool holds(std::int32_t index) const { return index >= 0 && index < std::ssize(positions); }
  bool output(std::int32_t index, bool set, bool value) {
    if (set && holds(index)) outputs[static_cast<std::size_t>(index)] = value ? 1 : 0;
    return set;
  }
};

struct Batches {
  std::mutex mutex;
  std::map<const llama_batch_ext*, Batch> all;
};
Batches& batches() {
  static auto* const all = new Batches;
  return *all;
}
template <class F>
auto with_batch(const llama_batch_ext* batch, const F& f) {
  const std::lock_guard lock(batches().mutex);
  return f(batches().all[batch]);
}

/// llama_process() to decode.
template <class Call>
std::int32_t decode_ext(Followed& f, Batch batch, const Call& call) {
  std::vector<std::int32_t> counts;
  std::vector<llama_seq_id*> ids;
  for (std::vector<llama_seq_id>& of_token : batch.sequences) {
    counts.push_back(static_cast<std::int32_t>(of_token.size()));
    ids.push_back(of_token.data());
  }
  llama_batch seen{};
  seen.n_tokens = static_cast<std::int32_t>(batch.positions.size());
  seen.pos = batch.positions.data();
  seen.n_seq_id = counts.data();
  seen.seq_id = ids.data();
  seen.logits = batch.outputs.data();
  return decode(f, seen, call);
}

// ---- Sequences ----

/// The sequence has tokens in [p0, p1).
bool reaches(const Followed& f, llama_seq_id sequence, llama_pos p0, llama_pos p1) {
  return f.has(sequence) && p0 <= KVKEEP_OWN(llama_memory_seq_pos_max)(f.memory, sequence) && (p1 < 0 || p1 > p0);
}

/// Tokens that the window of layers that slide may lack behind a state that was put back, since llama-server takes back
/// one of it: llama.cpp goes on without them.
constexpr std::int64_t kLacks = 1;

/// The program may take [p0, p1) out of a sequence.
bool may_remove(const Followed& f, llama_seq_id sequence, llama_pos p0, llama_pos p1) {
  if (!reaches(f, sequence, p0, p1)) return true;
  const llama_pos newest = KVKEEP_OWN(llama_memory_seq_pos_max)(f.memory, sequence);
  const std::string what =
      text("positions [", p0, ", ", p1, ") of sequence ", sequence, ", which has ", newest + 1, " tokens, stay: ");
  if (p1 >= 0 && p1 <= newest) {
    say(what, "the middle is not taken out under a policy; allowed the newest ones (p1 = -1), or all");
    return false;
  }
  const std::int64_t least = f.evictor.least_length(sequence, true);
  if (p0 > 0 && p0 < least) {
    say(what, "an event has cut what comes before; allowed from ", least, " on, or all");
    return false;
  }
  const std::int64_t whole = f.evictor.least_length(sequence);
  if (p0 > 0 && p0 < whole - kLacks) {
    say(what, "layers that slide have lost tokens of their window then; allowed from ", whole, " on, or all");
    return false;
  }
  return true;
}

bool remove(Followed& f, llama_seq_id sequence, llama_pos p0, llama_pos p1) {
  p0 = std::max(p0, 0);
  std::vector<llama_seq_id> all{sequence};
  if (sequence < 0) {
    all.resize(KVKEEP_OWN(llama_n_seq_max)(f.context));
    for (std::size_t s = 0; s < all.size(); ++s) all[s] = static_cast<llama_seq_id>(s);
  }
  if (!std::ranges::all_of(all, [&](llama_seq_id s) { return may_remove(f, s, p0, p1); })) return false;
  for (const llama_seq_id s : all)
    if (p0 > 0 && reaches(f, s, p0, p1) && !f.evictor.go_back(s, p0, true)) return false;
  return KVKEEP_OWN(llama_memory_seq_rm)(f.memory, sequence, p0, p1);
}

/// The sequence as llama.cpp's state and the evictor's, under another id: rows of its own.
void clone(Followed& f, llama_seq_id from, llama_seq_id to, std::int64_t tokens) {
  const std::vector<std::byte> saved = f.evictor.save(from);
  std::vector<std::uint8_t> state(KVKEEP_OWN(llama_state_seq_get_size)(f.context, from));
  state.resize(KVKEEP_OWN(llama_state_seq_get_data)(f.context, state.data(), state.size(), from));
  const std::size_t read = KVKEEP_OWN(llama_state_seq_set_data)(f.context, state.data(), state.size(), to);
  KVKEEP_REQUIRE_AS(StateError, read > 0, "llama: there is no room for a copy of sequence ", from);
  f.evictor.restore(to, saved);
  KVKEEP_REQUIRE_AS(StateError, f.evictor.go_back(to, tokens), "llama: sequence ", from, " was cut after its first ",
                    tokens, " tokens; allowed all of them");
}

void copy(Followed& f, llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1) {
  const auto full = KVKEEP_OWN(llama_memory_seq_cp);
  if (from == to || !f.has(from)) return full(f.memory, from, to, p0, p1);
  const std::int64_t length = f.evictor.keeper().logical_length(from);
  const std::int64_t tokens = p1 < 0 ? length : std::min<std::int64_t>(p1, length);
  const auto refused = [&](const std::string& why) { say("sequence ", from, " is not copied to ", to, ": ", why); };
  if (tokens == 0) return;
  if (p0 > 0) return refused(text("it begins at position ", p0, "; allowed from 0 on"));
  if (f.has(to)) return refused(text("sequence ", to, " has tokens already; allowed an empty one"));
  try {
    f.evictor.copy(from, to, static_cast<std::int32_t>(tokens));
    return;
  } catch (const Error&) {  // it was cut, or cells would be shared that events rewrite
  }
  try {
    clone(f, from, to, tokens);
  } catch (const std::exception& error) {
    KVKEEP_OWN(llama_memory_seq_rm)(f.memory, to, -1, -1);
    refused(error.what());
  }
}

/// Of a sequence under a policy.
void say_moved(const Followed* f, llama_seq_id sequence, const char* how) {
  if (f != nullptr && f->has(sequence))
    say("positions of sequence ", sequence, " are ", how,
        ", which no policy follows: its next batch is refused until all of it is removed");
}

/// The position before which a sequence cannot be taken back: programs that keep a prefix ask for the smallest one, and
/// whether it lies before their prefix. Where layers slide they would take the window off the prefix first: it is in
/// this position already, and is shown to them as short as can be (shown_window()).
llama_pos least_position(Followed& f, llama_seq_id sequence) {
  const llama_pos own = KVKEEP_OWN(llama_memory_seq_pos_min)(f.memory, sequence);
  const bool slides = f.evictor.window() > 0 && !f.evictor.has_states();
  const bool known = !f.alone && f.has(sequence);
  const auto least = known    ? static_cast<llama_pos>(f.evictor.least_length(sequence))
                     : slides ? least_for_window(own, f.evictor.window())
                              : 0;
  return slides && own >= 0 ? std::max(least - 1, 0) : std::max(own, least - 1);
}

/// What is shown instead of a window of `tokens`. Not 0: programs save states to go back to where layers slide. As it
/// is where another context of the model is left alone.
std::int32_t shown_window(const llama_model* model, std::int32_t tokens) {
  const Followed* const f = contexts().told([=](const Followed& one) { return one.model == model; });
  if (f == nullptr || tokens == 0) return tokens;
  const std::lock_guard lock(contexts().mutex);
  if (contexts().left.contains(model)) return tokens;
  return f->evictor.has_states() ? 0 : 1;
}

/// Runs what may throw; says why, and returns `otherwise`, if it does.
template <class F, class T>
T guarded(const F& f, T otherwise) {
  const Inside guard;
  try {
    return f();
  } catch (const std::exception& error) {
    say(error.what());
    return otherwise;
  }
}

// ---- States: llama.cpp's bytes, then ours ----

/// A part of a state, without the cells of full layers, says how a sequence was as long as nothing cuts them: what a
/// program asks for as a part is the whole.
llama_state_seq_flags whole(const Followed& f, llama_state_seq_flags flags) {
  return f.evictor.mixed() ? LLAMA_STATE_SEQ_FLAGS_NONE : flags;
}

/// Before the evictor's bytes.
struct Tail {
  std::array<char, 8> magic = {'k', 'v', 'k', 't', 'a', 'i', 'l', '1'};
  std::uint64_t bytes = 0;
};

/// Nothing for a sequence without tokens.
std::vector<std::byte> tail_of(Followed& f, llama_seq_id sequence) {
  if (f.alone || !f.has(sequence)) return {};
  const std::vector<std::byte> saved = f.evictor.save(sequence);
  Tail tail;
  tail.bytes = saved.size();
  std::vector<std::byte> out(sizeof tail + saved.size());
  std::memcpy(out.data(), &tail, sizeof tail);
  std::ranges::copy(saved, out.begin() + sizeof tail);
  return out;
}

/// A sequence that llama.cpp has just read, and the bytes that follow. Returns how many of them are ours.
std::size_t take_tail(Followed& f, llama_seq_id sequence, std::span<const std::byte> behind) {
  Tail tail;
  const auto magic = tail.magic;
  if (behind.size() >= sizeof tail) std::memcpy(&tail, behind.data(), sizeof tail);
  const bool ours = behind.size() >= sizeof tail && tail.magic == magic;
  try {
    KVKEEP_REQUIRE(!ours || tail.bytes <= behind.size() - sizeof tail, "llama: the state of sequence ", sequence,
                   " lacks its end; allowed all of its bytes");
    if (f.alone || KVKEEP_OWN(llama_memory_seq_pos_max)(f.memory, sequence) < 0)
      return ours ? sizeof tail + tail.bytes : 0;
    f.evictor.restore(sequence, ours ? behind.subspan(sizeof tail, tail.bytes) : std::span<const std::byte>());
  } catch (...) {
    KVKEEP_OWN(llama_memory_seq_rm)(f.memory, sequence, -1, -1);
    throw;
  }
  return ours ? sizeof tail + tail.bytes : 0;
}

template <class Get>
std::size_t get_state(Followed& f, llama_seq_id sequence, std::uint8_t* to, std::size_t size, const Get& get) {
  return guarded(
      [&]() -> std::size_t {
        const std::vector<std::byte> tail = tail_of(f, sequence);
        const std::size_t written = size < tail.size() ? 0 : get(size - tail.size());
        if (written == 0) return 0;
        if (!tail.empty()) std::memcpy(to + written, tail.data(), tail.size());
        return written + tail.size();
      },
      std::size_t{0});
}

template <class Set>
std::size_t set_state(Followed& f, llama_seq_id sequence, const std::uint8_t* from, std::size_t size, const Set& set) {
  return guarded(
      [&]() -> std::size_t {
        const std::size_t read = set();
        if (read == 0 && f.evictor.mixed()) {  // a part of it may have been read
          KVKEEP_OWN(llama_memory_seq_rm)(f.memory, sequence, -1, -1);
          say("the bytes of sequence ", sequence,
              " are no state that this library has given, and the sequence is empty");
        }
        if (read == 0 || read > size) return read;
        const auto* const bytes = static_cast<const std::byte*>(static_cast<const void*>(from));
        return read + take_tail(f, sequence, {bytes + read, size - read});
      },
      std::size_t{0});
}

/// The file ends with ours.
std::size_t append_tail(Followed& f, const char* path, llama_seq_id sequence) {
  const std::vector<std::byte> tail = tail_of(f, sequence);
  std::ofstream file(path, std::ios::binary | std::ios::app);
  file.write(static_cast<const char*>(static_cast<const void*>(tail.data())), std::ssize(tail));
  file.close();
  KVKEEP_REQUIRE_AS(StateError, !file.fail(), "llama: \"", shortened(path), "\" cannot be written; allowed a file");
  return tail.size();
}

/// llama.cpp has read the first `read` bytes of the file.
std::size_t read_tail(Followed& f, const char* path, std::size_t read, llama_seq_id sequence) {
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(read));
  const std::vector<char> behind{std::istreambuf_iterator<char>(file), {}};
  return take_tail(f, sequence, std::as_bytes(std::span(behind)));
}

/// States of all sequences at once do not say which slots they are.
bool refuses_whole_state(const llama_context* context) {
  if (contexts().of(context) == nullptr) return false;
  say("the state of a whole context is not read under a policy; allowed that of each sequence (llama_state_seq_*)");
  return true;
}

}  // namespace
}  // namespace kvkeep::llama::preload

// ---- llama.cpp's functions ----

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // old names

using namespace kvkeep::llama;
using namespace kvkeep::llama::preload;

#define KVKEEP_EXPORT extern "C" __attribute__((visibility("default")))
#define KVKEEP_FOLLOWED(whose) Followed* const f = contexts().of(whose)

KVKEEP_EXPORT llama_context* llama_init_from_model(llama_model* model, llama_context_params params) {
  return inside ? KVKEEP_OWN(llama_init_from_model)(model, params) : init(model, params);
}
KVKEEP_EXPORT llama_context* llama_new_context_with_model(llama_model* model, llama_context_params params) {
  return llama_init_from_model(model, params);
}
KVKEEP_EXPORT void llama_free(llama_context* context) { end(context); }

KVKEEP_EXPORT llama_model* llama_model_load_from_file(const char* path, llama_model_params params) {
  return loaded(KVKEEP_OWN(llama_model_load_from_file)(path, params), params);
}
KVKEEP_EXPORT llama_model* llama_model_load_from_splits(const char** paths, std::size_t count,
                                                        llama_model_params params) {
  return loaded(KVKEEP_OWN(llama_model_load_from_splits)(paths, count, params), params);
}

KVKEEP_EXPORT void llama_model_free(llama_model* model) {
  {
    const std::lock_guard lock(contexts().mutex);
    contexts().left.erase(model);
    contexts().empty.erase(model);
  }
  KVKEEP_OWN(llama_model_free)(model);
}

KVKEEP_EXPORT std::int32_t llama_decode(llama_context* context, llama_batch batch) {
  KVKEEP_FOLLOWED(context);
  const auto call = [&] { return KVKEEP_OWN(llama_decode)(context, batch); };
  return f == nullptr ? call() : decode(*f, batch, call);
}

KVKEEP_EXPORT bool llama_memory_seq_rm(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1) {
  KVKEEP_FOLLOWED(memory);
  if (f == nullptr) return KVKEEP_OWN(llama_memory_seq_rm)(memory, sequence, p0, p1);
  return guarded([&] { return remove(*f, sequence, p0, p1); }, false);
}
KVKEEP_EXPORT void llama_memory_seq_cp(llama_memory_t memory, llama_seq_id from, llama_seq_id to, llama_pos p0,
                                       llama_pos p1) {
  KVKEEP_FOLLOWED(memory);
  if (f == nullptr) return KVKEEP_OWN(llama_memory_seq_cp)(memory, from, to, p0, p1);
  guarded([&] { return copy(*f, from, to, p0, p1), 0; }, 0);
}
KVKEEP_EXPORT llama_pos llama_memory_seq_pos_min(llama_memory_t memory, llama_seq_id sequence) {
  Followed* const f = contexts().told(Contexts::is(memory));
  if (f == nullptr) return KVKEEP_OWN(llama_memory_seq_pos_min)(memory, sequence);
  return guarded([&] { return least_position(*f, sequence); }, llama_pos{-1});
}
KVKEEP_EXPORT std::int32_t llama_model_n_swa(const llama_model* model) {
  return shown_window(model, KVKEEP_OWN(llama_model_n_swa)(model));
}
KVKEEP_EXPORT bool llama_memory_can_shift(llama_memory_t memory) {
  return contexts().of(memory) == nullptr && KVKEEP_OWN(llama_memory_can_shift)(memory);
}
KVKEEP_EXPORT void llama_memory_seq_add(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1,
                                        llama_pos delta) {
  if (delta != 0) say_moved(contexts().of(memory), sequence, "moved (llama_memory_seq_add)");
  KVKEEP_OWN(llama_memory_seq_add)(memory, sequence, p0, p1, delta);
}
KVKEEP_EXPORT void llama_memory_seq_div(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1,
                                        int by) {
  if (by != 1) say_moved(contexts().of(memory), sequence, "divided (llama_memory_seq_div)");
  KVKEEP_OWN(llama_memory_seq_div)(memory, sequence, p0, p1, by);
}

KVKEEP_EXPORT std::uint32_t llama_n_ctx(const llama_context* context) {
  KVKEEP_FOLLOWED(context);
  return f != nullptr && f->asked > 0 ? f->asked : KVKEEP_OWN(llama_n_ctx)(context);
}
KVKEEP_EXPORT std::uint32_t llama_n_ctx_seq(const llama_context* context) {
  KVKEEP_FOLLOWED(context);
  const std::uint32_t cells = KVKEEP_OWN(llama_n_ctx_seq)(context);
  return f != nullptr && f->asked > 0 ? f->asked / (KVKEEP_OWN(llama_n_ctx)(context) / cells) : cells;
}

// Batches whose tokens are set one by one.
KVKEEP_EXPORT std::int32_t llama_process(llama_context* context, llama_process_type type, llama_batch_ext* batch) {
  KVKEEP_FOLLOWED(context);
  const auto call = [&] { return KVKEEP_OWN(llama_process)(context, type, batch); };
  if (f == nullptr || type != LLAMA_PROCESS_TYPE_DECODE) return call();
  return decode_ext(*f, with_batch(batch, [](const Batch& own) { return own; }), call);
}
KVKEEP_EXPORT void llama_batch_ext_free(llama_batch_ext* batch) {
  KVKEEP_OWN(llama_batch_ext_free)(batch);
  const std::lock_guard lock(batches().mutex);
  batches().all.erase(batch);
}
KVKEEP_EXPORT void llama_batch_ext_clear(llama_batch_ext* batch) {
  KVKEEP_OWN(llama_batch_ext_clear)(batch);
  with_batch(batch, [](Batch& own) { return own = {}, 0; });
}
KVKEEP_EXPORT std::int32_t llama_batch_ext_add(llama_batch_ext* batch, llama_seq_id sequence) {
  const std::int32_t index = KVKEEP_OWN(llama_batch_ext_add)(batch, sequence);
  return with_batch(batch, [&](Batch& own) { return own.add(index, sequence); });
}
KVKEEP_EXPORT std::int32_t llama_batch_ext_add_token(llama_batch_ext* batch, llama_seq_id sequence, llama_token id) {
  const std::int32_t index = KVKEEP_OWN(llama_batch_ext_add_token)(batch, sequence, id);
  return with_batch(batch, [&](Batch& own) { return own.add(index, sequence); });
}
KVKEEP_EXPORT std::int32_t llama_batch_ext_add_embd(llama_batch_ext* batch, llama_seq_id sequence, llama_embd embd) {
  const std::int32_t index = KVKEEP_OWN(llama_batch_ext_add_embd)(batch, sequence, embd);
  return with_batch(batch, [&](Batch& own) { return own.add(index, sequence); });
}
KVKEEP_EXPORT bool llama_batch_ext_add_seq(llama_batch_ext* batch, std::int32_t index, llama_seq_id sequence) {
  const bool added = KVKEEP_OWN(llama_batch_ext_add_seq)(batch, index, sequence);
  with_batch(batch, [&](Batch& own) {
    if (!added || !own.holds(index)) return 0;
    std::vector<llama_seq_id>& ids = own.sequences[static_cast<std::size_t>(index)];
    if (std::ranges::find(ids, sequence) == ids.end()) ids.push_back(sequence);
    return 0;
  });
  return added;
}
KVKEEP_EXPORT bool llama_batch_ext_set_pos(llama_batch_ext* batch, std::int32_t index, const llama_pos* position) {
  const bool set = KVKEEP_OWN(llama_batch_ext_set_pos)(batch, index, position);
  with_batch(batch, [&](Batch& own) {
    if (set && own.holds(index)) own.positions[static_cast<std::size_t>(index)] = *position;
    return 0;
  });
  return set;
}
KVKEEP_EXPORT bool llama_batch_ext_set_output_logits(llama_batch_ext* batch, std::int32_t index, bool value) {
  const bool set = KVKEEP_OWN(llama_batch_ext_set_output_logits)(batch, index, value);
  return with_batch(batch, [&](Batch& own) { return own.output(index, set, value); });
}
KVKEEP_EXPORT bool llama_batch_ext_set_output_embd(llama_batch_ext* batch, std::int32_t index, bool value) {
  const bool set = KVKEEP_OWN(llama_batch_ext_set_output_embd)(batch, index, value);
  return with_batch(batch, [&](Batch& own) { return own.output(index, set, value); });
}

// States.
#define KVKEEP_TOLD(context) Followed* const f = contexts().told(Contexts::is(context))

KVKEEP_EXPORT std::size_t llama_state_seq_get_size_ext(llama_context* context, llama_seq_id sequence,
                                                       llama_state_seq_flags flags) {
  KVKEEP_TOLD(context);
  if (f == nullptr) return KVKEEP_OWN(llama_state_seq_get_size_ext)(context, sequence, flags);
  return guarded(
      [&] {
        return KVKEEP_OWN(llama_state_seq_get_size_ext)(context, sequence, whole(*f, flags)) +
               tail_of(*f, sequence).size();
      },
      std::size_t{0});
}
KVKEEP_EXPORT std::size_t llama_state_seq_get_data_ext(llama_context* context, std::uint8_t* to, std::size_t size,
                                                       llama_seq_id sequence, llama_state_seq_flags flags) {
  KVKEEP_TOLD(context);
  if (f == nullptr) return KVKEEP_OWN(llama_state_seq_get_data_ext)(context, to, size, sequence, flags);
  return get_state(*f, sequence, to, size, [&](std::size_t room) {
    return KVKEEP_OWN(llama_state_seq_get_data_ext)(context, to, room, sequence, whole(*f, flags));
  });
}
KVKEEP_EXPORT std::size_t llama_state_seq_set_data_ext(llama_context* context, const std::uint8_t* from,
                                                       std::size_t size, llama_seq_id sequence,
                                                       llama_state_seq_flags flags) {
  KVKEEP_TOLD(context);
  if (f == nullptr) return KVKEEP_OWN(llama_state_seq_set_data_ext)(context, from, size, sequence, flags);
  return set_state(*f, sequence, from, size, [&] {
    return KVKEEP_OWN(llama_state_seq_set_data_ext)(context, from, size, sequence, whole(*f, flags));
  });
}
KVKEEP_EXPORT std::size_t llama_state_seq_get_size(llama_context* context, llama_seq_id sequence) {
  return llama_state_seq_get_size_ext(context, sequence, LLAMA_STATE_SEQ_FLAGS_NONE);
}
KVKEEP_EXPORT std::size_t llama_state_seq_get_data(llama_context* context, std::uint8_t* to, std::size_t size,
                                                   llama_seq_id sequence) {
  return llama_state_seq_get_data_ext(context, to, size, sequence, LLAMA_STATE_SEQ_FLAGS_NONE);
}
KVKEEP_EXPORT std::size_t llama_state_seq_set_data(llama_context* context, const std::uint8_t* from, std::size_t size,
                                                   llama_seq_id sequence) {
  return llama_state_seq_set_data_ext(context, from, size, sequence, LLAMA_STATE_SEQ_FLAGS_NONE);
}
KVKEEP_EXPORT std::size_t llama_state_seq_save_file(llama_context* context, const char* path, llama_seq_id sequence,
                                                    const llama_token* tokens, std::size_t count) {
  KVKEEP_FOLLOWED(context);
  const auto save = [&] { return KVKEEP_OWN(llama_state_seq_save_file)(context, path, sequence, tokens, count); };
  if (f == nullptr) return save();
  return guarded(
      [&]() -> std::size_t {
        const std::size_t written = save();
        return written == 0 ? 0 : written + append_tail(*f, path, sequence);
      },
      std::size_t{0});
}
KVKEEP_EXPORT std::size_t llama_state_seq_load_file(llama_context* context, const char* path, llama_seq_id sequence,
                                                    llama_token* tokens, std::size_t room, std::size_t* count) {
  KVKEEP_FOLLOWED(context);
  const auto load = [&] { return KVKEEP_OWN(llama_state_seq_load_file)(context, path, sequence, tokens, room, count); };
  if (f == nullptr || tokens == nullptr) return load();
  return guarded(
      [&]() -> std::size_t {
        const std::size_t read = load();
        return read == 0 ? 0 : read + read_tail(*f, path, read, sequence);
      },
      std::size_t{0});
}
KVKEEP_EXPORT std::size_t llama_state_set_data(llama_context* context, const std::uint8_t* from, std::size_t size) {
  return refuses_whole_state(context) ? 0 : KVKEEP_OWN(llama_state_set_data)(context, from, size);
}
KVKEEP_EXPORT bool llama_state_load_file(llama_context* context, const char* path, llama_token* tokens,
                                         std::size_t room, std::size_t* count) {
  return !refuses_whole_state(context) && KVKEEP_OWN(llama_state_load_file)(context, path, tokens, room, count);
}
KVKEEP_EXPORT std::size_t llama_set_state_data(llama_context* context, const std::uint8_t* from) {
  return refuses_whole_state(context) ? 0 : KVKEEP_OWN(llama_set_state_data)(context, from);
}
KVKEEP_EXPORT bool llama_load_session_file(llama_context* context, const char* path, llama_token* tokens,
                                           std::size_t room, std::size_t* count) {
  return !refuses_whole_state(context) && KVKEEP_OWN(llama_load_session_file)(context, path, tokens, room, count);
}

// ---- For programs that load this library themselves ----

/// Stands before the llama.cpp of this path, which the program has loaded. 0, or 1: it has not.
KVKEEP_EXPORT int kvkeep_llama_bind(const char* path) {
  handle = dlopen(path, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
  if (handle == nullptr) say("\"", path, "\" is not loaded; allowed the llama.cpp of this program");
  return handle == nullptr ? 1 : 0;
}
/// The policy of contexts from now on, instead of KVKEEP_POLICY; empty: none; null: KVKEEP_POLICY again.
KVKEEP_EXPORT void kvkeep_llama_policy(const char* text) {
  if (text == nullptr)
    chosen().reset();
  else
    chosen() = text;
}
/// What was said last on stderr in this thread, which goes on until the next sentence.
KVKEEP_EXPORT const char* kvkeep_llama_said() { return said.c_str(); }
/// Events of a context so far; -1: no policy keeps it.
KVKEEP_EXPORT std::int64_t kvkeep_llama_events(const llama_context* context) {
  KVKEEP_FOLLOWED(context);
  return f == nullptr ? -1 : f->events;
}
