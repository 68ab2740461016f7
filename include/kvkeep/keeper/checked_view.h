// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The view of a step: what a keeper checks of it besides lengths, and counts in it.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/parts/part.h"

namespace kvkeep {
namespace keeper_detail {

/// K and V bytes of the live slots of all full layers.
inline std::int64_t live_bytes(const Sequences& sequences, const BoundCache& cache, const CacheView& view) {
  const std::int32_t heads = sequences.spec().kv_heads;
  std::int64_t bytes = 0;
  for (std::size_t l = 0; l < cache.slot_bytes.size(); ++l) {
    std::int64_t slots = 0;
    for (std::size_t i = 0; i < view.sequences.size(); ++i)
      for (std::int32_t h = 0; h < heads; ++h) slots += view.lengths.at(i, sequences.full_layers()[l] * heads + h);
    bytes += cache.slot_bytes[l] * slots;
  }
  return bytes;
}

/// Calls body(page) for the pages that the i-th sequence of the view holds, by its longest row.
template <class Body>
void each_page(const Sequences& sequences, const CacheView& view, std::size_t i, std::int64_t page_size,
               const Body& body) {
  const std::int32_t heads = sequences.spec().kv_heads;
  std::int64_t longest = 0;
  for (const std::int32_t l : sequences.full_layers())
    for (std::int32_t h = 0; h < heads; ++h)
      longest = std::max<std::int64_t>(longest, view.lengths.at(i, l * heads + h));
  const std::int64_t held = std::min((longest + page_size - 1) / page_size, view.block_table.size(1));
  const BlockTable blocks(view);
  for (std::int64_t p = 0; p < held; ++p) body(blocks.page(static_cast<std::int64_t>(i), p));
}

}  // namespace keeper_detail

class CheckedView {
 public:
  /// Throws InvalidArgument for a view that does not fit the model or the cache, and for two sequences at one place. On
  /// every step, not only at events.
  void check(const Sequences& sequences, const BoundCache& cache, const CacheView& view);
  /// Throws InvalidArgument if, among the sequences that are due, the block table names a page twice for one, or more
  /// often than it has holders.
  void check_pages(const Sequences& sequences, const BoundCache& cache, const CacheView& view, const RowTable& table);
  /// [pages that all layers have] how often the block table names each. Valid until the next call.
  std::span<std::int32_t> count_holders(const Sequences& sequences, const BoundCache& cache, const CacheView& view);

 private:
  std::vector<bool> places_;  ///< [places of the cache] named by the view
  std::vector<std::int32_t> holders_;
  std::vector<std::int32_t> in_row_;  ///< [pages] the sequence of the view that named each last
};

inline void CheckedView::check(const Sequences& sequences, const BoundCache& cache, const CacheView& view) {
  check_view(sequences.spec(), cache.form, view);
  for (const std::int32_t l : sequences.full_layers()) {
    const LayerSides sides = sides_of(cache.layers[static_cast<std::size_t>(l)]);
    for (std::size_t i = 0; i < view.sequences.size(); ++i) check_fits(sequences.spec(), sides, l, cache.form, view, i);
  }
  const auto* dense = std::get_if<DenseKv>(&cache.layers[static_cast<std::size_t>(sequences.full_layers().front())]);
  if (dense == nullptr || view.places.empty()) return;
  const std::int64_t batch = dense->keys.size(0);
  places_.assign(static_cast<std::size_t>(batch), false);
  for (std::size_t i = 0; i < view.places.size(); ++i) {
    const std::int32_t place = view.places[i];
    KVKEEP_REQUIRE(
        !places_[static_cast<std::size_t>(place)], "cache: sequences ",
        view.sequences[static_cast<std::size_t>(std::ranges::find(view.places, place) - view.places.begin())], " and ",
        view.sequences[i], " are both at place ", place, "; allowed one place per sequence");
    places_[static_cast<std::size_t>(place)] = true;
  }
}

inline std::span<std::int32_t> CheckedView::count_holders(const Sequences& sequences, const BoundCache& cache,
                                                          const CacheView& view) {
  std::int64_t pages = std::numeric_limits<std::int64_t>::max();
  for (const std::int32_t l : sequences.full_layers())
    pages = std::min(pages, std::get<PagedKv>(cache.layers[static_cast<std::size_t>(l)]).keys.size(0));
  holders_.assign(static_cast<std::size_t>(pages), 0);
  for (std::size_t i = 0; i < view.sequences.size(); ++i)
    keeper_detail::each_page(sequences, view, i, cache.form.page_size, [&](std::int64_t page) {
      if (page >= 0 && page < pages) ++holders_[static_cast<std::size_t>(page)];
    });
  return holders_;
}

inline void CheckedView::check_pages(const Sequences& sequences, const BoundCache& cache, const CacheView& view,
                                     const RowTable& table) {
  if (table.page_size == 0) return;
  count_holders(sequences, cache, view);
  in_row_.assign(holders_.size(), -1);
  for (const RowGroup& group : table.groups) {
    if (group.layer != table.groups.front().layer) break;  // the same in every layer
    const auto sequence = static_cast<std::size_t>(group.sequence);
    keeper_detail::each_page(sequences, view, sequence, table.page_size, [&](std::int64_t page) {
      if (page < 0 || page >= std::ssize(holders_)) return;
      KVKEEP_REQUIRE(std::exchange(in_row_[static_cast<std::size_t>(page)], group.sequence) != group.sequence,
                     "cache: the block table names page ", page, " twice for sequence ", view.sequences[sequence],
                     "; allowed once");
      const std::int32_t named = holders_[static_cast<std::size_t>(page)];
      if (named == 0 || (named == 1 && view.pages == nullptr)) return;
      const std::int32_t held = view.pages == nullptr ? 1 : view.pages->references(static_cast<std::int32_t>(page));
      KVKEEP_REQUIRE(named <= held, "cache: the block table names page ", page, " of sequence ",
                     view.sequences[sequence], named == 1 ? "" : text(" ", named, " times"), ", and ", held,
                     view.pages == nullptr ? " may hold it (without a PageAllocator)" : " hold it",
                     "; allowed at most once per holder");
    });
  }
}

}  // namespace kvkeep
