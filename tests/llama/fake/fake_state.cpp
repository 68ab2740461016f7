// SPDX-License-Identifier: Apache-2.0
// Of the stand-in for llama.cpp: states of sequences.

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "fake_memory.h"

using namespace fake;

// As llama.cpp writes it: of each cache (that of full layers first, and not in a part) a count of cells, per cell a
// position, one sequence and which, then rows of its layers; then the states.

namespace {

constexpr std::int32_t kStateMagic = 0x66616b65;
constexpr std::size_t kStateBytes = 512;

/// Bytes that come, or go, or are only counted.
struct Bytes {
  std::uint8_t* to = nullptr;
  const std::uint8_t* from = nullptr;
  std::size_t size = 0, done = 0;
  bool short_of = false;

  void move(void* own, std::size_t count) {
    if ((to != nullptr || from != nullptr) && done + count > size) short_of = true;
    if (!short_of && to != nullptr) std::memcpy(to + done, own, count);
    if (!short_of && from != nullptr) std::memcpy(own, from + done, count);
    done += count;
  }
  /// A word; false: another one comes than should.
  bool word(std::int32_t& own) {
    move(&own, sizeof own);
    return !short_of;
  }
  bool known(std::int32_t own) {
    std::int32_t found = own;
    return word(found) && found == own;
  }
};

/// K and V of a cell in the layers of a cache.
void rows(const llama_context& c, llama_seq_id sequence, std::size_t cell, bool slides, Bytes& bytes) {
  const std::size_t stream = c.memory.stream_of(sequence);
  for (std::size_t l = 0; l < c.memory.keys.size(); ++l) {
    if (c.memory.keys[l] == nullptr || c.model.slides(l) != slides) continue;
    const ggml_tensor* k = c.memory.keys[l];
    const ggml_tensor* v = c.memory.values[l];
    for (const ggml_tensor* t : {k, static_cast<const ggml_tensor*>(c.memory.indexers[l])})
      if (t != nullptr) bytes.move(memory_of(t) + stream * t->nb[2] + cell * t->nb[1], t->nb[1]);
    const std::size_t element = c.flash ? v->nb[1] : v->nb[0], count = v->nb[1] / element;
    for (std::size_t d = 0; d < count; ++d)
      bytes.move(memory_of(v) + stream * v->nb[2] + (d * (c.flash ? 1 : z(v->ne[1])) + cell) * element, element);
  }
}

void write_cache(llama_context& c, llama_seq_id sequence, bool slides, Bytes& bytes) {
  const Stream& stream = (slides ? c.memory.windows : c.memory.streams).at(c.memory.stream_of(sequence));
  llama_pos newest = -1;
  for (const Cell& cell : stream.cells)
    if (cell.sequences.test(z(sequence))) newest = std::max(newest, cell.position);
  std::vector<std::size_t> held;
  for (std::size_t i = 0; i < stream.cells.size(); ++i)
    if (stream.cells[i].sequences.test(z(sequence)) && (!slides || stream.cells[i].position > newest - c.memory.window))
      held.push_back(i);
  for (std::int32_t word : {1, static_cast<std::int32_t>(held.size())}) bytes.word(word);
  for (const std::size_t cell : held)
    for (std::int32_t word : {stream.cells[cell].position, 1, sequence}) bytes.word(word);
  for (const std::size_t cell : held) rows(c, sequence, cell, slides, bytes);
}
bool read_cache(llama_context& c, llama_seq_id sequence, bool slides, Bytes& bytes) {
  std::int32_t count = 0;
  if (!bytes.known(1) || !bytes.word(count) || count < 0) return false;
  Stream& stream = (slides ? c.memory.windows : c.memory.streams).at(c.memory.stream_of(sequence));
  stream.remove(sequence, -1, -1);
  const std::vector<std::size_t> cells = stream.find(z(count), slides ? c.memory.window : 0);
  if (cells.size() < z(count)) return false;
  for (const std::size_t cell : cells) {
    std::int32_t position = 0, whose = 0;
    if (!bytes.word(position) || !bytes.known(1) || !bytes.word(whose)) return false;
    stream.remove_cell(cell);
    stream.cells[cell].position = position;
    stream.cells[cell].sequences.set(z(sequence));
  }
  if (count > 0) stream.head = cells.back() + 1;
  for (const std::size_t cell : cells) rows(c, sequence, cell, slides, bytes);
  return !bytes.short_of;
}
void write_states(llama_context& c, llama_seq_id sequence, Bytes& bytes) {
  const auto state = c.memory.states.find(sequence);
  std::int32_t count = state == c.memory.states.end() ? 0 : 1;
  bytes.word(count);
  if (count == 0) return;
  for (std::int32_t word : {state->second, 0}) bytes.word(word);
  std::vector<std::uint8_t> numbers(kStateBytes);
  bytes.move(numbers.data(), numbers.size());
}
bool read_states(llama_context& c, llama_seq_id sequence, Bytes& bytes) {
  std::int32_t count = 0, position = 0;
  if (!bytes.word(count) || count < 0 || count > 1) return false;
  c.memory.states.erase(sequence);
  if (count == 0) return true;
  if (!bytes.word(position) || !bytes.known(0)) return false;
  std::vector<std::uint8_t> numbers(kStateBytes);
  bytes.move(numbers.data(), numbers.size());
  c.memory.states[sequence] = position;
  return !bytes.short_of;
}

std::size_t write(llama_context& c, llama_seq_id sequence, llama_state_seq_flags flags, Bytes bytes) {
  const Working working;
  const bool mixed = c.memory.window > 0 || c.memory.has_states;
  for (std::int32_t word : {kStateMagic, sequence}) bytes.word(word);
  if (!mixed || (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == 0) write_cache(c, sequence, false, bytes);
  if (c.memory.window > 0) write_cache(c, sequence, true, bytes);
  if (c.memory.has_states) write_states(c, sequence, bytes);
  return bytes.short_of ? 0 : bytes.done;
}

}  // namespace

std::size_t llama_state_seq_get_size_ext(llama_context* c, llama_seq_id sequence, llama_state_seq_flags flags) {
  return write(*c, sequence, flags, {});
}
std::size_t llama_state_seq_get_data_ext(llama_context* c, std::uint8_t* to, std::size_t size, llama_seq_id sequence,
                                         llama_state_seq_flags flags) {
  return write(*c, sequence, flags, {.to = to, .size = size});
}
std::size_t llama_state_seq_set_data_ext(llama_context* c, const std::uint8_t* from, std::size_t size,
                                         llama_seq_id sequence, llama_state_seq_flags flags) {
  const Working working;
  const bool mixed = c->memory.window > 0 || c->memory.has_states;
  Bytes bytes{.from = from, .size = size};
  std::int32_t whose = 0;
  const bool read =
      bytes.known(kStateMagic) && bytes.word(whose) &&
      ((mixed && (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != 0) || read_cache(*c, sequence, false, bytes)) &&
      (c->memory.window == 0 || read_cache(*c, sequence, true, bytes)) &&
      (!c->memory.has_states || read_states(*c, sequence, bytes));
  return read ? bytes.done : 0;
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
