// SPDX-License-Identifier: Apache-2.0
/// kvkeep for C, and for whatever calls C: the Keeper (kvkeep/keeper/keeper.h) over pointers, shapes and strides.
///
///     kvkeep_keeper* keeper = NULL;
///     if (kvkeep_keeper_make(&model, "tova,budget=1024", NULL, &keeper) != KVKEEP_OK) puts(kvkeep_last_error());
///     kvkeep_join(keeper, id, 0, -1);
///     kvkeep_observe(keeper, &observation);  // in every layer of a step
///     kvkeep_step(keeper, &cache, &report);  // once, after the last layer
///
/// Link libkvkeep (CMake: kvkeep::kvkeep; pkg-config: kvkeep); LibTorch is not needed. What a call means, and what it
/// refuses, stands beside the method of the same name in keeper.h. On a GPU: kvkeep/c_cuda.h.
///
/// Errors: every function that may fail returns a status, and kvkeep_last_error() then has the sentence. Nothing has
/// changed after a failure, unless keeper.h says otherwise. No exception leaves these functions.
///
/// Memory: kvkeep reads arrays during a call and keeps none of them, but works in the cache that kvkeep_bind() named;
/// the caller frees only keepers and accelerators. Pointers in results are to the keeper's memory, and valid until the
/// next call with that keeper.
///
/// Compatibility: functions, values and fields at the end of structs are added, never changed or removed. A struct that
/// begins with `size` is sizeof of it where the caller was compiled: fields that it lacks count as 0, which is always
/// what an absent field means: `kvkeep_cache cache = {.size = sizeof cache};` sets all others to 0.
/// KVKEEP_C_VERSION counts additions.
///
/// Threads: one at a time per keeper, as in C++; any number of keepers.
#ifndef KVKEEP_C_H
#define KVKEEP_C_H

#include <stddef.h>
#include <stdint.h>

#define KVKEEP_C_VERSION 5

#if defined(__GNUC__)
#define KVKEEP_C_API __attribute__((visibility("default")))
#else
#define KVKEEP_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t kvkeep_status;
enum {
  KVKEEP_OK = 0,
  KVKEEP_INVALID_ARGUMENT = 1,  ///< an option, a shape, a dtype, a file that is not allowed
  KVKEEP_STATE_ERROR = 2,       ///< a call that does not fit what happened before
  KVKEEP_UNSUPPORTED = 3,       ///< a valid request without a kernel in this build
  KVKEEP_DEVICE_ERROR = 4,      ///< the device failed
  KVKEEP_OUT_OF_MEMORY = 5,
  KVKEEP_INTERNAL = 6,   ///< anything else
  KVKEEP_RANK_ERROR = 7  ///< ranks that decide together could not
};

/// What the newest call of this thread that failed has to say; "" before the first. Valid until the next that fails.
KVKEEP_C_API const char* kvkeep_last_error(void);
/// KVKEEP_C_VERSION of the library that is loaded.
KVKEEP_C_API int32_t kvkeep_c_version(void);
/// "0.1.0"
KVKEEP_C_API const char* kvkeep_version(void);
/// Loads a shared library whose scorers, allocators and policies kvkeep_keeper_make() then knows. Fails as
/// kvkeep::load_plugin() throws (kvkeep/policy/plugin.h). Any thread may call.
KVKEEP_C_API kvkeep_status kvkeep_load_plugin(const char* file);

/// DLPack's DLTensor, field by field, so that a DLTensor* may be cast to it (dlpack.h 0.2 to 1.3). kvkeep owns nothing
/// of it and writes none of its fields.
typedef struct kvkeep_tensor {
  void* data;
  struct {
    int32_t type;   ///< KVKEEP_CPU, KVKEEP_CUDA or KVKEEP_CUDA_HOST (host memory)
    int32_t index;  ///< among devices of this type
  } device;
  int32_t ndim;  ///< up to 8
  struct {
    uint8_t code;    ///< KVKEEP_INT, ...
    uint8_t bits;    ///< of one number
    uint16_t lanes;  ///< 1
  } dtype;
  int64_t* shape;        ///< [ndim]
  int64_t* strides;      ///< [ndim] in numbers; NULL: contiguous
  uint64_t byte_offset;  ///< from data to the first number
} kvkeep_tensor;

enum { KVKEEP_CPU = 1, KVKEEP_CUDA = 2, KVKEEP_CUDA_HOST = 3 };
enum {
  KVKEEP_INT = 0,
  KVKEEP_UINT = 1,
  KVKEEP_FLOAT = 2,
  KVKEEP_BFLOAT = 4,
  KVKEEP_BOOL = 6,
  KVKEEP_FLOAT8_E4M3 = 10,  ///< DLPack's e4m3fn
  KVKEEP_FLOAT8_E5M2 = 12
};

/* ---- The model -------------------------------------------------------------------------------------------------- */

enum { /* kvkeep::LayerKind */
       KVKEEP_LAYER_FULL = 0,
       KVKEEP_LAYER_ELSEWHERE = 1,
       KVKEEP_LAYER_SLIDING = 2,
       KVKEEP_LAYER_SHARED = 3,
       KVKEEP_LAYER_OTHER = 4
};

/// What a layer stores (kvkeep::LayerSpec).
typedef struct kvkeep_layer {
  int32_t kind;
  int32_t window;  ///< tokens, sliding layers only
  int32_t source;  ///< layer whose cache is read, shared layers only
} kvkeep_layer;

/// RoPE of a layer (kvkeep::RopeSpec). No frequencies and another style than KVKEEP_ROPE_NONE: not stated, and what
/// turns queries or keys is refused.
enum { KVKEEP_ROPE_HALF = 0, KVKEEP_ROPE_INTERLEAVED = 1, KVKEEP_ROPE_NONE = 2 };

/// RoPE of one layer, where it differs from the model's.
typedef struct kvkeep_layer_rope {
  int32_t layer;             ///< whose RoPE is not the model's
  int32_t style;             ///< which components form a pair
  int32_t pairs;             ///< F, numbers of inv_freq
  int32_t reserved;          ///< 0
  const double* inv_freq;    ///< [F] radians per position, after scaling
  double attention_scaling;  ///< of cos and sin; 0: 1
} kvkeep_layer_rope;

/// Sink logits of one layer (kvkeep::LayerSpec::sinks).
typedef struct kvkeep_layer_sinks {
  int32_t layer;       ///< whose query heads have them
  int32_t heads;       ///< numbers of sinks: Hq
  const float* sinks;  ///< [heads] logits that join the softmax of each query head; minus infinity: none
} kvkeep_layer_sinks;

/// Shapes and conventions of one model (kvkeep::ModelSpec).
typedef struct kvkeep_model {
  size_t size;                           ///< sizeof(kvkeep_model)
  int32_t num_layers;                    ///< 1 or more
  int32_t query_heads;                   ///< Hq; 0: unknown, for policies that read no queries
  int32_t kv_heads;                      ///< Hkv, divides Hq
  int32_t key_dim;                       ///< D of keys and queries
  int32_t value_dim;                     ///< D of values
  int32_t rope_style;                    ///< which components form a pair
  int32_t rope_pairs;                    ///< F, numbers of inv_freq
  const double* inv_freq;                ///< [F] radians per position, after scaling
  double rope_attention_scaling;         ///< of cos and sin; 0: 1
  double softmax_scale;                  ///< factor on q.k; 0: 1/sqrt(key_dim)
  const kvkeep_layer* layers;            ///< [num_layers]; NULL: all full
  const kvkeep_layer_rope* layer_ropes;  ///< [num_layer_ropes] of layers whose RoPE is not the model's; NULL: none
  int64_t num_layer_ropes;
  const kvkeep_layer_sinks* layer_sinks;  ///< [num_layer_sinks] of layers with sink logits (gpt-oss); NULL: none
  int64_t num_layer_sinks;
  double logit_cap;  ///< c: logits are c tanh(q.k scale / c) (Gemma 2, Grok); 0: none
} kvkeep_model;

/* ---- The keeper ------------------------------------------------------------------------------------------------- */

typedef struct kvkeep_keeper kvkeep_keeper;
typedef struct kvkeep_accelerator kvkeep_accelerator;  ///< a GPU, for one keeper: kvkeep/c_cuda.h makes it

/// Threads that the engine lends (kvkeep::Threads): run() calls body(loop, begin, end) for parts of [begin, end) of at
/// least `grain`, on any threads, and returns when all are done.
typedef struct kvkeep_threads {
  void* pool;  ///< passed to run(), valid as long as the keeper
  void (*run)(void* pool, int64_t begin, int64_t end, int64_t grain,
              void (*body)(void* loop, int64_t begin, int64_t end), void* loop);
} kvkeep_threads;

/// Told when a stage of an event begins and ends (kvkeep::TraceHook). Names live as long as the program.
typedef struct kvkeep_trace_hook {
  void* context;  ///< passed to both
  void (*begin)(void* context, const char* stage);
  void (*end)(void* context, const char* stage);
} kvkeep_trace_hook;

/// What the engine supplies besides keys and values (kvkeep::Provided).
typedef struct kvkeep_provided {
  size_t size;                                     ///< sizeof(kvkeep_provided)
  int32_t queries;                                 ///< 1: kvkeep_observe() passes them
  int32_t layer_by_layer;                          ///< 1: kvkeep_narrow() is called after each layer of a prompt
  int32_t surprisal;                               ///< 1: kvkeep_surprise() is called before kvkeep_step()
  int32_t given_scores;                            ///< 1: kvkeep_give() is called in every full layer
  int32_t reads_folded;                            ///< 1: kvkeep_view() is called after each layer's attention
  const kvkeep_tensor* const* output_projections;  ///< [num_layers] W_o f32, f16 or bf16 [hidden, Hq * Dv], kept alive
                                                   ///< as long as the keeper; NULL entries: not full; NULL: none
  kvkeep_accelerator* accelerator;                 ///< of the device of cache and queries; NULL: the CPU
  const kvkeep_threads* threads;                   ///< what loops on the CPU run on, copied; NULL: the calling thread
  const kvkeep_trace_hook* trace;                  ///< copied; NULL: none
} kvkeep_provided;

/// Makes a keeper. policy: "name,key=value,...", or a JSON object. provided: NULL for queries alone. Fails as the
/// constructor of kvkeep::Keeper and make_policy() throw.
KVKEEP_C_API kvkeep_status kvkeep_keeper_make(const kvkeep_model* model, const char* policy,
                                              const kvkeep_provided* provided, kvkeep_keeper** keeper);
/// NULL is allowed.
KVKEEP_C_API void kvkeep_keeper_free(kvkeep_keeper* keeper);
/// The resolved options of its policy as JSON. Valid as long as the keeper.
KVKEEP_C_API const char* kvkeep_policy_json(const kvkeep_keeper* keeper);

enum {
  KVKEEP_NO_ROWS = 0,          ///< a layer without rows of its own
  KVKEEP_DENSE = 1,            ///< [B, Hkv, capacity, D]
  KVKEEP_PAGES_SLOT_HEAD = 2,  ///< [pages, page_size, Hkv, D]
  KVKEEP_PAGES_HEAD_SLOT = 3   ///< [pages, Hkv, page_size, D]
};

/// One layer's keys and values: kvkeep::DenseKv, or kvkeep::PagedKv.
typedef struct kvkeep_layer_cache {
  int32_t form;
  const kvkeep_tensor* keys;
  const kvkeep_tensor* values;
  const kvkeep_tensor* key_scales;    ///< NULL: none
  const kvkeep_tensor* value_scales;  ///< NULL: none
} kvkeep_layer_cache;

/// The cache: layers [num_layers], each where the keys and values of a layer are (kvkeep::Keeper::bind()). Once, and
/// again whenever memory moves or grows; it must stay valid until the keeper is freed or another cache is bound.
KVKEEP_C_API kvkeep_status kvkeep_bind(kvkeep_keeper* keeper, const kvkeep_layer_cache* layers);
/// The same, with extras (kvkeep::DenseKv::extra): [num_layers] what else the slots of a layer have, such as the keys
/// of an indexer, which move with them; NULL entries: nothing.
KVKEEP_C_API kvkeep_status kvkeep_bind_extra(kvkeep_keeper* keeper, const kvkeep_layer_cache* layers,
                                             const kvkeep_tensor* const* extra);

/// The prompt of a sequence goes on until kvkeep_end_prompt().
#define KVKEEP_OPEN_PROMPT ((1 << 30) - 1)

/// tokens: already cached; prompt: tokens of the prompt, -1 if the first step tells, or KVKEEP_OPEN_PROMPT.
KVKEEP_C_API kvkeep_status kvkeep_join(kvkeep_keeper* keeper, int64_t sequence, int32_t tokens, int32_t prompt);
KVKEEP_C_API kvkeep_status kvkeep_leave(kvkeep_keeper* keeper, int64_t sequence);
KVKEEP_C_API kvkeep_status kvkeep_reset(kvkeep_keeper* keeper, int64_t sequence);
KVKEEP_C_API kvkeep_status kvkeep_end_prompt(kvkeep_keeper* keeper, int64_t sequence);
KVKEEP_C_API kvkeep_status kvkeep_pin(kvkeep_keeper* keeper, int64_t sequence, int64_t begin, int64_t end);
KVKEEP_C_API kvkeep_status kvkeep_unpin(kvkeep_keeper* keeper, int64_t sequence, int64_t begin, int64_t end);
KVKEEP_C_API kvkeep_status kvkeep_truncate(kvkeep_keeper* keeper, int64_t sequence, int64_t logical_length);
/// The child begins as the first `tokens` of the parent; -1: all. prompt: tokens of its prompt, -1: as the parent's.
KVKEEP_C_API kvkeep_status kvkeep_fork(kvkeep_keeper* keeper, int64_t child, int64_t parent, int64_t tokens,
                                       int32_t prompt);
KVKEEP_C_API kvkeep_status kvkeep_save(const kvkeep_keeper* keeper, int64_t sequence, const char* file);
KVKEEP_C_API kvkeep_status kvkeep_restore(kvkeep_keeper* keeper, int64_t sequence, const char* file);
/// The same in memory: *bytes is the keeper's, valid until the next call with it.
KVKEEP_C_API kvkeep_status kvkeep_save_bytes(kvkeep_keeper* keeper, int64_t sequence, const void** bytes,
                                             size_t* count);
/// prompt: tokens of its prompt, -1: as it was saved.
KVKEEP_C_API kvkeep_status kvkeep_restore_bytes(kvkeep_keeper* keeper, int64_t sequence, const void* bytes,
                                                size_t count, int32_t prompt);
/// The same of the first `tokens` that were saved alone, as kvkeep_fork(): a prefix hit that is shorter than what was
/// saved. -1: all.
KVKEEP_C_API kvkeep_status kvkeep_restore_prefix(kvkeep_keeper* keeper, int64_t sequence, const void* bytes,
                                                 size_t count, int64_t tokens, int32_t prompt);

/* ---- In every layer --------------------------------------------------------------------------------------------- */

enum { KVKEEP_PRE_ROPE = 0, KVKEEP_POST_ROPE = 1 };

/// New tokens of one layer (kvkeep::Observation).
typedef struct kvkeep_observation {
  size_t size;  ///< sizeof(kvkeep_observation)
  int32_t layer;
  int32_t basis;                     ///< of the queries: KVKEEP_PRE_ROPE or KVKEEP_POST_ROPE
  int64_t num_sequences;             ///< n
  const int64_t* sequences;          ///< [n]
  const int32_t* indptr;             ///< [n + 1] tokens of sequence i are [indptr[i], indptr[i + 1])
  const kvkeep_tensor* queries;      ///< f32, f16 or bf16 [tokens, Hq, D]; NULL: none
  const kvkeep_tensor* log_sum_exp;  ///< f32 [tokens, Hq]; NULL: none
  const int32_t* positions;          ///< [tokens] logical; NULL: the next ones of each sequence
  int32_t unread;                    ///< 1: no event will read the queries of these tokens, and none are given
} kvkeep_observation;

KVKEEP_C_API kvkeep_status kvkeep_observe(kvkeep_keeper* keeper, const kvkeep_observation* observation);

/// New tokens of a step, in all layers at once (kvkeep::StepTokens); kvkeep_record() then brings each layer's queries,
/// in a CUDA graph if need be.
typedef struct kvkeep_step_tokens {
  size_t size;  ///< sizeof(kvkeep_step_tokens)
  int64_t num_sequences;
  const int64_t* sequences;
  const int32_t* indptr;
  const int32_t* positions;  ///< as above
  int32_t basis;
  int32_t query_code, query_bits;  ///< dtype of the queries: KVKEEP_FLOAT and 32 or 16, KVKEEP_BFLOAT and 16
  int32_t log_sum_exp;             ///< 1: kvkeep_record() brings them
} kvkeep_step_tokens;

KVKEEP_C_API kvkeep_status kvkeep_begin_step(kvkeep_keeper* keeper, const kvkeep_step_tokens* tokens);
/// log_sum_exp: NULL if the step was begun without.
KVKEEP_C_API kvkeep_status kvkeep_record(kvkeep_keeper* keeper, int32_t layer, const kvkeep_tensor* queries,
                                         const kvkeep_tensor* log_sum_exp);

/// Scores of the engine's own: f32, f16 or bf16 [tokens, Hkv]. KVKEEP_UNSUPPORTED under a policy that reads none, as
/// kvkeep_surprise(): they cost the engine something, and it should learn that they are for nothing.
KVKEEP_C_API kvkeep_status kvkeep_give(kvkeep_keeper* keeper, int32_t layer, int64_t num_sequences,
                                       const int64_t* sequences, const int32_t* indptr, const kvkeep_tensor* scores);
/// nats: [count] of the oldest tokens that have none yet
KVKEEP_C_API kvkeep_status kvkeep_surprise(kvkeep_keeper* keeper, int64_t sequence, const float* nats, int64_t count);
/// Optional, before the attention of the layer: begins what kvkeep_view() of the same observation does, beside it on a
/// GPU (parts::Folds::prefetch). The queries stay as they are until then. Elsewhere it checks its arguments alone.
KVKEEP_C_API kvkeep_status kvkeep_prefetch(kvkeep_keeper* keeper, const kvkeep_observation* observation);
/// Merges folded spans into what attention gave over the rows: out f32 [tokens, Hq, Dv] and log_sum_exp f32 [tokens,
/// Hq], in place. The observation has queries after RoPE. Checks its arguments and does nothing under a policy that
/// folds nothing: an engine that can read folded spans calls it in every layer, whatever the policy.
KVKEEP_C_API kvkeep_status kvkeep_view(kvkeep_keeper* keeper, const kvkeep_observation* observation,
                                       const kvkeep_tensor* out, const kvkeep_tensor* log_sum_exp);

/* ---- Once a step ------------------------------------------------------------------------------------------------ */

/// Who holds which page (kvkeep::PageAllocator). Called on the thread of the call alone: references() in kvkeep_step(),
/// kvkeep_plan() and kvkeep_apply(), take() in kvkeep_step() and kvkeep_apply(), give_back() there and, of an event
/// that was pending, in kvkeep_finish().
typedef struct kvkeep_page_allocator {
  void* context;                                       ///< passed to each
  int32_t (*references)(void* context, int32_t page);  ///< holders of a page
  int32_t (*take)(void* context);                      ///< a free page, now held once; -1: there is none
  void (*give_back)(void* context, int32_t page);      ///< removes one holder
} kvkeep_page_allocator;

enum { KVKEEP_SHARED_COPY = 0, KVKEEP_SHARED_REFUSE = 1 };

/// The sequences of one step in the cache that is bound (kvkeep::CacheView). An event writes `lengths` and
/// `block_table`.
typedef struct kvkeep_cache {
  size_t size;                         ///< sizeof(kvkeep_cache)
  int64_t num_sequences;               ///< n
  const int64_t* sequences;            ///< [n]
  int32_t* lengths;                    ///< [n * rows_per_sequence] slots in use, this step's tokens included
  int32_t rows_per_sequence;           ///< 1, or num_layers * Hkv
  int32_t shared_pages;                ///< pages that others hold too: KVKEEP_SHARED_COPY or KVKEEP_SHARED_REFUSE
  const int32_t* places;               ///< [n] batch index of each sequence; NULL: 0, 1, ...
  const int32_t* starts;               ///< [n] first valid slot of each sequence; NULL: 0
  const kvkeep_tensor* block_table;    ///< i32 or i64 [n, max_pages] on the host; NULL: dense
  const kvkeep_page_allocator* pages;  ///< NULL: every page belongs to one sequence
  int64_t num_named;                   ///< sequences whose event comes now, by your word: the end of a turn, say
  const int64_t* named;                ///< [num_named] of `sequences`
} kvkeep_cache;

/// What an event did to one sequence (kvkeep::Cut).
typedef struct kvkeep_cut {
  int64_t sequence;
  int64_t logical_length;
  int32_t length_before, length_after;
  int64_t slots_before, slots_after;
} kvkeep_cut;

/// The pages that a cut sequence now holds, in order, those of them that the event rewrote, and those it gave back
/// (kvkeep::PageMove). In what kvkeep_plan() reports, -2 in `held` and `written` is a page that kvkeep_apply() will
/// take.
typedef struct kvkeep_page_move {
  int32_t index;  ///< of the sequence in the step
  int32_t num_held, num_freed, num_written;
  const int32_t* held;
  const int32_t* freed;
  const int32_t* written;
  int32_t taken;  ///< pages of `held` that are new: copies of pages that others hold too
} kvkeep_page_move;

/// A sequence that was due and was not cut: a query that the policy reads is not finite (kvkeep::Unscored).
typedef struct kvkeep_unscored {
  int64_t sequence;
  int32_t layer, position;
} kvkeep_unscored;

/// What an event did, or would do (kvkeep::Report).
typedef struct kvkeep_report {
  size_t size;  ///< sizeof(kvkeep_report); fields beyond it are not written
  int64_t num_cuts, num_pages, num_unscored;
  const kvkeep_cut* cuts;
  const kvkeep_page_move* pages;
  const kvkeep_unscored* unscored;
  int64_t slots_dropped, slots_folded, far_bytes;
  int64_t bytes_before, bytes_after, bytes_moved, pages_freed;
  int64_t pending;  ///< 1: kvkeep_finish() completes the event, and until then bytes and cuts are upper bounds
  int64_t slots_kept, slots_chosen;  ///< of the cut sequences, over all rows; of these, by the scorer
} kvkeep_report;

/// Decides and moves. report: may be NULL. On a GPU, where the scores decide how many slots stay, `report` may say
/// pending, from kvkeep_apply(), too: lengths and pages are those before the event until kvkeep_finish(). Without a
/// report they complete the event themselves, and wait.
KVKEEP_C_API kvkeep_status kvkeep_step(kvkeep_keeper* keeper, const kvkeep_cache* cache, kvkeep_report* report);
/// Decides, and moves nothing. The keeper remembers the plan until the next one.
KVKEEP_C_API kvkeep_status kvkeep_plan(kvkeep_keeper* keeper, const kvkeep_cache* cache, kvkeep_report* report);
/// Does what the newest plan says, once: KVKEEP_STATE_ERROR without one, and if it is out of date.
KVKEEP_C_API kvkeep_status kvkeep_apply(kvkeep_keeper* keeper, const kvkeep_cache* cache, kvkeep_report* report);

/// Completes a pending event, over the cache that kvkeep_step() or kvkeep_apply() had. KVKEEP_STATE_ERROR if none is
/// pending.
KVKEEP_C_API kvkeep_status kvkeep_finish(kvkeep_keeper* keeper, const kvkeep_cache* cache, kvkeep_report* report);

/// Workspace of an event over this cache if all its sequences are due; 0 on the CPU. Launches nothing.
KVKEEP_C_API kvkeep_status kvkeep_workspace_bytes(const kvkeep_keeper* keeper, const kvkeep_cache* cache,
                                                  int64_t* bytes);
/// From now on events work in `memory`: contiguous u8 [bytes] on the GPU, at a multiple of 256. It must stay until the
/// keeper is freed or other memory is given. Without this call memory comes from the accelerator's resources.
KVKEEP_C_API kvkeep_status kvkeep_use_workspace(kvkeep_accelerator* accelerator, const kvkeep_tensor* memory);
/// At any time: a keeper that was made with it goes on. NULL is allowed.
KVKEEP_C_API void kvkeep_accelerator_free(kvkeep_accelerator* accelerator);

/// What one layer did to one prompt (kvkeep::Narrowing).
typedef struct kvkeep_narrowing {
  int64_t sequence;
  int32_t all_continue;  ///< 1: `tokens` says nothing
  int32_t restart;       ///< 1: the sequence starts over in the next step, with these tokens as its prompt
  int64_t num_tokens;
  const int32_t* tokens;  ///< places, among the tokens present, of those that continue
} kvkeep_narrowing;

/// What a layer did to the prompts that ran through it (kvkeep::LayerReport).
typedef struct kvkeep_layer_report {
  size_t size;  ///< sizeof(kvkeep_layer_report)
  int64_t num_prompts, num_pages;
  const kvkeep_narrowing* prompts;
  const kvkeep_page_move* pages;
} kvkeep_layer_report;

/// Under a policy that narrows prompts, in every layer, after its attention. Under others it checks its arguments, and
/// every prompt continues whole.
KVKEEP_C_API kvkeep_status kvkeep_narrow(kvkeep_keeper* keeper, const kvkeep_observation* observation,
                                         const kvkeep_cache* cache, kvkeep_layer_report* report);

/* ---- Questions -------------------------------------------------------------------------------------------------- */

#define KVKEEP_NO_EVENT INT64_MAX

KVKEEP_C_API kvkeep_status kvkeep_logical_length(const kvkeep_keeper* keeper, int64_t sequence, int64_t* tokens);
KVKEEP_C_API kvkeep_status kvkeep_physical_length(const kvkeep_keeper* keeper, int64_t sequence, int32_t layer,
                                                  int32_t head, int32_t* slots);
/// Logical positions of the slots of one row, ascending.
KVKEEP_C_API kvkeep_status kvkeep_positions(const kvkeep_keeper* keeper, int64_t sequence, int32_t layer, int32_t head,
                                            const int32_t** positions, int64_t* count);
/// Its newest tokens that kvkeep_truncate() can take back; 0 right after an event.
KVKEEP_C_API kvkeep_status kvkeep_rollback_limit(const kvkeep_keeper* keeper, int64_t sequence, int64_t* tokens);
/// Its oldest tokens that no event has touched, in any row: a prefix cache may take in whole pages of them.
KVKEEP_C_API kvkeep_status kvkeep_whole_prefix(const kvkeep_keeper* keeper, int64_t sequence, int64_t* tokens);
/// Its tokens that are in no row any more: logical less cached length. KVKEEP_STATE_ERROR where rows have different
/// lengths.
KVKEEP_C_API kvkeep_status kvkeep_evicted(const kvkeep_keeper* keeper, int64_t sequence, int64_t* tokens);
/// Tokens before an event may cut the sequence, for calls between steps; KVKEEP_NO_EVENT: none will.
KVKEEP_C_API kvkeep_status kvkeep_tokens_to_event(const kvkeep_keeper* keeper, int64_t sequence, int64_t* tokens);
/// Newest queries that an event reads; 0: none.
KVKEEP_C_API kvkeep_status kvkeep_queries_read(const kvkeep_keeper* keeper, int64_t* queries);

/// Slots of the longest row of a sequence after so many `steps` that are not in the cache yet, each with its event,
/// before anything is scored (kvkeep::LengthForecast). tokens: [steps] that each brings, 0 or more. event: 1 if the
/// last of them cuts the sequence, or may cut it where that is not exact; NULL: not asked. exact: 1 if it will hold as
/// many, 0 if it may hold fewer; NULL: not asked.
KVKEEP_C_API kvkeep_status kvkeep_length_after(const kvkeep_keeper* keeper, int64_t sequence, const int32_t* tokens,
                                               size_t steps, int32_t* length, int32_t* event, int32_t* exact);
/// The most pages of `page_size` slots that the last of these steps takes: *append for its tokens, and for copies of
/// shared pages that they are written to, *event for copies that its event writes (kvkeep::LengthForecast::need()).
/// steps: 1 or more. shared_pages: how many of the sequence's pages others will hold too by then. last_shared: 0 if its
/// last page is none of them, as under a cache of whole pages.
KVKEEP_C_API kvkeep_status kvkeep_pages_needed(const kvkeep_keeper* keeper, int64_t sequence, const int32_t* tokens,
                                               size_t steps, int32_t page_size, int32_t shared_pages,
                                               int32_t last_shared, int32_t* append, int32_t* event);

/// The rows of the index-th sequence of a cache in host memory, for kvkeep_restore_rows() (kvkeep::copy_rows()): *bytes
/// is the keeper's, valid until the next call with it.
KVKEEP_C_API kvkeep_status kvkeep_copy_rows(kvkeep_keeper* keeper, const kvkeep_cache* cache, int64_t index,
                                            const void** bytes, size_t* count);
KVKEEP_C_API kvkeep_status kvkeep_restore_rows(kvkeep_keeper* keeper, const kvkeep_cache* cache, int64_t index,
                                               const void* bytes, size_t count);

/// Counters since the keeper was made (kvkeep::Totals).
typedef struct kvkeep_totals {
  size_t size;  ///< sizeof(kvkeep_totals); fields beyond it are not written
  int64_t steps, events, sequences_cut, slots_dropped, bytes_moved, pages_freed, slots_folded, slots_kept, slots_chosen,
      unscored;
  double event_seconds;       ///< host time of all events
  int64_t event_buckets[15];  ///< events that took up to 50, 100, 250, 500 us, 1, 2.5, 5, 10, 25, 50, 100, 500 ms,
                              ///< 1, 2.5, 5 s
} kvkeep_totals;
KVKEEP_C_API kvkeep_status kvkeep_read_totals(const kvkeep_keeper* keeper, kvkeep_totals* totals);
/// The same, and the times of events, as Prometheus reads them (kvkeep::prometheus_metrics()). labels: of every sample,
/// as in `worker="0"`, KVKEEP_INVALID_ARGUMENT for others; NULL: none. *text is the keeper's, valid until the next call
/// with it.
KVKEEP_C_API kvkeep_status kvkeep_metrics(kvkeep_keeper* keeper, const char* labels, const char** text);

/// One keeper of the process (kvkeep::KeeperMetrics).
typedef struct kvkeep_keeper_metrics {
  const kvkeep_totals* totals;  ///< from kvkeep_read_totals(), on the keeper's thread
  const char* labels;           ///< of its samples, as in worker="0"; NULL: none
} kvkeep_keeper_metrics;
/// One page of `count` keepers, each with labels of its own; needs none of them, so any thread may call it. *text is
/// valid until the thread's next call of this function.
KVKEEP_C_API kvkeep_status kvkeep_prometheus_metrics(const kvkeep_keeper_metrics* keepers, size_t count,
                                                     const char** text);

#ifdef __cplusplus
}
#endif

#endif
