// SPDX-License-Identifier: Apache-2.0
// Rows that share one selection on a GPU: the CPU's scores, bit for bit.

#include "share.h"

#include <limits>

#include "device.h"
#include "kvkeep/policy/machine.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda::share_test {
namespace {

using ShareKernel = OnDevice;

TEST_F(ShareKernel, GivesRowsThatShareTheScoresOfTheCpu) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kMost = std::numeric_limits<float>::infinity();
  oracle::Random random(3);
  for (int round = 0; round < 40; ++round) {
    SharedRows sharing{.share = random.one_of({Sharing::layer, Sharing::per_head, Sharing::all, Sharing::all_mean}),
                       .layers = random.between(1, 3),
                       .sequences = random.between(1, 3),
                       .heads = random.between(1, 3)};
    std::vector<std::int32_t> lengths;
    std::vector<bool> due;
    for (std::int64_t s = 0; s < sharing.sequences; ++s) {
      lengths.push_back(random.one_of({0, 1, 31, 255, 256, 300, 513}));
      due.push_back(random.chance(0.8));
    }
    std::vector<Row> rows;
    std::vector<RowLimit> limits;
    std::vector<float> scores;
    for (std::int64_t r = 0; r < sharing.layers * sharing.sequences * sharing.heads; ++r) {
      const auto s = static_cast<std::size_t>(r / sharing.heads % sharing.sequences);
      Row row;
      row.length = lengths[s];
      row.first = static_cast<std::int64_t>(scores.size());
      rows.push_back(row);
      limits.push_back({.budget = 0, .due = due[s], .guarded = {}});
      for (std::int32_t t = 0; t < row.length; ++t)
        scores.push_back(random.chance(0.9) ? static_cast<float>(random.normal())
                                            : random.one_of({kNan, kMost, -kMost, 0.0F}));
    }
    // One slot at a time, members in their order.
    std::vector<float> want(scores.size(), -7);
    for (std::int64_t set = 0; set < sharing.sets(); ++set) {
      const Row& first = rows[static_cast<std::size_t>(sharing.row(set, 0))];
      if (!limits[static_cast<std::size_t>(sharing.row(set, 0))].due) continue;
      for (std::int32_t t = 0; t < first.length; ++t) {
        std::vector<std::size_t> places;
        for (std::size_t r = 0; r < rows.size(); ++r) {
          const auto one = static_cast<std::int64_t>(r), other = sharing.row(set, 0);
          const bool same_sequence =
                         one / sharing.heads % sharing.sequences == other / sharing.heads % sharing.sequences,
                     same_head = one % sharing.heads == other % sharing.heads,
                     same_layer = one / sharing.heads / sharing.sequences == other / sharing.heads / sharing.sequences;
          if (same_sequence && (same_head || sharing.share != Sharing::per_head) &&
              (same_layer || sharing.share != Sharing::layer))
            places.push_back(static_cast<std::size_t>(rows[r].first + t));
        }
        float joined = scores[places.front()];
        for (std::size_t i = 1; i < places.size(); ++i) {
          const float x = scores[places[i]];
          if (sharing.share != Sharing::all)
            joined = x + joined;
          else if (std::isnan(joined) || x > joined)
            joined = x;
        }
        if (sharing.share == Sharing::layer)
          joined *= 1.0F / static_cast<float>(places.size());
        else if (sharing.share != Sharing::all)
          joined /= static_cast<float>(places.size());
        for (const std::size_t at : places) want[at] = joined;
      }
    }
    in_every_order([&] {
      const DeviceArray<Row> device_rows(rows);
      const DeviceArray<RowLimit> device_limits(limits);
      const DeviceArray<float> from(scores), to(std::vector<float>(scores.size(), -7));
      launch_share({.rows = device_rows.data(),
                    .limits = device_limits.data(),
                    .sharing = sharing,
                    .longest = *std::max_element(lengths.begin(), lengths.end()),
                    .scores = from.data(),
                    .shared = to.data()},
                   nullptr);
      const std::vector<float> there = to.download();
      for (std::size_t t = 0; t < want.size(); ++t)
        ASSERT_TRUE(there[t] == want[t] || (std::isnan(there[t]) && std::isnan(want[t])))
            << "round " << round << ", slot " << t << ": " << there[t] << ", not " << want[t];
    });
  }
}

}  // namespace
}  // namespace kvkeep::cuda::share_test
