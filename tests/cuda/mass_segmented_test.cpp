// SPDX-License-Identifier: Apache-2.0
// AMS in one launch: mass, credit and slots are those of the CPU bit for bit, for every option, variant and length.

#include "mass_segmented.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "device.h"
#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/torch.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda::mass_segmented_test {
namespace {

using MassSegmentedKernel = OnDevice;

struct Case {
  MassSegmentedOptions options;
  Variant variant = Variant::strict;
  Padding padding;
  std::int32_t heads = 1;
  bool explain = false;
  std::vector<Row> rows;
  std::vector<RowLimit> limits;
  std::vector<RowWindow> windows;
  std::vector<std::int32_t> newest;  ///< [groups] position of the newest query
  std::vector<std::vector<std::int32_t>> positions;
  std::vector<std::vector<float>> old_credit;
  std::vector<std::vector<SlotRange>> pins;  ///< [rows]
  std::vector<float> scores, usage;

  [[nodiscard]] std::int32_t longest() const {
    std::int32_t most = 0;
    for (const Row& row : rows) most = std::max(most, row.length);
    return most;
  }
};

/// Pins up to three ranges of slots, as far as the budget goes.
void pin(RowLimit& limit, std::int32_t length, oracle::Random& random, std::vector<SlotRange>& pins) {
  Protected& guarded = limit.guarded;
  std::int32_t from = guarded.sinks, room = limit.budget - guarded.count();
  const std::int32_t end = length - guarded.recents;
  while (pins.size() < 3 && room > 0 && from < end) {
    from = random.between(from, end - 1);
    const std::int32_t slots = random.between(1, std::min(room, end - from));
    pins.push_back({from, from + slots});
    guarded.pinned += slots, room -= slots, from += slots + random.between(1, 9);
  }
  guarded.ranges = static_cast<std::int32_t>(pins.size());
}

/// groups: 0: one or two.
Case random_case(oracle::Random& random, std::initializer_list<int> lengths, int groups = 0) {
  Case c;
  MassSegmentedOptions& o = c.options;
  c.variant = random.one_of({Variant::strict, Variant::strict, Variant::official});
  o.segments = random.one_of(
      {Segmentation::mass, Segmentation::mass, Segmentation::mass, Segmentation::fixed, Segmentation::none});
  o.fixed = random.one_of({1, 16, 128});
  o.segment_mass = random.one_of({0.0005, 0.02, 0.02, 0.1, 0.3, 1.0});
  o.min_segment = random.one_of({1, 8, 32});
  o.max_segment = random.one_of({64, 100, 1024});
  o.min_quota = random.one_of({0, 1, 8, 40});
  o.quotas = random.one_of(
      {QuotaWeight::mass, QuotaWeight::mass, QuotaWeight::equal, QuotaWeight::length, QuotaWeight::raw_mass});
  o.credit = random.chance(0.7);
  o.pool = random.one_of({1, 5, 7});
  o.suffix_fill =
      random.one_of({SuffixFill::max_head, SuffixFill::max_global, SuffixFill::causal_mean, SuffixFill::exclude});
  o.coverage = random.one_of({1.0, 1.0, 0.5, 0.0});
  o.coverage_auto = random.chance(0.1);
  o.protected_mass = random.chance(0.5);
  c.heads = random.one_of({1, 2, 4});
  c.explain = random.chance(0.5);
  if (c.variant == Variant::official) {
    o.coverage = 1.0;
    o.coverage_auto = false;
    o.protected_mass = true;
    c.padding = {random.between(0, 5), random.between(0, 9)};
  }
  for (int g = groups > 0 ? groups : random.between(1, 2); g > 0; --g) {
    const std::int32_t length = random.one_of(lengths), budget = random.between(1, length);
    const bool due = length > budget && random.chance(0.9);
    const std::int32_t window = random.between(0, std::min(40, length - 1)),
                       history = length - random.between(window == 0 ? 0 : 1, std::max(window, 1));
    c.newest.push_back(2 * length - random.between(0, 6));
    for (std::int32_t h = 0; h < c.heads; ++h) {
      Row row;
      row.length = length;
      row.first = static_cast<std::int64_t>(c.scores.size());
      c.positions.emplace_back();
      for (std::int32_t t = 0; t < length; ++t) c.positions.back().push_back(2 * t + random.between(0, 1));
      c.old_credit.emplace_back(static_cast<std::size_t>(random.chance(0.8) ? random.between(0, length) : length + 3));
      for (float& x : c.old_credit.back()) x = static_cast<float>(random.unit()) * 0.01F;
      c.limits.push_back(
          {budget, due, protect(length, budget, random.between(0, 5), random.between(0, 33), c.variant)});
      c.pins.emplace_back();
      if (c.variant == Variant::strict && random.chance(0.3)) pin(c.limits.back(), length, random, c.pins.back());
      c.windows.push_back({window, window == 0 ? length : std::max(0, history)});
      const int kind = random.between(0, 3);
      for (std::int32_t t = 0; t < length; ++t) {
        c.scores.push_back(kind == 0 ? static_cast<float>(random.between(0, 3)) : static_cast<float>(random.normal()));
        c.usage.push_back(kind == 1   ? 0.0F
                          : kind == 2 ? static_cast<float>(random.between(0, 1))
                                      : static_cast<float>(random.unit() * random.unit() * random.unit()) /
                                            static_cast<float>(length));
      }
      c.rows.push_back(row);
    }
  }
  return c;
}

struct Outcome {
  std::vector<float> mass, used, credit;
  std::vector<std::int32_t> slots;
  std::vector<std::int64_t> indptr;
};

Outcome on_cpu(const Case& c) {
  const ModelSpec spec{.query_heads = c.heads,
                       .kv_heads = c.heads,
                       .key_dim = 4,
                       .value_dim = 4,
                       .softmax_scale = 0,
                       .rope = {},
                       .layers = std::vector<LayerSpec>(1)};
  RowTable table;
  table.rows = c.rows;
  table.slots = static_cast<std::int64_t>(c.scores.size());
  WindowAttention seen;
  std::vector<std::int32_t> newest = c.newest;
  for (std::size_t r = 0; r < c.rows.size(); ++r) {
    table.rows[r].positions = c.positions[r].data();
    table.rows[r].credit = c.old_credit[r].data();
    table.rows[r].credit_length = static_cast<std::int32_t>(c.old_credit[r].size());
    seen.windows.push_back(c.windows[r]);
    if (r % static_cast<std::size_t>(c.heads) != 0) continue;
    RowGroup group;
    group.first_row = static_cast<std::int64_t>(r);
    group.queries.positions = &newest[r / static_cast<std::size_t>(c.heads)];
    group.queries.ring = group.queries.count = 1;
    table.groups.push_back(group);
  }
  const auto f32 = at::TensorOptions().dtype(at::kFloat);
  seen.usage = at::from_blob(const_cast<float*>(c.usage.data()), {table.slots}, f32).clone();
  Decision decision;
  decision.scores.data = at::from_blob(const_cast<float*>(c.scores.data()), {table.slots}, f32);
  Limits limits{c.variant, c.padding, c.limits};
  for (std::size_t r = 0; r < c.rows.size(); ++r) limits.rows[r].guarded.pins = c.pins[r].data();
  MassSegmented(c.options).allot({.spec = spec,
                                  .table = table,
                                  .basis = QueryBasis::pre_rope,
                                  .moment = Moment::step_end,
                                  .explain = c.explain,
                                  .output_projections = {}},
                                 limits, decision.scores, seen, decision);
  const auto floats = [](const at::Tensor& t) {
    return std::vector<float>(t.data_ptr<float>(), t.data_ptr<float>() + t.numel());
  };
  Outcome out;
  out.mass = floats(decision.allotment->mass.data);
  if (c.explain) out.used = floats(decision.allotment->mass_used.data);
  if (decision.credit) out.credit = floats(*decision.credit);
  out.slots.assign(decision.keep->slots.data<std::int32_t>(),
                   decision.keep->slots.data<std::int32_t>() + decision.keep->slots.numel());
  out.indptr = decision.keep->indptr;
  return out;
}

template <class T>
void expect_alike(const std::vector<T>& got, const std::vector<T>& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  const auto differs = std::mismatch(got.begin(), got.end(), wanted.begin());
  ASSERT_TRUE(differs.first == got.end()) << what << ": at " << differs.first - got.begin() << " of " << got.size()
                                          << " stands " << *differs.first << "; the CPU has " << *differs.second;
}

void compare(const Case& c, const std::string& what) {
  const Outcome wanted = on_cpu(c);
  in_every_order([&] {
    std::vector<std::int32_t> positions;
    std::vector<float> old_credit;
    for (std::size_t r = 0; r < c.rows.size(); ++r) {
      positions.insert(positions.end(), c.positions[r].begin(), c.positions[r].end());
      old_credit.insert(old_credit.end(), c.old_credit[r].begin(), c.old_credit[r].end());
    }
    const DeviceArray<std::int32_t> device_positions(positions);
    const DeviceArray<float> device_credit(old_credit);
    std::vector<Row> rows = c.rows;
    std::size_t next = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      rows[r].positions = device_positions.data() + rows[r].first;
      rows[r].credit = device_credit.data() + next;
      rows[r].credit_length = static_cast<std::int32_t>(c.old_credit[r].size());
      next += c.old_credit[r].size();
    }
    const DeviceArray<Row> device_rows(rows);
    std::vector<SlotRange> all_pins;
    for (const std::vector<SlotRange>& pins : c.pins) all_pins.insert(all_pins.end(), pins.begin(), pins.end());
    const DeviceArray<SlotRange> device_pins(all_pins);
    std::vector<RowLimit> row_limits = c.limits;
    for (std::size_t r = 0, at = 0; r < rows.size(); at += c.pins[r++].size())
      row_limits[r].guarded.pins = device_pins.data() + at;
    const DeviceArray<RowLimit> limits(row_limits);
    const DeviceArray<RowWindow> windows(c.windows);
    const DeviceArray<std::int32_t> newest(c.newest);
    std::vector<QueryView> last(c.newest.size());
    for (std::size_t g = 0; g < last.size(); ++g) {
      last[g].positions = newest.data() + g;
      last[g].ring = last[g].count = 1;
    }
    const DeviceArray<QueryView> queries(last);
    const DeviceArray<float> scores(c.scores), mass(c.usage), used(c.explain ? c.usage.size() : 0),
        credit(c.options.credit ? c.usage.size() : 0);
    const DeviceArray<std::int64_t> indptr(wanted.indptr);
    const DeviceArray<std::int32_t> slots(wanted.slots.size());
    MassSegmentedArguments a;
    a.options = c.options;
    a.variant = c.variant;
    a.padding = c.padding;
    a.rows = device_rows.data();
    a.limits = limits.data();
    a.windows = windows.data();
    a.queries = queries.data();
    a.count = static_cast<std::int32_t>(c.rows.size());
    a.heads = c.heads;
    a.longest = c.longest();
    a.slots_in_all = static_cast<std::int64_t>(c.scores.size());
    a.scores = scores.data();
    a.mass = mass.data();
    a.used = c.explain ? used.data() : nullptr;
    a.credit = c.options.credit ? credit.data() : nullptr;
    a.indptr = indptr.data();
    a.slots = slots.data();
    const std::size_t bytes = mass_segmented_workspace_bytes(c.options, a.count, a.longest, a.slots_in_all);
    DeviceArray<std::byte> workspace(bytes);
    workspace.upload(std::vector<std::byte>(bytes, std::byte{0x7F}));  // numbers that are larger than any other
    a.workspace = workspace.data();
    launch_mass_segmented(a, nullptr);
    expect_alike(mass.download(), wanted.mass, what + ", mass");
    expect_alike(used.download(), wanted.used, what + ", mass with credit");
    expect_alike(credit.download(), wanted.credit, what + ", credit");
    expect_alike(slots.download(), wanted.slots, what + ", slots");
  });
}

TEST_F(MassSegmentedKernel, KeepsTheCpusSlotsWithItsMassAndCreditBitForBit) {
  oracle::Random random(21);
  for (int round = 0; round < 120; ++round)
    compare(random_case(random, {1, 2, 3, 31, 64, 97, 255, 256, 257, 600}), "round " + std::to_string(round));
}

TEST_F(MassSegmentedKernel, TakesTheLongestRowsThatFitSharedMemoryAndOneMore) {
  oracle::Random random(24);
  for (const int longest : {3072, 3073})
    for (int round = 0; round < 3; ++round) {
      Case c = random_case(random, {longest});
      compare(c, std::to_string(longest) + " slots, round " + std::to_string(round));
    }
}

TEST_F(MassSegmentedKernel, TakesRowsWhoseSharedMemoryIsTooMuchWithWhatIsStaticAlone) {
  // 17 bytes a slot are below 48 KiB for all of these, and above it with the kernel's static 26 KB for most: the first
  // GPU refused them.
  oracle::Random random(25);
  for (const int longest : {1100, 1200, 1300, 1536, 2048, 2800})
    compare(random_case(random, {longest}), std::to_string(longest) + " slots");
}

TEST_F(MassSegmentedKernel, TakesRowsThatNeedTheLargestBlockAndSegmentsTooLongForAWarp) {
  oracle::Random random(22);
  for (int round = 0; round < 6; ++round) {
    Case c = random_case(random, {4097, 6000});
    if (round % 2 == 0) c.options.segments = Segmentation::none;
    compare(c, "round " + std::to_string(round));
  }
}

TEST_F(MassSegmentedKernel, TakesLongRowsAmongSoManyThatTwoBlocksShareAMultiprocessor) {
  oracle::Random random(28);
  Case c;
  while (c.longest() != 4100) c = random_case(random, {1, 5, 9, 17, 29, 33, 40, 40, 40, 64, 64, 64, 97, 97, 4100}, 133);
  compare(c, std::to_string(c.rows.size()) + " rows");
}

TEST_F(MassSegmentedKernel, TakesRowsInSharedMemoryByBlocksOfEverySize) {
  oracle::Random random(29);
  for (const int groups : {1, 133, 265}) {  // blocks of 1024, of 512 and of 256 threads: one row is long enough
    Case c;
    do c = random_case(random, {1, 5, 9, 17, 29, 33, 40, 40, 40, 64, 64, 64, 97, 97, 1100}, groups);
    while (c.longest() != 1100 || c.heads > 1);
    compare(c, std::to_string(c.rows.size()) + " rows");
  }
}

TEST_F(MassSegmentedKernel, TakesSegmentsOfEveryLengthThatOneWarpRanksInItsOwnWay) {
  oracle::Random random(26);
  for (const int slots : {1, 2, 31, 32, 33, 63, 64, 65, 128, 255, 256, 257, 600})
    for (int round = 0; round < 3; ++round) {
      Case c = random_case(random, {600});
      c.options.segments = Segmentation::fixed;
      c.options.fixed = slots;
      if (round == 0)
        for (float& score : c.scores) score = static_cast<float>(random.between(0, 1));  // most of them are equal
      compare(c, std::to_string(slots) + " slots a segment, round " + std::to_string(round));
    }
}

TEST_F(MassSegmentedKernel, TakesAsManySegmentsAndThresholdsAsFitSharedMemoryAndMore) {
  oracle::Random random(27);
  for (const int parts : {127, 128, 129, 130, 1024, 1025, 1026})
    for (const int length : {100, 600}) {
      Case c = random_case(random, {length});
      c.options.segments = Segmentation::mass;
      c.options.segment_mass = 1.0 / parts;
      c.options.min_segment = 1;
      c.options.max_segment = length;
      compare(c, std::to_string(parts) + " parts of " + std::to_string(length) + " slots");
    }
  for (const int length : {255, 256, 257, 258}) {
    Case c = random_case(random, {length});
    c.options.segments = Segmentation::fixed;
    c.options.fixed = 2;
    compare(c, "segments of two of " + std::to_string(length) + " slots");
  }
}

TEST_F(MassSegmentedKernel, TakesTheLargestUsageOfAllHeadsFromThoseThatAreDue) {
  oracle::Random random(23);
  int mixed = 0;
  for (int round = 0; round < 60; ++round) {
    Case c = random_case(random, {97, 256, 600});
    c.options.suffix_fill = SuffixFill::max_global;
    for (std::size_t r = 1; r < c.limits.size(); r += 2) {
      mixed += c.limits[r].due && c.heads > 1 ? 1 : 0;
      c.limits[r].due = false;
    }
    compare(c, "round " + std::to_string(round));
  }
  EXPECT_GT(mixed, 10);
}

TEST_F(MassSegmentedKernel, TakesScoresAndUsageThatAreNoNumbersOrAsLowAsCanBe) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kMost = std::numeric_limits<float>::max(),
                  kNan = std::numeric_limits<float>::quiet_NaN();
  oracle::Random random(28);
  for (int round = 0; round < 90; ++round) {
    Case c = random_case(random, {2, 31, 97, 256, 300, 600});
    if (round % 3 == 0) c.variant = Variant::official;
    if (c.variant == Variant::official) {
      c.options.coverage = 1.0;
      c.options.coverage_auto = false;
      c.options.protected_mass = true;
      for (RowLimit& limit : c.limits) limit.guarded = {};  // then all candidates of the segments may stay
    }
    const bool every = random.chance(0.5);
    for (float& score : c.scores)
      if (every || random.chance(0.3)) score = random.one_of({kNan, kNan, -kInfinity, -kMost, kInfinity});
    for (float& usage : c.usage)
      if (random.chance(0.05)) usage = random.one_of({kNan, -1.0F, -kInfinity, kInfinity, kMost, 1e-45F, -0.0F});
    compare(c, "round " + std::to_string(round));
  }
}

}  // namespace
}  // namespace kvkeep::cuda::mass_segmented_test
