// SPDX-License-Identifier: Apache-2.0
// Compaction in one launch: the bytes are those of the CPU, for any width, stride, page and column; nothing beside them
// changes.

#include "compact.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "device.h"
#include "kvkeep/keep/compact.h"
#include "kvkeep/torch.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda::compact_test {
namespace {

using Compact = OnDevice;

/// Rows of some sequences over one buffer for all sides, dense or in pages, with the same addresses on host and device
/// but for the base.
struct Case {
  std::vector<Row> rows;  ///< addresses are offsets
  std::vector<std::byte> bytes;
  std::vector<std::int32_t> block_table, pages_after;
  std::int64_t table_width = 0;
  std::vector<std::int32_t> slots;
  std::vector<std::int64_t> indptr{0};
  std::vector<std::vector<std::int32_t>> positions;
  std::vector<float> credit;  ///< flat over rows, before compaction

  /// The rows as they lie in `base`, with block tables at `table`.
  [[nodiscard]] std::vector<Row> rows_at(std::byte* base, const std::int32_t* table) const {
    std::vector<Row> there = rows;
    for (Row& row : there)
      for (SlotAddress* side : {&row.keys, &row.values, &row.key_scales, &row.value_scales}) {
        if (side->width == 0) continue;
        side->base = base + reinterpret_cast<std::intptr_t>(side->base);
        if (side->page_shift >= 0 && table != nullptr && side->page_stride > 0)
          side->pages = table + row.sequence * table_width;
      }
    return there;
  }
};

/// `width`, `gap`: bytes of a slot's vector and between slots; `page`: 0 dense.
Case make_case(oracle::Random& random, std::int64_t width, std::int64_t gap, std::int32_t page, std::int32_t sequences,
               std::int32_t heads, std::int32_t longest, bool scales) {
  Case c;
  const std::int64_t stride = width + gap, capacity = longest + 5;
  const std::int64_t pages_each = page == 0 ? 0 : (capacity + page - 1) / page, pool = pages_each * sequences + 2;
  std::vector<std::int32_t> order(static_cast<std::size_t>(pool));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[static_cast<std::size_t>(random.between(0, static_cast<std::int32_t>(i) - 1))]);
  c.table_width = pages_each;
  c.block_table.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(pages_each * sequences));
  std::int64_t offset = 0;
  // A side lies behind the one before: [sequences or pages, heads, capacity or page, stride].
  const auto side_of = [&](std::int64_t side_width, std::int64_t side_stride) {
    const std::int64_t begin = offset;
    offset += (page == 0 ? std::int64_t{sequences} * capacity : pool * page) * heads * side_stride;
    offset = (offset + 15) / 16 * 16;
    return [=](std::int32_t s, std::int32_t h) {
      SlotAddress side;
      side.stride = side_stride;
      side.width = side_width;
      if (page == 0) {
        side.base = reinterpret_cast<std::byte*>(begin + (std::int64_t{s} * heads + h) * capacity * side_stride);
      } else {
        side.base = reinterpret_cast<std::byte*>(begin + std::int64_t{h} * page * side_stride);
        side.page_stride = std::int64_t{heads} * page * side_stride;
        side.page_shift = std::countr_zero(static_cast<unsigned>(page));
      }
      return side;
    };
  };
  const auto keys = side_of(width, stride), values = side_of(std::max<std::int64_t>(1, width / 2), stride),
             key_scales = side_of(4, 4), value_scales = side_of(2, 2);
  std::int64_t first = 0;
  for (std::int32_t s = 0; s < sequences; ++s) {
    const std::int32_t length = random.between(0, longest), count = random.between(0, length),
                       still = random.between(0, count);
    for (std::int32_t h = 0; h < heads; ++h) {
      Row row;
      row.sequence = s;
      row.head = h;
      row.length = length;
      row.first = first;
      row.keys = keys(s, h);
      row.values = values(s, h);
      if (scales) row.key_scales = key_scales(s, h), row.value_scales = value_scales(s, h);
      first += length;
      std::vector<std::int32_t> chosen(static_cast<std::size_t>(length));
      std::iota(chosen.begin(), chosen.end(), 0);
      for (std::size_t i = static_cast<std::size_t>(still); i < chosen.size(); ++i)
        std::swap(chosen[i],
                  chosen[static_cast<std::size_t>(random.between(static_cast<std::int32_t>(i), length - 1))]);
      chosen.resize(static_cast<std::size_t>(count));
      std::sort(chosen.begin(), chosen.end());
      c.slots.insert(c.slots.end(), chosen.begin(), chosen.end());
      c.indptr.push_back(static_cast<std::int64_t>(c.slots.size()));
      c.rows.push_back(row);
      c.positions.emplace_back();
      for (std::int32_t t = 0; t < length; ++t) c.positions.back().push_back(t * 3 + s);
    }
  }
  for (std::int64_t i = 0; i < first; ++i) c.credit.push_back(static_cast<float>(random.unit()));
  c.bytes.resize(static_cast<std::size_t>(offset));
  for (std::byte& b : c.bytes) b = static_cast<std::byte>(random.between(0, 255));
  return c;
}

/// What the CPU makes of it, its pages chosen by plan_pages().
std::vector<std::byte> on_cpu(Case& c, std::int32_t page) {
  std::vector<std::byte> bytes = c.bytes;
  RowTable table;
  table.rows = c.rows_at(bytes.data(), c.block_table.data());
  table.page_size = page;
  KeepSet keep{{}, c.indptr};
  keep.slots =
      at::from_blob(c.slots.data(), {static_cast<std::int64_t>(c.slots.size())}, at::TensorOptions().dtype(at::kInt));
  c.pages_after = c.block_table;
  std::vector<PageMove> moves;
  if (page > 0) {
    std::vector<SequenceId> ids(static_cast<std::size_t>(table.rows.back().sequence) + 1);
    moves = plan_pages(table, keep, ids, nullptr, SharedPages::copy);
    for (const PageMove& move : moves)
      std::copy(move.after.begin(), move.after.end(), c.pages_after.begin() + move.sequence * c.table_width);
  }
  compact(table, keep, moves);
  return bytes;
}

TEST_F(Compact, MovesTheBytesThatTheCpuMoves) {  // B21, B23, B24, B25
  oracle::Random random(5);
  for (const std::int64_t width : {1, 2, 4, 8, 16, 24, 80, 96, 128, 256, 384})
    for (const std::int32_t page : {0, 1, 16, 64})
      for (const std::int64_t gap : {0, 16, 1}) {
        Case c = make_case(random, width, gap, page, random.between(1, 3), random.between(1, 3),
                           random.one_of({1, 2, 17, 64, 127, 129}), width % 3 == 0);
        const std::vector<std::byte> wanted = on_cpu(c, page);
        in_every_order([&] {
          const DeviceArray<std::byte> bytes(c.bytes);
          const DeviceArray<std::int32_t> table(c.block_table), after(c.pages_after), slots(c.slots);
          const DeviceArray<std::int64_t> indptr(c.indptr);
          const DeviceArray<Row> rows(c.rows_at(bytes.data(), table.data()));
          launch_compact({.rows = rows.data(),
                          .columns = nullptr,
                          .count = static_cast<std::int32_t>(c.rows.size()),
                          .slots = slots.data(),
                          .indptr = indptr.data(),
                          .pages_after = page == 0 ? nullptr : after.data(),
                          .pages_stride = c.table_width},
                         nullptr);
          ASSERT_EQ(bytes.download(), wanted) << "width " << width << ", page " << page << ", gap " << gap;
        });
      }
}

TEST_F(Compact, CarriesTheColumnsWithTheirSlots) {
  oracle::Random random(6);
  for (int round = 0; round < 12; ++round) {
    Case c = make_case(random, 8, 0, 0, 2, 2, random.one_of({1, 33, 700, 2049}), false);
    std::vector<std::int32_t> positions;
    for (const auto& row : c.positions) positions.insert(positions.end(), row.begin(), row.end());
    in_every_order([&] {
      const DeviceArray<std::byte> bytes(c.bytes);
      const DeviceArray<std::int32_t> slots(c.slots), column(positions);
      const DeviceArray<float> given(c.credit);
      const DeviceArray<std::int64_t> indptr(c.indptr);
      const DeviceArray<float> fresh(c.credit), credit = DeviceArray<float>::poisoned(c.credit.size());
      const DeviceArray<Row> rows(c.rows_at(bytes.data(), nullptr));
      std::vector<ColumnMove> moves;
      for (const Row& row : c.rows)
        moves.push_back({.positions = column.data() + row.first,
                         .credit = credit.data() + row.first,
                         .new_credit = fresh.data() + row.first,
                         .tally = nullptr,
                         .new_tally = nullptr,
                         .given = given.data() + row.first});
      const DeviceArray<ColumnMove> columns(moves);
      launch_compact({.rows = rows.data(),
                      .columns = columns.data(),
                      .count = static_cast<std::int32_t>(c.rows.size()),
                      .slots = slots.data(),
                      .indptr = indptr.data(),
                      .pages_after = nullptr,
                      .pages_stride = 0},
                     nullptr);
      const std::vector<std::int32_t> moved = column.download();
      const std::vector<float> carried = credit.download(), given_then = given.download();
      for (std::size_t r = 0; r < c.rows.size(); ++r) {
        const auto first = static_cast<std::size_t>(c.rows[r].first),
                   length = static_cast<std::size_t>(c.rows[r].length);
        const auto count = static_cast<std::size_t>(c.indptr[r + 1] - c.indptr[r]);
        for (std::size_t j = 0; j < count; ++j) {
          const auto slot = static_cast<std::size_t>(c.slots[static_cast<std::size_t>(c.indptr[r]) + j]);
          ASSERT_EQ(moved[first + j], c.positions[r][slot]);
          ASSERT_EQ(carried[first + j], c.credit[first + slot]);
          ASSERT_EQ(given_then[first + j], c.credit[first + slot]);
        }
        for (std::size_t t = count; t < length; ++t)
          ASSERT_EQ(moved[first + t], c.positions[r][t]) << "behind the kept slots nothing changes";
      }
    });
  }
}

TEST_F(Compact, MovesAsManySlotsOfARowAsTheDeviceHasCounted) {
  oracle::Random random(7);
  for (const std::int32_t page : {0, 16}) {
    Case c = make_case(random, 24, 0, page, 3, 2, 129, true);
    const std::vector<std::byte> wanted = on_cpu(c, page);
    // The same slots in rooms that hold more of them.
    std::vector<std::int64_t> rooms{0};
    std::vector<std::int32_t> spread, counted;
    for (std::size_t r = 0; r < c.rows.size(); ++r) {
      spread.insert(spread.end(), c.slots.begin() + c.indptr[r], c.slots.begin() + c.indptr[r + 1]);
      counted.push_back(static_cast<std::int32_t>(c.indptr[r + 1] - c.indptr[r]));
      spread.insert(spread.end(), static_cast<std::size_t>(random.between(0, 9)), 1 << 20);
      rooms.push_back(static_cast<std::int64_t>(spread.size()));
    }
    in_every_order([&] {
      const DeviceArray<std::byte> bytes(c.bytes);
      const DeviceArray<std::int32_t> table(c.block_table), after(c.pages_after), slots(spread), counts(counted);
      const DeviceArray<std::int64_t> indptr(rooms);
      const DeviceArray<Row> rows(c.rows_at(bytes.data(), table.data()));
      launch_compact({.rows = rows.data(),
                      .columns = nullptr,
                      .count = static_cast<std::int32_t>(c.rows.size()),
                      .slots = slots.data(),
                      .indptr = indptr.data(),
                      .counts = counts.data(),
                      .pages_after = page == 0 ? nullptr : after.data(),
                      .pages_stride = c.table_width},
                     nullptr);
      ASSERT_EQ(bytes.download(), wanted) << "page " << page;
    });
  }
}

TEST_F(Compact, TakesNoRowsAtAllAndMoreRowsThanABlockIndexHolds) {  // B29
  launch_compact({}, nullptr);
#if defined(KVKEEP_CUDA_MODEL)
  const std::int32_t count = 1500;  // the model refuses more than 65535 blocks in y and z, whatever there is in x
#else
  const std::int32_t count = 70000;  // B * H beyond 65535, one slot each
#endif
  std::vector<std::uint32_t> words(static_cast<std::size_t>(count) * 2);
  std::iota(words.begin(), words.end(), 0U);
  std::vector<std::int32_t> kept(static_cast<std::size_t>(count), 1);
  std::vector<std::int64_t> bounds(static_cast<std::size_t>(count) + 1);
  std::iota(bounds.begin(), bounds.end(), 0);
  const DeviceArray<std::uint32_t> cache(words);
  const DeviceArray<std::int32_t> slots(kept);
  const DeviceArray<std::int64_t> indptr(bounds);
  std::vector<Row> rows(static_cast<std::size_t>(count));
  for (std::size_t r = 0; r < rows.size(); ++r) {
    rows[r].length = 2;
    rows[r].keys = {reinterpret_cast<std::byte*>(cache.data() + 2 * r), 4, 4};
  }
  const DeviceArray<Row> table(rows);
  launch_compact({.rows = table.data(),
                  .columns = nullptr,
                  .count = count,
                  .slots = slots.data(),
                  .indptr = indptr.data(),
                  .pages_after = nullptr,
                  .pages_stride = 0},
                 nullptr);
  const std::vector<std::uint32_t> moved = cache.download();
  for (std::size_t r = 0; r < rows.size(); ++r) ASSERT_EQ(moved[2 * r], 2 * r + 1);
}

}  // namespace
}  // namespace kvkeep::cuda::compact_test
