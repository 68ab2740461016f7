#pragma once
/// Keeper's part of scores that the engine gives: checks, then writes them to the columns.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kvkeep/core/header_only.h"
#include "kvkeep/policy/keeper.h"

namespace kvkeep {

/// Slots of a layer without a given score: as many in each of its rows.
KVKEEP_INLINE std::int32_t Keeper::not_given(const Sequence& s, std::int32_t layer) const {
  const std::int32_t row = row_of(layer, 0);
  return s.columns->length(row) - s.columns->given(row);
}

KVKEEP_INLINE void Keeper::require_given(const char* operation, SequenceId sequence, const Sequence& s,
                                         std::int32_t layer) const {
  if (!needs_.given_scores) return;
  const std::int32_t missing = not_given(s, layer);
  KVKEEP_REQUIRE_AS(StateError, missing == 0, operation, ": ", missing, " of the ", s.columns->length(row_of(layer, 0)),
                    " slots of sequence ", sequence, " have no given score in layer ", layer, ", but ", policy_->name(),
                    " reads all; supply the rest with give()");
}

/// No score that the host can read is NaN.
KVKEEP_INLINE void Keeper::check_numbers(const GivenScores& g) const {
  if (!g.scores.device().is_cpu()) return;
  const auto size = static_cast<std::int64_t>(g.scores.element_size()), token_stride = g.scores.step(0) * size,
             head_stride = g.scores.step(1) * size;
  const auto* data = static_cast<const std::byte*>(g.scores.bytes());
  with_dtype("give", g.scores.dtype(), [&](auto type) {
    for (std::size_t i = 0; i < g.sequences.size(); ++i)
      for (std::int32_t t = g.indptr[i]; t < g.indptr[i + 1]; ++t)
        for (std::int32_t h = 0; h < spec_.kv_heads; ++h) {
          decltype(type) x;
          std::memcpy(&x, data + t * token_stride + h * head_stride, sizeof x);
          KVKEEP_REQUIRE(!std::isnan(static_cast<float>(x)), "give: the score of token ", t - g.indptr[i],
                         " of sequence ", g.sequences[i], " in layer ", g.layer, ", KV head ", h,
                         ", is NaN; allowed numbers and infinities");
        }
  });
}

KVKEEP_INLINE void Keeper::check(const GivenScores& g) const {
  check_sequences("give", g.sequences, g.indptr);
  const Tensor& scores = g.scores;
  const std::int32_t tokens = g.indptr.back();
  KVKEEP_REQUIRE(scores.defined(), "give: layer ", g.layer, " has no scores; policy ", policy_->name(),
                 " needs one for every token and KV head");
  KVKEEP_REQUIRE(scores.dim() == 2 && scores.size(0) == tokens && scores.size(1) == spec_.kv_heads,
                 "give: scores of layer ", g.layer, " have ", scores.dim(), " dimensions",
                 scores.dim() == 2 ? text(" [", scores.size(0), ", ", scores.size(1), "]") : "", "; allowed [", tokens,
                 ", ", spec_.kv_heads, "]");
  KVKEEP_REQUIRE(scores.has_memory(), "give: scores of layer ", g.layer, " have no address (null); allowed an address");
  KVKEEP_REQUIRE(is_scorable(scores.dtype()), "give: scores of layer ", g.layer, " are ", scores.dtype(),
                 "; allowed f32, f16, bf16");
  KVKEEP_REQUIRE(scores.device() == device(), "give: scores of layer ", g.layer, " are on ", scores.device().str(),
                 ", but the keeper works on ", device().str(), "; allowed only that device");
  for (std::size_t i = 0; i < met_.size(); ++i) {
    const std::int32_t own_tokens = g.indptr[i + 1] - g.indptr[i], open = not_given(*met_[i], g.layer);
    KVKEEP_REQUIRE(own_tokens <= open, "give: scores of ", own_tokens, " tokens of sequence ", g.sequences[i],
                   " in layer ", g.layer, "; ", open, " of its slots there have none yet; allowed at most that many");
  }
  check_numbers(g);
}

KVKEEP_INLINE void Keeper::give(const GivenScores& g) {
  KVKEEP_REQUIRE(g.layer >= 0 && g.layer < spec_.num_layers(), "give: layer ", g.layer,
                 " is out of range; allowed 0 to ", spec_.num_layers() - 1);
  if (!needs_.given_scores || layer_index_[static_cast<std::size_t>(g.layer)] < 0) return;
  check(g);
  const std::int32_t first = row_of(g.layer, 0);
  given_.clear();
  given_.reserve(met_.size() * static_cast<std::size_t>(spec_.kv_heads));
  for (std::size_t i = 0; i < met_.size(); ++i)
    for (std::int32_t h = 0; h < spec_.kv_heads; ++h)
      met_[i]->columns->reserve_given(first + h, g.indptr[i + 1] - g.indptr[i]);

  const auto size = static_cast<std::int64_t>(g.scores.element_size());
  const auto* data = static_cast<const std::byte*>(g.scores.bytes());
  for (std::size_t i = 0; i < met_.size(); ++i) {
    const std::int32_t tokens = g.indptr[i + 1] - g.indptr[i];
    if (tokens == 0) continue;
    for (std::int32_t h = 0; h < spec_.kv_heads; ++h)
      given_.push_back({.from = data + (g.indptr[i] * g.scores.step(0) + h * g.scores.step(1)) * size,
                        .to = met_[i]->columns->give(first + h, tokens),
                        .tokens = tokens});
  }
  if (!given_.empty())
    provided_.machine().memory().push_given(given_,
                                            {.dtype = g.scores.dtype(), .token_stride = g.scores.step(0) * size});
}

}  // namespace kvkeep
