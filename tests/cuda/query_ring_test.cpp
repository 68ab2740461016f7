// SPDX-License-Identifier: Apache-2.0
// New queries on their way to their rings: every token at its place, whatever the strides, the dtype and where the ring
// begins; what lies between stays.

#include "arrivals.h"

#include "device.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda::query_ring_test {
namespace {

using PushQueries = OnDevice;

TEST_F(PushQueries, PutEveryTokenAtItsPlace) {
  oracle::Random random(1);
  for (const std::int64_t element : {1, 2, 4})
    for (const std::int64_t dim : {1, 3, 8, 64})
      for (const std::int64_t gap : {0, 1, 5}) {
        constexpr std::int32_t kHeads = 3, kPieces = 5;
        const std::int64_t head = element * dim, head_stride = head + gap, token_stride = kHeads * head_stride + gap;
        std::vector<std::byte> from(static_cast<std::size_t>(40 * token_stride));
        for (std::byte& b : from) b = static_cast<std::byte>(random.between(0, 255));
        const DeviceArray<std::byte> source(from);
        in_every_order([&] {
          std::vector<std::byte> want;
          std::vector<std::int32_t> want_positions;
          PushQueriesArguments arguments;
          std::int32_t token = 0;
          std::vector<std::int32_t> capacities{4, 7, 9, 1, 12}, tokens{4, 3, 0, 1, 11}, begins{3, 5, 0, 0, 7};
          std::int64_t room = 0;
          for (const std::int32_t capacity : capacities) room += capacity;
          const DeviceArray<std::byte> rings(
              std::vector<std::byte>(static_cast<std::size_t>(room * kHeads * head), std::byte{0x5A}));
          const DeviceArray<std::int32_t> positions(std::vector<std::int32_t>(static_cast<std::size_t>(room), -1));
          want.assign(static_cast<std::size_t>(room * kHeads * head), std::byte{0x5A});
          want_positions.assign(static_cast<std::size_t>(room), -1);
          std::int64_t ring = 0;
          for (std::int32_t p = 0; p < kPieces; ++p) {
            const auto n = static_cast<std::size_t>(p);
            arguments.arrivals[p] = {.first = token,
                                     .ring = rings.data() + ring * kHeads * head,
                                     .positions = positions.data() + ring,
                                     .capacity = capacities[n],
                                     .at = begins[n],
                                     .tokens = tokens[n],
                                     .position = 100 * p};
            for (std::int32_t i = 0; i < tokens[n]; ++i) {
              const std::int64_t place = ring + (begins[n] + i) % capacities[n];
              want_positions[static_cast<std::size_t>(place)] = 100 * p + i;
              for (std::int32_t h = 0; h < kHeads; ++h)
                std::copy_n(from.begin() + (token + i) * token_stride + h * head_stride, head,
                            want.begin() + (place * kHeads + h) * head);
            }
            token += tokens[n];
            ring += capacities[n];
          }
          arguments.count = kPieces;
          arguments.layout.from = source.data();
          arguments.layout.heads = kHeads;
          arguments.layout.head_bytes = head;
          arguments.layout.token_stride = token_stride;
          arguments.layout.head_stride = head_stride;
          launch_push_queries(arguments, nullptr);
          ASSERT_EQ(rings.download(), want) << element << " bytes, D " << dim << ", gap " << gap;
          ASSERT_EQ(positions.download(), want_positions);
        });
      }
}

}  // namespace
}  // namespace kvkeep::cuda::query_ring_test
