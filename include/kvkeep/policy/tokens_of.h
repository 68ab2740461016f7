#pragma once
/// Not part of the interface. Chosen tokens of one prompt as a Decision holds them.

#include <algorithm>
#include <span>

#include "kvkeep/core/decision.h"

namespace kvkeep {

inline TokenSet tokens_of(std::span<const std::int32_t> places) {
  TokenSet set{empty({static_cast<std::int64_t>(places.size())}, Dtype::i32),
               {0, static_cast<std::int64_t>(places.size())}};
  std::ranges::copy(places, set.tokens.data<std::int32_t>());
  return set;
}

}  // namespace kvkeep
