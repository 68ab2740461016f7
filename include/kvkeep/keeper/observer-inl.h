// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of observer.h: compiled by src/keeper, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <numeric>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/keeper/observer.h"
#include "kvkeep/parts/check_observation.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {
namespace observer_detail {

inline QueryLayout layout_of(const Observation& o, const ModelSpec& spec) {
  const auto bytes = static_cast<std::int64_t>(o.queries.element_size());
  QueryLayout layout{.from = static_cast<const std::byte*>(o.queries.bytes()),
                     .heads = spec.query_heads,
                     .head_bytes = bytes * spec.key_dim,
                     .token_stride = o.queries.step(0) * bytes,
                     .head_stride = o.queries.step(1) * bytes};
  if (!o.log_sum_exp.defined()) return layout;
  layout.normalisers = o.log_sum_exp.data<float>();
  layout.normaliser_token_stride = o.log_sum_exp.step(0);
  layout.normaliser_head_stride = o.log_sum_exp.step(1);
  return layout;
}

}  // namespace observer_detail

KVKEEP_INLINE Observer::Observer(Sequences& sequences, const KVPolicy& policy, Machine& machine)
    : sequences_(&sequences), policy_(&policy), machine_(&machine), queries_(policy.needs().queries) {}

KVKEEP_INLINE void Observer::check(const char* operation, const Observation& o) const {
  sequences_->resolve(operation, o.sequences, o.indptr);
  const std::int32_t tokens = o.indptr.back();
  KVKEEP_REQUIRE(o.positions.empty() || static_cast<std::int32_t>(o.positions.size()) == tokens, operation, ": ",
                 o.positions.size(), " positions for ", tokens, " tokens; allowed none or one each");
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    const SequenceState& s = *sequences_->resolved()[i];
    require_recorded(operation, o.sequences[i], s);
    const std::int32_t own_tokens = o.indptr[i + 1] - o.indptr[i];
    const bool first = first_to_show(s, o.layer, own_tokens);
    KVKEEP_REQUIRE_AS(StateError, !first || !s.passing, operation, ": layer ", o.layer,
                      " passes more tokens of sequence ", o.sequences[i], ", whose prompt has only reached layer ",
                      s.passing->next_layer, "; allowed after its last layer");
    if (!first) {
      KVKEEP_REQUIRE_AS(StateError, !s.passing || own_tokens == static_cast<std::int32_t>(s.passing->present.size()),
                        operation, ": layer ", o.layer, " passes ", own_tokens, " tokens of sequence ", o.sequences[i],
                        "; ", s.passing->present.size(), " continued to it; allowed exactly these");
      const auto shown = already_shown(s, o.layer, own_tokens);
      KVKEEP_REQUIRE(o.positions.empty() || std::equal(shown.begin(), shown.end(), o.positions.begin() + o.indptr[i]),
                     operation, ": layer ", o.layer, " gives sequence ", o.sequences[i],
                     " different positions than an earlier layer of the step; allowed the same in every layer");
      continue;
    }
    const std::int64_t most = sequences_->most_positions();
    std::int64_t least = s.next_position;
    for (std::int32_t t = o.indptr[i]; !o.positions.empty() && t < o.indptr[i + 1]; ++t) {
      const std::int32_t p = o.positions[static_cast<std::size_t>(t)];
      KVKEEP_REQUIRE(p >= least && p < most, operation, ": token ", t - o.indptr[i], " of sequence ", o.sequences[i],
                     " is at position ", p, "; allowed ", least, " or more, below ", most,
                     " (positions are logical and ascend)");
      least = std::int64_t{p} + 1;
    }
    KVKEEP_REQUIRE(!o.positions.empty() || s.next_position + std::int64_t{own_tokens} <= most, operation, ": ",
                   own_tokens, " tokens of sequence ", o.sequences[i], " from position ", s.next_position,
                   " on; allowed positions up to ", most - 1);
  }
  if (o.unread) {
    KVKEEP_REQUIRE(!o.queries.defined(), operation, ": queries of layer ", o.layer,
                   " are given and unread; allowed one of the two");
    KVKEEP_REQUIRE(!policy_->narrows(), operation, ": queries of layer ", o.layer, " are unread, but ", policy_->name(),
                   " reads all of them; allowed the queries of every token");
    return;
  }
  if (queries_ == 0) return;
  check_queries(operation, o, spec(), machine_->device(), *policy_);
  check_normalisers(operation, o, spec(), machine_->device());
  for (std::size_t i = 0; i < sequences_->resolved().size(); ++i)
    KVKEEP_REQUIRE(sequences_->resolved()[i]->ring.takes(o.queries.dtype()), operation, ": queries of layer ", o.layer,
                   ", sequence ", o.sequences[i], ", are ", o.queries.dtype(), "; earlier ones were ",
                   sequences_->resolved()[i]->ring.dtype(), "; allowed one dtype");
  require_one_basis(operation, o.basis);
}

KVKEEP_INLINE void Observer::require_one_basis(const char* operation, QueryBasis basis) const {
  KVKEEP_REQUIRE(!basis_ || basis == *basis_, operation, ": queries are taken ",
                 basis == QueryBasis::pre_rope ? "before" : "after", " RoPE, unlike earlier ones; allowed one basis");
  check_basis(operation, basis, sequences_->without_rope());
}

/// True if these tokens are the first that any layer shows in this step.
KVKEEP_INLINE bool Observer::first_to_show(const SequenceState& s, std::int32_t layer, std::int32_t tokens) const {
  const std::int32_t index = sequences_->index_of(layer);
  return s.prefix + s.ring.seen(index) + tokens > s.logical;
}

/// Positions that an earlier layer gave to the tokens that this layer shows now.
KVKEEP_INLINE std::span<const std::int32_t> Observer::already_shown(const SequenceState& s, std::int32_t layer,
                                                                    std::int32_t tokens) const {
  if (s.passing) return s.passing->present;
  const std::int64_t behind = s.logical - s.prefix - s.ring.seen(sequences_->index_of(layer));
  const auto newest = s.columns.newest();
  KVKEEP_REQUIRE_AS(StateError, behind <= static_cast<std::int64_t>(newest.size()), "observe: layer ", layer, " is ",
                    behind, " tokens behind the other layers; observe every full layer in each step");
  return newest.subspan(newest.size() - static_cast<std::size_t>(behind), static_cast<std::size_t>(tokens));
}

/// Writes the positions of the tokens of the i-th sequence to positions_.
KVKEEP_INLINE void Observer::find_positions(const Observation& o, std::size_t i, const SequenceState& s) {
  const std::int32_t tokens = o.indptr[i + 1] - o.indptr[i];
  if (!o.positions.empty()) {
    positions_.assign(o.positions.begin() + o.indptr[i], o.positions.begin() + o.indptr[i + 1]);
    return;
  }
  positions_.resize(static_cast<std::size_t>(tokens));
  if (first_to_show(s, o.layer, tokens))
    std::iota(positions_.begin(), positions_.end(), s.next_position);
  else
    std::ranges::copy(already_shown(s, o.layer, tokens), positions_.begin());
}

/// Counts new tokens whose positions are in positions_.
KVKEEP_INLINE void Observer::count(SequenceId id, SequenceState& s) {
  const auto tokens = static_cast<std::int32_t>(positions_.size());
  s.columns.append(positions_);
  const std::int64_t before = std::exchange(s.logical, s.logical + tokens);
  if (tokens > 0) s.next_position = positions_.back() + 1;
  if (before < s.prompt && s.prompt <= s.logical)
    s.prompt_end = positions_[static_cast<std::size_t>(s.prompt - before - 1)] + 1;
  for (const std::unique_ptr<Part>& part : sequences_->parts()) part->append(id, s);
}

/// Everything in recording a step that can fail, before any of it is recorded.
KVKEEP_INLINE void Observer::make_room(const Observation& o) {
  arrivals_.clear();
  std::size_t arrivals = 0;
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    SequenceState& s = *sequences_->resolved()[i];
    const std::int32_t tokens = o.indptr[i + 1] - o.indptr[i];
    find_positions(o, i, s);
    if (queries_ > 0 && !o.unread) s.ring.reserve(o.queries.dtype());
    arrivals += static_cast<std::size_t>(std::min(tokens, s.ring.capacity()));
    if (!first_to_show(s, o.layer, tokens)) continue;
    s.columns.reserve(tokens);
    for (const std::unique_ptr<Part>& part : sequences_->parts()) part->reserve_tokens(o.sequences[i], s, positions_);
  }
  arrivals_.reserve(arrivals);
}

KVKEEP_INLINE void Observer::observe(const Observation& o) {
  const std::int32_t index = sequences_->index_of("observe", o.layer);
  if (index < 0) return;  // sliding, shared and other layers are not ours
  check("observe", o);
  make_room(o);
  MachineMemory& memory = machine_->memory();
  if (o.queries.defined()) basis_ = o.basis;
  sequences_->changed();
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    SequenceState& s = *sequences_->resolved()[i];
    const std::int32_t tokens = o.indptr[i + 1] - o.indptr[i];
    find_positions(o, i, s);
    if (first_to_show(s, o.layer, tokens)) count(o.sequences[i], s);
    if (o.unread) {
      s.ring.skip_unread(index, tokens);
      continue;
    }
    std::span<const std::int32_t> seen = positions_;
    if (s.passing && s.passing->contiguous < s.passing->tokens) {  // of those that go on, the newest have no gaps
      s.ring.skip(index, s.passing->tokens - s.passing->contiguous);
      seen = seen.last(static_cast<std::size_t>(s.passing->contiguous));
    }
    const auto kept = static_cast<std::int32_t>(seen.size());
    s.ring.place(index, o.indptr[i + 1] - kept, seen, arrivals_);
    s.ring.advance(index, kept, o.log_sum_exp.defined());
  }
  if (!arrivals_.empty()) memory.push_queries(arrivals_, observer_detail::layout_of(o, spec()));
}

/// `first`: the same tokens as the first full layer would observe them.
KVKEEP_INLINE void Observer::check(const StepTokens& t, const Observation& first) const {
  KVKEEP_REQUIRE_AS(Unsupported, !policy_->narrows(), "begin_step: ", policy_->name(),
                    " narrows prompts between layers; allowed observe() in every layer");
  KVKEEP_REQUIRE(is_scorable(t.query_dtype), "begin_step: queries are ", t.query_dtype, "; allowed f32, f16, bf16");
  check("begin_step", first);
  for (std::size_t i = 0; i < sequences_->resolved().size(); ++i) {
    const SequenceState& s = *sequences_->resolved()[i];
    require_shown("begin_step", t.sequences[i], s);
    KVKEEP_REQUIRE(s.ring.takes(t.query_dtype), "begin_step: queries of sequence ", t.sequences[i], " are ",
                   t.query_dtype, "; earlier ones were ", s.ring.dtype(), "; allowed one dtype");
  }
  if (queries_ > 0) require_one_basis("begin_step", t.basis);
}

KVKEEP_INLINE void Observer::begin_step(const StepTokens& t) {
  MachineMemory& memory = machine_->memory();
  KVKEEP_REQUIRE_AS(StateError, memory.capture() != Capture::now,
                    "begin_step: the stream is being captured, so every replay would file its queries as this step's; "
                    "allowed before the capture, and before each replay");
  const Observation first{.layer = sequences_->full_layers().front(),
                          .sequences = t.sequences,
                          .indptr = t.indptr,
                          .unread = true,
                          .positions = t.positions};
  check(t, first);
  if (std::ranges::find(recorded_, 0) != recorded_.end())  // of the step before this one
    for (const auto& [id, s] : *sequences_) require_recorded("begin_step", id, s);
  const std::int32_t tokens = t.indptr.back();
  const bool reads = queries_ > 0;
  KVKEEP_REQUIRE_AS(StateError, !reads || tokens <= step_room_ || !step_captured_, "begin_step: ", tokens,
                    " tokens, but the table that a captured graph reads has room for ", step_room_,
                    "; allowed up to that: run a step of the largest size before the first capture");
  make_room(first);
  if (reads) {
    for (SequenceState* const s : sequences_->resolved()) s->ring.reserve(t.query_dtype);
    // Lines after those of a step say that nothing is kept, for graphs of larger steps.
    step_places_.assign(static_cast<std::size_t>(std::max(tokens, step_tokens_)), {});
    const std::int64_t token_bytes = element_size(t.query_dtype) * spec().query_heads * spec().key_dim;
    for (std::size_t i = 0; i < sequences_->resolved().size(); ++i) {
      find_positions(first, i, *sequences_->resolved()[i]);
      arrivals_.clear();
      sequences_->resolved()[i]->ring.place(0, t.indptr[i], positions_, arrivals_);
      for (const QueryArrival& a : arrivals_)
        for (std::int32_t n = 0; n < a.tokens; ++n) {
          const std::int32_t at = (a.at + n) % a.capacity;
          step_places_[static_cast<std::size_t>(a.first + n)] = {
              a.ring + at * token_bytes, a.positions + at, a.position + n,
              a.normalisers == nullptr ? nullptr : a.normalisers + at * spec().query_heads};
        }
    }
    const auto lines = static_cast<std::int32_t>(step_places_.size());
    if (lines > step_room_) {
      constexpr std::int32_t kLeast = 64;
      const std::int32_t room = std::max(lines + lines / 2, kLeast);
      step_table_ = memory.allocate(room * static_cast<std::int64_t>(sizeof(QueryPlace)));
      step_room_ = room;
      step_places_.resize(static_cast<std::size_t>(room));
    }
    memory.write(step_table_.get(), step_places_.data(),
                 static_cast<std::int64_t>(step_places_.size() * sizeof(QueryPlace)));
    step_tokens_ = tokens;
    step_dtype_ = t.query_dtype;
    step_normalised_ = t.log_sum_exp;
    basis_ = t.basis;
    recorded_.assign(sequences_->full_layers().size(), step_captured_ || tokens == 0 ? 1 : 0);
  }
  sequences_->changed();
  ++step_;
  for (std::size_t i = 0; i < sequences_->resolved().size(); ++i) {
    SequenceState& s = *sequences_->resolved()[i];
    find_positions(first, i, s);
    const auto own = static_cast<std::int32_t>(positions_.size());
    count(t.sequences[i], s);
    s.step = step_;
    s.step_tokens = own;
    for (std::int32_t l = 0; l < static_cast<std::int32_t>(sequences_->full_layers().size()); ++l)
      s.ring.advance(l, own, t.log_sum_exp);
  }
}

KVKEEP_INLINE void Observer::record(std::int32_t layer, const Tensor& queries, const Tensor& log_sum_exp) {
  const std::int32_t index = sequences_->index_of("record", layer);
  if (index < 0 || queries_ == 0) return;
  KVKEEP_REQUIRE_AS(StateError, step_table_ != nullptr, "record: no step has begun; allowed after begin_step()");
  const std::int32_t indptr[] = {
      0, queries.defined() && queries.dim() == 3 ? static_cast<std::int32_t>(queries.size(0)) : 0};
  const Observation own{
      .layer = layer, .sequences = {}, .indptr = indptr, .queries = queries, .log_sum_exp = log_sum_exp};
  check_queries("record", own, spec(), machine_->device(), *policy_);
  check_normalisers("record", own, spec(), machine_->device());
  KVKEEP_REQUIRE(queries.dtype() == step_dtype_, "record: queries of layer ", layer, " are ", queries.dtype(),
                 ", but the step began with ", step_dtype_, "; allowed what begin_step() was given");
  MachineMemory& memory = machine_->memory();
  const bool capturing = memory.capture() == Capture::now;
  KVKEEP_REQUIRE_AS(StateError, indptr[1] <= step_room_ && (capturing || indptr[1] >= step_tokens_),
                    "record: ", indptr[1], " queries of layer ", layer, "; allowed ", capturing ? 0 : step_tokens_,
                    " to ", step_room_, ": as many as the step that began has tokens, or more, which are padding");
  KVKEEP_REQUIRE(log_sum_exp.defined() == step_normalised_, "record: log-sum-exps of layer ", layer,
                 step_normalised_ ? " are missing" : " are given", ", unlike what begin_step() was told; allowed ",
                 step_normalised_ ? "with them" : "without them");
  step_captured_ = step_captured_ || capturing;
  recorded_[static_cast<std::size_t>(index)] = 1;
  const QueryLayout layout = observer_detail::layout_of(own, spec());
  const LayerOffset offset = QueryRing::offset_of(index, queries_, layout.heads * layout.head_bytes, layout.heads);
  memory.push_queries(QueryTable{static_cast<const QueryPlace*>(step_table_.get()), indptr[1], offset}, layout);
}

KVKEEP_INLINE void Observer::require_shown(const char* operation, SequenceId id, const SequenceState& s,
                                           std::int32_t layer, std::int64_t shown) const {
  KVKEEP_REQUIRE_AS(StateError, queries_ == 0 || shown == s.logical, operation, ": layer ", layer, " has shown ", shown,
                    " of the ", s.logical, " tokens of sequence ", id,
                    "; observe() or record() every full layer in each step");
}

KVKEEP_INLINE void Observer::require_shown(const char* operation, SequenceId id, const SequenceState& s) const {
  for (std::size_t l = 0; l < sequences_->full_layers().size(); ++l)
    require_shown(operation, id, s, sequences_->full_layers()[l], s.prefix + s.ring.seen(static_cast<std::int32_t>(l)));
}

KVKEEP_INLINE void Observer::require_recorded(const char* operation, SequenceId id, const SequenceState& s) const {
  if (s.step != step_) return;
  for (std::size_t l = 0; l < recorded_.size(); ++l)
    if (recorded_[l] == 0) require_shown(operation, id, s, sequences_->full_layers()[l], s.logical - s.step_tokens);
}

}  // namespace kvkeep
