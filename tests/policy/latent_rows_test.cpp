// SPDX-License-Identifier: Apache-2.0
// Latent rows (MLA) under every policy: values within keys, and what else a slot has.

#include <gtest/gtest.h>

#include "kvkeep/keeper/copy_rows.h"
#include "latent_engine.h"
#include "message_of.h"

namespace kvkeep::latent_rows_test {
namespace {

using testing::LatentEngine;
using testing::LatentForm;

TEST(LatentRows, KeepTheSlotsOfRowsWhoseValuesLieApartUnderEveryPolicy) {
  for (const char* policy : testing::kLatentPolicies)
    for (const bool leading : {true, false})
      for (const std::int32_t page_size : {0, 8}) {
        SCOPED_TRACE(text(policy, leading ? ", first numbers" : ", last numbers", ", page size ", page_size));
        LatentEngine within(policy, {.leading = leading, .page_size = page_size}),
            apart(policy, {.leading = leading, .apart = true});
        ASSERT_NO_FATAL_FAILURE(testing::expect_same_slots(within, apart, 30));
      }
}

TEST(LatentRows, OfSixteenBitsMoveOnceToo) {
  for (const Dtype dtype : {Dtype::f16, Dtype::bf16})
    for (const char* policy : {"tova,budget=32,interval=8", "cur,budget=32,interval=8"}) {
      LatentEngine within(policy, {.page_size = 16, .dtype = dtype}), apart(policy, {.apart = true, .dtype = dtype});
      ASSERT_NO_FATAL_FAILURE(testing::expect_same_slots(within, apart, 20)) << policy;
    }
}

TEST(LatentRows, AreCopiedAndRestoredWithWhatElseTheyHave) {
  LatentEngine engine("tova,budget=32,interval=8", {.page_size = 8});
  for (int n = 0; n < 20; ++n) engine.step(n == 0 ? 60 : 1);
  std::vector<std::int32_t> lengths = engine.lengths;
  const CacheView view{.sequences = {&LatentEngine::kId, 1},
                       .lengths = {lengths, LatentEngine::kLayers},
                       .block_table = testing::Array::of(engine.pages).unsqueeze(0)};
  const std::vector<std::byte> bytes = copy_rows(LatentEngine::model(), engine.layers, view, 0);
  EXPECT_EQ(std::ssize(bytes), std::int64_t{lengths[0] + lengths[1]} * engine.slot_bytes() / LatentEngine::kLayers);
  for (const LayerKv& layer : engine.layers)
    for (const Tensor& side : {std::get<PagedKv>(layer).keys, std::get<PagedKv>(layer).extra})
      testing::Array(side).fill_(0);
  restore_rows(LatentEngine::model(), engine.layers, view, 0, bytes);
  engine.expect_holds();
}

TEST(LatentRows, RefuseToFoldWhatElseTheyHave) {
  ModelSpec spec = LatentEngine::model();
  spec.key_dim = 16;
  Keeper keeper(spec, make_policy("tova,budget=32,interval=8,rest=fold"), {.reads_folded = true});
  const auto rows = [](std::int64_t dim) { return testing::Array::zeros({1, 1, 64, dim}, Dtype::f32); };
  std::vector<LayerKv> layers(2, DenseKv{rows(16), rows(16)});
  layers[1] = engines::with_extra(DenseKv{rows(16), rows(16)}, rows(2));
  layers[0] = DenseKv{rows(16), rows(16)};
  EXPECT_EQ(testing::message_of<Unsupported>([&] { keeper.bind(layers); }),
            "bind: layer 1 has extras, which folded spans do not hold; allowed layers without extras under policy "
            "tova, which folds");
}

}  // namespace
}  // namespace kvkeep::latent_rows_test
