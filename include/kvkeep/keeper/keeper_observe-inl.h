#pragma once
// Bodies of keeper.h: compiled by src/policy, or where they are included under KVKEEP_HEADER_ONLY.
// Keeper's part of observations from the engine: checks, then records them.

#include <algorithm>
#include <numeric>
#include <utility>

#include "kvkeep/core/header_only.h"
#include "kvkeep/keeper/keeper.h"

namespace kvkeep {
namespace keeper_observe_detail {

/// Where the queries of the i-th sequence of a step are; null if there are none.
struct Queries {
  const std::byte* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::int64_t token_stride = 0, head_stride = 0;  ///< bytes

  Queries() = default;
  Queries(const Observation& o, std::size_t i) {
    if (!o.queries.defined()) return;
    const auto bytes = static_cast<std::int64_t>(o.queries.element_size());
    dtype = o.queries.dtype();
    token_stride = o.queries.step(0) * bytes;
    head_stride = o.queries.step(1) * bytes;
    data = static_cast<const std::byte*>(o.queries.bytes()) + o.indptr[i] * token_stride;
  }
};

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

}  // namespace keeper_observe_detail

KVKEEP_INLINE void Keeper::check(const char* operation, const Observation& o) const {
  sequences_->meet(operation, o.sequences, o.indptr);
  const std::int32_t tokens = o.indptr.back();
  KVKEEP_REQUIRE(o.positions.empty() || static_cast<std::int32_t>(o.positions.size()) == tokens, operation, ": ",
                 o.positions.size(), " positions for ", tokens, " tokens; allowed none or one each");
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    const SequenceState& s = *sequences_->met()[i];
    require_recorded(operation, o.sequences[i], s);
    const std::int32_t own_tokens = o.indptr[i + 1] - o.indptr[i];
    KVKEEP_REQUIRE(!begins_prompt(s, own_tokens) || s.prompt <= own_tokens, operation, ": sequence ", o.sequences[i],
                   " passes ", own_tokens, " of the ", s.prompt, " tokens of its prompt; ", policy_->name(),
                   " compares layers over the whole prompt; allowed all of it in one step");
    const bool first = leads(s, o.layer, own_tokens);
    KVKEEP_REQUIRE_AS(StateError, !first || s.pass == nullptr, operation, ": layer ", o.layer,
                      " passes more tokens of sequence ", o.sequences[i], ", whose prompt has only reached layer ",
                      s.next_layer, "; allowed after its last layer");
    if (!first) {
      KVKEEP_REQUIRE_AS(StateError, s.pass == nullptr || own_tokens == static_cast<std::int32_t>(s.present.size()),
                        operation, ": layer ", o.layer, " passes ", own_tokens, " tokens of sequence ", o.sequences[i],
                        "; ", s.present.size(), " continued to it; allowed exactly these");
      const auto shown = already_shown(s, o.layer, own_tokens);
      KVKEEP_REQUIRE(o.positions.empty() || std::equal(shown.begin(), shown.end(), o.positions.begin() + o.indptr[i]),
                     operation, ": layer ", o.layer, " gives sequence ", o.sequences[i],
                     " different positions than an earlier layer of the step; allowed the same in every layer");
      continue;
    }
    const std::int64_t most = most_positions_;
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
  if (needs_.queries == 0) return;
  check_queries(operation, o);
  check_normalisers(operation, o);
  for (std::size_t i = 0; i < sequences_->met().size(); ++i)
    KVKEEP_REQUIRE(sequences_->met()[i]->ring.takes(o.queries.dtype()), operation, ": queries of layer ", o.layer,
                   ", sequence ", o.sequences[i], ", are ", o.queries.dtype(), "; earlier ones were ",
                   sequences_->met()[i]->ring.dtype(), "; allowed one dtype");
  require_one_basis(operation, o.basis);
}

KVKEEP_INLINE void Keeper::require_one_basis(const char* operation, QueryBasis basis) const {
  KVKEEP_REQUIRE(!basis_known_ || basis == basis_, operation, ": queries are taken ",
                 basis == QueryBasis::pre_rope ? "before" : "after", " RoPE, unlike earlier ones; allowed one basis");
  check_basis(operation, basis);
}

KVKEEP_INLINE void Keeper::check_basis(const char* operation, QueryBasis basis) const {
  KVKEEP_REQUIRE(basis != QueryBasis::pre_rope || rope_unstated_ < 0, operation,
                 ": queries are taken before RoPE, but the model spec does not state the RoPE of layer ",
                 rope_unstated_,
                 " that turns them; allowed with rope.inv_freq, RopeStyle::none for a layer without RoPE, or "
                 "QueryBasis::post_rope");
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
  KVKEEP_REQUIRE(q.has_memory(), operation, ": queries of layer ", o.layer,
                 " have no address (null); allowed an address");
  KVKEEP_REQUIRE(is_scorable(q.dtype()), operation, ": queries of layer ", o.layer, " are ", q.dtype(),
                 "; allowed f32, f16, bf16");
  KVKEEP_REQUIRE(q.stride(2) == 1 || spec_.key_dim == 1, operation, ": queries of layer ", o.layer, " have stride ",
                 q.stride(2), " in the last dimension; allowed 1");
  KVKEEP_REQUIRE(q.device() == device(), operation, ": queries of layer ", o.layer, " are on ", q.device().str(),
                 ", but the keeper works on ", device().str(), "; allowed only that device");
}

KVKEEP_INLINE void Keeper::check_normalisers(const char* operation, const Observation& o) const {
  const Tensor& x = o.log_sum_exp;
  if (!x.defined()) return;
  KVKEEP_REQUIRE(x.has_memory(), operation, ": log-sum-exps of layer ", o.layer,
                 " have no address (null); allowed an address");
  KVKEEP_REQUIRE(x.dtype() == Dtype::f32 && x.dim() == 2 && x.size(0) == o.indptr.back() &&
                     x.size(1) == spec_.query_heads && x.device() == device(),
                 operation, ": log-sum-exps of layer ", o.layer, " are ", x.dtype(), " in ", x.dim(), " dimensions",
                 x.dim() == 2 ? text(" [", x.size(0), ", ", x.size(1), "]") : "", " on ", x.device().str(),
                 "; allowed f32 [", o.indptr.back(), ", ", spec_.query_heads, "] on ", device().str());
}

/// True if these tokens are the first that any layer shows in this step.
KVKEEP_INLINE bool Keeper::leads(const SequenceState& s, std::int32_t layer, std::int32_t tokens) const {
  const std::int32_t index = sequences_->index_of(layer);
  return s.prefix + s.ring.seen(index) + tokens > s.logical;
}

/// Positions that an earlier layer gave to the tokens that this layer shows now.
KVKEEP_INLINE std::span<const std::int32_t> Keeper::already_shown(const SequenceState& s, std::int32_t layer,
                                                                  std::int32_t tokens) const {
  if (s.pass != nullptr) return s.present;
  const std::int64_t behind = s.logical - s.prefix - s.ring.seen(sequences_->index_of(layer));
  const auto newest = s.columns->newest();
  KVKEEP_REQUIRE_AS(StateError, behind <= static_cast<std::int64_t>(newest.size()), "observe: layer ", layer, " is ",
                    behind, " tokens behind the other layers; observe every full layer in each step");
  return newest.subspan(newest.size() - static_cast<std::size_t>(behind), static_cast<std::size_t>(tokens));
}

/// Writes the positions of the tokens of the i-th sequence to positions_.
KVKEEP_INLINE void Keeper::find_positions(const Observation& o, std::size_t i, const SequenceState& s) {
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

/// Counts new tokens whose positions are in positions_.
KVKEEP_INLINE void Keeper::count(SequenceState& s, std::int32_t tokens) {
  s.columns->append(positions_);
  const std::int64_t before = std::exchange(s.logical, s.logical + tokens);
  if (tokens > 0) s.next_position = positions_.back() + 1;
  if (before < s.prompt && s.prompt <= s.logical)
    s.prompt_end = positions_[static_cast<std::size_t>(s.prompt - before - 1)] + 1;
}

/// Everything in recording a step that can fail, before any of it is recorded.
KVKEEP_INLINE void Keeper::make_room(const Observation& o) {
  begun_.clear();
  arrivals_.clear();
  std::size_t arrivals = 0;
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    SequenceState& s = *sequences_->met()[i];
    const std::int32_t tokens = o.indptr[i + 1] - o.indptr[i];
    find_positions(o, i, s);
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
  const std::int32_t index = sequences_->index_of(o.layer);
  if (index < 0) return;  // sliding, shared and other layers are not ours
  check("observe", o);
  make_room(o);
  MachineMemory& memory = provided_.machine().memory();
  if (o.queries.defined()) {
    basis_ = o.basis;
    basis_known_ = true;
  }
  sequences_->changed();
  for (Begun& begun : begun_) {
    begun.sequence->pass = std::move(begun.pass);
    begun.sequence->present = std::move(begun.present);
    begun.sequence->tail = begun.report.tokens;
    begun.sequence->next_layer = 0;
    begun.sequence->report = std::move(begun.report);
  }
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    SequenceState& s = *sequences_->met()[i];
    const std::int32_t tokens = o.indptr[i + 1] - o.indptr[i];
    find_positions(o, i, s);
    if (leads(s, o.layer, tokens)) count(s, tokens);
    if (o.unread) {
      s.ring.skip_unread(index, tokens);
      continue;
    }
    std::span<const std::int32_t> seen = positions_;
    if (s.pass != nullptr &&
        s.tail < s.report->tokens) {  // of the tokens that continued, only the newest are contiguous
      s.ring.skip(index, s.report->tokens - s.tail);
      seen = seen.last(static_cast<std::size_t>(s.tail));
    }
    const auto kept = static_cast<std::int32_t>(seen.size());
    s.ring.place(index, o.indptr[i + 1] - kept, seen, arrivals_);
    s.ring.advance(index, kept, o.log_sum_exp.defined());
  }
  if (!arrivals_.empty()) memory.push_queries(arrivals_, keeper_observe_detail::layout_of(o, spec_));
}

/// `first`: the same tokens as the first full layer would observe them.
KVKEEP_INLINE void Keeper::check(const StepTokens& t, const Observation& first) const {
  KVKEEP_REQUIRE_AS(Unsupported, !policy_->narrows(), "begin_step: ", policy_->name(),
                    " narrows prompts between layers; allowed observe() in every layer");
  KVKEEP_REQUIRE(is_scorable(t.query_dtype), "begin_step: queries are ", t.query_dtype, "; allowed f32, f16, bf16");
  check("begin_step", first);
  for (std::size_t i = 0; i < sequences_->met().size(); ++i) {
    const SequenceState& s = *sequences_->met()[i];
    for (std::size_t l = 0; l < sequences_->full_layers().size(); ++l)
      require_shown("begin_step", t.sequences[i], s, sequences_->full_layers()[l],
                    s.prefix + s.ring.seen(static_cast<std::int32_t>(l)));
    KVKEEP_REQUIRE(s.ring.takes(t.query_dtype), "begin_step: queries of sequence ", t.sequences[i], " are ",
                   t.query_dtype, "; earlier ones were ", s.ring.dtype(), "; allowed one dtype");
  }
  if (needs_.queries > 0) require_one_basis("begin_step", t.basis);
}

KVKEEP_INLINE void Keeper::begin_step(const StepTokens& t) {
  MachineMemory& memory = provided_.machine().memory();
  KVKEEP_REQUIRE_AS(StateError, !memory.capturing(),
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
  const bool reads = needs_.queries > 0;
  KVKEEP_REQUIRE_AS(StateError, !reads || tokens <= step_room_ || !step_captured_, "begin_step: ", tokens,
                    " tokens, but the table that a captured graph reads has room for ", step_room_,
                    "; allowed up to that: run a step of the largest size before the first capture");
  make_room(first);
  if (reads) {
    for (SequenceState* const s : sequences_->met()) s->ring.reserve(t.query_dtype);
    // Lines after those of a step say that nothing is kept, for graphs of larger steps.
    step_places_.assign(static_cast<std::size_t>(std::max(tokens, step_tokens_)), {});
    const std::int64_t token_bytes = element_size(t.query_dtype) * spec_.query_heads * spec_.key_dim;
    for (std::size_t i = 0; i < sequences_->met().size(); ++i) {
      find_positions(first, i, *sequences_->met()[i]);
      arrivals_.clear();
      sequences_->met()[i]->ring.place(0, t.indptr[i], positions_, arrivals_);
      for (const QueryArrival& a : arrivals_)
        for (std::int32_t n = 0; n < a.tokens; ++n) {
          const std::int32_t at = (a.at + n) % a.capacity;
          step_places_[static_cast<std::size_t>(a.first + n)] = {
              a.ring + at * token_bytes, a.positions + at, a.position + n,
              a.normalisers == nullptr ? nullptr : a.normalisers + at * spec_.query_heads};
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
    basis_known_ = true;
    recorded_.assign(sequences_->full_layers().size(), step_captured_ || tokens == 0 ? 1 : 0);
  }
  sequences_->changed();
  ++step_;
  for (std::size_t i = 0; i < sequences_->met().size(); ++i) {
    SequenceState& s = *sequences_->met()[i];
    find_positions(first, i, s);
    const auto own = static_cast<std::int32_t>(positions_.size());
    count(s, own);
    s.step = step_;
    s.step_tokens = own;
    for (std::int32_t l = 0; l < static_cast<std::int32_t>(sequences_->full_layers().size()); ++l)
      s.ring.advance(l, own, t.log_sum_exp);
  }
}

KVKEEP_INLINE void Keeper::record(std::int32_t layer, const Tensor& queries, const Tensor& log_sum_exp) {
  KVKEEP_REQUIRE(layer >= 0 && layer < spec_.num_layers(), "record: layer ", layer, " is out of range; allowed 0 to ",
                 spec_.num_layers() - 1);
  const std::int32_t index = sequences_->index_of(layer);
  if (index < 0 || needs_.queries == 0) return;
  KVKEEP_REQUIRE_AS(StateError, step_table_ != nullptr, "record: no step has begun; allowed after begin_step()");
  const std::int32_t indptr[] = {
      0, queries.defined() && queries.dim() == 3 ? static_cast<std::int32_t>(queries.size(0)) : 0};
  const Observation own{
      .layer = layer, .sequences = {}, .indptr = indptr, .queries = queries, .log_sum_exp = log_sum_exp};
  check_queries("record", own);
  check_normalisers("record", own);
  KVKEEP_REQUIRE(queries.dtype() == step_dtype_, "record: queries of layer ", layer, " are ", queries.dtype(),
                 ", but the step began with ", step_dtype_, "; allowed what begin_step() was given");
  MachineMemory& memory = provided_.machine().memory();
  const bool capturing = memory.capturing();
  KVKEEP_REQUIRE_AS(StateError, indptr[1] <= step_room_ && (capturing || indptr[1] >= step_tokens_),
                    "record: ", indptr[1], " queries of layer ", layer, "; allowed ", capturing ? 0 : step_tokens_,
                    " to ", step_room_, ": as many as the step that began has tokens, or more, which are padding");
  KVKEEP_REQUIRE(log_sum_exp.defined() == step_normalised_, "record: log-sum-exps of layer ", layer,
                 step_normalised_ ? " are missing" : " are given", ", unlike what begin_step() was told; allowed ",
                 step_normalised_ ? "with them" : "without them");
  step_captured_ = step_captured_ || capturing;
  recorded_[static_cast<std::size_t>(index)] = 1;
  const QueryLayout layout = keeper_observe_detail::layout_of(own, spec_);
  memory.push_queries(static_cast<const QueryPlace*>(step_table_.get()), indptr[1], layout,
                      QueryRing::offset_of(index, needs_.queries, layout.heads * layout.head_bytes, layout.heads));
}

}  // namespace kvkeep
