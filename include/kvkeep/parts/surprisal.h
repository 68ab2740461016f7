// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Surprisal: how unlikely the model found every token, in nats. The engine supplies it once it has the logits.

#include <algorithm>

#include "kvkeep/core/header_only.h"
#include "kvkeep/parts/part.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep::parts {

/// Of keepers whose policy reads surprisal: keeper.part<parts::Surprisal>().
class Surprisal final : public Part {
 public:
  using Part::Part;

  /// That of the oldest tokens of a sequence that have none yet: -ln of the probability that the model gave the token;
  /// negative numbers count as 0. Call it before step(). Throws StateError for an unknown sequence, InvalidArgument for
  /// more tokens than have none.
  void supply(SequenceId sequence, std::span<const float> nats) {
    const SequenceState& s = sequences().at(sequence, "surprise");
    Known& known = known_[sequence];
    const std::int64_t open = s.logical - known.tokens;
    KVKEEP_REQUIRE(std::ssize(nats) <= open, "surprise: ", nats.size(), " tokens of sequence ", sequence, "; ", open,
                   " of the ", s.logical, " observed have none yet; allowed at most that many");
    const auto positions = s.columns.newest().last(static_cast<std::size_t>(open));
    for (std::size_t i = 0; i < nats.size(); ++i) {
      const auto at = static_cast<std::size_t>(positions[i]);
      if (const std::int64_t had = std::ssize(known.nats);
          had <= positions[i]) {  // 0 for a prefix that was never seen, kNoToken for positions without a token
        known.nats.resize(at + 1, kNoToken);
        if (had < s.prefix)
          std::fill(known.nats.begin() + had, known.nats.begin() + std::min<std::int64_t>(s.prefix, positions[i]),
                    0.0F);
      }
      known.nats[at] = std::max(nats[i], 0.0F);
    }
    known.tokens += std::ssize(nats);
  }

  void join(SequenceId sequence) override { known_[sequence] = {}; }
  void fork(SequenceId child, SequenceId parent) override { known_.copy(child, parent); }
  void leave(SequenceId sequence) noexcept override { known_.remove(sequence); }
  /// One number for every position is kept: 64 MiB a sequence.
  [[nodiscard]] std::int32_t most_positions() const override { return 1 << 24; }
  void check_step(SequenceId sequence, const SequenceState& s) const override {
    const std::int64_t known = known_.find(sequence)->tokens;
    KVKEEP_REQUIRE_AS(StateError, known == s.logical, "step: ", known, " of the ", s.logical, " tokens of sequence ",
                      sequence, " have their surprisal, but ", policy().name(),
                      " reads all; supply the rest with surprise()");
  }
  void describe(SequenceId sequence, RowGroup& group) const override { group.surprisal = known_.find(sequence)->nats; }
  void truncate(SequenceId sequence, const SequenceState& s) noexcept override {
    Known& known = *known_.find(sequence);
    known.tokens = std::min(known.tokens, s.logical);
    if (std::ssize(known.nats) > s.next_position) known.nats.resize(static_cast<std::size_t>(s.next_position));
  }
#if KVKEEP_FILES
  void save(SequenceId sequence, StateTensors& to) const override;
  void restore(SequenceId sequence, const SequenceState& s, const StateFile& state) override;
#endif

 private:
  struct Known {
    std::vector<float> nats = {};  ///< by logical position
    std::int64_t tokens = 0;       ///< that have theirs
  };
  PerSequence<Known> known_;
};

}  // namespace kvkeep::parts
