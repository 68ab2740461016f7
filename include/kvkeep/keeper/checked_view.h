#pragma once
/// The view of a step: what a keeper checks of it besides lengths, and counts in it.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <variant>
#include <vector>

#include "kvkeep/core/cache_layout.h"
#include "kvkeep/core/page_allocator.h"
#include "kvkeep/parts/part.h"

namespace kvkeep {
namespace keeper_detail {

/// K and V bytes of one slot of one head, scales included.
inline std::int64_t slot_bytes(const ModelSpec& spec, const LayerKv& layer) {
  const auto of = [&spec](const auto& kv) -> std::int64_t {
    if constexpr (std::is_same_v<std::decay_t<decltype(kv)>, std::monostate>) {
      return 0;
    } else {
      const auto bytes = [](const Tensor& t, std::int64_t numbers) {
        return t.defined() ? numbers * t.element_size() : 0;
      };
      return bytes(kv.keys, spec.key_dim) + (lies_within(kv.values, kv.keys) ? 0 : bytes(kv.values, spec.value_dim)) +
             bytes(kv.key_scales, 1) + (lies_within(kv.value_scales, kv.key_scales) ? 0 : bytes(kv.value_scales, 1));
    }
  };
  return std::visit(of, layer);
}

/// K and V bytes of the live slots of all full layers.
inline std::int64_t live_bytes(const Sequences& sequences, const CacheView& view) {
  const ModelSpec& spec = sequences.spec();
  std::int64_t bytes = 0;
  for (const std::int32_t l : sequences.full_layers()) {
    std::int64_t slots = 0;
    for (std::size_t i = 0; i < view.sequences.size(); ++i)
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) slots += view.lengths.at(i, l * spec.kv_heads + h);
    bytes += slot_bytes(spec, view.layers[static_cast<std::size_t>(l)]) * slots;
  }
  return bytes;
}

/// The pages that the i-th sequence of the view holds, by its longest row.
inline std::span<const std::int32_t> pages_of(const Sequences& sequences, const CacheView& view, std::size_t i,
                                              std::int64_t page_size) {
  const std::int32_t heads = sequences.spec().kv_heads;
  std::int64_t longest = 0;
  for (const std::int32_t l : sequences.full_layers())
    for (std::int32_t h = 0; h < heads; ++h)
      longest = std::max<std::int64_t>(longest, view.lengths.at(i, l * heads + h));
  const std::int64_t held = std::min((longest + page_size - 1) / page_size, view.block_table.size(1));
  return {view.block_table.data<std::int32_t>() + static_cast<std::int64_t>(i) * view.block_table.stride(0),
          static_cast<std::size_t>(held)};
}

}  // namespace keeper_detail

class CheckedView {
 public:
  /// Throws InvalidArgument for a view that does not match the model, or is not on `there`; for two sequences at one
  /// place; and, if rows may move, as CacheLayout::check(). On every step, not only at events.
  void check(const Sequences& sequences, const CacheView& view, Device there, bool may_move);
  /// Throws InvalidArgument if, among the sequences that are due, the block table names a page more often than it has
  /// holders.
  void check_pages(const Sequences& sequences, const CacheView& view, const RowTable& table);
  /// [pages that all layers have] how often the block table names each. Valid until the next call.
  std::span<std::int32_t> count_holders(const Sequences& sequences, const CacheView& view, std::int64_t page_size);
  /// K and V bytes of one slot in every row; 0 before the first view.
  [[nodiscard]] std::int64_t slot_bytes() const { return slot_bytes_; }

 private:
  void check_places(const Sequences& sequences, const CacheView& view);

  std::int64_t slot_bytes_ = 0;
  std::vector<bool> places_;  ///< [places of the cache] named by the view
  std::vector<std::int32_t> holders_;
  CacheLayout layout_;
};

inline void CheckedView::check(const Sequences& sequences, const CacheView& view, Device there, bool may_move) {
  const ModelSpec& spec = sequences.spec();
  const Device own = make_rows(spec, view, sequences.full_layers(), {}).device;
  KVKEEP_REQUIRE(own == there, "cache: it is on ", own.str(), ", but the keeper works on ", there.str(),
                 "; allowed one device, named by Provided::accelerator if it is not the CPU");
  check_places(sequences, view);
  if (may_move) layout_.check(spec, view);
  slot_bytes_ = 0;
  for (const std::int32_t l : sequences.full_layers())
    slot_bytes_ += spec.kv_heads * keeper_detail::slot_bytes(spec, view.layers[static_cast<std::size_t>(l)]);
}

inline void CheckedView::check_places(const Sequences& sequences, const CacheView& view) {
  const auto* dense = std::get_if<DenseKv>(&view.layers[static_cast<std::size_t>(sequences.full_layers().front())]);
  if (dense == nullptr || view.places.empty()) return;
  const std::int64_t batch = dense->keys.size(0);
  places_.assign(static_cast<std::size_t>(batch), false);
  for (std::size_t i = 0; i < view.places.size(); ++i) {
    const std::int32_t place = view.places[i];
    KVKEEP_REQUIRE(place >= 0 && place < batch, "cache: sequence ", view.sequences[i], " is at place ", place,
                   " of the batch; allowed 0 to ", batch - 1);
    KVKEEP_REQUIRE(
        !places_[static_cast<std::size_t>(place)], "cache: sequences ",
        view.sequences[static_cast<std::size_t>(std::ranges::find(view.places, place) - view.places.begin())], " and ",
        view.sequences[i], " are both at place ", place, "; allowed one place per sequence");
    places_[static_cast<std::size_t>(place)] = true;
  }
}

inline std::span<std::int32_t> CheckedView::count_holders(const Sequences& sequences, const CacheView& view,
                                                          std::int64_t page_size) {
  std::int64_t pages = std::numeric_limits<std::int64_t>::max();
  for (const std::int32_t l : sequences.full_layers())
    pages = std::min(pages, std::get<PagedKv>(view.layers[static_cast<std::size_t>(l)]).keys.size(0));
  holders_.assign(static_cast<std::size_t>(pages), 0);
  for (std::size_t i = 0; i < view.sequences.size(); ++i)
    for (const std::int32_t page : keeper_detail::pages_of(sequences, view, i, page_size))
      if (page >= 0 && page < pages) ++holders_[static_cast<std::size_t>(page)];
  return holders_;
}

inline void CheckedView::check_pages(const Sequences& sequences, const CacheView& view, const RowTable& table) {
  if (table.page_size == 0) return;
  count_holders(sequences, view, table.page_size);
  for (const RowGroup& group : table.groups) {
    if (group.layer != table.groups.front().layer) break;  // the same in every layer
    for (const std::int32_t page :
         keeper_detail::pages_of(sequences, view, static_cast<std::size_t>(group.sequence), table.page_size)) {
      const std::int32_t named =
          page >= 0 && page < std::ssize(holders_) ? holders_[static_cast<std::size_t>(page)] : 0;
      if (named == 0 || (named == 1 && view.pages == nullptr)) continue;
      const std::int32_t held = view.pages == nullptr ? 1 : view.pages->references(page);
      KVKEEP_REQUIRE(named <= held, "cache: the block table names page ", page, " of sequence ",
                     view.sequences[static_cast<std::size_t>(group.sequence)],
                     named == 1 ? "" : text(" ", named, " times"), ", and ", held,
                     view.pages == nullptr ? " may hold it (without a PageAllocator)" : " hold it",
                     "; allowed at most once per holder");
    }
  }
}

}  // namespace kvkeep
