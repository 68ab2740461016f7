// SnapKV on a GPU against the CPU, both styles, from queries to scores.

#include "snapkv.h"

#include "evidence_case.h"
#include "prepare.h"
#include "window_attention.h"

namespace kvkeep::cuda::snapkv_test {
namespace {

using SnapKVKernel = OnDevice;

void expect_as_on_cpu(const EvidenceCase& c, const SnapKVOptions& options) {
  const bool average = options.style == SnapKVOptions::Style::snapkv;
  WindowAttention unused;
  const Scores want = SnapKV(options).score(c.evidence(), c.limits, unused);
  in_every_order([&] {
    const DeviceEvidence there(c);
    const EvidenceArguments evidence = there.arguments();
    const std::vector<float> nothing(static_cast<std::size_t>(c.table.slots), kUntouched);
    const DeviceArray<float> queries(c.table.groups.size() *
                                     static_cast<std::size_t>(c.spec.query_heads * options.window * c.shape.dim)),
        attention(nothing), scores(nothing);
    const DeviceArray<RowWindow> windows(c.table.rows.size());
    const DeviceArray<std::byte> workspace(
        static_cast<std::size_t>(window_attention_workspace_bytes(evidence, options.window)));
    launch_prepare({.evidence = evidence,
                    .newest = nullptr,
                    .window = options.window,
                    .windows = windows.data(),
                    .queries = queries.data()},
                   nullptr);
    if (average)
      launch_window_attention({.evidence = evidence,
                               .windows = windows.data(),
                               .window = options.window,
                               .queries = queries.data(),
                               .usage = attention.data(),
                               .workspace = workspace.data()},
                              nullptr);
    else
      launch_history_attention({.evidence = evidence,
                                .windows = windows.data(),
                                .window = options.window,
                                .queries = queries.data(),
                                .max_logit = true,
                                .out = attention.data(),
                                .workspace = workspace.data()},
                               nullptr);
    launch_snapkv({.evidence = evidence,
                   .windows = windows.data(),
                   .attention = attention.data(),
                   .pool = options.pool,
                   .average = average,
                   .scores = scores.data()},
                  nullptr);
    ASSERT_NO_FATAL_FAILURE(expect_rows_agree(c, scores.download(), want.data.data<float>(), 1e-7,
                                              c.shape.keys == Element::bf16 ? 1e-4 : 2e-5));
  });
}

TEST_F(SnapKVKernel, AgreesWithTheCpuInBothStyles) {
  std::uint64_t seed = 0;
  for (const auto style : {SnapKVOptions::Style::snapkv, SnapKVOptions::Style::rkv})
    for (const std::int32_t pool : {1, 5})
      for (const Element keys : kStored)
        for (const std::int32_t seen : {0, 8})
          expect_as_on_cpu(EvidenceCase(++seed, {.group = 3,
                                                 .kv_heads = 2,
                                                 .dim = 16,
                                                 .lengths = {50, 9, 1, 0},
                                                 .seen = seen,
                                                 .keys = keys,
                                                 .ragged = true}),
                           {.window = 6, .pool = pool, .style = style});
  expect_as_on_cpu(EvidenceCase(++seed, {.dim = 4, .lengths = {1027}, .seen = 3}), {.window = 2, .pool = 5});
}

TEST_F(SnapKVKernel, LeavesRowsAloneThatAreNotDueAndRefusesEvenPools) {
  EvidenceCase c(100, {.group = 2, .kv_heads = 3, .dim = 8, .lengths = {30}, .seen = 4});
  c.limits.rows[1].due = false;
  expect_as_on_cpu(c, {.window = 4, .pool = 3});
  EXPECT_THROW(launch_snapkv({.evidence = {}, .pool = 4}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::snapkv_test
