// SPDX-License-Identifier: Apache-2.0
#pragma once
// A stand-in with the names of ggml's public interface, for tests on machines without llama.cpp: what kvkeep/llama.h
// and its tests use of ggml.h. fake_llama.cpp says what differs.

#include <cstddef>
#include <cstdint>

#define GGML_MAX_DIMS 4
#define GGML_MAX_SRC 10
#define GGML_MAX_OP_PARAMS 64
#define GGML_MAX_NAME 64
#define GGML_ROPE_TYPE_NEOX 2

extern "C" {

enum ggml_type {
  GGML_TYPE_F32 = 0,
  GGML_TYPE_F16 = 1,
  GGML_TYPE_Q8_0 = 8,
  GGML_TYPE_I32 = 26,
  GGML_TYPE_I64 = 27,
  GGML_TYPE_BF16 = 30,
  GGML_TYPE_COUNT = 43,
};

enum ggml_op {
  GGML_OP_NONE = 0,
  GGML_OP_ADD,
  GGML_OP_RMS_NORM,
  GGML_OP_MUL_MAT,
  GGML_OP_SCALE,
  GGML_OP_CPY,
  GGML_OP_CONT,
  GGML_OP_RESHAPE,
  GGML_OP_VIEW,
  GGML_OP_PERMUTE,
  GGML_OP_TRANSPOSE,
  GGML_OP_GET_ROWS,
  GGML_OP_SET_ROWS,
  GGML_OP_SOFT_MAX,
  GGML_OP_ROPE,
  GGML_OP_FLASH_ATTN_EXT,
  GGML_OP_UNARY,
  GGML_OP_TOP_K,
};

enum ggml_unary_op {
  GGML_UNARY_OP_TANH = 4,
};

struct ggml_tensor {
  enum ggml_type type;
  struct ggml_backend_buffer* buffer;
  int64_t ne[GGML_MAX_DIMS];  // elements
  size_t nb[GGML_MAX_DIMS];   // strides in bytes
  enum ggml_op op;
  int32_t op_params[GGML_MAX_OP_PARAMS / sizeof(int32_t)];
  int32_t flags;
  struct ggml_tensor* src[GGML_MAX_SRC];
  struct ggml_tensor* view_src;  // what a view shows, itself no view
  size_t view_offs;
  void* data;
  char name[GGML_MAX_NAME];
  void* extra;
};

typedef bool (*ggml_abort_callback)(void* data);
typedef void (*ggml_to_float_t)(const void* from, float* to, int64_t count);
typedef void (*ggml_from_float_t)(const float* from, void* to, int64_t count);

struct ggml_type_traits {
  const char* type_name;
  int64_t blck_size;
  int64_t blck_size_interleave;
  size_t type_size;
  bool is_quantized;
  ggml_to_float_t to_float;  // null for f32
  ggml_from_float_t from_float_ref;
};

const struct ggml_type_traits* ggml_get_type_traits(enum ggml_type type);
const char* ggml_type_name(enum ggml_type type);
size_t ggml_row_size(enum ggml_type type, int64_t elements);
size_t ggml_nbytes(const struct ggml_tensor* tensor);
const char* ggml_op_name(enum ggml_op op);
/// Of a tensor in ggml's memory.
size_t ggml_tensor_overhead(void);
/// YaRN: pairs from dims[0] to dims[1] turn ever less at their own frequency.
void ggml_rope_yarn_corr_dims(int n_dims, int n_ctx_orig, float freq_base, float beta_fast, float beta_slow,
                              float dims[2]);

}  // extern "C"
