// SPDX-License-Identifier: Apache-2.0
// KeyDiff on a GPU against the CPU.

#include "keydiff.h"

#include "evidence_case.h"
#include "kvkeep/score/keydiff.h"

namespace kvkeep::cuda::keydiff_test {
namespace {

using KeyDiffKernel = OnDevice;

std::vector<float> on_device(const EvidenceCase& c, DeviceLayout layout = {}) {
  const DeviceEvidence there(c, layout);
  const DeviceArray<float> scores(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched));
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(keydiff_workspace_bytes(there.arguments())));
  launch_keydiff({.evidence = there.arguments(), .scores = scores.data(), .workspace = workspace.data()}, nullptr);
  return scores.download();
}

void expect_as_on_cpu(const EvidenceCase& c, DeviceLayout layout = {}) {
  WindowAttention unused;
  const Scores want = KeyDiff().score(c.evidence(), c.limits, unused);
  in_every_order([&] {
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, on_device(c, layout), want.data.data<float>(), 1e-6, 1e-5));
  });
}

TEST_F(KeyDiffKernel, AgreesWithTheCpuForEveryHeadSizeElementAndLength) {  // B25, B29
  std::uint64_t seed = 0;
  for (const std::int32_t dim : {1, 7, 64, 80, 96, 128, 192, 256})
    for (const Element keys : kStored)
      expect_as_on_cpu(EvidenceCase(
          ++seed, {.kv_heads = 2, .dim = dim, .lengths = {37, 0, 1, 32, 33}, .keys = keys, .ragged = true}));
  for (const std::int32_t length : {1023, 1024, 1025, 2300})
    expect_as_on_cpu(EvidenceCase(++seed, {.dim = 8, .lengths = {length, 40}, .keys = Element::bf16}));
}

TEST_F(KeyDiffKernel, ReadsPagesAndVectorsThatAreNotAligned) {  // B21, B24
  std::uint64_t seed = 100;
  for (const Element keys : kStored)
    for (const std::int32_t page : {0, 1, 16})
      for (const std::int64_t gap : {0, 4, 16})
        expect_as_on_cpu(EvidenceCase(++seed, {.kv_heads = 2, .dim = 48, .lengths = {50, 33}, .keys = keys}),
                         {.gap = gap, .page = page});
}

TEST_F(KeyDiffKernel, LeavesRowsAloneThatAreNotDueAndGivesNaNToTheRowOfANaN) {
  for (const Element keys : {Element::f16, Element::f8_e4m3, Element::f8_e5m2}) {
    EvidenceCase c(200, {.kv_heads = 3, .dim = 20, .lengths = {41}, .keys = keys});
    c.limits.rows[1].due = false;
    c.set_key(2, 7, 19, std::nanf(""));
    expect_as_on_cpu(c);
    EXPECT_TRUE(std::isnan(on_device(c)[2 * 41]));
  }
}

TEST_F(KeyDiffKernel, KnowsKeysOfZerosAndOppositeKeysThatCancel) {
  EvidenceCase c(250, {.dim = 24, .lengths = {64, 10}});
  for (std::int64_t t = 0; t < 64; ++t)
    for (std::int64_t d = 0; d < 24; ++d)
      c.set_key(0, t, d, (t % 2 == 0 ? 1.0F : -1.0F) * c.plain[0][static_cast<std::size_t>(d)]);
  for (std::int64_t d = 0; d < 24; ++d) c.set_key(1, 4, d, 0.0F);
  expect_as_on_cpu(c);
  const std::vector<float> got = on_device(c);
  for (std::size_t t = 0; t < 64; ++t) ASSERT_EQ(got[t], 0.0F) << "the mean direction is nothing";
  EXPECT_EQ(got[68], 0.0F);
}

TEST_F(KeyDiffKernel, GivesEqualKeysEqualBitsAndARowTheSameBitsInAnyLayout) {
  for (const Element keys : kStored) {
    EvidenceCase c(300, {.dim = 72, .lengths = {1100}, .keys = keys});
    for (const std::int64_t t : {1, 6, 300, 1099}) c.copy_key(0, 3, t);
    const std::vector<float> got = on_device(c);
    for (const std::size_t t : {1, 6, 300, 1099}) ASSERT_EQ(got[t], got[3]) << t;
    EXPECT_EQ(on_device(c, {.gap = element_bytes(keys), .page = 8}), got);
  }
}

}  // namespace
}  // namespace kvkeep::cuda::keydiff_test
