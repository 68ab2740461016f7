// SPDX-License-Identifier: Apache-2.0
// TriAttention on a GPU against the CPU: both aggregates, both groups, both deviations.

#include "triattention.h"

#include "evidence_case.h"

namespace kvkeep::cuda::triattention_test {
namespace {

using TriAttentionKernel = OnDevice;

Calibration calibration_of(const EvidenceCase& c, std::uint64_t seed) {
  oracle::Random random(seed);
  Calibration calibration;
  calibration.head_dim = c.shape.dim;
  calibration.rope_style = c.shape.style;
  for (std::int32_t l = 0; l < c.spec.num_layers(); ++l)
    for (std::int32_t h = 0; h < c.spec.query_heads; ++h) {
      Calibration::Head& head = calibration.heads[{l, h}];
      for (std::int32_t f = 0; f < c.shape.dim / 2; ++f) {
        head.q_mean.emplace_back(static_cast<float>(random.normal()), static_cast<float>(random.normal()));
        head.q_abs_mean.push_back(std::abs(head.q_mean.back()) + static_cast<float>(random.unit()));
      }
    }
  return calibration;
}

std::vector<float> on_device(const EvidenceCase& c, const Calibration& calibration, const TriAttentionOptions& options,
                             DeviceLayout layout = {}) {
  const DeviceEvidence there(c, layout);
  std::vector<float> mean, modulus;
  for (const auto& [at, head] : calibration.heads) {
    for (const std::complex<float> q : head.q_mean) mean.push_back(q.real()), mean.push_back(q.imag());
    modulus.insert(modulus.end(), head.q_abs_mean.begin(), head.q_abs_mean.end());
  }
  std::vector<std::int32_t> next;
  for (const RowGroup& group : c.table.groups) next.push_back(group.next_position);
  const DeviceArray<float> means(mean), moduli(modulus),
      scores(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched));
  const DeviceArray<std::int32_t> positions(next);
  TriAttentionArguments arguments{.evidence = there.arguments(),
                                  .next_positions = positions.data(),
                                  .q_mean = means.data(),
                                  .q_abs_mean = moduli.data(),
                                  .options = options,
                                  .slots = c.table.slots,
                                  .scores = scores.data()};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(triattention_workspace_bytes(arguments)));
  arguments.workspace = workspace.data();
  launch_triattention(arguments, nullptr);
  return scores.download();
}

/// Rows want one slot that counts, or several: where two lie close together, normalising makes much of how each machine
/// rounds.
void expect_as_on_cpu(const EvidenceCase& c, const TriAttentionOptions& options, DeviceLayout layout = {}) {
  const Calibration calibration = calibration_of(c, 7);
  WindowAttention unused;
  const Scores want = TriAttention(calibration, options).score(c.evidence(), c.limits, unused);
  in_every_order([&] {
    ASSERT_NO_FATAL_FAILURE(
        expect_rows_agree(c, on_device(c, calibration, options, layout), want.data.data<float>(), 3e-5, 3e-5, false));
  });
}

using Aggregate = TriAttentionOptions::Aggregate;

TEST_F(TriAttentionKernel, AgreesWithTheCpuForEveryHeadSizeGroupAndElement) {  // B15, B25
  std::uint64_t seed = 0;
  for (const auto aggregate : {Aggregate::mean, Aggregate::max}) {
    for (const std::int32_t dim : {2, 6, 64, 80, 96, 128, 192, 256})
      for (const Element keys : kStored) {
        ++seed;
        expect_as_on_cpu(EvidenceCase(seed, {.group = 2,
                                             .dim = dim,
                                             .lengths = {37, 9},
                                             .keys = keys,
                                             .style = seed % 2 == 0 ? RopeStyle::half : RopeStyle::interleaved}),
                         {.aggregate = aggregate, .offset_max = 300});
      }
    for (const std::int32_t group : {1, 3, 4, 7, 8}) {
      ++seed;
      expect_as_on_cpu(EvidenceCase(seed, {.group = group,
                                           .kv_heads = 2,
                                           .dim = 16,
                                           .lengths = {45, 17},
                                           .keys = kStored[seed % std::size(kStored)],
                                           .pre_rope = true,
                                           .ragged = true}),
                       {.aggregate = aggregate});
    }
  }
}

TEST_F(TriAttentionKernel, TurnsEveryLayerByFrequenciesOfItsOwn) {
  for (const std::int32_t dim : {2, 16, 96})
    for (const auto style : {RopeStyle::half, RopeStyle::interleaved})
      expect_as_on_cpu(EvidenceCase(static_cast<std::uint64_t>(dim), {.group = 2,
                                                                      .kv_heads = 2,
                                                                      .dim = dim,
                                                                      .lengths = {37, 9, 21, 5},
                                                                      .keys = kStored[dim % std::size(kStored)],
                                                                      .style = style,
                                                                      .ropes = oracle::Ropes::same_pairs}),
                       {.normalize = false, .offset_max = 300});
}

TEST_F(TriAttentionKernel, KnowsEveryWayToShareAndNormalise) {
  std::uint64_t seed = 100;
  for (const auto group : {TriAttentionOptions::Group::max, TriAttentionOptions::Group::mean})
    for (const auto deviation : {TriAttentionOptions::Deviation::population, TriAttentionOptions::Deviation::sample})
      for (const bool normalize : {false, true})
        expect_as_on_cpu(EvidenceCase(++seed, {.group = 3,
                                               .kv_heads = 2,
                                               .dim = 20,
                                               .lengths = {60, 1, 0, 9},
                                               .keys = Element::bf16,
                                               .ragged = true}),
                         {.normalize = normalize, .group = group, .deviation = deviation});
}

TEST_F(TriAttentionKernel, AgreesWithTheCpuForEveryLength) {  // B29
  std::uint64_t seed = 200;
  for (const std::int32_t length : {1, 63, 64, 65, 127, 128, 129, 1025})
    expect_as_on_cpu(EvidenceCase(++seed, {.dim = 8, .lengths = {length, 5}, .keys = Element::f16}), {});
}

TEST_F(TriAttentionKernel, ReadsPagesAndVectorsThatAreNotAligned) {  // B21, B24
  std::uint64_t seed = 300;
  for (const Element keys : kStored)
    for (const std::int32_t page : {0, 1, 16})
      for (const std::int64_t gap : {0, 4, 16})
        expect_as_on_cpu(EvidenceCase(++seed, {.group = 2, .dim = 48, .lengths = {50, 33}, .keys = keys}), {},
                         {.gap = gap, .page = page});
}

TEST_F(TriAttentionKernel, LeavesRowsAloneThatAreNotDueAndKeysThatAreNoNumbersOutOfTheNormalisation) {
  for (const auto aggregate : {Aggregate::mean, Aggregate::max})
    for (const Element keys : {Element::f16, Element::f8_e4m3, Element::f8_e5m2}) {
      EvidenceCase c(400, {.group = 2, .kv_heads = 3, .dim = 24, .lengths = {41}, .keys = keys});
      c.limits.rows[1].due = false;
      c.set_key(2, 7, 19, std::nanf(""));
      expect_as_on_cpu(c, {.aggregate = aggregate});
    }
}

TEST_F(TriAttentionKernel, GivesEqualKeysEqualBits) {
  for (const Element keys : kStored) {
    EvidenceCase c(500, {.group = 2, .dim = 72, .lengths = {300}, .keys = keys});
    for (const std::int64_t t : {1, 6, 130, 299}) c.copy_key(0, 3, t);
    const Calibration calibration = calibration_of(c, 7);
    const std::vector<float> got = on_device(c, calibration, {});
    for (const std::size_t t : {1, 6, 130, 299}) ASSERT_EQ(got[t], got[3]) << t;
    EXPECT_EQ(on_device(c, calibration, {}, {.gap = element_bytes(keys), .page = 8}), got);
  }
}

TEST_F(TriAttentionKernel, RefusesWhatItCannotScore) {
  EXPECT_THROW(launch_triattention({.evidence = {.dim = 258}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_triattention({.evidence = {.dim = 9}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_triattention({.evidence = {.dim = 8}, .options = {.offset_max = 0}}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::triattention_test
