// SPDX-License-Identifier: Apache-2.0
// A small deterministic transformer behind the names of llama.cpp's public interface, so that kvkeep/llama.h is tested
// where llama.cpp is not installed. What an adapter can see is as in the real one: the order of nodes and callbacks,
// what tensors of attention are views of, which cells tokens get, what removing and copying sequences does, what
// llama_decode() refuses, and memory that does not outlive its last reader.
//
// A path is "fake:" and variants, with commas between them: "fake:llama", "fake:neox,device". They are
//   llama         nothing special: RoPE of neighbours
//   neox, norope, partial, linear    RoPE of halves; none; of half of each head; of positions scaled by 0.5
//   long-heads    heads longer than n_embd / heads
//   scale         products scaled by 0.2
//   yarn, factors    frequencies of RoPE are so
//   nope          the last layer has no RoPE; a shift turns its keys all the same
//   late          keys are normalised after RoPE
//   mrope         positions of several dimensions, say the metadata
//   softcap, alibi, sinks    nodes of attention say so, but compute what they always do
//   swa           every other layer of four slides over 24 tokens, and has a cache of its own
//   hybrid        every other layer of four has a state, of which nothing can be taken back; it computes nothing
//   indexer       tokens attend to the 24 that scores of keys of 32 numbers, in a second cache, choose
//   recurrent, encoder, diffusion, no-shift    predicates say so, nothing else does
//   device        with offload_kqv, caches and nodes are in memory that the host cannot read through pointers, of a GPU
//                 if the test has one (fake::device_memory)
//
// Differs: no feed-forward layers; sums in double, so that the order of cells does not show in logits; one split, no
// fused and no reused graphs; a batch above n_batch is refused with -1 instead of ending the program; nothing is
// logged; nodes that cap logits without flash attention are one.

#include <algorithm>
#include <bitset>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fake_memory.h"

using namespace fake;

namespace {

std::size_t fetched = 0;  ///< bytes of caches, by ggml_backend_tensor_get()

/// A token of a batch.
struct Token {
  llama_token id = 0;
  llama_pos position = 0;
  std::vector<llama_seq_id> sequences;
  bool output = false;
};

/// Tokens that are computed together: equally many of each stream, one stream after another.
struct MicroBatch {
  std::vector<std::size_t> tokens;  // of the batch
  std::vector<std::size_t> streams;
  std::vector<std::vector<std::size_t>> cells{};     // per stream
  std::vector<std::vector<std::size_t>> windowed{};  // in the cache of layers that slide
};

/// Nothing: llama.cpp refuses the batch.
std::optional<std::vector<Token>> read(const llama_context& c, const llama_batch& batch) {
  std::vector<Token> tokens(z(batch.n_tokens));
  std::map<llama_seq_id, llama_pos> last;
  const std::size_t sequences = c.params.kv_unified ? kMostSequences : c.params.n_seq_max;
  if (tokens.empty() || tokens.size() > c.params.n_batch || batch.token == nullptr) return {};
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    Token& token = tokens[i];
    token.id = batch.token[i];
    token.sequences = {0};
    if (batch.seq_id != nullptr) token.sequences.assign(batch.seq_id[i], batch.seq_id[i] + batch.n_seq_id[i]);
    token.output = batch.logits == nullptr ? i + 1 == tokens.size() : batch.logits[i] != 0;
    if (token.id < 0 || token.id >= c.model.vocab.tokens) return {};
    for (const llama_seq_id sequence : token.sequences) {
      if (sequence < 0 || z(sequence) >= sequences) return {};
      if (!last.contains(sequence)) {
        last[sequence] = c.memory.positions(sequence).second;
        if (last[sequence] < 0 && batch.pos != nullptr) last[sequence] = batch.pos[i] - 1;  // begins where it likes
      }
      token.position = batch.pos == nullptr ? last[sequence] + 1 : batch.pos[i];
      if (token.position != last[sequence] + 1) return {};
      last[sequence] = token.position;
    }
  }
  return tokens;
}

std::vector<MicroBatch> split(const llama_context& c, const std::vector<Token>& batch) {
  std::vector<MicroBatch> all;
  if (c.memory.streams.size() == 1 && !c.memory.has_states) {
    for (std::size_t i = 0; i < batch.size(); ++i) {
      if (i % c.params.n_ubatch == 0) all.push_back({{}, {0}});
      all.back().tokens.push_back(i);
    }
    return all;
  }
  std::map<std::size_t, std::deque<std::size_t>> waiting;  // tokens of each sequence
  for (std::size_t i = 0; i < batch.size(); ++i) waiting[z(batch[i].sequences[0])].push_back(i);
  for (std::size_t left = batch.size(); left > 0;) {
    MicroBatch micro;
    for (std::size_t i = 0; i < batch.size() && micro.streams.size() <= c.params.n_ubatch; ++i) {
      const std::size_t sequence = z(batch[i].sequences[0]);
      const auto& own = waiting[sequence];
      const bool one = c.memory.streams.size() == 1;  // where any sequences go together
      const bool follows = one ? std::ranges::find(micro.streams, sequence) == micro.streams.end()
                               : micro.streams.empty() || sequence == micro.streams.back() + 1;
      if (!own.empty() && own.front() <= i && follows) micro.streams.push_back(sequence);
    }
    std::size_t each = std::max<std::size_t>(1, c.params.n_ubatch / micro.streams.size());
    for (const std::size_t s : micro.streams) each = std::min(each, waiting[s].size());
    for (const std::size_t s : micro.streams) {
      micro.tokens.insert(micro.tokens.end(), waiting[s].begin(),
                          waiting[s].begin() + static_cast<std::ptrdiff_t>(each));
      waiting[s].erase(waiting[s].begin(), waiting[s].begin() + static_cast<std::ptrdiff_t>(each));
    }
    left -= micro.tokens.size();
    if (c.memory.streams.size() == 1) micro.streams = {0};
    all.push_back(std::move(micro));
  }
  return all;
}

void occupy(std::vector<Stream>& streams, const std::vector<std::vector<std::size_t>>& cells, const MicroBatch& micro,
            const std::vector<Token>& batch) {
  std::size_t t = 0;
  for (std::size_t s = 0; s < micro.streams.size(); ++s) {
    Stream& stream = streams[micro.streams[s]];
    for (const std::size_t cell : cells[s]) stream.remove_cell(cell);
    for (const std::size_t cell : cells[s]) {
      const Token& token = batch[micro.tokens[t++]];
      stream.cells[cell].position = token.position;
      for (const llama_seq_id sequence : token.sequences) stream.cells[cell].sequences.set(z(sequence));
    }
    stream.head = cells[s].back() + 1;
  }
}

/// RoPE of [dim, heads, positions] into `made`. Layers that slide have a base of their own, as in Gemma 3.
ggml_tensor* rotate(const llama_context& c, Graph& graph, ggml_tensor* made, ggml_tensor* heads, ggml_tensor* positions,
                    bool slides = false) {
  made->op_params[1] = static_cast<std::int32_t>(c.model.rotary);
  made->op_params[2] = llama_model_rope_type(&c.model);
  made->op_params[4] = 64;
  const float base = slides ? c.params.rope_freq_base / 8 : c.params.rope_freq_base;
  const float options[]{base, c.params.rope_freq_scale, c.model.is("yarn") ? 1.0F : 0.0F, 1, 32, 1};
  std::memcpy(made->op_params + 5, options, sizeof options);
  ggml_tensor* factors = c.model.is("factors") ? c.model.weights.at("rope_freqs") : nullptr;
  return graph.node(GGML_OP_ROPE, made, {heads, positions, factors});
}

/// What copies and shifts left to do. Shifts are a graph of their own, which the callback sees as well.
void update(llama_context& c) {
  for (const auto& [from, to] : std::exchange(c.memory.copies, {}))
    for (const auto& layers : {c.memory.keys, c.memory.values, c.memory.indexers})
      for (const ggml_tensor* t : layers)
        if (t != nullptr) std::memcpy(memory_of(t) + to * t->nb[2], memory_of(t) + from * t->nb[2], t->nb[2]);
  std::vector<llama_pos> shifts;
  for (Stream& stream : c.memory.windows)
    for (Cell& cell : stream.cells) cell.shift = 0;  // their keys are not turned here
  for (Stream& stream : c.memory.streams)
    for (Cell& cell : stream.cells) shifts.push_back(std::exchange(cell.shift, 0));
  const bool none = std::ranges::all_of(shifts, [](llama_pos shift) { return shift == 0; });
  if (none || c.model.is("norope")) return;
  Graph graph(c.host);
  ggml_tensor* by = graph.make(GGML_TYPE_I32, {std::ssize(shifts), 1, 1, 1}, "k_shift");
  std::ranges::copy(shifts, values<std::int32_t>(by).begin());
  for (std::size_t l = 0; l < c.model.layers; ++l) {
    if (c.model.slides(l) || c.model.has_state(l)) continue;
    ggml_tensor* t = c.memory.keys[l];
    ggml_tensor* heads = graph.reshape(t, {c.model.dim, c.model.kv_heads, std::ssize(shifts), 1});
    rotate(c, graph, graph.alias(heads), heads, by);
  }
  graph.run(c.params);
}

/// What is left of a mask: the indexer stores its keys, those of the first head once more, and chooses by them.
ggml_tensor* choose(const llama_context& c, Graph& graph, ggml_tensor* q, ggml_tensor* k, ggml_tensor* mask,
                    ggml_tensor* at, std::size_t layer, std::size_t stream) {
  ggml_tensor* keys = c.memory.indexers[layer];
  const std::int64_t tokens = k->ne[2], streams = mask->ne[3], each = tokens / streams;
  const auto first = [&](ggml_tensor* t, std::int64_t rows, std::int64_t count) {
    return graph.view(GGML_OP_VIEW, t, {kIndexerDim, rows, 1, count},
                      {t->nb[0], t->nb[2], z(rows) * t->nb[2], z(rows) * t->nb[2]});
  };
  graph.set_rows(keys, {kIndexerDim, keys->ne[1] * keys->ne[2], 1, 1}, first(k, tokens, 1), at);
  ggml_tensor* shown = graph.view(GGML_OP_VIEW, keys, {kIndexerDim, mask->ne[0], 1, streams},
                                  {keys->nb[0], keys->nb[1], keys->nb[2], keys->nb[2]}, stream * keys->nb[2]);
  ggml_tensor* scores = graph.multiply(shown, first(q, each, streams));
  ggml_tensor* chosen = graph.node(GGML_OP_TOP_K, graph.like(scores), {scores, mask});
  ggml_tensor* both = graph.node(GGML_OP_ADD, graph.like(scores), {chosen, mask});
  if (!c.flash) return both;
  return graph.node(GGML_OP_CPY, graph.make(GGML_TYPE_F16, {mask->ne[0], each, 1, streams}), {both});
}

/// [heads * dim, tokens]
ggml_tensor* attention(const llama_context& c, Graph& graph, ggml_tensor* q, ggml_tensor* mask, std::size_t layer,
                       std::size_t stream) {
  const llama_model& m = c.model;
  const std::int64_t cells = mask->ne[0], streams = mask->ne[3], tokens = q->ne[2];
  const auto shown = [&](ggml_tensor* t, bool transposed) {
    const std::size_t head = ggml_row_size(t->type, m.dim), size = ggml_row_size(t->type, t->ne[1]);
    const Shape rows{m.dim, m.kv_heads, cells, streams}, columns{cells, m.kv_heads, m.dim, streams};
    const Strides by_row{t->nb[0], head, t->nb[1], t->nb[2]}, by_column{t->nb[0], size * z(m.dim), size, t->nb[2]};
    t = graph.permute(
        graph.view(GGML_OP_VIEW, t, transposed ? columns : rows, transposed ? by_column : by_row, stream * t->nb[2]));
    if (!c.flash || t->type != GGML_TYPE_F32) return t;
    return graph.node(GGML_OP_CPY, graph.make(GGML_TYPE_F16, {t->ne[0], t->ne[1], t->ne[2], t->ne[3]}), {t});
  };
  ggml_tensor* k = shown(c.memory.keys[layer], false);
  ggml_tensor* v = shown(c.memory.values[layer], !c.flash);
  q = graph.permute(graph.reshape(q, {m.dim, m.heads, tokens / streams, streams}));
  ggml_tensor* sinks = m.is("sinks") ? m.weights.at("attn_sinks") : nullptr;
  const float scale = m.is("scale") ? 0.2F : 1 / std::sqrt(static_cast<float>(m.dim));
  const float options[]{scale, m.is("alibi") ? 8.0F : 0.0F, m.is("softcap") ? 50.0F : 0.0F};
  if (c.flash) {
    ggml_tensor* out = graph.make(GGML_TYPE_F32, {m.dim, m.heads, tokens / streams, streams});
    std::memcpy(out->op_params, options, sizeof options);
    graph.node(GGML_OP_FLASH_ATTN_EXT, out, {q, k, v, mask, sinks});
    return graph.reshape(out, {m.heads * m.dim, tokens, 1, 1});
  }
  ggml_tensor* kq = graph.multiply(k, q, "kq-" + std::to_string(layer));
  if (m.is("softcap")) kq = graph.node(GGML_OP_SCALE, graph.like(kq, "kq_scaled_2-" + std::to_string(layer)), {kq});
  ggml_tensor* weights = graph.like(kq, "kq_soft_max-" + std::to_string(layer));
  std::memcpy(weights->op_params, options, 2 * sizeof(float));
  graph.node(GGML_OP_SOFT_MAX, weights, {kq, mask, sinks});
  ggml_tensor* out = graph.permute(graph.multiply(v, weights, "kqv-" + std::to_string(layer)));
  return graph.node(GGML_OP_CONT, graph.make(GGML_TYPE_F32, {m.heads * m.dim, tokens, 1, 1}), {out});
}

/// False: aborted.
bool run(llama_context& c, const MicroBatch& micro, const std::vector<Token>& batch) {
  const auto tokens = static_cast<std::int64_t>(micro.tokens.size());
  const auto streams = static_cast<std::int64_t>(micro.streams.size());
  const std::int64_t width = c.model.kv_heads * c.model.dim;
  const std::int64_t columns = c.flash ? 1 : width;  // values are stored by element where they are transposed

  Graph graph(c.host);
  ggml_tensor* ids = graph.make(GGML_TYPE_I32, {tokens, 1, 1, 1}, "inp_tokens");
  ggml_tensor* positions = graph.make(GGML_TYPE_I32, {tokens, 1, 1, 1}, "inp_pos");
  struct Inputs {  // of a cache
    const std::vector<Stream>* held;
    const std::vector<std::vector<std::size_t>>* taken;
    llama_pos window;
    std::int64_t size = 0, cells = 256;  // that attention reads
    ggml_tensor *mask = nullptr, *k_at = nullptr, *v_at = nullptr;
  };
  std::vector<Inputs> caches{{&c.memory.streams, &micro.cells, 0}};
  if (c.memory.window > 0) caches.push_back({&c.memory.windows, &micro.windowed, c.memory.window});
  for (Inputs& in : caches) {
    in.size = std::ssize((*in.held)[0].cells);
    for (const std::size_t s : micro.streams)
      for (std::int64_t i = 0; i < in.size; ++i)
        if ((*in.held)[s].cells[z(i)].position >= 0) in.cells = std::max(in.cells, i + 1);
    in.cells = std::min((in.cells + 255) / 256 * 256, in.size);
    in.mask = graph.make(c.flash ? GGML_TYPE_F16 : GGML_TYPE_F32, {in.cells, tokens / streams, 1, streams},
                         "attn_inp_kq_mask");
    in.k_at = graph.make(GGML_TYPE_I64, {tokens, 1, 1, 1}, "attn_inp_k_idxs");
    in.v_at = graph.make(GGML_TYPE_I64, {tokens * columns, 1, 1, 1}, "attn_inp_v_idxs");
  }
  ggml_tensor* x = graph.node(GGML_OP_GET_ROWS, graph.make(GGML_TYPE_F32, {c.model.embd, tokens, 1, 1}),
                              {c.model.weights.at("token_embd"), ids});
  for (std::size_t l = 0; l < c.model.layers; ++l) {
    if (c.model.has_state(l)) continue;
    const Inputs& in = c.model.slides(l) ? caches[1] : caches[0];
    const std::string number = std::to_string(l);
    const auto weight = [&](const char* name) { return c.model.weights.at("blk." + number + ".attn_" + name); };
    ggml_tensor* normalized = graph.normalized(x);
    const auto heads = [&](const char* name, std::int64_t count) {
      return graph.reshape(graph.multiply(weight(name), normalized), {c.model.dim, count, tokens, 1});
    };
    ggml_tensor* q = heads("q", c.model.heads);
    ggml_tensor* k = heads("k", c.model.kv_heads);
    ggml_tensor* v = heads("v", c.model.kv_heads);
    if (!c.model.is("norope") && !(c.model.is("nope") && l + 1 == c.model.layers)) {
      q = rotate(c, graph, graph.like(q, "Qcur-" + number), q, positions, c.model.slides(l));
      k = rotate(c, graph, graph.like(k, "Kcur-" + number), k, positions, c.model.slides(l));
    }
    if (c.model.is("late")) k = graph.normalized(k);
    const std::int64_t all = in.size * c.memory.keys[l]->ne[2];
    ggml_tensor* mask =
        c.memory.indexers[l] == nullptr ? in.mask : choose(c, graph, q, k, in.mask, in.k_at, l, micro.streams[0]);
    graph.set_rows(c.memory.keys[l], {width, all, 1, 1}, graph.reshape(k, {width, tokens, 1, 1}), in.k_at);
    graph.set_rows(c.memory.values[l], {width / columns, all * columns, 1, 1},
                   graph.reshape(v, {width / columns, tokens * columns, 1, 1}), in.v_at);
    ggml_tensor* attended = graph.multiply(weight("output"), attention(c, graph, q, mask, l, micro.streams[0]));
    x = graph.node(GGML_OP_ADD, graph.like(x, "l_out-" + number), {x, attended});
  }
  ggml_tensor* out = graph.multiply(c.model.weights.at("output"), graph.normalized(x), "result_output");

  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t s = t / (tokens / streams);
    const Token& token = batch[micro.tokens[z(t)]];
    values<std::int32_t>(ids)[z(t)] = token.id;
    values<std::int32_t>(positions)[z(t)] = token.position;
    for (const Inputs& in : caches) {
      const Stream& stream = (*in.held)[micro.streams[z(s)]];
      const auto cell = static_cast<std::int64_t>((*in.taken)[z(s)][z(t % (tokens / streams))]);
      const auto begin = static_cast<std::int64_t>(micro.streams[z(s)]) * in.size;
      values<std::int64_t>(in.k_at)[z(t)] = begin + cell;
      for (std::int64_t d = 0; d < columns; ++d)
        values<std::int64_t>(in.v_at)[z(t * columns + d)] = begin * columns + d * in.size + cell;
      std::vector<float> row(z(in.cells));
      for (std::size_t i = 0; i < row.size(); ++i) {
        const Cell& read = stream.cells[i];
        const bool near = in.window == 0 || token.position - read.position < in.window;
        const bool seen = read.sequences.test(z(token.sequences[0])) && read.position <= token.position && near;
        row[i] = seen ? 0 : -kInfinity;
      }
      store(in.mask, t, row.data());
    }
  }
  if (!graph.run(c.params)) return false;
  for (std::size_t t = 0; t < micro.tokens.size(); ++t)
    if (batch[micro.tokens[t]].output) {
      const float* from = Floats(out).row(static_cast<std::int64_t>(t));
      c.logits[micro.tokens[t]].assign(from, from + c.model.vocab.tokens);
    }
  return true;
}

}  // namespace

std::int32_t llama_decode(llama_context* c, llama_batch given) {
  const Working working;
  const auto batch = read(*c, given);
  if (!batch) return -1;
  update(*c);
  const bool shared = std::ranges::any_of(*batch, [](const Token& t) { return t.sequences.size() > 1; });
  if (shared && c->memory.streams.size() > 1) return 1;
  std::vector<MicroBatch> all = split(*c, *batch);
  std::vector<Stream> ahead = c->memory.streams, windows = c->memory.windows;
  for (MicroBatch& micro : all) {
    for (const std::size_t s : micro.streams) {
      const std::size_t each = micro.tokens.size() / micro.streams.size();
      micro.cells.push_back(ahead[s].find(each));
      if (micro.cells.back().empty()) return 1;
      if (c->memory.window == 0) continue;
      micro.windowed.push_back(windows[s].find(each, c->memory.window));
      if (micro.windowed.back().empty()) return 1;
    }
    occupy(ahead, micro.cells, micro, *batch);
    if (c->memory.window > 0) occupy(windows, micro.windowed, micro, *batch);
  }
  c->logits.assign(batch->size(), {});
  for (const MicroBatch& micro : all) {
    occupy(c->memory.streams, micro.cells, micro, *batch);
    if (c->memory.window > 0) occupy(c->memory.windows, micro.windowed, micro, *batch);
    for (const std::size_t t : micro.tokens)
      for (const llama_seq_id sequence : (*batch)[t].sequences) c->memory.states[sequence] = (*batch)[t].position;
    if (run(*c, micro, *batch)) continue;
    for (const std::size_t t : micro.tokens)
      for (const llama_seq_id sequence : (*batch)[t].sequences)
        llama_memory_seq_rm(&c->memory, sequence, (*batch)[t].position, -1);
    return 2;
  }
  return 0;
}

// ---- The public functions ----

const char* ggml_op_name(ggml_op op) {
  const std::map<ggml_op, const char*> names{{GGML_OP_SET_ROWS, "SET_ROWS"},
                                             {GGML_OP_ROPE, "ROPE"},
                                             {GGML_OP_SOFT_MAX, "SOFT_MAX"},
                                             {GGML_OP_FLASH_ATTN_EXT, "FLASH_ATTN_EXT"}};
  const auto found = names.find(op);
  return found == names.end() ? "" : found->second;
}
std::size_t ggml_tensor_overhead() { return 32 + sizeof(ggml_tensor); }

const ggml_type_traits* ggml_get_type_traits(ggml_type type) { return &all_traits().at(type); }
const char* ggml_type_name(ggml_type type) { return ggml_get_type_traits(type)->type_name; }
std::size_t ggml_row_size(ggml_type type, std::int64_t elements) {
  const ggml_type_traits* traits = ggml_get_type_traits(type);
  return traits->type_size * z(elements / traits->blck_size);
}
std::size_t ggml_nbytes(const ggml_tensor* t) {
  std::size_t bytes = ggml_row_size(t->type, t->ne[0]);
  for (int d = 1; d < GGML_MAX_DIMS; ++d) bytes += z(t->ne[d] - 1) * t->nb[d];
  return bytes;
}
void ggml_rope_yarn_corr_dims(int n_dims, int n_ctx_orig, float freq_base, float beta_fast, float beta_slow,
                              float dims[2]) {
  const auto dim = [&](double turns) {
    return n_dims * std::log(n_ctx_orig / (turns * 2 * std::acos(-1.0))) / (2 * std::log(double{freq_base}));
  };
  dims[0] = static_cast<float>(std::max(0.0, std::floor(dim(beta_fast))));
  dims[1] = static_cast<float>(std::min(n_dims - 1.0, std::ceil(dim(beta_slow))));
}
const char* ggml_backend_buffer_name(ggml_backend_buffer_t buffer) { return buffer->host ? "CPU" : "CUDA0"; }
bool ggml_backend_buffer_is_host(ggml_backend_buffer_t buffer) { return buffer->host; }
void ggml_backend_tensor_get(const ggml_tensor* tensor, void* data, std::size_t offset, std::size_t size) {
  if (offset + size > ggml_nbytes(tensor)) std::abort();
  if (std::strncmp(tensor->name, "cache_", 6) == 0) fetched += size;
  const Working working;
  std::memcpy(data, memory_of(tensor) + offset, size);
}

llama_model_params llama_model_default_params() { return {.n_gpu_layers = -1, .no_alloc = false}; }
llama_context_params llama_context_default_params() {
  llama_context_params params{};
  params.n_ctx = params.n_ubatch = 512;
  params.n_batch = 2048;
  params.n_seq_max = 1;
  params.n_threads = params.n_threads_batch = 4;
  params.rope_scaling_type = LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED;
  params.attention_type = LLAMA_ATTENTION_TYPE_UNSPECIFIED;
  params.yarn_ext_factor = params.yarn_attn_factor = params.yarn_beta_fast = params.yarn_beta_slow = -1;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_AUTO;
  params.type_k = params.type_v = GGML_TYPE_F16;
  params.offload_kqv = true;
  return params;
}

llama_model* llama_model_load_from_file(const char* path, llama_model_params) {
  static const std::set<std::string> known{"llama",    "neox", "norope", "partial", "linear",    "long-heads",
                                           "scale",    "yarn", "alibi",  "sinks",   "factors",   "diffusion",
                                           "softcap",  "swa",  "hybrid", "encoder", "recurrent", "device",
                                           "no-shift", "nope", "late",   "mrope",   "indexer"};
  if (!std::string(path).starts_with("fake:")) return nullptr;
  std::istringstream words(path + 5);
  std::set<std::string> variants;
  for (std::string word; std::getline(words, word, ',');) variants.insert(word);
  return std::ranges::includes(known, variants) ? new llama_model(std::move(variants)) : nullptr;
}
llama_model* llama_model_load_from_splits(const char** paths, std::size_t count, llama_model_params params) {
  return count == 1 ? llama_model_load_from_file(*paths, params) : nullptr;
}
void llama_model_free(llama_model* model) { delete model; }
std::int32_t llama_model_n_ctx_train(const llama_model*) { return 4096; }
std::int32_t llama_model_meta_val_str(const llama_model* model, const char* key, char* buffer, std::size_t size) {
  const auto found = model->metadata.find(key);
  const std::string text = found == model->metadata.end() ? "" : found->second;
  const int length = std::snprintf(buffer, size, "%s", text.c_str());
  return found == model->metadata.end() ? -1 : length;
}
std::int32_t llama_model_n_embd(const llama_model* model) { return static_cast<std::int32_t>(model->embd); }
std::int32_t llama_model_n_layer(const llama_model* model) { return static_cast<std::int32_t>(model->layers); }
std::int32_t llama_model_n_head(const llama_model* model) { return static_cast<std::int32_t>(model->heads); }
std::int32_t llama_model_n_head_kv(const llama_model* model) { return static_cast<std::int32_t>(model->kv_heads); }
std::int32_t llama_model_n_swa(const llama_model* model) { return model->is("swa") ? 24 : 0; }
float llama_model_rope_freq_scale_train(const llama_model* model) {
  return model->is("yarn") ? 0.25F : model->is("linear") ? 0.5F : 1;
}
llama_rope_type llama_model_rope_type(const llama_model* model) {
  if (model->is("norope")) return LLAMA_ROPE_TYPE_NONE;
  if (model->is("mrope")) return LLAMA_ROPE_TYPE_MROPE;
  return model->is("neox") ? LLAMA_ROPE_TYPE_NEOX : LLAMA_ROPE_TYPE_NORM;
}
bool llama_model_has_encoder(const llama_model* model) { return model->is("encoder"); }
bool llama_model_is_diffusion(const llama_model* model) { return model->is("diffusion"); }
bool llama_model_is_recurrent(const llama_model* model) { return model->is("recurrent"); }
bool llama_model_is_hybrid(const llama_model* model) { return model->is("hybrid"); }
const llama_vocab* llama_model_get_vocab(const llama_model* model) { return &model->vocab; }
std::int32_t llama_vocab_n_tokens(const llama_vocab* vocab) { return vocab->tokens; }

llama_context* llama_init_from_model(llama_model* model, llama_context_params params) {
  const auto padded = [](std::uint32_t cells) { return (cells + 255) / 256 * 256; };
  if (params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_AUTO) params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  const bool flash = params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_ENABLED;
  if (model == nullptr || (ggml_get_type_traits(params.type_v)->is_quantized && !flash)) return nullptr;
  params.n_seq_max = std::max(1U, params.n_seq_max);
  params.n_ctx = padded(params.n_ctx == 0 ? 4096 : params.n_ctx);
  if (!params.kv_unified) params.n_ctx = padded(params.n_ctx / params.n_seq_max) * params.n_seq_max;
  params.n_batch = std::min(params.n_batch, params.n_ctx);
  params.n_ubatch = std::min(params.n_ubatch == 0 ? params.n_batch : params.n_ubatch, params.n_batch);
  if (params.n_ubatch == 0 || params.n_seq_max > kMostSequences) return nullptr;
  if (params.rope_freq_base == 0) params.rope_freq_base = 10000;
  if (params.rope_freq_scale == 0) params.rope_freq_scale = llama_model_rope_freq_scale_train(model);
  return new llama_context(*model, params);
}
llama_context* llama_new_context_with_model(llama_model* model, llama_context_params params) {
  return llama_init_from_model(model, params);
}
void llama_free(llama_context* context) { delete context; }
void llama_synchronize(llama_context*) {}
std::uint32_t llama_n_ctx(const llama_context* context) { return context->params.n_ctx; }
std::uint32_t llama_n_ctx_seq(const llama_context* context) {
  return context->params.n_ctx / static_cast<std::uint32_t>(context->memory.streams.size());
}
std::uint32_t llama_n_seq_max(const llama_context* context) { return context->params.n_seq_max; }
llama_memory_t llama_get_memory(const llama_context* context) { return &const_cast<llama_context*>(context)->memory; }

bool llama_memory_seq_rm(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1) {
  if (memory->has_states && sequence >= 0) {
    const auto state = memory->states.find(sequence);
    const bool newest = state != memory->states.end() && p0 <= state->second && (p1 < 0 || p1 > state->second);
    if (newest && p0 > 0) return false;
    if (newest) memory->states.erase(state);
  }
  if (sequence < 0 && p0 <= 0 && p1 < 0) memory->states.clear();
  for (std::vector<Stream>* streams : {&memory->streams, &memory->windows})
    for (std::size_t s = 0; s < streams->size(); ++s)
      if (sequence < 0 || s == memory->stream_of(sequence)) (*streams)[s].remove(sequence, p0, p1);
  return true;
}
void llama_memory_seq_cp(llama_memory_t memory, llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1) {
  const std::size_t source = memory->stream_of(from), target = memory->stream_of(to);
  if (source != target) memory->copies.emplace_back(source, target);
  if (memory->states.contains(from)) memory->states[to] = memory->states.at(from);
  for (std::vector<Stream>* streams : {&memory->streams, &memory->windows}) {
    if (streams->empty()) continue;
    std::vector<Cell>& cells = streams->at(source).cells;
    if (source != target) {
      const auto size = static_cast<llama_pos>(cells.size());
      if ((p0 > 0 && p0 + 1 < size) || (p1 > 0 && p1 + 1 < size)) std::abort();  // only whole sequences
      streams->at(target) = {std::vector<Cell>(cells.size()), (*streams)[source].head};
    }
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const llama_pos at = cells[i].position;
      if (!cells[i].sequences.test(z(from)) || at < p0 || (p1 >= 0 && at >= p1)) continue;
      Cell& copied = (*streams)[target].cells[i];
      copied.position = at;
      copied.shift = cells[i].shift;
      copied.sequences.set(z(to));
    }
  }
}
llama_pos llama_memory_seq_pos_min(llama_memory_t memory, llama_seq_id sequence) {
  return memory->positions(sequence).first;
}
llama_pos llama_memory_seq_pos_max(llama_memory_t memory, llama_seq_id sequence) {
  return memory->positions(sequence).second;
}
void llama_memory_seq_add(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1, llama_pos delta) {
  if (delta == 0 || p0 == p1) return;
  memory->streams.at(memory->stream_of(sequence)).shift(sequence, p0, p1, delta);
  if (memory->window > 0) memory->windows.at(memory->stream_of(sequence)).shift(sequence, p0, p1, delta);
  const auto state = memory->states.find(sequence);
  if (state != memory->states.end() && state->second >= p0 && (p1 < 0 || state->second < p1)) state->second += delta;
}
void llama_memory_seq_keep(llama_memory_t memory, llama_seq_id sequence) {
  for (llama_seq_id other = 0; z(other) < kMostSequences; ++other)
    if (other != sequence && (memory->streams.size() == 1 || other == sequence))
      llama_memory_seq_rm(memory, other, -1, -1);
}
void llama_memory_seq_div(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1, int by) {
  if (by != 1 && p0 != p1) memory->streams.at(memory->stream_of(sequence)).divide(sequence, p0, p1, by);
}
bool llama_memory_can_shift(llama_memory_t memory) { return memory->can_shift; }
void llama_memory_clear(llama_memory_t memory, bool data) {
  for (std::vector<Stream>* streams : {&memory->streams, &memory->windows})
    for (Stream& stream : *streams) stream = {std::vector<Cell>(stream.cells.size()), 0};
  memory->states.clear();
  const Working working;
  if (data) memory->tensors.fill(std::byte{0});
}

llama_batch llama_batch_get_one(llama_token* tokens, std::int32_t count) {
  return {.n_tokens = count, .token = tokens, .embd = {}, .pos = {}, .n_seq_id = {}, .seq_id = {}, .logits = {}};
}
llama_batch llama_batch_init(std::int32_t tokens, std::int32_t, std::int32_t sequences) {
  llama_batch batch = llama_batch_get_one(new llama_token[z(tokens)], 0);
  batch.pos = new llama_pos[z(tokens)];
  batch.n_seq_id = new std::int32_t[z(tokens)];
  batch.seq_id = new llama_seq_id*[z(tokens) + 1]();
  for (std::int32_t i = 0; i < tokens; ++i) batch.seq_id[i] = new llama_seq_id[z(sequences)];
  batch.logits = new std::int8_t[z(tokens)];
  return batch;
}
void llama_batch_free(llama_batch batch) {
  for (llama_seq_id** ids = batch.seq_id; ids != nullptr && *ids != nullptr; ++ids) delete[] *ids;
  delete[] batch.seq_id;
  delete[] batch.token;
  delete[] batch.pos;
  delete[] batch.n_seq_id;
  delete[] batch.logits;
}
float* llama_get_logits_ith(llama_context* context, std::int32_t index) {
  std::vector<std::vector<float>*> made;
  for (auto& one : context->logits)
    if (!one.empty()) made.push_back(&one);
  if (index < 0) return z(-index) <= made.size() ? made[made.size() - z(-index)]->data() : nullptr;
  return z(index) < context->logits.size() && !context->logits[z(index)].empty() ? context->logits[z(index)].data()
                                                                                 : nullptr;
}

void fake_llama_use_device(void* (*take)(std::size_t), void (*give)(void*), void (*open)(), void (*close)()) {
  device_memory = {take, give, open, close};
}
std::size_t fake_llama_fetched() { return std::exchange(fetched, 0); }
float fake_rope_factor(const llama_model* model, int pair) {
  return values<float>(model->weights.at("rope_freqs"))[z(pair)];
}
llama_pos fake_llama_cell(const llama_context* context, llama_seq_id sequence, std::int32_t cell) {
  const std::size_t size = context->memory.streams[0].cells.size();
  const Cell& found = context->memory.streams.at(z(cell) / size).cells[z(cell) % size];
  return found.sequences.test(z(sequence)) ? found.position : -1;
}
bool fake_llama_slides_over(const llama_context* context, llama_seq_id sequence, llama_pos position) {
  const llama_memory_i& memory = context->memory;
  return std::ranges::any_of(memory.windows.at(memory.stream_of(sequence)).cells,
                             [&](const Cell& c) { return c.sequences.test(z(sequence)) && c.position == position; });
}
