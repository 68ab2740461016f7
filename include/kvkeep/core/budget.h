// SPDX-License-Identifier: Apache-2.0
#pragma once
/// How much a row may keep: a number of slots, a share of the tokens seen, or bytes per sequence. All are rounded down,
/// to at least one slot.

#include <cmath>
#include <cstdint>
#include <limits>

#include "kvkeep/core/hd.h"

namespace kvkeep {

/// A number of tokens. A separate type, because logical positions are something else: they may begin anywhere and have
/// gaps.
struct TokenCount {
  std::int64_t tokens = 0;
};

struct Budget {
  enum class Unit : std::uint8_t {
    slots,  ///< `slots` per row
    ratio,  ///< drops the share `dropped` of the tokens seen: floor(seen * (1 - dropped)) stay
    bytes,  ///< `bytes` of K and V per sequence, over all its rows: floor(bytes / bytes of one slot in every row)
  };
  Unit unit = Unit::slots;
  std::int32_t slots = 0;
  double dropped = 0;  ///< [0, 1)
  std::int64_t bytes = 0;
  std::int32_t least = 1;           ///< keeps at least this many slots (sinks and one more)
  std::int32_t growth = 0;          ///< extra slots per completed `period` of decoded tokens, from the second on
  std::int32_t period = 0;          ///< decoded tokens; 0: no growth
  bool decoded_only = false;        ///< the budget counts only slots after the prompt: the prompt stays in addition
  std::int32_t beyond_prompt = -1;  ///< 0 or more: the prompt is protected, and if it leaves fewer slots than this, the
                                    ///< budget is prompt + beyond_prompt

  /// Slots a row may keep. `seen_so_far`: tokens of the sequence; `of_prompt`: how many of them are its prompt;
  /// `slot_bytes`: K and V bytes of one slot in every row of the sequence. Exact: the ratio is in millionths, so that
  /// 10 tokens less 90 % are 1, not 0.
  [[nodiscard]] std::int32_t resolve(TokenCount seen_so_far, TokenCount of_prompt, std::int64_t slot_bytes) const {
    const std::int64_t seen = seen_so_far.tokens, prompt = of_prompt.tokens;
    const std::int64_t decoded = seen > prompt ? seen - prompt : 0;
    std::int64_t kept = slots;
    if (unit == Unit::ratio) {
      constexpr std::int64_t kParts = 1'000'000;
      kept = (decoded_only ? decoded : seen) * (kParts - std::llround(dropped * static_cast<double>(kParts))) / kParts;
    } else if (unit == Unit::bytes) {
      kept = slot_bytes > 0 ? bytes / slot_bytes : 0;
    }
    if (period > 0 && decoded / period > 1) kept += growth * (decoded / period - 1);
    if (kept < least) kept = least;
    if (decoded_only) kept += prompt;
    if (beyond_prompt >= 0 && kept < prompt + beyond_prompt) kept = prompt + beyond_prompt;
    return static_cast<std::int32_t>(
        kept < std::numeric_limits<std::int32_t>::max() ? kept : std::numeric_limits<std::int32_t>::max());
  }
};

}  // namespace kvkeep
