// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Values for an EvidenceCase: on the CPU packed, on the device dense or in pages, aligned or not.

#include "evidence_case.h"

namespace kvkeep::cuda {

/// Points the rows of a case at values. The case must not be copied while they are read.
class ValueCase {
 public:
  ValueCase(std::uint64_t seed, EvidenceCase& at, Element stored)
      : element(stored), at_(at), random_(seed), bytes_(at.table.rows.size()) {
    const bool scaled = is_8bit(element);
    at.table.value_dtype = dtype_of(element);
    const std::int64_t dim = at.shape.value_dim;
    for (std::size_t r = 0; r < at.table.rows.size(); ++r) {
      Row& row = at.table.rows[r];
      bytes_[r].resize(static_cast<std::size_t>(row.length * dim * element_bytes(element)));
      plain.emplace_back(static_cast<std::size_t>(row.length * dim));
      scales.emplace_back();
      for (std::int64_t t = 0; t < row.length; ++t) {
        if (scaled) scales[r].push_back(static_cast<float>(std::exp(random_.normal())) * 0.02F);
        for (std::int64_t d = 0; d < dim; ++d) set(r, t, d, static_cast<float>(random_.normal()));
      }
      const std::int64_t width = dim * element_size(at.table.value_dtype);
      row.values = {scaled ? reinterpret_cast<std::byte*>(plain[r].data()) : bytes_[r].data(), width, width};
    }
  }
  ValueCase(const ValueCase&) = delete;
  ValueCase& operator=(const ValueCase&) = delete;

  void set(std::size_t r, std::int64_t t, std::int64_t d, float x) {
    const std::int64_t place = t * at_.shape.value_dim + d;
    const float scale = scales[r].empty() ? 1.0F : scales[r][static_cast<std::size_t>(t)];
    plain[r][static_cast<std::size_t>(place)] =
        store(x / scale, element, bytes_[r].data() + place * element_bytes(element)) * scale;
  }
  void copy(std::size_t r, std::int64_t from, std::int64_t to) {
    if (!scales[r].empty()) scales[r][static_cast<std::size_t>(to)] = scales[r][static_cast<std::size_t>(from)];
    for (std::int64_t d = 0; d < at_.shape.value_dim; ++d)
      set(r, to, d, plain[r][static_cast<std::size_t>(from * at_.shape.value_dim + d)]);
  }
  [[nodiscard]] const std::byte* stored(std::size_t r) const { return bytes_[r].data(); }

  Element element;
  std::vector<std::vector<float>> plain, scales;  ///< [rows]

 private:
  EvidenceCase& at_;
  oracle::Random random_;
  std::vector<std::vector<std::byte>> bytes_;
};

/// A ValueCase on the device, and the rows of the case there with both sides.
class DeviceValues {
 public:
  DeviceValues(const EvidenceCase& c, const DeviceEvidence& there, const ValueCase& values, DeviceLayout layout = {})
      : bytes_(pack(c, values, layout)), scales_(packed_scales_), pages_(page_table_), rows_(c.table.rows.size()) {
    std::vector<Row> rows = there.rows();
    const std::int64_t width = c.shape.value_dim * element_bytes(values.element), stride = width + layout.gap;
    std::int64_t slot = 0, table = 0;
    for (Row& row : rows) {
      const auto side = [&](std::byte* base, std::int64_t each, std::int64_t wide) {
        SlotAddress a{base, each, wide};
        if (layout.page > 0)
          a.pages = pages_.data() + table, a.page_stride = each * layout.page,
          a.page_shift = std::countr_zero(static_cast<unsigned>(layout.page));
        else
          a.base += slot * each;
        return a;
      };
      row.values = side(bytes_.data(), stride, width);
      if (is_8bit(values.element)) row.value_scales = side(reinterpret_cast<std::byte*>(scales_.data()), 4, 4);
      slot += row.length;
      if (layout.page > 0) table += (row.length + layout.page - 1) / layout.page;
    }
    rows_.upload(rows);
  }
  [[nodiscard]] const Row* rows() const { return rows_.data(); }
  [[nodiscard]] std::vector<Row> host_rows() const { return rows_.download(); }

 private:
  std::vector<std::byte> pack(const EvidenceCase& c, const ValueCase& values, DeviceLayout layout) {
    const std::int64_t width = c.shape.value_dim * element_bytes(values.element), stride = width + layout.gap;
    std::int64_t places = c.table.slots, slot = 0, table = 0;
    if (layout.page > 0) {
      std::int32_t pages = 0;
      for (const Row& row : c.table.rows) pages += (row.length + layout.page - 1) / layout.page;
      for (std::int32_t p = pages; p > 0; --p) page_table_.push_back(p);  // page 0 belongs to nobody
      places = std::int64_t{pages + 1} * layout.page;
    }
    std::vector<std::byte> bytes(static_cast<std::size_t>(places * stride), std::byte{0xFF});
    packed_scales_.assign(is_8bit(values.element) ? static_cast<std::size_t>(places) : 0, std::nanf(""));
    for (std::size_t r = 0; r < c.table.rows.size(); ++r) {
      const std::int32_t length = c.table.rows[r].length;
      for (std::int32_t t = 0; t < length; ++t) {
        const std::int64_t at =
            layout.page == 0
                ? slot + t
                : std::int64_t{page_table_[static_cast<std::size_t>(table + t / layout.page)]} * layout.page +
                      t % layout.page;
        std::copy_n(values.stored(r) + t * width, width, bytes.data() + at * stride);
        if (!packed_scales_.empty())
          packed_scales_[static_cast<std::size_t>(at)] = values.scales[r][static_cast<std::size_t>(t)];
      }
      slot += length;
      if (layout.page > 0) table += (length + layout.page - 1) / layout.page;
    }
    return bytes;
  }

  std::vector<std::int32_t> page_table_;
  std::vector<float> packed_scales_;
  DeviceArray<std::byte> bytes_;
  DeviceArray<float> scales_;
  DeviceArray<std::int32_t> pages_;
  DeviceArray<Row> rows_;
};

}  // namespace kvkeep::cuda
