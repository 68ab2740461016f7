// Knorm on a GPU against the CPU.

#include "knorm.h"

#include "evidence_case.h"

namespace kvkeep::cuda::knorm_test {
namespace {

using KnormKernel = OnDevice;

std::vector<float> on_device(const EvidenceCase& c, DeviceLayout layout = {}) {
  const DeviceEvidence there(c, layout);
  const DeviceArray<float> scores(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched));
  launch_knorm({.evidence = there.arguments(), .scores = scores.data()}, nullptr);
  return scores.download();
}

void expect_as_on_cpu(const EvidenceCase& c, DeviceLayout layout = {}) {
  WindowAttention unused;
  const Scores want = Knorm().score(c.evidence(), c.limits, unused);
  in_every_order([&] {
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, on_device(c, layout), want.data.data<float>(), 1e-9, 1e-6));
  });
}

TEST_F(KnormKernel, AgreesWithTheCpuForEveryHeadSizeElementAndLength) {  // B25, B29
  std::uint64_t seed = 0;
  for (const std::int32_t dim : {1, 7, 64, 80, 96, 128, 192, 256})
    for (const Element keys : kStored)
      expect_as_on_cpu(EvidenceCase(
          ++seed, {.kv_heads = 2, .dim = dim, .lengths = {37, 0, 1, 32, 33}, .keys = keys, .ragged = true}));
  for (const std::int32_t length : {1023, 1024, 1025, 2300})
    expect_as_on_cpu(EvidenceCase(++seed, {.dim = 8, .lengths = {length}, .keys = Element::bf16}));
}

TEST_F(KnormKernel, ReadsPagesAndVectorsThatAreNotAligned) {  // B21, B24
  std::uint64_t seed = 100;
  for (const Element keys : kStored)
    for (const std::int32_t page : {0, 1, 16})
      for (const std::int64_t gap : {0, 4, 16})
        expect_as_on_cpu(EvidenceCase(++seed, {.kv_heads = 2, .dim = 48, .lengths = {50, 33}, .keys = keys}),
                         {.gap = gap, .page = page});
}

TEST_F(KnormKernel, LeavesRowsAloneThatAreNotDueAndGivesNaNForNaN) {
  for (const Element keys : {Element::f16, Element::f8_e4m3, Element::f8_e5m2}) {
    EvidenceCase c(200, {.kv_heads = 3, .dim = 20, .lengths = {41}, .keys = keys});
    c.limits.rows[1].due = false;
    c.set_key(2, 7, 19, std::nanf(""));
    expect_as_on_cpu(c);
  }
}

TEST_F(KnormKernel, GivesEqualKeysEqualBits) {
  for (const Element keys : kStored) {
    EvidenceCase c(300, {.dim = 72, .lengths = {1100}, .keys = keys});
    for (const std::int64_t t : {1, 6, 300, 1099}) c.copy_key(0, 3, t);
    const std::vector<float> got = on_device(c);
    for (const std::size_t t : {1, 6, 300, 1099}) ASSERT_EQ(got[t], got[3]) << t;
    EXPECT_EQ(on_device(c, {.gap = element_bytes(keys), .page = 8}), got);
  }
}

}  // namespace
}  // namespace kvkeep::cuda::knorm_test
