// SPDX-License-Identifier: Apache-2.0
// ChunkKV on a GPU: the CPU's slots, ties and NaN included.

#include "chunks.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "device.h"
#include "kvkeep/allot/chunks.h"
#include "kvkeep/torch.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda::chunks_test {
namespace {

using ChunksKernel = OnDevice;

struct Case {
  ChunksOptions options;
  Variant variant = Variant::strict;
  std::int32_t heads = 1;
  std::vector<Row> rows;
  std::vector<RowLimit> limits;
  std::vector<float> scores;
};

/// Scores with the troubles that scores have: few values, NaN, infinities, zeros of both signs, sums that depend on
/// their order.
float troubled_score(oracle::Random& random, int kind) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kMost = std::numeric_limits<float>::infinity();
  if (kind == 0) return static_cast<float>(random.normal());
  if (kind == 1) return static_cast<float>(random.between(0, 2));
  if (kind == 2)
    return random.chance(0.03) ? random.one_of({kNan, kMost, -kMost}) : random.one_of({0.0F, -0.0F, 1.0F, -1.0F});
  if (kind == 3) return static_cast<float>(random.normal()) * random.one_of({1e-30F, 1.0F, 1e30F});
  return 0.5F;
}

Case random_case(oracle::Random& random, std::initializer_list<int> lengths) {
  Case c;
  c.options.chunk = random.one_of({1, 2, 7, 16, 20, 64, 1000, std::numeric_limits<std::int32_t>::max()});
  c.options.heads = random.one_of({ChunksOptions::Heads::shared, ChunksOptions::Heads::own});
  c.variant = random.one_of({Variant::strict, Variant::official});
  c.heads = random.one_of({1, 2, 3, 8});
  const bool shared = c.options.heads == ChunksOptions::Heads::shared;
  for (int g = random.between(1, 3); g > 0; --g) {
    const std::int32_t length = random.one_of(lengths), budget = random.between(0, length + 1);
    const bool due = length > budget && random.chance(0.9);
    const int kind = random.between(0, 4);
    for (std::int32_t h = 0; h < c.heads; ++h) {
      Row row;
      row.head = h;
      row.length = shared ? length : random.between(0, length);
      row.first = static_cast<std::int64_t>(c.scores.size());
      RowLimit limit{budget, shared ? due : row.length > budget && random.chance(0.9), {}};
      limit.guarded = protect(row.length, budget, random.between(0, 6), random.between(0, 40), c.variant);
      for (std::int32_t t = 0; t < row.length; ++t) c.scores.push_back(troubled_score(random, kind));
      c.rows.push_back(row);
      c.limits.push_back(limit);
    }
  }
  return c;
}

void compare(const Case& c, const std::string& what) {
  const ModelSpec spec{.query_heads = c.heads,
                       .kv_heads = c.heads,
                       .key_dim = 4,
                       .value_dim = 4,
                       .softmax_scale = 0,
                       .rope = {},
                       .layers = std::vector<LayerSpec>(1)};
  RowTable table;
  table.rows = c.rows;
  table.slots = static_cast<std::int64_t>(c.scores.size());
  for (std::size_t r = 0; r < c.rows.size(); r += static_cast<std::size_t>(c.heads)) {
    table.groups.emplace_back();
    table.groups.back().first_row = static_cast<std::int64_t>(r);
  }
  Decision decision;
  decision.scores.data =
      at::from_blob(const_cast<float*>(c.scores.data()), {table.slots}, at::TensorOptions().dtype(at::kFloat));
  WindowAttention unused;
  Chunks(c.options).allot({.spec = spec, .table = table}, {c.variant, {}, c.limits}, decision.scores, unused, decision);
  const KeepSet& keep = *decision.keep;
  const std::vector<std::int32_t> wanted(keep.slots.data<std::int32_t>(),
                                         keep.slots.data<std::int32_t>() + keep.slots.numel());
  in_every_order([&] {
    const DeviceArray<Row> rows(c.rows);
    const DeviceArray<RowLimit> limits(c.limits);
    const DeviceArray<float> scores(c.scores);
    const DeviceArray<std::int64_t> indptr(keep.indptr);
    const DeviceArray<std::int32_t> slots(wanted.size());
    ChunksArguments a;
    a.options = c.options;
    a.variant = c.variant;
    a.rows = rows.data();
    a.limits = limits.data();
    a.count = static_cast<std::int32_t>(c.rows.size());
    a.heads = c.heads;
    for (const Row& row : c.rows) a.longest = std::max(a.longest, row.length);
    a.slots_in_all = table.slots;
    a.scores = scores.data();
    a.indptr = indptr.data();
    a.slots = slots.data();
    const DeviceArray<std::byte> workspace(static_cast<std::size_t>(chunks_workspace_bytes(a)));
    a.workspace = workspace.data();
    launch_chunks(a, nullptr);
    ASSERT_EQ(slots.download(), wanted) << what << ", chunk " << c.options.chunk << ", heads " << c.heads;
  });
}

TEST_F(ChunksKernel, KeepsTheSlotsThatTheCpuKeeps) {
  oracle::Random random(31);
  for (int round = 0; round < 300; ++round)
    compare(random_case(random, {0, 1, 2, 19, 20, 21, 63, 64, 65, 127, 256, 257, 600}),
            "round " + std::to_string(round));
}

TEST_F(ChunksKernel, TakesRowsThatNeedTheLargestBlock) {
  oracle::Random random(32);
  for (int round = 0; round < 8; ++round)
    compare(random_case(random, {4096, 4097, 70001}), "round " + std::to_string(round));
}

TEST_F(ChunksKernel, KnowsMoreSlotsOfOneScoreThanTheirNumbersHaveLowDigits) {
  Case c;
  c.options.chunk = 1;
  c.rows.resize(1);
  c.rows[0].length = 66000;
  c.scores.assign(66000, 1.0F);
  c.limits = {{300, true, {4, 32}}};
  compare(c, "all alike");
}

TEST_F(ChunksKernel, RefusesChunksOfNothing) {
  EXPECT_THROW(launch_chunks({{}, {.chunk = 0}}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::chunks_test
