// SPDX-License-Identifier: Apache-2.0
#include "narrowing.h"

#include <utility>

#include "step_check.h"

namespace kvkeep::lm::detail {

std::vector<std::int32_t> Present::still() const {
  std::vector<std::int32_t> sequences_with_tokens;
  for (std::int32_t s = 0; s < sequences(); ++s)
    if (tokens_of(s) > 0) sequences_with_tokens.push_back(s);
  return sequences_with_tokens;
}

void Present::narrow(Onward onward) {
  std::vector<std::int32_t> kept;
  kept.reserve(onward.tokens.size());
  for (const std::int32_t token : onward.tokens) kept.push_back(positions_[static_cast<std::size_t>(token)]);
  own_positions_ = std::move(kept);
  own_indptr_ = std::move(onward.indptr);
  positions_ = own_positions_;
  indptr_ = own_indptr_;
}

std::optional<Onward> who_goes_on(const ModelSpec& spec, const StepOptions& options, const LayerSight& sight) {
  std::optional<Onward> onward = options.on_attended(sight);
  if (!onward) return std::nullopt;
  check_onward(spec, options.logits, sight, *onward);
  if (onward->tokens.size() == sight.positions.size()) return std::nullopt;
  return onward;
}

}  // namespace kvkeep::lm::detail
