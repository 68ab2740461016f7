// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The living sequences of a keeper, and parts: features of sequences that not every engine uses, such as pinned spans.
/// The keeper calls each part at the same places of a sequence's life; what a part keeps, only it knows.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/row.h"
#include "kvkeep/keep/columns.h"
#include "kvkeep/observe/observation.h"
#include "kvkeep/observe/query_ring.h"
#include "kvkeep/parts/report.h"
#include "kvkeep/policy/machine.h"

namespace kvkeep {

class KVPolicy;
class Machine;
class Sequences;
class StateFile;
using StateTensors = std::vector<std::pair<std::string, Tensor>>;

/// A prompt that runs through the layers while a part lets only some of its tokens go on.
struct Passing {
  std::int32_t tokens = 0;            ///< of the whole prompt
  std::vector<std::int32_t> present;  ///< logical positions of those that go on to `next_layer`
  std::int32_t contiguous = 0;        ///< how many of them are the newest of the prompt, without a gap
  std::int32_t next_layer = 0;
};

/// One sequence. What a feature keeps of it is in its part.
struct SequenceState {
  Columns columns;
  QueryRing ring;
  std::int32_t prefix = 0;          ///< tokens that were cached before the sequence joined
  std::int64_t logical = 0;         ///< tokens seen, prefix included
  std::int64_t last_event = 0;      ///< logical length at the last event
  std::int64_t prompt = -1;         ///< tokens of the prompt; -1 until known
  std::int32_t prompt_end = 0;      ///< once it has ended: logical position below which its tokens are
  std::int32_t event_position = 0;  ///< next position at the last event, or after the prefix
  std::int64_t asked = 0;           ///< logical length when the policy was last asked
  std::int32_t next_position = 0;
  std::int32_t settled = 0;  ///< logical position below which every decision is final
  std::optional<Passing> passing = {};
  std::vector<std::int32_t> prompt_slots = {};  ///< [full layers] on a device: of the prompt, once cut; -1 before
  bool pending = false;                         ///< an event cuts it that finish() has yet to complete
  std::uint64_t step = 0;                       ///< the last begin_step() that named it
  std::int32_t step_tokens = 0;                 ///< and the tokens it brought

  mutable std::uint64_t mark = 0;  ///< of the last call that named it: Sequences::resolve()
};

/// What a part is made for. All of it outlives the part.
struct PartContext {
  Sequences& sequences;
  const KVPolicy& policy;
  Machine& machine;
  std::span<const Tensor> output_projections;  ///< Provided::output_projections
  Threads threads = {};                        ///< Provided::threads: for UsingThreads in calls of the part's own
};

/// One event, as parts see it: the rows of the sequences that are due, and what was decided for them. `ids`: of the
/// view; Row::sequence and RowGroup::sequence index them.
struct PartEvent {
  const RowTable& table;
  const Decision& decision;
  std::span<const SequenceId> ids;
};

/// Every function may be left out. Those that say so throw, before anything is written; the others must not.
class Part {
 public:
  explicit Part(const PartContext& context) : context_(context) {}
  virtual ~Part() = default;
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  /// A sequence begins; it is among the sequences. May throw: it is then as if it had not joined.
  virtual void join(SequenceId) {}
  /// A sequence that has joined goes on as a copy of another, all of it: takes over what is kept of that. May throw.
  virtual void fork(SequenceId /*child*/, SequenceId /*parent*/) {}
  /// It ends, whether join(), fork() and restore() have run for it or not.
  virtual void leave(SequenceId) noexcept {}
  /// Positions of its tokens must be below this.
  [[nodiscard]] virtual std::int32_t most_positions() const { return kMostPositions; }

  /// Before new tokens of a sequence are recorded, in the first layer that shows them: room for append(). May throw.
  virtual void reserve_tokens(SequenceId, const SequenceState&, std::span<const std::int32_t> /*positions*/) {}
  /// They have been counted; their queries have yet to be filed.
  virtual void append(SequenceId, SequenceState&) noexcept {}
  /// The newest tokens were taken back.
  virtual void truncate(SequenceId, const SequenceState&) noexcept {}

  /// Throws StateError if the sequence lacks what the engine must have supplied before step().
  virtual void check_step(SequenceId, const SequenceState&) const {}
  /// Slots that rows of the sequence hold elsewhere: they count for its trigger.
  [[nodiscard]] virtual std::int64_t slots_elsewhere(const SequenceState&, SequenceId) const { return 0; }
  /// Adds to the evidence of an event what the policy reads of this part.
  virtual void describe(SequenceId, RowGroup&) const {}

  /// Throws InvalidArgument for a decision that this part cannot carry out.
  virtual void check_decision(const PartEvent&) const {}
  /// Before the rows of an event move: room for what settle() writes. May throw.
  virtual void reserve(const PartEvent&) {}
  /// They do not move after all.
  virtual void abandon() noexcept {}
  /// Those of one of its groups have moved.
  virtual void settle(const PartEvent&, std::size_t /*group*/) noexcept {}
  /// All have: adds what this part did.
  virtual void report(Report&) noexcept {}

#if KVKEEP_FILES
  /// Appends what it keeps of a sequence. Names of tensors begin with the part's own.
  virtual void save(SequenceId, StateTensors&) const {}
  /// Reads it back. The sequence is as it was when it was saved, in all but its parts. Throws InvalidArgument, which
  /// names the file, for what no sequence can hold.
  virtual void restore(SequenceId, const SequenceState&, const StateFile&) {}
#endif

 protected:
  [[nodiscard]] Sequences& sequences() const { return context_.sequences; }
  [[nodiscard]] const ModelSpec& spec() const;
  [[nodiscard]] const KVPolicy& policy() const { return context_.policy; }
  [[nodiscard]] Machine& machine() const { return context_.machine; }
  [[nodiscard]] std::span<const Tensor> output_projections() const { return context_.output_projections; }
  [[nodiscard]] Threads threads() const { return context_.threads; }

 private:
  PartContext context_;
};

/// What a part keeps of each sequence, for those of which it keeps something.
template <class T>
class PerSequence {
 public:
  /// Made if it is not there.
  T& operator[](SequenceId id) { return all_[id]; }
  /// Null if there is none.
  [[nodiscard]] const T* find(SequenceId id) const {
    const auto found = all_.find(id);
    return found == all_.end() ? nullptr : &found->second;
  }
  [[nodiscard]] T* find(SequenceId id) { return const_cast<T*>(std::as_const(*this).find(id)); }
  /// What is kept of one sequence is kept of the other, too.
  void copy(SequenceId to, SequenceId from) {
    if (const T* const kept = find(from)) all_.insert_or_assign(to, *kept);
  }
  void remove(SequenceId id) noexcept { all_.erase(id); }

 private:
  std::map<SequenceId, T> all_;
};

/// The cache of a keeper, from Keeper::bind().
struct BoundCache {
  std::vector<LayerKv> layers;                ///< [num_layers]; empty: none is bound
  RowTable form;                              ///< what all rows have in common
  std::vector<std::int64_t> slot_bytes = {};  ///< [full layers] K and V bytes of one slot of one head, scales included
};

/// Throws StateError: no sequence has this id.
[[noreturn]] inline void refuse_unknown(const char* operation, SequenceId id) {
  refuse<StateError>(operation, ": sequence ", id, " is not known; allowed after join(", id, "), and before leave(", id,
                     ")");
}

/// All sequences of one keeper, and its cache, which the keeper and its parts share.
class Sequences {
 public:
  /// `queries`: newest ones that are kept of each full layer. `machine` must outlive it.
  Sequences(ModelSpec spec, std::int32_t queries, Machine& machine);

  [[nodiscard]] const ModelSpec& spec() const { return spec_; }
  [[nodiscard]] std::span<const std::int32_t> full_layers() const { return full_layers_; }
  /// Index of a layer of the model among its full layers; -1: it is none.
  [[nodiscard]] std::int32_t index_of(std::int32_t layer) const {
    return layer_index_[static_cast<std::size_t>(layer)];
  }
  /// The same. Throws InvalidArgument for a layer that the model does not have.
  [[nodiscard]] std::int32_t index_of(const char* operation, std::int32_t layer) const;
  /// Rows of a sequence: full layers times KV heads.
  [[nodiscard]] std::int32_t rows() const { return static_cast<std::int32_t>(full_layers_.size()) * spec_.kv_heads; }
  /// Index of a row among them. Throws InvalidArgument for a layer that is not full, and for a head out of range.
  [[nodiscard]] std::int32_t row_of(std::int32_t layer, std::int32_t head) const;
  /// The first full layer whose RoPE the model spec leaves open; -1: none.
  [[nodiscard]] std::int32_t without_rope() const { return without_rope_; }

  /// As Keeper::bind(). may_move: whether the policy ever moves rows.
  void bind(std::vector<LayerKv> layers, bool may_move);
  /// Throws StateError if none is bound.
  [[nodiscard]] const BoundCache& cache(const char* operation) const {
    KVKEEP_REQUIRE_AS(StateError, !cache_.layers.empty(), operation, ": no cache is bound; allowed after bind()");
    return cache_;
  }
  [[nodiscard]] std::span<const LayerKv> layers() const { return cache_.layers; }
  /// K and V bytes of one slot in every row; 0 before bind().
  [[nodiscard]] std::int64_t slot_bytes() const {
    return spec_.kv_heads * std::accumulate(cache_.slot_bytes.begin(), cache_.slot_bytes.end(), std::int64_t{0});
  }

  /// As Keeper::join() and leave().
  void join(SequenceId id, std::int32_t tokens = 0, std::optional<std::int32_t> prompt = {});
  void leave(SequenceId id);
  /// `window`: whether the queries before what goes must still be held, or may be gone.
  void truncate(SequenceId id, std::int64_t logical_length, const char* operation = "truncate", bool window = true);
  /// As Keeper::rollback_limit() and least_length().
  [[nodiscard]] std::int64_t rollback_limit(SequenceId id) const;
  [[nodiscard]] std::int64_t least_length(SequenceId id) const { return least_length(at(id, "least_length")); }
  void fork(SequenceId child, SequenceId parent, std::optional<std::int64_t> tokens,
            std::optional<std::int32_t> prompt);
  /// The prompt of a sequence that came from another or from a file is longer than what that had of it.
  void set_prompt(const char* operation, SequenceId id, SequenceState& s, std::int32_t prompt) const;
  /// leave() at any time.
  void forget(SequenceId id) noexcept;

  [[nodiscard]] bool contains(SequenceId id) const { return all_.contains(id); }
  /// Throws StateError for an unknown sequence, in the name of the call.
  [[nodiscard]] const SequenceState& at(SequenceId id, const char* operation = "kvkeep") const;
  [[nodiscard]] SequenceState& at(SequenceId id, const char* operation = "kvkeep") {
    return const_cast<SequenceState&>(std::as_const(*this).at(id, operation));
  }
  /// The same; throws StateError also while an event of it is pending, so that its rows are not as counted.
  [[nodiscard]] const SequenceState& ready(const char* operation, SequenceId id) const;
  [[nodiscard]] SequenceState& ready(const char* operation, SequenceId id) {
    return const_cast<SequenceState&>(std::as_const(*this).ready(operation, id));
  }
  /// Throws StateError if only some tokens of its prompt go on through the layers, and more layers are to come.
  void require_whole(const char* operation, SequenceId id, const SequenceState& s) const;
  /// ready() for every sequence that a call names, in its order; valid until the next call of a method. Throws
  /// InvalidArgument if one is named twice.
  std::span<SequenceState* const> resolve(const char* operation, std::span<const SequenceId> ids) const;
  /// The same; throws InvalidArgument also unless indptr has a range for every sequence.
  std::span<SequenceState* const> resolve(const char* operation, std::span<const SequenceId> ids,
                                          std::span<const std::int32_t> indptr) const;
  /// What resolve() returned last.
  [[nodiscard]] std::span<SequenceState* const> resolved() const { return resolved_; }
  [[nodiscard]] auto begin() const { return all_.begin(); }
  [[nodiscard]] auto end() const { return all_.end(); }

  /// Changes with everything that makes a plan out of date.
  [[nodiscard]] std::uint64_t version() const { return version_; }
  void changed() { ++version_; }

  void add(std::unique_ptr<Part> part);
  [[nodiscard]] std::span<const std::unique_ptr<Part>> parts() const { return parts_; }
  /// Null if the keeper has no such part.
  template <class P>
  [[nodiscard]] P* find() const {
    for (const std::unique_ptr<Part>& part : parts_)
      if (auto* found = dynamic_cast<P*>(part.get())) return found;
    return nullptr;
  }
  /// The least of Part::most_positions().
  [[nodiscard]] std::int32_t most_positions() const { return most_positions_; }

  Totals totals;  ///< of the keeper

 private:
  void check_taking_back(const char* operation, SequenceId id, const SequenceState& s, std::int64_t logical_length,
                         bool window = true) const;
  /// Nothing before the last event can be taken back, nor what was cached before the sequence joined.
  [[nodiscard]] static std::int64_t least_length(const SequenceState& s) {
    return std::max<std::int64_t>(s.last_event, s.prefix);
  }

  ModelSpec spec_;
  std::int32_t queries_;
  Machine* machine_;
  BoundCache cache_;
  std::vector<std::int32_t> full_layers_;
  std::vector<std::int32_t> layer_index_;  ///< [num_layers]
  std::int32_t without_rope_;
  std::int32_t most_positions_ = kMostPositions;
  std::map<SequenceId, SequenceState> all_;
  std::vector<std::unique_ptr<Part>> parts_;
  std::uint64_t version_ = 0;
  mutable std::uint64_t mark_ = 0;  ///< of the current call: whatever carries it was already named
  mutable std::vector<SequenceState*> resolved_;
};

inline const ModelSpec& Part::spec() const { return context_.sequences.spec(); }

inline std::int32_t Sequences::row_of(std::int32_t layer, std::int32_t head) const {
  KVKEEP_REQUIRE(layer >= 0 && layer < spec_.num_layers() && index_of(layer) >= 0, "kvkeep: layer ", layer,
                 " is not a full-attention layer of the model");
  KVKEEP_REQUIRE(head >= 0 && head < spec_.kv_heads, "kvkeep: KV head ", head, " is out of range; allowed 0 to ",
                 spec_.kv_heads - 1);
  return index_of(layer) * spec_.kv_heads + head;
}

inline const SequenceState& Sequences::at(SequenceId id, const char* operation) const {
  const auto found = all_.find(id);
  if (found == all_.end()) refuse_unknown(operation, id);
  return found->second;
}

inline const SequenceState& Sequences::ready(const char* operation, SequenceId id) const {
  const SequenceState& s = at(id, operation);
  KVKEEP_REQUIRE_AS(StateError, !s.pending, operation, ": the event that cuts sequence ", id,
                    " is pending; allowed after finish()");
  return s;
}

namespace sequences_detail {

/// K and V bytes of one slot of one head, scales of its own and extras included.
inline std::int64_t slot_bytes(const ModelSpec& spec, const LayerKv& layer) {
  const LayerSides kv = sides_of(layer);
  const auto bytes = [](const Tensor& t, std::int64_t numbers) { return t.defined() ? numbers * t.element_size() : 0; };
  const auto own_bytes = [&](const Tensor& t, std::int64_t numbers = 1) {
    const bool of_all_slots = t.defined() && t.stride(kv.slot) == 0 && (!kv.paged || t.stride(0) == 0);
    return of_all_slots ? 0 : bytes(t, numbers);
  };
  return bytes(kv.keys, spec.key_dim) + (lies_within(kv.values, kv.keys) ? 0 : bytes(kv.values, spec.value_dim)) +
         own_bytes(kv.key_scales) + (lies_within(kv.value_scales, kv.key_scales) ? 0 : own_bytes(kv.value_scales)) +
         (kv.extra.defined() ? own_bytes(kv.extra, kv.extra.size(3)) : 0);
}

}  // namespace sequences_detail

inline Sequences::Sequences(ModelSpec spec, std::int32_t queries, Machine& machine)
    : spec_(std::move(spec)),
      queries_(queries),
      machine_(&machine),
      full_layers_(spec_.full_layers()),
      without_rope_(spec_.first_without_rope()) {
  layer_index_.assign(spec_.layers.size(), -1);
  for (std::size_t i = 0; i < full_layers_.size(); ++i)
    layer_index_[static_cast<std::size_t>(full_layers_[i])] = static_cast<std::int32_t>(i);
}

inline void Sequences::bind(std::vector<LayerKv> layers, bool may_move) {
  BoundCache cache{.layers = std::move(layers), .form = {}};
  cache.form = common_form(spec_, cache.layers, full_layers_);
  KVKEEP_REQUIRE(cache.form.device == machine_->device(), "cache: it is on ", cache.form.device.str(),
                 ", but the keeper works on ", machine_->device().str(),
                 "; allowed one device, named by Provided::accelerator if it is not the CPU");
  if (may_move) check_layout(spec_, cache.layers);
  for (const std::int32_t l : full_layers_)
    cache.slot_bytes.push_back(sequences_detail::slot_bytes(spec_, cache.layers[static_cast<std::size_t>(l)]));
  cache_ = std::move(cache);
  changed();
}

inline void Sequences::add(std::unique_ptr<Part> part) {
  most_positions_ = std::min(most_positions_, part->most_positions());
  parts_.push_back(std::move(part));
}

inline void Sequences::join(SequenceId id, std::int32_t tokens, std::optional<std::int32_t> prompt) {
  KVKEEP_REQUIRE_AS(StateError, !contains(id), "join: sequence ", id,
                    " is already here; allowed after leave(), or use reset()");
  KVKEEP_REQUIRE(tokens >= 0 && tokens <= kMostPositions, "join: sequence ", id, " begins with ", tokens,
                 " cached tokens; allowed 0 to ", kMostPositions);
  KVKEEP_REQUIRE(!prompt || *prompt >= tokens, "join: sequence ", id, " has a prompt of ", prompt.value_or(0),
                 " tokens and ", tokens, " of them cached; allowed at least the number cached, or none if unknown");
  const auto layers = static_cast<std::int32_t>(full_layers_.size());
  SequenceState fresh{Columns(rows(), machine_->memory()),
                      QueryRing(layers, queries_, spec_.query_heads, spec_.key_dim, machine_->memory())};
  std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens));
  std::iota(positions.begin(), positions.end(), 0);
  fresh.columns.append(positions);
  fresh.prefix = fresh.next_position = fresh.event_position = fresh.prompt_end = tokens;
  fresh.logical = fresh.asked = tokens;
  fresh.prompt = prompt.value_or(tokens > 0 ? tokens : -1);
  fresh.prompt_slots.assign(full_layers_.size(), -1);
  all_.emplace(id, std::move(fresh));
  try {
    for (const std::unique_ptr<Part>& part : parts_) part->join(id);
  } catch (...) {
    forget(id);
    throw;
  }
}

inline void Sequences::forget(SequenceId id) noexcept {
  for (const std::unique_ptr<Part>& part : parts_) part->leave(id);
  all_.erase(id);
}

inline void Sequences::leave(SequenceId id) {
  static_cast<void>(ready("leave", id));
  forget(id);
  changed();
}

inline void Sequences::check_taking_back(const char* operation, SequenceId id, const SequenceState& s,
                                         std::int64_t logical_length, bool window) const {
  const std::int64_t taken = s.logical - logical_length, least = least_length(s);
  KVKEEP_REQUIRE(logical_length >= 0 && logical_length <= s.logical, operation, ": sequence ", id, " is ", s.logical,
                 " tokens long; given ", logical_length, "; allowed 0 to that");
  KVKEEP_REQUIRE_AS(StateError, logical_length >= least, operation, ": sequence ", id, " was cut at length ",
                    s.last_event, " and what was dropped then is gone; given ", logical_length, "; allowed ", least,
                    " or more");
  KVKEEP_REQUIRE_AS(StateError, !window || queries_ == 0 || s.ring.can_forget(taken), operation, ": ", taken,
                    " tokens of sequence ", id, " are more than the query ring can take back; allowed at most ",
                    QueryRing::kRollback);
}

inline std::int64_t Sequences::rollback_limit(SequenceId id) const {
  const SequenceState& s = ready("rollback_limit", id);
  require_whole("rollback_limit", id, s);
  const std::int64_t since = s.logical - least_length(s);
  return queries_ == 0 ? since : std::min(since, s.ring.most_forgettable());
}

inline void Sequences::truncate(SequenceId id, std::int64_t logical_length, const char* operation, bool window) {
  SequenceState& s = ready(operation, id);
  require_whole(operation, id, s);
  check_taking_back(operation, id, s, logical_length, window);
  const std::int64_t taken = s.logical - logical_length;
  if (taken == 0) return;
  const auto newest = s.columns.newest();
  const bool some_left = logical_length > least_length(s);  // of tokens that came since
  s.next_position = some_left ? newest[newest.size() - static_cast<std::size_t>(taken) - 1] + 1 : s.event_position;
  if (s.logical >= s.prompt && logical_length < s.prompt) {
    s.prompt = logical_length;
    s.prompt_end = s.next_position;
  }
  s.columns.truncate(static_cast<std::int32_t>(taken));
  if (queries_ == 0 || s.ring.can_forget(taken))
    s.ring.forget(taken);
  else
    s.ring.catch_up(logical_length);
  s.logical = logical_length;
  s.asked = std::min(s.asked, s.logical);
  for (const std::unique_ptr<Part>& part : parts_) part->truncate(id, s);
  changed();
}

inline void Sequences::set_prompt(const char* operation, SequenceId id, SequenceState& s, std::int32_t prompt) const {
  KVKEEP_REQUIRE(prompt >= s.logical, operation, ": sequence ", id, " has a prompt of ", prompt, " tokens and ",
                 s.logical, " of them cached; allowed at least the number cached");
  KVKEEP_REQUIRE_AS(StateError, s.last_event == 0 || prompt == s.prompt, operation, ": sequence ", id,
                    " was cut at length ", s.last_event, ", so no prompt of ", prompt,
                    " tokens can begin with it; allowed the prompt that it had, ", s.prompt,
                    ", or a sequence that no event has cut");
  s.prompt = prompt;
  if (s.last_event == 0) s.prompt_end = s.next_position;
}

inline void Sequences::fork(SequenceId child, SequenceId parent, std::optional<std::int64_t> tokens,
                            std::optional<std::int32_t> prompt) {
  KVKEEP_REQUIRE_AS(StateError, !contains(child), "fork: sequence ", child, " is already here; allowed a free id");
  const SequenceState& from = ready("fork", parent);
  require_whole("fork", parent, from);
  const std::int64_t length = tokens.value_or(from.logical);
  check_taking_back("fork", parent, from, length);
  SequenceState own = from;
  own.step = 0, own.step_tokens = 0, own.mark = 0;
  all_.emplace(child, std::move(own));
  try {
    for (const std::unique_ptr<Part>& part : parts_) part->join(child);
    for (const std::unique_ptr<Part>& part : parts_) part->fork(child, parent);
    truncate(child, length);
    if (prompt) set_prompt("fork", child, at(child), *prompt);
  } catch (...) {
    forget(child);
    throw;
  }
  changed();  // a plan does not know who holds the parent's pages now
}

inline std::int32_t Sequences::index_of(const char* operation, std::int32_t layer) const {
  KVKEEP_REQUIRE(layer >= 0 && layer < spec_.num_layers(), operation, ": layer ", layer,
                 " is out of range; allowed 0 to ", spec_.num_layers() - 1);
  return index_of(layer);
}

inline void Sequences::require_whole(const char* operation, SequenceId id, const SequenceState& s) const {
  KVKEEP_REQUIRE_AS(StateError, !s.passing, operation, ": the prompt of sequence ", id, " has only reached layer ",
                    s.passing->next_layer, "; allowed after its last layer");
}

inline std::span<SequenceState* const> Sequences::resolve(const char* operation,
                                                          std::span<const SequenceId> ids) const {
  ++mark_;
  resolved_.clear();
  for (const SequenceId id : ids) {
    const SequenceState& s = ready(operation, id);
    KVKEEP_REQUIRE(s.mark != mark_, operation, ": sequence ", id, " is named twice in one step; allowed once");
    s.mark = mark_;
    resolved_.push_back(const_cast<SequenceState*>(&s));
  }
  return resolved_;
}

inline std::span<SequenceState* const> Sequences::resolve(const char* operation, std::span<const SequenceId> ids,
                                                          std::span<const std::int32_t> indptr) const {
  KVKEEP_REQUIRE(indptr.size() == ids.size() + 1 && indptr.front() == 0, operation, ": indptr has ", indptr.size(),
                 " entries for ", ids.size(), " sequences; allowed one entry more than sequences, the first one 0");
  for (std::size_t i = 0; i < ids.size(); ++i)
    KVKEEP_REQUIRE(indptr[i] <= indptr[i + 1], operation, ": indptr falls from ", indptr[i], " to ", indptr[i + 1],
                   " at sequence ", ids[i], "; allowed ascending");
  return resolve(operation, ids);
}

}  // namespace kvkeep
