// SPDX-License-Identifier: Apache-2.0
// Top-k on a GPU: the CPU's slots, ties and NaN included.

#include "select.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "device.h"
#include "kvkeep/keep/select.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda::select_test {
namespace {

using Select = OnDevice;

/// Scores with the troubles that scores have: few values, NaN, infinities, zeros of both signs.
std::vector<float> troubled_scores(oracle::Random& random, std::int32_t length) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kMost = std::numeric_limits<float>::infinity();
  std::vector<float> scores(static_cast<std::size_t>(length));
  const int kind = random.between(0, 4);
  for (float& s : scores) {
    if (kind == 0)
      s = static_cast<float>(random.normal());
    else if (kind == 1)
      s = static_cast<float>(random.between(0, 2));
    else if (kind == 2)
      s = 0.5F;
    else if (kind == 3)
      s = random.one_of({kNan, kMost, -kMost, 0.0F, -0.0F, 1.0F, -1.0F});
    else
      s = static_cast<float>(random.unit()) * 1e-30F;
  }
  return scores;
}

TEST_F(Select, KeepsTheSlotsThatTheCpuKeeps) {
  oracle::Random random(11);
  for (int round = 0; round < 60; ++round) {
    std::vector<Row> rows;
    std::vector<RowLimit> limits;
    std::vector<float> scores;
    std::vector<std::int64_t> indptr{0};
    std::vector<std::int32_t> wanted;
    std::int32_t longest = 0;
    for (int r = random.between(0, 6); r > 0; --r) {
      Row row;
      row.length = round % 7 == 0 ? 0 : random.one_of({1, 2, 31, 32, 33, 127, 255, 256, 257, 1000});
      row.first = static_cast<std::int64_t>(scores.size());
      longest = std::max(longest, row.length);
      RowLimit limit;
      limit.budget = random.between(0, row.length + 2);
      limit.due = row.length > limit.budget && random.chance(0.9);
      limit.guarded = protect(row.length, limit.budget, random.between(0, 6), random.between(0, 40),
                              random.one_of({Variant::strict, Variant::official}));
      const std::vector<float> own = troubled_scores(random, row.length);
      scores.insert(scores.end(), own.begin(), own.end());
      std::vector<std::int32_t> kept(
          static_cast<std::size_t>(limit.due ? std::min(row.length, limit.budget) : row.length));
      std::vector<std::uint64_t> keys;
      if (limit.due)
        select(own, limit.guarded, keys, kept);
      else
        std::iota(kept.begin(), kept.end(), 0);
      wanted.insert(wanted.end(), kept.begin(), kept.end());
      indptr.push_back(static_cast<std::int64_t>(wanted.size()));
      rows.push_back(row);
      limits.push_back(limit);
    }
    in_every_order([&] {
      const DeviceArray<Row> device_rows(rows);
      const DeviceArray<RowLimit> device_limits(limits);
      const DeviceArray<float> device_scores(scores);
      const DeviceArray<std::int64_t> device_indptr(indptr);
      const DeviceArray<std::int32_t> slots(wanted.size());
      launch_select({{.rows = device_rows.data(),
                      .limits = device_limits.data(),
                      .count = static_cast<std::int32_t>(rows.size()),
                      .longest = longest,
                      .scores = device_scores.data(),
                      .indptr = device_indptr.data(),
                      .slots = slots.data()}},
                    nullptr);
      ASSERT_EQ(slots.download(), wanted) << "round " << round;
    });
  }
}

TEST_F(Select, TakesARowThatNeedsTheLargestBlock) {
  oracle::Random random(12);
  for (const std::int32_t length : {4096, 4097, 9001}) {
    std::vector<Row> rows(1);
    rows[0].length = length;
    const std::vector<RowLimit> limits{{.budget = length / 3, .due = true, .guarded = {4, 32}}};
    const std::vector<float> scores = troubled_scores(random, length);
    std::vector<std::int32_t> wanted(static_cast<std::size_t>(length / 3));
    std::vector<std::uint64_t> keys;
    select(scores, limits[0].guarded, keys, wanted);
    const DeviceArray<Row> device_rows(rows);
    const DeviceArray<RowLimit> device_limits(limits);
    const DeviceArray<float> device_scores(scores);
    const DeviceArray<std::int64_t> indptr(std::vector<std::int64_t>{0, length / 3});
    const DeviceArray<std::int32_t> slots(wanted.size());
    launch_select({{.rows = device_rows.data(),
                    .limits = device_limits.data(),
                    .count = 1,
                    .longest = length,
                    .scores = device_scores.data(),
                    .indptr = indptr.data(),
                    .slots = slots.data()}},
                  nullptr);
    ASSERT_EQ(slots.download(), wanted) << length;
  }
}

}  // namespace
}  // namespace kvkeep::cuda::select_test
