// SPDX-License-Identifier: Apache-2.0
// The reference decoder on a device: its logits, keys and values are the CPU's within rounding, and what it generates
// under a policy whose kernels run there is the same.

#include "kvlab/decoder.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "device.h"
#include "fresh_accelerator.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"
#include "kvlab/generation.h"
#include "kvlab/tasks.h"

namespace kvkeep::cuda::decoder_test {
namespace {

using namespace lm;
using Ints = std::vector<std::int32_t>;

// The model's device memory is the host's, so there the operators run on the CPU.
#if defined(KVKEEP_CUDA_MODEL)
void move(Decoder& decoder) { decoder.use(Path::operators); }
#else
void move(Decoder& decoder) { decoder.to({.kind = Device::Kind::cuda, .index = 0}); }
#endif

/// The model that the repository ships; a kit of programs is told where.
std::string model_folder() {
  const char* const given = std::getenv("KVKEEP_TEST_MODEL_DIR");
  return given != nullptr ? given : KVKEEP_TEST_MODEL_DIR;
}

void expect_close(const at::Tensor& expected, const at::Tensor& found) {
  ASSERT_EQ(expected.sizes(), found.sizes());
  const at::Tensor a = expected.to(at::kFloat).contiguous(), b = found.cpu().to(at::kFloat).contiguous();
  float worst = 0, largest = 1e-6F;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    worst = std::max(worst, std::abs(a.const_data_ptr<float>()[i] - b.const_data_ptr<float>()[i]));
    largest = std::max(largest, std::abs(a.const_data_ptr<float>()[i]));
  }
  EXPECT_LE(worst / largest, 1e-4F);
}

/// Positions of one that the other has not, and all. Rounding may turn the order of two scores that are nearly equal.
std::pair<std::size_t, std::size_t> compare(const std::vector<Ints>& a, const std::vector<Ints>& b) {
  std::size_t differing = 0, all = 0;
  EXPECT_EQ(a.size(), b.size());
  for (std::size_t r = 0; r < std::min(a.size(), b.size()); ++r) {
    EXPECT_EQ(a[r].size(), b[r].size());
    differing += static_cast<std::size_t>(std::count_if(
        a[r].begin(), a[r].end(), [&](std::int32_t p) { return !std::binary_search(b[r].begin(), b[r].end(), p); }));
    all += a[r].size();
  }
  return {differing, all};
}

using DeviceDecoder = OnDevice;

TEST_F(DeviceDecoder, GivesTheLogitsQueriesKeysAndValuesOfTheCpu) {
  io::ModelConfig config = io::ModelConfig::shape(io::Architecture::qwen3, 3, 72, 104, 6, 2, 20, 90);
  config.spec.layers[1] = {LayerKind::sliding, 11, -1};
  const auto folder = std::filesystem::temp_directory_path() / text("kvkeep_device_decoder_", ::getpid());
  write_random_checkpoint(folder, config, 21, Dtype::bf16);
  Decoder cpu = Decoder::open(folder), device = Decoder::open(folder);
  std::filesystem::remove_all(folder);  // mapped files stay readable
  move(device);
  at::Tensor table = at::empty({2, 5}, at::TensorOptions(at::kInt));
  for (std::int32_t i = 0; i < 10; ++i) table.mutable_data_ptr<std::int32_t>()[i] = 9 - i;
  for (const bool paged : {false, true}) {
    const auto make = [&](Decoder& decoder) {
      if (paged) return decoder.make_pages(10, 8);
      const auto dense = decoder.make_cache(2, 40);
      return std::vector<LayerKv>(dense.begin(), dense.end());
    };
    const std::vector<LayerKv> a = make(cpu), b = make(device);
    // A prompt of 20 and one of 3, then rows of different length, one token and four.
    const auto step = [&](const Ints& tokens, const Ints& indptr, const Ints& positions, const SlotCounts& lengths) {
      const Ints places{1, 0};
      std::vector<at::Tensor> queries[2];
      const auto forward = [&](Decoder& decoder, const std::vector<LayerKv>& cache, std::vector<at::Tensor>& seen) {
        StepOptions options{.logits = Logits::all};
        options.on_layer = [&](const LayerSight& sight) { seen.push_back(sight.queries.cpu().clone()); };
        return decoder.forward({tokens, indptr, positions, places, lengths}, cache, paged ? table : at::Tensor(),
                               options);
      };
      const at::Tensor expected = forward(cpu, a, queries[0]), found = forward(device, b, queries[1]);
      EXPECT_EQ(device_of(found.device()), device.device());
      expect_close(expected, found);
      EXPECT_EQ(lm::argmax(expected), lm::argmax(found));
      for (std::size_t l = 0; l < 3; ++l) expect_close(queries[0][l], queries[1][l]);
    };
    Ints tokens, positions;
    for (std::int32_t i = 0; i < 23; ++i) tokens.push_back(i * 7 % 90), positions.push_back(i < 20 ? i : i - 20);
    const Ints none{0, 0};
    step(tokens, {0, 20, 23}, positions, none);
    Ints lengths{14, 20, 20, 20, 3, 9, 1, 3, 3, 3, 2, 0};  // by sequence, layer and head
    step({5, 6, 7, 8, 9}, {0, 1, 5}, {20, 3, 4, 5, 6}, SlotCounts(Lengths{lengths, 6}, 2));
    for (std::size_t l = 0; l < 3; ++l) {
      const auto sides = [&](const LayerKv& kv) {
        return paged ? std::pair(std::get<PagedKv>(kv).keys, std::get<PagedKv>(kv).values)
                     : std::pair(std::get<DenseKv>(kv).keys, std::get<DenseKv>(kv).values);
      };
      expect_close(sides(a[l]).first, sides(b[l]).first);
      expect_close(sides(a[l]).second, sides(b[l]).second);
    }
  }
}

TEST_F(DeviceDecoder, GeneratesUnderAPolicyWhatTheCpuGenerates) {
  Decoder cpu = Decoder::open(model_folder()), device = Decoder::open(model_folder());
  move(device);
  std::vector<Request> requests;
  for (std::uint64_t seed = 5; seed < 8; ++seed) {
    const TaskSample sample = make_task("chain", seed, {.length = 256});
    requests.push_back({.prompt = {sample.ids.begin(), sample.ids.begin() + sample.prompt_length},
                        .new_tokens = 40,
                        .keep_logits = true,
                        .keep_positions = true});
  }
  for (const char* policy :
       {"full", "ams-tova,budget=64,interval=16", "snapkv,budget=64,interval=16,window=16",
        "tova,budget=64,interval=16", "adakv-tova,budget=64,interval=16",
        "fastkv,budget=128,window=16,layer=1,cache=96+ams-tova,budget=64,interval=16",
        "asl,budget=128,window=16,min_layer=1,observed_layers=2,threshold=2+tova,budget=64,interval=16",
        "gemfilter,budget=128,layer=1+tova,budget=64,interval=16", "tova,budget=32,interval=16,recent=16,rest=fold"})
    for (const std::int32_t page_size : {0, 16}) {
      SCOPED_TRACE(text(policy, ", pages of ", page_size));
      const GenerationRun expected =
          generate(cpu, make_policy(policy), requests, {.places = 2, .page_size = page_size});
      const GenerationRun found = generate(device, make_policy(policy), requests,
                                           {.places = 2, .page_size = page_size, .accelerator = fresh_accelerator()});
      EXPECT_EQ(expected.totals.events > 0, std::string(policy) != "full");
      for (std::size_t i = 0; i < requests.size(); ++i) {
        const Completion &a = expected.completions[i], &b = found.completions[i];
        EXPECT_EQ(a.tokens, b.tokens) << i;
        EXPECT_TRUE(b.logits.device().is_cpu());
        ASSERT_EQ(a.events.size(), b.events.size()) << i;
        for (std::size_t e = 0; e < a.events.size(); ++e) {
          const auto [differing, all] = compare(a.events[e].positions, b.events[e].positions);
          EXPECT_LE(differing * 50, all) << i << ", event " << e;
        }
      }
    }
}

}  // namespace
}  // namespace kvkeep::cuda::decoder_test
