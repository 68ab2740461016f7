// SPDX-License-Identifier: Apache-2.0
// Compaction: opaque bytes, in place, in order; nothing else is touched.

#include <gtest/gtest.h>

#include "arrays.h"
#include "kvkeep/keep/compact.h"
#include "oracle/random_case.h"

namespace kvkeep::compact_test {
namespace {

using testing::Array;
using testing::whole_numbers;

std::vector<std::int32_t> random_keep(oracle::Random& random, std::int32_t length) {
  std::vector<std::int32_t> kept;
  const double share = random.unit();
  for (std::int32_t t = 0; t < length; ++t)
    if (random.chance(share)) kept.push_back(t);
  return kept;
}

TEST(Compact, MovesExactlyTheKeptBytesForAnyDtypeHeadSizeAndStride) {  // B21, B24, B25
  oracle::Random random(7);
  for (const auto dtype : {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::i8, Dtype::u8})
    for (const std::int64_t dim : {1, 3, 64, 80, 96, 128, 192, 256})
      for (const std::int64_t length : {0, 1, 2, 17, 64, 127, 128, 129}) {
        const std::int64_t capacity = length + 3;
        // A transposed parent ([B, capacity, H, D]) and an odd offset: strided, misaligned rows with canaries around.
        Array parent = whole_numbers(random, 100, {2, capacity, 3, dim + 1}, dtype);
        Array keys = parent.permute({0, 2, 1, 3}).narrow(3, 1, dim);
        const Array before = keys.clone(), parent_before = parent.clone();
        const auto kept = random_keep(random, static_cast<std::int32_t>(length));
        const auto bytes = static_cast<std::int64_t>(keys.element_size());
        compact_slots({static_cast<std::byte*>(keys[1][2].bytes()), keys.stride(2) * bytes, dim * bytes}, kept);
        const auto n = static_cast<std::int64_t>(kept.size());
        ASSERT_TRUE(keys[1][2].narrow(0, 0, n).equal(gather(before[1][2], 0, kept)));
        ASSERT_TRUE(keys[1][2].narrow(0, length, 3).equal(before[1][2].narrow(0, length, 3)))
            << "slots past the row are canaries";
        ASSERT_TRUE(keys[0].equal(before[0])) << "another sequence's rows";
        ASSERT_TRUE(parent.narrow(3, 0, 1).equal(parent_before.narrow(3, 0, 1))) << "bytes between the rows";
      }
}

/// Moves of more than the caches hold are written past them.
TEST(Compact, MovesWhatDoesNotFitInTheCaches) {
  constexpr std::int32_t kSlots = 1 << 18;
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = 1, spec.key_dim = spec.value_dim = 32;
  spec.layers.resize(1);
  oracle::Random random(8);
  const auto rows = [&] { return whole_numbers(random, 1 << 20, {1, 1, kSlots, 32}); };
  std::vector<LayerKv> layers{DenseKv{rows(), rows()}};
  const Array keys = Array(std::get<DenseKv>(layers[0]).keys), before = keys.clone();
  const SequenceId id = 0;
  std::int32_t length = kSlots;
  const std::int32_t first[] = {0};
  const RowTable table = make_rows(spec, layers, {{&id, 1}, {{&length, 1}}}, first, first);
  std::vector<std::int32_t> odd;
  for (std::int32_t slot = 1; slot < kSlots; slot += 2) odd.push_back(slot);
  const KeepSet keep{Array::of(odd), {0, std::ssize(odd)}};
  ASSERT_GT(bytes_to_move(table, keep), 16 << 20);
  compact(table, keep);
  EXPECT_TRUE(keys[0][0].narrow(0, 0, std::ssize(odd)).equal(gather(before[0][0], 0, odd)));
}

TEST(Compact, RefusesSlotsThatDoNotAscendBeforeTheFirstByteMoves) {
  ModelSpec spec{.query_heads = 1,
                 .kv_heads = 1,
                 .key_dim = 4,
                 .value_dim = 4,
                 .softmax_scale = 0,
                 .rope = {},
                 .layers = std::vector<LayerSpec>(2)};
  oracle::Random random(9);
  const auto rows = [&] { return whole_numbers(random, 100, {1, 1, 8, 4}); };
  std::vector<LayerKv> layers{DenseKv{rows(), rows()}, DenseKv{rows(), rows()}};
  const SequenceId id = 0;
  std::int32_t length = 8;
  const std::int32_t all[] = {0, 1}, due[] = {0};
  const RowTable table = make_rows(spec, layers, {{&id, 1}, {{&length, 1}}}, all, due);
  const Array before = Array(std::get<DenseKv>(layers[0]).keys).clone();
  for (const std::vector<std::int32_t>& bad :
       {std::vector<std::int32_t>{3, 4, 5, 5}, {3, 4, 6, 5}, {3, 4, 5, 8}, {3, 4, -1, 2}}) {
    EXPECT_THROW(compact(table, {Array::of(bad), {0, 2, 4}}), InvalidArgument);  // the second row is the bad one
    EXPECT_TRUE(Array(std::get<DenseKv>(layers[0]).keys).equal(before));
  }
}

}  // namespace
}  // namespace kvkeep::compact_test
