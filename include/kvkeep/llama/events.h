// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of kvkeep/llama.h, which includes this: events.

#include "kvkeep/keep/compact.h"
#include "kvkeep/llama.h"

namespace kvkeep::llama {

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
    if (!dtype || !is_ours(t)) return {};
    return Tensor(t->data, *dtype, {t->ne[1] * t->ne[2], 1, spec.kv_heads, dim},
                  {t->ne[0], t->ne[0], t->ne[0] / spec.kv_heads, 1}, keeper_.device());
  };
  const ggml_tensor* valued = facts_.latent ? own.keys : own.values;
  const std::optional<Tensor> keys = rows(own.keys, spec.key_dim), values = rows(valued, spec.value_dim);
  // Transposed values look like rows here, and nothing moves them under one set.
  KVKEEP_REQUIRE_AS(Unsupported, value_rows_ || (one_set_ && !needs_.values),
                    "llama: values are stored transposed, and ", keeper_.policy().name(),
                    " reads or rewrites them; allowed with flash attention");
  if (keys && values) return PagedKv{.keys = *keys, .values = *values};
  KVKEEP_REQUIRE_AS(Unsupported, accelerator_ == nullptr, "llama: the cache of layer ", layer, " is ",
                    ggml_type_name(own.keys->type), " in ", place_of(own.keys), " and ", ggml_type_name(valued->type),
                    " in ", place_of(valued), ", and the accelerator works in ", ggml_name(keeper_.device()),
                    "; allowed a context with the evictor's params");
  numbers_ = false;
  const bool here = on_host(own.keys) && on_host(valued);
  rewritable_ = rewritable_ && here;
  KVKEEP_REQUIRE_AS(Unsupported, one_set_ || here, "llama: the cache of layer ", layer, " is in ", place_of(own.keys),
                    ", where ", keeper_.policy().name(),
                    " cannot rewrite rows; allowed host memory (offload_kqv = false), an accelerator of that GPU, or "
                    "share=union");
  if (facts_.latent) {
    const Tensor all = mirrored(own.keys, own.key_mirror, 1, spec.key_dim, needs_.keys || needs_.values, refresh);
    Tensor first(all.bytes(), Dtype::f32, {all.size(0), 1, 1, spec.value_dim},
                 {all.stride(0), all.stride(1), all.stride(2), 1});
    return PagedKv{.keys = all, .values = first};
  }
  return PagedKv{
      .keys = mirrored(own.keys, own.key_mirror, spec.kv_heads, spec.key_dim, needs_.keys, refresh),
      .values = mirrored(own.values, own.value_mirror, spec.kv_heads, spec.value_dim, needs_.values, refresh)};
}

/// What the constructor knows of a cache on the accelerator. Events look at the context's own.
inline void Evictor::require_accelerable(const llama_context_params& params) const {
  const std::string name = ggml_name(keeper_.device());
  for (const auto& [layer, place] : facts_.places)
    KVKEEP_REQUIRE_AS(Unsupported, place == name, "llama: llama.cpp puts the cache of layer ", layer, " into ", place,
                      ", and the accelerator works in ", name,
                      "; allowed all layers there (n_gpu_layers of all, offload_kqv, one GPU), or no accelerator");
  for (const ggml_type type : {params.type_k, params.type_v})
    KVKEEP_REQUIRE_AS(Unsupported, dtype_of(type), "llama: the cache is ", ggml_type_name(type),
                      ", which no kernel of the accelerator reads; allowed f32, f16, bf16, or no accelerator");
  KVKEEP_REQUIRE_AS(Unsupported, one_set_ || positions_ == Positions::text, "llama: under ", keeper_.policy().name(),
                    " each layer and head has keys of its own to turn, which no kernel of the accelerator does; "
                    "allowed Positions::text, or share=union");
}

/// What was launched is done: llama.cpp's streams do not wait for that of the accelerator. A read does.
inline void Evictor::wait() {
  std::byte any{};
  if (running_there_ != nullptr) memory().read(&any, std::exchange(running_there_, nullptr), 1);
}

/// False: no sequence is due.
inline bool Evictor::make_view(std::span<const SequenceId> due) {
  std::size_t most = 0;
  bool refresh = false, shared = false;
  lengths_.clear();
  for (const SequenceId id : due) {
    const std::size_t cells = at(static_cast<llama_seq_id>(id)).cells.size();
    lengths_.push_back(static_cast<std::int32_t>(cells));
    most = std::max(most, cells);
    refresh = refresh || keeper_.tokens_to_event(id) == 0;
    for (const std::int32_t cell : at(static_cast<llama_seq_id>(id)).cells)
      shared = shared || owners_.references(cell) > 1;
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
  // Of slots that a device chooses, a plan says that they move until stay() has read which they are.
  view_.shared_pages = accelerator_ != nullptr && one_set_ ? SharedPages::copy : SharedPages::refuse;
  // Those of an indexer move with their cells alone, and there are many.
  rewritable_ =
      value_rows_ && (accelerator_ == nullptr || (positions_ == Positions::text && !shared && !facts_.indexed));
  numbers_ = true;
  std::vector<LayerKv> layers(cache_.size());
  for (const std::int32_t l : full_layers_) layers[static_cast<std::size_t>(l)] = shown(l, refresh);
  keeper_.bind(std::move(layers));
  return refresh;
}

/// One set, whose rows are not ours to move: the accelerator says which slots stay, and they stay in their cells.
inline void Evictor::stay(Plan& plan) const {
  KeepSet& keep = *plan.decision.keep;
  for (PageMove& move : plan.pages) {
    const auto row = static_cast<std::size_t>(std::ranges::find(plan.table.rows, move.sequence, &Row::sequence) -
                                              plan.table.rows.begin());
    std::vector<std::int32_t> kept(static_cast<std::size_t>(keep.count(row)));
    memory().read(kept.data(), keep.slots.data<std::int32_t>() + keep.indptr[row],
                  std::ssize(kept) * static_cast<std::int64_t>(sizeof(std::int32_t)));
    move.after.clear();
    move.written.clear();
    move.freed.clear();
    move.taken = 0;
    auto next = kept.begin();
    for (std::size_t slot = 0; slot < move.before.size(); ++slot) {
      const bool stays = next != kept.end() && *next == static_cast<std::int32_t>(slot);
      (stays ? move.after : move.freed).push_back(move.before[slot]);
      if (stays) ++next;
    }
  }
  for (std::size_t r = 0; r < keep.in_place.size(); ++r) keep.in_place[r] = static_cast<std::int32_t>(keep.count(r));
}

/// Where rows are not ours to rewrite, a cell that must stay keeps its token: those of the window are pinned as long as
/// the event lasts.
inline std::vector<Evictor::PinnedWindow> Evictor::pin_windows() {
  std::vector<PinnedWindow> windows;
  if (rewritable_ || facts_.window == 0) return windows;
  auto& pins = keeper_.part<parts::Pins>();
  for (const SequenceId id : due_) {
    if (view_.named.empty() && keeper_.tokens_to_event(id) > 0) continue;
    const std::int64_t end = keeper_.logical_length(id), begin = std::max<std::int64_t>(0, end - facts_.window);
    const auto own = pins.pinned(id);
    windows.push_back({.sequence = id, .begin = begin, .end = end, .own = {own.begin(), own.end()}});
    pins.pin(id, begin, end);
  }
  return windows;
}

inline void Evictor::unpin(std::span<const PinnedWindow> windows) {
  auto& pins = keeper_.part<parts::Pins>();
  for (const PinnedWindow& w : windows) {
    pins.unpin(w.sequence, w.begin, w.end);
    for (const PositionSpan& span : w.own)
      if (span.end > w.begin) pins.pin(w.sequence, std::max<std::int64_t>(span.begin, w.begin), span.end);
  }
}

/// Cuts those of these sequences that are due, or that the program has named. What throws on the way leaves nothing to
/// go on with.
inline void Evictor::evict(std::vector<SequenceId> due, bool named) {
  try {
    std::optional<Timer> timer(spent_.observing);
    due_ = std::move(due);
    const bool comes = make_view(due_) || named;
    view_.named = named ? view_.sequences : std::span<const SequenceId>();
    const std::vector<PinnedWindow> windows = pin_windows();
    if (accelerator_ != nullptr && comes) {
      llama_synchronize(context_);
      running_there_ = cache_[static_cast<std::size_t>(full_layers_.front())].keys->data;
    }
    Plan plan = keeper_.plan(view_);
    timer.emplace(spent_.events);
    if (accelerator_ != nullptr && !rewritable_ && plan.decision.keep) stay(plan);
    cut(plan);
    wait();
    unpin(windows);
  } catch (...) {
    detach();
    throw;
  }
}

/// Two events of one batch, as one report.
inline void add(Report& to, Report&& more) {
  const auto append = [](auto& all, auto& others) {
    all.insert(all.end(), std::make_move_iterator(others.begin()), std::make_move_iterator(others.end()));
  };
  append(to.cuts, more.cuts);
  append(to.pages, more.pages);
  append(to.unscored, more.unscored);
  to.slots_kept += more.slots_kept;
  to.slots_chosen += more.slots_chosen;
  to.slots_dropped += more.slots_dropped;
  to.bytes_before += more.bytes_before;
  to.bytes_after += more.bytes_after;
  to.bytes_moved += more.bytes_moved;
  to.pages_freed += more.pages_freed;
}

/// Where rows are not ours to rewrite, llama.cpp turns keys to new positions: every layer's, and all keys of the cache
/// by the magnitude of RoPE.
inline void Evictor::require_plain_shift() const {
  const ModelSpec& spec = keeper_.spec();
  for (const std::int32_t l : full_layers_) {
    const RopeSpec& rope = spec.rope_of(l);
    KVKEEP_REQUIRE_AS(Unsupported,
                      rope == RopeSpec::absent() ? spec.rope == rope : std::abs(rope.attention_scaling - 1) < 1e-6,
                      "llama: layer ", l,
                      " has no RoPE, or one that scales keys (YaRN), which llama.cpp disregards when "
                      "it changes positions; allowed Positions::text, or an f32, f16 or bf16 cache in host memory with "
                      "flash attention");
  }
}

inline void Evictor::cut(const Plan& plan) {
  const bool shifts = positions_ == Positions::cache && !places();
  if (shifts && !plan.cuts.empty()) require_plain_shift();
  if (!rewritable_ || shifts)
    for (const PageMove& move : plan.pages)
      KVKEEP_REQUIRE_AS(Unsupported, move.after.back() == move.before.back(), "llama: ", keeper_.policy().name(),
                        " drops the newest token of sequence ", due_[static_cast<std::size_t>(move.sequence)],
                        ", after which llama.cpp goes on; allowed policies that keep it (recent of 1 or more)");
  if (rewritable_)
    for (const PageMove& move : plan.pages) require_window(move);
  Report report = keeper_.apply(plan, view_);
  spent_.cut += static_cast<std::int64_t>(report.cuts.size());
  for (const PageMove& move : report.pages)
    rearrange(static_cast<llama_seq_id>(due_[static_cast<std::size_t>(move.sequence)]), move, plan);
  add(report_, std::move(report));
}

/// The rows of a sequence are where the event put them. Puts them where they belong, and gives the other cells back.
inline void Evictor::rearrange(llama_seq_id sequence, const PageMove& move, const Plan& plan) {
  Held& held = held_.at(sequence);
  held.cells = move.after;
  std::vector<std::int32_t> freed = move.freed;
  std::ranges::sort(freed);
  if (!numbers_ && !one_set_) move_blocks(move, plan);
  if (places())
    place(held, move, plan, freed);
  else if (rewritable_ && positions_ == Positions::text)
    lower(held, move, freed);
  remove(sequence, move.before, std::move(freed));
  if (positions_ == Positions::cache && !places()) renumber(sequence);
  if (positions_ == Positions::cache) held.lag = keeper_.logical_length(sequence) - std::ssize(held.cells);
  held.least = label(*std::ranges::min_element(held.cells, {}, [&](std::int32_t cell) { return label(cell); }));
}

/// The oldest label among these cells that must stay: llama.cpp goes on after the newest, and where layers slide, what
/// goes by its label goes from their window as well.
inline llama_pos Evictor::oldest_fixed(std::span<const std::int32_t> cells) const {
  return label(cells.back()) + 1 - std::max(facts_.window, 1);
}

/// Cells of the window that an event gives back are written by rows that stay.
inline void Evictor::require_window(const PageMove& move) const {
  const llama_pos oldest = oldest_fixed(move.before);
  const auto fixed = std::ranges::count_if(move.before, [&](std::int32_t cell) { return label(cell) >= oldest; });
  KVKEEP_REQUIRE_AS(Unsupported, std::ssize(move.after) >= fixed, "llama: ", keeper_.policy().name(), " keeps ",
                    move.after.size(), " slots of a sequence, and layers of this model slide over ", facts_.window,
                    " tokens, whose cells must stay; allowed budgets of ", fixed, " slots or more");
}

/// Moves rows to the lowest cells of their sequence, since attention reads up to the highest one in use. Cells that
/// must stay do: rows that stay move there.
inline void Evictor::lower(Held& held, const PageMove& move, std::vector<std::int32_t>& freed) {
  const auto swap = [&](std::size_t slot, std::size_t free) {
    std::swap(held.cells[slot], freed[free]);
    move_cell(freed[free], held.cells[slot]);
    owners_.add(held.cells[slot]);
    owners_.give_back(freed[free]);
  };
  const llama_pos oldest = oldest_fixed(move.before);
  std::vector<std::size_t> slots(held.cells.size());
  std::iota(slots.begin(), slots.end(), std::size_t{0});
  std::erase_if(slots,
                [&](std::size_t i) { return owners_.references(held.cells[i]) > 1 || label(held.cells[i]) >= oldest; });
  std::ranges::sort(slots, std::greater{}, [&](std::size_t i) { return held.cells[i]; });
  std::size_t next = 0;
  for (std::size_t free = 0; free < freed.size(); ++free) {
    if (label(freed[free]) < oldest) continue;
    KVKEEP_REQUIRE_AS(StateError, next < slots.size(),
                      "llama: the newest token is dropped, and every kept cell is shared; "
                      "allowed policies that keep the newest token (recent of 1 or more)");
    swap(slots[next++], free);
  }
  std::ranges::sort(freed);
  for (std::size_t free = 0; free < freed.size() && next < slots.size(); ++free)
    if (owners_.references(freed[free]) == 0 && freed[free] < held.cells[slots[next]]) swap(slots[next++], free);
}

/// The event moved rows of the mirrors: those of the cache, which are blocks, follow them.
inline void Evictor::move_blocks(const PageMove& move, const Plan& plan) {
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    if (row.sequence != move.sequence) continue;
    const auto kept = plan.decision.keep->row(r);
    const LayerCache& own = cache_[static_cast<std::size_t>(row.layer)];
    for (const ggml_tensor* t : {own.keys, own.values}) {
      if (t == nullptr) continue;
      const std::size_t bytes = t->nb[1] / static_cast<std::size_t>(keeper_.spec().kv_heads),
                        at = static_cast<std::size_t>(row.head) * bytes;
      gathered_.resize(kept.size() * bytes);
      for (std::size_t j = 0; j < kept.size(); ++j)
        std::memcpy(gathered_.data() + j * bytes, row_at(t, move.before[static_cast<std::size_t>(kept[j])]) + at,
                    bytes);
      for (std::size_t j = 0; j < kept.size(); ++j)
        std::memcpy(row_at(t, move.after[j]) + at, gathered_.data() + j * bytes, bytes);
    }
  }
}

/// Slot j goes to the cell that held slot j, which llama.cpp knows under position j: keys are rotated there, and
/// llama.cpp has nothing to turn.
inline void Evictor::place(Held& held, const PageMove& move, const Plan& plan, std::vector<std::int32_t>& freed) {
  const auto slots = static_cast<std::int64_t>(held.cells.size());
  std::vector<std::int32_t> cells(move.before.begin(), move.before.begin() + slots), labels;
  for (const std::int32_t cell : cells) labels.push_back(label(cell));
  const ModelSpec& spec = keeper_.spec();
  each_stored([&](const ggml_tensor* t) {
    gathered_.resize(static_cast<std::size_t>(slots) * t->nb[1]);
    for (std::size_t j = 0; j < cells.size(); ++j)
      std::memcpy(gathered_.data() + j * t->nb[1], row_at(t, held.cells[j]), t->nb[1]);
    for (std::size_t j = 0; j < cells.size(); ++j)
      std::memcpy(row_at(t, cells[j]), gathered_.data() + j * t->nb[1], t->nb[1]);
  });
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    if (row.sequence != move.sequence) continue;
    const std::int64_t stored = element_size(plan.table.key_dtype);
    const RopeSpec& rope = spec.rope_of(row.layer);
    const auto row_bytes = static_cast<std::int64_t>(cache_[static_cast<std::size_t>(row.layer)].keys->nb[1]);
    const SlotAddress keys{.base = static_cast<std::byte*>(cache_[static_cast<std::size_t>(row.layer)].keys->data) +
                                   row.head * spec.key_dim * stored,
                           .stride = row_bytes,
                           .width = spec.key_dim * stored,
                           .pages = cells.data(),
                           .page_stride = row_bytes};
    rerotate(keys, plan.table.key_dtype, spec.key_dim, rope, plan.decision.keep->row(r), labels);
  }
  freed.clear();
  for (const std::int32_t cell : move.before) owners_.count[static_cast<std::size_t>(cell)] = 0;
  for (const std::int32_t cell : cells) owners_.add(cell);
  for (const std::int32_t cell : move.before)
    if (owners_.references(cell) == 0) freed.push_back(cell);
  held.cells = std::move(cells);
}

/// Slot j gets position j. llama.cpp rotates keys by as much at its next batch.
inline void Evictor::renumber(llama_seq_id sequence) {
  Held& held = held_.at(sequence);
  const auto slots = static_cast<llama_pos>(held.cells.size());
  for (llama_pos j = 0; j < slots;) {  // runs that move by as much
    const llama_pos from = label(held.cells[static_cast<std::size_t>(j)]), shift = j - from;
    llama_pos count = 0;
    for (; j < slots && j - label(held.cells[static_cast<std::size_t>(j)]) == shift; ++j, ++count) {
      const auto cell = static_cast<std::size_t>(held.cells[static_cast<std::size_t>(j)]);
      labels_[cell] = j;
      if (turning_.size() <= cell) turning_.resize(labels_.size());
      turning_[cell] += shift;
    }
    if (shift != 0) llama_memory_seq_add(llama_get_memory(context_), sequence, from, from + count, shift);
  }
}

/// K and V of a cell, in every layer.
inline void Evictor::move_cell(std::int32_t from, std::int32_t to) {
  each_stored([&](const ggml_tensor* t) {
    const auto bytes = static_cast<std::int64_t>(t->nb[1]);
    memory().copy_rows(row_at(t, to), bytes, row_at(t, from), bytes, bytes, 1);
  });
}

/// Gives cells back, as runs of positions under which llama.cpp knows them.
inline void Evictor::remove(llama_seq_id sequence, std::span<const std::int32_t> before,
                            std::vector<std::int32_t> freed) {
  std::vector<std::pair<llama_pos, bool>> known;
  std::ranges::sort(freed);
  for (const std::int32_t cell : before) known.emplace_back(label(cell), std::ranges::binary_search(freed, cell));
  std::ranges::sort(known);
  for (std::size_t i = 0; i < known.size();) {
    std::size_t end = i;
    while (end < known.size() && known[end].second) ++end;
    if (end > i) llama_memory_seq_rm(llama_get_memory(context_), sequence, known[i].first, known[end - 1].first + 1);
    i = end + 1;
  }
}

}  // namespace kvkeep::llama
