// Running statistics of queries on a device: the moments of the CPU, however tokens come, in one launch for all
// sequences, with the newest taken back.

#include "query_statistics.h"

#include <numeric>

#include "device.h"
#include "fresh_accelerator.h"
#include "kvkeep/observe/query_statistics.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda::query_statistics_test {
namespace {

using QueryStatisticsKernel = OnDevice;
using Positions = std::vector<std::int32_t>;

struct Form {
  std::int32_t heads = 2, dim = 8;
  Dtype dtype = Dtype::f32;
  QueryBasis basis = QueryBasis::pre_rope;
  RopeSpec rope = {};
  std::int32_t from = 4;
  double size = 1;
};

RopeSpec rope_of(std::int32_t pairs, RopeStyle style) {
  RopeSpec rope{.style = style, .inv_freq = {}, .attention_scaling = 1.25};
  for (std::int32_t f = 0; f < pairs; ++f) rope.inv_freq.push_back(std::pow(0.3, f));
  return rope;
}

/// Statistics of a few sequences on the CPU and on the device, which get the same queries.
class Twins {
 public:
  Twins(const Form& form, std::int32_t sequences, std::uint64_t seed) : form_(form), random_(seed) {
    for (std::int32_t s = 0; s < sequences; ++s) {
      cpu.emplace_back(form.heads, form.dim, form.from);
      device.emplace_back(form.heads, form.dim, form.from, memory());
      next_.push_back(0);
    }
  }

  [[nodiscard]] MachineMemory& memory() const { return machine_->memory(); }

  /// A step: `tokens` of each sequence, `gap` positions left out before every `gap_every`-th token.
  void step(const std::vector<std::int32_t>& tokens, std::int32_t gap_every = 0) {
    const std::int64_t element = element_size(form_.dtype), head = form_.dim * element + 2 * element,
                       token = form_.heads * head + element;
    const std::int32_t all = std::accumulate(tokens.begin(), tokens.end(), 0);
    std::vector<std::byte> bytes(static_cast<std::size_t>(all * token));
    for (std::int32_t t = 0; t < all; ++t)
      for (std::int32_t h = 0; h < form_.heads; ++h)
        for (std::int32_t d = 0; d < form_.dim; ++d)
          put(static_cast<float>(form_.size * (0.3 * h + random_.normal())),
              bytes.data() + t * token + h * head + d * element);
    const DeviceArray<std::byte> there(bytes);
    std::vector<MomentsArrival> arrivals;
    std::int32_t first = 0;
    for (std::size_t s = 0; s < tokens.size(); ++s) {
      Positions positions;
      for (std::int32_t t = 0; t < tokens[s]; ++t) {
        if (gap_every > 0 && t % gap_every == 0) next_[s] += 2;
        positions.push_back(next_[s]++);
      }
      cpu[s].add(bytes.data() + first * token, form_.dtype, token, head, positions, form_.basis, form_.rope,
                 *host_work_);
      device[s].place(first, positions, arrivals);
      first += tokens[s];
    }
    QueryLayout layout;
    layout.from = there.data();
    layout.heads = form_.heads;
    layout.head_bytes = form_.dim * element;
    layout.token_stride = token;
    layout.head_stride = head;
    memory().push_moments(arrivals, QueryStatistics::layout(memory(), layout, form_.dtype, form_.dim, form_.basis,
                                                            form_.rope, *device_work_));
    std::byte done{};
    memory().read(&done, there.data(), 1);
  }
  void forget(std::int64_t tokens) {
    for (std::size_t s = 0; s < cpu.size(); ++s) {
      ASSERT_EQ(cpu[s].can_forget(tokens), device[s].can_forget(tokens));
      if (!cpu[s].can_forget(tokens)) continue;
      cpu[s].forget(tokens), device[s].forget(tokens);
      next_[s] -= static_cast<std::int32_t>(tokens);
    }
  }

  /// What the kernel sums up, what the host reads back, and what the CPU has.
  void expect_alike() const {
    const std::int64_t dim = form_.dim, triangle = dim * (dim + 1) / 2, heads = form_.heads;
    std::vector<MomentsView> views;
    for (const QueryStatistics& one : device) views.push_back(one.view());
    const DeviceArray<MomentsView> there(views);
    const auto mean = DeviceArray<double>::poisoned(views.size() * static_cast<std::size_t>(heads * dim)),
               second = DeviceArray<double>::poisoned(views.size() * static_cast<std::size_t>(heads * triangle));
    SumMomentsArguments sum;
    sum.views = there.data();
    sum.groups = static_cast<std::int32_t>(views.size());
    sum.query_heads = form_.heads;
    sum.dim = form_.dim;
    sum.mean = mean.data();
    sum.second = second.data();
    launch_sum_moments(sum, nullptr);
    const std::vector<double> means = mean.download(), seconds = second.download();
    for (std::size_t s = 0; s < cpu.size(); ++s) {
      ASSERT_EQ(cpu[s].count(), device[s].count());
      for (std::int32_t h = 0; h < form_.heads; ++h) {
        const QueryMoments want = cpu[s].moments(h), read = device[s].moments(h);
        ASSERT_EQ(want.count, read.count);
        if (want.count == 0) continue;
        const auto at = static_cast<std::int64_t>(s) * heads + h;
        const double *summed = seconds.data() + at * triangle, *summed_mean = means.data() + at * dim;
        std::size_t place = 0;
        for (std::int64_t i = 0; i < dim; ++i) {
          const auto n = static_cast<std::size_t>(i);
          const double spread = std::sqrt(want.second[n * (n + 1) / 2 + n] / static_cast<double>(want.count));
          ASSERT_NEAR(read.mean[n], want.mean[n], 1e-6 * (spread + std::abs(want.mean[n])));
          ASSERT_NEAR(summed_mean[i], want.mean[n], 1e-6 * (spread + std::abs(want.mean[n])));
          for (std::size_t j = 0; j <= n; ++j, ++place) {
            const double size = std::sqrt(want.second[n * (n + 1) / 2 + n] * want.second[j * (j + 1) / 2 + j]);
            ASSERT_NEAR(read.second[place], want.second[place], 1e-5 * size) << i << ", " << j << " of head " << h;
            ASSERT_NEAR(summed[place], want.second[place], 1e-5 * size) << i << ", " << j << " of head " << h;
          }
        }
      }
    }
  }

  std::vector<QueryStatistics> cpu, device;

 private:
  void put(float x, std::byte* to) const {
    const auto as = [&](auto narrow) { std::memcpy(to, &narrow, sizeof narrow); };
    if (form_.dtype == Dtype::f32)
      as(x);
    else if (form_.dtype == Dtype::f16)
      as(Half(x));
    else
      as(BFloat16(x));
  }

  Form form_;
  oracle::Random random_;
  std::shared_ptr<Machine> machine_ = fresh_accelerator();
  std::shared_ptr<QueryStatistics::Workspace> host_work_ = QueryStatistics::workspace(form_.heads, form_.dim),
                                              device_work_ = QueryStatistics::workspace(form_.heads, form_.dim,
                                                                                        machine_->memory());
  Positions next_;
};

TEST_F(QueryStatisticsKernel, AgreesWithTheCpuHoweverTheTokensAreCutIntoSteps) {
  for (const std::vector<std::int32_t>& steps :
       {std::vector<std::int32_t>{3, 1}, {64}, {65}, {66, 1, 1}, {96, 33}, {97}, {200}, {1, 63, 1, 31, 2, 100, 0, 7}})
    in_every_order([&] {
      Twins twins({.heads = 3}, 2, steps.size());
      for (const std::int32_t tokens : steps) {
        twins.step({tokens, tokens / 2 + 1});
        ASSERT_NO_FATAL_FAILURE(twins.expect_alike()) << tokens;
      }
    });
}

TEST_F(QueryStatisticsKernel, AgreesForEveryHeadSizeAndElement) {  // B25
  std::uint64_t seed = 0;
  for (const std::int32_t dim : {1, 2, 7, 33, 64, 96, 128, 192, 256})
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      if (dim > 64 && static_cast<std::int32_t>(dtype) != dim / 64 % 3) continue;
      Twins twins({.heads = dim > 64 ? 1 : 2, .dim = dim, .dtype = dtype, .from = 0}, 1, ++seed);
      twins.step({70});
      ASSERT_NO_FATAL_FAILURE(twins.expect_alike()) << "D " << dim << ", " << dtype;
    }
}

TEST_F(QueryStatisticsKernel, TurnsQueriesBackThatComeAfterRope) {  // B16
  for (const RopeStyle style : {RopeStyle::half, RopeStyle::interleaved})
    for (const std::int32_t pairs : {1, 3, 5})
      in_every_order([&] {
        Twins twins({.dim = 10, .basis = QueryBasis::post_rope, .rope = rope_of(pairs, style)}, 2, 7);
        twins.step({90, 40});
        twins.step({1, 50});
        ASSERT_NO_FATAL_FAILURE(twins.expect_alike());
      });
}

TEST_F(QueryStatisticsKernel, TakesGapsInPositionsAndMoreSequencesThanALaunchHolds) {
  in_every_order([&] {
    Twins gaps({.heads = 1, .dim = 4, .basis = QueryBasis::post_rope, .rope = rope_of(2, RopeStyle::half)}, 2, 8);
    gaps.step({140, 9}, 2);  // 70 runs of one sequence
    gaps.step({1, 80}, 7);
    ASSERT_NO_FATAL_FAILURE(gaps.expect_alike());
    Twins many({.heads = 1, .dim = 3}, 2 * kMomentsArrivals + 5, 9);
    for (const std::int32_t tokens : {70, 1}) many.step(std::vector<std::int32_t>(many.cpu.size(), tokens));
    ASSERT_NO_FATAL_FAILURE(many.expect_alike());
  });
}

TEST_F(QueryStatisticsKernel, TakesTheNewestTokensBack) {
  Twins twins({.heads = 2, .dim = 6}, 2, 10);
  std::int32_t forgotten = 0;
  for (const std::int32_t tokens : {2, 33, 40, 31, 64, 5, 90}) {
    twins.step({tokens, tokens + 3});
    ASSERT_NO_FATAL_FAILURE(twins.forget(forgotten = std::min(tokens, 32)));
    ASSERT_NO_FATAL_FAILURE(twins.expect_alike()) << tokens;
  }
  EXPECT_EQ(forgotten, 32);
}

TEST_F(QueryStatisticsKernel, ReadsWhatWasHeldElsewhere) {
  const Form form{.heads = 2, .dim = 6};
  for (const std::int32_t tokens : {0, 3, 20, 64, 65, 130}) {
    Twins twins(form, 1, 11);
    twins.step({tokens});
    QueryStatistics here(form.heads, form.dim, form.from), there(form.heads, form.dim, form.from, twins.memory());
    here.take(twins.device[0].held());
    there.take(twins.cpu[0].held());
    std::swap(twins.cpu[0], here);
    std::swap(twins.device[0], there);
    ASSERT_NO_FATAL_FAILURE(twins.expect_alike()) << tokens;
    twins.step({50});
    ASSERT_NO_FATAL_FAILURE(twins.expect_alike()) << tokens;
  }
}

TEST_F(QueryStatisticsKernel, KnowsQueriesThatAreVeryLargeOrSmallOrAllAlike) {
  for (const double size : {1e-30, 1e-12, 1e15, 1e30}) {
    Twins twins({.dim = 6, .size = size}, 1, 12);
    twins.step({100});
    ASSERT_NO_FATAL_FAILURE(twins.expect_alike()) << size;
  }
  Twins alike({.heads = 1, .dim = 6, .size = 0}, 1, 13);
  alike.step({100});
  EXPECT_EQ(alike.device[0].moments(0).second, std::vector<double>(21, 0.0));
}

TEST_F(QueryStatisticsKernel, LeavesAQueryThatIsNoNumberInTheMomentsOfItsHead) {
  constexpr std::int32_t kTokens = 70, kHeads = 2, kDim = 4;
  const std::shared_ptr<Machine> machine = fresh_accelerator();
  MachineMemory& memory = machine->memory();
  QueryStatistics statistics(kHeads, kDim, 0, memory);
  std::vector<float> queries(std::size_t{kTokens} * kHeads * kDim, 0.5F);
  queries[(3 * kHeads + 1) * kDim + 2] = std::nanf("");
  const DeviceArray<float> there(queries);
  Positions positions(kTokens);
  std::iota(positions.begin(), positions.end(), 0);
  std::vector<MomentsArrival> arrivals;
  EXPECT_TRUE(statistics.finite(nullptr, Dtype::f32, 0, 0, positions)) << "nobody looks";
  statistics.place(0, positions, arrivals);
  QueryLayout layout;
  layout.from = reinterpret_cast<const std::byte*>(there.data());
  layout.heads = kHeads;
  layout.head_bytes = layout.head_stride = kDim * 4;
  layout.token_stride = kHeads * kDim * 4;
  memory.push_moments(arrivals, {.queries = layout, .dim = kDim});
  const QueryStatistics::Held held = statistics.held();
  EXPECT_EQ(held.heads[0].count, kMomentBlock);
  EXPECT_EQ(held.heads[0].mean, std::vector<double>(kDim, 0.5));
  EXPECT_TRUE(std::isnan(held.heads[1].mean[2]) && std::isnan(held.heads[1].second[5]));
  EXPECT_EQ(held.heads[1].mean[1], 0.5);
}

TEST_F(QueryStatisticsKernel, RefusesWhatItCannotRead) {
  PushMomentsArguments push;
  push.layout.dim = 257;
  EXPECT_THROW(launch_push_moments(push, nullptr), InvalidArgument);
  push.layout.dim = 8;
  push.layout.rope.pairs = 5;
  EXPECT_THROW(launch_push_moments(push, nullptr), InvalidArgument);
  push.layout.rope.pairs = 4;
  push.element = Element::f8_e4m3;
  EXPECT_THROW(launch_push_moments(push, nullptr), InvalidArgument);
  EXPECT_THROW(launch_sum_moments({.dim = 0}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::query_statistics_test
