// SPDX-License-Identifier: Apache-2.0
#pragma once
// llama.cpp may put weights into buffers of extra types, in the layout of instructions such as AMX. On some virtual
// machines the processor names instructions that then end the program (SIGILL).

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>

#include <cstdint>
#include <string>
#include <vector>

#if __has_include(<sys/wait.h>)
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#endif

/// Small products with weights of these types in each buffer of an extra type.
inline void multiply_in_extra_buffers() {
  ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (cpu == nullptr) return;
  const auto extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
      ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
  if (extra == nullptr) return;
  ggml_backend_t backend = ggml_backend_dev_init(cpu, nullptr);
  for (ggml_backend_buffer_type_t* type = extra(cpu); type != nullptr && *type != nullptr; ++type)
    for (const ggml_type weights : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K})
      for (const std::int64_t tokens : {1, 64}) {
        ggml_context* context = ggml_init({.mem_size = 1 << 20, .mem_buffer = nullptr, .no_alloc = true});
        ggml_tensor* w = ggml_new_tensor_2d(context, weights, 256, 256);
        ggml_tensor* x = ggml_new_tensor_2d(context, GGML_TYPE_F32, 256, tokens);
        ggml_tensor* product = ggml_mul_mat(context, w, x);
        ggml_backend_buffer_t own = ggml_backend_buft_alloc_buffer(*type, ggml_backend_buft_get_alloc_size(*type, w));
        ggml_backend_tensor_alloc(own, w, ggml_backend_buffer_get_base(own));
        if (ggml_backend_dev_supports_op(cpu, product)) {
          ggml_backend_buffer_t plain = ggml_backend_alloc_ctx_tensors(context, backend);
          const std::vector<std::uint8_t> zeros(ggml_nbytes(w) + ggml_nbytes(x));
          ggml_backend_tensor_set(w, zeros.data(), 0, ggml_nbytes(w));
          ggml_backend_tensor_set(x, zeros.data(), 0, ggml_nbytes(x));
          ggml_cgraph* graph = ggml_new_graph(context);
          ggml_build_forward_expand(graph, product);
          ggml_backend_graph_compute(backend, graph);
          ggml_backend_buffer_free(plain);
        }
        ggml_backend_buffer_free(own);
        ggml_free(context);
      }
  ggml_backend_free(backend);
}

/// Why buffers of extra types cannot be used here; empty: they can, as far as a process of its own has shown.
inline std::string trouble_with_extra_buffers() {
#if __has_include(<sys/wait.h>)
  const pid_t child = fork();
  if (child == 0) {
    multiply_in_extra_buffers();
    _exit(0);
  }
  int status = 0;
  if (child > 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status)) return strsignal(WTERMSIG(status));
#endif
  return {};
}
