// SPDX-License-Identifier: Apache-2.0
// Of the stand-in for llama.cpp: batches whose tokens are set one by one, and old names. Differs: tokens only, no
// embeddings, and no most of tokens, which llama_decode() has.

#include <vector>

#include "llama.h"

struct llama_batch_ext {
  std::vector<llama_token> tokens = {};
  std::vector<llama_pos> positions = {};
  std::vector<std::vector<llama_seq_id>> sequences = {};
  std::vector<std::int8_t> outputs = {};
  [[nodiscard]] bool holds(std::int32_t index) const {
    return index >= 0 && static_cast<std::size_t>(index) < tokens.size();
  }
};

llama_batch_ext* llama_batch_ext_init(llama_context*) { return new llama_batch_ext; }
void llama_batch_ext_free(llama_batch_ext* batch) { delete batch; }
void llama_batch_ext_clear(llama_batch_ext* batch) { *batch = {}; }
std::int32_t llama_batch_ext_add(llama_batch_ext* batch, llama_seq_id sequence) {
  return llama_batch_ext_add_token(batch, sequence, -1);
}
std::int32_t llama_batch_ext_add_token(llama_batch_ext* batch, llama_seq_id sequence, llama_token id) {
  batch->tokens.push_back(id);
  batch->positions.push_back(0);
  batch->sequences.push_back({sequence});
  batch->outputs.push_back(0);
  return static_cast<std::int32_t>(batch->tokens.size()) - 1;
}
std::int32_t llama_batch_ext_add_embd(llama_batch_ext*, llama_seq_id, llama_embd) { return -2; }
bool llama_batch_ext_add_seq(llama_batch_ext* batch, std::int32_t index, llama_seq_id sequence) {
  if (!batch->holds(index)) return false;
  batch->sequences[static_cast<std::size_t>(index)].push_back(sequence);
  return true;
}
bool llama_batch_ext_set_pos(llama_batch_ext* batch, std::int32_t index, const llama_pos* position) {
  if (!batch->holds(index)) return false;
  batch->positions[static_cast<std::size_t>(index)] = *position;
  return true;
}
bool llama_batch_ext_set_output_logits(llama_batch_ext* batch, std::int32_t index, bool value) {
  if (!batch->holds(index)) return false;
  batch->outputs[static_cast<std::size_t>(index)] = value ? 1 : 0;
  return true;
}
bool llama_batch_ext_set_output_embd(llama_batch_ext* batch, std::int32_t index, bool value) {
  return llama_batch_ext_set_output_logits(batch, index, value);
}
size_t llama_set_state_data(llama_context* context, const uint8_t* from) {
  return llama_state_set_data(context, from, static_cast<size_t>(-1));
}
bool llama_load_session_file(llama_context* context, const char* path, llama_token* tokens, size_t room,
                             size_t* count) {
  return llama_state_load_file(context, path, tokens, room, count);
}
std::int32_t llama_process(llama_context* context, llama_process_type type, llama_batch_ext* batch) {
  if (type != LLAMA_PROCESS_TYPE_DECODE) return -1;
  std::vector<std::int32_t> counts;
  std::vector<llama_seq_id*> ids;
  for (std::vector<llama_seq_id>& of_token : batch->sequences) {
    counts.push_back(static_cast<std::int32_t>(of_token.size()));
    ids.push_back(of_token.data());
  }
  return llama_decode(context, {.n_tokens = static_cast<std::int32_t>(batch->tokens.size()),
                                .token = batch->tokens.data(),
                                .embd = nullptr,
                                .pos = batch->positions.data(),
                                .n_seq_id = counts.data(),
                                .seq_id = ids.data(),
                                .logits = batch->outputs.data()});
}
