#pragma once
// Bodies of kvkeep/llama.h, which includes this.

#include "kvkeep/keep/rerotate.h"
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
  for (std::int64_t i = 0; i < taken; ++i) {
    owners_.give_back(held.cells.back());
    held.cells.pop_back();
  }
}

/// llama.cpp ends the program at one that it does not have.
inline void Evictor::require_sequence(llama_seq_id sequence) const {
  const auto sequences = static_cast<llama_seq_id>(llama_n_seq_max(context_));
  KVKEEP_REQUIRE(sequence >= 0 && sequence < sequences, "llama: the context has no sequence ", sequence,
                 "; allowed 0 to ", sequences - 1, " (n_seq_max)");
}

/// Follows what the program, or a decode that failed, has taken out of llama.cpp's memory.
inline void Evictor::sync(bool failed) {
  KVKEEP_REQUIRE_AS(StateError, context_ != nullptr, "llama: no context is attached; call attach() first");
  const llama_memory_t memory = llama_get_memory(context_);
  for (auto it = held_.begin(); it != held_.end();) {
    const llama_seq_id sequence = (it++)->first;
    const llama_pos held = llama_memory_seq_pos_max(memory, sequence) + 1, known = next_position(sequence);
    KVKEEP_REQUIRE_AS(StateError, held <= known, "llama: sequence ", sequence, " goes on at position ", held,
                      " in the cache, and the evictor knows ", known,
                      " of its tokens; allowed every batch between begin() and end()");
    if (held == 0) {
      forget(sequence);
      if (!failed) announced_.erase(sequence);
    } else if (held < known) {
      shorten(sequence, held + at(sequence).lag);
    }
  }
}

inline void Evictor::begin(const llama_batch& batch) {
  const Timer timer(spent_.observing);
  sync();
  KVKEEP_REQUIRE_AS(StateError, !running_, "llama: end() of the batch before was not called; allowed after it");
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
    member_of_[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(member - members_.begin());
  }
  for (Member& member : members_) {
    if (!held_.contains(member.sequence)) {
      keeper_.join(member.sequence, 0, kMostPositions);
      held_.emplace(member.sequence, Held{});
    }
    const std::int64_t read = keeper_.queries_read();
    const bool prompted = held_.at(member.sequence).prompted;
    const std::int64_t away = prompted ? keeper_.tokens_to_event(member.sequence) : 0;
    // In a prompt, which may end with the batch, the last ones of the batch; else all from `read` before the event on.
    if (read == 0)
      member.from = member.tokens;
    else if (read == Trigger::kNoEvent)
      member.from = 0;
    else if (!prompted)
      member.from = static_cast<std::int32_t>(std::max<std::int64_t>(0, member.tokens - read));
    else
      member.from = member.tokens > away - read ? 0 : member.tokens;
  }
  next_token_ = 0;
  reading_ = false;
  report_ = {};
  running_ = true;
  ++spent_.decodes;
}

inline void Evictor::end(std::int32_t status) {
  KVKEEP_REQUIRE_AS(StateError, running_, "llama: end() without begin(); allowed after it");
  running_ = false;
  try {
    const auto begun = Clock::now();
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    complete();
    if (status != 0) {
      sync(true);
      return;
    }
    due_.clear();
    for (const Member& member : members_) {
      Held& held = held_.at(member.sequence);
      KVKEEP_REQUIRE_AS(StateError, member.done == member.tokens, "llama: ", member.done, " of ", member.tokens,
                        " tokens of sequence ", member.sequence,
                        " were stored; does the context have the evictor's params?");
      if (!held.prompted) {
        const auto announced = announced_.find(member.sequence);
        held.prompted = announced == announced_.end() ? member.last_output
                                                      : keeper_.logical_length(member.sequence) >= announced->second;
        if (held.prompted) {
          keeper_.end_prompt(member.sequence);
          announced_.erase(member.sequence);
        }
      }
      if (held.prompted) due_.push_back(member.sequence);
    }
    if (due_.empty()) return;
    make_view(due_);
    const Plan plan = keeper_.plan(view_);
    spent_.observing += std::chrono::duration<double>(Clock::now() - begun).count();
    const Timer timer(spent_.events);
    cut(plan);
  } catch (...) {
    detach();
    throw;
  }
}

// ---- Inside llama_decode() ----

inline bool Evictor::on_node(ggml_tensor* node, bool ask, void* self) noexcept {
  Evictor& e = *static_cast<Evictor*>(self);
  const bool ours = e.running_ && !e.error_;
  bool go_on = true;
  if (ask) e.next_asked_ = e.next_ != nullptr && e.next_(node, true, e.next_data_);
  if (!ask && e.next_asked_) go_on = e.next_(node, false, e.next_data_);
  if (!ours) return ask ? e.next_asked_ : go_on;
  try {
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
    ggml_tensor* root = node;
    while (root->view_src != nullptr) root = root->view_src;
    if (k >= 0 && static_cast<std::size_t>(k) < cache_.size()) cache_[static_cast<std::size_t>(k)].keys = root;
    if (v >= 0 && static_cast<std::size_t>(v) < cache_.size()) {
      cache_[static_cast<std::size_t>(v)].values = root;
      value_rows_ = node->ne[0] == root->ne[0];
    }
    if (k == full_layers_.front()) meet(node);
    return false;
  }
  if (node->op == GGML_OP_ROPE) {
    if (needs_.rope || positions_ == Positions::cache) check_rope(node);
    return false;
  }
  if (node->op == GGML_OP_SOFT_MAX && std::string_view(node->name).starts_with("kq_soft_max")) check_attention(node);
  const bool flash = node->op == GGML_OP_FLASH_ATTN_EXT;
  if (!flash && node->op != GGML_OP_MUL_MAT) return false;
  const ggml_tensor* keys = flash ? node->src[1] : node->src[0];
  if (flash && keys->op == GGML_OP_CPY) keys = keys->src[0];  // f32 caches are read as f16
  const std::int32_t layer = layer_of(keys, "cache_k_l");
  if (layer < 0) return false;
  if (flash) check_attention(node);
  if (!reading_) return false;
  asked_layer_ = layer;
  return true;
}

/// Attention is softmax(scale q.k), and nothing else.
inline void Evictor::check_attention(const ggml_tensor* node) const {
  const bool flash = node->op == GGML_OP_FLASH_ATTN_EXT;
  std::array<float, 3> options{};  // scale, bias by distance; in flash attention also the cap on logits
  std::memcpy(options.data(), node->op_params, sizeof options);
  const bool plain = flash ? options[2] == 0 && node->src[4] == nullptr
                           : node->src[2] == nullptr && node->src[0]->op == GGML_OP_MUL_MAT;
  KVKEEP_REQUIRE_AS(Unsupported, options[1] == 0 && plain,
                    "llama: attention has a bias by distance, a cap on logits or learned sinks; allowed the softmax of "
                    "scaled products");
  const double scale = keeper_.spec().scale();
  KVKEEP_REQUIRE_AS(Unsupported, std::abs(options[0] - scale) <= 1e-5 * scale, "llama: the graph scales products by ",
                    options[0], ", and the model's metadata say ", scale, "; allowed equal ones");
}

/// The graph rotates as ModelSpec::rope says. Parameters of the node: i32 at 1 (rotary components); f32 at 5 to 8
/// (base, scale, extrapolation and attention factor).
inline void Evictor::check_rope(const ggml_tensor* node) const {
  const RopeSpec& rope = keeper_.spec().rope;
  std::array<float, 9> options{};
  std::memcpy(options.data(), node->op_params, sizeof options);
  std::int32_t rotary = 0;
  std::memcpy(&rotary, &options[1], sizeof rotary);
  const double last = options[6] * std::pow(double{options[5]}, 2.0 / rotary - 1.0);
  KVKEEP_REQUIRE_AS(
      Unsupported,
      node->src[2] == nullptr && rotary == rope.rotary_dim() && options[7] == 0 && options[8] == 1 &&
          std::abs(last - rope.inv_freq.back()) <= 1e-4 * last,
      "llama: the graph rotates in another way than the model's metadata say (frequency factors, YaRN), and ",
      keeper_.policy().name(),
      " or Positions::cache turns queries or keys; allowed policies that read them as they are, "
      "and Positions::text");
}

/// The first full layer stores keys: a micro-batch begins, and its cells are known.
inline void Evictor::meet(const ggml_tensor* stored) {
  const Timer timer(spent_.observing);
  complete();
  const ggml_tensor* rows = stored->src[1];
  const auto tokens = static_cast<std::size_t>(rows->ne[0]);
  stored_.resize(tokens);
  if (on_host(rows))
    std::memcpy(stored_.data(), rows->data, tokens * sizeof(std::int64_t));
  else
    ggml_backend_tensor_get(rows, stored_.data(), 0, tokens * sizeof(std::int64_t));
  const ggml_tensor* keys = cache_[static_cast<std::size_t>(full_layers_.front())].keys;
  per_stream_ = static_cast<std::int32_t>(keys->ne[1]);
  // With one buffer, tokens come in the order of the batch; else each sequence has its own stream, in its own order.
  owner_.resize(tokens);
  for (Member& member : members_) member.now = 0;
  for (std::size_t t = 0; t < tokens; ++t) {
    std::size_t m = members_.size();
    if (streams_ > 1)
      m = static_cast<std::size_t>(
          std::ranges::find(members_, static_cast<llama_seq_id>(stored_[t] / per_stream_), &Member::sequence) -
          members_.begin());
    else if (static_cast<std::size_t>(next_token_) < member_of_.size())
      m = static_cast<std::size_t>(member_of_[static_cast<std::size_t>(next_token_++)]);
    KVKEEP_REQUIRE_AS(StateError, m < members_.size(), "llama: cell ", stored_[t],
                      " belongs to no sequence of the batch; is the batch of begin() the one that is decoded?");
    owner_[t] = static_cast<std::int32_t>(m);
    ++members_[m].now;
  }
  ids_.clear();
  indptr_.assign(1, 0);
  places_.clear();
  reading_ = false;
  for (std::size_t m = 0; m < members_.size(); ++m) {
    Member& member = members_[m];
    if (member.now == 0) continue;
    Held& held = held_.at(member.sequence);
    llama_pos position = next_position(member.sequence);
    for (std::size_t t = 0; t < tokens; ++t) {
      if (owner_[t] != static_cast<std::int32_t>(m)) continue;
      const auto cell = static_cast<std::int32_t>(stored_[t]);
      set_label(cell, position++);
      owners_.add(cell);
      held.cells.push_back(cell);
      places_.push_back(static_cast<std::int32_t>(t));
    }
    ids_.push_back(member.sequence);
    indptr_.push_back(static_cast<std::int32_t>(places_.size()));
    reading_ = reading_ || member.done + member.now > member.from;
    member.done += member.now;
  }
  layers_met_ = 0;
  if (reading_) {
    ++spent_.read;
  } else {
    observe_unread();
  }
}

/// Tokens whose queries are not read, in every layer that has not shown them.
inline void Evictor::observe_unread() {
  const bool any = keeper_.queries_read() > 0;
  for (std::size_t i = static_cast<std::size_t>(layers_met_); i < (any ? full_layers_.size() : 1); ++i)
    keeper_.observe({.layer = full_layers_[i], .sequences = ids_, .indptr = indptr_, .unread = true});
  layers_met_ = static_cast<std::int32_t>(full_layers_.size());
}

/// Attention of a layer has run: its queries, after RoPE, are an input of it.
inline void Evictor::observe(const ggml_tensor* node) {
  const Timer timer(spent_.observing);
  const std::int32_t layer = std::exchange(asked_layer_, -1);
  KVKEEP_REQUIRE_AS(StateError,
                    static_cast<std::size_t>(layers_met_) < full_layers_.size() &&
                        full_layers_[static_cast<std::size_t>(layers_met_)] == layer,
                    "llama: attention of layer ", layer, " runs out of turn; allowed layers in ascending order");
  const ggml_tensor* q = node->op == GGML_OP_FLASH_ATTN_EXT ? node->src[0] : node->src[1];
  const ModelSpec& spec = keeper_.spec();
  const std::optional<Dtype> dtype = dtype_of(q->type);
  const auto tokens = static_cast<std::int64_t>(places_.size());
  KVKEEP_REQUIRE_AS(Unsupported,
                    dtype && q->ne[0] == spec.key_dim && q->ne[2] == spec.query_heads &&
                        q->ne[1] * q->ne[3] == tokens && q->nb[0] == static_cast<std::size_t>(element_size(*dtype)),
                    "llama: queries of layer ", layer, " are ", ggml_type_name(q->type), " [", q->ne[3], ", ", q->ne[2],
                    ", ", q->ne[1], ", ", q->ne[0], "]; allowed f32, f16 or bf16 of ", tokens, " tokens, ",
                    spec.query_heads, " heads and ", spec.key_dim, " elements");
  const auto* data = static_cast<const std::byte*>(q->data);
  if (!on_host(q)) {
    fetched_.resize(ggml_nbytes(q));
    ggml_backend_tensor_get(q, fetched_.data(), 0, fetched_.size());
    data = fetched_.data();
  }
  const std::int64_t size = element_size(*dtype), head = spec.key_dim * size, token = head * spec.query_heads;
  gathered_.resize(static_cast<std::size_t>(tokens * token));
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t t = places_[static_cast<std::size_t>(i)];
    const std::byte* from =
        data + static_cast<std::size_t>(t / q->ne[1]) * q->nb[3] + static_cast<std::size_t>(t % q->ne[1]) * q->nb[1];
    for (std::int64_t h = 0; h < spec.query_heads; ++h)
      std::memcpy(gathered_.data() + i * token + h * head, from + static_cast<std::size_t>(h) * q->nb[2],
                  static_cast<std::size_t>(head));
  }
  keeper_.observe({.layer = layer,
                   .sequences = ids_,
                   .indptr = indptr_,
                   .queries = Tensor(gathered_.data(), *dtype, {tokens, spec.query_heads, spec.key_dim}),
                   .basis = QueryBasis::post_rope});
  ++layers_met_;
}

/// The micro-batch has run. If it was broken off, layers that did not run count as unread.
inline void Evictor::complete() {
  if (!std::exchange(reading_, false)) return;
  if (static_cast<std::size_t>(layers_met_) < full_layers_.size()) observe_unread();
}

// ---- Events ----

/// Rows of the sequences of the view as floats in host memory, at their cells. Rows that nobody reads take no memory.
inline Tensor Evictor::mirrored(const ggml_tensor* from, std::vector<std::byte>& mirror, std::int32_t heads,
                                std::int32_t dim, bool read, bool refresh) const {
  const std::int64_t width = std::int64_t{heads} * dim;
  std::int64_t cells = 0;
  for (const SequenceId id : view_.sequences)
    cells = std::max<std::int64_t>(cells, std::ranges::max(at(static_cast<llama_seq_id>(id)).cells) + 1);
  const std::int64_t held = read ? cells : 1;
  if (mirror.size() < static_cast<std::size_t>(held * width) * sizeof(float))
    mirror.resize(static_cast<std::size_t>(held * width) * sizeof(float));
  auto* out = static_cast<float*>(static_cast<void*>(mirror.data()));
  if (!read) return {out, Dtype::f32, {cells, 1, heads, dim}, {0, 0, dim, 1}};
  if (refresh) {
    const ggml_to_float_t to_float = ggml_get_type_traits(from->type)->to_float;
    std::vector<std::byte> row(from->nb[1]);
    for (const SequenceId id : view_.sequences)
      for (const std::int32_t cell : at(static_cast<llama_seq_id>(id)).cells) {
        ggml_backend_tensor_get(from, row.data(), static_cast<std::size_t>(cell) * from->nb[1], row.size());
        if (from->type == GGML_TYPE_F32)
          std::memcpy(out + cell * width, row.data(), row.size());
        else
          to_float(row.data(), out + cell * width, width);
      }
  }
  return {out, Dtype::f32, {cells, 1, heads, dim}};
}

inline LayerKv Evictor::shown(std::int32_t layer, bool refresh) {
  LayerCache& own = cache_[static_cast<std::size_t>(layer)];
  const ModelSpec& spec = keeper_.spec();
  const auto rows = [&](const ggml_tensor* t, std::int32_t dim) -> std::optional<Tensor> {
    const std::optional<Dtype> dtype = dtype_of(t->type);
    if (!dtype || !on_host(t)) return {};
    return Tensor(t->data, *dtype, {t->ne[1] * t->ne[2], 1, spec.kv_heads, dim});
  };
  const std::optional<Tensor> keys = rows(own.keys, spec.key_dim), values = rows(own.values, spec.value_dim);
  // Transposed values look like rows here, and nothing moves them under one set.
  KVKEEP_REQUIRE_AS(Unsupported, value_rows_ || (one_set_ && !needs_.values),
                    "llama: values are stored transposed, and ", keeper_.policy().name(),
                    " reads or rewrites them; allowed with flash attention");
  if (keys && values) return PagedKv{.keys = *keys, .values = *values};
  rewritable_ = false;
  KVKEEP_REQUIRE_AS(Unsupported, one_set_, "llama: the cache of layer ", layer, " is in ",
                    ggml_backend_buffer_name(own.keys->buffer), ", where ", keeper_.policy().name(),
                    " cannot rewrite rows; allowed host memory (offload_kqv = false), or share=union");
  return PagedKv{
      .keys = mirrored(own.keys, own.key_mirror, spec.kv_heads, spec.key_dim, needs_.keys, refresh),
      .values = mirrored(own.values, own.value_mirror, spec.kv_heads, spec.value_dim, needs_.values, refresh)};
}

inline void Evictor::make_view(std::span<const SequenceId> due) {
  std::size_t most = 0;
  bool refresh = false;
  lengths_.clear();
  for (const SequenceId id : due) {
    const std::size_t cells = at(static_cast<llama_seq_id>(id)).cells.size();
    lengths_.push_back(static_cast<std::int32_t>(cells));
    most = std::max(most, cells);
    refresh = refresh || keeper_.tokens_to_event(id) == 0;
  }
  table_.assign(due.size() * most, -1);
  for (std::size_t i = 0; i < due.size(); ++i)
    std::ranges::copy(at(static_cast<llama_seq_id>(due[i])).cells,
                      table_.begin() + static_cast<std::ptrdiff_t>(i * most));
  view_.sequences = due;
  view_.lengths = {.data = lengths_};
  view_.block_table =
      Tensor(table_.data(), Dtype::i32, {static_cast<std::int64_t>(due.size()), static_cast<std::int64_t>(most)});
  view_.pages = &owners_;
  view_.shared_pages = SharedPages::refuse;
  rewritable_ = value_rows_;
  view_.layers.assign(cache_.size(), std::monostate{});
  for (const std::int32_t l : full_layers_) view_.layers[static_cast<std::size_t>(l)] = shown(l, refresh);
}

inline void Evictor::cut(const Plan& plan) {
  if (!rewritable_)
    for (const PageMove& move : plan.pages)
      KVKEEP_REQUIRE_AS(Unsupported, move.after.back() == move.before.back(), "llama: ", keeper_.policy().name(),
                        " drops the newest token of sequence ", due_[static_cast<std::size_t>(move.sequence)],
                        ", after which llama.cpp goes on; allowed policies that keep it (recent of 1 or more)");
  report_ = keeper_.apply(plan, view_);
  if (report_.cuts.empty()) return;
  spent_.cut += static_cast<std::int64_t>(report_.cuts.size());
  for (const PageMove& move : report_.pages)
    settle(static_cast<llama_seq_id>(due_[static_cast<std::size_t>(move.sequence)]), move, plan);
}

/// The rows of a sequence are where the event put them. Puts them where they belong, and gives the other cells back.
inline void Evictor::settle(llama_seq_id sequence, const PageMove& move, const Plan& plan) {
  Held& held = held_.at(sequence);
  held.cells = move.after;
  std::vector<std::int32_t> freed = move.freed;
  std::ranges::sort(freed);
  if (rewritable_ && positions_ == Positions::cache)
    place(held, move, plan, freed);
  else if (rewritable_)
    lower(held, move, freed);
  remove(sequence, move.before, freed);
  if (positions_ == Positions::cache) renumber(sequence);
}

/// Moves rows to the lowest cells of their sequence, since attention reads up to the highest one in use. The cell of
/// the newest token stays: llama.cpp goes on after its position.
inline void Evictor::lower(Held& held, const PageMove& move, std::vector<std::int32_t>& freed) {
  const auto swap = [&](std::size_t slot, std::size_t free) {
    std::swap(held.cells[slot], freed[free]);
    move_cell(freed[free], held.cells[slot]);
    owners_.add(held.cells[slot]);
    owners_.give_back(freed[free]);
  };
  const std::int32_t newest = move.before.back();
  std::vector<std::size_t> slots(held.cells.size());
  std::iota(slots.begin(), slots.end(), std::size_t{0});
  std::erase_if(slots, [&](std::size_t i) { return owners_.references(held.cells[i]) > 1 || held.cells[i] == newest; });
  std::ranges::sort(slots, std::greater{}, [&](std::size_t i) { return held.cells[i]; });
  std::size_t next = 0;
  const auto at = std::ranges::lower_bound(freed, newest);
  if (at != freed.end() && *at == newest) {
    KVKEEP_REQUIRE_AS(StateError, !slots.empty(),
                      "llama: the newest token is dropped, and every kept cell is shared; "
                      "allowed policies that keep the newest token (recent of 1 or more)");
    swap(slots[next++], static_cast<std::size_t>(at - freed.begin()));
  }
  for (std::size_t free = 0; free < freed.size() && next < slots.size(); ++free)
    if (owners_.references(freed[free]) == 0 && freed[free] < held.cells[slots[next]]) swap(slots[next++], free);
}

/// Slot j goes to the cell that held slot j, and the last one to that of the newest token. Position j is known to
/// llama.cpp as that of slot j, so keys are rotated there; renumber() does the rest of the last one.
inline void Evictor::place(Held& held, const PageMove& move, const Plan& plan, std::vector<std::int32_t>& freed) {
  const auto slots = static_cast<std::int64_t>(held.cells.size());
  std::vector<std::int32_t> cells(move.before.begin(), move.before.begin() + slots - 1), labels;
  cells.push_back(move.before.back());
  for (const std::int32_t cell : cells) labels.push_back(label(cell));
  const ModelSpec& spec = keeper_.spec();
  for (const std::int32_t l : full_layers_)
    for (const ggml_tensor* t :
         {cache_[static_cast<std::size_t>(l)].keys, cache_[static_cast<std::size_t>(l)].values}) {
      auto* data = static_cast<std::byte*>(t->data);
      gathered_.resize(static_cast<std::size_t>(slots) * t->nb[1]);
      for (std::size_t j = 0; j < cells.size(); ++j)
        std::memcpy(gathered_.data() + j * t->nb[1], data + static_cast<std::size_t>(held.cells[j]) * t->nb[1],
                    t->nb[1]);
      for (std::size_t j = 0; j < cells.size(); ++j)
        std::memcpy(data + static_cast<std::size_t>(cells[j]) * t->nb[1], gathered_.data() + j * t->nb[1], t->nb[1]);
    }
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    if (row.sequence != move.sequence) continue;
    const std::int64_t stored = element_size(plan.table.key_dtype);
    const auto row_bytes = static_cast<std::int64_t>(cache_[static_cast<std::size_t>(row.layer)].keys->nb[1]);
    const SlotAddress keys{.base = static_cast<std::byte*>(cache_[static_cast<std::size_t>(row.layer)].keys->data) +
                                   row.head * spec.key_dim * stored,
                           .stride = row_bytes,
                           .width = spec.key_dim * stored,
                           .pages = cells.data(),
                           .page_stride = row_bytes};
    rerotate(keys, plan.table.key_dtype, spec.key_dim, spec.rope_of(plan.table.rows[r].layer),
             plan.decision.keep->row(r), labels);
  }
  freed.clear();
  for (const std::int32_t cell : move.before) owners_.count[static_cast<std::size_t>(cell)] = 0;
  for (const std::int32_t cell : cells) owners_.add(cell);
  for (const std::int32_t cell : move.before)
    if (owners_.references(cell) == 0) freed.push_back(cell);
  held.cells = std::move(cells);
}

/// Slot j gets position j. llama.cpp rotates keys by as much at its next step.
inline void Evictor::renumber(llama_seq_id sequence) {
  Held& held = held_.at(sequence);
  const auto slots = static_cast<llama_pos>(held.cells.size());
  for (llama_pos j = 0; j < slots;) {  // runs that move by as much
    const llama_pos from = label(held.cells[static_cast<std::size_t>(j)]), shift = j - from;
    llama_pos count = 0;
    for (; j < slots && j - label(held.cells[static_cast<std::size_t>(j)]) == shift; ++j, ++count)
      set_label(held.cells[static_cast<std::size_t>(j)], j);
    if (shift != 0) llama_memory_seq_add(llama_get_memory(context_), sequence, from, from + count, shift);
  }
  held.lag = keeper_.logical_length(sequence) - slots;
}

/// K and V of a cell, in every layer.
inline void Evictor::move_cell(std::int32_t from, std::int32_t to) {
  for (const std::int32_t l : full_layers_)
    for (const ggml_tensor* t :
         {cache_[static_cast<std::size_t>(l)].keys, cache_[static_cast<std::size_t>(l)].values}) {
      auto* data = static_cast<std::byte*>(t->data);
      std::memcpy(data + static_cast<std::size_t>(to) * t->nb[1], data + static_cast<std::size_t>(from) * t->nb[1],
                  t->nb[1]);
    }
}

/// Gives cells back, as runs of positions under which llama.cpp knows them.
inline void Evictor::remove(llama_seq_id sequence, std::span<const std::int32_t> before,
                            std::span<const std::int32_t> freed) {
  std::vector<std::pair<llama_pos, bool>> known;
  const std::vector<std::int32_t> gone = [&] {
    std::vector<std::int32_t> sorted(freed.begin(), freed.end());
    std::ranges::sort(sorted);
    return sorted;
  }();
  for (const std::int32_t cell : before) known.emplace_back(label(cell), std::ranges::binary_search(gone, cell));
  std::ranges::sort(known);
  for (std::size_t i = 0; i < known.size();) {
    std::size_t end = i;
    while (end < known.size() && known[end].second) ++end;
    if (end > i) llama_memory_seq_rm(llama_get_memory(context_), sequence, known[i].first, known[end - 1].first + 1);
    i = end + 1;
  }
}

}  // namespace kvkeep::llama
