// SPDX-License-Identifier: Apache-2.0
// Caches in 8 bits and in blocks under the decoder.
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/simd/stored_side.h"
#include "kvlab/decoder.h"
#include "kvlab/generation.h"
#include "message_of.h"

namespace kvkeep::lm::quantised_decoder_test {
namespace {

namespace fs = std::filesystem;
using Ints = std::vector<std::int32_t>;

/// Heads of `dim` numbers; of 64 and more they are rotated.
Decoder make_decoder(std::int32_t dim) {
  const fs::path folder = fs::temp_directory_path() / text("kvkeep_quantised_", ::getpid(), "_", dim);
  write_random_checkpoint(folder, io::ModelConfig::shape(io::Architecture::qwen2, 3, 96, 128, 4, 2, dim, 90), 5);
  io::ModelConfig config = io::ModelConfig::read(folder);
  config.spec.layers[1] = {LayerKind::sliding, 9, -1};
  Weights weights = Weights::read(folder, config);
  fs::remove_all(folder);  // mapped files stay readable
  return {std::move(config), std::move(weights)};
}

Ints some_ids(std::int32_t n) {
  Ints ids;
  for (std::int32_t i = 0; i < n; ++i) ids.push_back((i * 37 + 11) % 90);
  return ids;
}

at::Tensor feed(Decoder& decoder, std::span<const LayerKv> cache, const at::Tensor& table, const Ints& ids,
                std::int32_t length) {
  const auto n = static_cast<std::int32_t>(ids.size());
  Ints positions(ids.size());
  std::iota(positions.begin(), positions.end(), length);
  const Ints indptr{0, n}, rows{0}, lengths{length};
  StepOptions all;
  all.logits = Logits::all;
  return decoder.forward({ids, indptr, positions, rows, lengths}, cache, table, all);
}

std::vector<LayerKv> of(const std::vector<LayerCache>& dense) { return {dense.begin(), dense.end()}; }

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

double worst(const at::Tensor& a, const at::Tensor& b) {
  double found = 0, most = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    found = std::max<double>(found, std::abs(a.const_data_ptr<float>()[i] - b.const_data_ptr<float>()[i]));
    most = std::max<double>(most, std::abs(b.const_data_ptr<float>()[i]));
  }
  return found / most;
}

const Dtype kStored[] = {Dtype::i8, Dtype::q8_0, Dtype::q4_0};

// Pages of 8, and pieces of a prompt: the bits of one dense step.
TEST(QuantisedDecoder, GivesTheSameBitsInPiecesAndInPages) {
  for (const std::int32_t dim : {32, 64})
    for (const Dtype dtype : kStored) {
      SCOPED_TRACE(text(dtype, " in heads of ", dim));
      Decoder decoder = make_decoder(dim);
      const Ints ids = some_ids(30);
      const at::Tensor whole = feed(decoder, of(decoder.make_cache(1, 32, dtype)), {}, ids, 0);
      const auto dense = of(decoder.make_cache(1, 32, dtype));
      const auto pages = decoder.make_pages(4, 8, dtype, PageLayout::slot_head);
      at::Tensor table = at::arange(4, at::TensorOptions(at::kInt)).view({1, 4});
      std::int32_t done = 0;
      for (const std::int32_t step : {13, 1, 9, 7}) {
        const Ints some(ids.begin() + done, ids.begin() + done + step);
        const at::Tensor expected = whole.narrow(0, done, step).contiguous();
        EXPECT_TRUE(same_bits(feed(decoder, dense, {}, some, done), expected));
        EXPECT_TRUE(same_bits(feed(decoder, pages, table, some, done), expected));
        done += step;
      }
    }
}

// A cache in f32 that holds what the other one holds gives the same next token's logits, up to the rotation's rounding.
TEST(QuantisedDecoder, ReadsTheNumbersThatItStored) {
  for (const std::int32_t dim : {32, 64})
    for (const Dtype dtype : kStored) {
      SCOPED_TRACE(text(dtype, " in heads of ", dim));
      Decoder decoder = make_decoder(dim);
      const auto stored = decoder.make_cache(1, 40, dtype), wide = decoder.make_cache(1, 40);
      EXPECT_EQ(stored[0].keys_rotated, dim == 64 ? 64 : 0);
      const Ints ids = some_ids(33);
      feed(decoder, of(stored), {}, {ids.begin(), ids.begin() + 32}, 0);
      for (std::size_t l = 0; l < 3; ++l)
        for (std::int64_t h = 0; h < 2; ++h)
          for (std::int64_t slot = 0; slot < 32; ++slot) {
            const auto copy = [&](const kvkeep::Tensor& from, const kvkeep::Tensor& scales, std::int32_t rotated,
                                  const kvkeep::Tensor& to) {
              cpu::widen_slot({dense_address(from, 0, h), dense_address(scales, 0, h), dtype, dim, rotated}, slot,
                              reinterpret_cast<float*>(dense_address(to, 0, h).at(slot)));
            };
            copy(stored[l].keys, stored[l].key_scales, stored[l].keys_rotated, wide[l].keys);
            copy(stored[l].values, stored[l].value_scales, stored[l].values_rotated, wide[l].values);
          }
      // The new token's own numbers are rounded in one cache alone, so only what comes before may be compared.
      const at::Tensor a = feed(decoder, of(stored), {}, {ids[32]}, 32), b = feed(decoder, of(wide), {}, {ids[32]}, 32);
      EXPECT_LT(worst(a, b), dtype == Dtype::q4_0 ? 3e-2 : 3e-3);
      const at::Tensor plain = feed(decoder, of(decoder.make_cache(1, 40)), {}, ids, 0).narrow(0, 32, 1).contiguous();
      EXPECT_LT(worst(a, plain), dtype == Dtype::q4_0 ? 0.35 : 2e-2);
      EXPECT_GT(worst(a, plain), 0) << "nothing was rounded";
    }
}

TEST(QuantisedDecoder, GeneratorsCutItAndCountItsBytes) {
  Decoder decoder = make_decoder(64);
  for (const Dtype dtype : kStored) {
    SCOPED_TRACE(name_of(dtype));
    const std::int64_t slot = dtype == Dtype::i8 ? 2 * (64 + 4) : dtype == Dtype::q8_0 ? 2 * 68 : 2 * 36;
    EXPECT_EQ(bytes_of_slot(decoder.spec(), dtype), slot);
    const Request request{.prompt = some_ids(60), .new_tokens = 6};
    const auto policy = [] { return make_policy("tova,budget=24,interval=4,recent=4,sink=2,prefill=cut"); };
    const GenerationRun run = generate(decoder, policy(), {request}, {.cache_dtype = dtype});
    EXPECT_EQ(run.completions[0].kept_bytes, 24 * 2 * 2 * slot) << "24 slots of two full layers and two heads";
    // A prompt that is shared between generators is copied with its scales.
    Generator one(decoder, policy(), {.capacity = 80, .cache_dtype = dtype}),
        two(decoder, policy(), {.capacity = 80, .cache_dtype = dtype});
    Generator* const both[] = {&one, &two};
    const PromptRun prompt = Generator::run_prompt(both, request);
    for (std::size_t g = 0; g < 2; ++g) {
      both[g]->begin(prompt.sequences[g], prompt);
      while (both[g]->step()) {
      }
      EXPECT_EQ(both[g]->leave(prompt.sequences[g]).tokens, run.completions[0].tokens);
    }
  }
}

TEST(QuantisedDecoder, RefusesWhatItCannotStore) {
  Decoder odd = make_decoder(24), decoder = make_decoder(32);
  using testing::message_of;
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)odd.make_cache(1, 8, Dtype::q4_0); }).find("blocks of 32 numbers"),
            std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)odd.make_cache(1, 8, Dtype::f8_e4m3); }).find("i8, q8_0, q4_0"),
            std::string::npos);
  auto cache = decoder.make_cache(1, 8, Dtype::i8);
  cache[1].value_scales = {};
  EXPECT_NE(message_of<InvalidArgument>([&] {
              feed(decoder, of(cache), {}, {1}, 0);
            }).find("scales of the values of layer 1"),
            std::string::npos);
  decoder.use(Path::operators);
  EXPECT_NE(message_of<Unsupported>([&] {
              feed(decoder, of(decoder.make_cache(1, 8, Dtype::q8_0)), {}, {1}, 0);
            }).find("under operators"),
            std::string::npos);
}

}  // namespace
}  // namespace kvkeep::lm::quantised_decoder_test
