// SPDX-License-Identifier: Apache-2.0
// The reference decoder on pages: the same bits as on a dense cache.

#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>

#include "kvkeep/core/error.h"
#include "kvkeep/keep/paged_sequences.h"
#include "kvkeep/policy/registry.h"
#include "kvlab/generation.h"
#include "oracle/random_case.h"

namespace kvkeep::lm::paged_decoder_test {
namespace {

using Ints = std::vector<std::int32_t>;

/// A small random model that lives as long as the program.
Decoder& decoder_of(Dtype dtype, bool sliding) {
  static std::map<std::pair<Dtype, bool>, std::unique_ptr<Decoder>> made;
  auto& decoder = made[{dtype, sliding}];
  if (decoder) return *decoder;
  const auto folder = std::filesystem::temp_directory_path() / text("kvkeep_paged_", ::getpid(), "_", made.size());
  std::filesystem::create_directories(folder);
  io::ModelConfig config = io::ModelConfig::shape(io::Architecture::qwen2, 3, 72, 104, 6, 2, 20, 90);
  if (sliding) config.spec.layers[1] = {LayerKind::sliding, 11, -1};
  write_random_checkpoint(folder, config, 21, dtype);
  decoder = std::make_unique<Decoder>(Decoder::open(folder));
  std::filesystem::remove_all(folder);  // mapped files stay readable
  return *decoder;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

class PagedDecoder : public ::testing::TestWithParam<Dtype> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, PagedDecoder, ::testing::Values(Dtype::f32, Dtype::f16, Dtype::bf16),
                         [](const auto& p) { return std::string(name_of(p.param)); });

TEST_P(PagedDecoder, GivesTheSameBitsOnPagesOfAnySizeAsOnADenseCache) {
  constexpr std::int32_t kSequences = 3, kCapacity = 90;
  Decoder& decoder = decoder_of(GetParam(), true);
  const Ints parts[kSequences] = {{1, 40, 1, 1}, {63, 1, 5, 1}, {16, 2, 1, 30}};  // new tokens a step
  for (const std::int32_t page_size : {1, 2, 8, 16, 32, 128})
    for (const PageLayout layout : {PageLayout::slot_head, PageLayout::head_slot}) {
      oracle::Random random(static_cast<std::uint64_t>(page_size));
      const auto dense = decoder.make_cache(kSequences, kCapacity, GetParam());
      const std::int32_t pages = kSequences * (kCapacity + page_size - 1) / page_size + 6;
      const auto paged = decoder.make_pages(pages, page_size, GetParam(), layout);
      for (const LayerKv& layer : paged) torch_tensor(std::get<PagedKv>(layer).keys).fill_(NAN);
      PagePool pool(pages, page_size);
      PagedSequences sequences(pool);
      const std::vector<SequenceId> ids{5, 6, 7};
      for (const SequenceId id : ids) ASSERT_TRUE(sequences.admit(id, 0).given());
      Ints done(kSequences, 0);
      for (std::size_t step = 0; step < 4; ++step) {
        Ints tokens, positions, indptr{0}, rows(kSequences);
        for (std::size_t s = 0; s < kSequences; ++s) {
          for (std::int32_t t = 0; t < parts[s][step]; ++t) {
            tokens.push_back(random.between(0, 89));
            positions.push_back(done[s] + t);
          }
          indptr.push_back(static_cast<std::int32_t>(tokens.size()));
        }
        for (const std::size_t s : {2, 0, 1}) ASSERT_TRUE(sequences.append(ids[s], parts[s][step]).given());
        std::iota(rows.begin(), rows.end(), 0);
        StepOptions all;
        all.logits = Logits::all;
        const at::Tensor expected = decoder.forward({tokens, indptr, positions, rows, done}, dense, all);
        const at::Tensor found =
            decoder.forward({tokens, indptr, positions, rows, done}, paged, sequences.table(ids), all);
        ASSERT_TRUE(same_bits(expected, found)) << "step " << step << ", pages of " << page_size;
        for (std::size_t s = 0; s < kSequences; ++s) done[s] += parts[s][step];
      }
      for (std::size_t l = 0; l < dense.size(); ++l)
        for (std::int64_t s = 0; s < kSequences; ++s)
          for (std::int64_t t = 0; t < done[static_cast<std::size_t>(s)]; ++t) {
            const auto& kv = std::get<PagedKv>(paged[l]);
            const at::Tensor page = torch_tensor(
                kv.keys)[sequences.pages(ids[static_cast<std::size_t>(s)])[static_cast<std::size_t>(t / page_size)]];
            ASSERT_TRUE(same_bits(torch_tensor(dense[l].keys)[s].select(1, t),
                                  page.select(layout == PageLayout::slot_head ? 0 : 1, t % page_size)))
                << l << " " << s << " " << t;
          }
    }
}

TEST_P(PagedDecoder, GeneratesTheSameTokensLogitsAndEventsUnderAPolicy) {
  Decoder& decoder = decoder_of(GetParam(), false);
  for (const char* policy : {"ams-tova,budget=24,interval=8,recent=4,window=4,min_segment=2,max_segment=8",
                             "adakv-snapkv,budget=24,interval=8,window=8"}) {
    const auto run = [&](std::int32_t page_size) {
      std::vector<Request> requests;
      for (std::int32_t r = 0; r < 3; ++r) {
        Request request{.prompt = {}, .new_tokens = 40 + r, .keep_logits = true, .keep_positions = true};
        for (std::int32_t t = 0; t < 20 + 13 * r; ++t) request.prompt.push_back((t * 7 + r * 31) % 90);
        requests.push_back(std::move(request));
      }
      GeneratorOptions options;
      options.places = 2;
      options.cache_dtype = GetParam();
      options.page_size = page_size;
      return generate(decoder, make_policy(policy), std::move(requests), options);
    };
    const GenerationRun dense = run(0);
    EXPECT_GE(dense.totals.events, 5);
    for (const std::int32_t page_size : {1, 4, 16, 64}) {
      const GenerationRun paged = run(page_size);
      for (std::size_t r = 0; r < 3; ++r) {
        EXPECT_EQ(dense.completions[r].tokens, paged.completions[r].tokens);
        EXPECT_TRUE(same_bits(dense.completions[r].logits, paged.completions[r].logits))
            << policy << ", pages of " << page_size;
        ASSERT_EQ(dense.completions[r].events.size(), paged.completions[r].events.size());
        for (std::size_t e = 0; e < dense.completions[r].events.size(); ++e)
          EXPECT_EQ(dense.completions[r].events[e].positions, paged.completions[r].events[e].positions);
      }
    }
  }
}

TEST(PagedStep, RefusesABadTableBeforeAnythingIsWritten) {
  Decoder& decoder = decoder_of(Dtype::f32, true);
  const auto good = decoder.make_pages(6, 4);
  const auto clear = [&] {
    for (const LayerKv& layer : good)
      torch_tensor(std::get<PagedKv>(layer).keys).fill_(7), torch_tensor(std::get<PagedKv>(layer).values).fill_(7);
  };
  clear();
  const auto table_of = [](const std::vector<Ints>& rows) {
    at::Tensor table = at::full({static_cast<std::int64_t>(rows.size()), static_cast<std::int64_t>(rows[0].size())}, -1,
                                at::TensorOptions().dtype(at::kInt));
    for (std::size_t i = 0; i < rows.size(); ++i)
      std::copy(rows[i].begin(), rows[i].end(), table.data_ptr<std::int32_t>() + i * rows[0].size());
    return table;
  };
  const at::Tensor fine = table_of({{0, 1, -1}, {2, 3, 4}});
  const Ints ids{1, 2, 3}, indptr{0, 2, 3}, positions{5, 6, 8}, rows{0, 1}, lengths{5, 8};
  const auto refused = [&](const std::vector<LayerKv>& cache, const at::Tensor& table, const char* named) {
    try {
      static_cast<void>(decoder.forward({ids, indptr, positions, rows, lengths}, cache, table));
      ADD_FAILURE() << "accepted, should name " << named;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  };
  refused(good, at::Tensor(), "needs a block table");
  refused(good, fine.to(at::kFloat), "needs a block table");
  refused(good, fine.t(), "needs a block table");
  refused(good, table_of({{0, 1, -1}}), "rows for 2 sequences");
  refused(good, table_of({{0, 1}, {2, 3}}), "full");
  refused(good, table_of({{0, -1, -1}, {2, 3, 4}}), "page 1 of sequence 0 is -1");
  refused(good, table_of({{6, 1, -1}, {2, 3, 4}}), "page 0 of sequence 0 is 6");
  refused(good, table_of({{0, 4, -1}, {2, 3, 4}}), "page 4 would be written for sequence 0");
  const auto damaged = [&](const std::function<void(std::vector<LayerKv>&)>& damage) {
    std::vector<LayerKv> cache = good;
    damage(cache);
    return cache;
  };
  refused(damaged([](auto& cache) { cache[1] = DenseKv{}; }), fine, "layer 1 is dense");
  refused(damaged([](auto& cache) { cache[2] = std::monostate{}; }), fine, "layer 2 is without rows");
  refused(damaged([&](auto& cache) { cache[1] = decoder.make_pages(12, 2)[1]; }), fine, "hold 2 slots");
  refused(damaged([&](auto& cache) { cache[1] = decoder.make_pages(3, 4)[1]; }), fine, "allowed 0 to 2");
  refused(decoder.make_pages(6, 1025), fine, "allowed 1 to 1024");
  for (const LayerKv& layer : good)
    for (const at::Tensor side : {std::get<PagedKv>(layer).keys, std::get<PagedKv>(layer).values})
      EXPECT_TRUE(side.eq(7).all().item<bool>());
  const auto dense = decoder.make_cache(2, 12);
  refused({dense.begin(), dense.end()}, fine, "dense cache");
  EXPECT_NO_THROW(static_cast<void>(decoder.forward({ids, indptr, positions, rows, lengths}, good, fine)));
}

TEST(PagedGenerator, RefusesPagesWhereAPolicyWouldMoveTheSlotsOfSlidingLayers) {
  Decoder& decoder = decoder_of(Dtype::f32, true);
  GeneratorOptions options;
  options.capacity = 32;
  options.page_size = 16;
  EXPECT_THROW(Generator(decoder, make_policy("knorm,budget=24,interval=8"), options), Unsupported);
  EXPECT_NO_THROW(Generator(decoder, make_policy("full"), options));
  options.page_size = 1025;
  EXPECT_THROW(Generator(decoder, make_policy("full"), options), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::lm::paged_decoder_test
