// SPDX-License-Identifier: Apache-2.0
// Given scores on their way to their columns: each at its place as f32, whatever the strides and the dtype; what lies
// beside them stays.

#include "arrivals.h"

#include <limits>

#include "evidence_case.h"

namespace kvkeep::cuda::given_test {
namespace {

using PushGiven = OnDevice;

TEST_F(PushGiven, PutsEveryScoreAtItsPlace) {
  oracle::Random random(1);
  for (const Element element : {Element::f32, Element::f16, Element::bf16})
    for (const std::int64_t gap : {0, 1, 5})
      for (const std::int32_t most : {1, 7, 130, 1000}) {
        constexpr std::int32_t kHeads = 3, kSequences = 4;
        const std::int64_t size = element_bytes(element), token_stride = (kHeads + gap) * size;
        std::vector<std::int32_t> tokens{most, 0, random.between(0, most), 1};
        std::int64_t all = 0;
        for (const std::int32_t n : tokens) all += n;
        std::vector<std::byte> from(static_cast<std::size_t>(all * token_stride), std::byte{0xFF});
        std::vector<float> plain(static_cast<std::size_t>(all * kHeads));
        for (std::int64_t t = 0; t < all; ++t)
          for (std::int64_t h = 0; h < kHeads; ++h)
            plain[static_cast<std::size_t>(t * kHeads + h)] =
                store(random.chance(0.1) ? random.one_of({HUGE_VALF, -HUGE_VALF}) : static_cast<float>(random.normal()),
                      element, from.data() + t * token_stride + h * size);
        const DeviceArray<std::byte> source(from);
        in_every_order([&] {
          // Columns of most + 3 slots, of which the first two have a score already.
          const std::int64_t capacity = most + 3;
          std::vector<float> want(static_cast<std::size_t>(kSequences * kHeads * capacity), kUntouched);
          const DeviceArray<float> columns(want);
          PushGivenArguments arguments;
          std::int64_t before = 0;
          for (std::int64_t s = 0; s < kSequences; ++s) {
            const std::int32_t n = tokens[static_cast<std::size_t>(s)];
            for (std::int64_t h = 0; h < kHeads; ++h) {
              const std::int64_t at = (s * kHeads + h) * capacity + 2;
              arguments.arrivals[arguments.count++] = {
                  .from = source.data() + before * token_stride + h * size, .to = columns.data() + at, .tokens = n};
              for (std::int64_t t = 0; t < n; ++t)
                want[static_cast<std::size_t>(at + t)] = plain[static_cast<std::size_t>((before + t) * kHeads + h)];
            }
            before += n;
          }
          arguments.element = element;
          arguments.token_stride = token_stride;
          launch_push_given(arguments, nullptr);
          ASSERT_EQ(columns.download(), want) << name_of(element) << ", gap " << gap << ", " << most << " tokens";
        });
      }
}

TEST_F(PushGiven, TakesNothingAndRefusesNumbersOfEightBits) {
  launch_push_given({}, nullptr);
  PushGivenArguments arguments;
  arguments.element = Element::f8_e4m3;
  EXPECT_THROW(launch_push_given(arguments, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::given_test
