// SPDX-License-Identifier: Apache-2.0
#pragma once
// A stand-in with the names of ggml's public interface, for tests on machines without llama.cpp: what kvkeep/llama.h
// and its tests use of ggml-backend.h. fake_llama.cpp says what differs.

#include "ggml.h"

extern "C" {

typedef struct ggml_backend_buffer* ggml_backend_buffer_t;

/// Called before a node is computed (ask: is it wanted?) and, if it said yes, after. False then ends the graph.
typedef bool (*ggml_backend_sched_eval_callback)(struct ggml_tensor* node, bool ask, void* user_data);

const char* ggml_backend_buffer_name(ggml_backend_buffer_t buffer);
bool ggml_backend_buffer_is_host(ggml_backend_buffer_t buffer);
void ggml_backend_tensor_get(const struct ggml_tensor* tensor, void* data, size_t offset, size_t size);

}  // extern "C"
