// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Scores that the engine gives every token and KV head. They are a column of the rows, so they move with their slots.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kvkeep/core/query_view.h"
#include "kvkeep/observe/observation.h"
#include "kvkeep/parts/part.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep::parts {

/// Of keepers whose policy reads given scores: keeper.part<parts::Given>().
class Given final : public Part {
 public:
  using Part::Part;

  /// Scores of the engine's own, such as those that a gate learned (policies over `given`). Call it in every full
  /// layer, at any time between observe() of the tokens and step(): for each sequence, scores of its oldest slots in
  /// that layer that have none yet, cached tokens included. Before step(), every slot needs its score. A score belongs
  /// to its slot: it moves with it, goes with truncate(), and is saved with the sequence. Layers
  /// that are not full are ignored. Throws: StateError for a sequence that never joined; InvalidArgument for a wrong
  /// layer, indptr, shape, dtype or device, a duplicate sequence, missing scores, more tokens than have none, and NaN
  /// (on a device NaN is not looked for: it ranks last). If it throws, nothing is recorded for any sequence. Cost:
  /// reads and writes the scores once.
  void give(const GivenScores& scores);

  /// Throws StateError if a slot of the layer has none yet.
  void require_all(const char* operation, SequenceId sequence, const SequenceState& s, std::int32_t layer) const;
  void check_step(SequenceId sequence, const SequenceState& s) const override {
    for (const std::int32_t layer : sequences().full_layers()) require_all("step", sequence, s, layer);
  }

 private:
  [[nodiscard]] std::int32_t missing(const SequenceState& s, std::int32_t layer) const;
  void check(const GivenScores& scores) const;
  void check_numbers(const GivenScores& scores) const;
  std::vector<GivenArrival> arrivals_;  ///< scratch
};

/// Slots of a layer without a given score: as many in each of its rows.
inline std::int32_t Given::missing(const SequenceState& s, std::int32_t layer) const {
  const std::int32_t row = sequences().row_of(layer, 0);
  return s.columns.length(row) - s.columns.given(row);
}

inline void Given::require_all(const char* operation, SequenceId sequence, const SequenceState& s,
                               std::int32_t layer) const {
  const std::int32_t open = missing(s, layer);
  KVKEEP_REQUIRE_AS(StateError, open == 0, operation, ": ", open, " of the ",
                    s.columns.length(sequences().row_of(layer, 0)), " slots of sequence ", sequence,
                    " have no given score in layer ", layer, ", but ", policy().name(),
                    " reads all; supply the rest with give()");
}

/// No score that the host can read is NaN.
inline void Given::check_numbers(const GivenScores& g) const {
  if (!g.scores.device().is_cpu()) return;
  const auto size = static_cast<std::int64_t>(g.scores.element_size()), token_stride = g.scores.step(0) * size,
             head_stride = g.scores.step(1) * size;
  const auto* data = static_cast<const std::byte*>(g.scores.bytes());
  with_dtype("give", g.scores.dtype(), [&](auto type) {
    for (std::size_t i = 0; i < g.sequences.size(); ++i)
      for (std::int32_t t = g.indptr[i]; t < g.indptr[i + 1]; ++t)
        for (std::int32_t h = 0; h < spec().kv_heads; ++h) {
          decltype(type) x;
          std::memcpy(&x, data + t * token_stride + h * head_stride, sizeof x);
          KVKEEP_REQUIRE(!std::isnan(static_cast<float>(x)), "give: the score of token ", t - g.indptr[i],
                         " of sequence ", g.sequences[i], " in layer ", g.layer, ", KV head ", h,
                         ", is NaN; allowed numbers and infinities");
        }
  });
}

inline void Given::check(const GivenScores& g) const {
  const auto named = sequences().resolve("give", g.sequences, g.indptr);
  const Tensor& scores = g.scores;
  const std::int32_t tokens = g.indptr.back();
  KVKEEP_REQUIRE(scores.defined(), "give: layer ", g.layer, " has no scores; policy ", policy().name(),
                 " needs one for every token and KV head");
  KVKEEP_REQUIRE(scores.dim() == 2 && scores.size(0) == tokens && scores.size(1) == spec().kv_heads,
                 "give: scores of layer ", g.layer, " have shape ", scores.sizes(), "; allowed [", tokens, ", ",
                 spec().kv_heads, "]");
  KVKEEP_REQUIRE(scores.has_memory(), "give: scores of layer ", g.layer, " have no address (null); allowed an address");
  KVKEEP_REQUIRE(is_scorable(scores.dtype()), "give: scores of layer ", g.layer, " are ", scores.dtype(),
                 "; allowed f32, f16, bf16");
  KVKEEP_REQUIRE(scores.device() == machine().device(), "give: scores of layer ", g.layer, " are on ",
                 scores.device().str(), ", but the keeper works on ", machine().device().str(),
                 "; allowed only that device");
  for (std::size_t i = 0; i < named.size(); ++i) {
    const std::int32_t own_tokens = g.indptr[i + 1] - g.indptr[i], open = missing(*named[i], g.layer);
    KVKEEP_REQUIRE(own_tokens <= open, "give: scores of ", own_tokens, " tokens of sequence ", g.sequences[i],
                   " in layer ", g.layer, "; ", open, " of its slots there have none yet; allowed at most that many");
  }
  check_numbers(g);
}

inline void Given::give(const GivenScores& g) {
  KVKEEP_REQUIRE(g.layer >= 0 && g.layer < spec().num_layers(), "give: layer ", g.layer,
                 " is out of range; allowed 0 to ", spec().num_layers() - 1);
  if (sequences().index_of(g.layer) < 0) return;
  check(g);
  const auto named = sequences().resolved();
  const std::int32_t first = sequences().row_of(g.layer, 0);
  arrivals_.clear();
  arrivals_.reserve(named.size() * static_cast<std::size_t>(spec().kv_heads));
  for (std::size_t i = 0; i < named.size(); ++i) named[i]->columns.reserve_given();

  const auto size = static_cast<std::int64_t>(g.scores.element_size());
  const auto* data = static_cast<const std::byte*>(g.scores.bytes());
  for (std::size_t i = 0; i < named.size(); ++i) {
    const std::int32_t tokens = g.indptr[i + 1] - g.indptr[i];
    if (tokens == 0) continue;
    for (std::int32_t h = 0; h < spec().kv_heads; ++h)
      arrivals_.push_back({.from = data + (g.indptr[i] * g.scores.step(0) + h * g.scores.step(1)) * size,
                           .to = named[i]->columns.give(first + h, tokens),
                           .tokens = tokens});
  }
  if (!arrivals_.empty())
    machine().memory().push_given(arrivals_, {.dtype = g.scores.dtype(), .token_stride = g.scores.step(0) * size});
}

}  // namespace kvkeep::parts
