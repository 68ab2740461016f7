// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Compaction: kept slots move to the front of their row, in order. The only writer of K and V.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kvkeep/core/decision.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/row.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/pages.h"
#include "kvkeep/simd/stream_lanes.h"

namespace kvkeep {

/// Moves slot `kept[j]` to slot j for every j, ascending, in place: since kept[j] >= j no unread slot is overwritten.
/// Bytes are opaque, so any dtype works. Requires: `kept` ascending, unique, inside the row. Cost: kept.size() * width
/// bytes read and written, less the slots that are already in place.
void compact_slots(const SlotAddress& side, std::span<const std::int32_t> kept);

/// Bytes of K, V and scales that `compact` will read; it will write as many. An upper bound if the slots are on a
/// device.
[[nodiscard]] std::int64_t bytes_to_move(const RowTable& table, const KeepSet& keep,
                                         std::span<const PageMove> moves = {});
/// The same of one row that keeps its pages.
[[nodiscard]] std::int64_t bytes_to_move(const RowTable& table, const KeepSet& keep, std::size_t row);

/// Compacts K, V and their scales of every row in one parallel pass. Rows in pages move to the pages that `moves` names
/// for their sequence; a sequence without a move keeps its pages in their order. Throws InvalidArgument, before the
/// first byte moves, if `keep` does not fit the rows: wrong row count, slots out of range or not ascending.
void compact(const RowTable& table, const KeepSet& keep, std::span<const PageMove> moves = {});

// Re-rotation: rotates cached keys from one position to another. Opt-in: kept keys keep their rotation by default.
// Source: StreamingLLM counts positions inside the cache; the KeyRerotation wrapper of kvpress does the same after
// compression. Differs: starts from the stored position of each slot, so it is right at every event, not only at the
// first.

/// Rotates the key of slot s from position `from[s]` to `to[s]`, in place, in fp32, for f32, f16 or bf16 keys of `dim`
/// components. A slot whose positions are equal keeps its bytes, so a second call with the same target changes nothing.
/// The attention scaling that a YaRN key already has is unchanged. Throws InvalidArgument, before the first key
/// changes, for a dtype that cannot be read, spans of unequal length, or more rotary pairs than dim / 2. Cost: one
/// sine-cosine pair in double per rotary pair of each slot that is rotated.
inline void rerotate(const SlotAddress& keys, Dtype dtype, std::int64_t dim, const RopeSpec& rope,
                     std::span<const std::int32_t> from, std::span<const std::int32_t> to) {
  KVKEEP_REQUIRE(from.size() == to.size(), "rerotate: ", from.size(), " old and ", to.size(),
                 " new positions; allowed one of each for every slot");
  KVKEEP_REQUIRE(rope.rotary_dim() <= dim, "rerotate: ", rope.inv_freq.size(), " rotary pairs for keys of ", dim,
                 " components; allowed at most ", dim / 2);
  with_dtype("rerotate", dtype, [&](auto type) {
    using Element = decltype(type);
    const auto pairs = static_cast<std::int64_t>(rope.inv_freq.size());
    for (std::size_t s = 0; s < from.size(); ++s) {
      if (from[s] == to[s]) continue;
      auto* key = reinterpret_cast<Element*>(keys.at(static_cast<std::int64_t>(s)));
      for (std::int64_t f = 0; f < pairs; ++f) {
        const double angle = rope_angle(std::int64_t{to[s]} - from[s], rope.inv_freq[static_cast<std::size_t>(f)]);
        const double cosine = std::cos(angle), sine = std::sin(angle);
        const auto [i, j] = rope_pair(rope.style, f, pairs);
        const auto a = static_cast<double>(static_cast<float>(key[i])),
                   b = static_cast<double>(static_cast<float>(key[j]));
        key[i] = static_cast<Element>(static_cast<float>(product(a, cosine) - product(b, sine)));
        key[j] = static_cast<Element>(static_cast<float>(product(b, cosine) + product(a, sine)));
      }
    }
  });
}

namespace compact_detail {

/// Events that move more than this write past the caches: the overwritten bytes need not be read first, and nobody
/// reads the new ones soon.
inline constexpr std::int64_t kCachedBytes = std::int64_t{16} << 20;

/// Calls move(to, from, bytes) for every run of neighbouring kept slots that is not in place yet, ascending. `to`: the
/// side as it will be.
template <class Move>
void move_runs(const SlotAddress& side, const SlotAddress& to, std::span<const std::int32_t> kept, const Move& move) {
  const bool packed = side.stride == side.width;
  for (std::size_t j = 0; j < kept.size();) {
    const auto slot = static_cast<std::int64_t>(j);
    std::size_t run = 1;
    if (packed) {
      const auto most = static_cast<std::size_t>(
          std::min<std::int64_t>({side.run(kept[j]), to.run(slot), static_cast<std::int64_t>(kept.size() - j)}));
      while (run < most && kept[j + run] == kept[j] + static_cast<std::int32_t>(run)) ++run;
    }
    std::byte *destination = to.at(slot), *source = side.at(kept[j]);
    if (destination != source) move(destination, source, side.width * static_cast<std::int64_t>(run));
    j += run;
  }
}

/// Where the rows of every sequence go: null for the sequence's own pages.
class Destinations {
 public:
  explicit Destinations(std::span<const PageMove> moves) {
    for (const PageMove& move : moves) {
      if (pages_.size() <= static_cast<std::size_t>(move.sequence))
        pages_.resize(static_cast<std::size_t>(move.sequence) + 1);
      pages_[static_cast<std::size_t>(move.sequence)] = move.after.data();
    }
  }
  [[nodiscard]] SlotAddress of(const Row& row, SlotAddress side) const {
    const auto s = static_cast<std::size_t>(row.sequence);
    if (side.pages != nullptr && s < pages_.size() && pages_[s] != nullptr) side.pages = pages_[s];
    return side;
  }

 private:
  std::vector<const std::int32_t*> pages_;
};

template <class Body>
void each_side(const Row& row, const Body& body) {
  for (int s = 0; s < Row::kSides; ++s)
    if (const SlotAddress* const side = row.side(s)) body(*side);
}

inline std::int64_t bytes_of(const Row& row, const KeepSet& keep, std::size_t r, const Destinations& destinations) {
  if (!keep.in_place.empty()) return (keep.count(r) - keep.in_place[r]) * row.slot_bytes();
  const SlotAddress from = row.keys, to = destinations.of(row, from);
  const auto kept = keep.row(r);
  std::int64_t slots = 0;
  for (std::size_t j = 0; j < kept.size(); ++j)
    slots += from.at(kept[j]) != to.at(static_cast<std::int64_t>(j)) ? 1 : 0;
  return slots * row.slot_bytes();
}

inline void check(const RowTable& table, const KeepSet& keep) {
  KVKEEP_REQUIRE(keep.indptr.size() == table.rows.size() + 1, "compact: the keep set covers ",
                 static_cast<std::int64_t>(keep.indptr.size()) - 1, " rows; given ", table.rows.size(), " rows");
  for (std::size_t r = 0; r < table.rows.size(); ++r)
    require_ascending(keep.row(r), table.rows[r].length, [r] { return text("compact: it keeps slots of row ", r); });
}

}  // namespace compact_detail

inline void compact_slots(const SlotAddress& side, std::span<const std::int32_t> kept) {
  compact_detail::move_runs(side, side, kept, [](std::byte* to, const std::byte* from, std::int64_t bytes) {
    std::memmove(to, from, static_cast<std::size_t>(bytes));
  });
}

inline std::int64_t bytes_to_move(const RowTable& table, const KeepSet& keep, std::span<const PageMove> moves) {
  const compact_detail::Destinations destinations(moves);
  std::int64_t bytes = 0;
  for (std::size_t r = 0; r < table.rows.size(); ++r)
    bytes += compact_detail::bytes_of(table.rows[r], keep, r, destinations);
  return bytes;
}

inline std::int64_t bytes_to_move(const RowTable& table, const KeepSet& keep, std::size_t row) {
  return compact_detail::bytes_of(table.rows[row], keep, row, compact_detail::Destinations({}));
}

inline void compact(const RowTable& table, const KeepSet& keep, std::span<const PageMove> moves) {
  require_host("compact", table.device);
  compact_detail::check(table, keep);
  const compact_detail::Destinations destinations(moves);
  const bool stream = bytes_to_move(table, keep, moves) > compact_detail::kCachedBytes;
  parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r)
      compact_detail::each_side(table.rows[r], [&](const SlotAddress& side) {
        const SlotAddress to = destinations.of(table.rows[r], side);
        if (stream)
          compact_detail::move_runs(side, to, keep.row(r), cpu::stream_forward);
        else
          compact_detail::move_runs(side, to, keep.row(r),
                                    [](std::byte* at, const std::byte* from, std::int64_t bytes) {
                                      std::memmove(at, from, static_cast<std::size_t>(bytes));
                                    });
      });
    if (stream) cpu::flush_streams();
  });
}

}  // namespace kvkeep
