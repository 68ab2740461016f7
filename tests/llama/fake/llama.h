// SPDX-License-Identifier: Apache-2.0
#pragma once
// A stand-in with the names of llama.cpp's public interface, for tests on machines without it: what kvkeep/llama.h and
// its tests use of llama.h. fake_llama.cpp says what differs.

#include "ggml-backend.h"
#include "ggml.h"

extern "C" {

struct llama_vocab;
struct llama_model;
struct llama_context;
typedef struct llama_memory_i* llama_memory_t;

typedef int32_t llama_pos;
typedef int32_t llama_token;
typedef int32_t llama_seq_id;
typedef uint32_t llama_state_seq_flags;
#define LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY 1

enum llama_rope_type {
  LLAMA_ROPE_TYPE_NONE = -1,
  LLAMA_ROPE_TYPE_NORM = 0,
  LLAMA_ROPE_TYPE_NEOX = GGML_ROPE_TYPE_NEOX,
  LLAMA_ROPE_TYPE_MROPE = 8,
  LLAMA_ROPE_TYPE_IMROPE = 40,
  LLAMA_ROPE_TYPE_VISION = 24,
};

enum llama_rope_scaling_type {
  LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED = -1,
  LLAMA_ROPE_SCALING_TYPE_NONE = 0,
  LLAMA_ROPE_SCALING_TYPE_LINEAR = 1,
  LLAMA_ROPE_SCALING_TYPE_YARN = 2,
};
enum llama_context_type {
  LLAMA_CONTEXT_TYPE_DEFAULT = 0,
  LLAMA_CONTEXT_TYPE_MTP = 1,
};
enum llama_attention_type {
  LLAMA_ATTENTION_TYPE_UNSPECIFIED = -1,
  LLAMA_ATTENTION_TYPE_CAUSAL = 0,
  LLAMA_ATTENTION_TYPE_NON_CAUSAL = 1,
};
enum llama_process_type {
  LLAMA_PROCESS_TYPE_ENCODE,
  LLAMA_PROCESS_TYPE_DECODE,
};
enum llama_flash_attn_type {
  LLAMA_FLASH_ATTN_TYPE_AUTO = -1,  // on, here
  LLAMA_FLASH_ATTN_TYPE_DISABLED = 0,
  LLAMA_FLASH_ATTN_TYPE_ENABLED = 1,
};

/// Null arrays: positions go on where the sequence is, the sequence is 0, the last token has logits.
typedef struct llama_batch {
  int32_t n_tokens;
  llama_token* token;
  float* embd;
  llama_pos* pos;
  int32_t* n_seq_id;
  llama_seq_id** seq_id;
  int8_t* logits;
} llama_batch;

struct llama_model_params {
  int32_t n_gpu_layers;
  bool no_alloc;  // no weights
};

struct llama_context_params {
  uint32_t n_ctx;  // 0: the model's
  uint32_t n_batch;
  uint32_t n_ubatch;
  uint32_t n_seq_max;
  int32_t n_threads;
  int32_t n_threads_batch;
  enum llama_context_type ctx_type;
  enum llama_attention_type attention_type;
  enum llama_rope_scaling_type rope_scaling_type;
  enum llama_flash_attn_type flash_attn_type;
  float rope_freq_base;   // 0: the model's
  float rope_freq_scale;  // 0: the model's
  float yarn_ext_factor;  // below 0: the model's, as the three that follow
  float yarn_attn_factor;
  float yarn_beta_fast;
  float yarn_beta_slow;
  uint32_t yarn_orig_ctx;  // 0: the model's
  ggml_backend_sched_eval_callback cb_eval;
  void* cb_eval_user_data;
  enum ggml_type type_k;
  enum ggml_type type_v;
  ggml_abort_callback abort_callback;
  void* abort_callback_data;
  bool embeddings;
  bool offload_kqv;
  bool swa_full;
  bool kv_unified;
  struct llama_context* ctx_other;  // that this one drafts for
};

struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);

struct llama_model* llama_model_load_from_file(const char* path, struct llama_model_params params);
struct llama_model* llama_model_load_from_splits(const char** paths, size_t count, struct llama_model_params params);
void llama_model_free(struct llama_model* model);
int32_t llama_model_n_ctx_train(const struct llama_model* model);
int32_t llama_model_meta_val_str(const struct llama_model* model, const char* key, char* buffer, size_t size);
int32_t llama_model_n_embd(const struct llama_model* model);
int32_t llama_model_n_layer(const struct llama_model* model);
int32_t llama_model_n_head(const struct llama_model* model);
int32_t llama_model_n_head_kv(const struct llama_model* model);
int32_t llama_model_n_swa(const struct llama_model* model);
float llama_model_rope_freq_scale_train(const struct llama_model* model);
enum llama_rope_type llama_model_rope_type(const struct llama_model* model);
bool llama_model_has_encoder(const struct llama_model* model);
bool llama_model_is_diffusion(const struct llama_model* model);
bool llama_model_is_recurrent(const struct llama_model* model);
bool llama_model_is_hybrid(const struct llama_model* model);
const struct llama_vocab* llama_model_get_vocab(const struct llama_model* model);
int32_t llama_vocab_n_tokens(const struct llama_vocab* vocab);

struct llama_context* llama_init_from_model(struct llama_model* model, struct llama_context_params params);
struct llama_context* llama_new_context_with_model(struct llama_model* model, struct llama_context_params params);
void llama_free(struct llama_context* context);
void llama_synchronize(struct llama_context* context);
uint32_t llama_n_ctx(const struct llama_context* context);
uint32_t llama_n_ctx_seq(const struct llama_context* context);
uint32_t llama_n_seq_max(const struct llama_context* context);
llama_memory_t llama_get_memory(const struct llama_context* context);

/// Positions [p0, p1); a negative bound is open. A negative sequence: every one.
bool llama_memory_seq_rm(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1);
void llama_memory_seq_cp(llama_memory_t memory, llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1);
/// Keys are turned by the next llama_decode().
void llama_memory_seq_add(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1, llama_pos delta);
/// Every other sequence is gone, where they share a buffer.
void llama_memory_seq_keep(llama_memory_t memory, llama_seq_id sequence);
void llama_memory_seq_div(llama_memory_t memory, llama_seq_id sequence, llama_pos p0, llama_pos p1, int by);
bool llama_memory_can_shift(llama_memory_t memory);
/// -1: the sequence is empty.
llama_pos llama_memory_seq_pos_min(llama_memory_t memory, llama_seq_id sequence);
llama_pos llama_memory_seq_pos_max(llama_memory_t memory, llama_seq_id sequence);
/// Its saved state: so many bytes for none, and as many for each cell. 0: there is no room.
#define LLAMA_STATE_SEQ_FLAGS_NONE 0
typedef uint32_t llama_state_seq_flags;
size_t llama_state_seq_get_size(struct llama_context* context, llama_seq_id sequence);
size_t llama_state_seq_get_data(struct llama_context* context, uint8_t* to, size_t size, llama_seq_id sequence);
size_t llama_state_seq_set_data(struct llama_context* context, const uint8_t* from, size_t size, llama_seq_id sequence);
/// Of mixed memories, what is partial: without the cells of full layers.
size_t llama_state_seq_get_size_ext(struct llama_context* context, llama_seq_id sequence, llama_state_seq_flags flags);
size_t llama_state_seq_get_data_ext(struct llama_context* context, uint8_t* to, size_t size, llama_seq_id sequence,
                                    llama_state_seq_flags flags);
size_t llama_state_seq_set_data_ext(struct llama_context* context, const uint8_t* from, size_t size,
                                    llama_seq_id sequence, llama_state_seq_flags flags);
size_t llama_state_seq_save_file(struct llama_context* context, const char* path, llama_seq_id sequence,
                                 const llama_token* tokens, size_t count);
/// Without `tokens`: how many there are.
size_t llama_state_seq_load_file(struct llama_context* context, const char* path, llama_seq_id sequence,
                                 llama_token* tokens, size_t room, size_t* count);
/// Of all sequences: none, here.
size_t llama_state_set_data(struct llama_context* context, const uint8_t* from, size_t size);
size_t llama_set_state_data(struct llama_context* context, const uint8_t* from);
bool llama_state_load_file(struct llama_context* context, const char* path, llama_token* tokens, size_t room,
                           size_t* count);
bool llama_load_session_file(struct llama_context* context, const char* path, llama_token* tokens, size_t room,
                             size_t* count);
void llama_memory_clear(llama_memory_t memory, bool data);

struct llama_batch llama_batch_get_one(llama_token* tokens, int32_t count);
struct llama_batch llama_batch_init(int32_t tokens, int32_t embd, int32_t sequences);
void llama_batch_free(struct llama_batch batch);

/// 0: done; 1: no free cells, and 2: aborted (earlier micro-batches stay); -1: the batch is not valid.
int32_t llama_decode(struct llama_context* context, struct llama_batch batch);

/// A batch whose tokens are set one by one.
struct llama_batch_ext;
struct llama_embd {
  const float* data;
  size_t n_rows;
  size_t n_embd;
};
struct llama_batch_ext* llama_batch_ext_init(struct llama_context* context);
void llama_batch_ext_free(struct llama_batch_ext* batch);
void llama_batch_ext_clear(struct llama_batch_ext* batch);
int32_t llama_batch_ext_add(struct llama_batch_ext* batch, llama_seq_id sequence);
int32_t llama_batch_ext_add_token(struct llama_batch_ext* batch, llama_seq_id sequence, llama_token id);
/// None, here: -2.
int32_t llama_batch_ext_add_embd(struct llama_batch_ext* batch, llama_seq_id sequence, struct llama_embd embd);
bool llama_batch_ext_add_seq(struct llama_batch_ext* batch, int32_t index, llama_seq_id sequence);
bool llama_batch_ext_set_pos(struct llama_batch_ext* batch, int32_t index, const llama_pos* position);
bool llama_batch_ext_set_output_logits(struct llama_batch_ext* batch, int32_t index, bool value);
bool llama_batch_ext_set_output_embd(struct llama_batch_ext* batch, int32_t index, bool value);
int32_t llama_process(struct llama_context* context, enum llama_process_type type, struct llama_batch_ext* batch);
/// Of a token of the newest batch, or from the end of those that have logits if negative.
float* llama_get_logits_ith(struct llama_context* context, int32_t index);

}  // extern "C"

/// Of the stand-in alone: a frequency factor of the variant `factors`.
float fake_rope_factor(const llama_model* model, int pair);
/// Of the stand-in alone: position of a cell (streams follow one another) if the sequence holds it, else -1.
llama_pos fake_llama_cell(const llama_context* context, llama_seq_id sequence, int32_t cell);
/// Of the stand-in alone: memory of tensors on the device "CUDA0", which it works on while it is open. Before contexts.
void fake_llama_use_device(void* (*take)(size_t bytes), void (*give)(void* memory), void (*open)(), void (*close)());
/// Of the stand-in alone: bytes that ggml_backend_tensor_get() gave of caches since it was asked last.
size_t fake_llama_fetched();
/// Of the stand-in alone: layers that slide hold this position of the sequence.
bool fake_llama_slides_over(const llama_context* context, llama_seq_id sequence, llama_pos position);
