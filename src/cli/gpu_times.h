// SPDX-License-Identifier: Apache-2.0
#pragma once
// Written by bench/gpu_times.py --write src/cli/gpu_times.h from bench/gpu/h100.jsonl and bench/counting.py.

#include <cstdint>

namespace kvkeep::cli {

// GPU time of an event of one sequence over all layers. Counted: a measured event and a measured kernel beside it.
struct EventTime {
  const char* policy;
  const char* shape;
  std::int32_t before, after;  // slots
  double us;
  bool counted;
};

// clang-format off
inline constexpr EventTime kEventTimes[] = {
    {"ams-keydiff", "llama8b", 1536, 1024, 602.272, false},
    {"ams-keydiff", "qwen7b", 1536, 1024, 466.912, false},
    {"ams-tova", "llama8b", 1536, 1024, 452.032, false},
    {"ams-tova", "llama8b", 32768, 2048, 3727.328, false},
    {"ams-tova", "qwen7b", 1536, 1024, 400.704, false},
    {"ams-tova", "qwen7b", 32768, 2048, 2200.768, false},
    {"snapkv", "llama8b", 1536, 1024, 486.944, false},
    {"snapkv", "qwen7b", 1536, 1024, 374.336, false},
    {"streaming", "llama8b", 1536, 1024, 176.256, false},
    {"streaming", "qwen7b", 1536, 1024, 95.296, false},
    {"tova", "llama8b", 1536, 1024, 460.096, false},
    {"tova", "qwen7b", 1536, 1024, 253.696, false},
    {"ams-expected", "llama8b", 1536, 1024, 2352.544, true},
    {"ams-expected", "llama8b", 32768, 2048, 15643.808, true},
    {"ams-expected", "qwen7b", 1536, 1024, 1838.624, true},
    {"ams-expected", "qwen7b", 32768, 2048, 10354.112, true},
    {"expected", "llama8b", 1536, 1024, 2076.768, true},
    {"expected", "qwen7b", 1536, 1024, 1533.216, true},
    {"keydiff", "llama8b", 1536, 1024, 334.144, true},
    {"keydiff", "qwen7b", 1536, 1024, 229.312, true},
};
// clang-format on

inline constexpr const char* kTimedOn = "NVIDIA H100 80GB HBM3, 2026-11-26";
// Bytes a second that are read, bf16 operations a second by cuBLAS.
inline constexpr double kReadRate = 3068.816e9, kProductRate = 891.303e12;
// Showing one token's queries of llama8b to all layers: us of a batch of 1 and of more.
inline constexpr std::int32_t kObservedBatch = 32;
inline constexpr double kObservedOne = 100.032, kObservedBatchUs = 268.992;
// Assumed: us between two kernels of a graph, bytes a second to the memory of the host.
inline constexpr double kGapUs = 1.3, kHostLink = 50e9;

}  // namespace kvkeep::cli
