// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Events for the scoring kernels: the same rows for the CPU, packed, and on the device, dense or in pages, aligned or
/// not.

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "device.h"
#include "evidence.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/torch.h"
#include "oracle/random_case.h"

namespace kvkeep::cuda {

struct EvidenceShape {
  std::int32_t group = 1, kv_heads = 1, dim = 64, value_dim = 5;
  std::vector<std::int32_t> lengths{40};  ///< of each (layer, sequence)
  std::int32_t seen = 4;                  ///< queries held
  Element keys = Element::f32, query = Element::f32;
  bool pre_rope = false;
  RopeStyle style = RopeStyle::half;
  std::int32_t pairs = -1;  ///< -1: half of the head size
  bool ragged = false;      ///< heads hold different numbers of slots
  bool gaps = true;         ///< in positions
  double loudness = 1;      ///< of the keys
  /// Other than one: every group is in the next of three layers.
  oracle::Ropes ropes = oracle::Ropes::one;
  double logit_cap = 0;
};

/// Bytes of one stored number.
inline std::int64_t element_bytes(Element e) { return e == Element::f32 ? 4 : is_8bit(e) ? 1 : 2; }
/// All that keys and values can be.
inline constexpr Element kStored[] = {Element::f32,     Element::f16,     Element::bf16,
                                      Element::f8_e4m3, Element::f8_e5m2, Element::i8};
inline bool holds_nan(Element e) { return e != Element::i8; }
/// Those of NaN and infinity that can be stored.
inline std::vector<float> bad_numbers(Element e) {
  if (!holds_nan(e)) return {};
  if (e == Element::f8_e4m3) return {std::nanf("")};
  return {std::nanf(""), HUGE_VALF};
}
inline Dtype dtype_of(Element e) {
  return e == Element::f16 ? Dtype::f16 : e == Element::bf16 ? Dtype::bf16 : Dtype::f32;
}

/// As a cache names it.
inline Dtype stored_dtype(Element e) {
  return e == Element::f8_e4m3   ? Dtype::f8_e4m3
         : e == Element::f8_e5m2 ? Dtype::f8_e5m2
         : e == Element::i8      ? Dtype::i8
                                 : dtype_of(e);
}

/// Writes x as `e` and gives what was written. A number that is too large for 8 bits becomes the largest.
inline float store(float x, Element e, std::byte* to) {
  const auto put = [&](auto y) {
    std::memcpy(to, &y, sizeof y);
    return static_cast<float>(y);
  };
  switch (e) {
    case Element::f16:
      return put(c10::Half(x));
    case Element::bf16:
      return put(c10::BFloat16(x));
    case Element::f8_e4m3:
      return put(c10::Float8_e4m3fn(std::clamp(x, -448.0F, 448.0F)));
    case Element::f8_e5m2:
      return put(c10::Float8_e5m2(std::isinf(x) ? x : std::clamp(x, -57344.0F, 57344.0F)));
    case Element::i8:
      return put(static_cast<std::int8_t>(std::nearbyint(std::clamp(x, -128.0F, 127.0F))));
    default:
      return put(x);
  }
}

/// A stored query's component.
inline double load(const std::byte* from, Element e) {
  const auto get = [&](auto y) {
    std::memcpy(&y, from, sizeof y);
    return static_cast<double>(static_cast<float>(y));
  };
  return e == Element::f16 ? get(c10::Half()) : e == Element::bf16 ? get(c10::BFloat16()) : get(0.0F);
}

class EvidenceCase {
 public:
  EvidenceCase(std::uint64_t seed, EvidenceShape given) : shape(std::move(given)), random_(seed) {
    spec.query_heads = shape.group * shape.kv_heads;
    spec.kv_heads = shape.kv_heads;
    spec.key_dim = shape.dim;
    spec.value_dim = shape.value_dim;
    spec.layers = std::vector<LayerSpec>(1);
    spec.rope.style = shape.style;
    spec.rope.attention_scaling = shape.pre_rope ? 1.1 : 1;
    const std::int32_t pairs = shape.pairs < 0 ? shape.dim / 2 : shape.pairs;
    for (std::int32_t f = 0; f < pairs; ++f) spec.rope.inv_freq.push_back(std::pow(1e4, -1.0 * f / pairs));
    if (pairs == 0) spec.rope = RopeSpec::absent();
    if (shape.ropes != oracle::Ropes::one) spec.layers.resize(3);
    if (shape.ropes == oracle::Ropes::same_pairs) {
      spec.layers[1].rope = spec.rope;
      spec.layers[1].rope->attention_scaling *= 1.4;
      for (double& frequency : spec.layers[1].rope->inv_freq) frequency *= 0.7;
    }
    if (shape.ropes == oracle::Ropes::any) {
      spec.layers[1].rope = RopeSpec::absent();
      spec.layers[2].rope = {.style = shape.style == RopeStyle::half ? RopeStyle::interleaved : RopeStyle::half,
                             .inv_freq = std::vector<double>(static_cast<std::size_t>(shape.dim / 3), 0.4)};
      if (shape.dim < 3) spec.layers[2].rope = RopeSpec::absent();
    }
    spec.logit_cap = shape.logit_cap;
    oracle::Random sinker(seed * 31 + 7);
    for (LayerSpec& layer : spec.layers)
      for (std::int32_t h = 0; seed % 2 == 1 && h < spec.query_heads; ++h)
        layer.sinks.push_back(sinker.chance(0.2) ? -HUGE_VALF : static_cast<float>(2 + 2 * sinker.normal()));
    table.key_dtype = dtype_of(shape.keys);
    std::int64_t first = 0;
    const std::size_t rows = shape.lengths.size() * static_cast<std::size_t>(shape.kv_heads);
    keys.resize(rows), scales.resize(rows), plain.resize(rows), positions.resize(rows), tallies.resize(rows);
    given_scores.resize(rows);
    rings.resize(shape.lengths.size());
    for (std::size_t g = 0; g < shape.lengths.size(); ++g) {
      RowGroup group;
      group.sequence = static_cast<std::int32_t>(g);
      group.layer = static_cast<std::int32_t>(g % spec.layers.size());
      group.first_row = static_cast<std::int64_t>(g) * shape.kv_heads;
      const std::int32_t longest = shape.lengths[g];
      group.next_position = longest + (shape.gaps ? random_.between(0, longest) : 0);
      const std::int32_t seen = std::min(shape.seen, group.next_position);
      for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
        const std::size_t r = table.rows.size();
        Row row;
        row.sequence = group.sequence;
        row.layer = group.layer;
        row.head = h;
        row.length = shape.ragged && longest > 0 ? random_.between(1, longest) : longest;
        row.first = first;
        first += row.length;
        fill(r, row.length);
        place(r, row.length, group.next_position, seen);
        table.rows.push_back(row);
        const std::int32_t budget = row.length == 0 ? 0 : random_.between(1, row.length);
        limits.rows.push_back(
            {budget, true, protect(row.length, budget, random_.between(0, 4), random_.between(0, 8), Variant::strict)});
      }
      ask(g, group, seen);
      table.groups.push_back(group);
    }
    table.slots = first;
    settle();
  }

  /// Points the rows at the keys, positions and tallies as they are now.
  void settle() {
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      Row& row = table.rows[r];
      const std::int64_t width = shape.dim * element_size(table.key_dtype);
      row.keys = {is_8bit(shape.keys) ? reinterpret_cast<std::byte*>(plain[r].data()) : keys[r].data(), width, width};
      row.positions = positions[r].data();
      row.tally = tallies[r].empty() ? nullptr : tallies[r].data();
      row.tally_length = static_cast<std::int32_t>(tallies[r].size());
      row.given = given_scores[r].empty() ? nullptr : given_scores[r].data();
      row.given_length = static_cast<std::int32_t>(given_scores[r].size());
    }
    for (std::size_t g = 0; g < table.groups.size(); ++g) {
      table.groups[g].queries.data = rings[g].data.data();
      table.groups[g].queries.positions = rings[g].positions.data();
    }
  }

  /// Writes component d of a slot.
  void set_key(std::size_t r, std::int64_t t, std::int64_t d, float x) {
    const std::int64_t at = t * shape.dim + d;
    const float scale = scales[r].empty() ? 1.0F : scales[r][static_cast<std::size_t>(t)];
    plain[r][static_cast<std::size_t>(at)] =
        store(x / scale, shape.keys, keys[r].data() + at * element_bytes(shape.keys)) * scale;
  }
  void copy_key(std::size_t r, std::int64_t from, std::int64_t to) {
    if (!scales[r].empty()) scales[r][static_cast<std::size_t>(to)] = scales[r][static_cast<std::size_t>(from)];
    for (std::int64_t d = 0; d < shape.dim; ++d)
      set_key(r, to, d, plain[r][static_cast<std::size_t>(from * shape.dim + d)]);
  }

  [[nodiscard]] Evidence evidence() const {
    return {spec, table, shape.pre_rope ? QueryBasis::pre_rope : QueryBasis::post_rope};
  }
  [[nodiscard]] std::string description() const {
    return text("group ", shape.group, ", kv heads ", shape.kv_heads, ", D ", shape.dim, ", ", name_of(shape.keys),
                " keys, ", name_of(shape.query), " queries, seen ", shape.seen, ", first length ",
                shape.lengths.empty() ? 0 : shape.lengths[0]);
  }

  struct Ring {
    std::vector<std::byte> data;
    std::vector<std::int32_t> positions;
  };
  EvidenceShape shape;
  ModelSpec spec;
  RowTable table;
  Limits limits;
  std::vector<std::vector<std::byte>> keys;       ///< [rows] as stored
  std::vector<std::vector<float>> scales, plain;  ///< [rows] scales of 8-bit keys; the keys as f32
  std::vector<std::vector<std::int32_t>> positions;
  std::vector<std::vector<float>> tallies;       ///< [rows] of the oldest slots; empty: none
  std::vector<std::vector<float>> given_scores;  ///< [rows] given scores of the oldest slots; empty: none
  std::vector<Ring> rings;

 private:
  void fill(std::size_t r, std::int32_t length) {
    keys[r].resize(static_cast<std::size_t>(length * shape.dim * element_bytes(shape.keys)));
    plain[r].resize(static_cast<std::size_t>(length) * static_cast<std::size_t>(shape.dim));
    for (std::int32_t t = 0; t < length; ++t) {
      if (is_8bit(shape.keys)) scales[r].push_back(static_cast<float>(std::exp(random_.normal())) * 0.02F);
      for (std::int32_t d = 0; d < shape.dim; ++d)
        set_key(r, t, d, static_cast<float>(shape.loudness * random_.normal()));
    }
  }
  void place(std::size_t r, std::int32_t length, std::int32_t next, std::int32_t seen) {
    const std::int32_t fresh = std::min({length, seen, random_.between(0, seen)});
    std::vector<std::int32_t> all(static_cast<std::size_t>(next - fresh));
    std::iota(all.begin(), all.end(), 0);
    for (std::int32_t left = next - length; left > 0; --left)
      all.erase(all.begin() + random_.between(0, static_cast<std::int32_t>(all.size()) - 1));
    for (std::int32_t p = next - fresh; p < next; ++p) all.push_back(p);
    positions[r] = all;
  }
  void ask(std::size_t g, RowGroup& group, std::int32_t seen) {
    const std::int64_t size = element_bytes(shape.query), head_stride = (shape.dim + random_.between(0, 1)) * size,
                       token_stride = spec.query_heads * head_stride + random_.between(0, 3) * size;
    Ring& ring = rings[g];
    QueryView& view = group.queries;
    view = {.data = nullptr,
            .dtype = dtype_of(shape.query),
            .token_stride = token_stride,
            .head_stride = head_stride,
            .positions = nullptr,
            .ring = seen + random_.between(0, 3),
            .begin = 0,
            .count = seen};
    view.begin = view.ring == 0 ? 0 : random_.between(0, view.ring - 1);
    ring.data.assign(static_cast<std::size_t>(view.ring * token_stride), std::byte{0xFF});
    ring.positions.assign(static_cast<std::size_t>(view.ring), -1);
    for (std::int32_t i = 0; i < seen; ++i) {
      ring.positions[static_cast<std::size_t>(view.index(i))] = group.next_position - seen + i;
      for (std::int32_t h = 0; h < spec.query_heads; ++h)
        for (std::int32_t d = 0; d < shape.dim; ++d)
          store(static_cast<float>(1.5 * random_.normal()), shape.query,
                ring.data.data() + view.index(i) * token_stride + h * head_stride + d * size);
    }
  }

  oracle::Random random_;
};

/// How rows lie on the device.
struct DeviceLayout {
  std::int64_t gap = 0;   ///< bytes between the vectors of two slots
  std::int32_t page = 0;  ///< slots of a page; 0: dense
};

/// An EvidenceCase on the device.
class DeviceEvidence {
 public:
  DeviceEvidence(const EvidenceCase& from, DeviceLayout layout = {})
      : from_(from),
        bytes_(pack(from, layout)),
        scales_(packed_scales_),
        pages_(page_table_),
        positions_(flat(from.positions)),
        tallies_(flat(from.tallies)),
        given_(flat(from.given_scores)),
        limits_(from.limits.rows),
        rows_(from.table.rows.size()),
        rings_(flat_rings(from)),
        ring_positions_(flat_ring_positions(from)),
        queries_(from.table.groups.size()),
        ropes_(ropes_of(from)),
        sinks_(sinks_of(from)) {
    std::vector<Row> rows = from.table.rows;
    const std::int64_t width = from.shape.dim * element_bytes(from.shape.keys), stride = width + layout.gap;
    std::int64_t slot = 0, table = 0, position = 0, tally = 0, given = 0;
    for (Row& row : rows) {
      row.positions = positions_.data() + position;
      position += row.length;
      row.tally = row.tally_length == 0 ? nullptr : tallies_.data() + tally;
      tally += row.tally_length;
      row.given = row.given_length == 0 ? nullptr : given_.data() + given;
      given += row.given_length;
      const auto side = [&](std::byte* base, std::int64_t each, std::int64_t wide) {
        SlotAddress a{base, each, wide};
        if (layout.page > 0)
          a.pages = pages_.data() + table, a.page_stride = each * layout.page,
          a.page_shift = std::countr_zero(static_cast<unsigned>(layout.page));
        else
          a.base += slot * each;
        return a;
      };
      row.keys = side(bytes_.data(), stride, width);
      row.values = {};
      if (is_8bit(from.shape.keys)) row.key_scales = side(reinterpret_cast<std::byte*>(scales_.data()), 4, 4);
      slot += row.length;
      if (layout.page > 0) table += (row.length + layout.page - 1) / layout.page;
    }
    rows_.upload(rows);
    std::vector<QueryView> windows;
    std::int64_t ring = 0, token = 0;
    for (std::size_t g = 0; g < from.table.groups.size(); ++g) {
      const QueryView& v = from.table.groups[g].queries;
      windows.push_back(v);
      windows.back().data = rings_.data() + ring;
      windows.back().positions = ring_positions_.data() + token;
      ring += static_cast<std::int64_t>(from.rings[g].data.size());
      token += v.ring;
    }
    queries_.upload(windows);
  }

  [[nodiscard]] EvidenceArguments arguments() const {
    std::int32_t longest = 0;
    for (const Row& row : from_.table.rows) longest = std::max(longest, row.length);
    return {.rows = rows_.data(),
            .limits = limits_.data(),
            .queries = queries_.data(),
            .ropes = from_.spec.rope.inv_freq.empty() && from_.spec.num_layers() == 1 ? nullptr : ropes_.data(),
            .count = static_cast<std::int32_t>(from_.table.rows.size()),
            .longest = longest,
            .kv_heads = from_.shape.kv_heads,
            .group = from_.shape.group,
            .dim = from_.shape.dim,
            .keys = from_.shape.keys,
            .query = from_.shape.query,
            .scale = static_cast<float>(from_.spec.scale()),
            .logit_cap = static_cast<float>(from_.spec.logit_cap),
            .sinks = from_.spec.layers[0].sinks.empty() ? nullptr : sinks_.data()};
  }
  [[nodiscard]] std::vector<Row> rows() const { return rows_.download(); }  ///< as the device has them
  [[nodiscard]] std::vector<QueryView> queries() const { return queries_.download(); }

 private:
  std::vector<RopeView> ropes_of(const EvidenceCase& from) {
    std::vector<RopeView> all;
    for (const RowGroup& group : from.table.groups) {
      const RopeSpec& rope = from.spec.rope_of(group.layer);
      inv_freq_.push_back(std::make_unique<DeviceArray<double>>(rope.inv_freq));
      all.push_back(rope.view(inv_freq_.back()->data()));
    }
    return all;
  }
  static std::vector<float> sinks_of(const EvidenceCase& from) {
    std::vector<float> all;
    for (const LayerSpec& layer : from.spec.layers) all.insert(all.end(), layer.sinks.begin(), layer.sinks.end());
    return all;
  }
  std::vector<std::byte> pack(const EvidenceCase& from, DeviceLayout layout) {
    const std::int64_t width = from.shape.dim * element_bytes(from.shape.keys), stride = width + layout.gap;
    std::int64_t places = from.table.slots;
    if (layout.page > 0) {
      std::int64_t pages = 0;
      for (const Row& row : from.table.rows) pages += (row.length + layout.page - 1) / layout.page;
      page_table_.resize(static_cast<std::size_t>(pages));
      std::iota(page_table_.begin(), page_table_.end(), 1);  // page 0 belongs to nobody
      oracle::Random random(static_cast<std::uint64_t>(pages));
      for (std::size_t i = page_table_.size(); i > 1; --i)
        std::swap(page_table_[i - 1],
                  page_table_[static_cast<std::size_t>(random.between(0, static_cast<std::int32_t>(i) - 1))]);
      places = (pages + 1) * layout.page;
    }
    std::vector<std::byte> bytes(static_cast<std::size_t>(places * stride), std::byte{0xFF});
    packed_scales_.assign(is_8bit(from.shape.keys) ? static_cast<std::size_t>(places) : 0, std::nanf(""));
    std::int64_t slot = 0, table = 0;
    for (std::size_t r = 0; r < from.table.rows.size(); ++r) {
      const std::int32_t length = from.table.rows[r].length;
      for (std::int32_t t = 0; t < length; ++t) {
        const std::int64_t at =
            layout.page == 0
                ? slot + t
                : std::int64_t{page_table_[static_cast<std::size_t>(table + t / layout.page)]} * layout.page +
                      t % layout.page;
        std::copy_n(from.keys[r].data() + t * width, width, bytes.data() + at * stride);
        if (!packed_scales_.empty())
          packed_scales_[static_cast<std::size_t>(at)] = from.scales[r][static_cast<std::size_t>(t)];
      }
      slot += length;
      if (layout.page > 0) table += (length + layout.page - 1) / layout.page;
    }
    return bytes;
  }
  template <class T>
  static std::vector<T> flat(const std::vector<std::vector<T>>& parts) {
    std::vector<T> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  }
  static std::vector<std::byte> flat_rings(const EvidenceCase& from) {
    std::vector<std::byte> all;
    for (const auto& ring : from.rings) all.insert(all.end(), ring.data.begin(), ring.data.end());
    return all;
  }
  static std::vector<std::int32_t> flat_ring_positions(const EvidenceCase& from) {
    std::vector<std::int32_t> all;
    for (const auto& ring : from.rings) all.insert(all.end(), ring.positions.begin(), ring.positions.end());
    return all;
  }

  const EvidenceCase& from_;
  std::vector<std::int32_t> page_table_;
  std::vector<float> packed_scales_;
  DeviceArray<std::byte> bytes_;
  DeviceArray<float> scales_;
  DeviceArray<std::int32_t> pages_, positions_;
  DeviceArray<float> tallies_, given_;
  DeviceArray<RowLimit> limits_;
  DeviceArray<Row> rows_;
  DeviceArray<std::byte> rings_;
  DeviceArray<std::int32_t> ring_positions_;
  DeviceArray<QueryView> queries_;
  std::vector<std::unique_ptr<DeviceArray<double>>> inv_freq_;  ///< by group
  DeviceArray<RopeView> ropes_;
  DeviceArray<float> sinks_;
};

constexpr float kUntouched = -12345.0F;  ///< what results hold before a kernel runs

/// Every slot of every due row within the tolerance, but those that are guarded where they do not matter; every other
/// slot untouched. A NaN of one must be a NaN of the other.
inline void expect_rows_agree(const EvidenceCase& c, const std::vector<float>& got, const float* want, double absolute,
                              double relative, bool guarded_too = true) {
  for (std::size_t r = 0; r < c.table.rows.size(); ++r) {
    const Row& row = c.table.rows[r];
    for (std::int32_t t = 0; t < row.length; ++t) {
      const float g = got[static_cast<std::size_t>(row.first + t)];
      if (!c.limits.rows[r].due) {
        ASSERT_EQ(g, kUntouched) << "row " << r << " is not due; " << c.description();
        continue;
      }
      if (!guarded_too && c.limits.rows[r].guarded.holds(t, row.length)) continue;
      const float w = want[row.first + t];
      if (std::isinf(w) && g == w) continue;
      if (std::isnan(w)) {
        ASSERT_TRUE(std::isnan(g)) << "row " << r << ", slot " << t << "; " << c.description();
      } else {
        ASSERT_NEAR(g, w, absolute + relative * std::abs(static_cast<double>(w)))
            << "row " << r << ", slot " << t << " of " << row.length << "; " << c.description();
      }
    }
  }
}

}  // namespace kvkeep::cuda
