// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Events for allocators whose scores decide how many slots stay: rows of several lengths, ties, NaN, protected slots
/// and pinned ranges, on the host and on the device.

#include <algorithm>
#include <limits>
#include <numeric>

#include "allotted_rows.h"
#include "device.h"
#include "kvkeep/kvkeep.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda {

class CountedCase {
 public:
  /// Groups of `heads` rows. `lengths`: rows take theirs from it.
  CountedCase(oracle::Random& random, std::int32_t heads, std::int32_t groups,
              const std::vector<std::int32_t>& lengths) {
    spec.query_heads = spec.kv_heads = heads;
    const bool even = random.chance(0.3);
    for (std::int32_t g = 0; g < groups; ++g) {
      RowGroup& group = table.groups.emplace_back();
      group.sequence = g;
      group.first_row = std::ssize(table.rows);
      const int kind = random.between(0, 4);
      for (std::int32_t h = 0; h < heads; ++h) {
        Row row;
        row.sequence = g;
        row.head = h;
        row.length =
            even && h > 0
                ? table.rows.back().length
                : lengths[static_cast<std::size_t>(random.between(0, static_cast<std::int32_t>(lengths.size()) - 1))];
        row.first = table.slots;
        table.slots += row.length;
        longest = std::max(longest, row.length);
        table.rows.push_back(row);
        for (std::int32_t t = 0; t < row.length; ++t) scores.push_back(score(random, kind));
      }
      const std::int32_t mean = std::accumulate(table.rows.end() - heads, table.rows.end(), 0,
                                                [](std::int32_t sum, const Row& row) { return sum + row.length; }) /
                                heads;
      const std::int32_t budget = random.between(0, mean + 1);
      limits.rows.insert(limits.rows.end(), static_cast<std::size_t>(heads), {budget, false, {}});
    }
  }
  CountedCase(const CountedCase&) = delete;
  CountedCase& operator=(const CountedCase&) = delete;

  /// Once the allocator has said which rows are due: protected slots of all, pinned ranges of some.
  void protect_some(oracle::Random& random) {
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      RowLimit& limit = limits.rows[r];
      const std::int32_t length = table.rows[r].length;
      limit.guarded = protect(length, limit.budget, random.between(0, 5), random.between(0, 20), Variant::strict);
      Protected& guarded = limit.guarded;
      std::int32_t from = guarded.sinks, room = std::min(limit.budget, length) - guarded.count();
      pins_.emplace_back();
      while (limit.due && random.chance(0.4)) {
        from += random.between(0, 9);
        const std::int32_t to = std::min(from + random.between(1, 6), length - guarded.recents);
        if (to <= from || to - from > room) break;
        pins_.back().push_back({from, to});
        room -= to - from;
        guarded.pinned += to - from;
        from = to + 1;
      }
    }
    for (std::size_t r = 0; r < pins_.size(); ++r) {
      limits.rows[r].guarded.ranges = static_cast<std::int32_t>(pins_[r].size());
      limits.rows[r].guarded.pins = pins_[r].data();
      all_pins.insert(all_pins.end(), pins_[r].begin(), pins_[r].end());
    }
  }

  [[nodiscard]] Evidence evidence() const { return {.spec = spec, .table = table}; }
  [[nodiscard]] std::int32_t count() const { return static_cast<std::int32_t>(table.rows.size()); }

  /// What the CPU keeps.
  [[nodiscard]] KeepSet kept_by(const Allocator& allocator) const {
    Decision decision;
    Scores given{empty({table.slots}, Dtype::f32)};
    std::ranges::copy(scores, given.data.data<float>());
    allocator.allot(evidence(), limits, given, {}, decision);
    return *decision.keep;
  }

  ModelSpec spec;
  RowTable table;
  Limits limits;
  std::vector<float> scores;
  std::vector<SlotRange> all_pins;  ///< of all rows, one after the other
  std::int32_t longest = 0;

 private:
  static float score(oracle::Random& random, int kind) {
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kMost = std::numeric_limits<float>::infinity();
    if (kind == 0) return static_cast<float>(random.normal());
    if (kind == 1) return static_cast<float>(random.between(0, 2));
    if (kind == 2) return 0.5F;
    if (kind == 3) return random.one_of({kNan, kMost, -kMost, 0.0F, -0.0F, 1.0F, -1.0F});
    return static_cast<float>(random.unit()) * 1e-30F;
  }

  std::vector<std::vector<SlotRange>> pins_;
};

/// A CountedCase on the device, and room for what a kernel makes of it.
class DeviceCounted {
 public:
  DeviceCounted(const CountedCase& c, const std::vector<std::int32_t>& most)
      : bounds(bounds_of(most)),
        rows(c.table.rows),
        pins(c.all_pins),
        limits(limits_of(c, pins.data())),
        scores(c.scores),
        indptr(bounds),
        slots(std::vector<std::int32_t>(static_cast<std::size_t>(bounds.back()), kNothing)),
        counts(std::vector<std::int32_t>(most.size(), kNothing)) {}

  [[nodiscard]] AllottedRows as_allotted(const CountedCase& c) const {
    return {.rows = rows.data(),
            .limits = limits.data(),
            .count = c.count(),
            .longest = c.longest,
            .scores = scores.data(),
            .indptr = indptr.data(),
            .slots = slots.data()};
  }

  /// Counts and slots as the CPU's, and nothing behind them.
  void expect_kept(const KeepSet& wanted) const {
    const std::vector<std::int32_t> counted = counts.download(), written = slots.download();
    for (std::size_t r = 0; r < counted.size(); ++r) {
      ASSERT_EQ(counted[r], wanted.count(r)) << "row " << r;
      const auto kept = wanted.row(r);
      for (std::int64_t j = bounds[r]; j < bounds[r + 1]; ++j) {
        const auto at = static_cast<std::size_t>(j - bounds[r]);
        ASSERT_EQ(written[static_cast<std::size_t>(j)], at < kept.size() ? kept[at] : kNothing)
            << "row " << r << ", slot " << at << " of " << kept.size();
      }
    }
  }

  static constexpr std::int32_t kNothing = -7;
  std::vector<std::int64_t> bounds;
  DeviceArray<Row> rows;
  DeviceArray<SlotRange> pins;
  DeviceArray<RowLimit> limits;
  DeviceArray<float> scores;
  DeviceArray<std::int64_t> indptr;
  DeviceArray<std::int32_t> slots, counts;

 private:
  static std::vector<std::int64_t> bounds_of(const std::vector<std::int32_t>& most) {
    std::vector<std::int64_t> all{0};
    for (const std::int32_t room : most) all.push_back(all.back() + room);
    return all;
  }
  static std::vector<RowLimit> limits_of(const CountedCase& c, const SlotRange* pins) {
    std::vector<RowLimit> all = c.limits.rows;
    for (RowLimit& limit : all) {
      limit.guarded.pins = pins;
      pins += limit.guarded.ranges;
    }
    return all;
  }
};

}  // namespace kvkeep::cuda
