// SPDX-License-Identifier: Apache-2.0
#pragma once
// Of the stand-in for llama.cpp: its models, contexts and memories.

#include <algorithm>
#include <bitset>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fake_graph.h"

namespace fake {

constexpr std::size_t kMostSequences = 256;
constexpr std::int64_t kIndexerDim = 32;

struct Cell {
  llama_pos position = -1;
  std::bitset<kMostSequences> sequences = {};
  llama_pos shift = 0;  // by which its keys are turned by the next llama_decode()
};

struct Stream {
  std::vector<Cell> cells;
  std::size_t head = 0;

  [[nodiscard]] llama_pos newest(const Cell& of) const {
    llama_pos found = -1;
    for (const Cell& c : cells)
      if ((c.sequences & of.sequences).any()) found = std::max(found, c.position);
    return found;
  }
  /// Empty: there are not enough free cells. With a window, those of one sequence that left it are free.
  [[nodiscard]] std::vector<std::size_t> find(std::size_t tokens, llama_pos window = 0) const {
    const auto used = z(std::ranges::count_if(cells, [](const Cell& c) { return c.position >= 0; }));
    const auto passed = [&](const Cell& c) {
      return window > 0 && c.sequences.count() == 1 && newest(c) + 1 - c.position >= window;
    };
    std::vector<std::size_t> found;
    std::size_t at = head > used + 2 * tokens ? 0 : head;
    for (std::size_t tested = 0; tested < cells.size() && found.size() < tokens; ++tested, ++at) {
      if (at >= cells.size()) at = 0;
      if (cells[at].position < 0 || passed(cells[at])) found.push_back(at);
    }
    if (found.size() < tokens) found.clear();
    return found;
  }
  /// All sequences, if `sequence` is negative.
  void remove(llama_seq_id sequence, llama_pos p0, llama_pos p1) {
    std::size_t least = cells.size();
    for (std::size_t i = 0; i < cells.size(); ++i) {
      Cell& cell = cells[i];
      if (cell.position < p0 || cell.position < 0 || (p1 >= 0 && cell.position >= p1)) continue;
      if (sequence >= 0 && !cell.sequences.test(z(sequence))) continue;
      if (sequence >= 0) cell.sequences.reset(z(sequence));
      if (sequence >= 0 && cell.sequences.any()) continue;
      cell = {};
      least = std::min(least, i);
    }
    if (least < cells.size()) head = std::min(head, least);
  }
  /// What a window left in a cell is overwritten, with all that came before it.
  void remove_cell(std::size_t at) {
    const Cell was = cells[at];
    for (llama_seq_id sequence = 0; was.position >= 0 && z(sequence) < kMostSequences; ++sequence)
      if (was.sequences.test(z(sequence))) remove(sequence, 0, was.position + 1);
  }
  void shift(llama_seq_id sequence, llama_pos p0, llama_pos p1, llama_pos delta) {
    std::size_t least = cells.size();
    for (std::size_t i = 0; i < cells.size(); ++i) {
      Cell& cell = cells[i];
      if (!cell.sequences.test(z(sequence)) || cell.position < p0 || (p1 >= 0 && cell.position >= p1)) continue;
      cell.position += delta;
      cell.shift += delta;
      if (cell.position >= 0) continue;
      cell = {};
      least = std::min(least, i);
    }
    head = least < cells.size() ? least : 0;
  }
  void divide(llama_seq_id sequence, llama_pos p0, llama_pos p1, int by) {
    for (Cell& cell : cells) {
      if (!cell.sequences.test(z(sequence)) || cell.position < p0 || (p1 >= 0 && cell.position >= p1)) continue;
      cell.shift += cell.position / by - cell.position;
      cell.position /= by;
    }
  }
};

}  // namespace fake

struct llama_memory_i {
  std::vector<fake::Stream> streams;
  fake::Tensors tensors;
  bool can_shift;
  std::vector<ggml_tensor*> keys{}, values{}, indexers{};  // per layer; null: it has none
  std::vector<fake::Stream> windows = {};                  // of layers that slide
  llama_pos window = 0;
  std::map<llama_seq_id, llama_pos> states = {};  // newest token that the state of a sequence has seen
  bool has_states = false;
  std::vector<std::pair<std::size_t, std::size_t>> copies = {};  // of streams, by the next llama_decode()

  [[nodiscard]] std::size_t stream_of(llama_seq_id sequence) const {
    return streams.size() == 1 ? 0 : fake::z(sequence);
  }
  /// Least and largest position of a sequence; -1: it is empty.
  [[nodiscard]] std::pair<llama_pos, llama_pos> positions(llama_seq_id sequence) const {
    std::pair<llama_pos, llama_pos> found(-1, -1);
    for (const fake::Cell& cell : (window > 0 ? windows : streams).at(stream_of(sequence)).cells) {
      if (!cell.sequences.test(fake::z(sequence))) continue;
      found.first = found.first < 0 ? cell.position : std::min(found.first, cell.position);
      found.second = std::max(found.second, cell.position);
    }
    if (has_states) {
      const auto state = states.find(sequence);
      const llama_pos seen = state == states.end() ? -1 : state->second;
      found = {std::max(found.first, seen), std::min(found.second, seen)};
    }
    return found;
  }
};

struct llama_vocab {
  std::int32_t tokens = 64;
};

struct llama_model {
  std::set<std::string> variants;
  std::map<std::string, std::string> metadata;
  llama_vocab vocab;
  std::int64_t heads = 4, kv_heads = 2, dim = 32, embd = 128, rotary = 32;
  std::size_t layers = 3;
  fake::Tensors tensors{true};
  std::map<std::string, ggml_tensor*> weights;

  [[nodiscard]] bool is(const char* variant) const { return variants.contains(variant); }
  [[nodiscard]] bool slides(std::size_t l) const { return is("swa") && l % 2 == 0; }
  [[nodiscard]] bool has_state(std::size_t l) const { return is("hybrid") && l % 2 == 0 && (!is("swa") || l == 2); }

  explicit llama_model(std::set<std::string> chosen) : variants(std::move(chosen)) {
    if (is("long-heads")) dim = rotary = 64;
    if (is("partial")) rotary = dim / 2;
    if (is("swa") || is("hybrid")) layers = 4;
    metadata = {{"general.architecture", "fake"},
                {"fake.attention.head_count", "4"},
                {"fake.attention.head_count_kv", "2"},
                {"fake.rope.freq_base", "10000.000000"}};
    if (is("partial")) metadata["fake.rope.dimension_count"] = "16";
    if (is("long-heads")) metadata["fake.attention.key_length"] = metadata["fake.attention.value_length"] = "64";

    std::map<ggml_tensor*, double> gains;
    const auto matrix = [&](const std::string& name, std::int64_t from, std::int64_t to, double gain) {
      weights[name] = tensors.make(GGML_TYPE_F32, {from, to, 1, 1}, name + ".weight");
      gains[weights[name]] = gain;
    };
    matrix("token_embd", embd, vocab.tokens, 10);
    matrix("output", embd, vocab.tokens, 4);
    matrix("rope_freqs", rotary / 2, 1, 1);
    if (is("yarn")) metadata["fake.rope.scaling.type"] = "yarn";
    matrix("attn_sinks", heads, 1, 1);
    for (std::size_t l = 0; l < layers; ++l) {
      const std::string block = "blk." + std::to_string(l) + ".attn_";
      matrix(block + "q", embd, heads * dim, 3);
      matrix(block + "k", embd, kv_heads * dim, 1);
      matrix(block + "v", embd, kv_heads * dim, 1);
      matrix(block + "output", heads * dim, embd, 2);
    }
    std::mt19937 random(1);  // the same numbers everywhere
    for (const auto& [name, t] : weights)
      for (float& weight : fake::values<float>(t))
        weight =
            static_cast<float>((double(random()) / 4294967296.0 - 0.5) * gains[t] * std::sqrt(12.0 / double(t->ne[0])));
    for (float& factor : fake::values<float>(weights["rope_freqs"])) factor = 1 + 8 * std::abs(factor);
  }
};

struct llama_context {
  const llama_model& model;
  llama_context_params params;
  bool host, flash;
  llama_memory_i memory;
  std::vector<std::vector<float>> logits;  // per token of the batch; empty: it has none

  llama_context(const llama_model& m, const llama_context_params& p)
      : model(m),
        params(p),
        host(!m.is("device") || !p.offload_kqv),
        flash(p.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_ENABLED),
        memory{std::vector<fake::Stream>(p.kv_unified ? 1 : p.n_seq_max), fake::Tensors(host), !m.is("no-shift")} {
    const std::size_t streams = memory.streams.size();
    for (fake::Stream& stream : memory.streams) stream.cells.resize(params.n_ctx / streams);
    memory.has_states = m.is("hybrid");
    if (m.is("swa")) {
      memory.window = llama_model_n_swa(&m);
      const std::size_t most = fake::z(memory.window) * (streams == 1 ? p.n_seq_max : 1) + p.n_ubatch;
      memory.windows.resize(streams);
      for (fake::Stream& stream : memory.windows)
        stream.cells.resize(p.swa_full ? params.n_ctx / streams
                                       : std::min<std::size_t>(params.n_ctx / streams, (most + 255) / 256 * 256));
    }
    const fake::Shape ne{m.kv_heads * m.dim, std::int64_t{params.n_ctx} / std::ssize(memory.streams),
                         std::ssize(memory.streams), 1};
    for (std::size_t l = 0; l < model.layers; ++l) {
      fake::Shape own = ne;
      if (m.slides(l)) own[1] = std::ssize(memory.windows[0].cells);
      const bool none = m.has_state(l);
      const std::string number = std::to_string(l);
      memory.keys.push_back(none ? nullptr : memory.tensors.make(params.type_k, own, "cache_k_l" + number));
      memory.values.push_back(none ? nullptr : memory.tensors.make(params.type_v, own, "cache_v_l" + number));
      if (m.is("indexer")) own[0] = fake::kIndexerDim;
      memory.indexers.push_back(m.is("indexer") ? memory.tensors.make(params.type_k, own, "cache_k_l" + number)
                                                : nullptr);
    }
  }
};
