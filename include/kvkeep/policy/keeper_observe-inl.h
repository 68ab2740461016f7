#pragma once
// Bodies of keeper.h: compiled by src/policy, or where they are included under KVKEEP_HEADER_ONLY.
// Keeper's part of observations from the engine: checks, then records them.

#include <algorithm>
#include <numeric>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/policy/keeper.h"

namespace kvkeep {
namespace keeper_observe_detail {

/// Upper limit of the positions for a policy that reads surprisal: 64 MiB of numbers per sequence.
inline constexpr std::int32_t kMostSurprisals = 1 << 24;

/// Where the queries of the i-th sequence of a step are; null if there are none.
struct Queries {
  const std::byte* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::int64_t token_stride = 0, head_stride = 0;  ///< bytes

  Queries(const Observation& o, std::size_t i) {
    if (!o.queries.defined()) return;
    const auto bytes = static_cast<std::int64_t>(o.queries.element_size());
    dtype = o.queries.dtype();
    token_stride = o.queries.stride(0) * bytes;
    head_stride = o.queries.stride(1) * bytes;
    data = static_cast<const std::byte*>(o.queries.bytes()) + o.indptr[i] * token_stride;
  }
};

}  // namespace keeper_observe_detail

KVKEEP_INLINE void Keeper::check(const Observation& o) const {
  check_sequences("observe", o.sequences, o.indptr);
  const std::int32_t tokens = o.indptr.back();
  KVKEEP_REQUIRE(o.positions.empty() || static_cast<std::int32_t>(o.positions.size()) == tokens,
                 "observe: ", o.positions.size(), " positions for ", tokens, " tokens; allowed none or one each");
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    const Sequence& s = *met_[i];
    const std::int32_t own_tokens = o.indptr[i + 1] - o.indptr[i];
    KVKEEP_REQUIRE(!begins_prompt(s, own_tokens) || s.prompt <= own_tokens, "observe: sequence ", o.sequences[i],
                   " passes ", own_tokens, " of the ", s.prompt, " tokens of its prompt; ", policy_->name(),
                   " compares layers over the whole prompt; allowed all of it in one step");
    const bool first = leads(s, o.layer, own_tokens);
    KVKEEP_REQUIRE_AS(StateError, !first || s.pass == nullptr, "observe: layer ", o.layer,
                      " passes more tokens of sequence ", o.sequences[i], ", whose prompt has only reached layer ",
                      s.next_layer, "; allowed after its last layer");
    if (!first) {
      KVKEEP_REQUIRE_AS(StateError, s.pass == nullptr || own_tokens == static_cast<std::int32_t>(s.present.size()),
                        "observe: layer ", o.layer, " passes ", own_tokens, " tokens of sequence ", o.sequences[i],
                        "; ", s.present.size(), " continued to it; allowed exactly these");
      const auto shown = already_shown(s, o.layer, own_tokens);
      KVKEEP_REQUIRE(o.positions.empty() || std::equal(shown.begin(), shown.end(), o.positions.begin() + o.indptr[i]),
                     "observe: layer ", o.layer, " gives sequence ", o.sequences[i],
                     " different positions than an earlier layer of the step; allowed the same in every layer");
      continue;
    }
    const std::int64_t most = needs_.surprisal
                                  ? keeper_observe_detail::kMostSurprisals
                                  : kMostPositions;  // one number per position is kept if surprisal is read
    std::int64_t least = s.next_position;
    for (std::int32_t t = o.indptr[i]; !o.positions.empty() && t < o.indptr[i + 1]; ++t) {
      const std::int32_t p = o.positions[static_cast<std::size_t>(t)];
      KVKEEP_REQUIRE(p >= least && p < most, "observe: token ", t - o.indptr[i], " of sequence ", o.sequences[i],
                     " is at position ", p, "; allowed ", least, " or more, below ", most,
                     " (positions are logical and ascend)");
      least = std::int64_t{p} + 1;
    }
    KVKEEP_REQUIRE(!o.positions.empty() || s.next_position + std::int64_t{own_tokens} <= most, "observe: ", own_tokens,
                   " tokens of sequence ", o.sequences[i], " from position ", s.next_position,
                   " on; allowed positions up to ", most - 1);
  }
  if (o.unread) {
    KVKEEP_REQUIRE(!o.queries.defined(), "observe: queries of layer ", o.layer,
                   " are given and unread; allowed one of the two");
    KVKEEP_REQUIRE(needs_.statistics_from < 0 && !policy_->narrows(), "observe: queries of layer ", o.layer,
                   " are unread, but ", policy_->name(), " reads all of them; allowed what queries_read() says");
    return;
  }
  if (needs_.queries == 0) return;
  check_queries("observe", o);
  for (std::size_t i = 0; i < met_.size(); ++i)
    KVKEEP_REQUIRE(met_[i]->ring.takes(o.queries.dtype()), "observe: queries of layer ", o.layer, ", sequence ",
                   o.sequences[i], ", are ", o.queries.dtype(), "; earlier ones were ", met_[i]->ring.dtype(),
                   "; allowed one dtype");
  KVKEEP_REQUIRE(!basis_known_ || o.basis == basis_, "observe: queries of layer ", o.layer, " are taken ",
                 o.basis == QueryBasis::pre_rope ? "before" : "after", " RoPE, unlike earlier ones; allowed one basis");
}

KVKEEP_INLINE void Keeper::check_queries(const char* operation, const Observation& o) const {
  const Tensor& q = o.queries;
  const std::int32_t tokens = o.indptr.back();
  KVKEEP_REQUIRE(q.defined(), operation, ": layer ", o.layer, " has no queries; policy ", policy_->name(), " needs ",
                 needs_.queries > 0 ? text("the last ", needs_.queries, " of every full layer") : "those of prompts");
  KVKEEP_REQUIRE(q.dim() == 3 && q.size(0) == tokens && q.size(1) == spec_.query_heads && q.size(2) == spec_.key_dim,
                 operation, ": queries of layer ", o.layer, " have ", q.dim(), " dimensions",
                 q.dim() == 3 ? text(" [", q.size(0), ", ", q.size(1), ", ", q.size(2), "]") : "", "; allowed [",
                 tokens, ", ", spec_.query_heads, ", ", spec_.key_dim, "]");
  KVKEEP_REQUIRE(is_scorable(q.dtype()), operation, ": queries of layer ", o.layer, " are ", q.dtype(),
                 "; allowed f32, f16, bf16");
  KVKEEP_REQUIRE(q.stride(2) == 1 || spec_.key_dim == 1, operation, ": queries of layer ", o.layer, " have stride ",
                 q.stride(2), " in the last dimension; allowed 1");
  KVKEEP_REQUIRE(q.device() == device(), operation, ": queries of layer ", o.layer, " are on ", q.device().str(),
                 ", but the keeper works on ", device().str(), "; allowed only that device");
}

/// True if these tokens are the first that any layer shows in this step.
KVKEEP_INLINE bool Keeper::leads(const Sequence& s, std::int32_t layer, std::int32_t tokens) const {
  const std::int32_t index = layer_index_[static_cast<std::size_t>(layer)];
  return s.prefix + s.ring.seen(index) + tokens > s.logical;
}

/// Positions that an earlier layer gave to the tokens that this layer shows now.
KVKEEP_INLINE std::span<const std::int32_t> Keeper::already_shown(const Sequence& s, std::int32_t layer,
                                                                  std::int32_t tokens) const {
  if (s.pass != nullptr) return s.present;
  const std::int64_t behind = s.logical - s.prefix - s.ring.seen(layer_index_[static_cast<std::size_t>(layer)]);
  const auto newest = s.columns->newest();
  KVKEEP_REQUIRE_AS(StateError, behind <= static_cast<std::int64_t>(newest.size()), "observe: layer ", layer, " is ",
                    behind, " tokens behind the other layers; observe every full layer in each step");
  return newest.subspan(newest.size() - static_cast<std::size_t>(behind), static_cast<std::size_t>(tokens));
}

/// Writes the positions of the tokens of the i-th sequence to positions_.
KVKEEP_INLINE void Keeper::find_positions(const Observation& o, std::size_t i, const Sequence& s) {
  const std::int32_t tokens = o.indptr[i + 1] - o.indptr[i];
  if (!o.positions.empty()) {
    positions_.assign(o.positions.begin() + o.indptr[i], o.positions.begin() + o.indptr[i + 1]);
    return;
  }
  positions_.resize(static_cast<std::size_t>(tokens));
  if (leads(s, o.layer, tokens))
    std::iota(positions_.begin(), positions_.end(), s.next_position);
  else
    std::ranges::copy(already_shown(s, o.layer, tokens), positions_.begin());
}

/// Queries that enter the statistics must be finite. A window is checked at the event instead, since only the queries
/// it still holds matter.
KVKEEP_INLINE void Keeper::check_statistics(const Observation& o, std::size_t i, const Sequence& s,
                                            std::span<const std::int32_t> positions) const {
  if (s.statistics.empty()) return;
  const keeper_observe_detail::Queries q(o, i);
  const auto index = static_cast<std::size_t>(layer_index_[static_cast<std::size_t>(o.layer)]);
  if (s.statistics[index].finite(q.data, q.dtype, q.token_stride, q.head_stride, positions)) return;
  s.statistics[index].check(text("observe: layer ", o.layer, ", sequence ", o.sequences[i]), q.data, q.dtype,
                            q.token_stride, q.head_stride, positions);
}

/// Everything in recording a step that can fail, before any of it is recorded.
KVKEEP_INLINE void Keeper::make_room(const Observation& o) {
  begun_.clear();
  arrivals_.clear();
  std::size_t arrivals = 0;
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    auto& s = const_cast<Sequence&>(*met_[i]);
    const std::int32_t tokens = o.indptr[i + 1] - o.indptr[i];
    find_positions(o, i, s);
    check_statistics(o, i, s, positions_);
    if (needs_.queries > 0 && !o.unread) s.ring.reserve(o.queries.dtype());
    arrivals += static_cast<std::size_t>(std::min(tokens, s.ring.capacity()));
    if (!leads(s, o.layer, tokens)) continue;
    s.columns->reserve(tokens);
    if (begins_prompt(s, tokens)) begun_.push_back(begin_prompt(s, positions_));
  }
  arrivals_.reserve(arrivals);
}

KVKEEP_INLINE void Keeper::observe(const Observation& o) {
  KVKEEP_REQUIRE(o.layer >= 0 && o.layer < spec_.num_layers(), "observe: layer ", o.layer,
                 " is out of range; allowed 0 to ", spec_.num_layers() - 1);
  const std::int32_t index = layer_index_[static_cast<std::size_t>(o.layer)];
  if (index < 0) return;  // sliding, shared and other layers are not ours
  check(o);
  make_room(o);
  if (o.queries.defined()) {
    basis_ = o.basis;
    basis_known_ = true;
  }
  ++version_;
  for (Begun& begun : begun_) {
    begun.sequence->pass = std::move(begun.pass);
    begun.sequence->present = std::move(begun.present);
    begun.sequence->tail = begun.report.tokens;
    begun.sequence->next_layer = 0;
    begun.sequence->report = std::move(begun.report);
  }
  QueryLayout layout{};
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    auto& s = const_cast<Sequence&>(*met_[i]);
    const std::int32_t tokens = o.indptr[i + 1] - o.indptr[i];
    find_positions(o, i, s);
    if (leads(s, o.layer, tokens)) {
      s.columns->append(positions_);
      const std::int64_t before = std::exchange(s.logical, s.logical + tokens);
      if (tokens > 0) s.next_position = positions_.back() + 1;
      if (before < s.prompt && s.prompt <= s.logical)
        s.prompt_end = positions_[static_cast<std::size_t>(s.prompt - before - 1)] + 1;
    }
    if (o.unread) {
      s.ring.skip_unread(index, tokens);
      continue;
    }
    keeper_observe_detail::Queries q =
        needs_.queries > 0 ? keeper_observe_detail::Queries(o, i) : keeper_observe_detail::Queries({}, 0);
    if (!s.statistics.empty())
      s.statistics[static_cast<std::size_t>(index)].add(q.data, q.dtype, q.token_stride, q.head_stride, positions_,
                                                        o.basis, spec_.rope, *workspace_);
    std::span<const std::int32_t> seen = positions_;
    if (s.pass != nullptr &&
        s.tail < s.report->tokens) {  // of the tokens that continued, only the newest are contiguous
      s.ring.skip(index, s.report->tokens - s.tail);
      if (q.data != nullptr) q.data += (tokens - s.tail) * q.token_stride;
      seen = seen.last(static_cast<std::size_t>(s.tail));
    }
    s.ring.push(index, q.data, q.dtype, q.token_stride, seen, arrivals_);
    layout = {.heads = spec_.query_heads,
              .head_bytes = element_size(q.dtype) * spec_.key_dim,
              .token_stride = q.token_stride,
              .head_stride = q.head_stride};
  }
  if (!arrivals_.empty()) provided_.machine().memory().push_queries(arrivals_, layout);
}

}  // namespace kvkeep
