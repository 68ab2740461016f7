// SPDX-License-Identifier: Apache-2.0
// A learned router's numbers on a GPU: those of the CPU, and what the formulas say.

#include "router.h"

#include <cmath>

#include "evidence_case.h"
#include "kvkeep/core/error.h"
#include "kvkeep/memory/router.h"
#include "trained_router.h"

namespace kvkeep::cuda::router_test {
namespace {

using DeviceRouter = OnDevice;

TEST_F(DeviceRouter, ProjectsQueriesTwice) {
  oracle::Random random(90);
  for (const auto& [tokens, inner, dim] :
       {std::array<std::int32_t, 3>{1, 1, 1}, {3, 5, 7}, {4, 32, 33}, {9, 40, 128}, {5, 3, 256}}) {
    constexpr std::int32_t kHeads = 4, kLayers = 2;
    const TrainedParameters p =
        testing::trained_router(91, {.layers = kLayers, .heads = kHeads, .inner = inner, .dim = dim});
    const testing::Array queries = testing::normals(random, {tokens, kHeads, dim});
    const std::span<const float> weights(p.projections.data<float>(), static_cast<std::size_t>(p.projections.numel()));
    in_every_order([&, tokens = tokens, inner = inner, dim = dim] {
      const DeviceArray<float> there(weights),
          asked(std::span<const float>(queries.data<float>(), static_cast<std::size_t>(queries.numel())));
      const auto to = DeviceArray<float>::poisoned(static_cast<std::size_t>(queries.numel()));
      MemoryAttentionArguments a{.tokens = tokens, .kv_heads = 2, .group = 2, .dim = dim};
      a.queries = reinterpret_cast<const std::byte*>(asked.data());
      a.token_stride = kHeads * dim * 4, a.head_stride = dim * 4;
      launch_router_queries(a, {there.data(), kHeads, inner}, 1, to.data(), nullptr);
      const std::vector<float> got = to.download();
      for (std::int32_t n = 0; n < tokens * kHeads; ++n) {
        const float* w = weights.data() + std::int64_t{kHeads + n % kHeads} * inner * dim;
        const float* q = queries.data<float>() + std::int64_t{n} * dim;
        std::vector<double> want(static_cast<std::size_t>(dim));
        double size = 0;
        for (std::int32_t i = 0; i < inner; ++i) {
          double x = 0;
          for (std::int32_t d = 0; d < dim; ++d) x += static_cast<double>(w[i * dim + d]) * static_cast<double>(q[d]);
          for (std::int32_t d = 0; d < dim; ++d)
            want[static_cast<std::size_t>(d)] += static_cast<double>(w[i * dim + d]) * x;
        }
        for (const double x : want) size = std::max(size, std::abs(x));
        for (std::int32_t d = 0; d < dim; ++d)
          ASSERT_NEAR(got[static_cast<std::size_t>(n * dim + d)], want[static_cast<std::size_t>(d)],
                      2e-6 * size + 1e-12)
              << tokens << " tokens, inner " << inner << ", dim " << dim << ", query " << n;
      }
    });
  }
}

TEST_F(DeviceRouter, RefusesWhatItDoesNotKnow) {
  const auto refuses = [](auto change) {
    FoldArguments fold{.dim = 8};
    MemoryAttentionArguments memory{.dim = 8};
    RouterWeights router;
    std::int32_t layer = 0;
    change(fold, memory, router, layer);
    EXPECT_THROW(launch_router_norms(fold, router, layer == 0 ? 1 : 0, nullptr), InvalidArgument);
    EXPECT_THROW(launch_router_queries(memory, router, layer, nullptr, nullptr), InvalidArgument);
  };
  refuses([](auto& fold, auto& memory, auto&, auto&) { fold.dim = memory.dim = 0; });
  refuses([](auto& fold, auto& memory, auto&, auto&) { fold.dim = memory.dim = 257; });
  refuses([](auto& fold, auto& memory, auto&, auto&) { fold.spans = memory.tokens = -1; });
  refuses([](auto& fold, auto& memory, auto&, auto&) { fold.store = memory.query = Element::f8_e4m3; });
  refuses([](auto&, auto&, auto& router, auto&) { router.inner = 0; });
  refuses([](auto&, auto&, auto& router, auto&) { router.query_heads = 0; });
  refuses([](auto&, auto&, auto&, auto& layer) { layer = -1; });
}

}  // namespace
}  // namespace kvkeep::cuda::router_test
