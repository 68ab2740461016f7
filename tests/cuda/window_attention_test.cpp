// SPDX-License-Identifier: Apache-2.0
// Window attention on a GPU against the CPU: windows, usage, newest, sum and history, plain and on matrix units.

#include "window_attention.h"

#include "asked_queries.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/torch.h"
#include "other_chip.h"

namespace kvkeep::cuda::window_attention_test {
namespace {

using WindowAttentionKernel = OnDevice;

enum class Wanted : std::uint8_t { usage, sum, newest_alone };

struct Got {
  std::vector<RowWindow> windows;
  std::vector<float> column, newest;
};

std::vector<float> untouched(const EvidenceCase& c) {
  return std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched);
}

Got on_device(const EvidenceCase& c, std::int32_t window, bool official, Wanted wanted, DeviceLayout layout = {},
              const std::vector<float>& log_sum_exp = {}, bool as_they_came = false) {
  const DeviceEvidence there(c, layout);
  const AskedQueries queries(c, there, window, official);
  const DeviceArray<RowWindow>& windows = queries.windows();
  const DeviceArray<float> column(untouched(c)), newest(untouched(c)), lse(log_sum_exp);
  const DeviceArray<std::byte> workspace(
      static_cast<std::size_t>(window_attention_workspace_bytes(there.arguments(), window)));
  launch_window_attention({.evidence = there.arguments(),
                           .windows = windows.data(),
                           .window = window,
                           .queries = as_they_came ? nullptr : queries.floats().data(),
                           .log_sum_exp = log_sum_exp.empty() ? nullptr : lse.data(),
                           .usage = wanted == Wanted::usage ? column.data() : nullptr,
                           .newest = wanted == Wanted::sum ? nullptr : newest.data(),
                           .sum = wanted == Wanted::sum ? column.data() : nullptr,
                           .workspace = workspace.data()},
                          nullptr);
  return {windows.download(), column.download(), newest.download()};
}

constexpr double kAbsolute = 1e-7, kRelative = 2e-5, kRelativeBf16 = 1e-4;

/// No logit of the case is larger.
double largest_logit(const EvidenceCase& c) {
  double key = 0, query = 0;
  for (std::size_t r = 0; r < c.plain.size(); ++r)
    for (std::int32_t t = 0; t < c.table.rows[r].length; ++t) {
      double square = 0;
      for (std::int32_t d = 0; d < c.shape.dim; ++d) {
        const double x = c.plain[r][static_cast<std::size_t>(t * c.shape.dim + d)];
        square += x * x;
      }
      key = std::max(key, square);
    }
  for (const RowGroup& group : c.table.groups)
    for (std::int32_t i = 0; i < group.queries.count; ++i)
      for (std::int32_t h = 0; h < c.spec.query_heads; ++h) {
        double square = 0;
        for (std::int32_t d = 0; d < c.shape.dim; ++d) {
          const double x = load(group.queries.at(i, h) + d * element_bytes(c.shape.query), c.shape.query);
          square += x * x;
        }
        query = std::max(query, square);
      }
  return std::sqrt(key * query) * c.spec.scale() * c.spec.rope.attention_scaling;
}

/// Matrix units cut sums off, so a logit is off by about 2^-22 of the largest partial sums, and a share by as much of
/// itself.
double relative_of(const EvidenceCase& c) {
  constexpr double kCutOff = 3e-7;
  return (c.shape.keys == Element::bf16 ? kRelativeBf16 : kRelative) + kCutOff * largest_logit(c);
}

void expect_as_on_cpu(const EvidenceCase& c, std::int32_t window, bool official = false, DeviceLayout layout = {}) {
  const Evidence evidence = c.evidence();
  const std::vector<RowWindow> windows = row_windows(evidence, c.limits, window, official);
  const WindowAttention want = window_attention(evidence, windows, {.usage = true, .newest = true});
  const at::Tensor sum = attention_sum(evidence, windows);
  in_every_order([&] {
    const Got got = on_device(c, window, official, Wanted::usage, layout);
    for (std::size_t r = 0; r < windows.size(); ++r) {
      ASSERT_EQ(got.windows[r].queries, windows[r].queries) << "row " << r << "; " << c.description();
      ASSERT_EQ(got.windows[r].history, windows[r].history) << "row " << r << "; " << c.description();
    }
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, got.column, want.usage.data<float>(), kAbsolute, relative_of(c)));
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, got.newest, want.newest.data<float>(), kAbsolute, relative_of(c)));
  });
  ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, on_device(c, window, official, Wanted::sum, layout).column,
                                            sum.const_data_ptr<float>(), kAbsolute, relative_of(c)));
}

TEST_F(WindowAttentionKernel, AgreesWithTheCpuForEveryGroupAndElement) {  // B15
  std::uint64_t seed = 0;
  for (const std::int32_t group : {1, 2, 3, 4, 7, 8})
    for (const Element keys : kStored) {
      ++seed;
      expect_as_on_cpu(EvidenceCase(seed, {.group = group,
                                           .kv_heads = 2,
                                           .dim = 16,
                                           .lengths = {45, 17},
                                           .seen = 7,
                                           .keys = keys,
                                           .query = kStored[seed % 3],
                                           .pre_rope = seed % 2 == 0,
                                           .ragged = true}),
                       5);
    }
}

TEST_F(WindowAttentionKernel, AgreesWithTheCpuForEveryHeadSize) {  // B25
  std::uint64_t seed = 100;
  for (const std::int32_t dim : {1, 7, 33, 64, 80, 96, 128, 192, 256})
    for (const Element keys : kStored) {
      expect_as_on_cpu(
          EvidenceCase(++seed, {.group = 2, .dim = dim, .lengths = {37}, .seen = 9, .keys = keys, .pre_rope = true}),
          9);
      expect_as_on_cpu(EvidenceCase(++seed, {.group = 1, .dim = dim, .lengths = {37}, .seen = 2, .keys = keys}), 1);
    }
}

TEST_F(WindowAttentionKernel, AgreesWithTheCpuForEveryLength) {  // B29
  std::uint64_t seed = 200;
  for (const std::int32_t length : {0, 1, 2, 3, 16, 31, 64, 65, 127, 128, 129, 257})
    for (const bool matrix : {false, true})
      expect_as_on_cpu(
          EvidenceCase(
              ++seed, {.group = matrix ? 4 : 1, .dim = 16, .lengths = {length, 5, 0}, .seen = 8, .keys = Element::f16}),
          matrix ? 8 : 3);
}

/// Windows of several widths, some of which have fewer queries than weights; sink logits and log-sum-exps, too.
TEST_F(WindowAttentionKernel, WeighsTheQueriesOfASumAsTheCpuDoes) {
  std::uint64_t seed = 240;
  for (const Element keys : kStored)
    for (const std::int32_t group : {1, 4})
      for (const std::int32_t window : {3, 20}) {
        ++seed;
        const EvidenceCase c(seed, {.group = group,
                                    .kv_heads = 2,
                                    .dim = 16,
                                    .lengths = {45, 17, 4, 700},
                                    .seen = 21,
                                    .keys = keys,
                                    .pre_rope = seed % 2 == 0});
        std::vector<float> weights;
        for (std::int32_t i = 0; i < window; ++i)
          weights.push_back(i % 5 == 4 ? 0.0F : std::ldexp(1.0F + 0.1F * static_cast<float>(i % 3), i % 4 - 2));
        const std::vector<RowWindow> windows = row_windows(c.evidence(), c.limits, window, false);
        const Tensor want = attention_sum(c.evidence(), windows, weights);
        const DeviceEvidence there(c);
        const AskedQueries queries(c, there, window);
        const DeviceArray<float> weighing(weights);
        in_every_order([&] {
          const DeviceArray<float> sum(untouched(c));
          const DeviceArray<std::byte> workspace(
              static_cast<std::size_t>(window_attention_workspace_bytes(there.arguments(), window, true)));
          launch_window_attention({.evidence = there.arguments(),
                                   .windows = queries.windows().data(),
                                   .window = window,
                                   .queries = queries.floats().data(),
                                   .weights = weighing.data(),
                                   .sum = sum.data(),
                                   .workspace = workspace.data()},
                                  nullptr);
          ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, sum.download(), want.data<float>(), kAbsolute, relative_of(c)));
        });
      }
}

TEST_F(WindowAttentionKernel, CapsLogitsAndLetsSinksJoinTheSoftmax) {
  std::uint64_t seed = 250;
  for (const Element keys : kStored)
    for (const double cap : {0.0, 0.5, 30.0})
      for (const std::int32_t window : {1, 8}) {
        ++seed;
        expect_as_on_cpu(EvidenceCase(seed, {.group = 4,
                                             .kv_heads = 2,
                                             .dim = 32,
                                             .lengths = {600, 70},
                                             .seen = 8,
                                             .keys = keys,
                                             .query = kStored[seed % 3],
                                             .loudness = 2,
                                             .logit_cap = cap}),
                         window);
      }
  EvidenceCase loud(251, {.group = 4, .dim = 32, .lengths = {90}, .seen = 8, .keys = Element::f16});
  loud.spec.layers[0].sinks = {200, -200, 1e30F, 0};  // far above all logits, and far below
  expect_as_on_cpu(loud, 8);
  expect_as_on_cpu(loud, 2);
}

TEST_F(WindowAttentionKernel, PutsChunksOfLongRowsTogether) {
  std::uint64_t seed = 300;
  for (const std::int32_t length : {1023, 1024, 1025, 2500}) {
    expect_as_on_cpu(
        EvidenceCase(++seed, {.group = 2, .dim = 8, .lengths = {length, 70}, .seen = 2, .keys = Element::f32}), 2);
    expect_as_on_cpu(
        EvidenceCase(++seed, {.group = 4, .dim = 16, .lengths = {length, 70}, .seen = 4, .keys = Element::bf16}), 4);
  }
}

TEST_F(WindowAttentionKernel, TakesStatisticsOfSeveralChunksAtATimeInVeryLongRows) {
  expect_as_on_cpu(EvidenceCase(340, {.group = 1, .dim = 2, .lengths = {33 * 1024 + 5, 1500}, .seen = 1}), 1);
  expect_as_on_cpu(
      EvidenceCase(341, {.group = 16, .dim = 16, .lengths = {33 * 1024 + 5}, .seen = 1, .keys = Element::f16}), 1);
}

TEST_F(WindowAttentionKernel, TakesMoreQueriesThanATileHolds) {
  std::uint64_t seed = 350;
  for (const Element keys : {Element::f32, Element::f16})
    for (const std::int32_t window : {33, 64})
      expect_as_on_cpu(EvidenceCase(++seed, {.group = 3, .dim = 16, .lengths = {150}, .seen = 64, .keys = keys}),
                       window);
}

TEST_F(WindowAttentionKernel, TakesAnyNumberOfQueriesOfEveryElement) {
  std::uint64_t seed = 360;
  for (const Element keys : {Element::f16, Element::bf16, Element::f8_e4m3, Element::f8_e5m2, Element::i8})
    for (const Element query : {Element::f32, Element::f16, Element::bf16})
      for (const bool pre_rope : {false, true}) {
        ++seed;
        const std::int32_t dim = seed % 3 == 0 ? 128 : seed % 3 == 1 ? 208 : 48;
        expect_as_on_cpu(EvidenceCase(seed, {.group = 7,
                                             .dim = dim,
                                             .lengths = {75},
                                             .seen = 5,
                                             .keys = keys,
                                             .query = query,
                                             .pre_rope = pre_rope}),
                         seed % 2 == 0 ? 5 : 3);
      }
}

TEST_F(WindowAttentionKernel, TakesMoreQueriesThanSharedMemoryHolds) {
  std::uint64_t seed = 380;
  for (const Element query : {Element::bf16, Element::f32})
    expect_as_on_cpu(
        EvidenceCase(++seed,
                     {.group = 8, .dim = 256, .lengths = {201}, .seen = 63, .keys = Element::bf16, .query = query}),
        63);
}

#if defined(KVKEEP_CUDA_MODEL)
/// Barriers and exchanges of a launch.
std::pair<std::int64_t, std::int64_t> steps_of(const EvidenceCase& c, std::int32_t window) {
  const model::Counters before = model::counters();
  static_cast<void>(on_device(c, window, false, Wanted::usage));
  return {model::counters().barriers - before.barriers, model::counters().exchanges - before.exchanges};
}

TEST_F(WindowAttentionKernel, ReadsTheKeysAsOftenForQueriesBeforeRopeWhateverTheirDtype) {
  // Queries before RoPE are turned in f32, so each becomes two numbers of the keys' dtype, as one of f32 does.
  const EvidenceShape shape{.group = 4,
                            .dim = 128,
                            .lengths = {1024},
                            .seen = 32,
                            .keys = Element::bf16,
                            .query = Element::f32,
                            .pre_rope = true,
                            .gaps = false};
  EvidenceShape filed = shape;
  filed.query = Element::bf16;
  EXPECT_EQ(steps_of(EvidenceCase(392, filed), 32), steps_of(EvidenceCase(392, shape), 32));
}

TEST_F(WindowAttentionKernel, GivesARowTheSameBitsOnAnyChip) {
  for (const bool turned : {false, true}) {
    const EvidenceCase c(390, {.group = 3,
                               .kv_heads = 3,
                               .dim = 64,
                               .lengths = {1100, 1100},
                               .seen = 16,
                               .keys = Element::f16,
                               .query = Element::f16,
                               .pre_rope = turned});
    const Got got = on_device(c, 16, false, Wanted::usage);
    for (const model::Chip chip : {model::Chip{.shared_bytes = 227 << 10, .multiprocessors = 1},
                                   model::Chip{.shared_bytes = 32 << 10, .multiprocessors = 132}}) {
      const OtherChip other(chip);
      const Got there = on_device(c, 16, false, Wanted::usage);
      EXPECT_EQ(there.column, got.column) << chip.shared_bytes << " bytes, turned: " << turned;
      EXPECT_EQ(there.newest, got.newest) << chip.shared_bytes << " bytes, turned: " << turned;
    }
  }
}

TEST_F(WindowAttentionKernel, TakesOneLaunchForBothPassesWhereEveryBlockHasAWholeRow) {
  for (const std::int32_t length : {200, 600, 1100}) {
    const EvidenceCase c(391, {.group = 4,
                               .kv_heads = 3,
                               .dim = 128,
                               .lengths = {length, length - 7},
                               .seen = 8,
                               .keys = Element::bf16,
                               .query = Element::bf16});
    std::vector<float> first;
    for (const int multiprocessors : {132, 1}) {
      const OtherChip other({.shared_bytes = 227 << 10, .multiprocessors = multiprocessors});
      const std::int64_t before = model::counters().launches;
      const Got got = on_device(c, 8, false, Wanted::usage);
      // Windows found, queries split, then both passes.
      EXPECT_EQ(model::counters().launches - before, multiprocessors == 1 || length == 200 ? 3 : 4) << length;
      if (first.empty()) first = got.column;
      EXPECT_EQ(got.column, first) << length;
    }
  }
}

TEST_F(WindowAttentionKernel, CopiesAheadAsManyKeysAsThereIsRoomFor) {
  // Of the blocks of eight slots that a warp has, all, half of them, or one. In rows of several rounds, of one, and of
  // less than a block.
  constexpr std::int32_t kPages[] = {0, 1, 16};
  std::uint64_t seed = 410;
  for (const int shared_bytes : {227 << 10, 110 << 10, 64 << 10})
    for (const std::int32_t dim : {48, 128, 208})
      for (const Element keys : {Element::bf16, Element::f8_e4m3, Element::f16}) {
        const OtherChip other({.shared_bytes = shared_bytes, .multiprocessors = 2});
        ++seed;
        EvidenceCase c(seed, {.group = 2,
                              .dim = dim,
                              .lengths = {seed % 2 == 0 ? 520 : 300, 256, 5},
                              .seen = 8,
                              .keys = keys,
                              .query = Element::bf16});
        c.limits.rows[1].due = seed % 4 != 0;
        expect_as_on_cpu(c, 8, false, {.gap = seed % 5 == 0 ? 4 : 0, .page = kPages[seed % 3]});
      }
}
#endif

TEST_F(WindowAttentionKernel, FindsTheLargestLogitsAnywhereInARow) {
  std::uint64_t seed = 395;
  for (const Element keys : {Element::f16, Element::bf16})
    for (const float factor : {80.0F, -80.0F}) {
      EvidenceCase c(++seed, {.group = 4, .dim = 32, .lengths = {600}, .seen = 8, .keys = keys, .query = keys});
      for (std::int64_t t = 300; t < 600; t += 17)
        for (std::int64_t d = 0; d < 32; ++d)
          c.set_key(0, t, d, factor * c.plain[0][static_cast<std::size_t>(t * 32 + d)]);
      expect_as_on_cpu(c, 8);
    }
}

TEST_F(WindowAttentionKernel, KeepsEveryQueryWhereverItsLogitsJump) {
  // A warp compares logits with the largest of its first tile, in the first 256 slots of a part. Those of six warps'
  // second tiles lie up to 100 nats above. Around 85 each warp's sum is a number, and what a block adds up is not.
  for (const std::int32_t length : {512, 4096})
    for (int gap = 70; gap <= 100; gap += length > 512 ? 5 : 1) {
      EvidenceCase c(398,
                     {.group = 1, .dim = 16, .lengths = {length}, .seen = 16, .keys = Element::f16, .gaps = false});
      c.spec.softmax_scale = 1.0;
      for (std::int64_t t = 0; t < length; ++t)
        for (std::int64_t d = 0; d < 16; ++d)
          c.set_key(0, t, d, d == 0 && t % 512 >= 256 && t % 512 < 448 ? static_cast<float>(gap) : 0.0F);
      for (std::int32_t i = 0; i < 16; ++i)
        for (std::int64_t d = 0; d < 16; ++d)
          store(d == 0 ? 1.0F : 0.0F, Element::f32,
                c.rings[0].data.data() + c.table.groups[0].queries.index(i) * c.table.groups[0].queries.token_stride +
                    d * 4);
      ASSERT_NO_FATAL_FAILURE(expect_as_on_cpu(c, 16)) << "a gap of " << gap << " nats";
    }
}

TEST_F(WindowAttentionKernel, ReadsPagesAndVectorsThatAreNotAligned) {  // B21, B24
  std::uint64_t seed = 400;
  for (const Element keys : kStored)
    for (const std::int32_t page : {0, 1, 16})
      for (const std::int64_t gap : {0, 4})
        for (const std::int32_t window : {1, 8})
          expect_as_on_cpu(
              EvidenceCase(++seed, {.group = 2, .kv_heads = 2, .dim = 32, .lengths = {67}, .seen = 8, .keys = keys}),
              window, false, {.gap = gap, .page = page});
}

TEST_F(WindowAttentionKernel, KnowsThePublishedWindowsToo) {
  std::uint64_t seed = 500;
  for (const std::int32_t seen : {0, 1, 2, 9})
    for (const std::int32_t window : {1, 4, 20})
      expect_as_on_cpu(EvidenceCase(++seed, {.group = 2,
                                             .kv_heads = 2,
                                             .dim = 16,
                                             .lengths = {30, 6, 1},
                                             .seen = seen,
                                             .keys = Element::f16,
                                             .ragged = true}),
                       window, true);
}

TEST_F(WindowAttentionKernel, LeavesRowsAloneThatAreNotDue) {
  EvidenceCase c(600, {.group = 2, .kv_heads = 3, .dim = 16, .lengths = {50, 40}, .seen = 8, .keys = Element::f16});
  c.limits.rows[1].due = c.limits.rows[3].due = false;
  expect_as_on_cpu(c, 8);
  expect_as_on_cpu(c, 2);
}

TEST_F(WindowAttentionKernel, GivesTheNewestAlone) {
  const EvidenceCase c(650, {.group = 4, .kv_heads = 2, .dim = 64, .lengths = {90}, .seen = 1, .keys = Element::bf16});
  const Evidence evidence = c.evidence();
  const WindowAttention want = window_attention(evidence, row_windows(evidence, c.limits, 1, false), {.newest = true});
  expect_rows_agree(c, on_device(c, 1, false, Wanted::newest_alone).newest, want.newest.data<float>(), kAbsolute,
                    kRelative);
}

TEST_F(WindowAttentionKernel, StaysExactWhereLogitsAreLarge) {
  std::uint64_t seed = 700;
  for (const Element keys : kStored)
    for (const double loudness : {1e-3, 6.0})
      expect_as_on_cpu(
          EvidenceCase(++seed,
                       {.group = 4, .dim = 128, .lengths = {100}, .seen = 8, .keys = keys, .loudness = loudness}),
          8);
}

/// log-sum-exp of every query of a case with one KV head, in double.
std::vector<float> log_sums(const EvidenceCase& c, const std::vector<float>& queries, std::int32_t window) {
  std::vector<float> out;
  const auto dim = static_cast<std::size_t>(c.shape.dim);
  for (std::size_t n = 0; n < queries.size() / dim; ++n) {
    const QueryView& view = c.table.groups[0].queries;
    const std::int32_t at = view.position(view.count - window + static_cast<std::int32_t>(n) % window);
    const auto head = n / static_cast<std::size_t>(window);
    double sum = c.spec.layers[0].sinks.empty() ? 0.0 : std::exp(static_cast<double>(c.spec.layers[0].sinks[head]));
    for (std::int32_t t = 0; t < c.table.rows[0].length; ++t) {
      if (c.positions[0][static_cast<std::size_t>(t)] > at) continue;
      double logit = 0;
      for (std::size_t d = 0; d < dim; ++d)
        logit += static_cast<double>(queries[n * dim + d]) *
                 static_cast<double>(c.plain[0][static_cast<std::size_t>(t) * dim + d]);
      sum += std::exp(logit);
    }
    out.push_back(static_cast<float>(std::log(sum)));
  }
  return out;
}

TEST_F(WindowAttentionKernel, ReadsTheKeysOnceWhereItIsGivenTheSums) {
  for (const Element keys : {Element::f32, Element::f16})
    for (const std::int32_t window : {2, 8}) {
      EvidenceCase c(801, {.group = 4, .dim = 32, .lengths = {90}, .seen = 8, .keys = keys});
      c.limits.rows[0].budget = 5;  // a window shorter than what is held
      const DeviceEvidence there(c);
      std::vector<float> queries = AskedQueries(c, there, window).floats().download();
      for (float& q : queries) q *= static_cast<float>(c.spec.scale());
      const std::vector<float> sums = log_sums(c, queries, window);
      const Evidence evidence = c.evidence();
      const WindowAttention want =
          window_attention(evidence, row_windows(evidence, c.limits, window, false), {.usage = true, .newest = true});
      const Got got = on_device(c, window, false, Wanted::usage, {}, sums);
      expect_rows_agree(c, got.column, want.usage.data<float>(), kAbsolute, kRelative);
      expect_rows_agree(c, got.newest, want.newest.data<float>(), kAbsolute, kRelative);
    }
}

TEST_F(WindowAttentionKernel, ReadsQueriesAfterRopeWhereTheyAre) {
  std::uint64_t seed = 850;
  for (const Element keys : kStored)
    for (const Element query : {Element::f32, Element::f16, Element::bf16})
      for (const std::int32_t dim : {16, 80}) {
        EvidenceCase c(
            ++seed,
            {.group = 4, .kv_heads = 2, .dim = dim, .lengths = {90, 3, 40}, .seen = 9, .keys = keys, .query = query});
        c.limits.rows[0].budget = 5;
        const DeviceEvidence there(c);
        ASSERT_EQ(window_attention_reads_views(there.arguments(), 9), keys != Element::f32) << c.description();
        if (keys == Element::f32) {
          EXPECT_THROW(static_cast<void>(on_device(c, 9, false, Wanted::usage, {}, {}, true)), InvalidArgument);
          continue;
        }
        in_every_order([&] {
          const Got copied = on_device(c, 9, false, Wanted::usage),
                    read = on_device(c, 9, false, Wanted::usage, {}, {}, true);
          EXPECT_EQ(read.column, copied.column) << c.description();
          EXPECT_EQ(read.newest, copied.newest) << c.description();
        });
      }
}

TEST_F(WindowAttentionKernel, GivesEqualKeysEqualBitsAndRowsTheSameBitsInAnyBatch) {
  for (const Element keys : kStored)
    for (const std::int32_t window : {2, 8}) {
      EvidenceCase c(900, {.group = 4, .dim = 48, .lengths = {1200}, .seen = 8, .keys = keys});
      for (const std::int64_t t : {1, 5, 130, 700, 1100}) c.copy_key(0, 3, t);
      const Got got = on_device(c, window, false, Wanted::usage);
      for (const std::size_t t : {1, 5, 130, 700, 1100}) {
        ASSERT_EQ(got.column[t], got.column[3]) << t;
        ASSERT_EQ(got.newest[t], got.newest[3]) << t;
      }
      EXPECT_EQ(on_device(c, window, false, Wanted::usage, {.gap = 1 * element_bytes(keys), .page = 32}).column,
                got.column);
      EvidenceCase both = c;  // the same row twice
      both.shape.lengths = {1200, 1200};
      for (auto* list : {&both.keys}) list->push_back(list->front());
      both.plain.push_back(both.plain.front()), both.scales.push_back(both.scales.front()),
          both.positions.push_back(both.positions.front()), both.rings.push_back(both.rings.front()),
          both.tallies.emplace_back(), both.given_scores.emplace_back();
      both.limits.rows.push_back(both.limits.rows.front());
      Row second = both.table.rows.front();
      second.first = second.length;
      both.table.rows.push_back(second);
      both.table.groups.push_back(both.table.groups.front());
      both.table.slots *= 2;
      both.settle();
      const Got twice = on_device(both, window, false, Wanted::usage);
      EXPECT_EQ(std::vector<float>(twice.column.begin(), twice.column.begin() + 1200), got.column);
      EXPECT_EQ(std::vector<float>(twice.column.begin() + 1200, twice.column.end()), got.column);
    }
}

TEST_F(WindowAttentionKernel, GivesASlotWhoseLogitsAreNoNumbersNothing) {
  for (const Element keys : {Element::f32, Element::bf16, Element::f8_e4m3, Element::f8_e5m2})
    for (const std::int32_t window : {2, 8}) {
      EvidenceCase c(950, {.group = 2, .dim = 32, .lengths = {60}, .seen = 8, .keys = keys});
      EvidenceCase without = c;  // the same row without slot 7
      without.settle();
      without.keys[0].erase(without.keys[0].begin() + 7 * 32 * element_bytes(keys),
                            without.keys[0].begin() + 8 * 32 * element_bytes(keys));
      without.plain[0].erase(without.plain[0].begin() + 7 * 32, without.plain[0].begin() + 8 * 32);
      without.positions[0].erase(without.positions[0].begin() + 7);
      if (is_8bit(keys)) without.scales[0].erase(without.scales[0].begin() + 7);
      --without.table.rows[0].length;
      --without.table.slots;
      without.settle();
      c.limits.rows[0].budget = without.limits.rows[0].budget = 30;
      for (const float bad : bad_numbers(keys)) {
        c.set_key(0, 7, 5, bad);
        std::vector<float> got = on_device(c, window, false, Wanted::usage).column;
        const Evidence evidence = without.evidence();
        const WindowAttention want =
            window_attention(evidence, row_windows(evidence, without.limits, window, false), {.usage = true});
        ASSERT_EQ(got[7], 0.0F);
        got.erase(got.begin() + 7);
        expect_rows_agree(without, got, want.usage.data<float>(), kAbsolute, kRelativeBf16);
      }
    }
}

TEST_F(WindowAttentionKernel, ReducesTheHistoryAlone) {
  std::uint64_t seed = 1000;
  for (const std::int32_t group : {1, 3, 8})
    for (const Element keys : kStored)
      for (const bool max_logit : {false, true})
        for (const std::int32_t dim : {80, 9}) {
          ++seed;
          EvidenceCase c(seed, {.group = group,
                                .kv_heads = 2,
                                .dim = dim,
                                .lengths = {70, 9, 1},
                                .seen = 9,
                                .keys = keys,
                                .pre_rope = true,
                                .ragged = true,
                                .logit_cap = seed % 4 == 0 ? 3.0 : 0.0});
          const Evidence evidence = c.evidence();
          const std::vector<RowWindow> windows = row_windows(evidence, c.limits, 9, seed % 2 == 0);
          std::vector<std::int32_t> first;
          for (std::size_t r = 0; r < c.table.rows.size(); ++r)
            first.push_back(c.limits.rows[r].guarded.sinks = c.table.rows[r].length / 5);
          const std::int32_t newest_counts = 1 + static_cast<std::int32_t>(seed % 3);
          const HistoryOptions options{.group = max_logit ? GroupReduce::max_logit : GroupReduce::mean_prob,
                                       .newest_counts = newest_counts};
          std::vector<RowWindow> asking;
          for (const RowWindow& window : windows) asking.push_back(window.without_oldest(newest_counts - 1));
          const at::Tensor want = history_attention(evidence, asking, options, first);
          const DeviceEvidence there(c, {.page = 16});
          const AskedQueries queries(c, there, 9);
          const DeviceArray<RowWindow> ours(windows);
          const DeviceArray<float> out(untouched(c));
          const DeviceArray<std::byte> workspace(
              static_cast<std::size_t>(window_attention_workspace_bytes(there.arguments(), 9)));
          launch_history_attention({.evidence = there.arguments(),
                                    .windows = ours.data(),
                                    .queries = queries.floats().data(),
                                    .reading = {WindowReading::Kind::history, 9, options, true},
                                    .out = out.data(),
                                    .workspace = workspace.data()},
                                   nullptr);
          ASSERT_NO_FATAL_FAILURE(
              expect_rows_agree(c, out.download(), want.const_data_ptr<float>(), kAbsolute, relative_of(c)));
        }
}

TEST_F(WindowAttentionKernel, RefusesWhatItCannotReduce) {
  float out = 0;
  EXPECT_THROW(launch_window_attention({.evidence = {.dim = 0}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_window_attention({.evidence = {.dim = 257}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_window_attention({.evidence = {.dim = 8}, .usage = &out, .sum = &out}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_window_attention({.evidence = {.dim = 8}, .weights = &out, .usage = &out}, nullptr),
               InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::window_attention_test
