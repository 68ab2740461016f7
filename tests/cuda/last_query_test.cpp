// SPDX-License-Identifier: Apache-2.0
// Scores of the last query of prompts on a GPU against the CPU.

#include "last_query.h"

#include "asked_queries.h"
#include "kvkeep/layers/prompt_scores.h"

namespace kvkeep::cuda::last_query_test {
namespace {

using LastQueryKernel = OnDevice;

std::vector<float> on_device(const EvidenceCase& c, std::int32_t pool, DeviceLayout layout = {}) {
  const DeviceEvidence there(c, layout);
  const AskedQueries queries(c, there, 1);
  std::size_t tokens = 0;
  for (const std::int32_t length : c.shape.lengths) tokens += static_cast<std::size_t>(length);
  const DeviceArray<float> scores(std::vector<float>(tokens, kUntouched));
  LastQueryArguments a{.evidence = there.arguments(),
                       .queries = queries.floats().data(),
                       .pool = pool,
                       .slots = c.table.slots,
                       .scores = scores.data()};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(last_query_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_last_query(a, nullptr);
  return scores.download();
}

void expect_as_on_cpu(const EvidenceCase& c, std::int32_t pool, DeviceLayout layout = {}) {
  const Tensor want = last_query_scores(c.evidence(), pool);
  // A sum of products of either sign: what rounds is as large as they are, not as their sum.
  float largest = 0;
  for (std::int64_t i = 0; i < want.numel(); ++i) largest = std::max(largest, std::abs(want.data<float>()[i]));
  in_every_order([&] {
    const std::vector<float> got = on_device(c, pool, layout);
    ASSERT_EQ(static_cast<std::int64_t>(got.size()), want.numel());
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(got[i], want.data<float>()[i], 2e-5 * static_cast<double>(largest))
          << "token " << i << ", pool " << pool << "; " << c.description();
  });
}

TEST_F(LastQueryKernel, AgreesWithTheCpuForEveryGroupHeadSizeElementAndPool) {
  std::uint64_t seed = 0;
  for (const std::int32_t group : {1, 2, 4, 7})
    for (const std::int32_t dim : {1, 7, 64, 96, 256})
      for (const Element keys : kStored) {
        ++seed;
        expect_as_on_cpu(EvidenceCase(seed, {.group = group,
                                             .kv_heads = static_cast<std::int32_t>(1 + seed % 3),
                                             .dim = dim,
                                             .lengths = {37, 1, 33},
                                             .keys = keys,
                                             .query = is_8bit(keys) ? Element::f32 : keys,
                                             .pre_rope = seed % 2 == 0 && dim > 1}),
                         static_cast<std::int32_t>(1 + seed % 4 * 2));
      }
}

TEST_F(LastQueryKernel, AgreesWithTheCpuForEveryLengthAndInPages) {
  std::uint64_t seed = 100;
  for (const std::int32_t length : {31, 32, 1023, 1024, 1025, 2100})
    expect_as_on_cpu(EvidenceCase(++seed, {.group = 2, .kv_heads = 2, .dim = 8, .lengths = {length, 40}}), 5,
                     {.page = length % 2 == 0 ? 16 : 0});
  for (const std::int64_t gap : {4, 16})
    expect_as_on_cpu(EvidenceCase(++seed, {.kv_heads = 2, .dim = 48, .lengths = {50, 33}, .keys = Element::bf16}), 5,
                     {.gap = gap, .page = 1});
}

TEST_F(LastQueryKernel, GivesNaNToTheNeighboursOfAKeyWithNaN) {
  EvidenceCase c(200, {.kv_heads = 2, .dim = 20, .lengths = {41, 30}});
  c.set_key(1, 7, 19, std::nanf(""));
  const std::vector<float> got = on_device(c, 3);
  for (std::size_t t = 0; t < got.size(); ++t) EXPECT_EQ(std::isnan(got[t]), t >= 6 && t <= 8) << t;
}

/// What every byte means: a product with 1 shows it.
TEST_F(LastQueryKernel, ReadsEveryByteOfEveryFormat) {
  const auto meant = [](Element format, std::uint8_t byte) {
    return format == Element::f8_e4m3   ? static_cast<float>(c10::Float8_e4m3fn(byte, c10::Float8_e4m3fn::from_bits()))
           : format == Element::f8_e5m2 ? static_cast<float>(c10::Float8_e5m2(byte, c10::Float8_e5m2::from_bits()))
                                        : static_cast<float>(static_cast<std::int8_t>(byte));
  };
  for (const Element format : {Element::f8_e4m3, Element::f8_e5m2, Element::i8})
    for (const std::int32_t component : {0, 6, 15})
      for (const std::int64_t gap : {0, 4}) {
        EvidenceCase c(300, {.dim = 16, .lengths = {256}, .keys = format});
        std::ranges::fill(c.keys[0], std::byte{0});
        std::ranges::fill(c.scales[0], 1.0F);
        std::vector<float> query(16);
        query[static_cast<std::size_t>(component)] = 1;
        for (int byte = 0; byte < 256; ++byte)
          c.keys[0][static_cast<std::size_t>(16 * byte + component)] = static_cast<std::byte>(byte);
        const DeviceEvidence there(c, {.gap = gap});
        const DeviceArray<float> asked(query), scores(std::size_t{256}), workspace(std::size_t{256});
        launch_last_query({.evidence = there.arguments(),
                           .queries = asked.data(),
                           .pool = 1,
                           .slots = 256,
                           .scores = scores.data(),
                           .workspace = workspace.data()},
                          nullptr);
        const std::vector<float> got = scores.download();
        for (int byte = 0; byte < 256; ++byte) {
          const float is = got[static_cast<std::size_t>(byte)], want = meant(format, static_cast<std::uint8_t>(byte));
          ASSERT_TRUE(is == want || (std::isnan(is) && std::isnan(want)))
              << name_of(format) << " byte " << byte << ": " << is << ", not " << want;
        }
      }
}

TEST_F(LastQueryKernel, RefusesWhatItCannotRead) {
  EXPECT_THROW(launch_last_query({.evidence = {.dim = 257}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_last_query({.evidence = {.dim = 8}, .pool = 4}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_last_query({.evidence = {.count = 3, .kv_heads = 2, .dim = 8}}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::last_query_test
