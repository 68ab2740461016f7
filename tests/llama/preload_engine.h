// SPDX-License-Identifier: Apache-2.0
#pragma once
// Programs with libkvkeep_llama_preload.so before llama.cpp, or before the fake of its functions.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>

#include "evictor_engine.h"

extern "C" {
int kvkeep_llama_bind(const char* path);
void kvkeep_llama_policy(const char* text);
const char* kvkeep_llama_said(void);
std::int64_t kvkeep_llama_events(const llama_context* context);
}

namespace kvkeep::llama {

/// A context of a program under KVKEEP_POLICY; null: none is set.
inline Engine under(const char* policy, const Setting& setting = {.cells = 1024, .sequences = 4, .type = GGML_TYPE_F32},
                    llama_model* model = the_model()) {
  policy == nullptr ? unsetenv("KVKEEP_POLICY") : setenv("KVKEEP_POLICY", policy, 1);
  return Engine("", setting, model);
}

/// What is said on stderr meanwhile.
inline std::string said(const std::function<void()>& run) {
  testing::internal::CaptureStderr();
  run();
  return testing::internal::GetCapturedStderr();
}
#define EXPECT_SAYS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

class LlamaPreload : public testing::Test {
 protected:
  void SetUp() override {
#ifdef KVKEEP_TEST_FAKE_LLAMA
    model_name = "fake";
#else
    model_name = "tiny";
#endif
    for (const char* name : {"KVKEEP_POLICY", "KVKEEP_CELLS", "KVKEEP_VERBOSE"}) unsetenv(name);
    ASSERT_NE(the_model(), nullptr);
  }
};

inline std::int64_t events(const Engine& run) { return kvkeep_llama_events(run.context.get()); }
inline llama_pos least(const Engine& run, llama_seq_id s = 0) { return llama_memory_seq_pos_min(run.memory(), s); }
inline llama_pos length(const Engine& run, llama_seq_id s = 0) { return llama_memory_seq_pos_max(run.memory(), s) + 1; }

}  // namespace kvkeep::llama
