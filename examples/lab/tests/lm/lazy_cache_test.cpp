// SPDX-License-Identifier: Apache-2.0
// A cache takes memory as it fills, and is refused if the machine could not hold it full.

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "kvlab/decoder.h"
#include "kvlab/memory_left.h"
#include "message_of.h"

namespace kvkeep::lazy_cache_test {
namespace {

using lm::Decoder;

Decoder small() { return Decoder::open(KVKEEP_TEST_GOLDEN_DIR "/decoder/llama_gqa"); }

std::int64_t slot_bytes(const ModelSpec& spec) {
  return std::int64_t{spec.num_layers()} * spec.kv_heads * (spec.key_dim + spec.value_dim) * 4;
}

std::int64_t resident_bytes() {
  std::int64_t whole = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> whole >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

TEST(LazyCache, TakesMemoryAsItIsWritten) {
  const Decoder decoder = small();
  constexpr std::int64_t kGiB = std::int64_t{1} << 30;
  if (lm::memory_left() < 2 * kGiB) GTEST_SKIP() << "less than 2 GiB are left";
  const std::int64_t before = resident_bytes();
  const std::vector<lm::LayerCache> dense = decoder.make_cache(2, kGiB / 2 / slot_bytes(decoder.spec()));
  const std::vector<LayerKv> pages = decoder.make_pages(kGiB / 16 / slot_bytes(decoder.spec()), 16);
  EXPECT_LT(resident_bytes() - before, kGiB / 16);
  const kvkeep::Tensor keys = dense.back().keys;
  EXPECT_EQ(keys.data<float>()[keys.numel() - 1], 0.0F);
  keys.data<float>()[keys.numel() - 1] = 1;
  EXPECT_EQ(std::get<PagedKv>(pages.front()).values.data<float>()[0], 0.0F);
}

TEST(LazyCache, IsRefusedWhereAllThatLivesWouldNotFit) {
  const Decoder decoder = small();
  const std::int64_t most = lm::memory_left() / slot_bytes(decoder.spec());
  const auto refusal = [&](std::int64_t sequences, std::int64_t capacity) {
    return testing::message_of<InvalidArgument>([&] { static_cast<void>(decoder.make_cache(sequences, capacity)); });
  };
  EXPECT_NE(refusal(1, 2 * most).find("a cache for 1 sequence of "), std::string::npos);
  EXPECT_NE(refusal(INT32_MAX, INT64_MAX / 2).find("of memory is left on this machine"), std::string::npos);
  EXPECT_NE(
      testing::message_of<InvalidArgument>([&] { static_cast<void>(decoder.make_pages(most, 16)); }).find("make pages"),
      std::string::npos);
  {
    const std::vector<lm::LayerCache> first = decoder.make_cache(1, most / 2);
    EXPECT_NE(refusal(1, 3 * most / 4).find("with those that there are"), std::string::npos);
  }
  static_cast<void>(decoder.make_cache(1, most / 2));
}

}  // namespace
}  // namespace kvkeep::lazy_cache_test
