// SPDX-License-Identifier: Apache-2.0
// What an event needs before anything is scored, on a GPU: window queries turned as on the CPU, and the newest
// positions at the end of the columns.

#include "prepare.h"

#include "evidence_case.h"

namespace kvkeep::cuda::prepare_test {
namespace {

using Prepare = OnDevice;

/// What the CPU reads, [groups, Hq, W, D]; zeros where a group holds fewer.
std::vector<float> on_cpu(const EvidenceCase& c, std::int32_t window) {
  std::vector<float> out;
  std::vector<float> q(static_cast<std::size_t>(c.shape.dim)), cosines(q.size()), sines(q.size());
  for (const RowGroup& group : c.table.groups) {
    const RopeSpec& rope = c.spec.rope_of(group.layer);
    for (std::int32_t h = 0; h < c.spec.query_heads; ++h)
      for (std::int32_t i = group.queries.count - window; i < group.queries.count; ++i) {
        std::fill(q.begin(), q.end(), 0.0F);
        for (std::int32_t d = 0; i >= 0 && d < c.shape.dim; ++d) {
          const std::byte* at = group.queries.at(i, h) + d * element_bytes(c.shape.query);
          if (c.shape.query == Element::f16)
            q[static_cast<std::size_t>(d)] = *reinterpret_cast<const c10::Half*>(at);
          else if (c.shape.query == Element::bf16)
            q[static_cast<std::size_t>(d)] = *reinterpret_cast<const c10::BFloat16*>(at);
          else
            q[static_cast<std::size_t>(d)] = *reinterpret_cast<const float*>(at);
        }
        if (i >= 0 && c.shape.pre_rope) {
          rope_at(rope, group.queries.position(i), cosines.data(), sines.data());
          rope_rotate(rope.style, rope.rotary_dim() / 2, cosines.data(), sines.data(), q.data());
        }
        out.insert(out.end(), q.begin(), q.end());
      }
  }
  return out;
}

TEST_F(Prepare, TurnsQueriesAsTheCpuDoes) {  // B16
  std::uint64_t seed = 0;
  for (const Element element : {Element::f32, Element::f16, Element::bf16})
    for (const bool pre_rope : {false, true})
      for (const RopeStyle style : {RopeStyle::half, RopeStyle::interleaved})
        for (const std::int32_t dim : {1, 7, 64, 96}) {
          const EvidenceCase c(++seed, {.group = 3,
                                        .kv_heads = 2,
                                        .dim = dim,
                                        .lengths = {40, 2, 9},
                                        .seen = 5,
                                        .query = element,
                                        .pre_rope = pre_rope,
                                        .style = style,
                                        .pairs = dim / 4 + dim / 5,
                                        .ropes = oracle::Ropes::any});
          for (const std::int32_t window : {1, 4, 7}) {
            const std::vector<float> want = on_cpu(c, window);
            in_every_order([&] {
              const DeviceEvidence there(c);
              const DeviceArray<float> out(want.size());
              launch_prepare({.evidence = there.arguments(),
                              .newest = nullptr,
                              .window = window,
                              .windows = nullptr,
                              .queries = out.data(),
                              .turn = pre_rope},
                             nullptr);
              const std::vector<float> got = out.download();
              for (std::size_t i = 0; i < want.size(); ++i)
                ASSERT_NEAR(got[i], want[i], 1e-6) << "at " << i << "; " << c.description();
            });
          }
        }
}

TEST_F(Prepare, WritesTheNewestPositionsBehindThoseThatStayed) {
  // Three rows of two lengths; runs with gaps, longer than a block has threads.
  const std::vector<std::int32_t> lengths{210, 207, 210};
  constexpr std::int32_t kNewest = 205, kRoom = 220;
  std::vector<PositionRun> runs{{50, 200}, {400, 1}, {402, 4}};
  std::vector<std::int32_t> tail;
  for (const PositionRun& run : runs)
    for (std::int32_t i = 0; i < run.count; ++i) tail.push_back(run.position + i);
  in_every_order([&] {
    const DeviceArray<std::int32_t> columns(std::vector<std::int32_t>(lengths.size() * kRoom, -7));
    std::vector<Row> rows(lengths.size());
    for (std::size_t r = 0; r < rows.size(); ++r) {
      rows[r].length = lengths[r];
      rows[r].positions = columns.data() + r * kRoom;
    }
    const DeviceArray<Row> there(rows);
    const DeviceArray<PositionRun> runs_there(runs);
    const DeviceArray<NewestPositions> newest(std::vector<NewestPositions>{{runs_there.data(), 3, kNewest}});
    launch_prepare({.evidence = {.rows = there.data(), .count = 3, .longest = 210, .kv_heads = 3, .dim = 8},
                    .newest = newest.data(),
                    .windows = nullptr,
                    .queries = nullptr},
                   nullptr);
    const std::vector<std::int32_t> got = columns.download();
    for (std::size_t r = 0; r < rows.size(); ++r)
      for (std::int32_t t = 0; t < kRoom; ++t) {
        const std::int32_t i = t - (lengths[r] - kNewest);
        ASSERT_EQ(got[r * kRoom + static_cast<std::size_t>(t)],
                  i >= 0 && t < lengths[r] ? tail[static_cast<std::size_t>(i)] : -7)
            << "row " << r << ", slot " << t;
      }
  });
}

TEST_F(Prepare, RefusesWhatItCannotTurn) {
  EXPECT_THROW(launch_prepare({.evidence = {.dim = 257}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_prepare({.evidence = {.dim = 8}, .turn = true}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_prepare({.evidence = {.dim = 8, .query = Element::f8_e4m3}}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::prepare_test
