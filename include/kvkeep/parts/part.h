#pragma once
/// Parts: features of sequences that not every engine uses, such as pinned spans. The Keeper calls every part of its
/// policy at the same places of a sequence's life; what a part keeps, and what it does there, only it knows.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/row.h"
#include "kvkeep/observe/observation.h"
#include "kvkeep/parts/sequences.h"

namespace kvkeep {

class KVPolicy;
class Machine;
class StateFile;
using StateTensors = std::vector<std::pair<std::string, Tensor>>;

/// What a part is made for. All of it outlives the part.
struct PartContext {
  Sequences& sequences;
  const KVPolicy& policy;
  Machine& machine;
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
  /// It ends, whether join() and restore() have run for it or not.
  virtual void leave(SequenceId) noexcept {}
  /// Positions of its tokens must be below this.
  [[nodiscard]] virtual std::int32_t most_positions() const { return kMostPositions; }

  /// Throws StateError if the sequence lacks what the engine must have supplied before step().
  virtual void check_step(SequenceId, const SequenceState&) const {}
  /// Slots that rows of the sequence hold elsewhere: they count for its trigger.
  [[nodiscard]] virtual std::int64_t slots_elsewhere(const SequenceState&, SequenceId) const { return 0; }
  /// Adds to the evidence of an event what the policy reads of this part.
  virtual void describe(SequenceId, RowGroup&) const {}

  /// Before the rows of an event move: room for what settle() writes. May throw.
  virtual void reserve(const PartEvent&) {}
  /// Those of one of its groups have moved.
  virtual void settle(const PartEvent&, std::size_t /*group*/) noexcept {}

  /// The newest tokens were taken back.
  virtual void truncate(SequenceId, const SequenceState&) noexcept {}

#ifndef KVKEEP_HEADER_ONLY
  /// Appends what it keeps of a sequence. Names of tensors begin with the part's own.
  virtual void save(SequenceId, StateTensors&) const {}
  /// Reads it back. The sequence is as it was when it was saved, in all but its parts. Throws InvalidArgument, which
  /// names the file, for what no sequence can hold.
  virtual void restore(SequenceId, const SequenceState&, const StateFile&) {}
#endif

 protected:
  [[nodiscard]] Sequences& sequences() const { return context_.sequences; }
  [[nodiscard]] const ModelSpec& spec() const { return context_.sequences.spec(); }
  [[nodiscard]] const KVPolicy& policy() const { return context_.policy; }
  [[nodiscard]] Machine& machine() const { return context_.machine; }

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
  void remove(SequenceId id) noexcept { all_.erase(id); }

 private:
  std::map<SequenceId, T> all_;
};

}  // namespace kvkeep
