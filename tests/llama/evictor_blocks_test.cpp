// SPDX-License-Identifier: Apache-2.0
// Rows of quantised caches, which move as blocks.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "evictor_engine.h"

namespace kvkeep::llama {
namespace {

/// Bytes of keys and values by layer, head and position.
std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, std::vector<std::byte>> blocks_of(const Engine& run) {
  std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, std::vector<std::byte>> all;
  const ModelSpec& spec = run.evictor->keeper().spec();
  const auto cells = run.evictor->cells(0);
  for (const std::int32_t l : spec.full_layers())
    for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
      const std::vector<std::int32_t> positions = run.positions(0, l, h);
      for (std::size_t s = 0; s < positions.size(); ++s)
        for (const auto* caches : {&seen_cache.keys, &seen_cache.values}) {
          const ggml_tensor* t = (*caches)[static_cast<std::size_t>(l)];
          const std::size_t bytes = t->nb[1] / static_cast<std::size_t>(spec.kv_heads);
          std::vector<std::byte> row(bytes);
          ggml_backend_tensor_get(t, row.data(),
                                  static_cast<std::size_t>(cells[s]) * t->nb[1] + static_cast<std::size_t>(h) * bytes,
                                  bytes);
          auto& to = all[{l, h, positions[s]}];
          to.insert(to.end(), row.begin(), row.end());
        }
    }
  return all;
}

TEST_P(LlamaEvictor, MovesRowsOfAQuantisedCacheAsBlocks) {
  for (const char* policy : {"tova,heads=group", "keydiff", "ams-tova", "knorm,share=union"}) {
    const std::string words = std::string(policy) + ",budget=40,interval=8,sink=2,recent=4,prefill=cut";
    const Engine run(words, {.type = GGML_TYPE_Q8_0, .watch = &watch_cache});
    run.evictor->prompt(0, 80);
    ASSERT_EQ(run.decode({{0, some_tokens(70)}}), 0);
    auto before = blocks_of(run);
    std::int64_t cut = 0;
    for (unsigned i = 0; i < 40; ++i) {
      ASSERT_EQ(run.decode({{0, some_tokens(i == 0 ? 10 : 1, i)}}), 0);
      const auto now = blocks_of(run);
      std::size_t known = 0;
      for (const auto& [key, row] : now) {
        const auto found = before.find(key);
        if (found == before.end()) continue;  // it came with this batch
        ++known;
        ASSERT_EQ(row, found->second) << policy << ", position " << std::get<2>(key);
      }
      EXPECT_GT(known, 0U);
      expect_sound(run, 0);
      before = now;
      cut += run.evictor->report().cuts.empty() ? 0 : 1;
    }
    EXPECT_EQ(cut, 5) << policy;
    // Attention moved to the lowest cells as well.
    EXPECT_LE(*std::ranges::max_element(run.evictor->cells(0)), 96) << policy;
  }
}

/// What is read is what the blocks say: scores of 8 bits hardly differ from those of 32.
TEST_P(LlamaEvictor, ScoresAQuantisedCacheByItsBlocks) {
  for (const char* policy : {"tova,heads=group", "keydiff", "knorm"}) {
    const std::string words = std::string(policy) + ",budget=40,interval=8,sink=2,recent=4,prefill=cut";
    const Engine q8(words, {.type = GGML_TYPE_Q8_0}), f32(words, {.type = GGML_TYPE_F32});
    for (const Engine* run : {&q8, &f32}) {
      ASSERT_EQ(run->decode({{0, some_tokens(80)}}), 0);
      ASSERT_EQ(run->evictor->spent().cut, 1);
    }
    std::size_t same = 0, all = 0;
    const ModelSpec& spec = f32.evictor->keeper().spec();
    for (const std::int32_t l : spec.full_layers())
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        const std::vector<std::int32_t> a = q8.positions(0, l, h), b = f32.positions(0, l, h);
        for (const std::int32_t p : a) same += std::ranges::binary_search(b, p) ? 1 : 0;
        all += a.size();
      }
    EXPECT_GE(static_cast<double>(same), 0.93 * static_cast<double>(all)) << policy;
  }
}

}  // namespace
}  // namespace kvkeep::llama
