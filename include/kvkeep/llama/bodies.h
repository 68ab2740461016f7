// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of kvkeep/llama.h, which includes this: what is decoded, and what the program does to llama.cpp's memory.

#include "kvkeep/llama.h"

namespace kvkeep::llama {

// ---- Between llama.cpp's calls ----

inline void Evictor::forget(llama_seq_id sequence) {
  for (const std::int32_t cell : at(sequence).cells) owners_.give_back(cell);
  held_.erase(sequence);
  keeper_.leave(sequence);
}

/// The newest tokens went: the sequence is `tokens` long.
inline void Evictor::shorten(llama_seq_id sequence, std::int64_t tokens) {
  Held& held = held_.at(sequence);
  const std::int64_t taken = keeper_.logical_length(sequence) - tokens;
  keeper_.truncate(sequence, tokens);
  take_newest(held, owners_, taken);
}

/// What the program did to the sequence could be followed.
inline void Evictor::require_followed(llama_seq_id sequence) const {
  KVKEEP_REQUIRE_AS(StateError, !moved_.contains(sequence), "llama: sequence ", sequence, kMoved);
  const auto strayed = strayed_.find(sequence);
  if (strayed != strayed_.end()) throw StateError(strayed->second);
}

/// No batch runs, and what the program has done to the sequence since the last one could be followed.
inline void Evictor::require_between(const char* operation, llama_seq_id sequence) {
  KVKEEP_REQUIRE_AS(StateError, !running_, "llama: ", operation, "() of sequence ", sequence,
                    " before end(); allowed between batches");
  sync();
  require_followed(sequence);
}

/// Bytes of its saved state that are of full layers.
inline std::size_t Evictor::full_bytes(llama_seq_id sequence) const {
  const std::size_t all = llama_state_seq_get_size(context_, sequence);
  return facts_.mixed() ? all - llama_state_seq_get_size_ext(context_, sequence, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
                        : all;
}

/// llama.cpp holds as many cells of the sequence, as far as the size of its saved state tells: positions that were
/// moved may look like newest ones that were removed.
inline bool Evictor::holds(llama_seq_id sequence, std::size_t cells) const {
  return state_.per_cell == 0 ||
         full_bytes(sequence) + state_.cells * state_.per_cell == state_.bytes + cells * state_.per_cell;
}

/// Two sizes are enough. Values that are stored by element make it slow to ask.
inline void Evictor::learn_state_size(llama_seq_id sequence) {
  const std::size_t cells = at(sequence).count();
  if (state_.per_cell > 0 || !value_rows_ || cells == state_.cells) return;
  const std::size_t bytes = full_bytes(sequence);
  if (state_.cells > 0 && cells > state_.cells && bytes > state_.bytes &&
      (bytes - state_.bytes) % (cells - state_.cells) == 0) {
    state_.per_cell = (bytes - state_.bytes) / (cells - state_.cells);
  } else {
    state_ = {.cells = cells, .bytes = bytes};
  }
}

/// Sequences that the graph has shown to be moved are no longer held.
inline void Evictor::forget_moved() {
  for (const llama_seq_id sequence : moved_)
    if (held_.contains(sequence)) forget(sequence);
}

/// llama.cpp ends the program at one that it does not have.
inline void Evictor::require_sequence(llama_seq_id sequence) const {
  const auto sequences = static_cast<llama_seq_id>(llama_n_seq_max(context_));
  KVKEEP_REQUIRE(sequence >= 0 && sequence < sequences, "llama: the context has no sequence ", sequence,
                 "; allowed 0 to ", sequences - 1, " (n_seq_max)");
}

/// Follows what the program, or a decode that failed, has taken out of llama.cpp's memory. A sequence that cannot be
/// followed is left as it is: it is refused as long as that lasts, and others are not.
inline void Evictor::sync(bool failed) {
  KVKEEP_REQUIRE_AS(StateError, context_ != nullptr, "llama: no context is attached; call attach() first");
  const llama_memory_t memory = llama_get_memory(context_);
  strayed_.clear();
  std::erase_if(moved_, [&](llama_seq_id sequence) { return llama_memory_seq_pos_max(memory, sequence) < 0; });
  for (auto it = held_.begin(); it != held_.end();) {
    const auto& [sequence, own] = *it++;
    const llama_pos held = llama_memory_seq_pos_max(memory, sequence) + 1, known = next_position(sequence);
    const std::size_t taken = held < known ? static_cast<std::size_t>(known - held) : 0, cells = own.count();
    if (held == 0) {
      const llama_seq_id gone = sequence;
      forget(gone);
      if (!failed) announced_.erase(gone);
    } else if (held > known) {
      strayed_[sequence] =
          text("llama: sequence ", sequence, " goes on at position ", held, " in the cache, and the evictor knows ",
               known, " of its tokens; allowed every batch between begin() and end(), and no other positions");
    } else if (taken > 0 && taken < cells && !holds(sequence, cells - taken)) {
      strayed_[sequence] = text("llama: sequence ", sequence, kMoved);
    } else {
      try {
        if (taken > 0) shorten(sequence, held + own.lag);
        // Of mixed memories it says where a window begins, or the newest token.
        if (!facts_.mixed() && llama_memory_seq_pos_min(memory, sequence) != own.least)
          strayed_[sequence] = text("llama: sequence ", sequence, kMoved);
      } catch (const StateError& past) {  // its last event
        strayed_[sequence] = past.what();
      }
    }
  }
}

inline void Evictor::begin(const llama_batch& batch) {
  std::optional<Timer> timer(spent_.observing);
  sync();
  KVKEEP_REQUIRE_AS(StateError, !running_, "llama: end() of the batch before was not called; allowed after it");
  KVKEEP_REQUIRE_AS(Unsupported, !facts_.planes || batch.token != nullptr,
                    "llama: the batch has embeddings, such as those of an image, and positions of this model have "
                    "several dimensions (M-RoPE), so they are not one a token; allowed batches of tokens");
  members_.clear();
  member_of_.assign(static_cast<std::size_t>(batch.n_tokens), 0);
  for (std::int32_t t = 0; t < batch.n_tokens; ++t) {
    KVKEEP_REQUIRE_AS(Unsupported, batch.n_seq_id == nullptr || batch.n_seq_id[t] == 1, "llama: token ", t,
                      " of the batch belongs to ", batch.n_seq_id == nullptr ? 1 : batch.n_seq_id[t],
                      " sequences; allowed one, and copy() for a prefix of several");
    const llama_seq_id sequence = batch.seq_id == nullptr ? 0 : batch.seq_id[t][0];
    auto member = std::ranges::find(members_, sequence, &Member::sequence);
    if (member == members_.end()) {
      require_sequence(sequence);
      require_followed(sequence);
      const llama_pos known = held_.contains(sequence) ? next_position(sequence) : 0;
      const llama_pos begins =
          batch.pos != nullptr ? batch.pos[t] : llama_memory_seq_pos_max(llama_get_memory(context_), sequence) + 1;
      KVKEEP_REQUIRE_AS(StateError, begins == known, "llama: sequence ", sequence, " begins at position ", begins,
                        ", and the evictor knows ", known, " of its tokens; allowed position ", known,
                        " (a copied sequence: use Evictor::copy)");
      member = members_.insert(members_.end(), {.sequence = sequence, .begins = begins});
    }
    KVKEEP_REQUIRE(batch.pos == nullptr || batch.pos[t] == member->begins + member->tokens, "llama: token ", t,
                   " of the batch is at position ", batch.pos[t], " of sequence ", sequence, "; allowed position ",
                   member->begins + member->tokens, ", after the one before it");
    ++member->tokens;
    member->last_output = batch.logits == nullptr ? t + 1 == batch.n_tokens : batch.logits[t] != 0;
    member->outputs += member->last_output ? 1 : 0;
    member_of_[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(member - members_.begin());
  }
  // Drafts that were refused are taken back by now: what waited for it comes before the batch.
  std::vector<SequenceId> settled;
  for (const Member& member : members_) {
    const auto held = held_.find(member.sequence);
    if (held == held_.end() || !held->second.waits || held->second.drafts) continue;
    if (!may_cut(held->second)) continue;
    KVKEEP_REQUIRE_AS(StateError, holds(member.sequence, held->second.cells.size()), "llama: sequence ",
                      member.sequence, kMoved);
    KVKEEP_REQUIRE_AS(
        StateError,
        positions_ == Positions::text || batch.pos == nullptr || keeper_.tokens_to_event(member.sequence) > 0,
        "llama: an event of sequence ", member.sequence,
        " waited for drafts to be taken back, and changes its positions; allowed settle(", member.sequence,
        ") before the batch is built");
    settled.push_back(member.sequence);
  }
  report_ = {};
  for (const SequenceId sequence : settled) held_.at(static_cast<llama_seq_id>(sequence)).waits = false;
  timer.reset();
  if (!settled.empty()) evict(std::move(settled));
  timer.emplace(spent_.observing);
  for (Member& member : members_) {
    if (held_.contains(member.sequence)) member.begins = next_position(member.sequence);
    if (!held_.contains(member.sequence)) {
      keeper_.join(member.sequence, 0, kOpenPrompt);
      held_.emplace(member.sequence, Held{});
    }
    const std::int64_t read = keeper_.queries_read();
    const bool prompted = held_.at(member.sequence).prompted;
    const std::int64_t away = prompted ? keeper_.tokens_to_event(member.sequence) : 0;
    // In a prompt, which may end with the batch, the last ones of the batch; else all from `read` before the event on.
    if (read == 0)
      member.from = member.tokens;
    else if (!prompted)
      member.from = static_cast<std::int32_t>(std::max<std::int64_t>(0, member.tokens - read));
    else
      member.from = member.tokens > away - read ? 0 : member.tokens;
  }
  next_token_ = 0;
  reading_ = unseen_ = broken_off_ = false;
  running_ = true;
  ++spent_.decodes;
}

/// Positions of a sequence of the batch were moved: nothing of the batch stays.
inline void Evictor::break_off() {
  broken_off_ = false;
  const auto moved = std::ranges::find_if(members_, [&](const Member& m) { return moved_.contains(m.sequence); });
  try {
    complete();
    for (const Member& member : members_)
      llama_memory_seq_rm(llama_get_memory(context_), member.sequence, member.begins, -1);
    forget_moved();
    sync(true);
  } catch (...) {
    detach();
    throw;
  }
  throw StateError(text("llama: sequence ", moved->sequence, kMoved));
}

inline void Evictor::end(std::int32_t status) {
  KVKEEP_REQUIRE_AS(StateError, running_, "llama: end() without begin(); allowed after it");
  running_ = false;
  if (broken_off_ && !error_) return break_off();
  std::vector<SequenceId> due;
  try {
    const Timer timer(spent_.observing);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    unseen_ = unseen_ && status == 0;
    complete();
    forget_moved();
    if (status != 0) {
      sync(true);
      return;
    }
    for (const Member& member : members_) {
      Held& held = held_.at(member.sequence);
      KVKEEP_REQUIRE_AS(StateError, member.done == member.tokens, "llama: ", member.done, " of ", member.tokens,
                        " tokens of sequence ", member.sequence,
                        " were stored; does the context have the evictor's params?");
      held.waits = held.drafts || (held.prompted && member.outputs > 1);
      if (!held.prompted) {
        const auto announced = announced_.find(member.sequence);
        held.prompted = announced == announced_.end() ? member.last_output
                                                      : keeper_.logical_length(member.sequence) >= announced->second;
        if (held.prompted) {
          keeper_.end_prompt(member.sequence);
          announced_.erase(member.sequence);
        }
      }
      if (held.prompted && held.drafts) ++spent_.drafted;
      if ((held.prompted || in_pieces()) && !held.waits) due.push_back(member.sequence);
    }
    if (!members_.empty()) learn_state_size(members_.front().sequence);
  } catch (...) {
    detach();
    throw;
  }
  if (!due.empty()) evict(std::move(due));
}

inline void Evictor::cut(llama_seq_id sequence) {
  require_between("cut", sequence);
  const Trigger trigger = keeper_.policy().trigger();
  KVKEEP_REQUIRE_AS(Unsupported, keeper_.queries_read() == 0 || trigger.kind == Trigger::Kind::named,
                    "llama: cut() of sequence ", sequence, ", but ", keeper_.policy().name(),
                    " reads queries, and those of tokens far from its own events were not read; allowed with "
                    "trigger=named");
  KVKEEP_REQUIRE_AS(StateError, at(sequence).prompted || in_pieces(), "llama: cut() of sequence ", sequence,
                    " in the middle of its prompt; allowed after it, or with prefill=pieces");
  KVKEEP_REQUIRE_AS(StateError, may_cut(at(sequence)), "llama: cut() of sequence ", sequence,
                    ", whose rows llama.cpp copies, or shows, with its next batch; allowed after that");
  KVKEEP_REQUIRE_AS(StateError, holds(sequence, at(sequence).cells.size()), "llama: sequence ", sequence, kMoved);
  held_.at(sequence).waits = held_.at(sequence).drafts = false;
  report_ = {};
  evict({sequence}, true);
}

// ---- Inside llama_decode() ----

/// The keys of the cache that a node turns where they are, before a batch; null: it turns others. Quantised ones come
/// as copies.
[[nodiscard]] inline const ggml_tensor* shifted_keys(const ggml_tensor* node) {
  const ggml_tensor* t = node->src[0];
  for (int i = 0; t != nullptr && i < 6; ++i) {
    if (layer_of(t, "cache_k_l") >= 0) return t->view_src != nullptr ? t->view_src : t;
    t = t->op == GGML_OP_MUL_MAT ? t->src[1] : t->src[0];
  }
  return nullptr;
}

inline bool Evictor::on_node(ggml_tensor* node, bool ask, void* self) noexcept {
  Evictor& e = *static_cast<Evictor*>(self);
  // Whatever node comes next runs, and ends its part of the graph.
  if (e.running_ && e.broken_off_) return ask;
  const bool ours = e.running_ && !e.error_;
  bool go_on = true;
  if (ask) e.next_asked_ = e.next_ != nullptr && e.next_(node, true, e.next_data_);
  if (!ask && e.next_asked_) go_on = e.next_(node, false, e.next_data_);
  try {
    if (ask && e.context_ != nullptr && node->op == GGML_OP_ROPE) {
      if (const ggml_tensor* keys = shifted_keys(node)) {
        e.see_shift(node, keys);
        return e.next_asked_;
      }
    }
    if (!ours) return ask ? e.next_asked_ : go_on;
    if (ask) return e.wants(node) || e.next_asked_;
    if (e.asked_layer_ >= 0) e.observe(node);
  } catch (...) {
    e.error_ = std::current_exception();  // end() throws it: no exception may cross llama.cpp
  }
  return ask ? e.next_asked_ : go_on;
}

/// A node will run next, or soon: inputs of the graph are there, computed ones perhaps not. True: show it again once it
/// has run.
inline bool Evictor::wants(ggml_tensor* node) {
  asked_layer_ = -1;
  if (node->op == GGML_OP_SET_ROWS) {
    const std::int32_t k = layer_of(node, "cache_k_l"), v = layer_of(node, "cache_v_l");
    ggml_tensor* root = root_of(node);
    if (k >= 0 && static_cast<std::size_t>(k) < cache_.size()) {
      if (facts_.indexed && root->ne[0] != std::int64_t{keeper_.spec().kv_heads} * keeper_.spec().key_dim) {
        cache_[static_cast<std::size_t>(k)].indexer = root;
        return broken_off_;
      }
      cache_[static_cast<std::size_t>(k)].keys = root;
      if (turns_ && is_full(k) && dtype_of(root->type)) check_rope(node->src[0], k);
    }
    if (v >= 0 && static_cast<std::size_t>(v) < cache_.size()) {
      cache_[static_cast<std::size_t>(v)].values = root;
      value_rows_ = node->ne[0] == root->ne[0];
    }
    if (k == full_layers_.front()) meet(node);
    return broken_off_;
  }
  const Attention seen = attention_of(node);
  if (seen.keys != nullptr) {
    const std::int32_t layer = layer_of(seen.keys, "cache_k_l");
    if (!is_full(layer)) return false;
    check_attention(seen, layer);
    see(seen.mask);
    if (broken_off_) return true;
  }
  if (!reading_) return false;
  const bool flash = node->op == GGML_OP_FLASH_ATTN_EXT;
  if (!flash && node->op != GGML_OP_MUL_MAT) return false;
  const ggml_tensor* keys = flash ? copied_from(node->src[1]) : node->src[0];
  const std::int32_t layer = layer_of(keys, "cache_k_l");
  // A layer without a cache of its own reads that of an earlier one, whose queries count. An indexer reads its own.
  if (!is_full(layer) || layer_is_seen(layer) || root_of(keys) != cache_[static_cast<std::size_t>(layer)].keys)
    return false;
  asked_layer_ = layer;
  return true;
}

/// Attention is what the model showed when the evictor was made, and nothing else.
inline void Evictor::check_attention(const Attention& seen, std::int32_t layer) const {
  const ModelSpec& spec = keeper_.spec();
  const double scale = spec.scale();
  const std::size_t sinks = spec.layers[static_cast<std::size_t>(layer)].sinks.size();
  const double cap = spec.logit_cap;
  KVKEEP_REQUIRE_AS(Unsupported,
                    seen.plain && seen.bias == 0 && std::abs(seen.cap - cap) <= 1e-5 * cap &&
                        (seen.sinks != nullptr ? static_cast<std::size_t>(seen.sinks->ne[0]) : 0) == sinks,
                    "llama: attention of layer ", layer, " has a bias of ", seen.bias, ", a cap of ", seen.cap, " and ",
                    seen.sinks != nullptr ? "sinks" : "no sinks",
                    "; allowed what the model showed when the evictor "
                    "was made: no bias, a cap of ",
                    cap, " and ", sinks > 0 ? "sinks" : "no sinks");
  KVKEEP_REQUIRE_AS(Unsupported, std::abs(seen.scale - scale) <= 1e-5 * scale, "llama: attention of layer ", layer,
                    " scales products by ", seen.scale, ", and by ", scale,
                    " when the evictor was made; allowed equal ones");
}

/// The graph turns keys, or queries, of a layer as the spec says. What comes from another backend cannot be followed.
inline void Evictor::check_rope(const ggml_tensor* node, std::int32_t layer) {
  const Turned turned = turned_by(node);
  if (!turned.known) return;
  const RopeSpec absent = RopeSpec::absent();
  const RopeSpec* rope = &absent;
  if (turned.rope != nullptr) {
    NodeRope seen{.factors = turned.rope->src[2]};
    std::copy_n(turned.rope->op_params, seen.params.size(), seen.params.begin());
    auto known = std::ranges::find_if(
        ropes_, [&](const NodeRope& r) { return r.params == seen.params && r.factors == seen.factors; });
    if (known == ropes_.end()) {
      seen.rope = rope_of(turned.rope);
      known = ropes_.insert(ropes_.end(), std::move(seen));
    }
    rope = &known->rope;
  }
  KVKEEP_REQUIRE_AS(Unsupported, turned.after == nullptr && *rope == keeper_.spec().rope_of(layer),
                    "llama: the graph turns queries or keys of layer ", layer,
                    " in another way than when the evictor was made, and ",
                    needs_.rope ? keeper_.policy().name() : "Positions::cache",
                    " turns them back; allowed a context with the evictor's params");
}

/// llama.cpp turns keys because positions have changed: by us, or by the program. One input says by how much, for all
/// layers.
inline void Evictor::see_shift(const ggml_tensor* node, const ggml_tensor* keys) {
  const std::int32_t layer = layer_of(keys, "cache_k_l");
  if (static_cast<std::size_t>(layer) >= cache_.size() || cache_[static_cast<std::size_t>(layer)].keys != keys)
    return;  // of another context
  const bool again = layer > shifted_layer_ && shifted_layer_ >= 0;
  shifted_layer_ = layer;
  if (again) return;
  const ggml_tensor* by = node->src[1];
  std::vector<std::int32_t> turned(static_cast<std::size_t>(by->ne[0]));
  read_tensor(by, turned.data(), 0, turned.size() * sizeof(std::int32_t));
  turning_.resize(turned.size());
  for (const auto& [sequence, held] : held_)
    if (std::ranges::any_of(held.cells, [&](std::int32_t cell) {
          return turned[static_cast<std::size_t>(cell)] != turning_[static_cast<std::size_t>(cell)];
        }))
      moved_.insert(sequence);
  turning_.clear();
}

/// The members whose tokens are in the micro-batch, in its order; members_.size(): none. With one buffer, tokens come
/// in the order of the batch; else each sequence has its own stream, in its own order. Where layers have states, each
/// sequence of the batch that has tokens left gives equally many, one sequence after another.
inline std::vector<std::size_t> Evictor::owners_of(std::size_t tokens) {
  std::vector<std::size_t> members(tokens, members_.size());
  if (streams_ > 1) {
    for (std::size_t t = 0; t < tokens; ++t)
      members[t] = static_cast<std::size_t>(
          std::ranges::find(members_, static_cast<llama_seq_id>(stored_[t] / per_stream_), &Member::sequence) -
          members_.begin());
  } else if (!facts_.states) {
    for (std::size_t t = 0; t < tokens && static_cast<std::size_t>(next_token_) < member_of_.size(); ++t)
      members[t] = static_cast<std::size_t>(member_of_[static_cast<std::size_t>(next_token_++)]);
  } else {
    std::vector<std::int32_t> passed(members_.size());
    std::vector<std::size_t> left;  // by their next token
    for (const std::int32_t m : member_of_)
      if (passed[static_cast<std::size_t>(m)]++ == members_[static_cast<std::size_t>(m)].done)
        left.push_back(static_cast<std::size_t>(m));
    for (std::size_t t = 0; t < tokens && !left.empty() && tokens % left.size() == 0; ++t)
      members[t] = left[t / (tokens / left.size())];
  }
  return members;
}

/// The first full layer stores keys: a micro-batch begins, and its cells are known.
inline void Evictor::meet(const ggml_tensor* stored) {
  const Timer timer(spent_.observing);
  complete();
  shifted_layer_ = -1;
  for (auto& [sequence, held] : held_) held.copying = false;
  const ggml_tensor* rows = stored->src[1];
  const auto tokens = static_cast<std::size_t>(rows->ne[0]);
  stored_.resize(tokens);
  read_tensor(rows, stored_.data(), 0, tokens * sizeof(std::int64_t));
  const ggml_tensor* keys = cache_[static_cast<std::size_t>(full_layers_.front())].keys;
  per_stream_ = static_cast<std::int32_t>(keys->ne[1]);
  const std::vector<std::size_t> members = owners_of(tokens);
  owner_.resize(tokens);
  for (Member& member : members_) member.now = 0;
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::size_t m = members[t];
    KVKEEP_REQUIRE_AS(StateError, m < members_.size(), "llama: cell ", stored_[t],
                      " belongs to no sequence of the batch; is the batch of begin() the one that is decoded?");
    owner_[t] = static_cast<std::int32_t>(m);
    ++members_[m].now;
    members_[m].newest = static_cast<std::int32_t>(t);
  }
  // A cell that is new to llama.cpp was given back behind our back by whoever is thought to hold it.
  for (const std::int64_t cell : stored_)
    if (static_cast<std::size_t>(cell) < owners_.count.size() &&
        owners_.references(static_cast<std::int32_t>(cell)) > 0)
      for (const auto& [sequence, held] : held_)
        if (std::ranges::find(held.cells, cell) != held.cells.end()) moved_.insert(sequence);
  broken_off_ = std::ranges::any_of(members_, [&](const Member& m) { return moved_.contains(m.sequence); });
  if (broken_off_) return;
  unseen_ = true;
  ids_.clear();
  indptr_.assign(1, 0);
  places_.clear();
  reading_ = false;
  for (std::size_t m = 0; m < members_.size(); ++m) {
    Member& member = members_[m];
    if (member.now == 0) continue;
    Held& held = held_.at(member.sequence);
    held.blind = false;
    llama_pos position = next_position(member.sequence);
    for (std::size_t t = 0; t < tokens; ++t) {
      if (owner_[t] != static_cast<std::int32_t>(m)) continue;
      const auto cell = static_cast<std::int32_t>(stored_[t]);
      set_label(cell, position++);
      if (static_cast<std::size_t>(cell) < turning_.size()) turning_[static_cast<std::size_t>(cell)] = 0;
      owners_.add(cell);
      held.cells.push_back(cell);
      places_.push_back(static_cast<std::int32_t>(t));
    }
    ids_.push_back(member.sequence);
    indptr_.push_back(static_cast<std::int32_t>(places_.size()));
    reading_ = reading_ || member.done + member.now > member.from;
    member.done += member.now;
  }
  layers_seen_ = 0;
  if (reading_) {
    ++spent_.read;
  } else {
    observe_unread();
  }
}

/// The mask of attention says which cells each token sees: those of its sequence that are known to llama.cpp. Others
/// than ours: positions were moved.
inline void Evictor::see(const ggml_tensor* mask) {
  if (!unseen_) return;
  const Timer timer(spent_.observing);
  if (mask == nullptr || (mask->type != GGML_TYPE_F32 && mask->type != GGML_TYPE_F16)) return;
  unseen_ = false;
  const std::size_t element = mask->type == GGML_TYPE_F32 ? 4 : 2, cells = static_cast<std::size_t>(mask->ne[0]);
  const auto tokens = static_cast<std::int32_t>(std::ssize(stored_) / mask->ne[3]);
  seen_.resize(cells * element);
  for (const Member& member : members_) {
    if (member.now == 0) continue;
    read_tensor(mask, seen_.data(),
                static_cast<std::size_t>(member.newest / tokens) * mask->nb[3] +
                    static_cast<std::size_t>(member.newest % tokens) * mask->nb[1],
                seen_.size());
    const std::int32_t first = streams_ == 1 ? 0 : member.sequence * per_stream_;
    Held& held = held_.at(member.sequence);
    const auto shows_ours = [&](auto seen) {  // 0; others are minus infinity
      const auto* row = static_cast<const decltype(seen)*>(static_cast<const void*>(seen_.data()));
      const auto sees = [&](std::size_t cell) { return cell < cells && row[cell] == seen; };
      visible_.clear();
      for (std::size_t cell = 0; cell < cells && !held.unplaced.empty(); ++cell)
        if (sees(cell)) visible_.push_back(first + static_cast<std::int32_t>(cell));
      const auto count = static_cast<std::size_t>(std::count(row, row + cells, seen));
      const bool all = std::ranges::all_of(
          held.cells, [&](std::int32_t cell) { return sees(static_cast<std::size_t>(cell - first)); });
      return count == held.count() && all;
    };
    const bool ours = element == 4 ? shows_ours(std::uint32_t{0}) : shows_ours(std::uint16_t{0});
    if (!ours || !place_restored(held)) moved_.insert(member.sequence);
  }
  broken_off_ = std::ranges::any_of(members_, [&](const Member& m) { return moved_.contains(m.sequence); });
}

/// Tokens whose queries are not read, in every layer that has not shown them.
inline void Evictor::observe_unread() {
  const bool any = keeper_.queries_read() > 0;
  for (std::size_t i = static_cast<std::size_t>(layers_seen_); i < (any ? full_layers_.size() : 1); ++i)
    keeper_.observe({.layer = full_layers_[i], .sequences = ids_, .indptr = indptr_, .unread = true});
  layers_seen_ = static_cast<std::int32_t>(full_layers_.size());
}

/// Queries in the order of sequences, in memory of ours.
inline Tensor Evictor::gathered(const ggml_tensor* q, Dtype dtype) {
  const ModelSpec& spec = keeper_.spec();
  const auto tokens = static_cast<std::int64_t>(places_.size());
  const auto* data = static_cast<const std::byte*>(q->data);
  if (!on_host(q)) {
    fetched_.resize(ggml_nbytes(q));
    ggml_backend_tensor_get(q, fetched_.data(), 0, fetched_.size());
    data = fetched_.data();
  }
  const std::int64_t head = spec.key_dim * element_size(dtype), token = head * spec.query_heads;
  gathered_.resize(static_cast<std::size_t>(tokens * token));
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t t = places_[static_cast<std::size_t>(i)];
    const std::byte* from =
        data + static_cast<std::size_t>(t / q->ne[1]) * q->nb[3] + static_cast<std::size_t>(t % q->ne[1]) * q->nb[1];
    for (std::int64_t h = 0; h < spec.query_heads; ++h)
      std::memcpy(gathered_.data() + i * token + h * head, from + static_cast<std::size_t>(h) * q->nb[2],
                  static_cast<std::size_t>(head));
  }
  const Shape sizes{tokens, spec.query_heads, spec.key_dim};
  if (accelerator_ == nullptr) return {gathered_.data(), dtype, sizes};
  if (staged_bytes_ < std::ssize(gathered_)) {
    staged_ = memory().allocate(std::ssize(gathered_));
    staged_bytes_ = std::ssize(gathered_);
  }
  memory().write(staged_.get(), gathered_.data(), std::ssize(gathered_));
  return {staged_.get(), dtype, sizes, keeper_.device()};
}

/// Attention of a layer has run: its queries, after RoPE, are an input of it.
inline void Evictor::observe(const ggml_tensor* node) {
  const Timer timer(spent_.observing);
  const std::int32_t layer = std::exchange(asked_layer_, -1);
  KVKEEP_REQUIRE_AS(StateError,
                    static_cast<std::size_t>(layers_seen_) < full_layers_.size() &&
                        full_layers_[static_cast<std::size_t>(layers_seen_)] == layer,
                    "llama: attention of layer ", layer, " runs out of turn; allowed layers in ascending order");
  const ggml_tensor* q = node->op == GGML_OP_FLASH_ATTN_EXT ? node->src[0] : node->src[1];
  if (needs_.rope) check_rope(q, layer);
  const ModelSpec& spec = keeper_.spec();
  const std::optional<Dtype> dtype = dtype_of(q->type);
  const auto tokens = static_cast<std::int64_t>(places_.size());
  KVKEEP_REQUIRE_AS(Unsupported,
                    dtype && q->ne[0] == spec.key_dim && q->ne[2] == spec.query_heads &&
                        q->ne[1] * q->ne[3] == tokens && q->nb[0] == static_cast<std::size_t>(element_size(*dtype)),
                    "llama: queries of layer ", layer, " are ", ggml_type_name(q->type), " [", q->ne[3], ", ", q->ne[2],
                    ", ", q->ne[1], ", ", q->ne[0], "]; allowed f32, f16 or bf16 of ", tokens, " tokens, ",
                    spec.query_heads, " heads and ", spec.key_dim, " elements");
  const std::int64_t size = element_size(*dtype), token = static_cast<std::int64_t>(q->nb[1]) / size;
  // On the accelerator they are read where they are, if they are in our order.
  const bool in_order = q->ne[3] == 1 || static_cast<std::int64_t>(q->nb[3]) == q->ne[1] * token * size;
  const bool there = accelerator_ != nullptr && is_ours(q) && in_order && std::ranges::is_sorted(places_);
  keeper_.observe({.layer = layer,
                   .sequences = ids_,
                   .indptr = indptr_,
                   .queries = there ? Tensor(q->data, *dtype, {tokens, spec.query_heads, spec.key_dim},
                                             {token, static_cast<std::int64_t>(q->nb[2]) / size, 1}, keeper_.device())
                                    : gathered(q, *dtype),
                   .basis = QueryBasis::post_rope});
  // llama.cpp's next nodes may overwrite them.
  if (there) running_there_ = q->data;
  wait();
  ++layers_seen_;
}

/// The micro-batch has run. If it was broken off, layers that did not run count as unread.
inline void Evictor::complete() {
  KVKEEP_REQUIRE_AS(Unsupported, !std::exchange(unseen_, false),
                    "llama: the graph showed no mask of attention, by which positions that were moved are noticed; "
                    "allowed graphs with one");
  if (!std::exchange(reading_, false)) return;
  if (static_cast<std::size_t>(layers_seen_) < full_layers_.size()) observe_unread();
}

}  // namespace kvkeep::llama
