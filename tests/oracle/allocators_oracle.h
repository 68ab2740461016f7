// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Second implementations of the allocators beside AMS, for tests only: sorts over doubles, one (layer, sequence) at a
/// time, nothing shared with the library.

#include <cstddef>
#include <vector>

namespace oracle {

/// What an allocator knows of one KV head.
struct AllotHead {
  int T = 0;
  int sinks = 0;                ///< oldest slots that stay whatever they score
  int recents = 0;              ///< newest slots that stay whatever they score
  std::vector<double> scores;   ///< [T]
  std::vector<double> weights;  ///< [T] how strongly the value moves the output; `critical` only

  std::vector<bool> pinned = {};  ///< [T], or empty: none

  bool guarded(int slot) const {
    return slot < sinks || slot >= T - recents || (!pinned.empty() && pinned[static_cast<size_t>(slot)]);
  }
};

using Slots = std::vector<int>;  ///< ascending

/// Slots of every layer. They add up to layers * budget.
std::vector<int> pyramid(int layers, int budget, double beta, int least);

/// What each head keeps of heads * budget slots; everything where they hold no more than that.
std::vector<Slots> adaptive(const std::vector<AllotHead>& heads, int budget, double safeguard);

/// `shared`: heads are equally long and guard the same slots.
std::vector<Slots> chunks(const std::vector<AllotHead>& heads, int budget, int chunk, bool shared);

/// Two stages; `margin` is how close, relative to its size, the worst slot that stays came to the best that goes.
struct CriticalRow {
  Slots slots;
  double margin = 1e300;
};
CriticalRow critical(const AllotHead& head, int budget, double first_stage);

/// Guarded slots and those that score at least `least`; of more than `budget` slots, guarded ones and the best others.
Slots threshold(const AllotHead& head, int budget, double least);

/// The whole of W_o * V: mean over the group of the L1 norm of what a slot's value becomes. projection: [hidden][Hq *
/// Dv], value: [Dv].
double value_weight(const std::vector<float>& projection, int hidden, int Hq, int Hkv, int Dv, int kv_head,
                    const float* value);

}  // namespace oracle
