// SPDX-License-Identifier: Apache-2.0
// Of the stand-in for llama.cpp: states of sequences. Those of memories that slide or have states have a size, and no
// bytes.

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "fake_memory.h"

using namespace fake;

// As llama.cpp writes it: a count of cells, per cell a position, one sequence and which, then rows of every layer.

namespace {

constexpr std::int32_t kStateMagic = 0x66616b65;

std::vector<std::size_t> cells_of(const llama_context& c, llama_seq_id sequence) {
  std::vector<std::size_t> found;
  const Stream& stream = c.memory.streams.at(c.memory.stream_of(sequence));
  for (std::size_t i = 0; i < stream.cells.size(); ++i)
    if (stream.cells[i].sequences.test(z(sequence))) found.push_back(i);
  return found;
}
bool mixed(const llama_memory_i& memory) { return memory.has_states || memory.window > 0; }
std::size_t state_bytes(const llama_context& c, std::size_t cells) {
  std::size_t row = 12;
  for (std::size_t l = 0; l < c.memory.keys.size(); ++l)
    for (const ggml_tensor* t : {c.memory.keys[l], c.memory.values[l], c.memory.indexers[l]})
      row += t != nullptr ? t->nb[1] : 0;
  return 16 + cells * row;
}
/// K and V of a cell, in turn, between the cache and `at`, which moves on.
template <class Move>
void each_row(llama_context& c, llama_seq_id sequence, std::size_t cell, const Move& move) {
  const std::size_t stream = c.memory.stream_of(sequence);
  for (std::size_t l = 0; l < c.memory.keys.size(); ++l) {
    const ggml_tensor* k = c.memory.keys[l];
    const ggml_tensor* v = c.memory.values[l];
    for (const ggml_tensor* t : {k, static_cast<const ggml_tensor*>(c.memory.indexers[l])})
      if (t != nullptr) move(memory_of(t) + stream * t->nb[2] + cell * t->nb[1], t->nb[1]);
    const std::size_t element = c.flash ? v->nb[1] : v->nb[0], count = v->nb[1] / element;
    for (std::size_t d = 0; d < count; ++d)
      move(memory_of(v) + stream * v->nb[2] + (d * (c.flash ? 1 : z(v->ne[1])) + cell) * element, element);
  }
}

}  // namespace

std::size_t llama_state_seq_get_size_ext(llama_context* c, llama_seq_id sequence, llama_state_seq_flags flags) {
  const llama_memory_i& memory = c->memory;
  std::size_t bytes = memory.states.contains(sequence) && memory.has_states ? 512 : 0;
  if (memory.window > 0) {
    const llama_pos least = memory.positions(sequence).second + 1 - memory.window;
    bytes += 36 * z(std::ranges::count_if(memory.windows[memory.stream_of(sequence)].cells, [&](const Cell& cell) {
               return cell.sequences.test(z(sequence)) && cell.position >= least;
             }));
  }
  if (mixed(memory) && flags == LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) return bytes;
  return bytes + state_bytes(*c, cells_of(*c, sequence).size());
}
std::size_t llama_state_seq_get_data_ext(llama_context* c, std::uint8_t* to, std::size_t size, llama_seq_id sequence,
                                         llama_state_seq_flags) {
  if (mixed(c->memory)) return 0;
  const std::vector<std::size_t> cells = cells_of(*c, sequence);
  const std::size_t bytes = state_bytes(*c, cells.size());
  if (bytes > size) return 0;
  const auto put = [&](std::int32_t word) { std::memcpy(std::exchange(to, to + 4), &word, 4); };
  for (const std::int32_t word : {kStateMagic, sequence, 1, static_cast<std::int32_t>(cells.size())}) put(word);
  for (const std::size_t cell : cells)
    for (const std::int32_t word : {c->memory.streams[c->memory.stream_of(sequence)].cells[cell].position, 1, sequence})
      put(word);
  for (const std::size_t cell : cells)
    each_row(*c, sequence, cell,
             [&](std::byte* row, std::size_t n) { std::memcpy(std::exchange(to, to + n), row, n); });
  return bytes;
}
std::size_t llama_state_seq_set_data_ext(llama_context* c, const std::uint8_t* from, std::size_t size,
                                         llama_seq_id sequence, llama_state_seq_flags) {
  const std::uint8_t* const begin = from;
  const auto get = [&] {
    std::int32_t word = 0;
    if (begin + size >= from + 4) std::memcpy(&word, from, 4);
    from += 4;
    return word;
  };
  if (get() != kStateMagic) return 0;
  get(), get();
  const auto count = z(get());
  if (state_bytes(*c, count) > size) return 0;
  llama_memory_seq_rm(&c->memory, sequence, -1, -1);
  Stream& stream = c->memory.streams[c->memory.stream_of(sequence)];
  const std::vector<std::size_t> cells = stream.find(count);
  if (cells.size() < count) return 0;
  for (const std::size_t cell : cells) {
    stream.cells[cell].position = get();
    stream.cells[cell].sequences.set(z(sequence));
    get(), get();
  }
  if (count > 0) stream.head = cells.back() + 1;
  for (const std::size_t cell : cells)
    each_row(*c, sequence, cell,
             [&](std::byte* row, std::size_t n) { std::memcpy(row, std::exchange(from, from + n), n); });
  return state_bytes(*c, count);
}
std::size_t llama_state_seq_get_size(llama_context* c, llama_seq_id sequence) {
  return llama_state_seq_get_size_ext(c, sequence, LLAMA_STATE_SEQ_FLAGS_NONE);
}
std::size_t llama_state_seq_get_data(llama_context* c, std::uint8_t* to, std::size_t size, llama_seq_id sequence) {
  return llama_state_seq_get_data_ext(c, to, size, sequence, LLAMA_STATE_SEQ_FLAGS_NONE);
}
std::size_t llama_state_seq_set_data(llama_context* c, const std::uint8_t* from, std::size_t size,
                                     llama_seq_id sequence) {
  return llama_state_seq_set_data_ext(c, from, size, sequence, LLAMA_STATE_SEQ_FLAGS_NONE);
}
std::size_t llama_state_seq_save_file(llama_context* c, const char* path, llama_seq_id sequence,
                                      const llama_token* tokens, std::size_t count) {
  std::vector<std::uint8_t> state(llama_state_seq_get_size_ext(c, sequence, 0));
  llama_state_seq_get_data_ext(c, state.data(), state.size(), sequence, 0);
  std::ofstream file(path, std::ios::binary);
  const auto write = [&](const void* data, std::size_t bytes) {
    file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  };
  write(&count, sizeof count);
  write(tokens, count * sizeof(llama_token));
  write(state.data(), state.size());
  return sizeof count + count * sizeof(llama_token) + state.size();
}
std::size_t llama_state_seq_load_file(llama_context* c, const char* path, llama_seq_id sequence, llama_token* tokens,
                                      std::size_t room, std::size_t* count) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.size() < sizeof *count) return 0;
  std::memcpy(count, bytes.data(), sizeof *count);
  const std::size_t head = sizeof *count + *count * sizeof(llama_token);
  if (tokens == nullptr) return sizeof *count;
  if (*count > room || bytes.size() < head) return 0;
  std::memcpy(tokens, bytes.data() + sizeof *count, *count * sizeof(llama_token));
  const void* const state = bytes.data() + head;
  const std::size_t read =
      llama_state_seq_set_data_ext(c, static_cast<const std::uint8_t*>(state), bytes.size() - head, sequence, 0);
  return read == 0 ? 0 : head + read;
}
std::size_t llama_state_set_data(llama_context*, const std::uint8_t*, std::size_t) { return 0; }
bool llama_state_load_file(llama_context*, const char*, llama_token*, std::size_t, std::size_t*) { return false; }
