// SPDX-License-Identifier: Apache-2.0
// CriticalKV on a GPU: value sizes as plain loops in double give them, and the CPU's slots.

#include "critical.h"

#include <ATen/ops/from_blob.h>

#include "adaptive_heads.h"
#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/allot/critical.h"
#include "kvkeep/allot/divide.h"
#include "kvkeep/core/rank_key.h"
#include "kvkeep/torch.h"
#include "value_case.h"

namespace kvkeep::cuda::critical_test {
namespace {

using CriticalKernel = OnDevice;

struct CriticalCase {
  CriticalCase(std::uint64_t seed, EvidenceShape shape, Element value, Element weight, std::int32_t units)
      : c(seed, shape), values(seed, c, value), projection(weight), hidden(units) {
    oracle::Random random(seed + 77);
    const std::int64_t layers = 2, each = std::int64_t{hidden} * c.spec.query_heads * shape.value_dim;
    c.spec.layers.resize(static_cast<std::size_t>(layers));
    for (std::int64_t l = 0; l < layers; ++l) {
      weights.emplace_back(static_cast<std::size_t>(each * element_bytes(weight)));
      plain.emplace_back();
      for (std::int64_t i = 0; i < each; ++i)
        plain.back().push_back(
            store(static_cast<float>(random.normal()), weight, weights.back().data() + i * element_bytes(weight)));
    }
    for (std::size_t r = 0; r < c.table.rows.size(); ++r) {
      Row& row = c.table.rows[r];
      row.layer =
          static_cast<std::int32_t>(r / static_cast<std::size_t>(shape.kv_heads)) % static_cast<std::int32_t>(layers);
      c.table.groups[r / static_cast<std::size_t>(shape.kv_heads)].layer = row.layer;
      RowLimit& limit = c.limits.rows[r];
      limit.due = row.length > limit.budget && random.chance(0.85);
      const int kind = random.between(0, 2);
      for (std::int32_t t = 0; t < row.length; ++t)
        scores.push_back(kind == 0                         ? static_cast<float>(random.between(0, 2))
                         : kind == 1 && random.chance(0.1) ? std::nanf("")
                                                           : static_cast<float>(random.unit()));
    }
  }
  [[nodiscard]] double size_of(const Row& row, std::size_t r, std::int64_t t) const {
    double sum = 0;
    const std::int64_t dim = c.shape.value_dim, width = c.spec.query_heads * dim;
    for (std::int32_t g = 0; g < c.shape.group; ++g)
      for (std::int32_t n = 0; n < hidden; ++n) {
        double product = 0;
        for (std::int64_t d = 0; d < dim; ++d)
          product += static_cast<double>(plain[static_cast<std::size_t>(row.layer)][static_cast<std::size_t>(
                         n * width + (row.head * c.shape.group + g) * dim + d)]) *
                     static_cast<double>(values.plain[r][static_cast<std::size_t>(t * dim + d)]);
        sum += std::abs(product);
      }
    return sum / c.shape.group;
  }

  EvidenceCase c;
  ValueCase values;
  Element projection;
  std::int32_t hidden;
  std::vector<std::vector<std::byte>> weights;  ///< [layers]
  std::vector<std::vector<float>> plain;
  std::vector<float> scores;
};

struct Got {
  std::vector<float> sizes;
  std::vector<std::int32_t> slots;
};

std::vector<std::int64_t> indptr_of(const EvidenceCase& c) {
  std::vector<std::int64_t> indptr{0};
  for (std::size_t r = 0; r < c.table.rows.size(); ++r) {
    const std::int32_t length = c.table.rows[r].length;
    indptr.push_back(indptr.back() + (c.limits.rows[r].due ? std::min(c.limits.rows[r].budget, length) : length));
  }
  return indptr;
}

/// `safeguard`: of adaptive heads; -1: equal ones.
Got on_device(const CriticalCase& k, double first_stage, bool matrix_unit = true, DeviceLayout layout = {},
              double safeguard = -1) {
  const DeviceEvidence there(k.c, layout);
  const DeviceValues sides(k.c, there, k.values, layout);
  std::vector<std::unique_ptr<DeviceArray<std::byte>>> layers;
  std::vector<const void*> pointers;
  for (const auto& layer : k.weights) {
    layers.push_back(std::make_unique<DeviceArray<std::byte>>(layer));
    pointers.push_back(layers.back()->data());
  }
  const DeviceArray<const void*> projections(pointers);
  const DeviceArray<float> scores(k.scores);
  std::vector<std::int64_t> bounds = indptr_of(k.c);
  if (safeguard >= 0) {
    bounds.assign(1, 0);
    for (const std::int32_t most : cpu::most_across_heads(k.c.evidence(), k.c.limits, safeguard))
      bounds.push_back(bounds.back() + most);
  }
  const DeviceArray<std::int64_t> indptr(bounds);
  const DeviceArray<std::int32_t> slots(static_cast<std::size_t>(bounds.back())), counts(bounds.size() - 1);
  CriticalArguments a;
  a.evidence = there.arguments();
  if (safeguard >= 0) {
    AdaptiveHeadsArguments heads{{.rows = a.evidence.rows,
                                  .limits = a.evidence.limits,
                                  .count = a.evidence.count,
                                  .longest = a.evidence.longest,
                                  .scores = scores.data()},
                                 a.evidence.kv_heads,
                                 safeguard,
                                 counts.data()};
    const DeviceArray<std::byte> room(static_cast<std::size_t>(adaptive_heads_workspace_bytes(heads)));
    heads.workspace = room.data();
    launch_adaptive_heads(heads, nullptr);
    a.counts = counts.data();
  }
  a.evidence.rows = sides.rows();
  a.values = k.values.element;
  a.value_dim = k.c.shape.value_dim;
  a.projections = projections.data();
  a.projection = k.projection;
  a.hidden = k.hidden;
  a.first_stage = first_stage;
  a.matrix_unit = matrix_unit;
  a.slots_in_all = k.c.table.slots;
  a.scores = scores.data();
  a.indptr = indptr.data();
  a.slots = slots.data();
  const DeviceArray<float> workspace(
      std::vector<float>(static_cast<std::size_t>(critical_workspace_bytes(a)) / sizeof(float), kUntouched));
  a.workspace = workspace.data();
  launch_critical(a, nullptr);
  std::vector<std::int32_t> kept = slots.download();
  if (safeguard >= 0) {
    const std::vector<std::int32_t> in_rooms = std::exchange(kept, {}), counted = counts.download();
    for (std::size_t r = 0; r < counted.size(); ++r)
      kept.insert(kept.end(), in_rooms.begin() + bounds[r], in_rooms.begin() + bounds[r] + counted[r]);
  }
  return {workspace.download(), kept};
}

/// Which slots stay, by a sort, given the sizes.
std::vector<std::int32_t> selected(const CriticalCase& k, const std::vector<float>& sizes, double first_stage) {
  std::vector<std::int32_t> all;
  const std::vector<std::int64_t> bounds = indptr_of(k.c);
  for (std::size_t r = 0; r < k.c.table.rows.size(); ++r) {
    const Row& row = k.c.table.rows[r];
    const RowLimit& limit = k.c.limits.rows[r];
    const auto kept = static_cast<std::int32_t>(bounds[r + 1] - bounds[r]);
    std::vector<std::int32_t> slots, rest;
    for (std::int32_t t = 0; t < row.length; ++t)
      (kept == row.length || limit.guarded.holds(t, row.length) ? slots : rest).push_back(t);
    const auto take = [&](std::int32_t until, auto&& score_of) {
      std::sort(rest.begin(), rest.end(),
                [&](std::int32_t a, std::int32_t b) { return rank_key(score_of(a), a) > rank_key(score_of(b), b); });
      while (static_cast<std::int32_t>(slots.size()) < until) slots.push_back(rest.front()), rest.erase(rest.begin());
    };
    const float *scores = k.scores.data() + row.first, *own = sizes.data() + row.first;
    take(std::min(kept, share_of(first_stage, kept)), [&](std::int32_t t) { return scores[t]; });
    take(kept, [&](std::int32_t t) {
      return std::isfinite(own[t]) ? (scores[t] + kCriticalEpsilon) * own[t] : std::nanf("");
    });
    std::sort(slots.begin(), slots.end());
    all.insert(all.end(), slots.begin(), slots.end());
  }
  return all;
}

void expect_as_it_should_be(const CriticalCase& k, double first_stage, bool matrix_unit = true,
                            DeviceLayout layout = {}) {
  in_every_order([&] {
    const Got got = on_device(k, first_stage, matrix_unit, layout);
    for (std::size_t r = 0; r < k.c.table.rows.size(); ++r) {
      const Row& row = k.c.table.rows[r];
      const RowLimit& limit = k.c.limits.rows[r];
      for (std::int32_t t = 0; t < row.length; ++t) {
        const float size = got.sizes[static_cast<std::size_t>(row.first + t)];
        if (!limit.due || limit.budget >= row.length) {
          ASSERT_EQ(size, kUntouched) << "row " << r << " is not cut";
          continue;
        }
        const double want = k.size_of(row, r, t);
        if (std::isnan(want))
          ASSERT_TRUE(std::isnan(size)) << "row " << r << ", slot " << t;
        else
          ASSERT_NEAR(size, want, 2e-6 * want + 1e-12)
              << "row " << r << ", slot " << t << "; " << k.c.description() << ", " << name_of(k.values.element)
              << " values, " << name_of(k.projection) << " weights";
      }
    }
    ASSERT_EQ(got.slots, selected(k, got.sizes, first_stage)) << k.c.description();
  });
}

TEST_F(CriticalKernel, WeighsValuesOfEveryElementAndHeadSize) {  // B25
  std::uint64_t seed = 0;
  for (const std::int32_t dim : {1, 7, 16, 33, 80, 128, 256})
    for (const Element value : kStored)
      for (const Element weight : {Element::f32, Element::f16, Element::bf16}) {
        ++seed;
        expect_as_it_should_be(
            CriticalCase(seed,
                         {.group = 2, .kv_heads = 2, .dim = 4, .value_dim = dim, .lengths = {19, 40}, .ragged = true},
                         value, weight, seed % 3 == 0 ? 32 : 37),
            0.5);
      }
}

TEST_F(CriticalKernel, SelectsInTwoStagesForEveryLengthGroupAndShare) {  // B15, B29
  std::uint64_t seed = 200;
  for (const std::int32_t length : {0, 1, 2, 63, 64, 65, 127, 128, 129, 300})
    for (const double first_stage : {0.0, 0.3, 1.0}) {
      ++seed;
      expect_as_it_should_be(CriticalCase(seed,
                                          {.group = static_cast<std::int32_t>(seed % 4) + 1,
                                           .kv_heads = 2,
                                           .dim = 4,
                                           .value_dim = 8,
                                           .lengths = {length, 50}},
                                          seed % 2 == 0 ? Element::f16 : Element::f32, Element::f16, 20),
                             first_stage);
    }
}

/// `safeguard`: as in on_device().
void expect_slots_of_the_cpu(std::uint64_t seed, double safeguard) {
  for (const Element value : {Element::f32, Element::f16, Element::bf16})
    for (const Element weight : {Element::f32, Element::f16, Element::bf16})
      for (const double first_stage : {0.1, 0.5}) {
        CriticalCase k(++seed,
                       {.group = 3, .kv_heads = 2, .dim = 4, .value_dim = 24, .lengths = {90, 33}, .ragged = true},
                       value, weight, 48);
        const Critical critical(
            {.first_stage = first_stage,
             .heads = safeguard < 0 ? CriticalOptions::Heads::equal : CriticalOptions::Heads::adaptive,
             .safeguard = safeguard});
        critical.spread(k.c.evidence(), {}, k.c.limits.rows);
        Decision decision;
        decision.scores.data = at::from_blob(const_cast<float*>(k.scores.data()), {k.c.table.slots},
                                             at::TensorOptions().dtype(at::kFloat));
        std::vector<Tensor> projections;
        for (const auto& layer : k.weights)
          projections.push_back(at::from_blob(const_cast<std::byte*>(layer.data()), {48, k.c.spec.query_heads * 24},
                                              at::TensorOptions().dtype(torch_dtype(dtype_of(weight)))));
        Evidence evidence = k.c.evidence();
        WindowAttention unused;
        critical.allot({.spec = evidence.spec, .table = evidence.table, .output_projections = projections}, k.c.limits,
                       decision.scores, unused, decision);
        const Tensor& slots = decision.keep->slots;
        in_every_order([&] {
          ASSERT_EQ(on_device(k, first_stage, true, {}, safeguard).slots,
                    std::vector<std::int32_t>(slots.data<std::int32_t>(), slots.data<std::int32_t>() + slots.numel()));
        });
      }
}

TEST_F(CriticalKernel, KeepsTheSlotsThatTheCpuKeeps) { expect_slots_of_the_cpu(300, -1); }

TEST_F(CriticalKernel, KeepsAsManySlotsOfEachHeadAsTheCpuWhereTheyShareABudget) { expect_slots_of_the_cpu(350, 0.2); }

TEST_F(CriticalKernel, ReadsPagesAndVectorsThatAreNotAligned) {  // B21, B24
  std::uint64_t seed = 400;
  for (const Element value : kStored)
    for (const std::int32_t page : {0, 1, 16})
      for (const std::int64_t gap : {0, 4, 16})
        for (const bool matrix_unit : {false, true}) {
          ++seed;
          expect_as_it_should_be(
              CriticalCase(seed, {.group = 2, .kv_heads = 2, .dim = 4, .value_dim = 40, .lengths = {50, 33}}, value,
                           Element::bf16, 33),
              0.4, matrix_unit, {.gap = gap, .page = page});
        }
}

TEST_F(CriticalKernel, RanksASlotLastWhoseValueIsNoNumber) {
  for (const Element value : kStored)
    for (const float bad : bad_numbers(value)) {
      CriticalCase k(500, {.group = 2, .dim = 4, .value_dim = 16, .lengths = {70}}, value,
                     is_8bit(value) ? Element::f16 : value, 32);
      k.c.limits.rows[0] = {30, true, {2, 3}};
      k.values.set(0, 20, 3, bad);
      k.scores.assign(70, 1.0F);
      const Got got = on_device(k, 0);
      EXPECT_FALSE(std::isfinite(got.sizes[20]));
      EXPECT_EQ(std::count(got.slots.begin(), got.slots.end(), 20), 0);
      EXPECT_EQ(got.slots, selected(k, got.sizes, 0));
    }
}

TEST_F(CriticalKernel, GivesEqualValuesEqualBits) {
  for (const Element value : kStored)
    for (const bool matrix_unit : {false, true}) {
      CriticalCase k(600, {.group = 2, .dim = 4, .value_dim = 72, .lengths = {300}}, value, Element::f16, 50);
      k.c.limits.rows[0] = {100, true, {2, 3}};
      for (const std::int64_t t : {7, 77, 130, 299}) k.values.copy(0, 5, t);
      const Got got = on_device(k, 0.5, matrix_unit);
      for (const std::size_t t : {7, 77, 130, 299}) ASSERT_EQ(got.sizes[t], got.sizes[5]) << t;
      EXPECT_EQ(on_device(k, 0.5, matrix_unit, {.gap = element_bytes(value), .page = 8}).sizes, got.sizes);
    }
}

TEST_F(CriticalKernel, RefusesWhatItCannotWeigh) {
  EXPECT_THROW(launch_critical({.evidence = {}, .value_dim = 0}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_critical({.evidence = {}, .value_dim = 257}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_critical({.evidence = {}, .value_dim = 8, .projection = Element::f8_e4m3}, nullptr),
               InvalidArgument);
  EXPECT_THROW(launch_critical({.evidence = {}, .value_dim = 8, .first_stage = 1.5}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda::critical_test
