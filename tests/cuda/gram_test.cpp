// SPDX-License-Identifier: Apache-2.0
// Products of rows by cuBLAS against sums in f64, and what its stand-in in the execution model refuses.

#include "gram.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <deque>

#include "captured_graph.h"
#include "engines.h"
#include "fresh_accelerator.h"
#include "kvkeep/core/error.h"
#include "open_blas.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda::gram_test {
namespace {

using GramKernel = OnDeviceWithBlas;

/// Rows of 16 bits, and what they are in f64.
struct Rows {
  Rows(std::uint64_t seed, std::size_t count, Element element, double mean = 0) : stored(count), plain(count) {
    oracle::Random random(seed);
    for (std::size_t i = 0; i < count; ++i) {
      const auto x = static_cast<float>(mean + random.normal());
      const auto put = [&](auto y) {
        std::memcpy(&stored[i], &y, sizeof y);
        plain[i] = static_cast<double>(static_cast<float>(y));
      };
      if (element == Element::f16)
        put(c10::Half(x));
      else
        put(c10::BFloat16(x));
    }
  }
  std::vector<std::uint16_t> stored;
  std::vector<double> plain;
};

TEST_F(GramKernel, MultipliesTheRowsOfEveryMatrixWithEachOther) {
  std::uint64_t seed = 0;
  OpenBlas there;
  for (const Element element : {Element::f16, Element::bf16})
    for (const auto& [count, tokens, width, dim] :
         {std::array{1, 1, 8, 1}, {3, 5, 8, 8}, {2, 16, 24, 10}, {5, 17, 32, 16}, {2, 256, 48, 24}, {1, 300, 64, 64}}) {
      ++seed;
      const Rows rows(seed, static_cast<std::size_t>(count * tokens * width), element, seed % 3 == 0 ? 30 : 0);
      const DeviceArray<std::uint16_t> device(rows.stored);
      const auto products =
          DeviceArray<float>::poisoned(static_cast<std::size_t>(count) * static_cast<std::size_t>(dim * width));
      in_every_order([&, count = count, tokens = tokens, width = width, dim = dim] {
        launch_gram({.blas = &there.blas,
                     .rows = device.data(),
                     .element = element,
                     .count = count,
                     .tokens = tokens,
                     .width = width,
                     .dim = dim,
                     .products = products.data()},
                    nullptr);
        const std::vector<float> got = products.download();
        for (int n = 0; n < count; ++n)
          for (int j = 0; j < dim; ++j)
            for (int i = 0; i < width; ++i) {
              double want = 0, size = 0;
              for (int t = 0; t < tokens; ++t) {
                const double* row = rows.plain.data() + std::ptrdiff_t{n * tokens + t} * width;
                want += row[i] * row[j];
                size += std::abs(row[i] * row[j]);
              }
              ASSERT_NEAR(static_cast<double>(got[static_cast<std::size_t>((n * dim + j) * width + i)]), want,
                          1e-5 * size)
                  << "matrix " << n << ", " << j << " times " << i << " of " << width;
            }
      });
    }
}

TEST_F(GramKernel, GivesTheSameBitsAgainAndInAGraph) {
  constexpr int kCount = 4, kTokens = 64, kWidth = 32, kDim = 16;
  OpenBlas there;
  const c10::Stream side = side_stream(fresh_accelerator()->device());
  const c10::StreamGuard guard(side);
  auto* const stream = static_cast<Stream>(side.native_handle());
  const Rows first(1, kCount * kTokens * kWidth, Element::f16), second(2, first.stored.size(), Element::f16);
  DeviceArray<std::uint16_t> rows(first.stored);
  const auto products = DeviceArray<float>::poisoned(kCount * kDim * kWidth);
  const GramArguments a{.blas = &there.blas,
                        .rows = rows.data(),
                        .count = kCount,
                        .tokens = kTokens,
                        .width = kWidth,
                        .dim = kDim,
                        .products = products.data()};
  const auto now = [&] {
    launch_gram(a, stream);
    expect(cudaStreamSynchronize(stream));
    return products.download();
  };
  const std::vector<float> of_first = now();
  EXPECT_EQ(now(), of_first);
  const CapturedGraph graph(side, [&] { launch_gram(a, stream); });
  rows.upload(second.stored);
  graph.replay();
  const std::vector<float> of_second = products.download();
  EXPECT_NE(of_second, of_first);
  EXPECT_EQ(now(), of_second);
}

TEST_F(GramKernel, RefusesWhatItCannotMultiply) {
  OpenBlas there;
  const GramArguments good{.blas = &there.blas, .count = 0, .tokens = 1, .width = 8, .dim = 8};
  EXPECT_NO_THROW(launch_gram(good, nullptr));
  const auto refused = [&](auto&& change) {
    GramArguments a = good;
    change(a);
    EXPECT_THROW(launch_gram(a, nullptr), InvalidArgument);
  };
  refused([](GramArguments& a) { a.element = Element::f32; });
  refused([](GramArguments& a) { a.element = Element::i8; });
  refused([](GramArguments& a) { a.count = -1; });
  refused([](GramArguments& a) { a.tokens = 0; });
  refused([](GramArguments& a) { a.width = 12; });
  refused([](GramArguments& a) { a.dim = 9; });
  refused([](GramArguments& a) { a.dim = 0; });
  Blas closed;
  EXPECT_THROW(launch_gram({.blas = &closed, .count = 1, .tokens = 1, .width = 8, .dim = 8}, nullptr), StateError);
  EXPECT_THROW(launch_gram({.count = 1, .tokens = 1, .width = 8, .dim = 8}, nullptr), StateError);
  EXPECT_THROW(closed.open(nullptr), InvalidArgument);
  EXPECT_FALSE(closed.is_open());
}

/// A keeper on the CPU and one on the device, whose events fit 512 queries of sequence 1.
class Twins {
 public:
  void feed(const std::vector<std::pair<SequenceId, std::int32_t>>& work) {
    fed_.push_back(engines::numbers_of(random_, work));
    cpu.feed(fed_.back());
    device.feed(fed_.back());
  }
  void cut(SequenceId id) {
    ASSERT_FALSE(cpu.cut({id}).cuts.empty());
    ASSERT_FALSE(device.cut({id}).cuts.empty());
    engines::expect_alike(cpu, device);
  }
  /// Sequences 1 and 2 are due; 1 has 540 tokens behind it, 2 has 90.
  void fill() {
    for (const SequenceId id : {1, 2}) {
      cpu.join(id);
      device.join(id);
    }
    feed({{1, 288}, {2, 40}});
    for (engines::DenseEngine* engine : {&cpu, &device})
      ASSERT_TRUE(engine->cut({1, 2}).cuts.empty()) << "prompts stay whole";
    feed({{1, 12}});
    cut(1);
    feed({{1, 240}, {2, 50}});
  }

  static constexpr const char* kPolicy = "expected,budget=48,interval=12,queries=600,recent=4";
  engines::DenseEngine cpu{kPolicy, false, Dtype::bf16}, device{kPolicy, false, Dtype::bf16, fresh_accelerator()};

 private:
  oracle::Random random_{43};
  std::deque<engines::Numbers> fed_;
};

using WindowsOfAKeeper = OnSideStream<OnDeviceWithBlas>;

TEST_F(WindowsOfAKeeper, KeepTheCpusSlotsWhoeverMultipliesThem) {
  Twins twins;
  ASSERT_NO_FATAL_FAILURE(twins.fill());
  for (const SequenceId id : {1, 2, 1, 2}) {
#if defined(KVKEEP_CUDA_MODEL)
    const std::int64_t before = model::counters().launches;
    twins.cut(id);
    EXPECT_EQ(model::counters().launches - before, id == 1 ? 9 + 2 : 9) << "sequence " << id;
#else
    twins.cut(id);
#endif
    twins.feed({{id, 12}});
  }
  EXPECT_GT(twins.device.keeper.totals().slots_chosen, 0);
}

TEST_F(WindowsOfAKeeper, AreMultipliedInAGraphOnceAnEventWithThemHasRun) {
  Twins twins;
  ASSERT_NO_FATAL_FAILURE(twins.fill());
#if defined(KVKEEP_CUDA_MODEL)  // where the first event of a size can be captured
  EXPECT_THROW(CapturedGraph(stream(), [&] { static_cast<void>(twins.device.cut({1})); }), StateError);
#endif
  twins.cut(1);
  for (int round = 0; round < 3; ++round) {
    twins.feed({{1, 12}});
    ASSERT_FALSE(twins.cpu.cut({1}).cuts.empty());
    const CapturedGraph graph(stream(), [&] { static_cast<void>(twins.device.cut({1})); });
    graph.replay();
    ASSERT_NO_FATAL_FAILURE(engines::expect_alike(twins.cpu, twins.device)) << "round " << round;
  }
}

#if defined(KVKEEP_CUDA_MODEL)
TEST_F(WindowsOfAKeeper, AllocateNothingAfterTheFirstAndNothingThatIsNotNeeded) {
  Twins twins;
  ASSERT_NO_FATAL_FAILURE(twins.fill());
  const std::int64_t before = model::counters().allocations;
  twins.cut(2);
  EXPECT_EQ(model::counters().allocations, before) << "90 queries are the kernel's";
  twins.cut(1);
  EXPECT_GE(model::counters().allocations, before + 2) << "the handle's workspace, and the products'";
  const std::int64_t warm = model::counters().allocations;
  for (const SequenceId id : {1, 2, 1}) {
    twins.feed({{id, 12}});
    twins.cut(id);
  }
  EXPECT_EQ(model::counters().allocations, warm);
}

TEST_F(GramKernel, MakesItsHandleBeforeACapture) {
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(Blas::kWorkspace));
  const c10::Stream side = side_stream(fresh_accelerator()->device());
  const c10::StreamGuard guard(side);
  Blas blas;
  EXPECT_THROW(CapturedGraph(side, [&] { blas.open(workspace.data()); }), DeviceError);
  EXPECT_FALSE(blas.is_open());
  EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureInvalidated) << "and the capture was lost";
  blas.open(workspace.data());
  EXPECT_TRUE(blas.is_open());
}

TEST_F(GramKernel, RowsThatWouldBeSlowAreAFault) {
  OpenBlas there;
  const DeviceArray<std::uint16_t> rows(64 * 8 + 8);
  const DeviceArray<float> products(64);
  GramArguments a{.blas = &there.blas,
                  .rows = rows.data() + 4,
                  .count = 1,
                  .tokens = 64,
                  .width = 8,
                  .dim = 8,
                  .products = products.data()};
  EXPECT_THROW(launch_gram(a, nullptr), std::logic_error);
}
#endif

}  // namespace
}  // namespace kvkeep::cuda::gram_test
