// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Byte-pair merges: of all neighbouring pairs in a word, the one of least rank becomes one token, the leftmost first,
/// until no pair has a rank.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvkeep::lm::detail {

struct Merge {
  std::uint32_t rank;
  std::int32_t token;  ///< what the pair becomes
};

/// Ranks by pair, and merging by them. Tokens are not negative.
class Merges {
 public:
  explicit Merges(std::size_t count = 0);

  /// At most as often as the constructor was told. If a pair is put twice, the last one counts.
  void put(std::int32_t left, std::int32_t right, Merge merge);

  /// Null if the pair does not merge.
  [[nodiscard]] const Merge* find(std::int32_t left, std::int32_t right) const {
    const std::uint64_t pair = key(left, right);
    for (std::size_t at = place(pair);; at = (at + 1) & (slots_.size() - 1)) {
      if (slots_[at].pair == pair) return &slots_[at].merge;
      if (slots_[at].pair == kEmpty) return nullptr;
    }
  }

  /// Memory that consecutive words share.
  struct Scratch {
    struct Symbol {
      std::int32_t token, previous, next;
    };
    struct Entry {
      std::uint32_t rank;
      std::int32_t at, token;
    };
    struct Neighbour {
      std::int32_t token;
      Merge with_next;
    };
    std::vector<Symbol> symbols;
    std::vector<Entry> queue;
    std::vector<Neighbour> neighbours;
  };

  /// Appends the merged tokens of one word to `out`. Cost: O(n log n); a short word is scanned, which is faster.
  void apply(std::span<const std::int32_t> word, std::vector<std::int32_t>& out, Scratch& scratch) const;

 private:
  static constexpr std::uint64_t kEmpty = UINT64_MAX;
  struct Slot {
    std::uint64_t pair = kEmpty;
    Merge merge = {};
  };

  static std::uint64_t key(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32U | static_cast<std::uint32_t>(right);
  }
  [[nodiscard]] std::size_t place(std::uint64_t pair) const {
    return static_cast<std::size_t>((pair * 0x9e3779b97f4a7c15ULL) >> shift_);
  }

  void apply_to_short(std::span<const std::int32_t> word, std::vector<std::int32_t>& out, Scratch& scratch) const;
  void apply_to_long(std::span<const std::int32_t> word, std::vector<std::int32_t>& out, Scratch& scratch) const;

  std::vector<Slot> slots_;  ///< a power of two, at most half full
  unsigned shift_ = 63;
};

}  // namespace kvkeep::lm::detail
