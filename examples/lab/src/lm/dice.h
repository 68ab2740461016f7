// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Random numbers that are the same bits everywhere. The standard library promises that for its engines, not for its
/// distributions and shuffles.

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvkeep::lm {

/// SplitMix64. Dice with different names share nothing, whatever their seeds. Integer arithmetic only.
class Dice {
 public:
  Dice(std::string_view name, std::uint64_t seed) {
    std::uint64_t hash = 0xCBF29CE484222325ULL;  // FNV-1a
    for (const char letter : name) hash = (hash ^ static_cast<std::uint8_t>(letter)) * 0x100000001B3ULL;
    state_ = mixed(hash) ^ mixed(seed + kStep);
  }

  /// 64 random bits.
  std::uint64_t bits() { return mixed(state_ += kStep); }

  /// Uniform in [0, n), n at least 1.
  std::int64_t below(std::int64_t n) {
    const auto range = static_cast<std::uint64_t>(n);
    const std::uint64_t reject_below = (0 - range) % range;  // without it, 2^64 mod n values would favour small numbers
    std::uint64_t draw = bits();
    while (draw < reject_below) draw = bits();
    return static_cast<std::int64_t>(draw % range);
  }

  /// Uniform in [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }

  /// Fisher-Yates.
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i)
      std::swap(items[i - 1], items[static_cast<std::size_t>(below(static_cast<std::int64_t>(i)))]);
  }

 private:
  static constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15ULL;

  static std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
  }

  std::uint64_t state_;
};

/// Cards [0, size) dealt in random order, none twice. Memory follows the cards dealt, not the size.
class Deck {
 public:
  Deck(Dice& dice, std::int64_t size) : dice_(dice), left_(size) {}

  [[nodiscard]] std::int64_t left() const { return left_; }

  /// A card that was not dealt before; left() must be 1 or more.
  std::int64_t deal() {
    const std::int64_t at = dice_.below(left_--);
    const std::int64_t card = card_at(at);
    moved_[at] = card_at(left_);
    return card;
  }

 private:
  std::int64_t card_at(std::int64_t at) const {
    const auto found = moved_.find(at);
    return found == moved_.end() ? at : found->second;
  }

  Dice& dice_;
  std::int64_t left_;
  std::unordered_map<std::int64_t, std::int64_t> moved_;  // Fisher-Yates, without the cards that have not moved
};

}  // namespace kvkeep::lm
