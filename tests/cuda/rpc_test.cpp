// RPC on a GPU against the CPU: both styles, both ways to share between heads, from queries to scores.

#include "rpc.h"

#include "asked_queries.h"
#include "window_attention.h"

namespace kvkeep::cuda::rpc_test {
namespace {

using RpcKernel = OnDevice;

std::vector<float> on_device(const EvidenceCase& c, const RpcOptions& options, DeviceLayout layout) {
  const DeviceEvidence there(c, layout);
  const AskedQueries queries(c, there, options.window);
  const DeviceArray<float> scores(std::vector<float>(static_cast<std::size_t>(c.table.slots), kUntouched));
  RpcArguments arguments{.evidence = there.arguments(),
                         .windows = queries.windows().data(),
                         .queries = queries.floats().data(),
                         .options = options,
                         .slots = c.table.slots,
                         .scores = scores.data()};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(rpc_workspace_bytes(arguments)));
  arguments.workspace = workspace.data();
  launch_rpc(arguments, nullptr);
  return scores.download();
}

void expect_as_on_cpu(const EvidenceCase& c, const RpcOptions& options, DeviceLayout layout = {}) {
  WindowAttention unused;
  const Scores want = Rpc(options).score(c.evidence(), c.limits, unused);
  in_every_order([&] {
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, on_device(c, options, layout), want.data.data<float>(), 1e-6,
                                              c.shape.keys == Element::bf16 ? 1e-4 : 2e-5));
  });
}

using Style = RpcOptions::Style;
using Heads = RpcOptions::Heads;

TEST_F(RpcKernel, AgreesWithTheCpuUnderEveryOption) {
  std::uint64_t seed = 0;
  for (const Style style : {Style::fixed, Style::official})
    for (const Heads heads : {Heads::group, Heads::all})
      for (const std::int32_t pool : {1, 7})
        for (const std::int32_t seen : {0, 1, 9}) {
          ++seed;
          expect_as_on_cpu(EvidenceCase(seed, {.group = 2,
                                               .kv_heads = 3,
                                               .dim = 16,
                                               .lengths = {50, 9, 1, 0},
                                               .seen = seen,
                                               .keys = kStored[seed % std::size(kStored)],
                                               .pre_rope = true,
                                               .ragged = heads == Heads::group}),
                           {.window = 6, .pool = pool, .style = style, .heads = heads});
        }
}

TEST_F(RpcKernel, AgreesWithTheCpuForEveryLengthAndWindow) {  // B29
  std::uint64_t seed = 100;
  for (const Style style : {Style::fixed, Style::official})
    for (const std::int32_t length : {2, 3, 7, 31, 64, 65, 127, 1023, 1024, 1025})
      for (const std::int32_t window : {1, 4}) {
        ++seed;
        expect_as_on_cpu(
            EvidenceCase(seed, {.kv_heads = 2, .dim = 4, .lengths = {length}, .seen = 5}),
            {.window = window, .pool = 5, .style = style, .heads = seed % 2 == 0 ? Heads::all : Heads::group});
      }
}

TEST_F(RpcKernel, ReadsPagesAndKnowsEveryHeadSize) {  // B21, B25
  std::uint64_t seed = 200;
  for (const Element keys : kStored)
    for (const std::int32_t dim : {1, 7, 64, 256})
      expect_as_on_cpu(
          EvidenceCase(++seed, {.group = 4, .kv_heads = 2, .dim = dim, .lengths = {67, 33}, .seen = 8, .keys = keys}),
          {.window = 8}, {.gap = 4, .page = 16});
}

TEST_F(RpcKernel, CountsFromTheProtectedOldestSlotsOn) {
  EvidenceCase c(300, {.group = 2, .dim = 8, .lengths = {40, 40}, .seen = 6});
  c.limits.rows[0].guarded = {12, 4};
  c.limits.rows[1] = {40, true, {40, 0}};  // nothing is left of the history
  expect_as_on_cpu(c, {.window = 4, .pool = 3, .style = Style::official});
}

TEST_F(RpcKernel, LeavesRowsAloneThatAreNotDueAndRefusesEvenPools) {
  EvidenceCase c(400, {.group = 2, .kv_heads = 3, .dim = 8, .lengths = {30, 20}, .seen = 4});
  c.limits.rows[1].due = false;
  expect_as_on_cpu(c, {.window = 4, .pool = 3});
  expect_as_on_cpu(c, {.window = 4, .pool = 3, .style = Style::official});
  c.limits.rows[0].due = c.limits.rows[2].due = false;
  expect_as_on_cpu(c, {.window = 4, .pool = 3, .heads = Heads::all});
  EXPECT_THROW(launch_rpc({.evidence = {.dim = 8}, .options = {.pool = 4}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_rpc({.evidence = {.dim = 257}}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::rpc_test
